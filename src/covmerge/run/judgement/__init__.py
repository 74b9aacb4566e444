"""Do experts fit their base? The same judgement before a merge (`inspect`) and in it.

layers    how long every update is, and whether it goes along the base
settings  what lies beside the weights of the experts, and is not the base's
values    tensors of the experts that are not merged, and are not the base's
judge     from numbers to findings, for an inspection and of a finished run, which it may stop
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
