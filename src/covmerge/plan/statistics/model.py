"""An expert as a running model, with the place of each stored tensor in it.

transformers builds and loads the model from the checkpoint's local folder. So untrusted files cause
no code to run and no download. The skeleton tells which parameter a stored tensor becomes.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from covmerge.base.errors import InputError, panics_as_errors
from covmerge.base.settings import Hint
from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, refuse_adapter
from covmerge.files.checkpoints.folder import PREFERRED
from covmerge.files.stores.address import local_path
from covmerge.files.tensors.skeleton import (
    Skeleton,
    SkeletonUnavailable,
    build_skeleton,
    in_short,
    quiet,
)
from covmerge.plan.statistics.examples import (
    LABELS,
    Batch,
    Examples,
    Reading,
    Text,
    checked,
    read_texts,
    tokenized,
)
from covmerge.plan.statistics.generated import Generated
from covmerge.plan.statistics.written import TEMPLATED, check_template, writes

# Weights that are read only when their block is run, and placeholders for them until then.

OUTSIDE = ""  # stands for a block: outside of the backbone, which alone is run


def unread(skeleton: Skeleton, headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Return the block of each stored tensor that is read only when its block is run.

    These are parameters that are stored as in the model. Tensors that are packed on loading,
    buffers, and tensors outside of blocks are read at once.
    """
    found: dict[str, str] = {}
    blocks = set(skeleton.blocks)
    for name, place in skeleton.places.items():
        header = headers[name]
        block = OUTSIDE if place.parameter in skeleton.outside else _block(place.parameter, blocks)
        whole = place.expected == header.shape and place.kind.role is not Role.BUFFER
        large = header.dtype.is_floating_point and header.numel > 1
        if whole and large and block is not None:
            found[name] = block
    return found


def placeholder(shape: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """Return a float32 tensor of a shape that takes no memory; all its values are NaN.

    Example:
        >>> placeholder((10**6, 10**6)).untyped_storage().nbytes()
        4
    """
    return torch.full((), torch.nan, device=device).expand(tuple(shape))


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor of more than one number is a placeholder."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _block(parameter: str, blocks: set[str]) -> str | None:
    parts = parameter.split(".")
    heads = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((head for head in heads if head in blocks), None)


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json")

INSTALL = "install it with: pip install 'covmerge[transformers]'"


@dataclass(frozen=True)
class ObservedLayer:
    """A linear layer to observe."""

    name: str  # name of its stored weight
    module: nn.Module  # the module that has the weight
    d_in: int  # size of its inputs
    transposed: bool = False  # whether the weight is stored as `(d_in, d_out)`


@dataclass(frozen=True)
class RunningModel:
    """A loaded expert."""

    checkpoint: Checkpoint
    skeleton: Skeleton  # the parameter of each stored tensor
    whole: Any  # the model with its head, in evaluation mode
    backbone: Any  # the model without the head

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the backbone's parameters by stored name; a tied parameter only under its first name."""
        found: dict[str, nn.Parameter] = {}
        visited: set[int] = set()
        held = dict(self.whole.named_parameters(remove_duplicate=False))
        for name in self.checkpoint.headers:
            place = self.skeleton.places.get(name)
            if place is None or place.parameter in self.skeleton.outside:
                continue
            # Skip buffers, and pieces that the loader joins to a parameter.
            parameter = held.get(place.parameter) if place.expected == self._shape(name) else None
            if parameter is not None and id(parameter) not in visited:
                visited.add(id(parameter))
                found[name] = parameter
        return found

    def packed_parameters(self) -> list[str]:
        """Return stored names of backbone tensors that the loader changes into other parameters."""
        return [
            name
            for name, place in self.skeleton.places.items()
            if place.expected != self._shape(name) and place.parameter not in self.skeleton.outside
        ]

    def layers(self) -> list[ObservedLayer]:
        """Return the backbone's linear layers that have their own module."""
        layers: list[ObservedLayer] = []
        for name in self._linear():
            place = self.skeleton.places[name]
            path, _, leaf = place.parameter.rpartition(".")
            module = self.whole.get_submodule(path)
            if leaf == "weight" and module.weight.ndim == 2:
                transposed = place.kind.transposed
                d_in = self._shape(name)[0 if transposed else 1]
                layers.append(ObservedLayer(name, module, d_in, transposed))
        return layers

    def packed_layers(self) -> list[str]:
        """Return names of other linear layers: experts of a mixture that the model packs."""
        names = {layer.name for layer in self.layers()}
        return [name for name in self._linear() if name not in names]

    def _linear(self) -> list[str]:
        return [
            name
            for name, place in self.skeleton.places.items()
            if place.kind.role in (Role.LINEAR, Role.CONV1D)
            and place.parameter not in self.skeleton.outside
        ]

    def batches(
        self, examples: Examples | Generated, reading: Reading, *, labels: bool = False
    ) -> tuple[Iterator[Batch], int | None]:
        """Return batches on the CPU, and the number of their examples if it is known."""
        if isinstance(examples, Generated):
            made = examples.made_for(self.whole, self.checkpoint.source)
            return made.batches(self, reading), reading.wanted
        if not isinstance(examples, str | Path):
            return checked(examples, reading.max_examples), None
        path = local_path(examples).expanduser()
        read = read_texts(path, reading)
        if getattr(self.whole.config, "is_encoder_decoder", False):
            raise InputError(
                f"{self.checkpoint.source} reads with an encoder and writes with a decoder: a file of "
                "texts has no decoder inputs. Pass batches with both from Python"
            )
        return self._tokenized(path, read, reading, labels), len(read)

    def _tokenized(
        self, path: Path, texts: list[Text], reading: Reading, labels: bool
    ) -> Iterator[Batch]:
        tokenizer = self.tokenizer(reading)
        tokenizer.padding_side = "right"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked, so any token is fine
        if tokenizer.pad_token is None and reading.at_once > 1:
            raise InputError(
                f"the tokenizer of {self.checkpoint.source} has no token to pad with: pass "
                f"{Hint('batch_size', 1)}"
            )
        try:
            yield from tokenized(texts, tokenizer, self.whole.config, reading, labels=labels)
        except InputError as error:
            raise InputError(f"{path}, {error}") from error

    def tokenizer(self, reading: Reading) -> Any:
        return _tokenizer(Path(reading.tokenizer or self.checkpoint.folder or ""))

    def run(self, batch: Batch, *, head: bool = False) -> Any:
        """Run the backbone, or the whole model; labels are not passed."""
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items() if name != LABELS}
        model = self.whole if head else self.backbone
        try:
            return model(**inputs)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InputError(
                f"{self.checkpoint.source} cannot run on these examples "
                f"({', '.join(f'{n} {list(t.shape)}' for n, t in inputs.items())}): "
                f"{in_short(error)}"
            ) from error

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.headers[name].shape


