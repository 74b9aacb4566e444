"""The result of a merge: its tensors or its folder, with counts and measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from covmerge.base.errors import InputError
from covmerge.base.table import Table, Tabular, result_html
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
        resumed_items: number of work items that an earlier run finished.
        items: number of all work items.
        workers: number of processes that shared the work.
        workers_because: reason for the number of workers, if covmerge chose it.
        own_items: number of work items of this process, if it is a rank that does not publish the output;
            such a rank reports no times.
    """

    resumed_items: int
    items: int
    workers: int
    workers_because: NotRequired[str]
    own_items: NotRequired[int]


class Stats(TypedDict):
    """Statistics of the merged tensors, as in covmerge.json.

    Attributes:
        totals: counts by rule, the method's diagnostics, norms and rounding losses, over all tensors.
        heads: by expert, the names of its task head's tensors.
        rescalers: by expert, the rescaling factor of its masks; only for EMR-Merging.
        tensors: by tensor: role, rule, dtype, shape, norms, and the method's diagnostics.
    """

    totals: Mapping[str, Any]
    heads: Mapping[str, Sequence[str]]
    rescalers: NotRequired[Mapping[str, float]]
    tensors: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeResult(Tabular):
    """The result of a merge: `MergedTensors` in memory, or `MergedFolder` on disk.

    Attributes:
        path: the output folder; None if the output, tensors or files, is in memory.
        tensors: merged weights by name; None for a merge to disk.
        masks: per expert, the masks of EMR-Merging; empty for every other method, and for a merge to
            disk, which writes them as files. The rescaling factors are in `stats["rescalers"]`.
        heads: per expert, its own task head; empty for a merge to disk, which writes them as files.
        recipe: the recipe that was carried out, with the method resolved to a name.
        stats: statistics per tensor and in total, as in `covmerge.json`.
        run: seconds and memory of this run.
        seconds: seconds of mathematics by tensor, for the tensors that this run merged.
        timeline: when this run counted, read, computed and wrote.
        diagnostics: the method's diagnostics, as pairs of a label and a text.
        notes: facts from the plan and the run that a reader should know.
        warnings: problems that may make the result worse, and what to do about them.
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
        """Return one row per tensor of the output, with norms if the tensor was merged."""
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
        """Return the HTML that a notebook shows."""
        said = [*self.diagnostics, *(("warning", warning) for warning in self.warnings)]
        lines = (f"{label}: {text}" for label, text in said)
        return result_html(self, lines, drawn=("merged_norm", "update_norm"))


@dataclass(frozen=True, kw_only=True, repr=False)
class MergedTensors(MergeResult):
    """The result of a merge in memory: it has `tensors`, and no `path`.

    Attributes:
        tensors: merged weights by name. If the base is in memory, tied names are included and share one
            tensor.
        saver: the function that `save` calls with the folder and `overwrite`.
    """

    path: None = None
    tensors: dict[str, Tensor]
    verification: None = None
    saver: Callable[..., MergedFolder] | None = field(default=None, compare=False)

    def save(self, out: str | Path, *, overwrite: bool = False) -> MergedFolder:
        """Write the folder that the same merge with `out` writes: weights, config, tokenizer, manifest.

        Args:
            out: folder to write, by path or by `s3://` or `gs://` address.
            overwrite: whether to replace an earlier output of covmerge.

        Raises:
            InputError: the folder may not be written, or a source or a tensor changed after the merge.
            CheckFailed: the output failed its verification.
        """
        if self.saver is None:
            raise InputError("this result is a copy, which knows no sources: merge with out=FOLDER")
        return self.saver(output_path(out), overwrite=overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """Leave `saver` out of copies and pickles, as it refers to the sources."""
        return {**self.__dict__, "saver": None}


@dataclass(frozen=True, kw_only=True, repr=False)
class MergedFolder(MergeResult):
    """The result of a merge to disk: it has no `tensors`; its `path` is None if it went to an address.

    With several ranks, only one rank has the `verification`.
    """

    tensors: None = None
