"""A report of what a merge did, for people.

job       reads base, experts and output again
data      what it shows
tables    the same as rows; `grid` orders layers
figures   the pictures, as matplotlib figures; needs the extra `report`
page      the report as text
html      all of it as one page; `pictures` puts the figures there
"""

from covmerge.front.reporting.data import LayerCost, Report
from covmerge.front.reporting.job import (
    FILE_NAME,
    ReportJob,
    check_packages,
    check_page,
    write_html,
)

__all__ = [
    "FILE_NAME",
    "LayerCost",
    "Report",
    "ReportJob",
    "check_packages",
    "check_page",
    "write_html",
]
