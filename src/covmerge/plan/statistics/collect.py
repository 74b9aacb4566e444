"""Collecting a statistics file from an expert and examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast, get_args

import torch
from typing_extensions import Unpack

from covmerge.base.errors import InputError, ResourceError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.address import local_path
from covmerge.plan.statistics.blocks import Blocks
from covmerge.plan.statistics.examples import Batch, Examples, Reading, ReadingOptions, size_of
from covmerge.plan.statistics.file import About, Kind
from covmerge.plan.statistics.generated import Generated
from covmerge.plan.statistics.gram import FisherCollector, GramCollector, Labels
from covmerge.plan.statistics.model import ObservedLayer, RunningModel, check_start, load_model
from covmerge.plan.statistics.needed import (
    check_memory,
    fits,
    memory_by_block,
    memory_needed,
    memory_of_batches,
    texts_at_once,
)
from covmerge.plan.statistics.write import (
    Contents,
    GrowingFile,
    Statistic,
    check_output,
    files_in,
    write_statistics,
)
from covmerge.plan.statistics.written import BEGUN, WRITTEN_AT_ONCE, Written, begun_by

_NOTHING = "there is no example: pass one batch or more"

SMALLER = "collect on a larger machine; the file may be used on any"


class Progress(Protocol):
    """Receives the progress of examples going through a model."""

    def start(self, total: int | None) -> None:
        """Begin; `total` is the number of examples to come, or None if it is unknown."""
        ...

    def advance(self, count: int) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Collected:
    """The summary of a written statistics file.

    Attributes:
        path: the statistics file.
        tensors: kind -> number of tensors with statistics.
        stored: kind -> number of stored tensors: layers with the same input share one.
        rows: kind -> fewest and most layer inputs, or examples, behind a tensor.
        examples: number of examples.
        nbytes: size of the file in bytes.
        seconds: time for loading, running and writing.
        notes: notes for the user.
    """

    path: Path
    tensors: dict[str, int]
    stored: dict[str, int]
    rows: dict[str, tuple[int, int]]
    examples: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...]


def collect(
    expert: str | Path | Checkpoint,
    examples: Examples | Generated,
    out: str | Path,
    *,
    kinds: Sequence[str] = ("gram",),
    labels: str = "model",
    seed: int = 0,
    base: str | Path | None = None,
    device: str | torch.device = "cpu",
    max_memory: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    **reading: Unpack[ReadingOptions],
) -> Collected:
    """Run examples through an expert, and write statistics of its layers' inputs to a file.

    Gram: E[z zᵀ] over all inputs z of a linear layer, uncentred (RegMean, Jin et al. 2023, §3).
    Fisher: see `FisherCollector`.

    Args:
        expert: folder of the model, or a repository of the Hub, or an opened checkpoint.
        examples: a file of texts (`.txt`, `.jsonl`, `.json`, `.csv`), or batches of tensors as the
            model takes them; `labels` in them are not passed to the model. Or `Generated`: texts
            that the expert, a language model, writes itself, or inputs that are drawn for another
            kind of model, so that no data is needed.
        out: the file to write, `*.covstats.safetensors`.
        kinds: `gram`, `fisher`, or both.
        labels: labels for the Fisher information: `model` or `data`.
        seed: seed of labels that are drawn from the model.
        base: the model that writes the beginnings of texts, if texts start from the base.
        device: device on which the model runs.
        max_memory: bytes that the process may use; None: what is free. The batch size of texts that
            a model writes is fitted to it; other batches are assumed to be small. A model that does
            not fit is run block by block if only Gram matrices are asked for; it cannot write
            texts.
        progress: called after every batch.
        overwrite: replace an existing statistics file.
        **reading: how examples become batches; the attributes of `Reading`: `max_examples`,
            `batch_size`, `max_length`, `tokenizer`, `text_column`, `pair_column`, `label_column`.

    Raises:
        InputError: something is wrong with the model, the examples or the output; no file is left
            behind.
        ResourceError: the model with its sums does not fit into memory, or the disk is full.

    Departs from the paper: nowhere. A Gram matrix has shape `(d_in, d_in)`, Fisher information the
    shape of its tensor; both are means in float32.

    Example:
        collect("./code", "code.jsonl", "code.covstats.safetensors", kinds=("gram", "fisher"))
    """
    start = time.perf_counter()
    out = local_path(out).expanduser()
    chosen = _checked_kinds(kinds)
    if labels not in get_args(Labels):
        raise InputError(f"labels are those of the model or of the data, not of '{labels}'")
    source = cast("Labels", labels)
    generated = examples if isinstance(examples, Generated) else None
    if generated is not None:
        _check_generated(reading)
        if source == "data":
            raise InputError(f"what is generated has no labels: pass {Hint('labels', 'model')}")
    if source == "data" and "fisher" not in chosen:
        raise InputError(
            f"{Hint('labels', 'data')} is for Fisher information, and none is asked for: leave it out, "
            f"or pass {Hint('kinds', 'fisher')}"
        )
    _check_base(base, begins=generated is not None and generated.start == "base")
    check_output(out, overwrite=overwrite)
    how = Reading(**reading)
    with ExitStack() as opened:

        def opening(source: str | Path) -> Checkpoint:
            return opened.enter_context(closing(open_checkpoint(source)))

        expert = opening(expert) if isinstance(expert, str | Path) else expert
        writing = generated is not None and check_start(expert, generated, how)
        if chosen == ("gram",) and not writing:
            whole = fits(memory_needed(expert), max_memory)
            if not whole or (generated is not None and generated.start == "random"):
                needed = memory_by_block(expert, 0 if generated is None else how.wanted)
                check_memory(
                    needed, max_memory, f"a block of {expert.source} and its sums", SMALLER
                )
                try:
                    about = _block_by_block(
                        expert,
                        examples,
                        how,
                        out,
                        device,
                        max_memory,
                        progress,
                        overwrite=overwrite,
                    )
                    return collected(out, about, time.perf_counter() - start)
                except ResourceError:
                    raise
                except InputError:  # as for models that change weights
                    if not whole:
                        raise
        needed = memory_needed(expert, grams="gram" in chosen, fisher="fisher" in chosen)
        check_memory(needed, max_memory, f"{expert.source} and its sums", SMALLER)
        notes: list[str] = []
        if generated is not None and writing:
            how, notes = fitting(expert, generated, how, needed, max_memory)
        if generated is not None and base is not None:
            opened_base = opening(base)
            needed = memory_needed(opened_base, grams=False)
            check_memory(needed, max_memory, f"{opened_base.source} and what it writes", SMALLER)
            with reported(progress, how.wanted) as advance:
                examples = generated = _begun(opened_base, generated, how, device, advance)
        model = load_model(expert, device, head="fisher" in chosen, writing=generated is not None)
        made = None if generated is None else generated.made_for(model.whole, expert.source)
        if isinstance(made, Written):
            notes += made.notes(model, how)
        grams = GramCollector(_layers(model)) if "gram" in chosen else None
        fisher = FisherCollector(model, labels=source, seed=seed) if "fisher" in chosen else None
        batches, total = model.batches(examples, how, labels=source == "data")
        with reported(progress, total) as advance:
            found = _observed(model, batches, advance, grams, fisher)
        if generated is not None and made is not None:
            notes = [*found.notes, *notes, *_on_shared(generated, made.shared, chosen)]
            found = replace(found, generated=made.as_json(how), notes=notes)
        about = write_statistics({out: found}, overwrite=overwrite)[out]
    return collected(out, about, time.perf_counter() - start)


def _block_by_block(
    expert: Checkpoint,
    examples: Examples | Generated,
    how: Reading,
    out: Path,
    device: str | torch.device,
    max_memory: int | None,
    progress: Progress | None,
    *,
    overwrite: bool,
) -> About:
    """Collect Gram matrices with one block and all inputs in memory; write a block's when it is through."""
    blocks = Blocks(expert, device)
    model = blocks.model
    layers = _layers(model)
    grams = GramCollector(layers)
    batches = list(model.batches(examples, how)[0])
    count = sum(map(size_of, batches))
    if not count:
        raise InputError(_NOTHING)
    generated, notes = None, list[str]()
    if not fits(memory_needed(expert), max_memory):
        notes.append("run block by block: as a whole it does not fit the memory")
    if isinstance(examples, Generated):
        made = examples.made_for(model.whole, expert.source)
        generated = made.as_json(how)
        notes += _on_shared(examples, made.shared, ("gram",))
    else:
        what = f"a block of {expert.source} and {count} examples on their way"
        otherwise = f"pass fewer {Hint('max_examples')}, or a smaller {Hint('max_length')}"
        check_memory(memory_of_batches(expert, batches), max_memory, what, otherwise)
    with (
        files_in(out.parent, overwrite=overwrite) as place,
        closing(GrowingFile(place(out), expert, ("gram",), [y.name for y in layers])) as file,
        reported(progress, count * (1 + blocks.count)) as advance,
    ):
        for complete in blocks.run(batches, grams.watching, lambda b: advance(size_of(b))):
            for statistic in grams.take(complete):
                file.add("gram", statistic)
        notes = [*grams.notes(), *_packed_note(model), *notes]
        return file.finish(Contents(expert, {}, count, generated=generated, notes=notes))


