"""Sections of a recipe: a mixture of experts, a training run, the tokens of the output."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import pairwise
from math import cos, pi, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import shown
from covmerge.files.checkpoints.trainer import Window, last_steps
from covmerge.plan.moe.architectures import ARCHITECTURES, FORMLESS
from covmerge.plan.recipe.parts import StrictModel

# The section for a mixture of experts.

Prompt = Annotated[str, Field(min_length=1, max_length=100_000)]
GateMode = Literal["random", "uniform_random", "cheap_embed", "hidden", "hidden_avg", "update"]
_PROMPTED = ("cheap_embed", "hidden", "hidden_avg")
_LATE = ("update", "hidden", "hidden_avg")


class Prompts(StrictModel):
    """Texts that say what an expert is for."""

    positive: tuple[Prompt, ...] = Field(
        min_length=1, max_length=1000, description="Texts that should go to the expert."
    )
    negative: tuple[Prompt, ...] = Field(
        default=(), max_length=1000, description="Texts that should not."
    )


class Shared(StrictModel):
    """The expert that every token goes through."""

    expert: str = Field(description="Its name among the experts. It is not routed.")
    gated: bool = Field(
        default=False,
        description="Whether it is weighed by a gate of its own (`qwen2_moe`), made as the routers are.",
    )


class Mixture(StrictModel):
    """The experts become the routed experts of one mixture-of-experts model."""

    architecture: Literal["mixtral", "qwen2_moe", "qwen3_moe", "flex_olmo", "deepseek_v3"] = Field(
        default="mixtral",
        description="Of the output: `mixtral`, from a Llama or Mistral base; `qwen2_moe`, from a "
        "Qwen2, Llama or Mistral base, with a shared expert; `qwen3_moe`, from a Qwen3 base; `flex_olmo`, "
        "from an OLMo 2 base; `deepseek_v3`, from a Youtu base, with a shared expert.",
    )
    gates: GateMode = Field(
        description="How the routers are made: `cheap_embed`: by the mean token embedding of each expert's "
        "prompts; `hidden`, `hidden_avg`: by the base's hidden states at their last token, or at all; "
        "`update`: by what its update reads of a layer's inputs, without prompts; `random`: "
        "normal numbers; `uniform_random`: as torch.nn.Linear is initialised.",
    )
    prompts: dict[str, Prompts] = Field(
        default_factory=dict[str, Prompts],
        description="Prompts of each expert, which `cheap_embed`, `hidden` and `hidden_avg` need.",
    )
    experts_per_token: int = Field(
        default=2, ge=1, description="How many experts each token is given to."
    )
    shared: Shared | None = Field(
        default=None,
        description="Which expert is shared, in an architecture with one. By default the base.",
    )
    residual_scale: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict[str, float],
        description="By expert, what its output is multiplied by. By default 1; beside a shared expert "
        "both count 1/2.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of random gates.")

    @field_validator("architecture", mode="before")
    @classmethod
    def _has_a_form(cls, given: object) -> object:
        if isinstance(given, str) and given in FORMLESS:
            raise ValueError(f"no dense model becomes {given}: {FORMLESS[given]}")
        return given

    @property
    def late(self) -> bool:
        """Whether routers are computed when they are read: they need the experts, or a run of the base."""
        return self.gates in _LATE

    @property
    def prompted(self) -> bool:
        return self.gates in _PROMPTED

    def routed(self, experts: Iterable[str]) -> list[str]:
        """Return the names of the routed experts, in their order."""
        return [name for name in experts if self.shared is None or name != self.shared.expert]

    def check(self, experts: Mapping[str, Any]) -> None:
        """Raise if the section does not fit the experts of the recipe."""
        named = {"prompts": [*self.prompts], "residual_scale": [*self.residual_scale]}
        if self.shared is not None:
            named["shared"] = [self.shared.expert]
            self._check_shared(self.shared)
        for key, names in named.items():
            for name in names:
                if name not in experts:
                    raise ValueError(f"moe.{key} names '{name}', and there is no such expert")
        routed = self.routed(experts)
        if not 2 <= len(routed) <= 1024:
            raise ValueError(
                f"a mixture has 2 to 1024 routed experts, and the recipe has {len(routed)}"
            )
        if self.experts_per_token > len(routed):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, and there are {len(routed)} experts"
            )
        if not self.prompted:
            return
        gated = experts if self.shared is not None and self.shared.gated else routed
        for name in gated:
            if name not in self.prompts:
                raise ValueError(
                    f"gates: {self.gates} needs prompts of every expert, and '{name}' has none: add them "
                    "under moe.prompts (mergekit-moe: positive_prompts), or use gates: random"
                )
        if len({(self.prompts[n].positive, self.prompts[n].negative) for n in routed}) == 1:
            raise ValueError("all experts have the same prompts, so no gate could tell them apart")

    def _check_shared(self, shared: Shared) -> None:
        form = ARCHITECTURES[self.architecture]
        if form.shared is None:
            able = " or ".join(name for name, other in ARCHITECTURES.items() if other.shared)
            raise ValueError(
                f"{self.architecture} has no shared expert: leave out moe.shared, or write "
                f"`architecture: {able}`"
            )
        if not shared.gated:
            if shared.expert in self.prompts:
                raise ValueError(
                    f"moe.prompts has prompts of '{shared.expert}', which is shared without a gate: leave "
                    "them out, or write `gated: true`"
                )
            return
        if form.shared_gate is None:
            raise ValueError(
                f"the shared expert of {self.architecture} has no gate: leave out `gated`"
            )
        if self.gates == "update":
            raise ValueError(
                "gates: update compares experts, and a shared one has none to be compared with: leave "
                "out `gated`"
            )


# `run`: the last checkpoints of a training run, averaged. It is compiled to an ordinary recipe.

RUN = "run"

# The share of a learning rate that is left at the place x of its decay, 0 ≤ x ≤ 1.
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + cos(pi * x)) / 2.0,
    "1-sqrt": lambda x: 1.0 - sqrt(x),
}


# Numbers of tokens with a suffix, and the exponent of 10 for each suffix.
_COUNT = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?[KMBT]?")
_THOUSANDS = {"K": 3, "M": 6, "B": 9, "T": 12}


def _tokens(given: str | int) -> int:
    """Return the number of tokens in a text such as `1.5B`.

    Example:
        >>> _tokens("1.5B"), _tokens(4096)
        (1500000000, 4096)
    """
    text = str(given)
    power = _THOUSANDS.get(text[-1:], 0)
    found = int(Decimal(text.rstrip("KMBT")).scaleb(power)) if _COUNT.fullmatch(text) else 0
    if found < 1:
        raise ValueError(f"'{text}' is no number of tokens: write one such as 12000000000, or 12B")
    return found


class Run(StrictModel):
    """In place of `experts`: the last checkpoints of one training run."""

    folder: Annotated[str, Field(min_length=1)] = Field(
        description="Folder that the trainer wrote its checkpoints to: checkpoint-500/, checkpoint-1000/ "
        "and so on, or step-500/ (path relative to the recipe file). They may be full models, adapters, or "
        "folders of torch.distributed.checkpoint."
    )
    last: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="How many of them, by their numbers, from the last one back; all by default.",
    )
    tokens: str | Annotated[int, Field(strict=True)] | None = Field(
        default=None,
        description="In place of `last`: `12B` or 12000000000 takes the checkpoints of the run's last 12 "
        "billion tokens, by what each says in its trainer_state.json.",
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens that a step of the optimizer takes, where the checkpoints do not say it.",
    )
    weights: Literal["equal", "step", "ema", "linear", "cosine", "1-sqrt"] = Field(
        default="equal",
        description="What a checkpoint counts for. `equal`: as much as any other (LAWA); `step`: as its "
        "number; `ema`: `decay` times what the next one counts for; `linear`, `cosine` and `1-sqrt`: so "
        "that the mean stands where a learning rate that decays so would have led (WSM).",
    )
    decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        strict=True,
        description="What a checkpoint counts for beside the next one, under `weights: ema`.",
    )

    @model_validator(mode="after")
    def _one_window(self) -> Run:
        if self.tokens is not None and self.last is not None:
            raise ValueError(
                "'tokens' and 'last' both say how many are taken: leave out one of them"
            )
        if self.tokens is not None:
            _tokens(self.tokens)
        if self.tokens_per_step is not None and self.tokens is None:
            raise ValueError(
                f"'tokens_per_step' is for a window of tokens: give 'tokens' ({Hint('tokens')}) too, or "
                "leave it out"
            )
        return self

    @property
    def window(self) -> int | Window | None:
        """The checkpoints to take: a number, a window of tokens, or None for all."""
        if self.tokens is None:
            return self.last
        return Window(_tokens(self.tokens), self.tokens_per_step)

    @model_validator(mode="after")
    def _decay_of_ema(self) -> Run:
        if self.weights == "ema" and self.decay is None:
            raise ValueError(
                f"'weights: ema' needs a 'decay' ({Hint('decay')}), such as 0.8: what a checkpoint "
                "counts for beside the next one"
            )
        if self.weights != "ema" and self.decay is not None:
            raise ValueError(f"'decay' belongs to 'weights: ema', and they are '{self.weights}'")
        return self

    def shares(self, steps: list[int]) -> list[float]:
        """Return the weight of each checkpoint relative to the others.

        An exponential moving average over n checkpoints, without its initial value, has the weights
        w_k ∝ d^(n−k), k = 1, ..., n. A decay f from 1 to 0 has the weights c_k = f(x_(k−1)) −
        f(x_k), so that the learning between s_k and s_(k+1) is weighted by f(x_k) (WSM,
        arXiv:2507.17634). Departs from the paper: x_k depends on steps, (s_(k+1) − s_1) / (s_n −
        s_1) · (n − 1) / n, which is k / n if the steps are evenly spaced.

        Example:
            >>> Run(folder="r", weights="ema", decay=0.5).shares([500, 1000, 1500])
            [0.25, 0.5, 1.0]
            >>> Run(folder="r", weights="step").shares([500, 1000, 2000])
            [0.25, 0.5, 1.0]
            >>> Run(folder="r", weights="linear").shares([500, 1000, 1500, 2000])
            [0.25, 0.25, 0.25, 0.25]
        """
        if self.weights in _DECAYS:
            left = [_DECAYS[self.weights](place) for place in _places(steps)]
            return [before - after for before, after in pairwise([1.0, *left, 0.0])]
        if self.weights == "step":
            if steps[0] == 0:
                raise RecipeError(
                    f"'weights: step' gives {self.folder}/checkpoint-0 no weight: take fewer ('last'), or "
                    "'weights: equal'"
                )
            return [step / steps[-1] for step in steps]
        decay = self.decay or 1.0
        return [decay ** (len(steps) - k) for k in range(1, len(steps) + 1)]


def _places(steps: list[int]) -> list[float]:
    """Return the place of each checkpoint after the first in a decay that ends one step past the last."""
    count, length = len(steps), steps[-1] - steps[0]
    return [(step - steps[0]) * (count - 1) / (length * count) for step in steps[1:]]


def compile_run(
    data: Mapping[str, Any], run: Run, beside: Path, notes: list[str]
) -> dict[str, Any]:
    """Return the recipe that averages the last checkpoints of a run; notes are added to the list.

    Full models are averaged directly (`linear`), which needs no base. For adapters the updates are
    averaged (`average`), so that the mean of the products BA is exact.
    """
    found = last_steps(run.folder, run.window, beside)
    shares = run.shares([saved.step for saved in found])
    if names := sorted({name for saved in found for name in saved.own}):
        notes.append(
            f"{', '.join(names)} of the checkpoints are the trainer's own, and are left aside"
        )
    return {
        "base": None,
        "method": "average" if all(saved.is_adapter for saved in found) else "linear",
        **{key: value for key, value in data.items() if key != RUN},
        "experts": {
            (name := saved.folder.name): {
                "source": f"{run.folder.rstrip('/')}/{name}",
                "weight": share,
            }
            for saved, share in zip(found, shares, strict=True)
        },
    }


# The output's vocabulary and chat template in a recipe.

BASE, UNION, ZERO, AUTO = "base", "union", "zero", "auto"

# The prompt formats that have names (`covmerge.plan.vocabulary.files`).
TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")

_MODEL = Annotated[str, Field(min_length=1)]
_MOST_ROWS = 1 << 24


class TokenRow(StrictModel):
    """Whose row of the embedding a token gets."""

    of: _MODEL = Field(description="An expert, `base`, or `zero`: the row is then 0.")
    token: str | None = Field(
        default=None,
        min_length=1,
        description="The token there whose row it is; by default that of the same text.",
    )
    id: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        default=None, description="In place of `token`: its number there."
    )
    force: bool = Field(
        default=False,
        description="Whether all models get this row. By default those that have the token keep their own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"of": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_row(self) -> TokenRow:
        if self.token is not None and self.id is not None:
            raise ValueError("'token' and 'id' both name the row; remove one of them")
        if self.of == ZERO and (self.token is not None or self.id is not None):
            raise ValueError("a row of `zero` is of no token; remove 'token' or 'id'")
        return self


def _short_token_form(schema: dict[str, Any]) -> None:
    """Change the schema so that editors accept `token: expert` beside `token: {of: expert, ...}`."""
    schema["additionalProperties"] = {
        "anyOf": [{"type": "string", "minLength": 1}, schema["additionalProperties"]]
    }


class TokenizerRules(StrictModel):
    """Which tokens the output has, and whose rows they are."""

    source: _MODEL = Field(
        default=UNION,
        description="`base`: the base's tokenizer; an expert's name: that of this expert; `union`: the "
        "base's with the tokens that only experts have, in the order of the experts and of their numbers "
        "there. A model that lacks a token gets the base's row, or the mean of those that have it. Without "
        "a base the first expert's tokenizer is extended, and all such rows are means.",
    )
    tokens: dict[Annotated[str, Field(min_length=1, max_length=1000)], TokenRow] = Field(
        default_factory=dict[str, TokenRow],
        max_length=10_000,
        json_schema_extra=_short_token_form,
        description="Tokens with rules of their own: token to model, or to a mapping. One that the "
        "vocabulary lacks is added to it.",
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=_MOST_ROWS, strict=True)] | None = Field(
        default=None,
        description="The embedding's rows are filled up to a multiple of this, each by the mean of its "
        "model's rows.",
    )

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """Names of models, each with its place; words with a special meaning are no names of models."""
        if self.source not in (UNION, BASE):
            yield "source", self.source
        for token, row in self.tokens.items():
            if row.of not in (ZERO, BASE):
                yield f"tokens[{token!r}]", row.of

    @property
    def _of_base(self) -> bool:
        return BASE in (self.source, *(row.of for row in self.tokens.values()))

    def check(self, experts: Collection[str], *, base: bool) -> None:
        """Raise if a name is no expert's, or an expert's name has a special meaning here."""
        for word in (BASE, UNION, ZERO):
            if word in experts:
                raise ValueError(
                    f"an expert is called '{word}', which means something else in `tokenizer`: rename it"
                )
        for place, name in self.named:
            if name not in experts:
                whole = place == "source"
                where = Hint("tokenizer", name) if whole else f"tokenizer.{place} is '{name}'"
                raise ValueError(f"{where}: there is no such expert.{did_you_mean(name, experts)}")
        if self._of_base and not base:
            raise ValueError("'tokenizer' names the base, and the recipe has none")


def check_template(template: str, experts: Collection[str], *, base: bool) -> None:
    """Raise if the text is no template, no name of a template, and no name of a model."""
    if "{" in template:
        return
    choices = (AUTO, BASE, *TEMPLATES)
    if template in choices and template in experts:
        raise ValueError(
            f"chat_template {template!r} is the name of an expert too: rename the expert"
        )
    if template == BASE and not base:
        raise ValueError("'chat_template' is the base's, and the recipe has none")
    if template not in (*choices, *experts):
        hint = did_you_mean(template, [*choices, *experts])
        raise ValueError(
            f"chat_template is {shown(template)}; it is one of {', '.join(choices)}, an expert's name, or "
            f"Jinja.{hint}"
        )
