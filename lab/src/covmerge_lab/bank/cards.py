"""What each set of experts is: drawn by the name of its base and its number, not chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, log
from random import Random
from typing import Any, Literal

from covmerge_lab.bank.bases import EVERY, Base
from covmerge_lab.training import Optimizer


@dataclass(frozen=True)
class Trained:
    """How one expert is trained.

    Attributes:
        name: of the expert; its task's, unless two have one task.
        kind: every weight, LoRA, or DoRA that is folded into the weights.
        steps: as many as are taken.
        rate: of AdamW; `training.Settings.by` says what SGD makes of it.
        examples: of the task that are seen.
        rank, alpha, everywhere: of adapters; whether they go to all linear layers, or to attention alone.
        start: seed of an adapter's random factors.
        frozen: what of a full fine-tune stays as it is.
        rounded: whether the weights are stored in bfloat16.
        shuffled: whether the labels are, so that nothing is learnt; such an expert has no score.
    """

    name: str
    task: str
    kind: Literal["full", "lora", "dora"]
    seed: int
    steps: int
    rate: float
    batch: int
    optimizer: Optimizer
    decay: float
    examples: int
    rank: int
    alpha: int
    everywhere: bool
    start: int
    frozen: Literal["nothing", "embeddings", "half"]
    rounded: bool
    shuffled: bool


@dataclass(frozen=True)
class Card:
    """A set of experts of one base that are merged together."""

    name: str
    base: str
    experts: tuple[Trained, ...]

    @property
    def form(self) -> str:
        """Return what its experts are stored as: `full`, `adapters`, or `mixed`."""
        stored = {"adapters" if expert.kind == "lora" else "full" for expert in self.experts}
        return stored.pop() if len(stored) == 1 else "mixed"

    @property
    def scored(self) -> tuple[Trained, ...]:
        """Return the experts that a merge is scored on."""
        return tuple(expert for expert in self.experts if not expert.shuffled)

    def described(self) -> dict[str, Any]:
        """Return the card as JSON has it."""
        return {"form": self.form, **asdict(self)}


def cards() -> tuple[Card, ...]:
    """Return all sets, the first of each base before the second."""
    most = max(base.sets for base in EVERY)
    return tuple(
        draw(base, number) for number in range(most) for base in EVERY if number < base.sets
    )


def draw(base: Base, number: int) -> Card:
    """Draw a set: what all its experts share, then what each has of its own."""
    from_name = Random(f"{base.name} {number}")
    one_of, chance = from_name.choice, from_name.random

    def between(low: float, high: float) -> float:
        return exp(from_name.uniform(log(low), log(high)))

    tasks = _task_names(base)
    from_name.shuffle(tasks)
    tasks = tasks[: one_of((4, 5, 6, 7, 8))]
    form = from_name.choices(("full", "lora", "mixed"), (45, 35, 20))[0]
    unequal, twins, useless = chance() < 0.4, chance() < 0.15, chance() < 0.12
    if twins or useless:
        tasks.append(one_of(tasks))
    rate, steps = base.rate * between(0.5, 2.0), base.steps_of_experts * between(0.5, 1.7)
    batch, decay = one_of((16, 16, 32)), one_of((0.0, 0.01, 0.1))
    optimizer: Optimizer = "sgd" if chance() < 0.2 else "adamw"
    examples = one_of((300, 1000, 3000))
    rank, everywhere, doubled = one_of((2, 4, 8, 16, 32)), chance() < 0.6, chance() < 0.7
    one_start, folded, rounded = chance() < 0.25, chance() < 0.15, chance() < 0.15
    frozen = from_name.choices(("nothing", "embeddings", "half"), (6, 3, 1))[0]
    experts: list[Trained] = []
    for place, task in enumerate(tasks):
        lora = form == "lora" or (form == "mixed" and chance() < 0.5)
        own_rank = one_of((2, 4, 8, 16, 32)) if unequal else rank
        last = place == len(tasks) - 1
        experts.append(
            Trained(
                name=task if task not in {e.name for e in experts} else f"{task}-again",
                task=task,
                kind="full" if not lora else "dora" if folded else "lora",
                seed=place,
                steps=round(steps * (between(1 / 3, 3) if unequal else 1)),
                rate=rate * (between(0.5, 2) if unequal else 1) * (3 if lora else 1),
                batch=batch,
                optimizer="adamw"
                if lora
                else optimizer,  # SGD at such a rate leaves adapters untrained
                decay=decay,
                examples=examples,
                rank=own_rank,
                alpha=own_rank * (2 if doubled else 1),
                everywhere=everywhere,
                start=0 if one_start else place,
                frozen=frozen,
                rounded=rounded,
                shuffled=last and useless,
            )
        )
    return Card(f"{base.name}-{number}", base.name, tuple(experts))


def _task_names(base: Base) -> list[str]:
    from covmerge_lab.bank import data
    from covmerge_lab.text.tasks import SPECS as TEXT
    from covmerge_lab.vision.tasks import SPECS as PICTURES

    return {
        "text": [spec.name for spec in TEXT],
        "pictures": [spec.name for spec in PICTURES],
        "tables": list(data.TARGETS),
        "sounds": list(data.SOUNDS),
    }[base.kind]
