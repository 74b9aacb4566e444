"""Inputs that count by how strongly an expert reacts to them, against the equation typed naively."""

import json
from contextlib import closing

import pytest
import torch
import transformers

import covmerge
from covmerge import Generated, collect
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import load_model
from covmerge_lab.reactions import Reactions
from covmerge_lab.weighed import collect_weighed
from tests.e2e.models import TEXT, build, fine_tuned
from tests.statistics.models import classifier, save, save_family
from tests.tolerance import assert_same_gram

OUT = "a.covstats.safetensors"


def weigh(expert, how, out, base, others=(), **given):
    """Collect by reactions, and return what the file says of itself."""
    by = "others" if others else "itself"
    collect_weighed(expert, how, out, by, base=base, others=others, **given)
    with closing(StatisticsFile.open(out)) as file:
        return file.about


def tensors(folder):
    with closing(open_checkpoint(folder)) as checkpoint:
        return {name: checkpoint.read(name).double() for name in checkpoint.headers}


def by_hand(folder, base, others, names, how):
    """Σ w z zᵀ / Σ w or / rows, in float64, from inputs that hooks catch."""
    model = load_model(open_checkpoint(folder), "cpu", head=False)
    batches = list(model.batches(how, Reading(max_examples=9))[0])
    seen = {name: [] for name in names}
    for layer in model.layers():
        if layer.name in names:
            layer.module.register_forward_pre_hook(
                lambda _, args, name=layer.name: seen[name].append(
                    args[0].flatten(0, 1) if mask is None else args[0][mask.bool()]
                )
            )
    for batch in batches:
        mask = batch.get("attention_mask")
        with torch.no_grad():
            model.run(batch)
    start, own = tensors(base), tensors(folder)
    rest = [tensors(other) for other in others]
    grams = {}
    for name in names:
        z = torch.cat(seen[name]).double()
        shared = next(n for n in start if name.endswith(n))
        updates = [own[name] - start[shared], *(r[shared] - start[shared] for r in rest)]
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            updates = [update.T for update in updates]
        energies = torch.stack([(z @ update.T).square().sum(1) for update in updates])
        weights = energies[0] / energies.mean(0) if others else energies[0] / energies[0].mean()
        grams[name] = (z.T * weights) @ z / len(z)
    return grams


@pytest.fixture
def family(tmp_path):
    base, paths = save_family(build("bert"), tmp_path, experts=3)
    return base, list(paths.values())


@pytest.mark.parametrize("named", [False, True])
def test_encoder(named, family, tmp_path):
    base, (own, *others) = family
    others = others if named else []
    done = weigh(own, Generated(), tmp_path / OUT, base=base, others=others, max_examples=9)
    places = ("attention.self.query", "attention.self.key", "intermediate.dense", "output.dense")
    names = [f"encoder.layer.{n}.{place}.weight" for n in (0, 1) for place in places]
    file = StatisticsFile.open(tmp_path / OUT)
    for name, expected in by_hand(own, base, others, names, Generated()).items():
        found = file.read("gram", name).double()
        # Energies are sums of float32 products: some roundings of each, and of their quotient.
        assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert not any("all experts are shown" in note for note in done.notes)
    assert not done.aliases  # of one input, each layer weighs its own


@pytest.mark.parametrize("named", [False, True])
def test_other_heads_and_layers_that_are_stored_transposed(named, tmp_path):
    base, paths = save_family(build("gpt2"), tmp_path, experts=2)
    own, other = paths.values()
    others = [other] if named else []
    how = Generated(tokens=4)
    given = {"max_examples": 9, "batch_size": 8}  # texts depend on the size of a batch
    weigh(own, how, tmp_path / OUT, base=base, others=others, **given)
    names = [f"transformer.h.{n}.mlp.{p}.weight" for n in (0, 1) for p in ("c_fc", "c_proj")]
    file = StatisticsFile.open(tmp_path / OUT)
    for name, expected in by_hand(own, base, others, names, how).items():
        assert (file.read("gram", name).double() - expected).norm() <= 1e-4 * expected.norm()


