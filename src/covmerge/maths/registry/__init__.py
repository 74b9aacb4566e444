"""What can be added from outside: functions under a name, ours beside those of installed packages.

declared   a function whose keyword arguments are its parameters, with ranges
packages   what installed packages announce by entry points, and whose code a function is
table      functions by name; packages are searched when a name is asked for
"""

from covmerge.maths.registry.declared import Declared, Parameter, Parameters, PerExpert
from covmerge.maths.registry.packages import Origin
from covmerge.maths.registry.table import Table

__all__ = ["Declared", "Origin", "Parameter", "Parameters", "PerExpert", "Table"]
