"""Quantised output: what is written, loaded, found again, gone on with, and refused."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, InputError, RecipeError
from covmerge.files.quantised.view import open_plain
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.run.recompute import recompute
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.folders import contents
from tests.forked import fork_workers
from tests.interrupted import InterruptAfter
from tests.quantised.models import (
    BY_TRANSFORMERS,
    FORMATS,
    GOLDENS,
    GPTQ,
    bitsandbytes_4,
    build,
    gptq,
    llama,
    moved,
    mxfp4,
    save_packed,
)
from tests.quantised.test_goldens import save as save_golden
from tests.verification.test_recompute import forge

NAMES = ("base", "a", "b")
# Of these the same bytes come back, but for the sign of zeros (MXFP4) and a zero point that is made
# anew (AWQ).
AGAIN = [form for form in FORMATS if form != "awq"]


def weights(folder):
    return load_file(folder / "model.safetensors")


def read(folder):
    model = open_plain(folder)
    return {name: model.read(name) for name in model.headers}


def settings(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def merged(folder, out, *, base="base", experts=("a", "b"), method="ties", **how):
    sources = {name: folder / name for name in experts}
    return covmerge.merge(folder / base, sources, method, folder / out, **how)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Makes models of a format, once."""
    made = {}

    def of(form):
        if form not in made:
            folder = tmp_path_factory.mktemp(form.replace(" ", "-"))
            pack, stated = FORMATS[form]

            def weights_alone(name, weight):
                return {k: v for k, v in pack(name, weight).items() if "input_scale" not in k}

            for seed, name in enumerate(NAMES):
                save_packed(build(form, seed), folder / name, weights_alone, stated)
            made[form] = folder
        return made[form]

    return of


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    for seed, name in enumerate(NAMES):
        model = llama(seed, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
        model.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("form", AGAIN)
def test_an_expert_alone_comes_out_as_it_is(packed, form):
    folder = packed(form)
    merged(folder, "alone", experts=("a",), method="average", quantise="same", overwrite=True)
    ours, theirs = weights(folder / "alone"), weights(folder / "a")
    assert ours.keys() == theirs.keys()
    if form == "mxfp4":
        ours, theirs = read(folder / "alone"), read(folder / "a")
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name].float(), theirs[name].float()), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ties", "actmat"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_same_layout_as_the_base(packed, form, method):
    """Off its unquantised twin by no more than the recorded loss, by whole matrices and by rows."""
    folder = packed(form)
    result = merged(folder, method, method=method, quantise="same")
    merged(folder, f"{method}-twin", method=method, out_dtype="float32")
    assert settings(folder / method) == FORMATS[form][1]
    stored, base = weights(folder / method), weights(folder / "base")
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {
        n: (t.dtype, t.shape) for n, t in base.items()
    }
    ours, exact = read(folder / method), read(folder / f"{method}-twin")
    entries = result.stats["tensors"]
    for name, tensor in ours.items():
        lost = (tensor.float() - exact[name].float()).norm()
        told = entries[name]["rounding_loss"] * entries[name]["merged_norm"]
        assert lost == pytest.approx(told, rel=0.01, abs=1e-6)
    assert covmerge.verify(folder / method).ok
    assert recompute(folder / method, tensors=4).ok


def test_what_nobody_changed_is_the_bytes_of_the_base(packed):
    """By a rule, and because no expert changed it; the fixture's AWQ is nothing that we would write."""
    folder = packed("awq")
    stored = weights(folder / "a")
    same = [name for name in stored if ".up_proj." in name]
    stored |= {name: weights(folder / "base")[name] for name in same}
    (folder / "c").mkdir()
    save_file(stored, folder / "c" / "model.safetensors", metadata={"format": "pt"})
    (folder / "c" / "config.json").write_text((folder / "a" / "config.json").read_text())
    rule = {"match": "*.down_proj.*", "use": "base"}
    merged(folder, "kept", experts=("c",), method="task_arithmetic", quantise="same", rules=[rule])
    ours, base = weights(folder / "kept"), weights(folder / "base")
    for name, tensor in ours.items():
        if ".up_proj." in name or ".down_proj." in name:
            assert torch.equal(tensor, base[name]), name
        elif name.endswith("qweight"):
            assert not torch.equal(tensor, base[name]), name


