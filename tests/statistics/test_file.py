"""Statistics files: what they hold, whose they are, and files that are no such thing."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.lock import held_file
from covmerge.plan.statistics import StatisticsFile, collect, file, write
from tests.e2e.models import build, fine_tuned
from tests.statistics.models import classifier, save, write_texts

DENSE = "encoder.layer.0.output.dense.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save("bert", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def collected(model):
    data = write_texts(model.parent / "a.txt")
    out = model.parent / "a.covstats.safetensors"
    collect(model, data, out)
    return out


def metadata_of(path):
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


def rewrite(path, out, tensors=None, about=None, **metadata):
    """Save a statistics file again with something else in it."""
    said = metadata_of(path)
    changed = {**json.loads(said["about"]), **(about or {})}
    said.update({"about": json.dumps(changed), **metadata})
    save_file({**load_file(path), **(tensors or {})}, out, metadata=said)
    return out


def test_anyone_can_read_it(collected):
    tensors = load_file(collected)
    assert {name.partition("/")[0] for name in tensors} == {"gram"}
    assert all(value.dtype == torch.float32 for value in tensors.values())
    said = metadata_of(collected)
    assert said["covstats"] == "1"
    about = json.loads(said["about"])
    assert about["protocol"] == "inputs"
    assert about["examples"] == 12
    assert set(tensors) | set(about["aliases"]) == set(about["rows"])


def test_whose_it_is(model, collected, tmp_path):
    statistics = StatisticsFile.open(collected)
    statistics.check_model("expert 'e'", open_checkpoint(model))
    fine_tuned(build("bert"), seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"which has other weights than expert 'e' \(.*other\)"):
        statistics.check_model("expert 'e'", open_checkpoint(tmp_path / "other"))


def test_sharding_does_not_change_the_probe(model, tmp_path):
    build("bert").save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    one, other = (open_checkpoint(folder) for folder in (model, tmp_path / "sharded"))
    assert file.probe(one) == file.probe(other)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "value", "first bytes of a long row"])
def test_the_probe_sees(change):
    def tensors(**changed):
        given = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 5000), "c": torch.tensor(1.0)}
        return file.probe(open_checkpoint({**given, **changed}))

    long = torch.zeros(2, 5000)
    long[0, 1023] = 1
    changed = {
        "name": {"d": torch.zeros(1)},
        "dtype": {"a": torch.zeros(2, 3, dtype=torch.float16)},
        "shape": {"a": torch.zeros(3, 2)},
        "value": {"c": torch.tensor(2.0)},
        "first bytes of a long row": {"b": long},
    }[change]
    assert tensors() == tensors()
    assert tensors(**changed) != tensors()


def test_identity_follows_the_content(model, collected, tmp_path):
    again = tmp_path / "again.covstats.safetensors"
    collect(model, model.parent / "a.txt", again)
    assert StatisticsFile.open(again).identity() == StatisticsFile.open(collected).identity()
    collect(model, model.parent / "a.txt", again, max_examples=11, overwrite=True)
    assert StatisticsFile.open(again).identity() != StatisticsFile.open(collected).identity()


def test_what_is_not_there_is_named(collected):
    statistics = StatisticsFile.open(collected)
    for ask in (statistics.read, statistics.rows, statistics.header):
        with pytest.raises(InputError, match=r"holds no gram statistic of 'encoder.layer.0.outpt"):
            ask("gram", "encoder.layer.0.outpt.dense.weight")
        with pytest.raises(InputError, match="holds no fisher statistic"):
            ask("fisher", DENSE)
    with pytest.raises(InputError, match="holds no fisher statistics, only gram"):
        statistics.total("fisher")
    statistics.close()


def test_a_model_is_no_statistics_file(model):
    with pytest.raises(InputError, match="is no statistics file"):
        StatisticsFile.open(model / "model.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 40, 3000, -1])
def test_truncated(collected, tmp_path, keep):
    path = tmp_path / "cut.covstats.safetensors"
    path.write_bytes(collected.read_bytes()[:keep])
    with pytest.raises(InputError, match=str(path)):
        StatisticsFile.open(path)


@pytest.mark.parametrize(
    "content", [b"", b"not a statistics file", b"\xff" * 100, b"version https://git-lfs"]
)
def test_foreign(tmp_path, content):
    path = tmp_path / "x.covstats.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        StatisticsFile.open(path)
    with pytest.raises(InputError, match="cannot be"):
        StatisticsFile.open(tmp_path / "nothing")


KEY = f"gram/{DENSE}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"covstats": "2"}, "has the format '2'"),
        ({"about": "[" * 100_000}, "is not valid JSON"),
        ({"about": "{}"}, "damaged statistics file .*field required"),
        ({"about": '{"rows": 1, "rows": 2}'}, "the key 'rows' twice"),
        ({"tensors": {"gram/extra": torch.eye(2)}}, "do not agree"),
        ({"tensors": {KEY: torch.eye(2)[:1]}}, r"float32 of shape \[1, 2\]"),
        ({"tensors": {KEY: torch.eye(2).double()}}, "float64 of shape"),
        ({"about": {"rows": {}}}, "do not agree"),
        ({"about": {"rows": {KEY: 0}}}, "greater than or equal to 1"),
        ({"about": {"rows": {KEY: True}}}, "valid integer"),
        ({"about": {"protocol": "mine"}}, "protocol"),
        ({"about": {"totals": {}}}, "of no kind that it lists"),
        ({"about": {"totals": {"gram": -1.0}}}, "greater than or equal to 0"),
        ({"about": {"surprise": 1}}, "surprise"),
    ],
)
def test_hostile(collected, tmp_path, change, message):
    out = tmp_path / "x.covstats.safetensors"
    if isinstance(change.get("about"), str):
        said = {**metadata_of(collected), "about": change["about"]}
        save_file(load_file(collected), out, metadata=said)
    else:
        rewrite(collected, out, **change)
    with pytest.raises(InputError, match=message) as caught:
        StatisticsFile.open(out)
    assert len(str(caught.value)) < 1000


def test_hostile_aliases(collected, tmp_path):
    about = json.loads(metadata_of(collected)["about"])
    alias, stored = next(iter(about["aliases"].items()))
    for wrong in ("gram/nothing", alias, "fisher/x"):
        out = rewrite(
            collected,
            tmp_path / "x.covstats.safetensors",
            about={"aliases": {**about["aliases"], alias: wrong}},
        )
        with pytest.raises(InputError, match="which is no Gram matrix in it"):
            StatisticsFile.open(out)
    assert stored != alias


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(collected, tmp_path, value):
    tensors = {KEY: torch.full((24, 24), value)}
    statistics = StatisticsFile.open(
        rewrite(collected, tmp_path / "x.covstats.safetensors", tensors)
    )
    with pytest.raises(InputError, match=f"'{DENSE}' holds values that are not finite"):
        statistics.read("gram", DENSE)


def test_negative_fisher_information(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    collect(folder, write_texts(tmp_path / "a.txt", count=1), out, kinds=["fisher"])
    name = "bert.pooler.dense.bias"
    bad = rewrite(out, tmp_path / "b.covstats.safetensors", {f"fisher/{name}": -torch.ones(16)})
    with pytest.raises(InputError, match="not positive"):
        StatisticsFile.open(bad).read("fisher", name)


def test_a_merge_checks_the_hash_that_a_file_states(model, collected, tmp_path):
    """Other numbers, which are as good as any by their values alone."""
    key = f"gram/{DENSE}"
    other = rewrite(collected, tmp_path / "a.safetensors", {key: 2 * load_file(collected)[key]})
    few = {"few_rows": "allow"}
    for run, method in ((covmerge.merge, "regmean"), (covmerge.compare, ["regmean"])):
        with pytest.raises(InputError, match=r"a\.safetensors.*not those whose hash it states"):
            run(model, {"a": model}, method, statistics={"a": other}, tensors=few)


def test_a_file_that_changes_while_it_is_open(collected, tmp_path):
    path = tmp_path / "x.covstats.safetensors"
    path.write_bytes(collected.read_bytes())
    statistics = StatisticsFile.open(path)
    path.write_bytes(collected.read_bytes()[:-4])
    with pytest.raises(InputError, match="changed while it was in use"):
        statistics.read("gram", DENSE)


class TestOutput:
    def test_existing_is_refused(self, model, collected):
        before = collected.read_bytes()
        with pytest.raises(InputError, match="exists: choose another output"):
            collect(model, model.parent / "a.txt", collected)
        assert collected.read_bytes() == before

    def test_only_statistics_are_replaced(self, model, tmp_path):
        path = tmp_path / "x.covstats.safetensors"
        path.write_bytes((model / "model.safetensors").read_bytes())
        with pytest.raises(InputError, match="is no statistics file"):
            collect(model, model.parent / "a.txt", path, overwrite=True)
        assert path.read_bytes() == (model / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("name", ["x.safetensors", "nowhere/x.covstats.safetensors"])
    def test_names(self, model, tmp_path, name):
        with pytest.raises(InputError, match=r"name it so|create it"):
            collect(model, model.parent / "a.txt", tmp_path / name)

    def test_overflow_leaves_nothing(self, model, tmp_path):
        batch = {"inputs_embeds": torch.full((1, 4, 16), torch.inf)}
        with pytest.raises(InputError, match="is not finite"):
            collect(model, [batch], tmp_path / "x.covstats.safetensors")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("when", ["running", "writing", "renaming"])
    def test_interrupted(self, model, tmp_path, monkeypatch, when):
        def stop(*args, **options):
            raise KeyboardInterrupt

        def batches():
            yield {"input_ids": torch.arange(6)[None]}
            if when == "running":
                raise KeyboardInterrupt

        if when == "writing":
            monkeypatch.setattr(write.GrowingFile, "finish", stop)
        if when == "renaming":
            monkeypatch.setattr(write, "fsync_path", stop)
            monkeypatch.setattr(write.Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            collect(model, batches(), tmp_path / "x.covstats.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_run_left_is_removed_and_nothing_else(self, model, collected, tmp_path):
        killed, used, other = (
            tmp_path / f".{name}.unfinished"
            for name in (
                "x.covstats.safetensors.0a1b2c3d",
                "x.covstats.safetensors.1a1b2c3d",
                "y.covstats.safetensors.2a1b2c3d",
            )
        )
        killed.write_bytes(b"half")
        other.write_bytes(b"of another file")
        with held_file(used):
            collect(model, model.parent / "a.txt", tmp_path / "x.covstats.safetensors")
            assert {path.name for path in tmp_path.iterdir()} == {
                used.name,
                other.name,
                "x.covstats.safetensors",
            }


def test_a_parameter_that_is_one_number(tmp_path):
    sources = {"base": {"s": torch.tensor(1.0)}, "a": {"s": torch.tensor(2.0)}}
    sources["b"] = {"s": torch.tensor(4.0)}
    files = {}
    for (name, tensors), weight in zip(sources.items(), (0.0, 3.0, 1.0), strict=True):
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        statistic = write.Statistic(("s",), torch.tensor(weight), 1)
        files[name] = tmp_path / f"{name}.covstats.safetensors"
        contents = write.Contents(open_checkpoint(path), {"fisher": [statistic]}, 1)
        write.write_statistics({files[name]: contents}, overwrite=False)
    base, *experts = (tmp_path / f"{name}.safetensors" for name in sources)
    del files["base"]
    method = "fisher(normalize=false)"
    found = covmerge.merge(base, {e.stem: e for e in experts}, method, statistics=files)
    assert found.tensors["s"].item() == pytest.approx((3 * 2 + 4) / 4)
