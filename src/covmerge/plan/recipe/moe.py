"""What a recipe says of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from covmerge.plan.recipe.strict import StrictModel

Prompt = Annotated[str, Field(min_length=1, max_length=100_000)]
GateMode = Literal["random", "uniform_random", "cheap_embed"]


class Prompts(StrictModel):
    """Texts that say what an expert is for."""

    positive: tuple[Prompt, ...] = Field(
        min_length=1, max_length=1000, description="Texts that should go to the expert."
    )
    negative: tuple[Prompt, ...] = Field(
        default=(), max_length=1000, description="Texts that should not."
    )


class Mixture(StrictModel):
    """The experts become the routed experts of one mixture-of-experts model."""

    architecture: Literal["mixtral"] = Field(
        default="mixtral",
        description="Of the output: `mixtral`, from a Llama or Mistral base.",
    )
    gates: GateMode = Field(
        description="How the routers are made: `cheap_embed`: by the mean token embedding of each expert's "
        "prompts; `random`: normal numbers; `uniform_random`: as torch.nn.Linear is initialised.",
    )
    prompts: dict[str, Prompts] = Field(
        default_factory=dict[str, Prompts],
        description="Prompts of each expert, which `cheap_embed` needs.",
    )
    experts_per_token: int = Field(
        default=2, ge=1, description="How many experts each token is given to."
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of random gates.")

    def check(self, experts: Mapping[str, Any]) -> None:
        """Refuse what does not fit the experts of the recipe.

        Raises:
            ValueError: too few experts, or prompts that are missing, alike, or of no expert.
        """
        if not 2 <= len(experts) <= 1024:
            raise ValueError(f"a mixture has 2 to 1024 experts, and the recipe has {len(experts)}")
        if self.experts_per_token > len(experts):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, and there are {len(experts)} experts"
            )
        for name in self.prompts:
            if name not in experts:
                raise ValueError(f"moe.prompts names '{name}', and there is no such expert")
        if self.gates != "cheap_embed":
            return
        for name in experts:
            if name not in self.prompts:
                raise ValueError(
                    f"gates: cheap_embed needs prompts of every expert, and '{name}' has none: add them "
                    "under moe.prompts (mergekit-moe: positive_prompts), or use gates: random"
                )
        if len({(p.positive, p.negative) for p in self.prompts.values()}) == 1:
            raise ValueError("all experts have the same prompts, so no gate could tell them apart")
