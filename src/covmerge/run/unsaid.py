"""What a recipe leaves open of the base's inputs, settled before a merge is planned.

A method that looks at them is far better with them (docs/auto-results.md), and they cost one run of the
base on inputs that are drawn. So they are made wherever that can be done; where not, the plan says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import psutil

from covmerge.base.choice import UNNAMED
from covmerge.base.errors import InputError
from covmerge.base.memory import all_memory
from covmerge.files.checkpoints import AdapterCheckpoint, Checkpoint
from covmerge.files.checkpoints.memory import MemoryCheckpoint
from covmerge.files.checkpoints.unwrapped import Unwrapped
from covmerge.files.stores.disk import free_bytes
from covmerge.files.tensors import Donor, Stacked, describe_checkpoint
from covmerge.maths.methods import registry
from covmerge.plan.recipe import NOTHING, RANDOM, Recipe, format_size
from covmerge.plan.statistics.needed import disk_needed, memory_by_block
from covmerge.plan.statistics.of_base import kept_in

# Of the memory that the machine has, where no limit is given: what else runs on it is not known, and the
# same merge is to be the same tomorrow.
_SHARE = 0.75


@dataclass(frozen=True)
class Settled:
    """Recipes that leave nothing open.

    Attributes:
        recipes: with `base_statistics`, where one of their methods looks at them.
        wanted: whether the base's inputs are to be made, though nobody asked for it.
        why_not: why they are not, though a method looks at them.
    """

    recipes: Sequence[Recipe]
    wanted: bool = False
    why_not: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        if self.why_not is None:
            return ()
        return (
            f"what the base's layers see is not known: {self.why_not}. On eight sets of experts auto "
            "had 0.6 to 6 points of accuracy more with it (docs/auto-results.md)",
        )

    def without(self, why: str) -> Settled:
        """The same with nothing known of the base's inputs."""
        return Settled(_all_with(self.recipes, NOTHING), why_not=why)


def settle(
    recipes: Sequence[Recipe],
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    max_memory: int | None,
    made: Callable[[], bool],
) -> Settled:
    """Decide whether the base's inputs are made.

    Args:
        recipes: over the same checkpoints.
        base: what the experts were fine-tuned from.
        experts: what is merged.
        max_memory: bytes that the process may take; None: no limit is given.
        made: whether an earlier run has made them, which is asked where the disk has no room for them.
    """
    looks = any(looks_at_base(recipe) for recipe in recipes)
    if not looks or any(recipe.base_statistics is not None for recipe in recipes):
        return Settled(recipes)
    settled = Settled(_all_with(recipes, RANDOM), wanted=True)
    reason = why_not(recipes[0], base, experts, max_memory, made)
    return settled if reason is None else settled.without(reason)


def looks_at_base(recipe: Recipe) -> bool:
    """Whether one of its methods looks at the base's inputs, or will where none is named."""
    if recipe.method == UNNAMED:
        return len(recipe.experts) > 1
    names = [recipe.method, *(rule.method for rule in recipe.rules if rule.method is not None)]
    return any(registry.get(name).base_inputs for name in names)


def why_not(
    recipe: Recipe,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    max_memory: int | None,
    made: Callable[[], bool],
) -> str | None:
    """Say why the base cannot be run, or is not; None: it can."""
    if isinstance(base, Donor | Stacked):
        return "the base is no model of its own"
    if isinstance(base, Unwrapped):
        return "the base's tensors are not stored under the names of its model"
    if isinstance(base, MemoryCheckpoint) and base.config is not None:
        return "the base is in memory, and it is run from a folder"
    if base.config is None:
        return "the base has no config.json, by which transformers would run it"
    if find_spec("transformers") is None:
        return "transformers is not installed, which would run the base"
    all_adapters = all(isinstance(expert, AdapterCheckpoint) for expert in experts)
    if recipe.output.format == "adapter" and all_adapters:
        return (
            "an adapter of adapters needs nothing of its base (--base-stats random runs it), so that "
            "nothing goes to the average either, where updates are long beside the base's weights"
        )
    described = describe_checkpoint(base)
    if described.source != "skeleton":
        return f"transformers does not build the base ({described.notes[0]})"
    needed, limit, whose = memory_by_block(base), max_memory, "--max-memory"
    if limit is None:
        there = all_memory()
        limit, whose = int(_SHARE * there.size), there.whose
    else:
        needed += psutil.Process().memory_info().rss
    if needed > limit:
        return (
            f"to run the base takes {format_size(needed)}, and {whose} allows {format_size(limit)} "
            "(`covmerge collect BASE FILE --inputs random` does it on another machine, "
            "for --base-stats FILE)"
        )
    try:
        folder = kept_in()
    except InputError as error:
        return str(error)
    room, free = disk_needed(base), free_bytes(folder)
    if room > free and not made():
        return (
            f"what it sees takes {format_size(room)} of disk, and {folder} has {format_size(free)} free "
            "(COVMERGE_CACHE names another folder)"
        )
    return None


def _all_with(recipes: Sequence[Recipe], base_statistics: str) -> list[Recipe]:
    return [recipe.model_copy(update={"base_statistics": base_statistics}) for recipe in recipes]
