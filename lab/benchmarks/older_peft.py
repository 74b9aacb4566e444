"""Adapters of one PEFT, with what its model gives: run by that PEFT, without covmerge.

    python older_peft.py OUT

It writes OUT/base.safetensors, and for each case a folder with the adapter and outputs.safetensors.
"""

import copy
import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Small(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)
        self.first = nn.Linear(12, 8)
        self.second = nn.Linear(8, 12, bias=False)
        self.same = nn.Linear(8, 8)
        self.turned = Conv1D(16, 12)
        self.point = nn.Conv2d(4, 8, 1)
        self.window = nn.Conv2d(4, 6, 3)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        seen = self.table(tokens)
        image = torch.sin(torch.arange(100, dtype=seen.dtype)).view(1, 4, 5, 5)
        inner = self.first(seen)
        layers = seen, inner, self.second(inner), self.same(inner), self.turned(seen)
        return (*layers, self.norm(seen), self.point(image), self.window(image))


LINEAR = ["first", "second", "same"]
CONVOLUTIONS = ["point", "window"]
CASES = {
    "LORA": ("LORA", {"target_modules": LINEAR, "r": 2, "lora_alpha": 3}),
    "LORA, all kinds of layers": (
        "LORA",
        {"target_modules": [*LINEAR, *CONVOLUTIONS, "table"], "r": 2},
    ),
    "LORA, fan_in_fan_out": (
        "LORA",
        {"target_modules": ["turned"], "r": 2, "fan_in_fan_out": True},
    ),
    "LORA, bias, modules_to_save": (
        "LORA",
        {"target_modules": LINEAR, "r": 2, "bias": "lora_only", "modules_to_save": ["norm"]},
    ),
    "LORA, patterns": (
        "LORA",
        {
            "target_modules": LINEAR,
            "r": 2,
            "rank_pattern": {"same": 3},
            "alpha_pattern": {"first": 5},
        },
    ),
    "LORA, use_rslora": ("LORA", {"target_modules": LINEAR, "r": 2, "use_rslora": True}),
    "LORA, use_dora": ("LORA", {"target_modules": LINEAR, "r": 2, "use_dora": True}),
    "LORA, use_dora, all": (
        "LORA",
        {"target_modules": [*LINEAR, *CONVOLUTIONS, "table"], "r": 2, "use_dora": True},
    ),
    "LORA, pissa": ("LORA", {"target_modules": LINEAR, "r": 2, "init_lora_weights": "pissa"}),
    "LORA, olora": ("LORA", {"target_modules": LINEAR, "r": 2, "init_lora_weights": "olora"}),
    "LORA, lora_bias": ("LORA", {"target_modules": ["first", "same"], "r": 2, "lora_bias": True}),
    "ADALORA": (
        "ADALORA",
        {"target_modules": LINEAR, "init_r": 3, "target_r": 2, "lora_alpha": 4, "total_step": 100},
    ),
    "IA3": ("IA3", {"target_modules": [*LINEAR, "point"], "feedforward_modules": ["second"]}),
    "LOHA": ("LOHA", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 2, "alpha": 3}),
    "LOHA, effective": (
        "LOHA",
        {"target_modules": CONVOLUTIONS, "r": 2, "use_effective_conv2d": True},
    ),
    "LOKR": ("LOKR", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 1, "alpha": 3}),
    "LOKR, whole": ("LOKR", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 8, "alpha": 3}),
    "LOKR, decompose_both": (
        "LOKR",
        {"target_modules": LINEAR, "r": 1, "decompose_both": True, "decompose_factor": 2},
    ),
    "OFT": ("OFT", {"target_modules": LINEAR, "r": 4}),
    "OFT, block_share": ("OFT", {"target_modules": LINEAR, "r": 4, "block_share": True}),
    "OFT, coft": ("OFT", {"target_modules": LINEAR, "r": 4, "coft": True, "eps": 0.3}),
    "OFT, block_size": ("OFT", {"target_modules": LINEAR, "r": 0, "oft_block_size": 4}),
    "BOFT": ("BOFT", {"target_modules": LINEAR, "boft_block_size": 4}),
    "BOFT, factor 2": (
        "BOFT",
        {"target_modules": LINEAR, "boft_block_size": 2, "boft_n_butterfly_factor": 2},
    ),
    "LN_TUNING": ("LN_TUNING", {"target_modules": ["norm"]}),
    "VERA": ("VERA", {"target_modules": LINEAR, "r": 3}),
    "VERA, save_projection=False": (
        "VERA",
        {"target_modules": LINEAR, "r": 3, "save_projection": False},
    ),
    "VERA, one layer": ("VERA", {"target_modules": ["first"], "r": 3}),
    "FOURIERFT": ("FOURIERFT", {"target_modules": LINEAR, "n_frequency": 9, "scaling": 9.0}),
    "HRA": ("HRA", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 3}),
    "HRA, apply_GS": ("HRA", {"target_modules": LINEAR, "r": 3, "apply_GS": True}),
    "VBLORA": ("VBLORA", {"target_modules": LINEAR, "num_vectors": 6, "vector_length": 4, "r": 2}),
    "BONE": ("BONE", {"target_modules": LINEAR, "r": 4}),
    "BONE, bat": ("BONE", {"target_modules": LINEAR, "r": 4, "init_weights": "bat"}),
    "MISS": ("MISS", {"target_modules": LINEAR, "r": 4}),
    "RANDLORA": ("RANDLORA", {"target_modules": LINEAR, "r": 3, "randlora_alpha": 6}),
    "TRAINABLE_TOKENS": (
        "TRAINABLE_TOKENS",
        {"target_modules": ["table"], "token_indices": [7, 2]},
    ),
    "SHIRA": ("SHIRA", {"target_modules": LINEAR, "r": 2}),
    "C3A": ("C3A", {"target_modules": LINEAR, "block_size": 4}),
}
TOKENS = torch.arange(10)


def make(out: Path) -> None:
    """Draw and save every adapter that this version has; with each, what its model gives."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    torch.manual_seed(0)
    base = Small()
    save_file(base.state_dict(), out / "base.safetensors")
    told = {}
    for number, (what, (kind, fields)) in enumerate(CASES.items()):
        if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
            continue
        begins = fields.get("init_lora_weights")
        if begins and not hasattr(peft.tuners.lora.LoraLayer, f"{begins}_init"):
            continue  # older versions take any value for True
        folder = out / str(number)
        try:
            config_of = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
            known = {field.name for field in dataclasses.fields(config_of)}
            if kind == "OFT" and "oft_block_size" in known:
                fields = {"oft_block_size": 0, **fields}
            config = config_of(**fields)
            model = peft.get_peft_model(copy.deepcopy(base), config)
            draw = torch.Generator().manual_seed(1)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "vblora_logits" not in name:
                    parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw)
            model.save_pretrained(str(folder))
            loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
            try:
                given = copy.deepcopy(loaded).double()(TOKENS)
            except RuntimeError:
                given = loaded(TOKENS)  # some have float32 inside
        except Exception as failure:
            told[what] = f"{type(failure).__name__}: {failure}"[:160]
            continue
        told[what] = str(number)
        save_file(
            {f"{n}": own.detach().contiguous() for n, own in enumerate(given)},
            folder / "outputs.safetensors",
        )
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        make(Path(sys.argv[1]))
