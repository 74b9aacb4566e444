"""The public path of what a method declares."""

from covmerge.maths.methods.registry import *  # noqa: F403
