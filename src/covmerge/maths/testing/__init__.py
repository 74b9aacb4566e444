"""The checks that all methods of covmerge pass, for other people's methods and steps.

groups   updates to check on, with everything else that a method may need
subject  the subject of a check: a method, alone or with steps around it
laws     the promises of a method, the rules that all must keep, and other forms of the same updates
strange  unusual updates: results are finite, or refused with the method's name
check    all checks in one call

Only these names are stable:

    covmerge.testing.check_method("mine")
    covmerge.testing.check_step("my_step")
    covmerge.testing.checks("mine")  # the same checks one by one, for pytest.mark.parametrize
"""

from covmerge.maths.testing.check import check_method, check_step, checks
from covmerge.maths.testing.subject import Broken, Subject

__all__ = ["Broken", "Subject", "check_method", "check_step", "checks"]
