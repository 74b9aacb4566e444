"""covmerge: merge fine-tuned models of one base into one, without data.

    covmerge.merge("base", {"code": "./code", "math": "./math"}, method="ace", out="./merged")

Everything public is reachable from here and imported on first use, so that `import covmerge` and
`covmerge --help` do not wait for torch.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from covmerge.base.version import __version__
from covmerge.moved import Moved

if TYPE_CHECKING:
    MYPY = False  # which mypy takes for true
    # Each from the file that defines it: `run.verification.verify` and `plan.statistics.collect` are a
    # file and the function in it, and checkers differ on which of the two the package has.
    from covmerge import methods, steps, testing
    from covmerge.base.diagnostics import Diagnostics, Summary, TensorDiagnostics
    from covmerge.base.types import LinearGroup, LowRank, Merged
    from covmerge.files.checkpoints.open import open_checkpoint
    from covmerge.front.api import (
        compare,
        extract,
        inspect,
        plan_recipe,
        report,
        run_recipe,
        search,
    )
    from covmerge.front.publish import push
    from covmerge.front.reporting import figures as figures
    from covmerge.maths.layer import merge_layer
    from covmerge.maths.linalg.auto import Cost
    from covmerge.maths.methods.registry import GlobalPass, Laws, Reference, register
    from covmerge.maths.steps.registry import register_step
    from covmerge.plan.recipe import Recipe, load_recipe, parse_recipe
    from covmerge.plan.statistics.collect import collect
    from covmerge.plan.statistics.generated import Generated
    from covmerge.run.comparison import Comparison
    from covmerge.run.engine.options import RunOptions
    from covmerge.run.engine.progress import Progress
    from covmerge.run.export.expert_models import load_expert
    from covmerge.run.result import MergedFolder, MergedTensors, MergeResult
    from covmerge.run.search.result import Search
    from covmerge.run.verification.verify import verify

    if MYPY:
        from covmerge.front.for_mypy import merge
    else:
        from covmerge.front.api import merge

sys.meta_path.insert(0, Moved())

_HOMES = {
    "Comparison": "covmerge.run.comparison",
    "Cost": "covmerge.maths.linalg.auto",
    "Generated": "covmerge.plan.statistics",
    "Laws": "covmerge.maths.methods.registry",
    "LinearGroup": "covmerge.base.types",
    "LowRank": "covmerge.base.types",
    "MergeResult": "covmerge.run.result",
    "Merged": "covmerge.base.types",
    "MergedFolder": "covmerge.run.result",
    "MergedTensors": "covmerge.run.result",
    "Diagnostics": "covmerge.base.diagnostics",
    "Progress": "covmerge.run.engine.progress",
    "Reference": "covmerge.maths.methods.registry",
    "RunOptions": "covmerge.run.engine.options",
    "TensorDiagnostics": "covmerge.base.diagnostics",
    "GlobalPass": "covmerge.maths.methods.registry",
    "Summary": "covmerge.base.diagnostics",
    "collect": "covmerge.plan.statistics",
    "compare": "covmerge.front.api",
    "extract": "covmerge.front.api",
    "inspect": "covmerge.front.api",
    "load_expert": "covmerge.run.export.expert_models",
    "merge": "covmerge.front.api",
    "merge_layer": "covmerge.maths.layer",
    "open_checkpoint": "covmerge.files.checkpoints.open",
    "plan_recipe": "covmerge.front.api",
    "push": "covmerge.front.publish",
    "register": "covmerge.maths.methods.registry",
    "register_step": "covmerge.maths.steps.registry",
    "report": "covmerge.front.api",
    "run_recipe": "covmerge.front.api",
    "search": "covmerge.front.api",
    "verify": "covmerge.run.verification",
    "Recipe": "covmerge.plan.recipe",
    "Search": "covmerge.run.search.result",
    "load_recipe": "covmerge.plan.recipe",
    "parse_recipe": "covmerge.plan.recipe",
}

# Public names of before, and where they went.
_GONE = {
    "collect_regmean_pp": "it is in covmerge-lab: from covmerge_lab.regmean_pp import collect_regmean_pp"
}

# Subpackages: `covmerge.methods.names()`. Figures are not in __all__, as they need an extra.
# Older names, for one release.
_FORMER = {
    "Noticed": "Diagnostics",
    "Seen": "TensorDiagnostics",
    "Survey": "GlobalPass",
    "Words": "Summary",
}

_PACKAGES = {
    "errors": "covmerge.errors",
    "figures": "covmerge.front.reporting.figures",
    "methods": "covmerge.methods",
    "steps": "covmerge.steps",
    "testing": "covmerge.testing",
}

__all__ = [
    "Comparison",
    "Cost",
    "Diagnostics",
    "Generated",
    "GlobalPass",
    "Laws",
    "LinearGroup",
    "LowRank",
    "MergeResult",
    "Merged",
    "MergedFolder",
    "MergedTensors",
    "Progress",
    "Recipe",
    "Reference",
    "RunOptions",
    "Search",
    "Summary",
    "TensorDiagnostics",
    "__version__",
    "collect",
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
    "search",
    "steps",
    "testing",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(_PACKAGES[name])
    if name in _FORMER:
        warnings.warn(
            f"covmerge.{name} is now covmerge.{_FORMER[name]}", DeprecationWarning, stacklevel=2
        )
        name = _FORMER[name]
    if name not in _HOMES:
        where = f": {_GONE[name]}" if name in _GONE else ""
        raise AttributeError(f"module 'covmerge' has no attribute '{name}'{where}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
