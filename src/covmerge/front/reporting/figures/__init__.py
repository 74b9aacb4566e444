"""The pictures of a report as matplotlib figures, with one function each.

Each function takes an `Inspection` or a `Report`. The title of its figure states the main result.

canvas   colours, fonts, placement of panels
heat     layer by expert: norms, retention, cosines with the merged update
depth    from input to output: γ and its gate, time and memory
spectra  singular values before and after refinement; expert by expert: cosines, sign conflicts, overlaps

Example:
    >>> import torch
    >>> import covmerge
    >>> base = {"fc.weight": torch.eye(4)}
    >>> found = covmerge.inspect(base, {"a": {"fc.weight": 1.5 * torch.eye(4)}, "b": base})
    >>> norms(found).get_suptitle()
    "'a' moved 50% of the base's norm"
"""

from covmerge.front.reporting.style import needed_for_reports

with needed_for_reports():
    from covmerge.front.reporting.figures.depth import costs, gamma
    from covmerge.front.reporting.figures.heat import merged_cosines, norms, retention
    from covmerge.front.reporting.figures.spectra import cosines, overlaps, sign_conflicts, spectra

__all__ = [
    "cosines",
    "costs",
    "gamma",
    "merged_cosines",
    "norms",
    "overlaps",
    "retention",
    "sign_conflicts",
    "spectra",
]
