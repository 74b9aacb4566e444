"""From a recipe and headers to work: which tensor meets which rule, in what pieces, at what cost.

align    the base's tensors found in every expert; task heads, vocabularies, what does not fit
rules    role and name rules resolved to one action a tensor
build    the plan: tensors, work items with bytes and FLOPs, totals
"""

from covmerge.plan.build import build_plan
from covmerge.plan.types import Copy, Merge, Plan, TensorPlan, WorkItem

__all__ = ["Copy", "Merge", "Plan", "TensorPlan", "WorkItem", "build_plan"]
