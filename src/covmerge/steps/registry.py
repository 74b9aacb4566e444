"""The public path of what a step declares."""

from covmerge.maths.steps.registry import *  # noqa: F403
