"""The table of adapter types: how far merged models are from what each library computes unmerged.

`python -m tests.adapters.table` prints it as Markdown, and `--json FILE` writes it. A library
that is not installed has no rows: `pip install --no-deps lycoris-lora==4.1.3 einops toml` and
`mlx[cpu] mlx-lm` beside the project's packages give all of them.

An error is the largest difference of all outputs over the largest of them. `own` is that of the library's
own merge.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from torch import Tensor, nn

import covmerge
from tests.adapters.models import llama
from tests.adapters.test_types import (
    CASES,
    Small,
    config_of,
    filters_of_peft,
    merged,
    outputs,
    trained,
)
from tests.e2e import diffusion


@dataclass(frozen=True)
class Row:
    """One type or layout: the errors of covmerge's merge and of the library's own."""

    what: str
    library: str
    covmerge: float
    own: float | str


def main() -> None:
    rows = [*of_peft(), *of_lycoris(), *of_diffusers(), *of_mlx()]
    if len(sys.argv) == 3 and sys.argv[1] == "--json":
        text = json.dumps([asdict(row) for row in rows], indent=1)
        Path(sys.argv[2]).write_text(text + "\n")
    print(
        "| type or layout | library | error of covmerge | error of its own merge |\n|---|---|---|---|"
    )
    for row in rows:
        own = row.own if isinstance(row.own, str) else f"{row.own:.1e}"
        print(f"| {row.what} | {row.library} | {row.covmerge:.1e} | {own} |")


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, over the largest number of each output."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in pairs)


def attempt(merge: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> float | str:
    """The error of a library's own merge, or that it raises."""
    try:
        return error(merge(), expected)
    except Exception as failure:  # any library's, of any kind
        return f"raises {type(failure).__name__}"


def said(kind: str, fields: dict[str, Any]) -> str:
    """A type and what its configuration has beside targets."""
    rest = {
        k: v for k, v in fields.items() if not k.endswith("modules") and k not in ("r", "alpha")
    }
    return f"{kind} {', '.join(f'{k}={v}' for k, v in rest.items())}".strip()


def of_peft() -> Iterator[Row]:
    """Every case of the tests, loaded and computed by PEFT in float64, against merges in float32."""
    torch.manual_seed(0)
    base = Small()
    library = f"peft {version('peft')}"
    for kind, fields in CASES:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(sys.modules, pywt=filters_of_peft()),
        ):
            expected = trained(base, config_of(kind, **fields), Path(folder))
            ours = error(outputs(merged(base, Path(folder))), expected)
            own = attempt(lambda: by_peft(base, folder), expected)
        yield Row(said(kind, fields), library, ours, own)


def by_peft(base: nn.Module, folder: str) -> tuple[Tensor, ...]:
    """What PEFT's own merge gives."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    return outputs(model.merge_and_unload(safe_merge=True).state_dict())


LYCORIS: list[tuple[str, dict[str, Any]]] = [
    ("locon", {}),
    ("locon", {"use_tucker": True}),
    ("locon", {"dora_wd": True}),
    ("locon", {"dora_wd": True, "wd_on_output": False}),
    ("locon", {"rs_lora": True}),
    ("loha", {}),
    ("loha", {"use_tucker": True}),
    ("lokr", {"factor": 2}),
    ("lokr", {"factor": 2, "full_matrix": True}),
    ("lokr", {"factor": 2, "decompose_both": True}),
    ("lokr", {"factor": 2, "dora_wd": True}),
    ("diag-oft", {}),
    ("diag-oft", {"constraint": 0.01, "rescaled": True}),
    ("boft", {}),
    ("boft", {"rescaled": True}),
    ("ia3", {}),
    ("ia3", {"train_on_input": True}),
    ("glora", {}),
    ("full", {}),
    ("full", {"train_norm": True}),
]
CONVOLUTION = (1, 4, 5, 5)


class Drawn(nn.Module):
    """Layers that LyCORIS's algorithms know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 16)
        self.point, self.window = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3)
        self.norm = nn.LayerNorm(16)

    def forward(self, seen: Tensor) -> tuple[Tensor, ...]:
        image = torch.sin(torch.arange(100.0)).view(CONVOLUTION)
        inner = self.first(seen)
        return inner, self.second(inner), self.point(image), self.window(image), self.norm(seen)


def of_lycoris() -> Iterator[Row]:
    """Networks that LyCORIS made, drawn at random, run beside the model and saved to a file."""
    try:
        lycoris: Any = importlib.import_module("lycoris")
    except ImportError:
        return
    logging.disable()
    torch.manual_seed(0)
    base, inputs = Drawn(), torch.randn(3, 16)
    library = f"lycoris-lora {version('lycoris-lora')}"
    names = ["Linear", "Conv2d", "LayerNorm"]
    lycoris.LycorisNetwork.apply_preset({"target_module": names, "use_fnmatch": False})
    for kind, fields in LYCORIS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            file, model = Path(folder, "a.safetensors"), copy.deepcopy(base)
            network = lycoris.create_lycoris(model, 1.0, 2, 3.0, algo=kind, **sizes(), **fields)
            network.apply_to()
            for own in network.parameters():
                own.add_(0.2 * torch.randn_like(own))
            expected = model.eval()(inputs)
            network.save_weights(str(file), torch.float32, {})
            found = covmerge.merge(base.state_dict(), {"a": file}, "linear").tensors
            ours = error(run(base, dict(found), inputs), expected)
            own = attempt(lambda: by_lycoris(lycoris, base, str(file), inputs), expected)  # noqa: B023
        yield Row(said(kind, fields), library, ours, own)


