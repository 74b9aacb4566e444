"""The statistics of RegMean++: what each layer sees behind blocks that are merged already.

RegMean++ (arXiv 2508.03121), per block ℓ in the order of the forward pass: every expert runs its own
block ℓ behind the merged blocks < ℓ, the Gram matrices of its linear layers are taken there, the
blocks ℓ are merged by RegMean, and all experts go on with the merged block. `covmerge.merge` by the method
`regmean` with `off_diagonal=0.95` on these files is RegMean++.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from covmerge import Generated
from covmerge.base.types import LinearGroup, Measured
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.methods import registry
from covmerge.plan.statistics.examples import Examples, Reading, ReadingOptions, size_of
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import ObservedLayer, RunningModel, load_model
from covmerge.plan.statistics.write import Contents, write_statistics
from covmerge_lab.workers import CollectSteps

SUFFIX = ".covstats.safetensors"
OFF_DIAGONAL = 0.95  # the paper's factor of all entries off the diagonal

Advance = Callable[[int], None]

_SHARED = (
    "all experts are shown these inputs, so that what enters a block is the same for all: its first layers "
    "are merged to their mean",
)


@dataclass(frozen=True)
class CollectedTogether:
    """What was written of one expert.

    Attributes:
        path: the statistics file.
        examples: examples that were seen.
        seconds: time that all experts took together.
        notes: what a user should know.
    """

    path: Path
    examples: int
    seconds: float
    notes: tuple[str, ...]


def collect_regmean_pp(
    base: str | Path,
    experts: Mapping[str, str | Path],
    examples: Mapping[str, Examples] | Generated,
    out: Path,
    *,
    progress: CollectSteps | None = None,
    overwrite: bool = False,
    **reading: Unpack[ReadingOptions],
) -> dict[str, CollectedTogether]:
    """Collect the Gram matrices of RegMean++, with all experts in memory, a file for each.

    What is not in a block is a stage of its own, before the first block or behind the last. Inside a
    stage, linear weights are merged by `regmean` with `off_diagonal=0.95` and equal expert weights,
    everything else is averaged.

    Args:
        base: folder of the base model, or a repository of the Hub.
        experts: the same of each expert, by name.
        examples: each expert's, as in `covmerge.collect`; batches are kept, on the CPU. Or `Generated`:
            what each expert writes before anything is merged, or what is drawn for all of them.
        out: folder for the files `<name>.covstats.safetensors`; it is made if need be.
        progress: called for every example in every stage.
        overwrite: replace statistics files.
        **reading: as in `covmerge.collect`.

    Raises:
        InputError: anything wrong with the inputs, a model without a list of blocks, or models that
            differ; no file is left behind.

    Departs from the paper: linear layers outside the blocks get Gram matrices too.
    """
    start = time.perf_counter()
    how = Reading(**reading)
    generated = isinstance(examples, Generated)
    if not generated and experts.keys() != examples.keys():
        one = min(experts.keys() ^ examples.keys())
        raise InputError(f"'{one}' is not both an expert and a name of examples: name it for both")
    with ExitStack() as stack:

        def loaded(source: str | Path, *, writing: bool = False) -> RunningModel:
            opened = stack.enter_context(closing(open_checkpoint(source)))
            return load_model(opened, "cpu", head=False, writing=writing)

        origin = loaded(base)
        candidates = {
            name: _Candidate(
                loaded(source, writing=generated),
                examples if isinstance(examples, Generated) else examples[name],
                how,
            )
            for name, source in experts.items()
        }
        ensemble = _Ensemble(origin, list(candidates.values()))
        with _reported(progress, ensemble.work) as advance, torch.no_grad():
            ensemble.run(advance)
        files = {name: out / f"{name}{SUFFIX}" for name in experts}
        found = {files[name]: candidate.contents() for name, candidate in candidates.items()}
        out.mkdir(parents=True, exist_ok=True)
        abouts = write_statistics(found, overwrite=overwrite)
    seconds = time.perf_counter() - start
    return {
        name: CollectedTogether(path, abouts[path].examples, seconds, tuple(abouts[path].notes))
        for name, path in files.items()
    }


@contextmanager
def _reported(progress: CollectSteps | None, total: int) -> Generator[Advance]:
    if progress is None:
        yield lambda count: None
        return
    progress.start(total)
    try:
        yield progress.advance
    finally:
        progress.finish()


class _Reached(Exception):
    """The forward pass came to where it shall end."""


class _Candidate:
    """An expert, block by block becoming the merged model.

    Stage 0 is what comes before the first block, stages 1 to L are the blocks, and stage L + 1 is
    what lies behind them. A forward pass ends with a stage, and the blocks before it give at once
    what they gave when they were merged: the output of the last of them is all that is kept.
    """

    def __init__(
        self,
        model: RunningModel,
        examples: Examples | Generated,
        reading: Reading,
    ) -> None:
        self.model = model
        self._made = (
            examples.made_for(model.whole, model.checkpoint.source)
            if isinstance(examples, Generated)
            else None
        )
        self.batches = list(model.batches(examples, reading)[0])
        self._reading = reading
        if not self.batches:
            raise InputError(f"{model.checkpoint.source} has no examples: pass one batch or more")
        self.examples = sum(map(size_of, self.batches))
        self.path, self.blocks, found = _blocks(model)
        self.notes = found
        self.parameters = _by_path(model)
        self.layers = {model.skeleton.path(layer.name): layer for layer in model.layers()}
        self.grams = GramCollector(list(self.layers.values()))
        self._outputs: list[Any] = [None] * len(self.batches)

    def stage_of(self, path: str) -> int | None:
        """The stage of a parameter or layer; None outside the blocks."""
        found = re.match(rf"{re.escape(self.path)}\.(\d+)\.", path)
        return None if found is None else int(found[1]) + 1

    def observe(self, stage: int, layers: Sequence[ObservedLayer], advance: Advance) -> None:
        """Run all examples up to the end of a stage, with its own weights, and watch layers."""
        for number, batch in enumerate(self.batches):
            with self.grams.watching(batch, layers), self._ending(stage, number, keep=False):
                self.model.run(batch)
            advance(size_of(batch))

    def proceed(self, stage: int, advance: Advance) -> None:
        """Run all examples through a stage that is merged now, and keep what comes out."""
        for number, batch in enumerate(self.batches):
            with self._ending(stage, number, keep=True):
                self.model.run(batch)
            advance(size_of(batch))

    @contextmanager
    def _ending(self, stage: int, number: int, *, keep: bool) -> Generator[None]:
        merged = max(stage - 1, 0)
        forwards = [block.forward for block in self.blocks[: merged + 1]]

        def give(*args: Any, **kwargs: Any) -> Any:
            return self._outputs[number]

        def end(*args: Any, **kwargs: Any) -> Any:
            if stage > 0:
                output = forwards[merged](*args, **kwargs)
                if keep:
                    self._outputs[number] = output
            raise _Reached

        for index, block in enumerate(self.blocks[: merged + 1]):
            block.forward = give if index < merged else end
        try:
            yield
            if stage <= len(self.blocks):
                raise InputError(
                    f"{self.model.checkpoint.source} did not call block {merged} of '{self.path}': "
                    "RegMean++ needs a model that runs its blocks in a row"
                )
        except _Reached:
            pass
        finally:
            for block, forward in zip(self.blocks, forwards, strict=False):
                block.forward = forward

    def measured(self, path: str) -> Measured | None:
        """Return the Gram matrix of a layer, None if it saw nothing."""
        found = self.grams.of(self.layers[path].name)
        if found is None:
            return None
        value = found.mean.to(self.parameters[path].dtype)
        return Measured(value, found.rows, float(value.square().sum().sqrt()))

    def contents(self) -> Contents:
        """Return what goes into this expert's file."""
        made = self._made
        shared = _SHARED if made is not None and made.shared else ()
        return Contents(
            self.model.checkpoint,
            {"gram": self.grams.statistics()},
            self.examples,
            protocol="regmean++",
            generated=made and made.as_json(self._reading),
            notes=[*self.grams.notes(), *self.notes, *shared],
        )


