"""A GGUF file as the output: read by its clients, beside its unquantised twin; gone on with; refused."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.base.types import TensorHeader
from covmerge.errors import CheckpointError, RecipeError
from covmerge.files.checkpoints.hashes import hash_file
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.gguf import GgufTensor
from covmerge.files.quantised.view import open_plain
from covmerge.files.quantised.writing.gguf import HIGHER, WRITTEN, of_gguf
from covmerge.files.stores.local import LocalFolder
from covmerge.run.recompute import recompute
from tests.folders import contents
from tests.forked import fork_workers
from tests.interrupted import InterruptAfter
from tests.quantised.ggufs import random_blocks, save_gpt2, save_llama
from tests.quantised.models import llama
from tests.quantised.test_gguf import gpt2, wide

OUT = "out/model.gguf"


def read(path):
    return gguf.GGUFReader(path)


def types(path):
    return {tensor.name: tensor.tensor_type.name for tensor in read(path).tensors}


def said(path):
    """The metadata, as bytes, but for what changes with the types."""
    fields = read(path).fields.values()
    counted = ("GGUF.tensor_count", "general.file_type")
    return {f.name: [part.tobytes() for part in f.parts] for f in fields if f.name not in counted}


def merged(folder, build, save, kind, wanted, out="out", **how):
    base = folder / "base.gguf"
    if not base.exists():
        save(build(0), base, kind)
        plain = open_plain(base)
        for seed, name in enumerate("ab"):
            torch.manual_seed(seed)
            moved = {n: plain.read(n).float() for n in plain.headers}
            moved = {n: w + 0.01 * w.std() * torch.randn(w.shape) for n, w in moved.items()}
            save_file(moved, folder / f"{name}.safetensors")
    experts = {name: folder / f"{name}.safetensors" for name in "ab"}
    return covmerge.merge(base, experts, "average", folder / out, quantise=wanted, **how)


@pytest.mark.parametrize(
    ("build", "save", "kind", "wanted", "written"),
    [
        (llama, save_llama, "Q8_0", "same", "Q8_0"),
        (gpt2, save_gpt2, "F16", "gguf-q4_0", "Q4_0"),
        (wide, save_llama, "Q4_K", "gguf", "Q5_0"),
        (llama, save_llama, "F32", "gguf-q5_1", "Q5_1"),
        (llama, save_llama, "Q4_1", "same", "Q4_1"),
        (llama, save_llama, "Q8_0", "gguf-bf16", "BF16"),
    ],
)
def test_it_is_the_plain_merge_rounded_once(tmp_path, build, save, kind, wanted, written):
    """As transformers reads it: every number is the one that `gguf` makes of the unquantised twin's."""
    result = merged(tmp_path, build, save, kind, wanted)
    merged(tmp_path, build, save, kind, "none", "twin", out_dtype="float32")
    exact = load_file(tmp_path / "twin" / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    for name, tensor in exact.items():
        form = result.stats["tensors"][name]["quantised"]["format"]
        assert form == (written if tensor.dim() > 1 and "wpe" not in name else full(kind, name))
        numbered = gguf.GGMLQuantizationType[form]
        turned = tensor.mT if "c_" in name and tensor.dim() > 1 else tensor
        packed = gguf.quantize(turned.contiguous().numpy(), numbered)
        values = torch.from_numpy(gguf.dequantize(packed, numbered))
        assert torch.equal(theirs[name], values.mT if turned is not tensor else values), name
    assert types(tmp_path / OUT).keys() == types(tmp_path / "base.gguf").keys()
    assert said(tmp_path / OUT) == said(tmp_path / "base.gguf")
    assert covmerge.verify(tmp_path / "out").ok
    assert recompute(tmp_path / "out", tensors=3).ok


def full(kind, name):
    """What stays as the base has it: vectors, and positions."""
    return kind if "wpe" in name else "F32"


def test_what_nobody_changed_is_the_bytes_of_the_base(tmp_path):
    """A file's own rounding is not repeated, and what is no parameter is there too."""
    base, out = tmp_path / "base.gguf", tmp_path / "out"
    save_llama(llama(0), base, "Q4_1")
    plain = open_plain(base)
    weights = {name: plain.read(name) for name in plain.headers}
    changed = next(name for name in weights if "up_proj" in name)
    weights[changed] = weights[changed] + 0.1
    covmerge.merge(base, {"a": weights}, "task_arithmetic", out, scale=1.0, quantise="same")
    old, new = open_checkpoint(base), open_checkpoint(out)
    same = [name for name in old.headers if torch.equal(old.read(name), new.read(name))]
    assert set(old.headers) - set(same) == {"blk.0.ffn_up.weight"}
    assert types(tmp_path / OUT) == types(base)


def test_a_tensor_that_is_no_parameter_is_copied(tmp_path):
    base = tmp_path / "base.gguf"
    save_llama(
        llama(0), base, "Q8_0", beside={"rope_freqs.weight": np.arange(16, dtype=np.float32)}
    )
    llama(1).save_pretrained(tmp_path / "a")
    covmerge.merge(
        base, {"a": tmp_path / "a"}, "task_arithmetic", tmp_path / "out", quantise="gguf-f16"
    )
    found = {tensor.name: tensor.data for tensor in read(tmp_path / OUT).tensors}
    assert (found["rope_freqs.weight"] == np.arange(16)).all()
    assert covmerge.verify(tmp_path / "out").ok


def test_kept_tensors_are_plain_and_the_file_says_its_type(tmp_path):
    merged(
        tmp_path,
        llama,
        save_llama,
        "F32",
        "gguf-q4_0",
        keep=("*.down_proj.*",),
        out_dtype="float16",
    )
    found = types(tmp_path / OUT)
    assert found["blk.0.ffn_down.weight"] == "F16"
    assert found["blk.0.ffn_up.weight"] == "Q4_0"
    assert found["output_norm.weight"] == "F32"


def test_an_interrupted_merge_is_gone_on_with_and_processes_write_the_same(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    monkeypatch.setattr("covmerge.plan.planning.build.BLOCK_ELEMENTS", 32 * 64)
    how = (tmp_path, llama, save_llama, "Q8_0", "same")
    merged(*how, "whole")
    with pytest.raises(KeyboardInterrupt):
        merged(*how, "resumed", progress=InterruptAfter(6))
    assert not (tmp_path / "resumed").exists()
    result = merged(*how, "resumed", resume=True)
    assert 0 < result.run["resumed_items"] < result.run["items"]
    merged(*how, "workers", workers=2)
    assert (
        contents(tmp_path / "whole")
        == contents(tmp_path / "resumed")
        == contents(tmp_path / "workers")
    )


def test_a_changed_byte_is_found(tmp_path):
    merged(tmp_path, llama, save_llama, "Q8_0", "same")
    with (tmp_path / OUT).open("r+b") as file:
        file.seek(-40, 2)
        file.write(b"\x01\x02")
    found = covmerge.verify(tmp_path / "out")
    assert not found.ok
    assert "model.gguf is not as it was written: 'output.weight'" in str(found.checks[0].detail)


def test_one_block_with_another_scale_is_found(tmp_path):
    """It is lost in what rounding larger blocks changes."""

    def uneven(seed):
        model = wide(seed)
        for name, weight in model.named_parameters():
            if name.endswith("up_proj.weight"):
                weight.data[0] /= 16
        return model

    out = merged(tmp_path, uneven, save_llama, "Q4_0", "same").path
    assert recompute(out).ok, recompute(out).detail
    (tensor,) = (t for t in read(out / "model.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    with (out / "model.gguf").open("r+b") as file:
        file.seek(tensor.data_offset)
        scale = np.frombuffer(file.read(2), np.float16)
        file.seek(tensor.data_offset)
        file.write((scale * 1.5).astype(np.float16).tobytes())
    manifest = json.loads((out / "covmerge.json").read_text())
    forged = hash_file(LocalFolder(out), "model.gguf").as_json()
    manifest["files"]["model.gguf"] = forged
    (out / "covmerge.json").write_text(json.dumps(manifest))
    assert not recompute(out).ok
    assert "the 1 x 32 weights from [0, 0] on" in recompute(out).detail


def test_types_that_gguf_does_not_make_are_named_with_what_to_do(tmp_path):
    said = r"9 tensors of types that the package gguf does not make \(Q4_K: 9.*Q4_K becomes Q5_0"
    with pytest.raises(RecipeError, match=said):
        merged(tmp_path, wide, save_llama, "Q4_K", "same")
    result = merged(tmp_path, wide, save_llama, "Q4_K", "gguf")
    assert any("9 tensors of Q4_K" in note and "written as Q5_0" in note for note in result.notes)


def test_every_type_that_is_read_is_written_or_has_a_higher_one():
    for kind in gguf.GGMLQuantizationType:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(random_blocks((1, block), kind), kind)
        except NotImplementedError:
            continue
        assert kind.name in WRITTEN or kind.name in HIGHER
        if kind.name in HIGHER:
            more, bytes_ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[HIGHER[kind.name]]]
            assert bytes_ / more > size / block


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"shard_size": 10**6}, RecipeError, "one GGUF file: leave out `shard_size`"),
        ({"keep": ("*.no_such.*",)}, RecipeError, "matches no tensor"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, how, error, said):
    with pytest.raises(error, match=said):
        merged(tmp_path, llama, save_llama, "Q8_0", "same", **how)
    assert not (tmp_path / "out").exists()


def test_rows_of_no_whole_blocks_are_refused(tmp_path):
    narrow = {"hidden_size": 48, "intermediate_size": 96}
    with pytest.raises(CheckpointError, match="packs rows of whole blocks of 32: keep such"):
        merged(tmp_path, lambda seed: llama(seed, **narrow), save_llama, "F16", "gguf-q8_0")


def test_a_base_that_is_no_gguf_file_is_refused(tmp_path):
    llama(0).save_pretrained(tmp_path / "base")
    llama(1).save_pretrained(tmp_path / "a")
    with pytest.raises(RecipeError, match="writes the base's GGUF file with other weights"):
        covmerge.merge(
            tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out", quantise="gguf"
        )


def test_what_was_added_to_a_norm_is_added_again():
    """As llama.cpp's converter does for Gemma."""
    header = TensorHeader("norm.weight", (8,), torch.float32)
    packing = of_gguf(GgufTensor(header, ("norm",), "F32", more=1.0), "F32", (8,))
    assert packing is not None
    weights = torch.randn(8)
    (stored,) = packing.quantise(weights)
    assert torch.equal(stored, weights + 1)
    ((_, back),) = packing.unpacked([stored], range(8))
    assert torch.equal(back, (weights + 1) - 1)
