"""Merging methods: one file per paper, each composed of the shared parts.

To add a method, write a file in this folder with a kernel decorated by `@register(...)`, and its tests.
All modules of this folder are imported here, and register their methods.
"""

from importlib import import_module
from pkgutil import iter_modules

from covmerge.maths.methods.ace_diagnostics import AVERAGED, GATE, RIDGE
from covmerge.maths.methods.registry import Method, registry
from covmerge.maths.methods.summaries import ARBITRARY, DEPENDENT, JITTER, UNCHANGED

_MODULES = [found.name for found in iter_modules(__path__) if found.name != "registry"]
for _name in _MODULES:
    import_module(f"{__name__}.{_name}")

# Summaries common to covmerge's methods, in the order of printing. Their totals are in every covmerge.json,
# whatever the method; totals of other summaries are there only if their method was used.
COMMON_SUMMARIES = (GATE, RIDGE, JITTER, UNCHANGED, AVERAGED, DEPENDENT, ARBITRARY)

registry.reserve(
    "nan",
    "its paper (arXiv:2505.16148) sets the coefficients in proportion to 1 over a norm, but whether "
    "of the weights or the updates, per layer or in all, and what factor stands before them, could "
    "not be established; give each expert a `weight` instead",
)
registry.reserve(
    "ct_merging",
    "neither the text nor code of CT-Merging (arXiv:2607.20561) could be had to establish its equations",
)
registry.reserve(
    "net_utility",
    "neither the text nor code of Net Utility (arXiv:2609.22237) could be had to establish its equations",
)
registry.reserve(
    "coram",
    "neither the text nor code of CORAM (arXiv:2608.17366) could be had to establish its equations",
)
registry.reserve(
    "adamerging",
    "it trains its coefficients on unlabelled test data by minimising entropy (arXiv:2310.02575), "
    "which is no merge without training",
)
registry.reserve(
    "regmean++",
    "RegMean++ (arXiv:2508.03121) is `regmean` with `off_diagonal: 0.95` on what layers see behind merged "
    "blocks; `covmerge_lab.regmean_pp` of covmerge-lab collects such statistics files",
)
registry.reserve(
    "fda",
    "FDA (arXiv:2510.21223) makes inputs, and then trains each merged block on them, which is no merge "
    "without training. The inputs could be statistics (as of `covmerge collect --inputs generated`): for "
    "each block and expert, 64 sequences of 5 to 50 vectors at its entry, by AdamW in 1200 steps until "
    "the gradient of the cosine between the base's and the expert's outputs, in the base's weights, "
    "points along Δ_t. `covmerge study anchors` of covmerge-lab makes them, and gives their covariances "
    "to RegMean; there is no merge that trains on them",
)

names = registry.names
get = registry.get

__all__ = ["COMMON_SUMMARIES", "Method", "get", "names", "registry"]
__all__ += _MODULES  # pyright: ignore[reportUnsupportedDunderAll] - each is an attribute