@pytest.mark.parametrize("form", ["fp8-block", "nf4", "fp8-tensor", "gptq"])
def test_of_plain_models(plain, form):
    """Copies are rounded too; heads, embeddings and what is kept are as in the plain twin."""
    rule = [{"match": "*.o_proj.*", "use": "base"}]
    result = merged(plain, form, quantise=form, keep=["*.1.mlp.*"], rules=rule, overwrite=True)
    merged(plain, "twin", rules=rule, overwrite=True)
    ours, twin = read(plain / form), read(plain / "twin")
    entries = result.stats["tensors"]
    for name, tensor in ours.items():
        if "quantised" in entries[name]:
            assert entries[name]["quantised"]["format"] == form
            error = (tensor.float() - twin[name].float()).norm() / twin[name].float().norm()
            assert error == pytest.approx(entries[name]["quantised"]["error"], rel=0.02)
        else:
            assert torch.equal(tensor, twin[name])
    assert [n for n in ours if "quantised" in entries[n]] == [
        n for n in ours if "_proj" in n and ".1.mlp." not in n
    ]
    told = str(settings(plain / form)).replace("\\", "")
    assert "lm_head" in told
    assert "model.layers.1.mlp.up_proj" in told
    check = covmerge.verify(plain / form)
    assert check.ok
    assert "2 are rounded copies" in str(check.checks)


@pytest.mark.parametrize("form", ["fp8-block", "nf4"])
def test_layers_that_nobody_changed_are_computed_again_as_they_are_stored(plain, form):
    """Rounded, because the base is plain. NaN in place of scales is nothing that the sources give."""
    shutil.copytree(plain / "a", plain / "still", dirs_exist_ok=True)
    same = {k: v for k, v in weights(plain / "base").items() if "down_proj" in k}
    save_file({**weights(plain / "a"), **same}, plain / "still" / "model.safetensors")
    out = merged(plain, "of-still", experts=("still",), quantise=form, overwrite=True).path
    assert recompute(out, tensors=99).ok
    (scales, *_) = (n for n in weights(out) if re.search("down_proj.*(absmax|scale)", n))
    forge(out, scales, lambda tensor: tensor * torch.nan)
    assert "down_proj.weight' is off by nan" in recompute(out, tensors=99).detail


@pytest.mark.parametrize("form", ["gptq", "awq", "int4-group", "nf4"])
def test_one_block_of_many_with_another_zero_point_or_scale(tmp_path, form):
    """It is lost in what rounding all of a matrix changes."""
    draw, name = torch.Generator().manual_seed(0), "model.layers.0.mlp.up_proj"
    base = 0.02 * torch.randn(128, 512, generator=draw)
    for seed, model in enumerate(NAMES):
        (tmp_path / model).mkdir()
        update = 0.02 * torch.randn(128, 512, generator=draw) if seed else 0
        save_file({f"{name}.weight": base + update}, tmp_path / model / "model.safetensors")
        (tmp_path / model / "config.json").write_text('{"model_type": "llama"}')
    out = merged(tmp_path, "out", method="task_arithmetic", quantise=form).path
    assert recompute(out).ok
    (part,) = (n for n in weights(out) if re.search("qzeros|absmax|weight_scale", n))

    def edit(tensor):
        changed = tensor.clone()
        if changed.dtype is torch.int32:
            changed[1, 3] ^= 1
        else:
            changed.view(-1)[7] *= 1.25
        return changed

    forge(out, part, edit)
    assert re.search(r"the 1 x \d+ weights from \[\d+, \d+\] on by 0", recompute(out).detail)


