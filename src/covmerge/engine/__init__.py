"""Carry a plan out: read ahead, compute, write behind, within a memory budget.

inputs   what an item reads, and the updates it becomes
worker   one function: a work item's tensors in, the merged rows and statistics out
survey   passes before the merge: thresholds over all tensors
measures what a comparison says of a merged update
budget   bytes that may be alive at once
sinks    where results go: memory, or shards with a journal
room     disk space an output needs
run      the pipeline
advice   what a method noticed, in words, with what to do
stats    items joined to tensors, tensors to totals
ties     tied tensors that are stored twice
"""

from covmerge.engine.advice import method_notes, method_warnings
from covmerge.engine.budget import MemoryPlan, peak_memory, plan_memory
from covmerge.engine.inputs import Sizes, Sources, read_inputs
from covmerge.engine.room import Room, room_for
from covmerge.engine.run import Progress, RunStats, Span, run
from covmerge.engine.sinks import DiskSink, MemorySink, NoSink, Sink
from covmerge.engine.stats import tensor_stats, totals
from covmerge.engine.survey import run_surveys, survey_bytes
from covmerge.engine.ties import check_ties
from covmerge.engine.worker import Change, Context, Layer

__all__ = [
    "Change",
    "Context",
    "DiskSink",
    "Layer",
    "MemoryPlan",
    "MemorySink",
    "NoSink",
    "Progress",
    "Room",
    "RunStats",
    "Sink",
    "Sizes",
    "Sources",
    "Span",
    "check_ties",
    "method_notes",
    "method_warnings",
    "peak_memory",
    "plan_memory",
    "read_inputs",
    "room_for",
    "run",
    "run_surveys",
    "survey_bytes",
    "tensor_stats",
    "totals",
]
