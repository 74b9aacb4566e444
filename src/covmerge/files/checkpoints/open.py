"""Opening a checkpoint from the source that the user wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import isclose, sqrt
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from torch import Tensor, nn

from covmerge.base.errors import CheckpointError
from covmerge.base.identifiers import hub_id
from covmerge.base.text import some
from covmerge.files.adapters.checkpoint import (
    open_adapter_file,
    open_adapter_folder,
    open_adapter_hub,
    open_adapter_memory,
)
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.file_formats import WEIGHT_SUFFIXES
from covmerge.files.checkpoints.folder import open_folder
from covmerge.files.checkpoints.memory import MemoryCheckpoint
from covmerge.files.checkpoints.remote import RemoteCheckpoint, open_hub
from covmerge.files.stores.address import PAGES, Address, address_of, hub_address
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.remote import remote_store
from covmerge.files.stores.store import Store, child

# An adapter's tensors, and its configuration.
AdapterPair = tuple[Mapping[str, Tensor], object]
# The source that a recorded recipe has for a checkpoint in memory.
HELD_MODEL, HELD_ADAPTER = HELD = ("<state dict>", "<adapter in memory>")
Source = str | Path | Mapping[str, Tensor] | nn.Module | AdapterPair


def open_checkpoint(source: Source) -> Checkpoint:
    """Open a checkpoint; only its headers and its config are read.

    Args:
        source: a folder saved by transformers, or by PEFT (then the result is an
            `AdapterCheckpoint`); one `.safetensors`, `.bin`, `.pt`, `.pth` or `.ckpt` file of
            tensors; `"org/name"` or `"org/name@revision"` on the Hugging Face Hub, if no file or
            folder has this name here; the address of a folder or a file of weights, `s3://`,
            `gs://` or `https://`; a state dict; a torch module, whose config is read if it is a
            model of transformers; or an adapter in memory: a PeftModel, or a pair of PEFT's state
            dict and its configuration.

    Raises:
        CheckpointError: there is no such checkpoint, or it is malformed or unsafe to read.

    Example:
        >>> import torch
        >>> checkpoint = open_checkpoint({"w": torch.arange(6).reshape(3, 2)})
        >>> checkpoint.headers["w"].shape
        (3, 2)
        >>> checkpoint.read("w", range(1, 3))
        tensor([[2, 3],
                [4, 5]])
    """
    if isinstance(source, nn.Module):
        return open_module(source)
    if isinstance(source, Mapping):
        return MemoryCheckpoint(source)
    if isinstance(source, tuple):
        return open_adapter_memory(*source)
    if (named := hub_address(source)) is not None:
        return open_adapter_hub(str(source), *named) or open_hub(str(source), *named)
    if (address := address_of(source)) is not None:
        with failing_as(f"{address} cannot be read"):
            return open_remote(address)
    try:
        try:
            path = Path(source).expanduser()
        except RuntimeError as error:  # an unknown home folder
            raise ValueError(error) from error
        # Outside the inner `try`, a RuntimeError means that there is no memory for a thread.
        if path.is_dir():
            return open_store(str(source), LocalFolder(path))
        if path.is_file():
            return open_adapter_file(str(source), path)
        exists = path.exists()
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise CheckpointError(
            f"{str(source)!r} cannot be opened ({error}): correct the path"
        ) from error
    if exists:
        raise CheckpointError(f"{source} is neither a file nor a folder: pass one of them")
    if source in HELD:
        raise CheckpointError(
            f"the source is recorded as {source}, which was in memory then: pass it again, or save it to a "
            "folder, and merge that"
        )
    if not isinstance(source, str) or (named := hub_id(source)) is None:
        raise CheckpointError(
            f"no such file or folder: {source}. Correct the path; a model of the Hugging Face Hub "
            "is written org/name or org/name@revision"
        )
    return open_adapter_hub(source, *named) or open_hub(source, *named)


def open_remote(address: Address) -> Checkpoint:
    """Open the checkpoint at an address: a file with a suffix of weights, or else a folder of a bucket."""
    source = str(address)
    parent, _, name = address.path.rpartition("/")
    if parent and name.endswith(WEIGHT_SUFFIXES):
        store = remote_store(replace(address, path=parent))
        file = child(store, unquote(name) if address.scheme in PAGES else name)
        stored_as = partial(RemoteCheckpoint, store=store, whole=False)
        return open_adapter_file(source, file, stored_as)
    if address.scheme in PAGES:
        raise CheckpointError(
            f"{address} is no file of weights ({', '.join(WEIGHT_SUFFIXES)}), and a web server lists no "
            "folders: name such a file, or download the folder and pass its path"
        )
    store = remote_store(address)
    stored_as = partial(RemoteCheckpoint, store=store, whole=True)
    adapter = open_adapter_folder(source, store, stored_as)
    return adapter or stored_as(open_folder(source, store))


def open_store(source: str, store: Store) -> Checkpoint:
    """Open the model or adapter in a store."""
    return open_adapter_folder(source, store) or open_folder(source, store)


# This advice is needed because get_peft_model changes the model that is passed to it.
PASS_FOLDED = (
    "pass the PeftModel, its folder or the pair (get_peft_model_state_dict(model), its peft_config) as the "
    "expert, and the base's folder as the base; or the model with the adapter folded in "
    "(model.merge_and_unload())"
)


def open_module(module: nn.Module) -> Checkpoint:
    """Return a module's tensors as a checkpoint, with its config if it is a model of transformers.

    A PeftModel, or a model of transformers with an adapter in it, is opened as that adapter.

    Raises:
        CheckpointError: it has an adapter beside its own weights, or several adapters.
    """
    if _is_of_peft(module):
        tensors, config = _adapter_of(module)
        return open_adapter_memory(tensors, config, _weights_under(module, config))
    tensors = module.state_dict()
    adapted = next((name for name in tensors if ".lora_A." in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"the {type(module).__name__} holds an adapter beside its weights ('{adapted}'): {PASS_FOLDED}"
        )
    return MemoryCheckpoint(tensors, _config_of(module))


def _config_of(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the config as transformers would write config.json; None for other libraries' modules."""
    model = getattr(module, "_orig_mod", module)  # of torch.compile
    write = getattr(getattr(model, "config", None), "to_json_string", None)
    if write is None:
        return None
    config: dict[str, Any] = json.loads(write())
    # A config names the model's class, which decides what is tied and what a head is, only once it
    # was saved. A config that was loaded from a model of another class names that class.
    if type(model).__module__.startswith("transformers."):
        config["architectures"] = [type(model).__name__]
    return config


