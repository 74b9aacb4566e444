"""Keyword arguments of the public functions; their descriptions are also the flags' help.

Nothing here imports torch, because the command line shows its help without torch.
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
    from covmerge.run.engine.options import Workers
    from covmerge.run.engine.progress import AnyProgress
    from covmerge.run.scoring.scorer import AnyScorer
    from covmerge.run.search.trials import Sampler

OutputForm = Literal["model", "adapter", "peft", "kohya", "diffusers"]


class RunKeywords(TypedDict, total=False):
    """How the work is done.

    Attributes:
        device: where the mathematics runs: `cpu`, `cuda`, `cuda:1`, `mps` or `auto`.
        threads: CPU threads; torch's setting by default.
        max_memory: memory of the process, such as 8GB; the limit is kept, or the work is refused
            before it begins.
        progress: called for every finished piece of work: a function of the bytes done, all bytes
            and the last finished tensor; a `Progress`; or a class of bars such as `tqdm.auto.tqdm`.
    """

    device: str | torch.device
    threads: int | None
    max_memory: int | str | None
    progress: AnyProgress | None


class AlignKeywords(RunKeywords, total=False):
    """Which tensors are used, and how they are computed.

    Attributes:
        tensors: what happens to tensors of a kind, such as `embeddings`; see `tensors` of a recipe.
        rules: exceptions by tensor name or role; see `rules` of a recipe.
        dtype: dtype of the computation: `float32` (the default) or `float64`.
    """

    tensors: Mapping[str, str] | None
    rules: Sequence[Mapping[str, Any]]
    dtype: str | torch.dtype


class ExtractKeywords(AlignKeywords, total=False):
    """How tensors are stored, and what stops the work.

    Attributes:
        allow: faults of the experts that do not stop the merge, although they make it worthless:
            `not-a-fine-tune`, `swapped-tensors`, `unchanged-expert` or `changed-integers`.
        out_dtype: stored dtype: `base` (that of the base, the default), `float32`, `float16`,
            `bfloat16` or `float64`.
        workers: processes that share the work, with the same result; `auto`: as many as are useful
            for the work, the cores and the memory. Sources and output must then be files.
        overwrite: replace an earlier output of covmerge.
    """

    allow: Sequence[str]
    out_dtype: str | torch.dtype
    workers: Workers
    overwrite: bool


class MethodKeywords(ExtractKeywords, total=False):
    """The experts' weights, and what is done besides the method.

    Attributes:
        weights: weight of each expert; 1 is neutral. For a single expert, it scales the expert's
            update.
        statistics: statistics files of experts, from `covmerge collect`, for methods that use data.
        tokenizer: which tokens the output has: those of the `base`, of an expert (its name), or of
            all (`union`); embeddings are then merged token by token.
        before: steps before the method, in order; see `covmerge methods`.
        after: steps after the method, in order.
    """

    weights: Mapping[str, float] | Sequence[float] | None
    statistics: Mapping[str, str | Path] | None
    tokenizer: str
    before: Steps
    after: Steps


class MergeKeywords(MethodKeywords, total=False, extra_items=Any):
    """How the output is written, and what shares the work; other keywords are the method's parameters.

    Attributes:
        form: merged weights (`model`, the default), or one adapter of the base: in the experts'
            form (`adapter`) or in the named form.
        rank: largest rank of the merged adapter; by default the adapter is exact, with the sum of
            all ranks.
        whole: have the adapter also store what full models changed outside their layers, as whole tensors.
        shard_size: largest file, such as 5GB (the default) or 512MiB.
        quantise: quantised format of linear layers: `same` (that of the base), `fp8-block`, `nf4`,
            `gptq` and others (docs/quantised.md).
        keep: patterns of tensor names that are not quantised, such as '*.down_proj.*'.
        executor: what does the work: `threads`, `processes`, `ranks` or `ray`. `ranks`: several
            processes, which srun or torchrun started for one output, share the work. `ray`: the
            nodes of a Ray cluster share the work; they need the same sources and output. The
            default is threads, or processes if there are workers.
        address: address of the Ray cluster, as for `ray.init`; within `ray job submit` it is known.
        patience: seconds without a sign from a rank after which it counts as gone; 120 by default.
        resume: continue an interrupted merge.
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
    """Return the description of each keyword, of one or more sentences.

    Example:
        >>> descriptions(MergeKeywords)["whole"]
        'have the adapter also store what full models changed outside their layers, as whole tensors.'
    """
    found: dict[str, str] = {}
    for group in get_original_bases(keywords):
        if group is not TypedDict:
            found |= descriptions(group)
    entries = _ENTRY.findall(cleandoc(keywords.__doc__ or ""))
    return found | {name: " ".join(text.split()) for name, text in entries}


def takes(keywords: type[Mapping[str, Any]], job: Any = None) -> Callable[[_F], _F]:
    """Make `help` and completion list the keywords of a function that takes them as `**options`.

    Args:
        keywords: the TypedDict of the keywords.
        job: the dataclass that they become, whose fields have the defaults.
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
