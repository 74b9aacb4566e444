"""The public path of what methods and steps of other packages declare with."""

from covmerge.maths.registry import *  # noqa: F403
