"""Tiny Llama experts as a mixture, by mergekit-moe and by covmerge from the same file.

    python -m benchmarks.moe_parity --mergekit VENV/bin/python

Models and prompts are made here. The worst difference of each kind of tensor is printed, and put into
results/moe_parity.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers
from torch import Tensor

import covmerge
from covmerge.plan.recipe import load_recipe

RESULTS = Path(__file__).parent / "results" / "moe_parity.json"
PROMPTS = {
    "code": (["w1 w2 w3", "w4"], ["w9"]),
    "math": (["w5 w6"], []),
    "chat": (["w7 w8 w1"], []),
}
MODES = ("random", "cheap_embed")
_THEIRS = "from mergekit.scripts.moe import main; main()"
# mergekit stores the experts of a layer as one tensor: of these matrices, one below the other.
_PACKED = {"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mergekit", type=Path, required=True, help="Python that has mergekit")
    python = parser.parse_args().mergekit
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        make(Path(work))
        for mode in MODES:
            found[mode] = apart(*merged(Path(work), mode, python))
            print(mode, found[mode])
    asked = "from importlib.metadata import version; print(version('mergekit'))"
    theirs = subprocess.check_output([python, "-c", asked], text=True).strip()
    result = {
        "command": "python -m benchmarks.moe_parity --mergekit VENV/bin/python",
        "mergekit": theirs,
        "transformers": version("transformers"),
        "worst difference": found,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def make(root: Path) -> None:
    """Write a base and its experts, with a tokenizer of words."""
    words = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(61))]
    plain = tokenizers.Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    for name in ("base", *PROMPTS):
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(base.state_dict())
        if name != "base":
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def merged(root: Path, mode: str, python: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of mergekit-moe and of covmerge."""
    experts = [
        {"source_model": str(root / name), "positive_prompts": said, "negative_prompts": not_said}
        for name, (said, not_said) in PROMPTS.items()
    ]
    recipe = {
        "base_model": str(root / "base"), "gate_mode": mode, "dtype": "float32",
        "experts_per_token": 2, "experts": experts,
    }  # fmt: skip
    file, out = root / f"{mode}.yml", root / mode
    file.write_text(json.dumps(recipe))
    seed = ["--random-seed", "0"]
    subprocess.run([python, "-c", _THEIRS, file, out / "theirs", *seed], check=True)
    covmerge.run_recipe(load_recipe(file), out / "ours")
    return load_file(out / "theirs/model.safetensors"), load_file(out / "ours/model.safetensors")


def apart(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """Return the worst difference of gates, experts and all else."""
    left = {name.replace(".block_sparse_moe.", ".mlp."): own for name, own in ours.items()}
    found = dict.fromkeys(("gates", "experts", "others"), 0.0)
    for name, tensor in theirs.items():
        stem, _, end = name.rpartition(".experts.")
        kind = "experts" if stem else "gates" if ".mlp.gate." in name else "others"
        parts = _PACKED.get(f"experts.{end}")
        if parts is None:
            own = left.pop(name)
        else:
            own = torch.stack(
                [
                    torch.cat([left.pop(f"{stem}.experts.{n}.{part}.weight") for part in parts])
                    for n in range(len(PROMPTS))
                ]
            )
        found[kind] = max(found[kind], float((own.double() - tensor.double()).abs().max()))
    if left:
        raise SystemExit(f"mergekit has no {', '.join(left)}")
    return found


if __name__ == "__main__":
    main()