def test_loss_by_layer_and_a_warning_where_rounding_is_more_than_the_update(plain):
    for name in ("a", "b"):
        model = llama(0, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
        with torch.no_grad():
            for parameter in model.model.layers[1].parameters():
                parameter.mul_(1.01)
        model.save_pretrained(plain / f"near-{name}")
    result = merged(plain, "near", experts=("near-a", "near-b"), method="average", quantise="nf4")
    found = result.stats["totals"]["quantised"]
    first, second = found["layers"]
    assert (first["layer"], first["tensors"]) == ("model.layers.0", 7)
    assert "lost" not in first or first["kept"] == 0.0 or first["lost"] > 1.0
    assert second["lost"] > 1.0
    said = advice("keep these layers plain (--keep PATTERN), or write a higher format")
    assert any(re.search(f"in model.layers.1: .*{said}", w) for w in result.warnings)
    for name, how in {
        "keep": {"quantise": "nf4", "keep": ["model.layers.1.*"]},
        "high": {},
    }.items():
        again = merged(plain, name, experts=("near-a", "near-b"), method="average", **how)
        assert not any(re.search(said, warning) for warning in again.warnings)
    stored = json.loads((plain / "near" / "covmerge.json").read_text())
    assert stored["totals"]["quantised"] == found
    assert "of the merged update" in (plain / "near" / "README.md").read_text()


def test_an_update_that_is_rounded_away_is_no_success(packed):
    """A base on the steps of its format, and updates far below them."""
    folder = packed("bitsandbytes")
    close = {
        name: tensor * (1 + 2**-8) if "up_proj" in name else tensor
        for name, tensor in read(folder / "base").items()
    }
    (folder / "close").mkdir()
    save_file(close, folder / "close" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "base" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "close" / "config.json").write_text(json.dumps(config))
    given = {"experts": ("close",), "method": "task_arithmetic", "scale": 1e-4}
    said = advice(
        "leaves nothing of the update: write a higher format, or keep layers plain (--keep)"
    )
    with pytest.raises(CheckFailed, match=said):
        merged(folder, "gone", **given, quantise="same")
    assert not (folder / "gone").exists()
    merged(folder, "higher", **given, out_dtype="float32")
    merged(folder, "kept", **given, out_dtype="float32", quantise="same", keep=["*up_proj*"])


@pytest.mark.parametrize("form", ["fp8-block", "mxfp4"])
def test_transformers_loads_what_it_reads(tmp_path, form):
    """It dequantises on a CPU. Experts that are stored one by one are one module there."""
    if form == "mxfp4":
        models = [build(form, seed) for seed in range(2)]
    else:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            num_hidden_layers=2,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
        )
        first = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        first.save_pretrained(tmp_path / "base")
        models = [first, moved(first, 1)]
    for name, model in zip(("base", "a"), models, strict=True):
        if form == "mxfp4" or name == "a":
            model.save_pretrained(tmp_path / name)
    keep = () if form == "mxfp4" else ("*.1.mlp.experts.*", "*.0.self_attn.q_proj.*")
    merged(tmp_path, "out", experts=("a",), method="task_arithmetic", quantise=form, keep=keep)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    expected, experts = model.state_dict(), {}
    for name, tensor in read(tmp_path / "out").items():
        if name in expected:
            assert torch.equal(tensor, expected[name]), name
        else:
            experts[name] = tensor
    for layer in range(2 if experts else 0):
        start = f"model.layers.{layer}.mlp.experts"
        down = [experts[f"{start}.{number}.down_proj.weight"] for number in range(2)]
        assert torch.equal(torch.stack(down), expected[f"{start}.down_proj"])


@pytest.mark.parametrize("form", ["fp8-block", "nf4"])
def test_an_interrupted_merge_is_gone_on_with_and_processes_write_the_same(
    plain, tmp_path, form, monkeypatch
):
    fork_workers(monkeypatch)
    monkeypatch.setattr(
        "covmerge.plan.planning.build.BLOCK_ELEMENTS", 128 * 128
    )  # several items a tensor
    how = {"quantise": form, "method": "average"}
    merged(plain, tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        merged(plain, tmp_path / "resumed", **how, progress=InterruptAfter(20))
    with pytest.raises(InputError, match=r"output\.quantise was .* and is now"):
        merged(plain, tmp_path / "resumed", method="average", quantise="int8", resume=True)
    result = merged(plain, tmp_path / "resumed", **how, resume=True)
    assert 0 < result.run["resumed_items"] < result.run["items"]
    merged(plain, tmp_path / "workers", **how, workers=2)
    assert (
        contents(tmp_path / "whole")
        == contents(tmp_path / "resumed")
        == contents(tmp_path / "workers")
    )


def test_a_group_that_does_not_divide_is_named_with_what_to_do(tmp_path):
    for seed, name in enumerate(NAMES):
        llama(seed).save_pretrained(tmp_path / name)
    with pytest.raises(InputError, match=r"'model.layers.0.*' is \[.*\], and gptq packs .*keep"):
        merged(tmp_path, "out", quantise="gptq")
    pack = dict(GPTQ)
    save_packed(llama(0), tmp_path / "packed", gptq, pack)
    merged(tmp_path, "out", base="packed", quantise="same", keep=["*.up_proj.*"])
    assert list(settings(tmp_path / "out")["dynamic"]) == [
        r"-:^lm_head$",
        r"-:^model\.layers\.0\.mlp\.up_proj$",
    ]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"quantise": "same"}, "is not quantised: name one"),
        ({"quantise": "mxfp4"}, "GPT-OSS alone"),
        ({"quantise": "nf4", "keep": ["*"]}, "leaves no tensor"),
        ({"quantise": "q4_k"}, "must be"),
        (
            {"quantise": "nf4", "keep": ["nix*"]},
            r"'nix\*', which matches no tensor: they are called",
        ),
        ({"quantise": "nf4", "keep": ["*.dwn_proj.*"]}, r"did you mean '\*\.down_proj\.\*'"),
        ({"keep": ["*"]}, "the output is plain"),
        ({"quantise": "nf4", "dtype": "float64"}, "float64 is none"),
        ({"quantise": "nf4", "format": "adapter", "rank": 2}, "adapters are stored plain"),
    ],
)
def test_what_cannot_be_quantised_is_refused(plain, output, said):
    data = {"base": str(plain / "base"), "experts": {"a": str(plain / "a")}, "output": output}
    with pytest.raises(RecipeError, match=said):
        run_recipe(parse_recipe({**data, "method": "average"}, origin="test"), plain / "never")
    assert not (plain / "never").exists()


