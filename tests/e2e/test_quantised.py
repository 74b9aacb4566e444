"""A base as bitsandbytes and GPTQ store it: adapters of it become one adapter, its weights unread."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError
from tests.e2e.models import build
from tests.e2e.test_adapters import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def as_bitsandbytes(name, weight):
    """Tensors of a 4-bit layer, in the shapes in which `save_pretrained` writes them."""
    return {
        name: torch.randint(0, 255, (weight.numel() // 2, 1), dtype=torch.uint8),
        f"{name}.absmax": torch.rand(max(1, weight.numel() // 64)),
        f"{name}.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(78, dtype=torch.uint8),
    }


def as_gptq(name, weight):
    module = name.removesuffix(".weight")
    d_out, d_in = weight.shape
    return {
        f"{module}.qweight": torch.zeros(d_in // 8, d_out, dtype=torch.int32),
        f"{module}.qzeros": torch.zeros(1, max(1, d_out // 8), dtype=torch.int32),
        f"{module}.scales": torch.ones(1, d_out, dtype=torch.float16),
        f"{module}.g_idx": torch.zeros(d_in, dtype=torch.int32),
    }


@pytest.fixture(params=[as_bitsandbytes, as_gptq])
def quantised(request, tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "plain")
    for number in (1, 2):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=TARGETS)
    path = tmp_path / "base" / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        layer = name.endswith("_proj.weight")
        stored |= request.param(name, tensor) if layer else {name: tensor}
    save_file(stored, path, metadata={"format": "pt"})
    config = tmp_path / "base" / "config.json"
    method = "bitsandbytes" if request.param is as_bitsandbytes else "gptq"
    fields = {**json.loads(config.read_text()), "quantization_config": {"quant_method": method}}
    config.write_text(json.dumps(fields))
    return tmp_path


def adapters(folder):
    return {f"e{n}": folder / f"e{n}" / "adapter" for n in (1, 2)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ace", "actmat", "average", "tsv_m", "knots", "ties"])
def test_the_adapter_is_that_of_the_plain_base(quantised, method):
    """Also where a threshold is looked for over all tensors first."""
    for base in ("base", "plain"):
        covmerge.merge(
            quantised / base,
            adapters(quantised),
            method,
            quantised / f"{base}-out",
            form="adapter",
            rank=4 if method == "ties" else None,
        )
    found, expected = (
        load_file(quantised / f"{base}-out" / "adapter_model.safetensors")
        for base in ("base", "plain")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    config = json.loads((quantised / "base-out" / "adapter_config.json").read_text())
    assert config["target_modules"]
    peft.PeftModel.from_pretrained(build("llama"), quantised / "base-out")


def test_a_full_model_is_refused_with_what_to_do(quantised):
    with pytest.raises(InputError, match=r"quantised.*pass the model as it was before"):
        covmerge.merge(quantised / "base", adapters(quantised), "average")


def test_a_packed_layer_that_was_trained_whole_is_refused(quantised):
    """Its update is the difference to a weight that is not there."""
    base = build("llama")
    for number in (1, 2):
        folder = quantised / f"e{number}"
        save_adapter(base, folder, seed=number, targets=TARGETS, modules_to_save=["o_proj"])
    with pytest.raises(InputError, match=r"o_proj.* is needed, and .* stores it quantised"):
        covmerge.merge(
            quantised / "base", adapters(quantised), "average", quantised / "out", form="adapter"
        )
    assert not (quantised / "out").exists()