def sizes() -> dict[str, Any]:
    return {"conv_dim": 2, "conv_alpha": 3.0}


def by_lycoris(lycoris: Any, base: nn.Module, file: str, inputs: Tensor) -> tuple[Tensor, ...]:
    """What LyCORIS's own merge of its file gives."""
    model = copy.deepcopy(base)
    network, _ = lycoris.create_lycoris_from_weights(1.0, file, model)
    network.merge_to(1.0)
    return model.eval()(inputs)


def of_diffusers() -> Iterator[Row]:
    """A part of a pipeline that diffusers adapts, and saves with its scales in the metadata."""
    library = f"diffusers {version('diffusers')}"
    for fields in ({"lora_alpha": 3}, {"use_rslora": True, "lora_alpha": 3}, {"use_dora": True}):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch.manual_seed(0)
            unet = diffusion.unet().eval()
            base = {name: value.clone() for name, value in unet.state_dict().items()}
            targets = ["to_q", "to_v", "conv1", "proj_in"]
            unet.add_adapter(peft.LoraConfig(r=2, target_modules=targets, **fields))
            for name, own in unet.named_parameters():
                if "lora_" in name:
                    own.add_(0.1 * torch.randn_like(own))
            expected = (seen(unet),)
            unet.save_lora_adapter(folder)
            unet.fuse_lora()
            own = attempt(lambda: (seen(unet),), expected)  # noqa: B023
            found = covmerge.merge(base, {"a": folder}, "linear").tensors
            plain = diffusion.unet().eval()
            plain.load_state_dict(dict(found))
            ours = error((seen(plain),), expected)
        yield Row(said("save_lora_adapter", fields), library, ours, own)


def seen(unet: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = unet.config.sample_size
    image = torch.randn(1, unet.config.in_channels, size, size, generator=generator)
    states = torch.randn(1, 3, unet.config.cross_attention_dim, generator=generator)
    return unet(image, 3, states).sample


MLX: list[tuple[str, list[str], bool]] = [
    ("lora", ["self_attn.q_proj", "mlp.down_proj"], False),
    ("dora", ["self_attn.q_proj", "mlp.down_proj"], False),
    ("lora", ["model.embed_tokens", "self_attn.v_proj"], True),
    ("dora", ["model.embed_tokens"], True),
    ("full", ["self_attn.q_proj", "input_layernorm"], False),
]


def of_mlx() -> Iterator[Row]:
    """Adapters of mlx-lm on a small Llama, run by mlx on the CPU in float32."""
    try:
        importlib.import_module("mlx_lm.tuner.utils")
    except ImportError:
        return
    library = f"mlx-lm {version('mlx-lm')}"
    for kind, keys, tied in MLX:
        with tempfile.TemporaryDirectory() as folder:
            base, adapter, out = (Path(folder, name) for name in ("base", "adapter", "out"))
            torch.manual_seed(0)
            llama(tie_word_embeddings=tied, vocab_size=40).save_pretrained(base)
            model = mlx_trained(base, adapter, kind, keys)
            expected = mlx_logits(model)
            covmerge.merge(base, {"a": adapter}, "linear", out=out)
            ours = error((mlx_logits(mlx_model(out)),), (expected,))
            own = attempt(lambda: (mlx_logits(mlx_fused(model)),), (expected,))  # noqa: B023
        yield Row(f"{kind} {', '.join(keys)}{' (tied)' if tied else ''}", library, ours, own)


def mlx_model(folder: Path) -> Any:
    mx: Any = importlib.import_module("mlx.core")
    module: Any = importlib.import_module("mlx_lm.models.llama")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    model = module.Model(module.ModelArgs.from_dict(config))
    stored = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(model.sanitize(stored).items()))
    return model


def mlx_trained(base: Path, folder: Path, kind: str, keys: list[str]) -> Any:
    """An adapter drawn at random, saved as mlx-lm's trainer does."""
    mx: Any = importlib.import_module("mlx.core")
    utils: Any = importlib.import_module("mlx.utils")
    tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
    model = mlx_model(base)
    model.freeze()
    parameters = {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": keys}
    if kind == "full":
        for name, module in model.named_modules():
            if name.endswith(tuple(keys)):
                module.unfreeze()
    else:
        tuner.linear_to_lora_layers(model, 3, parameters, use_dora=kind == "dora")
    mx.random.seed(1)
    drawn = [
        (name, value + 0.2 * mx.random.normal(value.shape))
        for name, value in utils.tree_flatten(model.trainable_parameters())
    ]
    model.update(utils.tree_unflatten(drawn))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(drawn))
    config = {"fine_tune_type": kind, "num_layers": 3, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model


def mlx_fused(model: Any) -> Any:
    """The model as `mlx_lm.fuse` makes it."""
    utils: Any = importlib.import_module("mlx.utils")
    fused = [(n, module.fuse()) for n, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(utils.tree_unflatten(fused))
    return model


def mlx_logits(model: Any) -> Tensor:
    mx: Any = importlib.import_module("mlx.core")
    model.eval()
    return torch.tensor(model(mx.array([[3, 1, 4, 1, 5]])).tolist())


def run(base: nn.Module, state: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a model gives with other weights."""
    model = copy.deepcopy(base).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(*inputs)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
