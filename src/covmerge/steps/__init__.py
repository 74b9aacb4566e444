"""The public path of all steps by name."""

from covmerge.maths.steps import *  # noqa: F403

# The table, also after somebody has imported the module of this name.
from covmerge.steps.registry import registry as registry