def test_scales_of_activations_are_no_merged_models(tmp_path):
    pack, stated = FORMATS["compressed-tensors"]
    for seed, name in enumerate(NAMES):
        save_packed(llama(seed), tmp_path / name, pack, stated)
    with pytest.raises(RecipeError, match=r"scales of activations.*input_scale"):
        merged(tmp_path, "out", quantise="same")
    merged(tmp_path, "out", quantise="fp8-channel")
    assert not [name for name in weights(tmp_path / "out") if "input_scale" in name]


def test_in_memory_there_is_no_config_to_say_it(plain):
    with pytest.raises(InputError, match="give an output folder"):
        covmerge.merge(plain / "base", {"a": plain / "a"}, "average", quantise="nf4")


@pytest.mark.parametrize("case", ["nf4 nested 24", "fp4 25"])
def test_bitsandbytes_own_files(tmp_path, case):
    """Nested scales have an offset in JSON of some length; of an unchanged layer the base's is taken."""
    base = save_golden(tmp_path_named(tmp_path, "base"), f"bitsandbytes {case}")
    config = json.loads((base / "config.json").read_text())
    stored = read(base)
    for name, factor in (("same", 1.0), ("moved", 1.5)):
        own = {"fc.weight": stored["fc.weight"] * factor, "norm.weight": torch.full((3,), 1.5)}
        save_file(own, tmp_path_named(tmp_path, name) / "model.safetensors")
        dtype = {"dtype": config["dtype"]}
        (tmp_path / name / "config.json").write_text(json.dumps(dtype))
        merged(
            tmp_path,
            f"out-{name}",
            experts=(name,),
            method="task_arithmetic",
            quantise="same",
            scale=1.0,
        )
        assert covmerge.verify(tmp_path / f"out-{name}").ok
    how = {"method": "task_arithmetic", "quantise": "same", "out_dtype": "float16"}
    merged(tmp_path, "half", experts=("same",), **how)  # the dtype is in the JSON too
    assert read(tmp_path / "half")["fc.weight"].dtype == torch.float16
    before, after = weights(base), weights(tmp_path / "out-same")
    assert before.keys() == after.keys()
    for key in before.keys() - {"norm.weight"}:
        texts = [bytes(own[key].view(-1).view(torch.uint8)).rstrip() for own in (before, after)]
        assert texts[0] == texts[1]
    moved_by = read(tmp_path / "out-moved")["fc.weight"].float() / stored["fc.weight"].float()
    assert moved_by.nanmedian() == pytest.approx(1.5, rel=0.02)


def tmp_path_named(folder, name):
    (folder / name).mkdir()
    return folder / name