class _Ensemble:
    """All candidates, going through the stages together."""

    def __init__(self, origin: RunningModel, candidates: Sequence[_Candidate]) -> None:
        self._candidates = candidates
        self._base = _by_path(origin)
        self._depth = len(candidates[0].blocks)
        self._shared = _shared(origin, self._base, candidates)
        self.work = sum(c.examples for c in candidates) * (2 * self._depth + 2)

    def run(self, advance: Advance) -> None:
        """Collect, stage by stage, and merge each before the next."""
        first = self._candidates[0]
        outside = [path for path in self._shared if first.stage_of(path) is None]
        self._collect(0, outside, advance)
        self._merge(outside)
        for stage in range(1, self._depth + 1):
            block = [path for path in self._shared if first.stage_of(path) == stage]
            self._collect(stage, block, advance)
            self._merge(block)
            for candidate in self._candidates:
                candidate.proceed(stage, advance)
        self._collect(self._depth + 1, outside, advance)

    def _collect(self, stage: int, paths: Sequence[str], advance: Advance) -> None:
        for candidate in self._candidates:
            layers = [candidate.layers[path] for path in paths if path in candidate.layers]
            unseen = [layer for layer in layers if candidate.grams.of(layer.name) is None]
            candidate.observe(stage, unseen, advance)

    def _merge(self, paths: Sequence[str]) -> None:
        """Give all candidates the merged parameters; layers that saw nothing stay their own."""
        for path in paths:
            update = self._merged_update(path)
            if update is not None:
                for candidate in self._candidates:
                    candidate.parameters[path].copy_(self._base[path] + update)

    def _merged_update(self, path: str) -> Tensor | None:
        updates = [c.parameters[path] - self._base[path] for c in self._candidates]
        layer = self._candidates[0].layers.get(path)
        if layer is None:
            return torch.stack(updates).mean(0)
        measured = [m for c in self._candidates if (m := c.measured(path)) is not None]
        if len(measured) < len(updates):
            return None
        group = LinearGroup(
            tuple(update.mT if layer.transposed else update for update in updates),
            (1.0,) * len(updates),
            expert_statistics=tuple(measured),
        )
        method = registry.get("regmean")
        merged = method(group, **method.resolve({"off_diagonal": OFF_DIAGONAL})).delta
        return merged.mT if layer.transposed else merged


