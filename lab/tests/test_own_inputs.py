"""Rows and the study of inputs that experts make themselves, on models of two layers."""

import json
import re

import pytest
import safetensors.torch
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

import covmerge
from covmerge.errors import InputError
from covmerge.methods import registry
from covmerge.plan.statistics import StatisticsFile
from covmerge_lab import collecting
from covmerge_lab.bench import BASE, EXPERTS, Bench
from covmerge_lab.llm import LlmSuite, tasks
from covmerge_lab.merging import TUNED, catalogue, statistics_of
from covmerge_lab.models import Section
from covmerge_lab.own import DRAWN, WRITTEN
from covmerge_lab.run import run_study
from covmerge_lab.studies import STUDIES, altered, half, regimes, save, tuned
from covmerge_lab.suite import Variant
from covmerge_lab.text import TextSuite
from covmerge_lab.text import tasks as text_tasks
from covmerge_lab.vision import VisionSuite
from covmerge_lab.workers import ignore_progress
from language import LEARNT, UNKNOWN, save_taught
from tests.covering import by_day

# transformers and PEFT warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
WORDS = [f"w{number}" for number in range(40)]


class Inline:
    """Workers that work here and now."""

    def run(self, jobs):
        return {name: job(ignore_progress) for name, job in jobs.items()}


class Small:
    """What the suites know by the module that they stand in."""

    @property
    def examples(self):
        return self.folder / "tasks"


class SmallLlm(Small, LlmSuite):
    """The language models' suite on one that knows the answers to `LEARNT`."""

    def prepare(self, on_progress):
        save_taught(self.base)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(self.base)
        for task in self.tasks:
            for part in ("train", "validation", "test"):
                tasks.save(UNKNOWN + LEARNT, self.examples / task / f"{part}.jsonl")

    def measures(self, model):
        return {}


class SmallText(Small, TextSuite):
    """The encoders' suite on a random one."""

    @property
    def base(self):
        return self.folder / "base"

    def prepare(self, on_progress):
        names = ["[PAD]", "[UNK]", *WORDS]
        made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]"
        ).save_pretrained(self.base)
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=len(names),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        ).save_pretrained(self.base)
        texts = [f"{one} {other}" for one in WORDS for other in WORDS[:3]]
        labels = [number % 2 for number in range(len(texts))]
        split = text_tasks.Split(tuple(texts), tuple(labels))
        for task in self.tasks:
            parts = {part: split for part in ("train", "validation", "test")}
            text_tasks.save(
                text_tasks.Task(name=task, about="words", labels=("a", "b"), **parts),
                self.examples / f"{task}.json",
            )


@pytest.fixture(
    scope="module", params=[pytest.param(SmallLlm, marks=pytest.mark.nightly), SmallText]
)
def bench(request, tmp_path_factory):
    bench = Bench(
        request.param(tmp_path_factory.mktemp("cache"), quick=True), Inline(), Console(quiet=True)
    )
    bench.prepare()
    return bench


def test_regmean_on_own_inputs_is_a_row_of_a_section_of_its_own(bench):
    variant = Variant("lora", 0)
    found = bench.run(variant, tuple(bench.suite.tasks), ["average", "regmean"])
    sections = {scored.model.title: scored.model.section for scored in found.models}
    assert sections["regmean"] is Section.WITH_DATA
    assert sections["regmean, own inputs"] is Section.OWN_INPUTS
    assert list(Section).index(Section.DATA_FREE) < list(Section).index(Section.OWN_INPUTS)
    assert list(Section).index(Section.OWN_INPUTS) < list(Section).index(Section.WITH_DATA)
    own = next(s for s in found.models if s.model.title == "regmean, own inputs")
    assert set(own.scores) == set(bench.suite.tasks)


