"""GGUF files as experts and as base, against transformers' own loader of the same file."""

import json
import os
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.view import open_plain
from tests.advised import advice
from tests.quantised.ggufs import save_falcon, save_gpt2, save_llama
from tests.quantised.models import llama, moved, qwen3

PARTS = [f"model-{number:05}-of-00004.gguf" for number in range(1, 5)]


def gpt2(seed):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2)
    return moved(transformers.GPT2LMHeadModel(config), seed)


def wide(seed):
    return llama(seed, hidden_size=256, intermediate_size=256, num_attention_heads=4)


@pytest.mark.parametrize(
    ("build", "save", "kind"),
    [
        *((llama, save_llama, kind) for kind in ("F32", "F16", "Q8_0", "Q4_1")),
        *((wide, save_llama, kind) for kind in ("Q4_K", "Q6_K", "IQ4_XS")),
        (gpt2, save_gpt2, "Q8_0"),
    ],
)
def test_it_is_what_transformers_reads(tmp_path, build, save, kind, monkeypatch):
    monkeypatch.setattr("covmerge.files.quantised.packed.PIECE", 500)
    path = save(build(1), tmp_path / "model.gguf", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    ours = open_plain(path)
    plain = {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    assert ours.headers.keys() == theirs.keys() - ({"lm_head.weight"} if build is gpt2 else set())
    for name, header in ours.headers.items():
        assert header.dtype is plain
        expected = theirs[name].to(plain)
        assert torch.equal(ours.read(name), expected), name
        for rows in (range(1, 2), range(5, 5), range(3, header.shape[0] - 1)):
            assert torch.equal(ours.read(name, rows), expected[rows.start : rows.stop])
    assert ours.notes[-1].partition("GGUF, ")[2]


def test_a_gguf_expert_is_merged_as_its_twin(tmp_path):
    llama(0).save_pretrained(tmp_path / "base")
    packed = save_llama(llama(1), tmp_path / "expert.gguf", "Q8_0")
    twin = llama(0)
    plain = open_plain(packed)
    twin.load_state_dict({name: plain.read(name) for name in plain.headers})
    twin.save_pretrained(tmp_path / "twin")
    for out, expert in (("a", packed), ("b", tmp_path / "twin")):
        covmerge.merge(tmp_path / "base", {"e": expert}, "ties", tmp_path / out)
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in "ab")
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert one.keys() == other.keys()


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_gguf_base_gives_a_model_that_loads(tmp_path, in_folder):
    """With a config made of the file; a tokenizer is taken from its folder."""
    folder = tmp_path / "base"
    folder.mkdir()
    base = save_llama(llama(0), folder / "base-Q8_0.gguf", "Q8_0")
    (folder / "tokenizer_config.json").write_text("{}")
    llama(1).save_pretrained(tmp_path / "expert")
    result = covmerge.merge(
        folder if in_folder else base,
        {"e": tmp_path / "expert"},
        "task_arithmetic",
        tmp_path / "out",
        scale=1.0,
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["num_key_value_heads"]) == ("bfloat16", 1)
    assert (tmp_path / "out" / "tokenizer_config.json").exists() is in_folder
    assert any("config.json is made of" in note for note in result.notes)
    assert not any("no config" in note for note in result.notes)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert covmerge.verify(tmp_path / "out").ok
    expert = llama(1).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor.float(), expert[name].float(), atol=0.02), name


def test_a_config_beside_it_decides(tmp_path):
    save_llama(llama(1), tmp_path / "model.gguf", "Q8_0")
    llama(1).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    model = open_plain(tmp_path)
    assert {header.dtype for header in model.headers.values()} == {torch.float16}
    assert model.config == {
        **config,
        "dtype": "float16",
        "architectures": ["LlamaForCausalLM"],
    }


def test_heads_of_another_size_are_the_metadatas(tmp_path):
    """transformers' loader leaves out what they say of it, and can load no such file itself."""
    model = open_plain(save_llama(qwen3(1), tmp_path / "model.gguf", "BF16", "qwen3"))
    assert model.config["head_dim"] == 48
    for name, tensor in qwen3(1).state_dict().items():
        assert torch.equal(model.read(name), tensor), name


