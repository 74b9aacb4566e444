"""Checks that experts fit their base, the same in an inspection and in a merge.

layers    the norm of every update, and its cosine with the base
settings  settings beside the weights of an expert that differ from the output's
values    tensors that are not merged, and whose values differ from the base's
judge     the findings of an inspection and of a finished run, which faults may stop
"""

from covmerge.run.judgement.judge import check_fit, judge, owned_by
from covmerge.run.judgement.layers import LayerSums
from covmerge.run.judgement.settings import other_settings
from covmerge.run.judgement.values import changed_integers, naming_lost

__all__ = [
    "LayerSums",
    "changed_integers",
    "check_fit",
    "judge",
    "naming_lost",
    "other_settings",
    "owned_by",
]
