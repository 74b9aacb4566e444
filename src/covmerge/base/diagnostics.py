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

    In covmerge.json a fact has the name of its field; a field that is None is left out. All fields have
    defaults, because files of older versions may lack some.

    Attributes:
        summaries: how the facts are summarised over all matrices of a merge.
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
        """Whether the method's gate on γ put the experts on one scale; None: the method has no gate."""
        return None

    @property
    def arbitrary_result(self) -> bool:
        """Whether rounding alone decides the result, as where the order of equal values matters."""
        return False

    @property
    def length_in_outputs(self) -> float | None:
        """The norm of what the merged update adds to the outputs, relative to all experts together.

        None: the method compares the norms of weights instead.
        """
        return None

    def report_columns(self, experts: Sequence[str]) -> Mapping[str, str | float | None]:
        """Return the cells of one matrix in a report's table, by heading; by default none."""
        return {}

    def as_json(self) -> dict[str, Json]:
        """Return the facts as they stand in covmerge.json."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: fact for name, fact in facts.items() if fact is not None}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Read diagnostics from covmerge.json. Facts that are no fields of this class are ignored.

        Raises:
            ValueError: a fact is not of its field's type.
        """
        known = {each.name: facts[each.name] for each in fields(cls) if each.name in facts}
        return _reader(cls).validate_python(known)


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class TensorDiagnostics:
    """One tensor of a merge, and the method's diagnostics of its matrices.

    Attributes:
        tensor: the tensor's name.
        parameters: the method's parameters.
        experts: the names of the experts that were merged.
        matrices: the diagnostics of each matrix, or of each block of rows. A summary sees those of the
            types that list it.
    """

    tensor: str
    parameters: Mapping[str, Any]
    experts: tuple[str, ...]
    matrices: tuple[Any, ...]


class Summary:
    """Summary of one kind of diagnostics over all tensors of a merge. By default it reports nothing.

    One object serves all types of diagnostics that list it among their `summaries`. It sees only the
    tensors that have diagnostics of these types, and only these diagnostics.
    """

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        """Return the entries of `totals` in covmerge.json."""
        return {}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        """Return labels and their values, for the table of a merge and for its report."""
        yield from ()

    def notes(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        """Return facts that are worth knowing."""
        yield from ()

    def warnings(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        """Return what may make the result worse, each with what to do about it."""
        yield from ()


@dataclass(frozen=True)
class MergeSummary:
    """The summary of all diagnostics of a merge."""

    totals: Mapping[str, Json] = field(default_factory=dict[str, Any])
    rows: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __add__(self, other: MergeSummary) -> MergeSummary:
        """Return both summaries, one after the other."""
        return MergeSummary(
            {**self.totals, **other.totals},
            self.rows + other.rows,
            self.notes + other.notes,
            self.warnings + other.warnings,
        )


def summarise(tensors: Sequence[TensorDiagnostics], always: Iterable[Summary] = ()) -> MergeSummary:
    """Return what all summaries report, joined; totals of those in `always` in any case, and first."""
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
    """Return the tensors with diagnostics of the types that list this summary."""
    shown = (
        replace(one, matrices=tuple(m for m in one.matrices if summary in m.summaries))
        for one in diagnostics
    )
    return [one for one in shown if one.matrices]
