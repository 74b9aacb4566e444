"""A merge in memory, written afterwards as a merge to disk would have written it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.findings import Fit
from covmerge.files.checkpoints.base import Checkpoint, fingerprint
from covmerge.files.checkpoints.staging import Staging, check_not_input, destination_of
from covmerge.plan.planning.forms import Place
from covmerge.plan.planning.types import Plan
from covmerge.run.engine.budget import MemoryPlan
from covmerge.run.engine.run import RunResult
from covmerge.run.output import OutputFiles
from covmerge.run.result import MergedFolder
from covmerge.run.sources import OpenCheckpoints

_UNKNOWN = {"tensors": "not known: they were in memory"}


@dataclass(frozen=True)
class Saver:
    """Writes the result of a merge in memory.

    Attributes:
        plan: of the merge.
        checkpoints: its sources; they may be closed.
        memory: what was expected of it.
        done: what the engine did.
        fit: what there is to say of the experts.
        parts: the merged tensors, by part and name.
    """

    plan: Plan
    checkpoints: OpenCheckpoints
    memory: MemoryPlan
    done: RunResult
    fit: Fit
    parts: Mapping[str, Mapping[str, Tensor]]

    def __post_init__(self) -> None:
        """Remember the tensors, and what of the sources may change."""
        _ = self._versions, self.checkpoints.parents, self.checkpoints.companions

    def __call__(self, out: Path, *, overwrite: bool) -> MergedFolder:
        """Write files as a merge to disk, and check them.

        Raises:
            InputError: the folder may not be written, or a source or a tensor changed since the merge.
            CheckFailed: the output failed its verification.
        """
        target = destination_of(out)
        check_not_input(target, self.checkpoints.paths())
        if self._written() != self._versions:
            raise InputError(
                "a merged tensor was changed since: merge again, or write the tensors yourself"
            )
        base = self.checkpoints.base
        if self.plan.masked and base.is_held:
            raise InputError(
                "masks are written with what tells their base from others, and the base was in memory: "
                "merge with out=FOLDER"
            )
        with Staging(target, overwrite=overwrite) as staging:
            files = OutputFiles(staging.store, self.plan, self.checkpoints)
            for part, headers in self.plan.parts.items():
                for header in headers:
                    tensor = self.parts[part][header.name]
                    stored = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    files.output.write([Place(part, header)], [stored])
            hashes = {key: _hashes(one) for key, one in self.checkpoints.all()}
            sources = self.checkpoints.recorded(hashes)
            result = files.finish(
                self.done,
                sources,
                self.memory,
                target.output,
                fit=self.fit,
                compared=not base.is_held,
            )
            staging.commit()
        return result

    @cached_property
    def _versions(self) -> Mapping[str, int | None]:
        return self._written()

    def _written(self) -> Mapping[str, int | None]:
        """How often each tensor was written to, as torch counts it; None where it does not."""
        return {
            f"{part} {name}": None if tensor.is_inference() else tensor._version
            for part, tensors in self.parts.items()
            for name, tensor in tensors.items()
        }


def _hashes(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Hashes of a source; the tensors of one in memory are the caller's, and may be others by now."""
    return _UNKNOWN if checkpoint.is_held else fingerprint(checkpoint)