@pytest.mark.parametrize("lacks", ["biases", "heads", "sizes"])
def test_what_a_config_beside_it_would_say_is_asked_for(tmp_path, lacks, monkeypatch):
    model = qwen3(1, attention_bias=lacks == "biases")
    if lacks != "biases":
        way = {"heads": "add_key_length", "sizes": "add_embedding_length"}[lacks]
        monkeypatch.setattr(gguf.GGUFWriter, way, lambda *_: None)
    file = save_llama(model, tmp_path / "model.gguf", "BF16", "qwen3")
    advised = "put the model's config.json beside it, and pass the folder"
    with pytest.raises(CheckpointError, match=advised):
        open_plain(file)
    model.config.save_pretrained(tmp_path)
    found = open_plain(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.read(name), tensor), name


@pytest.mark.parametrize("said", ["rope_freqs.weight", "llama.rope.scaling.type"])
def test_a_rope_that_is_scaled_is_in_the_config(tmp_path, said):
    """The config that transformers makes of the file has none: merged over it, another model would run."""
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (tmp_path / "base").mkdir()
    freqs = {said: np.full(16, 4, np.float32)}
    how = (
        {"beside": freqs}
        if said.startswith("rope_freqs")
        else {"scaling": gguf.RopeScalingType.LINEAR}
    )
    file = save_llama(llama(0), tmp_path / "base" / "base.gguf", "Q8_0", **how)
    expert = save_llama(llama(1), tmp_path / "a.gguf", "Q8_0", **how)
    given = ({"a": expert}, "average")
    refused = advice("scales its rope ({}), and the config that transformers makes of its")
    with pytest.raises(CheckpointError, match=refused) as caught:
        covmerge.merge(file, *given, tmp_path / "out")
    assert f"({said})" in str(caught.value) and not (tmp_path / "out").exists()
    covmerge.merge(file, *given, tmp_path / "packed", quantise="gguf")
    llama(0, rope_parameters=scaled).config.save_pretrained(file.parent)
    covmerge.merge(file.parent, *given, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == scaled
    expected, found = open_plain(expert), open_plain(tmp_path / "packed")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, expected.read(name)), name
        assert torch.equal(found.read(name), expected.read(name)), name


def test_a_mistral_is_a_llama_there(tmp_path):
    """llama.cpp has one architecture for both; the config beside it says which."""
    save_llama(llama(1), tmp_path / "model.gguf", "F32")
    config = llama(1).config.to_dict()
    kept = {
        key: value for key, value in config.items() if key not in ("model_type", "architectures")
    }
    transformers.MistralConfig(**kept).save_pretrained(tmp_path)
    model = open_plain(tmp_path)
    assert model.config["architectures"] == ["MistralForCausalLM"]
    for name, tensor in llama(1).state_dict().items():
        assert torch.equal(model.read(name), tensor), name


def test_another_config_is_refused(tmp_path):
    save_llama(llama(1), tmp_path / "model.gguf", "Q8_0")
    llama(1, intermediate_size=128).config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_.*' is .*, where its config gives"):
        open_plain(tmp_path)


@pytest.mark.parametrize("architecture", ["minimax-m2", "qwen35", "no_such"])
def test_an_architecture_that_is_not_read_is_named(tmp_path, architecture):
    path = save_llama(llama(1), tmp_path / "model.gguf", "Q8_0", architecture)
    with pytest.raises(CheckpointError, match=rf"gguf.*{architecture}"):
        open_plain(path)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("gemma", transformers.GemmaConfig),  # its norms are stored plus one
        ("granite", transformers.GraniteConfig),  # its q and k are in llama.cpp's order
    ],
)
def test_neither_does_a_config_beside_it_say_what_was_done_to_the_weights(
    tmp_path, architecture, config
):
    save_llama(llama(1), tmp_path / "model.gguf", "F32", architecture)
    sizes = llama(1).config.to_dict()
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config(**{name: sizes[name] for name in kept}, **heads).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"architecture, '{architecture}', is none of those"):
        open_plain(tmp_path)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_falcon_has_one_head_of_keys(tmp_path, heads):
    """Of several llama.cpp has all queries first, then all keys; transformers reads them by turns."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    several = {"new_decoder_architecture": heads > 1, "num_kv_heads": heads}
    config = transformers.FalconConfig(**sizes, **several, ffn_hidden_size=256)
    config.intermediate_size, config.num_key_value_heads, config.rms_norm_eps = 256, heads, 1e-5
    model = transformers.FalconForCausalLM(config)
    path = save_falcon(model, tmp_path / "model.gguf")
    config.save_pretrained(tmp_path)
    if heads > 1:
        with pytest.raises(CheckpointError, match=r"Falcon with several heads of keys"):
            open_plain(path)
        return
    found = open_plain(path)
    expected = model.state_dict()
    assert all(torch.equal(found.read(n).float(), expected[n]) for n in found.headers)


def test_what_it_is_stored_as_is_shown_by_its_names(tmp_path):
    stored = open_checkpoint(save_llama(llama(1), tmp_path / "model.gguf", "Q8_0"))
    header = stored.headers["blk.0.ffn_up.weight"]
    assert (header.shape, header.dtype) == ((96, 2 * 34), torch.uint8)
    assert stored.headers["output_norm.weight"].dtype == torch.float32


def put(data, place, form, value):
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def of_tensor(data, name):
    """Where a tensor's number of dimensions stands in the header."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


