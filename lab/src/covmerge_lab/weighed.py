"""Gram matrices of inputs that are made for an expert and count by weights: reactions, or confidence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import Unpack

from covmerge import Generated
from covmerge.errors import InputError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics.examples import Reading, ReadingOptions, single, size_of
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import load_model
from covmerge.plan.statistics.write import Contents, write_statistics
from covmerge_lab.confidence import Confidence
from covmerge_lab.reactions import Reactions
from covmerge_lab.workers import CollectSteps

Weighed = Literal["itself", "others", "head"]


def collect_weighed(
    expert: str | Path,
    examples: Generated,
    out: Path,
    by: Weighed,
    *,
    base: str | Path | None = None,
    others: Sequence[str | Path] = (),
    progress: CollectSteps | None = None,
    **reading: Unpack[ReadingOptions],
) -> float:
    """Collect the Gram matrices of weighed inputs; return the seconds it took.

    Args:
        expert: folder of a whole model.
        examples: inputs that are made for it.
        out: the file of statistics; an earlier one is replaced.
        by: see `Own.weighed`.
        base: of the experts, for reactions.
        others: the other experts, where reactions stand beside theirs.
        progress: called for every batch.
        **reading: as in `covmerge.collect`.

    Raises:
        InputError: see `Reactions` and `Confidence`.
    """
    start = time.perf_counter()
    how = Reading(**reading)
    with ExitStack() as stack:

        def opened(source: str | Path) -> Checkpoint:
            return stack.enter_context(closing(open_checkpoint(source)))

        model = load_model(opened(expert), "cpu", head=by == "head", writing=True)
        weights: Confidence | Reactions
        if by == "head":
            weights = Confidence(model)
        elif base is None:
            raise InputError("reactions are measured from the base: name it")
        else:
            rest = others if by == "others" else ()
            weights = Reactions(model, opened(base), [opened(other) for other in rest])
        grams = GramCollector(model.layers(), weights)
        batches, total = model.batches(examples, how)
        if progress is not None:
            progress.start(total)
        seen = 0
        for batch in batches:
            for one in single(batch) if isinstance(weights, Confidence) else (batch,):
                if isinstance(weights, Confidence):
                    weights.inspect_rows(one)
                with grams.watching(one), torch.no_grad():
                    model.run(one)
            seen += size_of(batch)
            if progress is not None:
                progress.advance(size_of(batch))
        if isinstance(weights, Confidence):
            weights.check()
        made = examples.made_for(model.whole, model.checkpoint.source).as_json(how)
        contents = Contents(
            model.checkpoint,
            {"gram": grams.statistics()},
            seen,
            generated={**made, **weights.as_json()},
            notes=[*grams.notes(), *weights.notes()],
        )
        write_statistics({out: contents}, overwrite=True)
    return time.perf_counter() - start
