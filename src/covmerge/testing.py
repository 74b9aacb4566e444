"""The public path of the checks that every method and step is held to."""

from covmerge.maths.testing import *  # noqa: F403
from covmerge.maths.testing import groups as groups  # to make again what a check failed on
