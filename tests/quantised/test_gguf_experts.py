"""GGUF files of mixtures of experts: in, beside transformers, and out, beside `gguf`'s reader."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError, InputError, RecipeError, TensorError
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.view import open_plain
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.run.recompute import recompute
from tests.quantised.ggufs import save_moe
from tests.quantised.models import SIZES, moved
from tests.quantised.test_gguf import of_tensor, put

_COMMON = {
    **SIZES,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_QWEN = {"num_experts": 3, "moe_intermediate_size": 32}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=3),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_COMMON, **_QWEN, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, **_QWEN, head_dim=16, norm_topk_prob=True
    ),
}
STACK = "blk.1.ffn_up_exps.weight"


def moe(kind, seed, **changes):
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config.update({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **changes})
    return moved(transformers.AutoModelForCausalLM.from_config(config), seed)


def saved(model, folder):
    """A model as transformers saves it: an expert a tensor."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_what_transformers_saves(tmp_path, kind):
    """Names, orders and numbers, of a file in float32; and a stack is shown by its matrices."""
    path = save_moe(moe(kind, 1), tmp_path / "model.gguf", "F32")
    theirs = saved(moe(kind, 1), tmp_path / "twin")
    ours = open_plain(path)
    assert ours.headers.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours.read(name), tensor), name
        assert torch.equal(ours.read(name, range(1)), tensor[:1]), name
    expert = STACK.replace("weight", "2.weight")
    assert open_checkpoint(path).headers[expert].shape == open_stack(path, STACK).shape[1:]


def test_the_gate_of_a_shared_expert_is_a_matrix_or_a_vector(tmp_path):
    """As llama.cpp's converters store it, the one of today and older ones; a file keeps its form."""
    theirs = saved(moe("qwen2_moe", 0), tmp_path / "twin")
    saved(moe("qwen2_moe", 1), tmp_path / "a")
    own = "blk.0.ffn_gate_inp_shexp.weight"
    for vector in (False, True):
        path = save_moe(moe("qwen2_moe", 0), tmp_path / f"{vector}.gguf", "F32", vector=vector)
        ours = open_plain(path)
        assert ours.headers.keys() == theirs.keys()
        assert all(torch.equal(ours.read(name), tensor) for name, tensor in theirs.items())
        out = tmp_path / f"out-{vector}"
        covmerge.merge(path, {"a": tmp_path / "a"}, "average", out, quantise="same")
        assert covmerge.verify(out).ok
        gate = load_file(tmp_path / "a/model.safetensors")[
            "model.layers.0.mlp.shared_expert_gate.weight"
        ]
        stored = open_stack(out / "model.gguf", own)
        assert stored.shape == ((64,) if vector else (1, 64))
        assert np.array_equal(stored.reshape(1, -1), gate.numpy())


def open_stack(path, name):
    return next(own.data for own in gguf.GGUFReader(path).tensors if own.name == name)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_it_is_what_transformers_reads(tmp_path, kind):
    """Of a file in blocks, put together as its modules hold them. It reads Mixtral as a Llama."""
    path = save_moe(moe(kind, 1), tmp_path / "model.gguf", "Q8_0")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, config=CONFIGS[kind](), dtype=torch.float32
    )
    ours = open_plain(path)
    left = set(ours.headers)
    for name, tensor in model.state_dict().items():
        if name in left:
            left.remove(name)
            assert torch.equal(ours.read(name), tensor.to(torch.bfloat16)), name
            continue
        stem, _, leaf = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for number, matrix in enumerate(tensor):
            names = [f"{stem}.{number}.{own}.weight" for own in leaves]
            left.difference_update(names)
            stored = torch.cat([ours.read(own) for own in names])
            assert torch.equal(stored, matrix.to(torch.bfloat16)), names
    assert not left


