"""Steps around a method: what becomes of the updates before it, and of the merged update after it.

registry   what a step declares
compose    steps and a method as one method, which is what a plan knows
the rest   a step a file

To add one: a file here with a function decorated by `@register_step(...)`, its import below.
"""

from covmerge.maths.steps import norm_balance, pact, pico, rescale, svc
from covmerge.maths.steps.compose import Steps, StepUse, resolve_steps, with_steps
from covmerge.maths.steps.registry import Step, register_step, registry

names = registry.names
get = registry.get

__all__ = [
    "Step",
    "StepUse",
    "Steps",
    "get",
    "names",
    "norm_balance",
    "pact",
    "pico",
    "register_step",
    "registry",
    "rescale",
    "resolve_steps",
    "svc",
    "with_steps",
]