def test_a_run_that_was_interrupted_goes_on_with_what_is_left(bench, monkeypatch):
    variant, tasks, methods = Variant("full", 0), tuple(bench.suite.tasks), ["average", "regmean"]
    scored = []

    def score(experts, models, **options):
        if len(scored) == 1:
            raise KeyboardInterrupt
        scored.append([model.title for model in models])
        return Bench.score(bench, experts, models, **options)

    monkeypatch.setattr(bench, "score", score)
    with pytest.raises(KeyboardInterrupt):
        bench.run(variant, tasks, methods)
    ends = [EXPERTS, BASE]
    assert scored[0] == [*ends, "average"]
    scored.append([])
    found = bench.run(variant, tasks, methods)
    assert scored[2:] == [["regmean"], ["regmean, own inputs"]]
    titles = [each.model.title for each in found.models]
    assert titles == [*ends, "average", "regmean", "regmean, own inputs"]
    # Other methods of the same experts are added to what is kept.
    bench.run(variant, tasks, ["average", "task_arithmetic"])
    assert scored[4:] == [["task_arithmetic", TUNED]]


def test_what_is_collected(bench):
    tasks = list(bench.suite.tasks)
    variant = Variant("full", 0)
    bench.train(variant, tasks)
    with bench.experts(variant, tasks, ["own"]) as experts:
        for task, path in collecting.files(experts.statistics, "own", tasks).items():
            about = StatisticsFile.open(path).about
            assert about.examples == 16  # of a smoke run
            if isinstance(bench.suite, LlmSuite):
                assert about.generated["start"] == "bos"
            else:
                (other,) = (folder for name, folder in experts.whole.items() if name != task)
                assert about.generated["others"] == str(other)
                assert about.generated["base"] == str(bench.suite.base)


def test_the_study(bench, tmp_path):
    study = STUDIES["generated"]()
    found = study.run(bench, [Variant("lora", 0)])
    save(study, bench, found, tmp_path / "out", "covmerge study generated")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    ways = WRITTEN if isinstance(bench.suite, LlmSuite) else DRAWN
    (group,) = results["groups"]
    titles = {row["title"] for row in group["rows"]}
    data = {"regmean, data", "regmean++, data"}
    assert {*ways, *data, "average", "task_arithmetic, tuned"} < titles
    inputs = results["inputs"]["lora"]
    assert set(inputs) == {*ways, "data of the task after it"}
    for title, of in inputs.items():
        assert set(of["cosine"]) == set(bench.suite.tasks)
        assert all(0 < cosine <= 1 for cosine in of["cosine"].values())
        assert (of["seconds"] > 0) == (title in ways)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Mean cosine with the measured covariance, lora experts" in text
    assert (tmp_path / "out" / "accuracy-lora.png").exists()
    assert not list((bench.suite.folder / "work").iterdir())


def test_the_study_of_anchors(bench):
    found = STUDIES["anchors"]().run(bench, [Variant("lora", 0)])
    (group,) = found.numbers["groups"]
    titles = {row["title"] for row in group["rows"]}
    assert {"regmean, anchors", "auto_measured, anchors", "regmean, data", "average"} < titles
    assert [own["task"] for own in found.numbers["anchors"]] == list(bench.suite.tasks)
    assert all(0 < own["cosine"] <= 1 for own in found.numbers["anchors"])


def test_some_of_its_ways_alone(tmp_path):
    study, suite = STUDIES["generated"](["drawn, behind merged blocks"]), TextSuite(tmp_path)
    study.check(suite, ["full"])
    assert study.only == ("drawn, behind merged blocks",)
    with pytest.raises(
        InputError, match=r"no expert of suite 'llm' makes inputs as 'drawn, behind"
    ):
        study.check(LlmSuite(tmp_path), ["full"])


@pytest.fixture(scope="module")
def small_text(tmp_path_factory):
    bench = Bench(
        SmallText(tmp_path_factory.mktemp("text"), quick=True), Inline(), Console(quiet=True)
    )
    bench.prepare()
    return bench


