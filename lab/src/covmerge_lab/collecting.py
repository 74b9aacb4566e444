"""Statistics files from the experts' training examples, without labels, and from inputs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from covmerge import collect
from covmerge_lab.own import Own
from covmerge_lab.regmean_pp import collect_regmean_pp
from covmerge_lab.suite import Suite
from covmerge_lab.weighed import collect_weighed
from covmerge_lab.workers import CollectSteps, Job, OnProgress

EXAMPLES = {
    "gram": 256,
    "regmean++": 256,
    "fisher": 16,  # a backward pass through the whole model for every label; 64 did no better
}
OWN = "own"  # beside these kinds: Gram matrices of inputs that the experts make themselves
MADE = 256  # inputs of each expert


def jobs(
    suite: Suite, experts: Mapping[str, Path], kinds: Sequence[str], out: Path
) -> dict[str, Job[None]]:
    """Return the jobs that collect statistics, by what they collect; the longest first.

    Args:
        suite: whose examples.
        experts: folders of whole models, by task.
        kinds: some of `EXAMPLES` and `OWN`.
        out: folder of the statistics files.
    """
    for kind in kinds:
        (out / kind).mkdir(parents=True, exist_ok=True)
    found: dict[str, Job[None]] = {}
    if "regmean++" in kinds:
        found["regmean++"] = partial(_behind_merged_blocks, suite, experts, out)
    for kind in ("fisher", "gram"):
        if kind in kinds:
            found |= {
                f"{kind}, {task}": partial(_of_one, suite, kind, task, experts[task], out)
                for task in experts
            }
    if OWN in kinds:
        found |= {
            f"own inputs, {task}": partial(_on_own_inputs, suite, task, experts, out)
            for task in experts
        }
    return found


def files(out: Path, kind: str, experts: Sequence[str]) -> dict[str, Path]:
    """Return where the statistics of one kind are, by expert."""
    return {name: out / kind / f"{name}.covstats.safetensors" for name in experts}


def on_own_inputs(
    suite: Suite,
    own: Own,
    kind: str,
    task: str,
    experts: Mapping[str, Path],
    out: Path,
    on_progress: OnProgress,
) -> float:
    """Collect the Gram matrices of inputs that are made for one expert; return the seconds it took.

    Args:
        suite: of the experts.
        own: how inputs are made.
        kind: name of the statistics, of the folder that they are in.
        task: of the expert.
        experts: folders of whole models, by task.
        out: folder of the statistics files.
        on_progress: called with the inputs done and all inputs.
    """
    path = files(out, kind, [task])[task]
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 16 if suite.quick else MADE
    progress = CollectSteps(on_progress, count)
    # Adapters that were made whole come without a tokenizer.
    if own.weighed is not None:
        return collect_weighed(
            experts[task],
            own.how,
            path,
            own.weighed,
            base=suite.base,
            others=[folder for name, folder in experts.items() if name != task],
            max_examples=count,
            tokenizer=suite.tokenizer,
            progress=progress,
        )
    return collect(
        experts[task],
        own.how,
        path,
        base=suite.base if own.how.start == "base" else None,
        max_examples=count,
        tokenizer=suite.tokenizer,
        progress=progress,
        overwrite=True,
    ).seconds


def on_own_inputs_together(
    suite: Suite,
    own: Own,
    kind: str,
    experts: Mapping[str, Path],
    out: Path,
    on_progress: OnProgress,
) -> float:
    """Collect those of all experts, by RegMean++ on what each makes; return the seconds it took.

    Args:
        suite: of the experts.
        own: how inputs are made.
        kind: as in `on_own_inputs`.
        experts: folders of whole models, by task.
        out: folder of the statistics files.
        on_progress: called with the inputs done and all inputs.
    """
    found = collect_regmean_pp(
        suite.base,
        experts,
        own.how,
        out / kind,
        max_examples=16 if suite.quick else MADE,
        tokenizer=suite.tokenizer,
        progress=CollectSteps(on_progress),
        overwrite=True,
    )
    return next(iter(found.values())).seconds


def _of_one(
    suite: Suite, kind: str, task: str, expert: Path, out: Path, on_progress: OnProgress
) -> None:
    collect(
        expert,
        suite.inputs(task, EXAMPLES[kind]),
        files(out, kind, [task])[task],
        kinds=[kind],
        progress=CollectSteps(on_progress, EXAMPLES[kind]),
        overwrite=True,
    )


def _on_own_inputs(
    suite: Suite, task: str, experts: Mapping[str, Path], out: Path, on_progress: OnProgress
) -> None:
    own = next(iter(suite.own_inputs.values()))
    on_own_inputs(suite, own, OWN, task, experts, out, on_progress)


def _behind_merged_blocks(
    suite: Suite, experts: Mapping[str, Path], out: Path, on_progress: OnProgress
) -> None:
    examples = {task: suite.inputs(task, EXAMPLES["regmean++"]) for task in experts}
    collect_regmean_pp(
        suite.base,
        experts,
        examples,
        out / "regmean++",
        progress=CollectSteps(on_progress),
        overwrite=True,
    )