def test_a_mixtral_is_told_from_a_llama_by_its_experts(tmp_path):
    """Its config is made of the file, and the merged model computes what the plain twin's does."""
    base = save_moe(moe("mixtral", 0), tmp_path / "base.gguf", "F32")
    saved(moe("mixtral", 0), tmp_path / "twin")
    saved(moe("mixtral", 1), tmp_path / "a")
    ids = torch.arange(8)[None]
    found = {}
    for name, start in (("packed", base), ("plain", tmp_path / "twin")):
        out = tmp_path / f"out-{name}"
        covmerge.merge(start, {"a": tmp_path / "a"}, "task_arithmetic", out, scale=0.5)
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True
        )
        assert not told["missing_keys"] and not told["unexpected_keys"]
        with torch.no_grad():
            found[name] = model(ids).logits
    assert torch.equal(found["packed"], found["plain"])
    config = json.loads((tmp_path / "out-packed" / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (3, 2)


@pytest.mark.parametrize(
    ("kind", "stored", "wanted", "written"),
    [
        ("mixtral", "Q8_0", "same", "Q8_0"),
        ("qwen2_moe", "F16", "gguf-q4_0", "Q4_0"),
        ("qwen3_moe", "F32", "gguf-q8_0", "Q8_0"),
    ],
)
def test_it_is_the_plain_merge_rounded_once(tmp_path, monkeypatch, kind, stored, wanted, written):
    """Held against `gguf`'s own reader and rounding, of stacks put together from the unquantised twin."""
    base = save_moe(moe(kind, 0), tmp_path / "base.gguf", stored)
    plain = open_plain(base)
    weights = {name: plain.read(name).float() for name in plain.headers}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        expert = {n: w + 0.01 * w.std() * torch.randn(w.shape) for n, w in weights.items()}
        save_file(expert, tmp_path / f"{name}.safetensors")
    experts = {name: tmp_path / f"{name}.safetensors" for name in "ab"}
    covmerge.merge(base, experts, "average", tmp_path / "out", quantise=wanted)
    twin = {"out_dtype": "float32"}
    covmerge.merge(base, experts, "average", tmp_path / "twin", **twin)
    exact = load_file(tmp_path / "twin" / "model.safetensors")
    old, new = (
        {own.name: own for own in gguf.GGUFReader(path).tensors}
        for path in (base, tmp_path / "out" / "model.gguf")
    )
    assert list(new) == list(old)
    leaves = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    module = "mlp"
    if kind == "mixtral":
        leaves, module = {"gate": "w1", "up": "w3", "down": "w2"}, "block_sparse_moe"
    numbered = gguf.GGMLQuantizationType[written]
    for own, leaf in leaves.items():
        tensor = new[f"blk.1.ffn_{own}_exps.weight"]
        names = [f"model.layers.1.{module}.experts.{i}.{leaf}.weight" for i in range(3)]
        stack = np.stack([exact[name].numpy() for name in names])
        assert tensor.tensor_type is numbered
        assert (tensor.shape == old[tensor.name].shape).all()
        assert np.array_equal(tensor.data, gguf.quantize(stack, numbered))
    router = new["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type.name == "F32"
    assert np.array_equal(router.data, exact[f"model.layers.1.{module}.gate.weight"].numpy())
    if kind == "qwen2_moe":
        gate = new["blk.1.ffn_gate_inp_shexp.weight"]
        assert np.array_equal(
            gate.data, exact["model.layers.1.mlp.shared_expert_gate.weight"].numpy()[0]
        )
    said = (tmp_path / "out" / "README.md").read_text()
    program = said.split("```python\n")[1].split("```")[0]
    if kind == "mixtral":  # transformers takes its file for a Llama
        assert 'Llama("model.gguf")' in program
    else:
        monkeypatch.chdir(tmp_path / "out")
        held = {}
        exec(program, held)
        assert type(held["model"]).__name__ == type(moe(kind, 0)).__name__
    assert covmerge.verify(tmp_path / "out").ok
    assert recompute(tmp_path / "out", tensors=3).ok


def test_a_changed_byte_of_an_expert_is_named(tmp_path):
    base = save_moe(moe("qwen3_moe", 0), tmp_path / "base.gguf", "Q8_0")
    saved(moe("qwen3_moe", 1), tmp_path / "a")
    out = tmp_path / "out"
    covmerge.merge(base, {"a": tmp_path / "a"}, "average", out, quantise="same")
    where = {own.name: own.data_offset for own in gguf.GGUFReader(out / "model.gguf").tensors}
    with (out / "model.gguf").open("r+b") as file:
        file.seek(where[STACK] + 32 * 2 * 34 + 5)  # the second expert
        file.write(b"\x01\x02")
    said = str(covmerge.verify(out).checks[0].detail)
    assert "'blk.1.ffn_up_exps.1.weight'" in said


def test_experts_of_a_stack_are_kept_together(tmp_path):
    base = save_moe(moe("qwen3_moe", 0), tmp_path / "base.gguf", "Q8_0")
    saved(moe("qwen3_moe", 1), tmp_path / "a")
    how = {"out": tmp_path / "out", "quantise": "same"}
    with pytest.raises(RecipeError, match=rf"'{STACK}'.: keep all of them or none"):
        covmerge.merge(
            base, {"a": tmp_path / "a"}, "average", keep=("*.1.*.experts.2.up_proj.*",), **how
        )
    covmerge.merge(base, {"a": tmp_path / "a"}, "average", keep=("*.experts.*.up_proj.*",), **how)
    stored = {own.name: own for own in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert stored[STACK].tensor_type.name == "BF16"
    assert stored[STACK.replace("up", "gate")].tensor_type.name == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 4}, "its qwen3moe.expert_count is 3, where its config gives 4"),
        ({"num_experts_per_tok": 1}, "its qwen3moe.expert_used_count is 2, .* gives 1"),
        ({"moe_intermediate_size": 64}, r"_exps.0.weight' is \[32, 64\], where its config gives"),
        ({"mlp_only_layers": [1]}, "transformers saves no experts that are 'blk.1.ffn_"),
    ],
)
def test_a_config_of_other_experts_is_refused(tmp_path, changes, said):
    save_moe(moe("qwen3_moe", 1), tmp_path / "model.gguf", "Q8_0")
    config = CONFIGS["qwen3_moe"]()
    config.update(changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path)


