"""What a module's own parameter is, from the module's class."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules import conv

from covmerge.base.types import Role

# Stacks of expert matrices whose class does not say how they lie (`is_transposed`), read off each
# class's forward: True is (experts, d_in, d_out), applied as x @ W; False is F.linear's order.
_STACK_IS_TRANSPOSED = {
    "Llama4TextExperts": True,
    "InklingSharedExperts": False,
    "JetMoeParallelExperts": False,
    "LongcatFlashExperts": False,
    "Step3p7Experts": False,
}
# Routers keep a bare 2-D `weight` and apply it by F.linear.
_ROUTER = re.compile(r"(Router|Gate)$")
_ATTENTION_MATRICES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Kind:
    """A role, why, and the orientation that goes with it.

    Attributes:
        role: the role.
        why: what it was concluded from.
        transposed: whether matrices are stored as `(d_in, d_out)`.
        unsure: the tensor is taken for `other` because too little is known; users are told.
        takes_factors: whether it is the weight of a layer that PEFT has factors for. Of subclasses it
            does not know what they do beside.
        stays_full: whether transformers keeps its module in float32, and packs it in no format (T5's `wo`).
        rebuilt: it is a buffer that the model's code makes again whenever it is loaded, such as a mask.
    """

    role: Role
    why: str
    transposed: bool = False
    unsure: bool = False
    takes_factors: bool = False
    stays_full: bool = False
    rebuilt: bool = False


def kind_of_parameter(module: nn.Module, leaf: str, parameter: Tensor, *, is_output: bool) -> Kind:
    """Say what parameter `leaf` of `module` is.

    Args:
        module: the module that owns the parameter.
        leaf: the parameter's name in it: `weight`, `bias`, ...
        parameter: the parameter; only its number of axes is looked at.
        is_output: whether the module is the model's output embedding.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> kind = kind_of_parameter(layer, "weight", layer.weight, is_output=False)
        >>> str(kind.role), kind.why, kind.transposed
        ('linear', 'module class Linear', False)
    """
    name = type(module).__name__
    by_class = f"module class {name}"
    if leaf == "weight":
        exact = type(module) in (nn.Linear, nn.Embedding)
        if is_output:
            why = f"output embedding ({name})"
            return Kind(Role.OUTPUT, why, takes_factors=type(module) is nn.Linear)
        if isinstance(module, nn.Linear):
            return Kind(Role.LINEAR, by_class, takes_factors=exact)
        if _is_conv1d(module):
            return Kind(Role.CONV1D, by_class, transposed=True, takes_factors=True)
        if isinstance(module, nn.Embedding):
            return Kind(Role.EMBEDDING, by_class, takes_factors=exact)
        if isinstance(module, conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            plain = type(module) is nn.Conv2d and module.groups == 1
            turned = isinstance(module, _CONV_TRANSPOSE)
            return Kind(Role.CONV, by_class, transposed=turned, takes_factors=plain)
        if _ROUTER.search(name) and parameter.ndim == 2:
            return Kind(Role.LINEAR, by_class)
    if "norm" in name.lower():
        return Kind(Role.NORM, by_class)
    if leaf == "bias" or leaf.endswith("_bias"):
        return Kind(Role.BIAS, f"{by_class}, parameter '{leaf}'")
    if isinstance(module, nn.MultiheadAttention) and leaf in _ATTENTION_MATRICES:
        return Kind(Role.LINEAR, f"{by_class}, parameter '{leaf}'")
    if parameter.ndim == 3:
        transposed = getattr(module, "is_transposed", _STACK_IS_TRANSPOSED.get(name))
        if transposed is not None:
            return Kind(Role.EXPERT_STACK, by_class, transposed=bool(transposed))
        if name.endswith("Experts"):
            why = f"stack of {name}, whose orientation covmerge does not know"
            return Kind(Role.OTHER, why, unsure=True)
    return Kind(Role.OTHER, f"parameter '{leaf}' of {name}")


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, found without importing transformers."""
    return any(
        c.__name__ == "Conv1D" and c.__module__.startswith("transformers")
        for c in type(module).__mro__
    )