NAME = "blk.0.ffn_up.weight"  # (96, 64): two dimensions, its type, its offset
DAMAGED = {
    "does not begin with GGUF": lambda d: b"GGUf" + d[4:],
    "is GGUF version 1": lambda d: put(d, 4, "<I", 1),
    "claims 1099511627776 tensors": lambda d: put(d, 8, "<Q", 2**40),
    "claims 12 tensors and 1099511627776 entries": lambda d: put(d, 16, "<Q", 2**40),
    "has a text of 4503599627370496 bytes": lambda d: put(d, 24, "<Q", 2**52),
    "has a header that does not end": lambda d: d[:300],
    "has a value of type 77": lambda d: put(d, 24 + 8 + len("general.architecture"), "<I", 77),
    f"has '{NAME}' of 5 dimensions": lambda d: put(d, of_tensor(d, NAME), "<I", 5),
    f"has '{NAME}' of .96, 4611686018427387904.": (
        lambda d: put(d, of_tensor(d, NAME) + 4, "<Q", 2**62)
    ),
    f"has '{NAME}' of .96, 63., no whole": lambda d: put(d, of_tensor(d, NAME) + 4, "<Q", 63),
    f"has '{NAME}' of the type 4,": lambda d: put(d, of_tensor(d, NAME) + 20, "<I", 4),
    f"has '{NAME}' at 7, which is not": lambda d: put(d, of_tensor(d, NAME) + 24, "<Q", 7),
    advice("{}: tensor '{}' {}: fetch the file again"): lambda d: put(
        d, of_tensor(d, NAME) + 24, "<Q", 2**50
    ),
    "past the end|lies over": lambda d: put(d, of_tensor(d, NAME) + 24, "<Q", 0),
    "lies over another, or past": lambda d: d[:-64],
}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_header_is_refused_before_anything_is_read(tmp_path, said):
    path = save_llama(llama(1), tmp_path / "model.gguf", "Q8_0")
    whole = path.read_bytes()
    path.write_bytes(DAMAGED[said](whole))
    with pytest.raises(CheckpointError, match=said):
        open_plain(path)
    path.write_bytes(whole)
    open_plain(path)


@pytest.mark.parametrize("stated", [{}, {"path": "pipe", "metadata": [], "types": {"a": "Q8_0"}}])
def test_a_config_cannot_claim_to_be_a_gguf_file(tmp_path, stated):
    """Its settings are what a file says of itself: a stranger's `path` is not opened, here a pipe."""
    settings = {"quant_method": "gguf", **stated}
    if stated:
        os.mkfifo(tmp_path / "pipe")
        settings["path"] = str(tmp_path / "pipe")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(
        CheckpointError, match=r"'gguf'; quantization_config .* can be read are fp8"
    ):
        open_plain(tmp_path)


def test_a_gguf_file_is_no_shard(tmp_path):
    """Of the tensors that lie in others, its header says nothing."""
    save_llama(llama(1), tmp_path / "a.gguf", "Q8_0")
    save_file({"more": torch.ones(2)}, tmp_path / "b.safetensors")
    held = {name: "a.gguf" for name in open_checkpoint(tmp_path / "a.gguf").headers}
    index = {"weight_map": {**held, "more": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has a GGUF file among 2 files of weights"):
        open_plain(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 1}, r"its llama.attention.head_count is 2, .* gives 1"),
        ({"num_key_value_heads": 2, "head_dim": 16}, r"head_count_kv is 1, .* gives 2"),
        ({"num_hidden_layers": 2}, r"its llama.block_count is 1, .* gives 2"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            r"its llama.rope.freq_base is 10000.0, .* gives 500000.0",
        ),
        ({"num_key_value_heads": 0}, "transformers cannot build its model .ZeroDivisionError"),
        ({"num_attention_heads": 0}, "transformers cannot .*ZeroDivisionError"),
    ],
)
def test_a_config_that_contradicts_the_file_is_refused(tmp_path, changes, said):
    """By other heads the rows of q and k would lie in another order."""
    save_llama(llama(1), tmp_path / "model.gguf", "Q8_0")
    llama(1).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path)