@pytest.mark.parametrize("used", [0, 4, 2**31])
def test_a_number_of_experts_at_once_that_cannot_be_is_refused(tmp_path, used):
    path = save_moe(moe("qwen3_moe", 1), tmp_path / "model.gguf", "Q8_0")
    data = path.read_bytes()
    place = data.index(b"qwen3moe.expert_used_count") + len("qwen3moe.expert_used_count") + 4
    path.write_bytes(put(data, place, "<I", used))
    with pytest.raises(CheckpointError, match=rf"expert_used_count is {used}, .* from 1 to 3, its"):
        open_plain(path)


@pytest.mark.parametrize("shape", [(64, 96), (64 * 96,), (1, 64, 32, 3)])
def test_a_stack_that_is_none_is_refused(tmp_path, shape):
    plain = save_moe(moe("qwen3_moe", 1), tmp_path / "plain.gguf", "F32")
    reader, path = gguf.GGUFReader(plain), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, field in reader.fields.items():
        if key.startswith(("qwen3moe", "general.file_type")):
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, *field.types[1:2])
    for tensor in reader.tensors:
        data = np.ones(shape, np.float32) if tensor.name == STACK else np.array(tensor.data)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"'{STACK}' is \[.*a stack of experts is"):
        open_plain(path)


def test_a_stack_of_absurdly_many_experts_is_refused_before_they_are_listed(tmp_path):
    path = save_moe(moe("qwen3_moe", 1), tmp_path / "model.gguf", "Q8_0")
    data, count = path.read_bytes(), MAX_TENSORS + 1
    place = of_tensor(data, STACK) + 4 + 2 * 8  # the slowest axis, which comes last
    path.write_bytes(put(data, place, "<Q", count))
    with pytest.raises(CheckpointError, match=f"has '{STACK}', by which its matrices are 3000"):
        open_checkpoint(path)


def test_a_matrix_of_a_stack_that_is_there_by_itself_too_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.ones((2, 4, 4), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.1.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up_exps.1.weight' is there twice"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_experts_merge_with_separate_ones(tmp_path, kind):
    """What a module of transformers has in memory, and `save_original_format=False` on disk."""
    first, module = moe(kind, 0), moe(kind, 1)
    base = save_moe(first, tmp_path / "base.gguf", "F32")
    apart = saved(module, tmp_path / "apart")
    module.save_pretrained(tmp_path / "packed", save_original_format=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    again.save_pretrained(tmp_path / "again")
    for source in (module, tmp_path / "packed", tmp_path / "again"):
        merged = covmerge.merge(base, {"a": source}, "average").tensors
        assert merged.keys() == apart.keys()
        assert all(torch.allclose(merged[name], own, atol=1e-6) for name, own in apart.items())
        back = covmerge.merge(source, {"a": base}, "average").tensors
        packed = first.state_dict()
        assert back.keys() == packed.keys()
        assert all(torch.allclose(back[name], own, atol=1e-6) for name, own in packed.items())
        with pytest.raises(InputError, match="equals the base in every tensor"):
            covmerge.merge(tmp_path / "apart", {"a": source}, "average")
    ignored = run_recipe(recipe_of(base, tmp_path / "packed", tensors={"extra": "ignore"}), None)
    assert all(torch.allclose(ignored.tensors[n], own, atol=1e-6) for n, own in apart.items())


def recipe_of(base, expert, **given):
    data = {"base": str(base), "experts": {"a": str(expert)}, "method": "average"}
    return parse_recipe({**data, **given})


def test_what_both_have_packed_is_not_to_blame_for_what_else_is_missing():
    packed = {"layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)}
    apart = {f"layers.1.mlp.experts.{n}.up_proj.weight": torch.ones(4, 4) for n in range(2)}
    gate = {"layers.1.mlp.gate.weight": torch.ones(2, 4)}
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.gate\.weight"):
        covmerge.merge({**packed, **apart, **gate}, {"a": {**packed, **apart}}, "average")


def test_models_that_are_packed_alike_are_merged():
    """Old wording of the manual: what is packed does not align. It does, beside its like."""
    base, expert = moe("qwen3_moe", 0), moe("qwen3_moe", 1)
    merged = covmerge.merge(base, {"a": expert}, "average").tensors
    assert all(
        torch.allclose(merged[name], own, atol=1e-6) for name, own in expert.state_dict().items()
    )
