"""From a recipe and headers to work: which tensor meets which rule, in what pieces, at what cost.

align    the base's tensors found in every expert; task heads, vocabularies, what does not fit
data     the statistics that methods with data need, found for each tensor
rules    role and name rules resolved to one action a tensor
build    the plan: tensors, work items with bytes and FLOPs, totals
"""

from covmerge.plan.build import build_plan, build_plans
from covmerge.plan.data import Statistics
from covmerge.plan.types import Copy, Merge, Plan, Survey, TensorPlan, WorkItem

__all__ = [
    "Copy",
    "Merge",
    "Plan",
    "Statistics",
    "Survey",
    "TensorPlan",
    "WorkItem",
    "build_plan",
    "build_plans",
]
