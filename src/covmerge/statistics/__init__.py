"""What the experts' data says of their layers: collected once, kept in a file, used by methods."""

from covmerge.statistics.collect import Collected, Progress, collect
from covmerge.statistics.examples import Reading
from covmerge.statistics.file import StatisticsFile
from covmerge.statistics.generated import Generated
from covmerge.statistics.regmean_pp import collect_regmean_pp

__all__ = [
    "Collected",
    "Generated",
    "Progress",
    "Reading",
    "StatisticsFile",
    "collect",
    "collect_regmean_pp",
]
