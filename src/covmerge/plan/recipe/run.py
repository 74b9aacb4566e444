"""`run`: the last checkpoints of one training run, averaged; written as an ordinary recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covmerge.base.errors import RecipeError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.trainer import SavedStep, last_steps
from covmerge.plan.recipe.strict import StrictModel

RUN = "run"


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
    weights: Literal["equal", "step", "ema"] = Field(
        default="equal",
        description="What a checkpoint counts for. `equal`: as much as any other (LAWA); `step`: as its "
        "number; `ema`: `decay` times what the next one counts for.",
    )
    decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        strict=True,
        description="What a checkpoint counts for beside the next one, under `weights: ema`.",
    )

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
        """Return what each checkpoint counts for; the last one 1.

        The weights of an exponential moving average over n checkpoints that forgets where it began:
        w_k ∝ d^(n−k), k = 1, ..., n.

        Raises:
            RecipeError: one of them would count for nothing.

        Example:
            >>> Run(folder="r", weights="ema", decay=0.5).shares([500, 1000, 1500])
            [0.25, 0.5, 1.0]
            >>> Run(folder="r", weights="step").shares([500, 1000, 2000])
            [0.25, 0.5, 1.0]
        """
        if self.weights == "step":
            if steps[0] == 0:
                raise RecipeError(
                    f"'weights: step' gives {self.folder}/checkpoint-0 no weight: take fewer ('last'), or "
                    "'weights: equal'"
                )
            return [step / steps[-1] for step in steps]
        decay = self.decay or 1.0
        return [decay ** (len(steps) - k) for k in range(1, len(steps) + 1)]


def compile_run(
    data: Mapping[str, Any], run: Run, beside: Path, notes: list[str]
) -> dict[str, Any]:
    """Return the recipe that averages the last checkpoints of a run.

    Full models are averaged as they are (`linear`), which needs no base; of adapters their updates
    are (`average`), so that the mean of the products BA is exact.

    Args:
        data: the recipe with `run`.
        run: what is said there.
        beside: what its relative folder is relative to.
        notes: what a reader should know is added to them.

    Raises:
        CheckpointError: there are fewer checkpoints, or one of them is incomplete.
        RecipeError: a checkpoint would count for nothing.
    """
    found = last_steps(run.folder, run.last, beside)
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
            saved.folder.name: {"source": _source(run, saved), "weight": share}
            for saved, share in zip(found, shares, strict=True)
        },
    }


def _source(run: Run, saved: SavedStep) -> str:
    return f"{run.folder.rstrip('/')}/{saved.folder.name}"