def check_start(checkpoint: Checkpoint, generated: Generated, reading: Reading) -> bool:
    """Raise if a tokenizer lacks the asked start, before the language model is fetched and loaded.

    Returns:
        Whether the model will write texts, as far as its config tells.
    """
    config = checkpoint.config or {}
    named: Any = config.get("architectures")
    names = cast("list[object]", named) if isinstance(named, list) else []
    model_class: Any = getattr(require_transformers(), str(next(iter(names), None)), None)
    # Other models are refused when the model is built.
    try:
        can_write = getattr(model_class, "can_generate", bool)()
    except ImportError:  # the class is a placeholder, because libraries that it needs are missing
        return False
    if not can_write:
        return False
    read = getattr(model_class.config_class, "is_encoder_decoder", False)
    if config.get("is_encoder_decoder", read):
        return False
    if generated.start in TEMPLATED:
        folder = Path(reading.tokenizer or checkpoint.companions() or "")
        check_template(_tokenizer(folder), str(folder), generated.start)
    return generated.start != "random"


def _tokenizer(folder: Path) -> Any:
    transformers = require_transformers()
    if not folder.is_dir():  # transformers would take it for a name on the Hub
        raise InputError(
            f"{folder} is no folder: pass the folder of a tokenizer with {Hint('tokenizer')}"
        )
    try:
        with panics_as_errors():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        named: Mapping[str, str] = tokenizer.vocab_files_names
        # transformers makes an empty vocabulary instead of raising an error if there is none.
        known = not named or any((folder / n).is_file() for n in (*_VOCABULARIES, *named.values()))
        problem = "" if known else "there is no vocabulary"
    except Exception as error:  # untrusted files can make it fail in any way
        tokenizer, problem = None, in_short(error)
    if problem:
        raise InputError(
            f"{folder} has no tokenizer that transformers can load ({problem}): put its files there, or "
            f"pass the folder of one with {Hint('tokenizer')} to covmerge collect"
        )
    return tokenizer