@pytest.mark.usefixtures("no_pictures")
def test_the_command_line_shows_the_loss_by_layer(plain, tmp_path):
    flags = ["--quantise", "nf4", "--keep", "*.0.mlp.*", "--keep", "*norm*"]
    experts = [f"--expert={name}={plain / name}" for name in ("a", "b")]
    given = ["--base", plain / "base", *experts, "--method", "average"]
    assert "NF4 in blocks of 64" in words(command("merge", *given, *flags, "--dry-run").stdout)
    ran = command("merge", *given, *flags, tmp_path / "out", "--report")
    shown = [line.split() for line in ran.stdout.splitlines()]
    first, second = (line for line in shown if line and line[0].startswith("model.layers."))
    assert (first[:2], second[:2]) == (["model.layers.0", "4"], ["model.layers.1", "7"])
    assert all(cell.endswith("%") for cell in second[2:])
    assert "'*norm*', which is plain in nf4 anyway" in words(ran.stdout)
    assert "left of the update, %" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("form", ["fp8-block", "nf4"])
def test_a_head_that_is_tied_is_named_as_plain(tmp_path, form):
    for seed, name in enumerate(("base", "a")):
        model = llama(seed, hidden_size=128)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(tmp_path / name)
    merged(tmp_path, tmp_path / "out", experts=("a",), method="average", quantise=form)
    assert "lm_head.weight" not in weights(tmp_path / "out")
    key = "modules_to_not_convert" if form == "fp8-block" else "llm_int8_skip_modules"
    assert "lm_head" in settings(tmp_path / "out")[key]


def save_t5(folder, kind, layers=1, **changes):
    """A base and an expert."""
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": 64, "d_model": 128, "d_kv": 64, "d_ff": 256, "num_heads": 2},
        **{"num_layers": layers, **changes},
    )
    torch.manual_seed(0)
    first = getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16)
    first.save_pretrained(folder / "base")
    moved(first, 1).save_pretrained(folder / "a")
    return type(first)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["T5", "UMT5"])
@pytest.mark.parametrize(
    "form", ["fp8-block", "nf4", "int8", "fp8-channel", "int8-channel", "gptq", "awq"]
)
def test_what_transformers_keeps_in_float32_is_not_packed(tmp_path, form, kind):
    """T5's `wo`, which its quantisers leave out whatever a config says: packed it would be no weight."""
    model_class = save_t5(tmp_path, kind)
    result = merged(tmp_path, "out", experts=("a",), method="task_arithmetic", quantise=form)
    assert any("2 layers stay plain, which transformers keeps in" in note for note in result.notes)
    stored = weights(tmp_path / "out")
    wo = [name for name in stored if ".wo." in name]
    assert sorted(wo) == [
        "decoder.block.0.layer.2.DenseReluDense.wo.weight",
        "encoder.block.0.layer.1.DenseReluDense.wo.weight",
    ]
    assert all(stored[name].dtype is torch.bfloat16 for name in wo)
    assert sum("DenseReluDense.wi" in name for name in stored) > 2  # with their scales
    said = json.dumps(settings(tmp_path / "out")).replace("\\\\.", ".")
    assert all(name.removesuffix(".weight") in said for name in wo)
    assert ("dynamic" in settings(tmp_path / "out")) == (form in ("gptq", "awq"))
    if form != "fp8-block":
        return
    model, loaded = model_class.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    expected = model.state_dict()
    for name, tensor in read(tmp_path / "out").items():
        assert torch.equal(expected[name].float(), tensor.float()), name


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # it says what is wanted
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["T5", "UMT5"])
@pytest.mark.parametrize("form", ["fp8-channel", "fp8-tensor", "int8-channel", "int4-group"])
def test_t5_by_compressed_tensors(tmp_path, form, kind):
    """Loaded by transformers with that package: unpacked, weights are the reader's; packed, it runs."""
    pytest.importorskip("compressed_tensors")
    model_class = save_t5(tmp_path, kind, layers=2, feed_forward_proj="gated-gelu")
    merged(tmp_path, "out", experts=("a",), method="task_arithmetic", quantise=form)
    ids = torch.arange(1, 9)[None]
    answers = []
    for plain in (True, False):
        how = transformers.CompressedTensorsConfig(dequantize=plain)
        if form == "int4-group" and not plain:  # what T5 initialises has no `weight` then
            with pytest.raises(AttributeError, match="has no attribute 'weight'"):
                model_class.from_pretrained(tmp_path / "out", quantization_config=how)
            return
        model, loaded = model_class.from_pretrained(
            tmp_path / "out", quantization_config=how, output_loading_info=True
        )
        assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
        if plain:
            held = model.state_dict()
            for name, tensor in read(tmp_path / "out").items():
                assert torch.equal(held[name].float(), tensor.float()), name
        with torch.no_grad():
            answers.append(model(input_ids=ids, decoder_input_ids=ids).logits.float())
    plain, packed = answers
    assert float((plain - packed).norm() / plain.norm()) < 0.1  # it rounds activations too


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["T5", "UMT5"])
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_t5_in_layouts_whose_clients_do_not_run_here(tmp_path, form, kind):
    """By sizes and by covmerge's own reader, which is held against both clients' numbers of a layer."""
    save_t5(tmp_path, kind, feed_forward_proj="gated-gelu")
    merged(tmp_path, "plain", experts=("a",), method="task_arithmetic")
    merged(tmp_path, "out", experts=("a",), method="task_arithmetic", quantise=form)
    wanted, found, stored = (
        weights(tmp_path / "plain"),
        read(tmp_path / "out"),
        weights(tmp_path / "out"),
    )
    packed = {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}
    linear = {
        name.removesuffix(".weight")
        for name in wanted
        if name.endswith((".q.weight", ".k.weight", ".v.weight", ".o.weight")) or ".wi_" in name
    }
    assert packed == linear
    for name, own in wanted.items():
        error = float((found[name].float() - own.float()).norm() / own.float().norm())
        assert (0 < error < 0.15) if name.removesuffix(".weight") in packed else error == 0, name


