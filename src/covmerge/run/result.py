"""What a merge gave: its tensors or its folder, and what was counted and measured on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from covmerge.base.errors import InputError
from covmerge.base.table import Table, Tabular, paragraph, table_html
from covmerge.base.text import counted, some
from covmerge.files.checkpoints.staging import output_path
from covmerge.maths.methods.mergekit import called
from covmerge.plan.recipe import Recipe
from covmerge.run.engine.executor import Span
from covmerge.run.engine.run import Figures
from covmerge.run.verification import Verification


class RunFigures(Figures):
    """Seconds and memory of one merge.

    Attributes:
        resumed_items: pieces of work that an earlier run had done.
        items: pieces of work in all.
        workers: processes that shared it.
        workers_because: why so many, where covmerge chose.
        own_items: of this process, where it is a rank that does not publish; it has no times.
    """

    resumed_items: int
    items: int
    workers: int
    workers_because: NotRequired[str]
    own_items: NotRequired[int]


class Stats(TypedDict):
    """What became of the tensors, as in covmerge.json.

    Attributes:
        totals: counts by rule, the method's diagnostics, norms and what storing loses, over all tensors.
        heads: by expert, the names of its task head.
        rescalers: by expert, the factor beside its masks, of EMR-Merging alone.
        tensors: by tensor: role, rule, dtype, shape, norms, and the method's diagnostics.
    """

    totals: Mapping[str, Any]
    heads: Mapping[str, Sequence[str]]
    rescalers: NotRequired[Mapping[str, float]]
    tensors: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeResult(Tabular):
    """What a merge gave; `MergedTensors` or `MergedFolder`, by where it went.

    Attributes:
        path: the output folder; None for an output in memory, of tensors or of files.
        tensors: merged weights by name; None for a merge to disk.
        masks: per expert, what EMR-Merging masks; empty for every other method and for a merge to
            disk, which has them as files. The factors are `stats["rescalers"]`.
        heads: per expert, its own task head; empty for a merge to disk, which has them as files.
        recipe: what was carried out, its method named.
        stats: per tensor and in total, as in `covmerge.json`.
        run: seconds and memory of this run.
        seconds: of mathematics by tensor, of those that this run merged.
        timeline: when this run counted, read, computed and wrote.
        diagnostics: the method's diagnostics, as text: labels and what stands beside them.
        notes: what the plan and the run want a reader to know.
        warnings: what may make the result worse, and what to do.
        verification: result of re-reading the output, for a merge to disk.
    """

    path: Path | None
    tensors: dict[str, Tensor] | None
    recipe: Recipe
    stats: Stats
    run: RunFigures
    verification: Verification | None
    heads: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict[str, Mapping[str, Tensor]]
    )
    diagnostics: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    timeline: tuple[Span, ...] = ()
    masks: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict[str, Mapping[str, Tensor]]
    )

    def __repr__(self) -> str:
        recipe, count = self.recipe, len(self.stats["tensors"])
        into = "" if recipe.base is None else f" on {recipe.base}"
        where = "memory" if self.path is None else str(self.path)
        ok = self.verification is not None and self.verification.ok
        method = called(recipe.method, recipe.parameters)
        return (
            f"<{type(self).__name__}: {some(recipe.experts)}{into} by {method}; "
            f"{counted(count, 'tensor')} in {where}{', verified' if ok else ''}>"
        )

    def table(self) -> Table:
        """One row for each tensor of the output, with its norms where it was merged."""
        entries = self.stats["tensors"]
        experts = list(
            dict.fromkeys(e for entry in entries.values() for e in entry.get("update_norm", ()))
        )
        facts = ("role", "rule", "dtype")
        norms = ("merged_norm", "rounding_loss")
        columns = ("tensor", *facts, "shape", *norms, *(f"update_norm {name}" for name in experts))
        return Table(
            columns,
            tuple(
                (
                    name,
                    *(entry[fact] for fact in facts),
                    "x".join(map(str, entry["shape"])),
                    *(entry.get(norm) for norm in norms),
                    *(entry.get("update_norm", {}).get(expert) for expert in experts),
                )
                for name, entry in entries.items()
            ),
        )

    def html(self) -> str:
        """What a notebook shows."""
        said = [*self.diagnostics, *(("warning", warning) for warning in self.warnings)]
        table = self.table()
        drawn = {name for name in table.columns if "norm" in name}
        return "".join(
            [
                paragraph(repr(self)),
                *(paragraph(f"{label}: {text}") for label, text in said),
                table_html(table, drawn=drawn),
            ]
        )


class Saves(Protocol):
    """Writes the result of a merge in memory."""

    def __call__(self, out: Path, *, overwrite: bool) -> MergedFolder:
        """Write it as a merge to disk would have written it."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class MergedTensors(MergeResult):
    """A merge in memory: it has `tensors`, and no `path`.

    Attributes:
        tensors: by name; where the base is in memory, tied ones too, which are one tensor.
        saver: what `save` calls.
    """

    path: None = None
    tensors: dict[str, Tensor]
    verification: None = None
    saver: Saves | None = field(default=None, compare=False)

    def save(self, out: str | Path, *, overwrite: bool = False) -> MergedFolder:
        """Write a folder, as the same merge with `out` writes it: weights, config, tokenizer, manifest.

        Args:
            out: folder to write, also `s3://` or `gs://`.
            overwrite: replace an earlier output of covmerge.

        Raises:
            InputError: the folder may not be written, or a source or a tensor changed since the merge.
            CheckFailed: the output failed its verification.
        """
        if self.saver is None:
            raise InputError("this result is a copy, which knows no sources: merge with out=FOLDER")
        return self.saver(output_path(out), overwrite=overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles do without the sources."""
        return {**self.__dict__, "saver": None}


@dataclass(frozen=True, kw_only=True, repr=False)
class MergedFolder(MergeResult):
    """A merge to disk: it has no `tensors`; its `path` is None where it went to an address.

    Of several ranks one alone has its `verification`.
    """

    tensors: None = None