def load_model(
    checkpoint: Checkpoint,
    device: str | torch.device,
    *,
    head: bool,
    writing: bool = False,
    by_block: bool = False,
    dtype: torch.dtype = torch.float32,
    attention: Literal["eager", "sdpa"] = "eager",
) -> RunningModel:
    """Load an expert with the class that its config names.

    Args:
        checkpoint: a folder, or a repository of the Hub.
        device: the device on which it runs.
        head: whether its head must be stored too.
        writing: whether that of a language model must be, because the model writes texts.
        by_block: whether weights in `unread` are placeholders, for `Blocks`.
        dtype: the dtype in which it runs.
        attention: transformers' name of the implementation of attention.

    Raises:
        InputError: transformers is missing or has no class for the model, or the weights are
            quantised or incomplete.
    """
    transformers = require_transformers()
    checkpoint.materialize()
    source, config = checkpoint.source, checkpoint.config
    refuse_adapter(
        checkpoint,
        "what is run is a model",
        then=" with --out-dtype float32, "
        "then collect on OUT, and name OUT as the expert where the statistics are used",
    )
    if checkpoint.folder is None or config is None:
        raise InputError(
            f"{source} has no config.json, by which the model could be built: pass the folder of a "
            "model as transformers saves it"
        )
    if config.get("quantization_config"):
        raise InputError(f"{source} stores quantised weights: dequantise and save it first")
    try:
        skeleton = build_skeleton(checkpoint.headers, config)
        later = unread(skeleton, checkpoint.headers) if by_block else {}
        model, missing = _load(transformers, skeleton, checkpoint, later, dtype, attention)
    except SkeletonUnavailable as reason:
        raise InputError(f"{source} cannot be run: {reason}") from reason
    except Exception as error:  # an untrusted config can make it fail in any way
        raise InputError(f"{source} cannot be loaded: {in_short(error)}") from error
    head = head or (writing and writes(model))
    backbone = getattr(model, skeleton.prefix or "", model)
    missing = sorted(name for name in missing if head or name not in skeleton.outside)
    pooler = getattr(backbone, "pooler", None)
    of_pooler = set[int]() if pooler is None else set(map(id, pooler.parameters()))
    unpooled = sorted(n for n, value in model.named_parameters() if id(value) in of_pooler)
    if missing and not head and missing == unpooled:
        # It was saved without a pooler (`add_pooling_layer=False`), which the config does not say.
        backbone.pooler, missing = None, []
    if missing:
        raise InputError(
            f"{source} lacks {len(missing)} tensors of {skeleton.architecture}, such as "
            f"'{missing[0]}': they would be random"
        )
    for name in later:  # moving a placeholder to a device would allocate its memory
        parameter = model.get_parameter(skeleton.places[name].parameter)
        if is_placeholder(parameter):  # unless it is tied to a weight that was read
            parameter.data = placeholder(parameter.shape, device)
    model = model.to(device).eval()
    model.config.use_cache = False  # for generation only
    return RunningModel(checkpoint, skeleton, model, backbone)


def _load(
    transformers: Any,
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    later: Collection[str],
    dtype: torch.dtype,
    attention: str,
) -> tuple[Any, set[str]]:
    """Return the model, with placeholders for `later`, and the names of parameters that are not stored."""
    model_class = getattr(transformers, skeleton.architecture)
    source, given = checkpoint.folder, dict[str, Any]()
    loadable = source is not None and any((source / name).is_file() for name in PREFERRED)
    if later or checkpoint.quantisation is not None or not loadable:
        config = model_class.config_class.from_dict(dict(checkpoint.config or {}))
        weights = {
            name: placeholder(header.shape) if name in later else checkpoint.read(name)
            for name, header in checkpoint.headers.items()
        }
        source, given = None, {"config": config, "state_dict": weights}
    with quiet(transformers):
        model, info = model_class.from_pretrained(
            source,
            **given,
            local_files_only=True,
            output_loading_info=True,
            dtype=dtype,
            # A config could ask for code from the Hub here.
            attn_implementation=attention,
        )
    found = cast("Mapping[str, Any]", info)
    return model, {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}


def require_transformers(why: str = "collecting runs the model") -> Any:
    """Return the module transformers, or raise if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError(f"{why}, which needs transformers: {INSTALL}") from None