def test_the_default_beside_tuned_methods(small_text, monkeypatch, tmp_path):
    whole = {kind: tuned.grids(kind) for kind in ("full", "lora")}
    some = {
        kind: {m: grid[: by_day(2, 99)] for m, grid in of.items()} for kind, of in whole.items()
    }
    monkeypatch.setattr(tuned, "grids", some.get)
    study = STUDIES["tuned"]()
    found = study.run(small_text, [Variant("lora", 0)])
    save(study, small_text, found, tmp_path / "out", "covmerge study tuned")
    (group,) = json.loads((tmp_path / "out" / "results.json").read_text())["groups"]
    rows = {row["title"]: row for row in group["rows"]}
    methods = tuned.grids("lora")
    assert {f"{method}, tuned" for method in methods} < set(rows)
    assert all(rows[f"{m}, tuned"]["parameters"][0] in grid for m, grid in methods.items())
    assert set(group["beyond"]) == {"auto"}
    assert "less the best of the tuned" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "accuracy-lora-2.png").exists()
    assert "core_space" not in tuned.grids("full")


def test_some_methods_are_tuned_alone_but_for_task_arithmetic(small_text):
    study = STUDIES["tuned"](["knots"])
    found = study.run(small_text, [Variant("full", 0), Variant("lora", 0)])
    (group,) = found.numbers["groups"]  # KnOTS is of adapters
    tuned_ones = {row["title"] for row in group["rows"] if row["title"].endswith(", tuned")}
    assert tuned_ones == {"knots, tuned", "task_arithmetic, tuned"}


def test_every_point_of_every_grid_is_one_that_its_method_takes():
    for method, grid in tuned.grids("lora").items():
        for parameters in grid:
            assert registry.get(method).resolve(parameters).items() >= parameters.items()


def test_what_lies_at_the_end_of_its_grid_is_marked():
    grid = [{"density": 0.2, "scale": scale} for scale in (0.5, 1.0, 2.0)]
    assert [tuned._chosen(parameters, grid) for parameters in grid] == [
        "density 0.2, scale 0.5 (the least tried)",
        "density 0.2, scale 1",
        "density 0.2, scale 2 (the most tried)",
    ]


def test_methods_are_tuned_for_each_number_of_experts_of_a_suite(small_text, monkeypatch):
    monkeypatch.setattr(tuned, "grids", lambda kind: {"task_arithmetic": [{"scale": 0.3}]})
    monkeypatch.setattr(SmallText, "subsets", property(lambda s: [[*s.tasks], [*s.tasks][:1]]))
    found = STUDIES["tuned"]().run(small_text, [Variant("lora", 0)])
    assert [len(group["tasks"]) for group in found.numbers["groups"]] == [2, 1]
    assert list(found.pictures) == ["accuracy-lora-2", "accuracy-lora-1"]


SOME = ["2 experts", "full and adapters in turns", "one more, its update random"]


def test_regimes(small_text, monkeypatch, tmp_path):
    monkeypatch.setattr(regimes, "KNOWN", ("average", "ties"))
    study = STUDIES["regimes"](SOME)
    found = study.run(small_text, [Variant("lora", 0)])
    save(study, small_text, found, tmp_path / "out", "covmerge study regimes")
    of = json.loads((tmp_path / "out" / "results.json").read_text())["kinds"]["lora"]
    assert list(of) == SOME
    for name, group in of.items():
        titles = {row["title"] for row in group["rows"]}
        assert {"auto", "average", "task_arithmetic, tuned"} < titles
        # What merges inside the adapters' space is left out where not all are adapters.
        assert ("core_space" in titles) == (name != "full and adapters in turns")
    # An interrupted run goes on: what was scored is not scored again.
    monkeypatch.setattr(small_text, "score", None)
    assert study.run(small_text, [Variant("lora", 0)]).numbers == found.numbers
    assert "| 2 experts |" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "regimes-lora.png").exists()
    assert not list((small_text.suite.folder / "work").iterdir())


