"""Do experts fit their base? The same judgement before a merge (`inspect`) and in it.

layers    how long every update is, and whether it goes along the base
verdicts  from these numbers to findings, by thresholds
integers  tensors of the experts that are not merged, and are not the base's
packed    mixtures that a module holds packed, and its folder does not
swaps     which other layer of the base a layer holds
judge     all of it: for an inspection, and of a finished run, which it may stop
names     blocks and layers for people
"""

from covmerge.run.judgement.judge import check_fit, judge
from covmerge.run.judgement.layers import Layer
from covmerge.run.judgement.values import changed_integers, naming_lost

__all__ = ["Layer", "changed_integers", "check_fit", "judge", "naming_lost"]