def test_pictures(tmp_path):
    base = build("vit")
    base.save_pretrained(tmp_path / "base")
    paths = [tmp_path / "own", tmp_path / "other"]
    for seed, path in enumerate(paths, start=1):
        fine_tuned(base, seed=seed).save_pretrained(path)
    own, other = paths
    weigh(own, Generated(), tmp_path / OUT, base=tmp_path / "base", others=[other], max_examples=9)
    file = StatisticsFile.open(tmp_path / OUT)
    names = [name for name in file.names("gram") if "pooler" not in name]
    assert len(names) == 6
    for name, expected in by_hand(own, tmp_path / "base", [other], names, Generated()).items():
        assert (file.read("gram", name).double() - expected).norm() <= 1e-4 * expected.norm()


def test_without_weights_equal_inputs_give_the_mean(tmp_path):
    """What the weights are for: experts that differ in one layer alone see the same before it."""
    base = build("bert")
    name = "encoder.layer.0.attention.self.query.weight"
    paths = {}
    for seed in (1, 2):
        expert = build("bert")
        moved = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        expert.load_state_dict({**base.state_dict(), name: base.state_dict()[name] + moved})
        paths[f"e{seed}"] = save(expert, tmp_path / f"e{seed}")
    still = save(base, tmp_path / "base")
    mean = sum(tensors(path)[name] for path in paths.values()) / 2
    away = {}
    for weighed in (False, True):
        files = {expert: tmp_path / f"{expert}-{weighed}{OUT}" for expert in paths}
        for expert, path in paths.items():
            others = [other for other in paths.values() if other != path]
            if weighed:
                weigh(path, Generated(), files[expert], still, others, max_examples=90)
            else:
                collect(path, Generated(), files[expert], max_examples=90)
        covmerge.merge(still, paths, "regmean", tmp_path / f"out-{weighed}", statistics=files)
        away[weighed] = (tensors(tmp_path / f"out-{weighed}")[name] - mean).norm() / mean.norm()
    assert away[False] < 1e-5 < 1e-2 < away[True]


class Recording:
    """A checkpoint that notes what is read of it."""

    def __init__(self, path, reads):
        self._opened, self._reads = open_checkpoint(path), reads

    def __getattr__(self, name):
        return getattr(self._opened, name)

    def read(self, name, rows=None):
        self._reads.append((self._opened.source, name))
        return self._opened.read(name, rows)


def test_updates_are_read_when_a_layer_is_called(family):
    base, (own, other, _) = family
    reads = []
    model = load_model(open_checkpoint(own), "cpu", head=False)
    reactions = Reactions(model, Recording(base, reads), [Recording(other, reads)])
    assert reads == []
    layer = next(each for each in model.layers() if "layer.1" in each.name and each.d_in == 16)
    reactions.of(layer, torch.ones(2, 16))
    assert reads == [(str(base), layer.name), (str(other), layer.name)]


def test_the_base_may_have_another_head(tmp_path):
    expert = classifier()
    save(expert, tmp_path / "expert")
    base = build("bert", seed=5)
    base.load_state_dict(expert.bert.state_dict())
    save(fine_tuned(base, seed=1), tmp_path / "base")
    done = weigh(
        tmp_path / "expert", Generated(), tmp_path / OUT, base=tmp_path / "base", max_examples=6
    )
    assert not any("weigh alike" in note for note in done.notes)
    plain = collect(tmp_path / "expert", Generated(), tmp_path / f"b{OUT}", max_examples=6)
    assert done.content != StatisticsFile.open(plain.path).about.content


def test_shares_of_all_experts_add_up(family):
    """What is given to one is taken from the others: on equal inputs the sum is that of no weights."""
    base, paths = family
    opened = [open_checkpoint(path) for path in paths]
    models = [load_model(checkpoint, "cpu", head=False) for checkpoint in opened]
    inputs = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(7)
    for model in models:
        others = [each for each in opened if each is not model.checkpoint]
        reactions = Reactions(model, open_checkpoint(base), others)
        layer = next(each for each in model.layers() if each.d_in == 16)
        total += reactions.of(layer, inputs)
    torch.testing.assert_close(total, torch.full((7,), 3.0))


