"""The public path of the checks that every method and step is held to."""

from covmerge.maths.testing import *  # noqa: F403
