"""Steps around a method: what becomes of the updates before it, and of the merged update after it.

registry   what a step declares
compose    steps and a method as one method, which is what a plan knows
the rest   a step a file

To add one: a file here with a function decorated by `@register_step(...)`, and its tests. Every module of
this folder is imported, and registers what it has.
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
