"""Tiny experts as a mixture, by mergekit-moe and by covmerge from the same file.

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
SHARED = {"source_model": "chat", "positive_prompts": ["w20"], "residual_scale": 0.25}
BARE = {"source_model": "chat"}
# Architecture of the models, and what the file says beside.
CASES = {
    "random": ("llama", {"gate_mode": "random"}),
    "cheap_embed": ("llama", {"gate_mode": "cheap_embed"}),
    "hidden": ("llama", {"gate_mode": "hidden"}),
    "hidden_avg": ("llama", {"gate_mode": "hidden_avg"}),
    "DeepSeek": ("llama", {"gate_mode": "hidden", "architecture": "deepseek"}),
    "DeepSeek, shared, random": (
        "llama", {"gate_mode": "random", "architecture": "deepseek", "shared_experts": [BARE]},
    ),
    "Qwen of Llama": (
        "llama", {"gate_mode": "hidden", "architecture": "qwen", "shared_experts": [SHARED]},
    ),
    "Qwen, random": (
        "qwen2", {"gate_mode": "random", "architecture": "qwen", "shared_experts": [BARE]},
    ),
    "Qwen": ("qwen2", {"gate_mode": "hidden", "shared_experts": [SHARED]}),
    "Qwen3": ("qwen3", {"gate_mode": "hidden", "architecture": "qwen3"}),
}  # fmt: skip
_THEIRS = "from mergekit.scripts.moe import main; main()"
# mergekit stores the experts of a layer of Mixtral and Qwen3 as one tensor: of these, one below the other.
_PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_NAMES = {
    ".block_sparse_moe.": ".mlp.", ".shared_experts.": ".shared_expert.", ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mergekit", type=Path, required=True, help="Python that has mergekit")
    python = parser.parse_args().mergekit
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for kind in ("llama", "qwen2", "qwen3"):
            make(Path(work) / kind, kind)
        for case, (kind, said) in CASES.items():
            found[case] = apart(*merged(Path(work) / kind, case, said, python))
            print(case, found[case])
    asked = "from importlib.metadata import version; print(version('mergekit'))"
    theirs = subprocess.check_output([python, "-c", asked], text=True).strip()
    result = {
        "command": "python -m benchmarks.moe_parity --mergekit VENV/bin/python",
        "mergekit": theirs,
        "transformers": version("transformers"),
        "worst difference": found,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def make(root: Path, kind: str) -> None:
    """Write a base and its experts, with a tokenizer of bytes, which Qwen's class can read too."""
    letters = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    plain = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    more = {"head_dim": 4} if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=264, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    for name in ("base", *PROMPTS):
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(base.state_dict())
        if name != "base":
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def merged(
    root: Path, case: str, said: dict[str, Any], python: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of mergekit-moe and of covmerge."""
    experts = [
        {"source_model": str(root / name), "positive_prompts": own, "negative_prompts": other}
        for name, (own, other) in PROMPTS.items()
    ]
    experts[1]["residual_scale"] = 0.3
    shared = [
        own | {"source_model": str(root / own["source_model"])}
        for own in said.get("shared_experts", ())
    ]
    recipe = {
        "base_model": str(root / "base"), "dtype": "float32", "experts_per_token": 2,
        "experts": experts, **said, "shared_experts": shared or None,
    }  # fmt: skip
    file, out = root / f"{case}.yml", root / case
    file.write_text(json.dumps(recipe))
    seed = ["--random-seed", "0"]
    subprocess.run([python, "-c", _THEIRS, file, out / "theirs", *seed], check=True)
    covmerge.run_recipe(load_recipe(file), out / "ours")
    return load_file(out / "theirs/model.safetensors"), load_file(out / "ours/model.safetensors")


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under Qwen's names, each expert's alone."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        stem, _, end = name.rpartition(".experts.")
        if end not in _PACKED:
            found[name] = tensor
            continue
        for number, own in enumerate(tensor):
            parts = own.chunk(len(_PACKED[end]))
            for part, matrix in zip(_PACKED[end], parts, strict=True):
                found[f"{stem}.experts.{number}.{part}.weight"] = matrix
    return found


def apart(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """Return the worst difference of gates, experts and all else.

    A shared expert that mergekit gives no gate has one of zero here, and twice the `down_proj`. Biases of
    zero that mergekit gives a Llama are none here.
    """
    left, theirs = renamed(ours), renamed(theirs)
    found = dict.fromkeys(("gates", "experts", "others"), 0.0)
    for name, tensor in theirs.items():
        if name not in left and name.endswith(".bias") and not tensor.any():
            continue
        own = left.pop(name)
        gate = name.replace("shared_expert.down_proj", "shared_expert_gate")
        if gate != name and gate not in theirs:
            own = own / 2
        kind = "experts" if "expert" in name else "others"
        kind = "gates" if "gate.weight" in name else kind
        found[kind] = max(found[kind], float((own.double() - tensor.double()).abs().max()))
    if any(tensor.any() for tensor in left.values()):
        raise SystemExit(f"mergekit has no {', '.join(left)}")
    return found


if __name__ == "__main__":
    main()