def test_where_nobody_reacts_all_inputs_count_alike(tmp_path):
    base = build("bert")
    still = save(base, tmp_path / "base")
    copies = [save(base, tmp_path / name) for name in ("own", "other")]
    moved = save(fine_tuned(base, seed=1), tmp_path / "moved")
    collect(copies[0], Generated(), tmp_path / OUT, max_examples=9)
    for number, others in enumerate(((), (copies[1],))):
        path = tmp_path / f"{number}{OUT}"
        weigh(copies[0], Generated(), path, base=still, others=others, max_examples=9)
        for name in StatisticsFile.open(path).names("gram"):
            one, other = (StatisticsFile.open(p).read("gram", name) for p in (path, tmp_path / OUT))
            torch.testing.assert_close(one, other)
    # Beside an expert that reacts, one that does not has nothing to say; the merge is the other's.
    files = {"own": tmp_path / f"c{OUT}", "moved": tmp_path / f"d{OUT}"}
    for (name, file), other in zip(files.items(), (moved, copies[0]), strict=True):
        weigh(tmp_path / name, Generated(), file, base=still, others=[other], max_examples=90)
    experts = {name: tmp_path / name for name in files}
    covmerge.merge(
        still, experts, "regmean", tmp_path / "out", statistics=files,
        tensors={"few_rows": "allow"}, allow=["unchanged-expert"],
    )  # fmt: skip
    name = "encoder.layer.0.attention.self.query.weight"
    assert not StatisticsFile.open(files["own"]).read("gram", name).any()
    torch.testing.assert_close(
        tensors(tmp_path / "out")[name], tensors(moved)[name], atol=1e-4, rtol=0
    )


def test_a_layer_that_others_lack_counts_alike_and_is_named(tmp_path):
    base = build("bert")
    own = save(fine_tuned(base, seed=1), tmp_path / "own")
    base.pooler = None
    save(base, tmp_path / "base")
    done = weigh(own, Generated(), tmp_path / OUT, base=tmp_path / "base", max_examples=6)
    (note,) = (note for note in done.notes if "weigh alike" in note)
    assert note.startswith("pooler.dense.weight: not in the base")


def test_base_and_others_are_recorded_up_to_the_merge(family, tmp_path):
    base, (own, *others) = family
    files = {}
    for number, path in enumerate((own, *others)):
        rest = [other for other in (own, *others) if other != path]
        files[path.name] = tmp_path / f"{path.name}.covstats.safetensors"
        weigh(
            path, Generated(seed=number), files[path.name], base=base, others=rest, max_examples=90
        )
    experts = {path.name: path for path in (own, *others)}
    covmerge.merge(base, experts, "regmean", tmp_path / "out", statistics=files)
    recorded = json.loads((tmp_path / "out" / "covmerge.json").read_text())["sources"]
    assert recorded["statistics e2"]["content"]["generated"] == {
        "kind": "tokens, p = 1 / (rank + 20)",
        "lengths": "3, 9, 18",
        "seed": 1,
        "weights": "|D_t z|^2 / mean_s |D_s z|^2",
        "base": str(base),
        "others": f"{own}, {others[1]}",
    }


def test_what_cannot_be_weighed_by(family, tmp_path):
    base, (own, other, _) = family
    wide = transformers.BertModel(
        transformers.BertConfig(
            **TEXT, num_hidden_layers=2, intermediate_size=32, max_position_embeddings=32
        )
    )
    save(wide, tmp_path / "wide")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes((own / "model.safetensors").read_bytes())
    for given, says in (
        ({"base": base, "others": [own]}, "named twice among the experts"),
        ({"base": base, "others": [other, f"{other}/"]}, "named twice among the experts"),
        ({"base": tmp_path / "wide"}, "no fine-tunes of one base"),
        ({"base": tmp_path / "bare"}, "has no config.json, by which its layers"),
        ({"base": tmp_path / "nowhere"}, "no such file or folder"),
    ):
        with pytest.raises(InputError, match=says):
            weigh(own, Generated(), tmp_path / OUT, max_examples=3, **given)
    with pytest.raises(InputError, match="reactions are measured from the base: name it"):
        collect_weighed(own, Generated(), tmp_path / OUT, "itself", max_examples=3)
    assert not (tmp_path / OUT).exists()


def test_weights_that_come_batch_by_batch(family):
    """Weights without a scale are brought to mean 1 over all batches together."""
    base, (own, *_) = family
    model = load_model(open_checkpoint(own), "cpu", head=False)
    layer = next(each for each in model.layers() if each.d_in == 16)
    rows = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for parts in ((12,), (5, 7)):
        grams = GramCollector([layer], Reactions(model, open_checkpoint(base)))
        for part in rows.split(list(parts)):
            with grams.watching({}), torch.no_grad():
                layer.module(part)
        found.append(grams.statistics()[0].mean)
    assert_same_gram(found[1], found[0], rows=len(rows))