def test_a_head_that_is_no_output_embedding_stays_plain(tmp_path):
    """A layer of three rows, packed, is one that bitsandbytes does not run on every processor."""
    pytest.importorskip("bitsandbytes")
    sizes = {"vocab_size": 16, "hidden_size": 64, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, intermediate_size=64)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "base")
    expert = {name: 1.01 * tensor for name, tensor in model.state_dict().items()}
    experts = {"a": expert}
    made = covmerge.merge(tmp_path / "base", experts, out=tmp_path / "out", quantise="nf4")
    assert not [note for note in made.notes if "outside the backbone" in note]  # of one expert
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(loaded.classifier.weight, expert["classifier.weight"])
    assert loaded(torch.arange(5)[None]).logits.isfinite().all()


def nested(name, weight):
    """NF4 with scales in 8 bits."""
    plain = bitsandbytes_4(name, weight)
    values = GOLDENS["bitsandbytes nf4 nested 24/fc.weight.nested_quant_map"]
    scales = plain[f"{name}.absmax"].view(-1, 256)
    outer = scales.amax(1)
    codes = ((scales / outer[:, None]).unsqueeze(-1) - values).abs().argmin(-1)
    state = json.loads(bytes(plain[f"{name}.quant_state.bitsandbytes__nf4"]))
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0}
    return plain | {
        f"{name}.absmax": codes.flatten().to(torch.uint8),
        f"{name}.nested_absmax": outer,
        f"{name}.nested_quant_map": values.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        ),
    }


def experts_in_fp4(name, weight):
    """Four experts of (256, 256)."""
    return mxfp4(name.replace(".weight", ""), weight.view(4, -1, 256))


@pytest.mark.parametrize("form", ["mxfp8", "experts", "nested"])
def test_one_block_of_many_with_another_exponent_or_nested_scale(tmp_path, form):
    """It is lost in what rounding larger blocks changes."""
    draw, name = torch.Generator().manual_seed(0), "model.layers.0.mlp.up_proj.weight"
    base = 0.02 * torch.randn(512, 512, generator=draw)
    pack, stated = {
        "mxfp8": BY_TRANSFORMERS["mxfp8"],
        "experts": (experts_in_fp4, {"quant_method": "mxfp4"}),
        "nested": (nested, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    }[form]
    for seed, model in enumerate(NAMES):
        (tmp_path / model).mkdir()
        update = 0.02 * torch.randn(512, 512, generator=draw) if seed else 0
        whole = base + update
        whole[0] /= 16
        whole[:, ::256] /= 16
        save_file(pack(name, whole), tmp_path / model / "model.safetensors")
        config = {"model_type": "llama", "quantization_config": stated}
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    out = merged(tmp_path, "out", method="task_arithmetic", quantise="same").path
    assert recompute(out).ok, recompute(out).detail
    (part,) = (n for n in weights(out) if re.search("[.]absmax|scale", n))

    def edit(tensor):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[7] += 30 if form == "nested" else 1
        return changed

    forge(out, part, edit)
    assert re.search(r"weights from \[\d+, \d+\] on by 0", recompute(out).detail), recompute(
        out
    ).detail