def test_what_half_precision_costs(small_text, monkeypatch, tmp_path):
    monkeypatch.setattr(half, "KNOWN", ("average", "ace"))
    study = STUDIES["half"]()
    found = study.run(small_text, [Variant("full", 0)])
    save(study, small_text, found, tmp_path / "out", "covmerge study half")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"auto", "ace", "task_arithmetic, tuned"} < set(results["less"])
    titles = {row["title"] for row in results["groups"][0]["rows"]}
    assert titles == {*results["less"], *(f"{title}, bfloat16" for title in results["less"])}
    assert 0.0 < results["lost"]["unchanged"] < 1.0 and 0.0 < results["lost"]["error"] < 1.0
    assert "| ace |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("study", "only", "kinds", "wrong"),
    [
        ("regimes", ["2 expert"], None, "no part '2 expert'. Did you mean '2 experts'"),
        (
            "regimes",
            ["4 experts", "adapters of rank 4"],
            ["full"],
            "'adapters of rank 4' is of other experts than full",
        ),
        ("tuned", ["knots"], ["full"], "'knots' is of other experts than full: pass the other"),
        ("entries", ["auto"], None, "'entries' has no parts: leave out --only 'auto'"),
    ],
)
def test_a_part_that_a_study_has_not_is_refused_before_anything_is_written(
    tmp_path, study, only, kinds, wrong
):
    how = {"kinds": kinds, "seeds": [0], "quick": True, "only": only}
    with pytest.raises(InputError, match=re.escape(wrong)):
        run_study(study, "text", out=tmp_path / "out", cache=tmp_path / "cache", **how)
    assert not any(tmp_path.iterdir())


def test_a_study_of_other_experts_is_refused_before_anything_is_written(tmp_path):
    how = {"kinds": ["lora"], "seeds": [0], "quick": True}
    with pytest.raises(InputError, match="other experts: pass --kind full"):
        run_study("half", "text", out=tmp_path / "out", cache=tmp_path / "cache", **how)
    assert not any(tmp_path.iterdir())


def test_an_expert_in_half_precision_is_the_rounded_base_and_its_update(tmp_path):
    start = torch.tensor([[1.0, 1.0 + 2.0**-12, 3.0, 0.5]])
    update = torch.tensor([[2.0**-6, 2.0**-6, 2.0**-12, 0.0]])
    for name, tensors in (
        ("base", {"w": start, "same": start.clone()}),
        ("expert", {"model.w": start + update, "model.same": start, "head": start.clone()}),
    ):
        (tmp_path / name).mkdir()
        safetensors.torch.save_file(tensors, tmp_path / name / "model.safetensors")
    base = altered.base_in_half(tmp_path / "base", tmp_path / "half")
    made = altered.expert_in_half(tmp_path / "expert", tmp_path / "base", tmp_path / "half-expert")
    begun, stored = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (base, made.folder)
    )
    assert {t.dtype for t in (*begun.values(), *stored.values())} == {torch.bfloat16}
    kept = stored["model.w"].float() - begun["w"].float()
    assert kept.tolist() == [[2.0**-6, 2.0**-6, 0.0, 0.0]]
    assert torch.equal(stored["model.same"], begun["same"])
    assert made.unchanged == 0.5
    assert made.error == pytest.approx(2.0**-12 / update.norm().item(), rel=1e-5)


