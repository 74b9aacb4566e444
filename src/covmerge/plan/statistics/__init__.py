"""What the experts' data says of their layers: collected once, kept in a file, used by methods."""

from covmerge.plan.statistics.collect import Collected, Progress, collect
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.plan.statistics.generated import Generated
from covmerge.plan.statistics.of_base import BaseInputs, base_inputs, is_made
from covmerge.plan.statistics.regmean_pp import collect_regmean_pp

__all__ = [
    "BaseInputs",
    "Collected",
    "Generated",
    "Progress",
    "Reading",
    "StatisticsFile",
    "base_inputs",
    "collect",
    "collect_regmean_pp",
    "is_made",
]
