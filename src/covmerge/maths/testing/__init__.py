"""Checks that every method of covmerge is held to, for methods and steps of other people.

groups   updates to check on, with all that a method may ask for beside them
subject  what is checked: a method, alone or with steps around it
laws     what it promises, and what all of them must keep
forms    the same result of other forms of the same updates: strides, blocks of rows, factors, dtypes
strange  updates as nobody trains them: finite, or refused by name
check    all of it by one call

Only these names are promised to stay:

    covmerge.testing.check_method("mine")
    covmerge.testing.check_step("my_step")
    covmerge.testing.checks("mine")  # the same one by one, for pytest.mark.parametrize
"""

from covmerge.maths.testing.check import check_method, check_step, checks
from covmerge.maths.testing.subject import Broken, Subject

__all__ = ["Broken", "Subject", "check_method", "check_step", "checks"]
