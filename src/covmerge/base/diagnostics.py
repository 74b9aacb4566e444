"""Diagnostics of a matrix, and their summary over a whole merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar

from pydantic import TypeAdapter
from typing_extensions import Self

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True)
class Diagnostics:
    """A method's diagnostics of one matrix. A method derives a type of its own, with a field for each fact.

    In covmerge.json a fact has the name of its field, and is left out where it is None. All fields have
    defaults: what an older version wrote may lack some.

    Attributes:
        summaries: what is said of the facts over all matrices of a merge.
        lengths: names of facts that have the units of the updates.

    Example:
        >>> @dataclass(frozen=True)
        ... class Kept(Diagnostics):
        ...     directions: int | None = None
        ...     solver: str | None = None
        >>> Kept(3).as_json(), Kept.from_json({"directions": 3, "route": "dual"})
        ({'directions': 3}, Kept(directions=3, solver=None))
    """

    summaries: ClassVar[tuple[Summary, ...]] = ()
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

    def report_columns(self, experts: Sequence[str]) -> Mapping[str, str | float | None]:
        """Return what a report's table shows of one matrix, by heading; nothing, unless overridden."""
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
class TensorDiagnostics:
    """One tensor of a merge, and its method's diagnostics in it.

    Attributes:
        tensor: its name.
        parameters: of the method.
        experts: that it was merged from.
        matrices: the diagnostics of each of its matrices, or blocks of rows. A summary sees those of the
            types that list it.
    """

    tensor: str
    parameters: Mapping[str, Any]
    experts: tuple[str, ...]
    matrices: tuple[Any, ...]


class Summary:
    """What is said of one kind of facts over all tensors of a merge; nothing, unless overridden.

    One object serves all types that list it among their `summaries`. It sees the tensors in which there is
    something of these types, and of them nothing else.
    """

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        """What `totals` of covmerge.json has."""
        return {}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        """Labels and what stands beside them, in the table of a merge and in its report."""
        yield from ()

    def notes(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        """What is worth knowing."""
        yield from ()

    def warnings(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        """What may make the result worse, and what to do about it."""
        yield from ()


@dataclass(frozen=True)
class MergeSummary:
    """What is said of all diagnostics of a merge."""

    totals: Mapping[str, Json] = field(default_factory=dict[str, Any])
    rows: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: MergeSummary) -> MergeSummary:
        """Say one after the other."""
        return MergeSummary(
            {**self.totals, **other.totals},
            self.rows + other.rows,
            self.notes + other.notes,
            self.warnings + other.warnings,
        )


def summarise(tensors: Sequence[TensorDiagnostics], always: Iterable[Summary] = ()) -> MergeSummary:
    """Return what all summaries say.

    Args:
        tensors: the diagnostics of each tensor.
        always: summaries with a total also where nothing is of their types; they come first.
    """
    always = tuple(always)
    used = (summary for one in tensors for matrix in one.matrices for summary in matrix.summaries)
    shown = {summary: _of(summary, tensors) for summary in dict.fromkeys((*always, *used))}
    speaking = {summary: found for summary, found in shown.items() if found}
    return MergeSummary(
        {
            key: value
            for summary, found in shown.items()
            for key, value in summary.totals(found).items()
        },
        tuple(row for summary, found in speaking.items() for row in summary.rows(found)),
        tuple(note for summary, found in speaking.items() for note in summary.notes(found)),
        tuple(text for summary, found in speaking.items() for text in summary.warnings(found)),
    )


def _of(summary: Summary, diagnostics: Sequence[TensorDiagnostics]) -> list[TensorDiagnostics]:
    """The tensors with diagnostics of the types that list this summary."""
    shown = (
        replace(one, matrices=tuple(m for m in one.matrices if summary in m.summaries))
        for one in diagnostics
    )
    return [one for one in shown if one.matrices]
