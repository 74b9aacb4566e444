"""A readable report of what a merge did.

job       reads base, experts and output again
data      the content of the report
tables    the same content as rows; `grid` orders layers
figures   the pictures, as matplotlib figures; needs the extra `report`
page      the report as text
html      the report as one page; `pictures` adds the figures to it
"""