_PEFTS = "base_model.model."  # prefix of names, which transformers adds on saving


def _is_of_peft(module: nn.Module) -> bool:
    """Return whether a module is an adapter with its base, of PEFT's class or loaded by transformers."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(module).__mro__]
    return "peft" in kinds or getattr(module, "_hf_peft_config_loaded", False) is True


def _check_scales(module: Any, name: str, config: Any) -> None:
    """Refuse a LoRA whose scale differs from its configuration's, because PEFT saves only the latter."""
    if getattr(config, "peft_type", None) != "LORA":
        return
    for path, layer in module.named_modules():
        held: list[Any] = [getattr(layer, field, None) for field in ("scaling", "lora_alpha", "r")]
        if not all(isinstance(one, dict) and name in one for one in held):
            continue
        scale, alpha, rank = (float(one[name]) for one in held)
        said = alpha / (sqrt(rank) if config.use_rslora else rank)
        if not isclose(scale, said, rel_tol=1e-6):
            raise CheckpointError(
                f"the {type(module).__name__} scales the adapter of '{path}' by {scale:g}, and its "
                f"configuration says {said:g}, as after hotswap_adapter or set_scale: pass the folder of "
                "the adapter, with a weight where it is to count for more or less"
            )


def _check_beside(module: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model that trains weights of its base that are not part of the adapter."""
    held = {tensor.data_ptr() for tensor in tensors.values()}
    beside = [
        path
        for path, parameter in module.named_parameters()
        if parameter.requires_grad
        and name not in path.split(".")  # PEFT puts the adapter's name into its parameters' names
        and parameter.data_ptr() not in held
    ]
    if beside:
        raise CheckpointError(
            f"the {type(module).__name__} trains {some(beside, 3, quoted=True)} beside its adapter, which "
            "is no part of it: pass model.merge_and_unload() to merge that too, or the pair "
            f"(get_peft_model_state_dict(model), model.peft_config['{name}']) to leave it out"
        )


def _weights_under(module: Any, config: object) -> Mapping[str, Tensor]:
    """Return some base weights of adapted layers, which identify the base; none that are packed."""
    found: dict[str, Tensor] = {}
    if isinstance(getattr(config, "init_lora_weights", None), str):  # PiSSA changes them
        return found
    for path, layer in module.named_modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        merged: object = getattr(layer, "merged_adapters", None)  # the weight includes them
        if isinstance(weight, Tensor) and weight.is_floating_point() and not merged:
            found[f"{path.removeprefix(_PEFTS)}.weight"] = weight.detach()
    return dict(list(found.items())[:: max(1, len(found) // 4)])


def _adapter_of(module: Any) -> tuple[Mapping[str, Tensor], object]:
    """Return a module's adapter as PEFT would save it."""
    named: Mapping[str, object] = module.peft_config
    if len(named) > 1:
        raise CheckpointError(
            f"the {type(module).__name__} holds the adapters {', '.join(named)}: pass each as the pair "
            "(get_peft_model_state_dict(model, adapter_name=NAME), model.peft_config[NAME])"
        )
    ((name, config),) = named.items()
    _check_scales(module, name, config)
    peft: Any = import_module("peft")
    tensors: Mapping[str, Tensor] = peft.get_peft_model_state_dict(module, adapter_name=name)
    _check_beside(module, name, tensors)
    if not any(key.startswith(_PEFTS) for key in tensors):
        tensors = {_PEFTS + key: tensor for key, tensor in tensors.items()}
    return tensors, config
