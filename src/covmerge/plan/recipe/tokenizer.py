"""The output's vocabulary and chat template, as a recipe states them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from covmerge.base.errors import did_you_mean
from covmerge.base.text import shown
from covmerge.plan.recipe.strict import StrictModel

BASE, UNION, ZERO, AUTO = "base", "union", "zero", "auto"

# The formats of prompts that have a name of their own (`covmerge.plan.vocabulary.chat`).
TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")

_MODEL = Annotated[str, Field(min_length=1)]
_MOST_ROWS = 1 << 24


class TokenRow(StrictModel):
    """Whose row of the embedding a token gets."""

    of: _MODEL = Field(
        description="An expert, `base`, or `zero`: the row is then 0.",
    )
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
    """Let an editor accept `token: expert` beside `token: {of: expert, ...}`."""
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
        """Names of models, each with where it stands; what has a meaning of its own is none."""
        if self.source not in (UNION, BASE):
            yield "source", self.source
        for token, row in self.tokens.items():
            if row.of not in (ZERO, BASE):
                yield f"tokens[{token!r}]", row.of

    @property
    def _of_base(self) -> bool:
        return BASE in (self.source, *(row.of for row in self.tokens.values()))

    def check(self, experts: Collection[str], *, base: bool) -> None:
        """Refuse names that no expert has, and experts whose names have another meaning here.

        Raises:
            ValueError: such a name, or a base where the recipe has none.
        """
        for word in (BASE, UNION, ZERO):
            if word in experts:
                raise ValueError(
                    f"an expert is called '{word}', which means something else in `tokenizer`: rename it"
                )
        for place, name in self.named:
            if name not in experts:
                raise ValueError(
                    f"tokenizer.{place} is '{name}', and there is no such expert."
                    f"{did_you_mean(name, experts)}"
                )
        if self._of_base and not base:
            raise ValueError("'tokenizer' names the base, and the recipe has none")


def check_template(template: str, experts: Collection[str], *, base: bool) -> None:
    """Refuse what is neither a template, nor the name of one or of a model.

    Raises:
        ValueError: so it is.
    """
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