def _begun(
    base: Checkpoint,
    generated: Generated,
    how: Reading,
    device: str | torch.device,
    advance: Callable[[int], None],
) -> Generated:
    """Return the inputs with beginnings that the base wrote, at the same temperature and seed."""
    model = load_model(base, device, head=False, writing=True)
    begun = begun_by(model, generated.temperature or 1.0, generated.seed, how, advance)
    return replace(generated, begun=begun)


def _layers(model: RunningModel) -> list[ObservedLayer]:
    layers = model.layers()
    if not layers:
        raise InputError(
            f"{model.checkpoint.source} has no linear layers, whose inputs Gram matrices are of: pass "
            f"{Hint('kinds', 'fisher')}, or merge it by a method without data"
        )
    return layers


def _on_shared(examples: Generated, shared: bool, kinds: Sequence[Kind]) -> tuple[str, ...]:
    if not shared or "gram" not in kinds:
        return ()
    models = "models" if examples.start == "random" else "experts"
    return (
        f"all {models} are shown these inputs: where C_t of all experts are equal, a merge by theirs is "
        "their mean",
    )


def collected(path: Path, about: About, seconds: float) -> Collected:
    """Return the summary of a file that was written."""
    rows: dict[str, list[int]] = {kind: [] for kind in about.totals}
    stored = dict.fromkeys(rows, 0)
    for key, count in about.rows.items():
        kind = key.partition("/")[0]
        rows[kind].append(count)
        stored[kind] += key not in about.aliases
    return Collected(
        path=path,
        tensors={kind: len(counts) for kind, counts in rows.items()},
        stored=stored,
        rows={kind: (min(counts), max(counts)) for kind, counts in rows.items()},
        examples=about.examples,
        nbytes=path.stat().st_size,
        seconds=seconds,
        notes=tuple(about.notes),
    )