def _blocks(model: RunningModel) -> tuple[str, list[Any], list[str]]:
    """Return path and modules of the longest list of blocks, and notes on other lists."""
    lists = {
        path: list(module)
        for path, module in model.backbone.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    outer = {
        p: found for p, found in lists.items() if not any(p.startswith(f"{q}.") for q in lists)
    }
    source, config = model.checkpoint.source, model.whole.config
    if not outer:
        raise InputError(
            f"{source} ({model.skeleton.architecture}) has no list of blocks, and RegMean++ goes "
            "block by block: collect each expert's with covmerge.collect, for RegMean"
        )
    path = max(outer, key=lambda name: len(outer[name]))
    depth = getattr(config, "num_hidden_layers", len(outer[path]))
    if depth > len(outer[path]):
        raise InputError(
            f"{source} runs {depth} layers over {len(outer[path])} blocks in '{path}', and RegMean++ "
            "needs blocks that are run once: collect each expert's with covmerge.collect, for RegMean"
        )
    others = [name for name in outer if name != path]
    note = "a list of blocks beside those merged one by one, taken as one stage"
    return path, outer[path], [f"'{others[0]}': {note}"] if others else []


def _by_path(model: RunningModel) -> dict[str, nn.Parameter]:
    return {model.skeleton.path(name): value for name, value in model.parameters().items()}


def _shared(
    origin: RunningModel, base: Mapping[str, Tensor], candidates: Sequence[_Candidate]
) -> list[str]:
    """Return the parameters that all models have, after checking that they can be merged."""
    for candidate in candidates:
        source = candidate.model.checkpoint.source
        packed = candidate.model.packed_parameters()
        if packed:
            raise InputError(
                f"{source} stores '{packed[0]}' in other pieces than the model runs: RegMean++ cannot "
                "be collected for it"
            )
        for path in {**base, **candidate.parameters}:
            there = [
                models[path].shape for models in (base, candidate.parameters) if path in models
            ]
            in_block = candidate.stage_of(path) is not None
            if len(set(there)) > 1 or (in_block and len(there) < 2):
                raise InputError(
                    f"'{path}' is {' and '.join(str(list(shape)) for shape in there)} in {source} and "
                    f"the base {origin.checkpoint.source}: it is not a fine-tune of this base"
                )
    return [path for path in base if all(path in c.parameters for c in candidates)]
