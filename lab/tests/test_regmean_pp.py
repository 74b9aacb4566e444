"""The sequential protocol against its definition: whole passes, merged block by block."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import covmerge
from covmerge import Generated, collect
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Reading, StatisticsFile
from covmerge.plan.statistics.model import load_model
from covmerge_lab.regmean_pp import collect_regmean_pp
from tests.e2e.models import BUILDERS, TEXT, build, fine_tuned
from tests.statistics.models import (
    classifier,
    encode,
    save,
    save_family,
    texts,
    write_texts,
)

LINEAR = (nn.Linear, transformers.pytorch_utils.Conv1D)


def definition(base, experts, blocks, batches):
    """Gram matrices in float64 by expert and module path; `experts` become the merged model."""
    depth = len(base.get_submodule(blocks))
    found = {name: {} for name in experts}
    outside = [p for p, _ in base.named_parameters() if not p.startswith(f"{blocks}.")]
    stages = [*([f"{blocks}.{n}."] for n in range(depth)), []]
    merge(base, experts, [p for p in outside if not is_linear(base, p)], found)
    for starts in stages:
        inside = [p for p, _ in base.named_parameters() if any(p.startswith(s) for s in starts)]
        here = inside or [p for p in outside if is_linear(base, p)]
        for name, expert in experts.items():
            modules = {p.rpartition(".")[0] for p in here if is_linear(base, p)}
            found[name] |= grams(expert, modules - found[name].keys(), batches[name])
        if inside:
            merge(base, experts, inside, found)
    return found


def is_linear(model, path):
    module, _, leaf = path.rpartition(".")
    return leaf == "weight" and isinstance(model.get_submodule(module), LINEAR)


def grams(model, modules, batches):
    seen = {}

    def watch(path):
        def see(module, args):
            z = args[0].reshape(-1, args[0].shape[-1])
            if mask is not None and len(z) == mask.numel():
                z = z[mask.reshape(-1).bool()]
            total, rows = seen.get(path, (0, 0))
            seen[path] = (total + z.double().T @ z.double(), rows + len(z))

        return see

    hooks = [model.get_submodule(p).register_forward_pre_hook(watch(p)) for p in modules]
    for batch in batches:
        mask = batch.get("attention_mask")
        with torch.no_grad():
            model(**batch)
    for hook in hooks:
        hook.remove()
    return {path: total / rows for path, (total, rows) in seen.items()}


def merge(base, experts, paths, found):
    for path in paths:
        origin = base.get_parameter(path).data.double()
        updates = [e.get_parameter(path).data.double() - origin for e in experts.values()]
        update = sum(updates) / len(updates)
        if is_linear(base, path):
            module = path.rpartition(".")[0]
            stored = isinstance(base.get_submodule(module), nn.Linear)
            shrunk = [
                0.95 * gram[module] + 0.05 * torch.diag(gram[module].diagonal())
                for gram in found.values()
            ]
            turned = [u if stored else u.T for u in updates]
            numerator = sum(u @ g for u, g in zip(turned, shrunk, strict=True))
            update = torch.linalg.solve(sum(shrunk), numerator, left=False)
            update = update if stored else update.T
        for expert in experts.values():
            expert.get_parameter(path).data.copy_(origin + update)


def check(out, experts, found, prefix=""):
    for name in experts:
        file = StatisticsFile.open(out / f"{name}.covstats.safetensors")
        assert file.about.protocol == "regmean++"
        assert set(file.names("gram")) == {f"{prefix}{path}.weight" for path in found[name]}
        for path, gram in found[name].items():
            value = file.read("gram", f"{prefix}{path}.weight").double()
            assert float((value - gram).norm() / gram.norm()) < 1e-4, (name, path)


BLOCKS = {"bert": "encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}


@pytest.mark.parametrize("name", BLOCKS)
def test_against_the_definition(tmp_path, name):
    base = build(name)
    folder, paths = save_family(base, tmp_path)
    data = {e: write_texts(tmp_path / f"{e}.txt", 24, seed=n) for n, e in enumerate(paths)}
    out = tmp_path / "out"
    done = collect_regmean_pp(folder, paths, data, out, batch_size=10)
    experts = {e: fine_tuned(base, seed=n, scale=0.05 * n) for n, e in enumerate(paths, start=1)}
    batches = {
        e: [encode(folder, texts(24, seed=n)[s : s + 10]) for s in (0, 10, 20)]
        for n, e in enumerate(paths)
    }
    found = definition(copy.deepcopy(base), experts, BLOCKS[name], batches)
    check(
        out, experts, {e: {p: g for p, g in f.items() if p != "lm_head"} for e, f in found.items()}
    )
    assert [file.examples for file in done.values()] == [24, 24]
    # RegMean on these files is RegMean++: `definition` made each expert the merged model.
    covmerge.merge(
        folder, paths, "regmean", tmp_path / "merged", off_diagonal=0.95,
        statistics={e: file.path for e, file in done.items()}, tensors={"few_rows": "allow"},
    )  # fmt: skip
    last = next(p for p in found["e1"] if f"{BLOCKS[name]}.1." in p) + ".weight"
    actual = load_file(tmp_path / "merged" / "model.safetensors")[last].double()
    expected = experts["e1"].get_parameter(last).data.double()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    # Behind the first block the inputs are others than each expert's own.
    collect(paths["e1"], data["e1"], tmp_path / "own.covstats.safetensors", batch_size=10)
    own = StatisticsFile.open(tmp_path / "own.covstats.safetensors")
    merged = StatisticsFile.open(out / "e1.covstats.safetensors")
    last = next(n for n in own.names("gram") if f"{BLOCKS[name]}.1." in n)
    difference = own.read("gram", last) - merged.read("gram", last)
    assert float(difference.norm() / own.read("gram", last).norm()) > 1e-2


def test_inputs_that_each_expert_writes(tmp_path):
    folder, paths = save_family(build("llama"), tmp_path)
    how = Generated(tokens=5, seed=3)
    collect_regmean_pp(folder, paths, how, tmp_path / "out", max_examples=6, batch_size=4)
    # Each wrote before anything was merged: the same as if its texts had been given.
    texts = {}
    for name, path in paths.items():
        model = load_model(open_checkpoint(path), "cpu", head=False, writing=True)
        reading = Reading(max_examples=6, batch_size=4)
        texts[name] = list(model.batches(how, reading)[0])
    assert not torch.equal(texts["e1"][0]["input_ids"], texts["e2"][0]["input_ids"])
    collect_regmean_pp(folder, paths, texts, tmp_path / "given")
    for name in paths:
        own, given = (
            StatisticsFile.open(tmp_path / of / f"{name}.covstats.safetensors")
            for of in ("out", "given")
        )
        assert own.about.protocol == "regmean++"
        assert own.about.content == given.about.content
        assert own.about.generated["start"] == "bos"
        assert given.about.generated is None


def test_inputs_that_all_experts_are_shown(tmp_path):
    folder, paths = save_family(build("bert"), tmp_path)
    done = collect_regmean_pp(folder, paths, Generated(), tmp_path / "out", max_examples=9)
    for file in done.values():
        assert "what enters a block is the same for all" in " ".join(file.notes)
    first, second = (StatisticsFile.open(file.path) for file in done.values())
    same = {
        name.split(".", 3)[3]: torch.equal(first.read("gram", name), second.read("gram", name))
        for name in first.names("gram")
        if ".layer.1." in name
    }
    assert same["attention.self.query.weight"]
    assert not same["output.dense.weight"]


def test_images(tmp_path):
    base = build("vit")
    folder, paths = save_family(base, tmp_path)
    pixels = {
        e: torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(n))
        for n, e in enumerate(paths)
    }
    batches = {e: [{"pixel_values": p[:4]}, {"pixel_values": p[4:]}] for e, p in pixels.items()}
    collect_regmean_pp(folder, paths, batches, tmp_path / "out")
    experts = {e: fine_tuned(base, seed=n, scale=0.05 * n) for n, e in enumerate(paths, start=1)}
    found = definition(copy.deepcopy(base), experts, "layers", batches)
    file = StatisticsFile.open(tmp_path / "out" / "e2.covstats.safetensors")
    gram = found["e2"]["layers.0.mlp.fc2"]
    value = file.read("gram", "encoder.layer.0.output.dense.weight").double()
    torch.testing.assert_close(value, gram, rtol=1e-4, atol=1e-4)


def test_experts_with_heads_over_a_base_without(tmp_path):
    save(build("bert"), tmp_path / "base")
    heads = classifier()
    paths = {e: save(fine_tuned(heads, n), tmp_path / e) for n, e in enumerate("ab")}
    data = {e: write_texts(tmp_path / f"{e}.txt") for e in paths}
    collect_regmean_pp(tmp_path / "base", paths, data, tmp_path / "out")
    file = StatisticsFile.open(tmp_path / "out" / "a.covstats.safetensors")
    names = file.names("gram")
    assert "bert.pooler.dense.weight" in names
    assert "classifier.weight" not in names
    # The first block sees the averaged embeddings.
    first = "bert.encoder.layer.0.attention.self.query.weight"
    collect(paths["a"], data["a"], tmp_path / "own.covstats.safetensors")
    own = StatisticsFile.open(tmp_path / "own.covstats.safetensors")
    assert not torch.equal(own.read("gram", first), file.read("gram", first))


def test_one_expert_sees_its_own_inputs(tmp_path):
    folder, paths = save_family(build("llama"), tmp_path, experts=1)
    data = write_texts(tmp_path / "a.txt", 30)
    collect_regmean_pp(folder, paths, {"e1": data}, tmp_path / "out")
    collect(paths["e1"], data, tmp_path / "own.covstats.safetensors")
    own = StatisticsFile.open(tmp_path / "own.covstats.safetensors")
    file = StatisticsFile.open(tmp_path / "out" / "e1.covstats.safetensors")
    assert file.about.aliases == own.about.aliases
    for name in own.names("gram"):
        difference = own.read("gram", name) - file.read("gram", name)
        assert float(difference.norm() / own.read("gram", name).norm()) < 1e-3


def test_progress_hears_of_all_passes(tmp_path):
    folder, paths = save_family(build("bert"), tmp_path)
    data = {e: write_texts(tmp_path / f"{e}.txt", 5) for e in paths}
    heard = []

    class Told:
        def start(self, total):
            heard.append(total)

        def advance(self, count):
            heard.append(-count)

        def finish(self):
            heard.append(0)

    collect_regmean_pp(folder, paths, data, tmp_path / "out", progress=Told())
    assert heard[0] == 60  # two experts, five examples, two passes a block and two more
    assert sum(heard) == 0
    assert heard[-1] == 0


def other_depth(folder):
    config = transformers.BertConfig(
        **TEXT, num_hidden_layers=3, intermediate_size=24, max_position_embeddings=32
    )
    return save(transformers.BertModel(config), folder)


def other_width(folder):
    config = transformers.BertConfig(
        **TEXT, num_hidden_layers=2, intermediate_size=20, max_position_embeddings=32
    )
    return save(transformers.BertModel(config), folder)


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (other_depth, "not a fine-tune of this base"),
        (other_width, r"is \[20\] and \[24\] in .*not a fine-tune|is \[24\] and \[20\] in"),
        (lambda folder: save("mixtral", folder), "in other pieces than the model runs|not a fine"),
    ],
)
def test_experts_that_do_not_fit(tmp_path, expert, message):
    base = save("bert", tmp_path / "base")
    data = write_texts(tmp_path / "a.txt")
    experts = {"a": expert(tmp_path / "a")}
    with pytest.raises(InputError, match=message):
        collect_regmean_pp(base, experts, {"a": data}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_without_blocks_in_a_row(tmp_path):
    config = transformers.AlbertConfig(
        **TEXT, embedding_size=16, num_hidden_layers=3, intermediate_size=24
    )
    model = save(transformers.AlbertModel(config), tmp_path / "a")
    data = write_texts(tmp_path / "a.txt")
    with pytest.raises(InputError, match="runs 3 layers over 1 blocks"):
        collect_regmean_pp(model, {"a": model}, {"a": data}, tmp_path / "out")
    # Its layers, called three times, can be collected as they are.
    done = collect(model, data, tmp_path / "a.covstats.safetensors")
    assert done.stored["gram"] < done.tensors["gram"]


def test_two_towers_are_said(tmp_path):
    folder, paths = save_family(BUILDERS["clip"](), tmp_path, experts=1)
    ids = torch.arange(12).reshape(2, 6)
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    batches = {"e1": [{"input_ids": ids, "pixel_values": pixels}]}
    done = collect_regmean_pp(folder, paths, batches, tmp_path / "out")
    assert any("taken as one stage" in note for note in done["e1"].notes)


def test_an_expert_without_examples(tmp_path):
    with pytest.raises(InputError, match="'a' is not both an expert and a name of examples"):
        collect_regmean_pp("m", {"a": "m"}, {}, tmp_path)
