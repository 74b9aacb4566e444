"""From a recipe and headers to work: which tensor meets which rule, in what pieces, at what cost.

align    the base's tensors found in every expert; task heads, vocabularies, what does not fit
data     the statistics that methods with data need, found for each tensor
gguf     the same of a GGUF file: a type for every tensor, and what of the base's file stays
quantise which tensors are stored packed, in the base's layout or a named one, and what config.json says
rules    role and name rules resolved to one action a tensor
slices   sources as the recipe's slices see them, and in which slice a tensor lies
varied   parameters that differ from tensor to tensor, by depth or by name
operands, operations, forms   what work reads, what is done with it, what it becomes
work     a tensor of the output, and the row ranges that are worked on as a whole
build    the plan: tensors, work items with bytes and FLOPs, totals
"""

from covmerge.plan.planning.align import Model, over_base
from covmerge.plan.planning.build import build_plan, build_plans
from covmerge.plan.planning.data import Statistics
from covmerge.plan.planning.forms import (
    MODEL,
    STEM,
    BaseRows,
    Form,
    ModelTensor,
    Place,
    Result,
    Unwritten,
    as_output,
    head_part,
    mask_part,
)
from covmerge.plan.planning.operations import (
    BASE,
    MERGED,
    Copy,
    Count,
    Inspect,
    Merge,
    Operand,
    Operation,
    expert_key,
)
from covmerge.plan.planning.slices import stacked
from covmerge.plan.planning.ties import with_ties_undone
from covmerge.plan.planning.types import GlobalPass, Plan
from covmerge.plan.planning.varied import Settings
from covmerge.plan.planning.work import TensorPlan, WorkItem, looked_over_at_once, parts_at_once

__all__ = [
    "BASE",
    "MERGED",
    "MODEL",
    "STEM",
    "BaseRows",
    "Copy",
    "Count",
    "Form",
    "GlobalPass",
    "Inspect",
    "Merge",
    "Model",
    "ModelTensor",
    "Operand",
    "Operation",
    "Place",
    "Plan",
    "Result",
    "Settings",
    "Statistics",
    "TensorPlan",
    "Unwritten",
    "WorkItem",
    "as_output",
    "build_plan",
    "build_plans",
    "expert_key",
    "head_part",
    "looked_over_at_once",
    "mask_part",
    "over_base",
    "parts_at_once",
    "stacked",
    "with_ties_undone",
]
