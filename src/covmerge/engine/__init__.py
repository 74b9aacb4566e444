"""Carry a plan out: read ahead, compute, write behind, within a memory budget.

worker   one function: a work item's tensors in, the merged rows and statistics out
budget   bytes that may be alive at once
sinks    where results go: memory, or shards with a journal
run      the pipeline
stats    items joined to tensors, tensors to totals
ties     tied tensors that are stored twice
"""

from covmerge.engine.budget import MemoryPlan, plan_memory
from covmerge.engine.run import Progress, RunStats, run
from covmerge.engine.sinks import DiskSink, MemorySink, Sink
from covmerge.engine.stats import tensor_stats, totals
from covmerge.engine.ties import check_ties

__all__ = [
    "DiskSink",
    "MemoryPlan",
    "MemorySink",
    "Progress",
    "RunStats",
    "Sink",
    "check_ties",
    "plan_memory",
    "run",
    "tensor_stats",
    "totals",
]