def _checked_kinds(kinds: Sequence[str]) -> tuple[Kind, ...]:
    known = get_args(Kind)
    for kind in kinds:
        if kind not in known:
            raise InputError(f"there is no statistic '{kind}'.{did_you_mean(kind, known)}")
    chosen = tuple(kind for kind in known if kind in kinds)
    if not chosen:
        raise InputError("no kind of statistics is asked for: pass gram, fisher or both")
    return chosen


@contextmanager
def reported(progress: Progress | None, total: int | None) -> Generator[Callable[[int], None]]:
    """Start a progress, give its `advance`, and finish it after success or an error."""
    if progress is None:
        yield lambda count: None
        return
    progress.start(total)
    try:
        yield progress.advance
    finally:
        progress.finish()


def _check_generated(reading: ReadingOptions) -> None:
    """Raise if options for a file of examples are given, instead of ignoring them."""
    for name in ("text_column", "pair_column", "label_column"):
        if name in reading:
            raise InputError(
                f"{Hint(name)} is for a file of examples, and {Hint('inputs', 'generated')} reads none: "
                "leave it out"
            )


def fitting(
    model: Checkpoint, generated: Generated, how: Reading, needed: int, max_memory: int | None
) -> tuple[Reading, list[str]]:
    """Return how many texts a model writes at once to fit the memory, with a note for the user.

    `needed` are the bytes of the model and its sums.
    """
    turns = 2 if generated.start == "user" else 1
    begun = BEGUN if generated.start == "base" else 0
    tokens = turns * (generated.tokens or Written.tokens) + begun
    wanted = min(how.batch_size or WRITTEN_AT_ONCE, how.wanted)
    most = texts_at_once(model.config or {}, tokens, needed, max_memory, wanted)
    if most < wanted and (how.batch_size or not most):
        fewer = f"pass {Hint('batch_size', most)}, or fewer {Hint('tokens')}"
        raise ResourceError(
            f"{model.source} and {wanted} texts that it writes at once do not fit the memory: "
            + (fewer if most else SMALLER)
        )
    note = f"{most} texts were written at once, and not {wanted}, to fit the memory"
    return replace(how, batch_size=most), [note] if most < wanted else []


def _check_base(base: str | Path | None, *, begins: bool) -> None:
    if begins and base is None:
        raise InputError(
            f"{Hint('start', 'base')} needs {Hint('base')}, which begins the texts: name it"
        )
    if base is not None and not begins:
        raise InputError(
            f"{Hint('base')} is for {Hint('start', 'base')}: leave it out, or pass both"
        )


def _observed(
    model: RunningModel,
    batches: Iterable[Batch],
    advance: Callable[[int], None],
    grams: GramCollector | None,
    fisher: FisherCollector | None,
) -> Contents:
    """Pass every batch to the collectors; return what they have collected."""
    count = 0
    for batch in batches:
        if grams is not None:
            with grams.watching(batch), torch.no_grad():
                model.run(batch)
        if fisher is not None:
            fisher.add(batch)
        count += size_of(batch)
        advance(size_of(batch))
    if not count:
        raise InputError(_NOTHING)
    statistics: dict[Kind, list[Statistic]] = {}
    notes: list[str] = []
    if grams is not None:
        statistics["gram"] = grams.statistics()
        notes += grams.notes() + _packed_note(model)
    if fisher is not None:
        statistics["fisher"] = fisher.statistics()
        notes += fisher.notes()
    labels = "" if fisher is None else fisher.labels
    return Contents(model.checkpoint, statistics, count, labels=labels, notes=notes)


def _packed_note(model: RunningModel) -> list[str]:
    packed = model.packed_layers()
    why = "packed with others in the model, so without a Gram matrix"
    return [f"{some(packed, 1, quoted=True)}: {why}"] if packed else []
