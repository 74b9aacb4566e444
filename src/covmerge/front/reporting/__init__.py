"""A readable report of what a merge did.

job       reads base, experts and output again
data      the content of the report
tables    the same content as rows; `grid` orders layers
figures   the pictures, as matplotlib figures; needs the extra `report`
page      the report as text
html      the report as one page; `pictures` adds the figures to it
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