def test_rows_that_no_head_has_are_named(tmp_path):
    model = llama(1).float()
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight[:31])
    path = tmp_path / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.quantised.ggufs.permuted", lambda weight, heads: weight)
        save_llama(model, path, "Q8_0")
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_k.weight' is \[31, 1\], of which"):
        open_plain(path)


def test_a_gguf_base_in_another_format(tmp_path):
    """As which its packed layers are written."""
    file = save_llama(llama(0), tmp_path / "base.gguf", "Q8_0")
    llama(1).save_pretrained(tmp_path / "a")
    how = {"method": "task_arithmetic", "out": tmp_path / "out"}
    covmerge.merge(file, {"a": tmp_path / "a"}, **how, quantise="int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["load_in_8bit"]


def divided(folder, seed=0):
    """A model in four parts, of which the first has no tensors, and the same in one file."""
    folder.mkdir()
    save_llama(llama(seed), folder / "model.gguf", "Q8_0", most=4)
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    return save_llama(llama(seed), folder.with_suffix(".gguf"), "Q8_0")


def test_parts_are_read_as_one_file(tmp_path):
    """Without config.json too, where the head lies in a part that transformers does not look at."""
    whole = open_plain(divided(tmp_path / "parts"))
    for source in (tmp_path / "parts", *(tmp_path / "parts" / PARTS[number] for number in (0, 2))):
        parts = open_plain(source)
        assert (parts.headers, parts.config) == (whole.headers, whole.config)
        assert all(torch.equal(parts.read(name), whole.read(name)) for name in whole.headers)


def test_parts_are_base_and_expert(tmp_path):
    outputs = []
    for kind in ("", ".gguf"):
        for seed, name in enumerate(("base", "a")):
            if not kind:
                divided(tmp_path / name, seed)
        base, expert = (tmp_path / f"{name}{kind}" for name in ("base", "a"))
        out = tmp_path / f"out{kind}"
        covmerge.merge(base, {"a": expert}, "average", out, quantise="same")
        assert covmerge.verify(out).ok
        outputs.append(gguf.GGUFReader(out / "model.gguf"))
    parts, whole = outputs
    assert parts.fields["split.count"].contents() == 0  # as after gguf-split --merge
    assert whole.fields.keys() == parts.fields.keys() - {
        "split.count",
        "split.no",
        "split.tensors.count",
    }
    for one, other in zip(parts.tensors, whole.tensors, strict=True):
        assert one.name == other.name
        assert np.array_equal(one.data, other.data)


def numbered(number):
    """What a part says of its place."""
    return b"split.no" + struct.pack("<IH", 2, number)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _, parts: parts[2].unlink(), "model-00003-of-00004.gguf is missing"),
        (
            lambda _, parts: parts[1].write_bytes(parts[2].read_bytes()),
            "00002-of-00004.gguf says split.no 2 and split.count 4, and is opened as 1 of 4",
        ),
        (
            lambda _, parts: parts[1].write_bytes(
                parts[2].read_bytes().replace(numbered(2), numbered(1))
            ),
            "and its other parts have '.*' twice",
        ),
        (
            lambda other, parts: parts[1].write_bytes((other / PARTS[1]).read_bytes()),
            "is of a model of 12 tensors, and its parts have 13",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, change, said):
    divided(tmp_path / "parts")
    other = tmp_path / "other"
    other.mkdir()
    more = {"one.more": np.zeros(1, dtype=np.float32)}
    save_llama(llama(0), other / "model.gguf", "Q8_0", beside=more, most=5)
    change(other, [tmp_path / "parts" / name for name in PARTS])
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path / "parts")


def test_a_part_of_another_name_is_refused(tmp_path):
    divided(tmp_path / "parts")
    part = tmp_path / "parts" / PARTS[0]
    alone = part.rename(tmp_path / "alone.gguf")
    said = advice(
        "{} says split.no {} and split.count {}, and is opened as {} of {}: put all parts into one folder, "
        "with the names that llama.cpp gives them (NAME-00001-of-00002.gguf), or join them (llama.cpp's "
        "gguf-split --merge)"
    )
    with pytest.raises(CheckpointError, match=said):
        open_plain(alone)
    assert open_plain(alone.rename(part)).headers
