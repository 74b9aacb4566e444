"""Checkpoints that a trainer saves in its folder while it runs: transformers' Trainer, torchtitan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import matches_any, some
from covmerge.files.checkpoints.json_file import read_object
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.address import local_path
from covmerge.files.stores.regular_file import failing_as

_NAMES = tuple(re.compile(rf"{name}-(0|[1-9][0-9]{{0,17}})") for name in ("checkpoint", "step"))
_STATE = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
_SEEN = "num_input_tokens_seen"
_OF_TRAINER = (
    *(_STATE, "training_args.bin", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("global_step*", "pytorch_model_fsdp_*", "zero_to_fp32.py", "latest"),
)
_SHARDS = ("global_step*", "pytorch_model_fsdp_*")  # DeepSpeed's and FSDP's parts, no model


@dataclass(frozen=True)
class SavedStep:
    """One checkpoint of a run."""

    step: int  # the optimizer's step at which it was saved
    folder: Path
    is_adapter: bool  # whether it is an adapter, and not a full model
    # Names of the trainer's files in the folder, such as the optimizer's state.
    own: tuple[str, ...]


@dataclass(frozen=True)
class Window:
    """A window over the last tokens of a run."""

    tokens: int
    # Number of tokens in each step of the optimizer; None: read from the trainer's state.
    per_step: int | None = None


def last_steps(folder: str, window: int | Window | None, beside: Path) -> list[SavedStep]:
    """Return a run's last checkpoints by step number, the oldest first.

    A window of T tokens has the checkpoints that saw more than t_n - T tokens, where t_n is that of
    the last one. These are T / t checkpoints if there are t tokens between every two. `window` may also be
    the number of checkpoints, or None for all. A relative path starts from `beside`.

    Raises:
        CheckpointError: there are too few, one is incomplete, or their numbers of tokens are unknown.
    """
    count = window if isinstance(window, int) else None
    try:
        run = beside / local_path(folder).expanduser()
        folders = [path for path in run.iterdir() if path.is_dir()]
    # RuntimeError: an unknown home folder; ValueError: a NUL character.
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the run {beside / folder} cannot be listed ({_reason(error)}): pass the folder that the "
            "trainer wrote its checkpoints to (output_dir)"
        ) from error
    named = [_numbered(folders, name) for name in _NAMES]
    found = next(filter(None, named), named[0])
    if len(found) < (count or 1):
        have = f"{len(found)} checkpoints ({some((p.name for _, p in found), 5)})"
        raise CheckpointError(
            f"the run {run} has {have if found else 'no folders named checkpoint-NUMBER'}"
            + (f", and the last {count} are asked for" if count and found else "")
            + (
                f": ask for {len(found)} or fewer ({Hint('last')}), or save more of them (save_total_limit)"
                if found
                else ": pass the folder that the trainer wrote its checkpoints to (output_dir)"
            )
        )
    held = {path: _names(path) for _, path in found}
    stateful = any(_STATE in names for names in held.values())
    if isinstance(window, Window):
        _checked(*found[-1], held[found[-1][1]], stateful)
        count = _within([(path, _tokens(step, path, window)) for step, path in found], window)
    last = found[-(count or len(found)) :]
    for (_, path), (_, earlier) in combinations(reversed(last), 2):
        if path.samefile(earlier):
            raise CheckpointError(
                f"{path} and {earlier} are one folder, which would be counted twice: remove the link"
            )
    return [_checked(step, path, held[path], stateful) for step, path in last]


def _tokens(step: int, folder: Path, window: Window) -> int:
    """Return the number of tokens that a run had seen when it saved a checkpoint."""
    if window.per_step is not None:
        return step * window.per_step
    seen: object = 0
    if (folder / _STATE).is_file():
        seen = read_object(folder / _STATE).get(_SEEN, 0)
    if type(seen) is not int or seen <= 0:
        raise CheckpointError(
            f"{folder} does not say how many tokens the run had seen ({_SEEN} of its {_STATE}, which the "
            f"Trainer counts with include_{_SEEN}): give {Hint('tokens_per_step', 4194304)}, or count "
            f"checkpoints ({Hint('last')})"
        )
    return seen


def _within(seen: Sequence[tuple[Path, int]], window: Window) -> int:
    """Return the number of checkpoints in a window; raise if the window begins before the first one."""
    for (earlier, fewer), (later, more) in pairwise(seen):
        if more <= fewer:
            raise CheckpointError(
                f"{later} says {more} tokens, and {earlier} {fewer}: they are of two runs, or count anew; "
                f"count checkpoints ({Hint('last')})"
            )
    tokens = [number for _, number in seen]
    reach = tokens[-1] - 2 * tokens[0] + tokens[1] if len(tokens) > 1 else tokens[0]
    if window.tokens > reach:
        raise CheckpointError(
            f"the checkpoints of {seen[0][0].parent} are of the last {reach} tokens, and a window of "
            f"{window.tokens} is asked for: ask for fewer ({Hint('tokens')}), or save more of them "
            "(save_total_limit)"
        )
    return sum(number > tokens[-1] - window.tokens for number in tokens)


def refuse_as_step(out: Path, source: Path) -> None:
    """Raise if an output would look like a checkpoint of a run, beside a checkpoint of that run.

    Raises:
        InputError: the next merge of the run, and the trainer when it resumes, would take the
            output for one of the trainer's checkpoints.
    """
    named = any(name.fullmatch(out.name) and name.fullmatch(source.name) for name in _NAMES)
    if named and source.is_dir() and out.parent.exists() and out.parent.samefile(source.parent):
        raise InputError(
            f"the output {out} would be taken for a checkpoint of the training run in {out.parent}: choose "
            "another name, or another folder"
        )


def _numbered(folders: Iterable[Path], name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the folders with a matching name, sorted by their numbers."""
    named = ((path, name.fullmatch(path.name)) for path in folders)
    return sorted((int(match[1]), path) for path, match in named if match)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be listed ({_reason(error)}): make it readable, or move it elsewhere"
        ) from error


def _checked(step: int, folder: Path, names: Sequence[str], stateful: bool) -> SavedStep:
    """Open a checkpoint to check it; `stateful`: other checkpoints of the run have a trainer's state."""
    if MANIFEST_NAME in names:
        raise CheckpointError(
            f"{folder} holds {MANIFEST_NAME}: it is the output of a merge and no checkpoint of the run, "
            "move it elsewhere"
        )
    try:
        if stateful and _STATE not in names:
            raise CheckpointError(f"it has no {_STATE}, which is written last")
        with failing_as(f"{folder / _STATE} cannot be read"):
            if _STATE in names and not (folder / _STATE).stat().st_size:
                raise CheckpointError(f"its {_STATE} is empty")
        with closing(open_checkpoint(str(folder))) as checkpoint:
            is_adapter, in_shards = checkpoint.is_adapter, checkpoint.divided
    except CheckpointError as error:
        if any(matches_any(name, _SHARDS) for name in names):
            raise CheckpointError(
                f"{folder} holds the shards of DeepSpeed or FSDP and no model ({error}): gather them first "
                "(zero_to_fp32.py of the checkpoint, or accelerate merge-weights)"
            ) from error
        raise CheckpointError(
            f"{folder} is incomplete, as a checkpoint is whose run was killed while it was saved "
            f"({error}): remove this folder, or move it elsewhere, and the last ones are those before it"
        ) from error
    of_trainer = tuple(
        name
        for name in names
        if matches_any(name, _OF_TRAINER) and not (in_shards and matches_any(name, _SHARDS))
    )
    return SavedStep(step, folder, is_adapter, of_trainer)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
