"""A GPU that is pretended: tensors that say they are on `cuda`, and whose numbers are on the CPU.

What a real one refuses is refused: an operation on tensors of both places, and handing numbers over to
numpy. So a tensor that was made on the wrong device is found where there is no GPU. Times, memory and
rounding are the CPU's.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# What takes tensors of both places on a real one, too: copies, and a place that is a number of the host.
_BOTH = {"aten::copy_", "aten::_to_copy"}
# These, and those below, ask for a real device before anything that could answer in its place.
_FOR_THE_HOST = {
    Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.item, Tensor.tolist,
}  # fmt: skip

# And these; of a vector and a matrix torch makes a product by a change of shape in place, unseen here.
_ON_THE_NUMBERS = {"nonzero", "__invert__", "new_tensor", "__matmul__", "__rmatmul__", "matmul"}


class Pretended(Tensor):
    """A tensor that says it is on a GPU."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> Pretended:
        made = Tensor._make_subclass(
            cls, own, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        made.own = own
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if function in _FOR_THE_HOST:
            return function(args[0].own, *args[1:], **(kwargs or {}))
        if function is Tensor.__getitem__ and isinstance(args[0], Pretended):
            return Pretended(args[0].own[fetched(args[1])])
        if function is Tensor.__setitem__ and isinstance(args[0], Pretended):
            _one_place(function, args[0], args[2])
            args[0].own[fetched(args[1])] = fetched(args[2])
            return None
        if function is Tensor.copy_ and isinstance(args[0], Pretended):
            args[0].own.copy_(fetched(args[1]))
            return args[0]
        if function.__name__ in _ON_THE_NUMBERS and isinstance(args[0], Pretended):
            _one_place(function, args)
            return Pretended(function(*fetched(args), **(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Made(TorchFunctionMode):
    """Tensors made of numbers are copied to where they are to be."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        return function(*args, **kwargs)


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on the numbers, and what comes of it where it would be."""
    if function is torch.ops.prim.device.default:
        return GPU
    there = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Pretended)]
    device = kwargs.get("device")
    on_gpu = bool(there) if device is None else torch.device(device).type == "cuda"
    name = function._schema.name
    if there and name not in _BOTH:
        _one_place(name, args, kwargs)
    generator = kwargs.get("generator")
    if on_gpu and generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"Expected a 'cuda' device type for generator: {name}")
    if device is not None:
        kwargs = {**kwargs, "device": CPU}
    plain = fetched((args, kwargs))
    with torch._C._DisableTorchDispatch():
        found = function(*plain[0], **plain[1])
    if name == "aten::copy_":
        on_gpu = isinstance(args[0], Pretended)
    same = {id(tensor.own): tensor for tensor in there}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not on_gpu:
            return value
        return same[id(value)] if id(value) in same else Pretended(value)

    return tree_map(wrapped, found)


def _one_place(name: object, *given: Any) -> None:
    here = [t for t in _tensors(given) if not isinstance(t, Pretended) and t.dim()]
    if here:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name}, and {list(here[0].shape)} on cpu"
        )


def _tensors(given: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda own: found.append(own) if isinstance(own, Tensor) else None, given)
    return found


@contextmanager
def pretended_gpu() -> Generator[torch.device]:
    """Pretend that there is one."""
    with _Made(), _Mode(), patch.object(torch.cuda, "_lazy_init", lambda: None):
        yield GPU


def fetched(given: Any) -> Any:
    """The numbers of all tensors in it."""
    return tree_map(lambda own: own.own if isinstance(own, Pretended) else own, given)
