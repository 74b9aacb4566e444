"""covmerge: merge fine-tuned models of one base into one, without data.

    covmerge.merge("base", {"code": "./code", "math": "./math"}, method="ace", out="./merged")

Everything public is reachable from here and imported on first use, so that `import covmerge` and
`covmerge --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from covmerge.version import __version__

if TYPE_CHECKING:
    # Each from the file that defines it: `covmerge.verification.verify` and `covmerge.statistics.collect`
    # are a file and the function in it, and checkers differ on which of the two the package has.
    from covmerge import methods, steps, testing
    from covmerge.api import compare, extract, inspect, merge, plan_recipe, report, run_recipe
    from covmerge.checkpoints import open_checkpoint
    from covmerge.comparison import Comparison
    from covmerge.engine import Progress, RunOptions
    from covmerge.export import load_expert
    from covmerge.layer import merge_layer
    from covmerge.linalg.auto import Cost
    from covmerge.methods.registry import Laws, Reference, Survey, register
    from covmerge.noticed import Noticed, Seen, Words
    from covmerge.publish import push
    from covmerge.recipe import Recipe, load_recipe, parse_recipe
    from covmerge.reporting import figures as figures
    from covmerge.result import MergedFolder, MergedTensors, MergeResult
    from covmerge.statistics.collect import collect
    from covmerge.statistics.generated import Generated
    from covmerge.statistics.regmean_pp import collect_regmean_pp
    from covmerge.steps.registry import register_step
    from covmerge.types import LinearGroup, LowRank, Merged
    from covmerge.verification.verify import verify

_HOMES = {
    "Comparison": "covmerge.comparison",
    "Cost": "covmerge.linalg.auto",
    "Generated": "covmerge.statistics",
    "Laws": "covmerge.methods.registry",
    "LinearGroup": "covmerge.types",
    "LowRank": "covmerge.types",
    "MergeResult": "covmerge.result",
    "Merged": "covmerge.types",
    "MergedFolder": "covmerge.result",
    "MergedTensors": "covmerge.result",
    "Noticed": "covmerge.noticed",
    "Progress": "covmerge.engine",
    "Reference": "covmerge.methods.registry",
    "RunOptions": "covmerge.engine",
    "Seen": "covmerge.noticed",
    "Survey": "covmerge.methods.registry",
    "Words": "covmerge.noticed",
    "collect": "covmerge.statistics",
    "collect_regmean_pp": "covmerge.statistics",
    "compare": "covmerge.api",
    "extract": "covmerge.api",
    "inspect": "covmerge.api",
    "load_expert": "covmerge.export",
    "merge": "covmerge.api",
    "merge_layer": "covmerge.layer",
    "open_checkpoint": "covmerge.checkpoints",
    "plan_recipe": "covmerge.api",
    "push": "covmerge.publish",
    "register": "covmerge.methods.registry",
    "register_step": "covmerge.steps.registry",
    "report": "covmerge.api",
    "run_recipe": "covmerge.api",
    "verify": "covmerge.verification",
    "Recipe": "covmerge.recipe",
    "load_recipe": "covmerge.recipe",
    "parse_recipe": "covmerge.recipe",
}

# Subpackages: `covmerge.methods.names()`. Figures are not in __all__, as they need an extra.
_PACKAGES = {
    "figures": "covmerge.reporting.figures",
    "methods": "covmerge.methods",
    "steps": "covmerge.steps",
    "testing": "covmerge.testing",
}

__all__ = [
    "Comparison",
    "Cost",
    "Generated",
    "Laws",
    "LinearGroup",
    "LowRank",
    "MergeResult",
    "Merged",
    "MergedFolder",
    "MergedTensors",
    "Noticed",
    "Progress",
    "Recipe",
    "Reference",
    "RunOptions",
    "Seen",
    "Survey",
    "Words",
    "__version__",
    "collect",
    "collect_regmean_pp",
    "compare",
    "extract",
    "inspect",
    "load_expert",
    "load_recipe",
    "merge",
    "merge_layer",
    "methods",
    "open_checkpoint",
    "parse_recipe",
    "plan_recipe",
    "push",
    "register",
    "register_step",
    "report",
    "run_recipe",
    "steps",
    "testing",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(_PACKAGES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'covmerge' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
