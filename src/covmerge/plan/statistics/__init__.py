"""Statistics of the inputs of experts' layers, collected once into a file and used by methods."""

from covmerge.plan.statistics.collect import Collected, Progress, collect
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.plan.statistics.generated import Generated

__all__ = [
    "Collected",
    "Generated",
    "Progress",
    "Reading",
    "StatisticsFile",
    "collect",
]
