"""The public path of all methods by name.

`covmerge methods ties` and `covmerge.methods.get("ties").parameters` describe the parameters of a method.
"""

from covmerge.maths.methods import *  # noqa: F403

# The table, also after somebody has imported the module of this name.
from covmerge.methods.registry import registry as registry
