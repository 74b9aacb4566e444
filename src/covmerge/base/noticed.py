"""What a method noticed in a matrix, and what is said of it over a whole merge; below all folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar

from pydantic import TypeAdapter
from typing_extensions import Self

from covmerge.base.json_type import Json


@dataclass(frozen=True)
class Noticed:
    """What a method noticed in one matrix. A method derives a type of its own, a field a fact.

    In covmerge.json a fact has the name of its field, and is left out where it is None. All fields have
    defaults: what an older version wrote may lack some.

    Attributes:
        words: what is said of the facts over all matrices of a merge.
        lengths: names of facts that have the units of the updates.

    Example:
        >>> @dataclass(frozen=True)
        ... class Kept(Noticed):
        ...     directions: int | None = None
        ...     solver: str | None = None
        >>> Kept(3).as_json(), Kept.from_json({"directions": 3, "route": "dual"})
        ({'directions': 3}, Kept(directions=3, solver=None))
    """

    words: ClassVar[tuple[Words, ...]] = ()
    lengths: ClassVar[tuple[str, ...]] = ()

    @property
    def fired(self) -> bool | None:
        """Whether the method's gate on γ put the experts on one scale; None: it has no gate."""
        return None

    @property
    def arbitrary_result(self) -> bool:
        """Whether rounding alone decides the result, as where an order of equals matters."""
        return False

    @property
    def length_in_outputs(self) -> float | None:
        """How long the merged update is beside all experts' together, by what it adds to the outputs.

        None: the method goes by the lengths of weights.
        """
        return None

    def told(self, experts: Sequence[str]) -> Mapping[str, str | float | None]:
        """What a report tells of one matrix, by headings; nothing, unless overridden."""
        return {}

    def as_json(self) -> dict[str, Json]:
        """The facts, as they are in covmerge.json."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: fact for name, fact in facts.items() if fact is not None}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Read them back; facts that are no fields belong to others.

        Raises:
            ValueError: one is not of its type.
        """
        known = {each.name: facts[each.name] for each in fields(cls) if each.name in facts}
        return _reader(cls).validate_python(known)


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class Seen:
    """One tensor of a merge, and what its method noticed in it.

    Attributes:
        tensor: its name.
        parameters: of the method.
        experts: that it was merged from.
        matrices: what was noticed in each of its matrices, or blocks of rows; each a `Noticed`, for words
            one of the types that list them.
    """

    tensor: str
    parameters: Mapping[str, Any]
    experts: tuple[str, ...]
    matrices: tuple[Any, ...]


class Words:
    """What is said of one kind of facts over all tensors of a merge; nothing, unless overridden.

    One object serves all types that list it among their `words`. It is shown the tensors in which there is
    something of these types, and of them nothing else.
    """

    def totals(self, seen: Sequence[Seen]) -> Mapping[str, Json]:
        """What `totals` of covmerge.json has."""
        return {}

    def rows(self, seen: Sequence[Seen]) -> Iterator[tuple[str, str]]:
        """Labels and what stands beside them, in the table of a merge and in its report."""
        yield from ()

    def notes(self, seen: Sequence[Seen]) -> Iterator[str]:
        """What is worth knowing."""
        yield from ()

    def warnings(self, seen: Sequence[Seen]) -> Iterator[str]:
        """What may make the result worse, and what to do about it."""
        yield from ()


@dataclass(frozen=True)
class Account:
    """What is said of all that methods noticed in a merge; see `Words`."""

    totals: Mapping[str, Json] = field(default_factory=dict[str, Any])
    rows: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: Account) -> Account:
        """Say one after the other."""
        return Account(
            {**self.totals, **other.totals},
            self.rows + other.rows,
            self.notes + other.notes,
            self.warnings + other.warnings,
        )


def account_of(seen: Sequence[Seen], always: Iterable[Words] = ()) -> Account:
    """Let all words speak.

    Args:
        seen: what was noticed, by tensor.
        always: words that have a total also where nothing is of their types; they come first.
    """
    always = tuple(always)
    used = (words for one in seen for matrix in one.matrices for words in _words_of(matrix))
    shown = {words: _of(words, seen) for words in dict.fromkeys((*always, *used))}
    speaking = {words: own for words, own in shown.items() if own}
    return Account(
        {key: value for words, own in shown.items() for key, value in words.totals(own).items()},
        tuple(row for words, own in speaking.items() for row in words.rows(own)),
        tuple(note for words, own in speaking.items() for note in words.notes(own)),
        tuple(warning for words, own in speaking.items() for warning in words.warnings(own)),
    )


def _of(words: Words, seen: Sequence[Seen]) -> list[Seen]:
    """What is of the types that list these words."""
    own = (
        replace(one, matrices=tuple(m for m in one.matrices if words in _words_of(m)))
        for one in seen
    )
    return [one for one in own if one.matrices]


def _words_of(noticed: Noticed) -> tuple[Words, ...]:
    return noticed.words
