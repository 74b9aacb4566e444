"""Steps around a method: changes to the updates before it, and to the merged update after it.

registry   the declarations of a step
compose    steps and a method as one method, which is what a plan sees
the rest   one step per file

To add a step, write a file in this folder with a function decorated by `@register_step(...)`, and its
tests. All modules of this folder are imported here, and register their steps.
"""

from importlib import import_module
from pkgutil import iter_modules

from covmerge.maths.steps.compose import Steps, StepUse, resolve_steps, with_steps
from covmerge.maths.steps.registry import Step, register_step, registry

_MODULES = [found.name for found in iter_modules(__path__) if found.name != "registry"]
for _name in _MODULES:
    import_module(f"{__name__}.{_name}")

names = registry.names
get = registry.get

__all__ = ["Step", "StepUse", "Steps", "get", "names", "register_step", "registry"]
__all__ += ["resolve_steps", "with_steps"]
__all__ += _MODULES  # pyright: ignore[reportUnsupportedDunderAll] - each is an attribute
