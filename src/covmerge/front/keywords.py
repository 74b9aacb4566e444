"""Keyword arguments of the public functions. Their descriptions are the flags' help and the reference page.

Nothing here imports torch: the command line shows its help without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import TypedDict, get_original_bases

if TYPE_CHECKING:
    import torch

    from covmerge.maths.steps import Steps
    from covmerge.run.engine.progress import AnyProgress
    from covmerge.run.engine.workers import Workers
    from covmerge.run.scoring.scorer import AnyScorer
    from covmerge.run.search.trials import Sampler

OutputForm = Literal["model", "adapter", "peft", "kohya", "diffusers"]


class RunKeywords(TypedDict, total=False):
    """How the work is done.

    Attributes:
        device: where the mathematics runs: `cpu`, `cuda`, `cuda:1`, `mps` or `auto`.
        threads: CPU threads; torch's setting by default.
        max_memory: memory of the process, such as 8GB; obeyed, or refused before any work.
        progress: called for every finished piece of work: a function of the bytes done, the bytes in all
            and the tensor last done, a `Progress`, or a class of bars such as `tqdm.auto.tqdm`.
    """

    device: str | torch.device
    threads: int | None
    max_memory: int | str | None
    progress: AnyProgress | None


class AlignKeywords(RunKeywords, total=False):
    """Which tensors are taken, and how they are computed.

    Attributes:
        tensors: what happens to tensors of a kind, such as `embeddings`; see `tensors` of a recipe.
        rules: exceptions by tensor name or role; see `rules` of a recipe.
        dtype: dtype of the computation: `float32`, by default, or `float64`.
    """

    tensors: Mapping[str, str] | None
    rules: Sequence[Mapping[str, Any]]
    dtype: str | torch.dtype


class ExtractKeywords(AlignKeywords, total=False):
    """How tensors are stored, and what stops the work.

    Attributes:
        allow: faults of the experts in spite of which a merge goes on, though they make it worthless:
            `not-a-fine-tune`, `swapped-tensors`, `unchanged-expert` or `changed-integers`.
        out_dtype: stored dtype: `base` (the base's, by default), `float32`, `float16`, `bfloat16` or
            `float64`.
        workers: processes that share the work, with the same bytes; `auto`: as many as the work, the cores
            and the memory are worth. Sources and output are files then.
        overwrite: replace an earlier output of covmerge.
    """

    allow: Sequence[str]
    out_dtype: str | torch.dtype
    workers: Workers
    overwrite: bool


class MethodKeywords(ExtractKeywords, total=False):
    """What each expert counts for, and what is done beside the method.

    Attributes:
        weights: share of each expert; 1 is neutral. Of an expert alone it is the share of its update.
        statistics: statistics files of experts, from `covmerge collect`, for methods that use data.
        tokenizer: whose tokens the output has: `base`, an expert's name, or `union` for all; embeddings are
            then merged token by token.
        before: steps before the method, in order; see `covmerge methods`.
        after: steps after the method, likewise.
    """

    weights: Mapping[str, float] | Sequence[float] | None
    statistics: Mapping[str, str | Path] | None
    tokenizer: str
    before: Steps
    after: Steps


class MergeKeywords(MethodKeywords, total=False, extra_items=Any):
    """How the output is written, and who shares the work. Other keywords are the method's parameters.

    Attributes:
        form: merged weights (`model`, by default), or one adapter of the base: in the experts' form
            (`adapter`) or the one named.
        rank: largest rank of the merged adapter; exact, of all ranks together, by default.
        whole: have the adapter hold what full models changed outside their layers, as it is.
        shard_size: largest file, such as 5GB (the default) or 512MiB.
        quantise: quantised format of linear layers: `same` (as the base), `fp8-block`, `nf4`, `gptq` and
            others (docs/quantised.md).
        keep: patterns of tensor names that quantising leaves plain, such as '*.down_proj.*'.
        executor: what does the work: `threads`, `processes`, `ranks` or `ray`. `ranks`: several processes,
            which srun or torchrun started for one output, share it. `ray`: the nodes of a Ray cluster do
            it; they share sources and output. By default threads, or processes where there are workers.
        address: of the Ray cluster, as `ray.init` takes it; within `ray job submit` it is known.
        patience: seconds for which a rank that is not heard of is taken to be there; 120 by default.
        resume: go on with an interrupted merge.
    """

    form: OutputForm
    rank: int | None
    whole: bool
    shard_size: int | str
    quantise: str
    keep: Sequence[str]
    executor: str | None
    address: str | None
    patience: float
    resume: bool


class ScoringKeywords(RunKeywords, total=False):
    """How models are scored.

    Attributes:
        scorers: how many models a command scores at once; it has its number, from 0, in the environment
            variable COVMERGE_SCORER, to choose a GPU by.
    """

    scorers: int


class CompareKeywords(MethodKeywords, ScoringKeywords, total=False):
    """Which models are scored, and by what.

    Attributes:
        score: what scores every model, more is better: a command with `{model}` in it that prints a
            number, or JSON of task: number, or of task: list of one number for each example; or
            `lm-eval:TASKS`, `sentence-transformers:FILE` or `transformers:FILE`.
        bounds: score the base and each expert too.
        resume: take the models of an earlier run that are there, and score those that have no score.
    """

    score: AnyScorer | None
    bounds: bool
    resume: bool


class SearchKeywords(ScoringKeywords, total=False):
    """What is searched, and how.

    Attributes:
        trials: how many choices are tried in all.
        objectives: tasks that are searched together, for a Pareto front; by default the mean over all.
        sampler: what chooses, of Optuna: `tpe`, `cmaes` or `random`.
        seed: seed of what the sampler draws.
        together: how many choices are merged in one reading, where the memory holds so many.
        all_examples: have the search see all examples; by default it sees one half of each task's, where
            the scorer gives a number for each, and the other half says how far the search fits its own.
        resume: go on with a search that was begun.
    """

    trials: int
    objectives: Sequence[str]
    sampler: Sampler
    seed: int
    together: int
    all_examples: bool
    resume: bool


_F = TypeVar("_F", bound=Callable[..., Any])
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)


@cache
def descriptions(keywords: Any) -> dict[str, str]:
    """Return what each of some keywords is for, as one sentence or more.

    Example:
        >>> descriptions(MergeKeywords)["whole"]
        'have the adapter hold what full models changed outside their layers, as it is.'
    """
    found: dict[str, str] = {}
    for group in get_original_bases(keywords):
        if group is not TypedDict:
            found |= descriptions(group)
    entries = _ENTRY.findall(cleandoc(keywords.__doc__ or ""))
    return found | {name: " ".join(text.split()) for name, text in entries}


def takes(keywords: type[Mapping[str, Any]], job: Any = None) -> Callable[[_F], _F]:
    """Have `help` and completion list the keywords of a function that takes them as `**options`.

    Args:
        keywords: which they are.
        job: what is made of them, whose fields have the defaults.
    """

    def listed(function: _F) -> _F:
        known = signature(function)
        found = [p for p in known.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        names = [name for name in keywords.__annotations__ if name not in known.parameters]
        found += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(job, name, ...))
            for name in names
        ]
        function.__signature__ = known.replace(parameters=found)  # pyright: ignore[reportFunctionMemberAccess]
        texts = descriptions(keywords)
        lines = "\n".join(f"    {name}: {texts[name]}" for name in names)
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions:\n{lines}"
        return function

    return listed
