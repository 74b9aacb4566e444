"""What PEFT and vLLM take of an adapter; PEFT is asked itself, here and in test_adapter_output.py.

So is vLLM where it is installed, which fits no torch that everything else here does: its loader alone
needs no GPU (`pip install --no-deps vllm` beside the development packages, and so each package that an
import of `vllm.lora.lora_model` then lacks: some fifteen small ones).
"""

import json

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

import covmerge
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.layout import AdaptedTensor, WholeTensor
from covmerge.plan.planning.adapter import who_loads_it
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build
from tests.e2e.test_adapters import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def layer(rank, shape=(999, 999)):
    return AdaptedTensor("model.layers.0.mlp.up_proj.weight", shape, rank)


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        (1, "--enable-lora"),
        (16, "--enable-lora"),
        (17, "--enable-lora --max-lora-rank 32"),
        (129, "--enable-lora --max-lora-rank 256"),
        (257, "--enable-lora --max-lora-rank 320"),
        (512, "--enable-lora --max-lora-rank 512"),
    ],
)
def test_the_rank_that_vllm_must_be_told(rank, told):
    note = who_loads_it([layer(2), layer(rank)], [])
    assert note == f"PEFT loads the adapter, and vLLM with {told}"


def test_what_vllm_does_not_take():
    assert "rank=512 truncates it" in who_loads_it([layer(513)], [])
    assert "no LoRA of convolutions" in who_loads_it([layer(4, (8, 3, 3, 3))], [])
    norm = WholeTensor(("model.norm.weight",), TensorHeader("n", (8,), torch.float32))
    note = who_loads_it([layer(4)], [norm])
    assert "vLLM does not" in note and "1 tensor is held whole (model.norm.weight)" in note
    assert "lm_head" in who_loads_it([layer(4)], [], ["lm_head"])


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two adapters; the second has another rank in its last layer, and the head beside."""
    folder = tmp_path_factory.mktemp("llama")
    base = build("llama")
    base.save_pretrained(folder / "base")
    save_adapter(base, folder / "a", seed=1, targets=["q_proj", "v_proj", "down_proj"], r=12)
    pattern = {r"model\.layers\.1\..*": 2}
    save_adapter(
        base, folder / "b", seed=2, targets=["q_proj", "v_proj"], r=8, rank_pattern=pattern
    )
    save_adapter(base, folder / "whole", seed=3, targets=["q_proj"], modules_to_save=["norm"])
    save_adapter(base, folder / "head", seed=4, targets=["q_proj", "lm_head"])
    return folder


def merging(family, *names, out):
    sources = [f"--expert={name}={family / name / 'adapter'}" for name in names]
    return ("merge", "--base", family / "base", *sources, "--as=adapter", out)


def test_the_note_is_in_the_plan_on_the_terminal_and_in_the_manifest(family, tmp_path):
    given = merging(family, "a", "b", out=tmp_path / "out")
    note = "PEFT loads the adapter, and vLLM with --enable-lora"
    assert note in words(command(*given, "--dry-run").stdout)
    assert note in command(*given, "--dry-run", "--json").json["notes"]
    assert note in words(command(*given).stdout)
    assert note in json.loads((tmp_path / "out" / "covmerge.json").read_text("utf-8"))["notes"]


def test_the_configured_rank_is_the_largest_and_every_scale_is_one(family, tmp_path):
    """vLLM holds `r` against its limit, and takes lora_alpha / r for every layer, whatever its pattern."""
    out = tmp_path / "out"
    command(*merging(family, "a", "b", out=out))
    config = json.loads((out / "adapter_config.json").read_text())
    ranks = [
        f.shape[0] for n, f in load_file(out / "adapter_model.safetensors").items() if "lora_A" in n
    ]
    assert len(set(ranks)) > 1
    assert config["r"] == config["lora_alpha"] == max(ranks)
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert not config.get("use_rslora") and config["modules_to_save"] is None
    base = transformers.AutoModelForCausalLM.from_pretrained(family / "base")
    adapted = peft.PeftModel.from_pretrained(base, out)
    scales = [m.scaling["default"] for m in adapted.modules() if isinstance(m, LoraLayer)]
    assert len(scales) == len(ranks) and set(scales) == {1.0}


@pytest.mark.parametrize(
    ("expert", "word"),
    [
        ("whole", "vLLM does not: it takes nothing but factors, and 5 tensors are held whole"),
        ("head", "on architectures where it has LoRA of lm_head"),
    ],
)
def test_peft_loads_what_vllm_does_not(family, tmp_path, expert, word):
    out = tmp_path / "out"
    assert word in words(command(*merging(family, "a", expert, out=out)).stdout)
    base = transformers.AutoModelForCausalLM.from_pretrained(family / "base")
    model = peft.PeftModel.from_pretrained(base, out)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_tensors_that_are_held_whole_are_named_in_an_order_of_their_own(tmp_path):
    """The note was of the first two of a set, whose order is another one in each process."""
    layers = [f"h.{number}" for number in range(9)]
    base = {f"{n}.weight": torch.zeros(4, 4) for n in layers} | {
        f"{n}.bias": torch.zeros(4) for n in layers
    }
    expert = {name: torch.ones_like(tensor) for name, tensor in base.items()}
    merged = covmerge.merge(
        base, {"a": expert}, "average", tmp_path / "out", form="adapter", rank=2, whole=True
    )
    assert any("9 tensors are held whole (h.0.bias, h.1.bias and 7" in n for n in merged.notes)


# What vLLM replaces in a Llama, by the names of the parts that it packs later.
EXPECTED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def loaded_by_vllm(folder, limit):
    """What vLLM makes of an adapter: the updates of its layers by their modules."""
    helpers = pytest.importorskip("vllm.lora.peft_helper", exc_type=ImportError)
    models = pytest.importorskip("vllm.lora.lora_model", exc_type=ImportError)
    helper = helpers.PEFTHelper.from_local_dir(str(folder), None)
    helper.validate_legal(helpers.LoRAConfig(max_lora_rank=limit))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "PIN_MEMORY", False)  # which takes a GPU
        model = models.LoRAModel.from_local_checkpoint(str(folder), EXPECTED, helper, device="cpu")
    return {name: lora.lora_b @ lora.lora_a * lora.scaling for name, lora in model.loras.items()}


def test_vllm_takes_what_it_is_told_and_makes_the_full_merge_of_it(family, tmp_path):
    given = [*merging(family, "a", "b", out=tmp_path / "adapter"), "--method=task_arithmetic"]
    command(*given)
    updates = loaded_by_vllm(tmp_path / "adapter", limit=16)
    given[given.index("--as=adapter")] = "--as=model"
    given[given.index(tmp_path / "adapter")] = tmp_path / "full"
    command(*given)
    files = (family / "base", tmp_path / "full")
    base, merged = (load_file(folder / "model.safetensors") for folder in files)
    for module, update in updates.items():
        name = f"{module}.weight"
        torch.testing.assert_close(base[name] + update, merged[name], atol=1e-6, rtol=1e-5)
    changed = [name for name in merged if not torch.equal(base[name], merged[name])]
    assert sorted(f"{module}.weight" for module in updates) == sorted(changed)


@pytest.mark.parametrize(
    ("expert", "limit", "said"),
    [("a", 8, "rank"), ("whole", 16, "modules_to_save"), ("head", 16, "lm_head")],
)
def test_vllm_refuses_what_it_is_said_to_refuse(family, tmp_path, expert, limit, said):
    command(*merging(family, expert, out=tmp_path / "out"))
    with pytest.raises(ValueError, match=said):
        loaded_by_vllm(tmp_path / "out", limit)