def test_who_is_merged_in_a_regime(small_text, tmp_path):
    variant, tasks = Variant("lora", 0), list(small_text.suite.tasks)
    small_text.train(variant, tasks)
    with small_text.experts(variant, tasks) as experts:
        found = {
            regime.name: regime.make(small_text, experts, tmp_path / str(number))
            for number, regime in enumerate(regimes.REGIMES)
        }
    first, second = tasks
    assert list(found["4 experts"]) == list(found["all experts"]) == tasks
    assert list(found["one task trained twice"]) == [*tasks, f"{first}-again"]
    twice = found["all tasks trained twice"]
    assert list(twice) == [*tasks, f"{first}-again", f"{second}-again"]
    assert len(set(twice.values())) == 4
    mixed = found["full and adapters in turns"]
    assert (mixed[first] / "adapter_config.json").exists()
    assert not (mixed[second] / "adapter_config.json").exists()
    assert found["one update 5 times as long"][first] != experts.folders[first]
    assert found["one update 0.2 times as long"][second] == experts.folders[second]
    ranks = found["adapters of ranks 4, 16 and 64 in turns"]
    assert [_rank_and_start(ranks[task])[0] for task in tasks] == [4, 16]
    assert [_rank_and_start(each)[0] for each in found["adapters of rank 64"].values()] == [64, 64]
    began = found["adapters that began alike"]
    assert set(began) == set(tasks)
    # After five steps A is hardly more than its start.
    alike = [_rank_and_start(began[task])[1] for task in tasks]
    unlike = [_rank_and_start(experts.folders[task])[1] for task in tasks]
    assert (alike[0] - alike[1]).norm() < 0.1 * (unlike[0] - unlike[1]).norm()
    longer = json.loads(
        (found["one trained 10 times as long"][second] / "training.json").read_text()
    )
    assert longer["settings"]["steps"] == 50
    assert found["one trained 10 times as long"][first] == experts.folders[first]
    frozen = json.loads((found["embeddings frozen"][second] / "training.json").read_text())
    assert set(found["embeddings frozen"]) == set(tasks) and frozen["variant"] == "lora-0-frozen"
    by_sgd = found["SGD and AdamW in turns"]
    assert by_sgd[first] == experts.folders[first]
    learnt = json.loads((by_sgd[second] / "training.json").read_text())
    assert learnt["variant"] == "lora-0-sgd"
    adamw = json.loads((experts.folders[second] / "training.json").read_text())["settings"]
    assert learnt["settings"]["learning_rate"] == 300 * adamw["learning_rate"]
    assert learnt["settings"]["weight_decay"] == pytest.approx(adamw["weight_decay"] / 3000)


def test_embeddings_that_are_frozen_are_the_base_s(small_text):
    variant, task = Variant("full", 0, frozen=True), next(iter(small_text.suite.tasks))
    small_text.train(variant, [task])
    base, frozen = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (small_text.suite.base, small_text.suite.expert(task, variant))
    )
    words = "embeddings.word_embeddings.weight"
    changed = [name for name in base if not torch.equal(frozen[f"bert.{name}"], base[name])]
    assert words in base and words not in changed
    assert "embeddings.position_embeddings.weight" in changed
    assert "encoder.layer.0.attention.self.query.weight" in changed


def _rank_and_start(adapter):
    (file,) = adapter.glob("adapter_model.safetensors")
    tensors = safetensors.torch.load_file(file)
    first = next(tensor for name, tensor in sorted(tensors.items()) if ".lora_A." in name)
    return first.shape[0], first


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_experts_that_nobody_trained(small_text, kind, tmp_path):
    suite = small_text.suite
    variant, task = Variant(kind, 0), next(iter(suite.tasks))
    small_text.train(variant, [task])
    expert = suite.expert(task, variant)
    long = altered.lengthened(expert, suite.base, tmp_path / "long", times=5.0)
    drawn = altered.random_like(expert, suite.base, tmp_path / "drawn")
    found = {
        name: covmerge.merge(
            suite.base, {"it": folder}, method="task_arithmetic", scale=1.0
        ).tensors
        for name, folder in (("as it is", expert), ("long", long), ("drawn", drawn))
    }
    base = covmerge.open_checkpoint(suite.base)
    changed = 0
    for name in found["as it is"]:
        start = base.read(name)
        update, longer, other = ((found[of][name] - start).double() for of in found)
        changed += bool(update.norm() > 1e-4)
        torch.testing.assert_close(longer, 5.0 * update, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(other.norm(), update.norm(), rtol=1e-3, atol=1e-5)
        if update.norm() > 1e-4:
            assert abs(float((update * other).sum() / (update.norm() * other.norm()))) < 0.9
    assert changed > 3


def test_every_suite_has_its_ways():
    assert TextSuite.own_inputs is VisionSuite.own_inputs is DRAWN
    assert LlmSuite.own_inputs is WRITTEN
    # Without weights drawn inputs are the same for all experts: nothing for a table.
    assert next(iter(DRAWN.values())).weighed == "others"
    merges = [m for m in catalogue("full") if m.section is Section.OWN_INPUTS]
    assert [statistics_of(merge) for merge in merges] == ["own", "own"]
