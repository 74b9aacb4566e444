"""Fisher information against autograd by hand, example by example."""

import math

import pytest
import torch
import transformers

from covmerge.errors import InputError
from covmerge.plan.statistics import StatisticsFile, collect
from covmerge.plan.statistics import gram as fisher_module
from tests.e2e.models import TEXT, build
from tests.statistics.models import (
    classifier,
    encode,
    save,
    save_tokenizer,
    texts,
    write_json_lines,
    write_texts,
)
from tests.tolerance import assert_same_fisher

OUT = "a.covstats.safetensors"


def squares(model, log_p):
    """(∂ log p)² by parameter name, in float64."""
    model.zero_grad()
    log_p.backward(retain_graph=True)
    return {
        name: parameter.grad.double().square()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def mean(terms, count):
    total = {}
    for weight, found in terms:
        for name, value in found.items():
            total[name] = total.get(name, 0) + weight * value / count
    return total


def check(path, expected, head):
    file = StatisticsFile.open(path)
    names = file.names("fisher")
    assert set(names) == {name for name in expected if not name.startswith(head)}
    largest = max(float(squares.max()) for squares in expected.values())
    for name in names:
        value = file.read("fisher", name)
        assert value.shape == expected[name].shape
        assert_same_fisher(value, expected[name], largest)
    total = sum(float(expected[name].square().sum()) for name in names) ** 0.5
    assert file.total("fisher") == pytest.approx(total, rel=1e-4)


def run(tmp_path, model, data, **options):
    folder = save(model, tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    done = collect(folder, data, out, kinds=["fisher"], **options)
    return folder, out, done


def test_classifier_exactly_over_all_labels(tmp_path):
    model = classifier(labels=3)
    folder, out, done = run(tmp_path, model, write_texts(tmp_path / "a.txt", count=4))
    terms = []
    for line in texts(4):
        log_p = model(**encode(folder, [line])).logits[0].log_softmax(-1)
        terms += [(float(one.detach().exp()), squares(model, one)) for one in log_p]
    check(out, mean(terms, 4), head="classifier")
    assert StatisticsFile.open(out).rows("fisher", "bert.pooler.dense.weight") == 4
    assert (done.examples, done.rows["fisher"]) == (4, (4, 4))


def test_labels_of_the_data(tmp_path):
    model = classifier(labels=3)
    model.config.label2id = {"no": 0, "maybe": 1, "yes": 2}
    model.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    answers = [2, "no", "1"]
    records = [
        {"text": line, "label": label} for line, label in zip(texts(3), answers, strict=True)
    ]
    data = write_json_lines(tmp_path / "a.jsonl", records)
    folder, out, _ = run(tmp_path, model, data, labels="data")
    terms = [
        (1.0, squares(model, model(**encode(folder, [line])).logits[0].log_softmax(-1)[label]))
        for line, label in zip(texts(3), (2, 0, 1), strict=True)
    ]
    check(out, mean(terms, 3), head="classifier")
    assert StatisticsFile.open(out).about.labels == "data"


def test_regression(tmp_path):
    model = classifier(labels=1)
    folder, out, _ = run(tmp_path, model, write_texts(tmp_path / "a.txt", count=3))
    terms = [(1.0, squares(model, model(**encode(folder, [t])).logits[0, 0])) for t in texts(3)]
    check(out, mean(terms, 3), head="classifier")
    records = [{"text": line, "label": 0.5} for line in texts(3)]
    data = write_json_lines(tmp_path / "b.jsonl", records)
    collect(folder, data, out, kinds=["fisher"], labels="data", overwrite=True)
    terms = []
    for line in texts(3):
        value = model(**encode(folder, [line])).logits[0, 0]
        terms.append((1.0, squares(model, -((0.5 - value) ** 2) / 2)))
    check(out, mean(terms, 3), head="classifier")


def test_language_model_on_its_own_tokens(tmp_path):
    model = build("gpt2")
    folder, out, _ = run(tmp_path, model, write_texts(tmp_path / "a.txt", count=3), seed=7)
    generator = torch.Generator().manual_seed(7)
    terms = []
    for line in texts(3):
        log_p = model(**encode(folder, [line])).logits[0].log_softmax(-1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        terms.append((1.0, squares(model, log_p.gather(1, drawn).sum())))
    # The output embedding is the token embedding: once, with the gradients of both.
    check(out, mean(terms, 3), head="lm_head")


def test_language_model_on_the_text(tmp_path):
    model = build("llama")
    folder, out, _ = run(tmp_path, model, write_texts(tmp_path / "a.txt", count=3), labels="data")
    terms = []
    for line in texts(3):
        inputs = encode(folder, [line])
        log_p = model(**inputs).logits[0, :-1].log_softmax(-1)
        following = inputs["input_ids"][0, 1:, None]
        terms.append((1.0, squares(model, log_p.gather(1, following).sum())))
    check(out, mean(terms, 3), head="lm_head")


def test_many_labels_are_drawn_and_right_in_expectation(tmp_path, monkeypatch):
    folder = save(classifier(labels=3), tmp_path / "m")
    data = write_texts(tmp_path / "a.txt", count=1)
    exact, drawn = (tmp_path / f"{n}.covstats.safetensors" for n in ("exact", "drawn"))
    collect(folder, data, exact, kinds=["fisher"])
    monkeypatch.setattr(fisher_module, "_EXACT_LABELS", 2)
    (tmp_path / "many.txt").write_text(f"{texts(1)[0]}\n" * 300)
    collect(folder, tmp_path / "many.txt", drawn, kinds=["fisher"], batch_size=50)
    name = "bert.encoder.layer.1.output.dense.weight"
    a, b = (StatisticsFile.open(path).read("fisher", name) for path in (exact, drawn))
    assert not torch.equal(a, b)
    assert float((a - b).norm() / a.norm()) < 0.15


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_in_batches_changes_nothing(tmp_path, side):
    folder = save("llama", tmp_path / "m")
    lines = texts(4)
    one, many = (tmp_path / f"{n}.covstats.safetensors" for n in ("one", "many"))
    options = {"kinds": ["gram", "fisher"], "labels": "data"}
    collect(folder, [encode(folder, [line]) for line in lines], one, **options)
    batch = encode(folder, lines)
    if side == "left":
        turns = (1 - batch["attention_mask"]).sum(1).tolist()
        batch = {
            name: torch.stack([row.roll(by) for row, by in zip(rows, turns, strict=True)])
            for name, rows in batch.items()
        }
    collect(folder, [batch], many, **options)
    first, second = StatisticsFile.open(one), StatisticsFile.open(many)
    for kind in ("gram", "fisher"):
        for name in first.names(kind):
            a, b = first.read(kind, name), second.read(kind, name)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_labels_in_batches(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    out = tmp_path / "a.covstats.safetensors"
    batch = {**encode(folder, texts(3)), "labels": torch.tensor([0, 2, 1])}
    collect(folder, [batch], out, kinds=["fisher"], labels="data")
    batch["labels"] = torch.tensor([0, 3, 1])
    with pytest.raises(InputError, match="3 labels, numbered from 0"):
        collect(folder, [batch], out, kinds=["fisher"], labels="data", overwrite=True)


@pytest.mark.parametrize(
    ("labels", "label", "says"),
    [
        (3, 1.5, "the label 1.5 is not the whole number of a class, or its name"),
        (3, True, "the label true is not the whole number"),
        (3, math.nan, "the label NaN is not the whole number"),
        (3, 10**30, "the label 10+ is not the whole number"),
        (1, 10**400, "the label 10+... is not a finite number"),
        (3, "--1", "the label '--1' is not in the model's config"),
        (1, True, "the label true is not a finite number"),
        (1, "1_0.5", "the label '1_0.5' is not a finite number"),
        (1, "1e300", "the label '1e300' is not a finite number"),
        (1, "nan", "the label 'nan' is not a finite number"),
        (1, -math.inf, "the label -Infinity is not a finite number"),
    ],
)
def test_labels_that_are_none(tmp_path, labels, label, says):
    """A cast to whole numbers makes 1 of 1.5, and of a truth value."""
    records = [{"text": "w1", "label": 1}, {"text": "w2", "label": label}]
    data = write_json_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(InputError, match=rf"a\.jsonl, line 2: {says}"):
        run(tmp_path, classifier(labels), data, labels="data")
    assert not (tmp_path / OUT).exists()
    collect(tmp_path / "m", data, tmp_path / OUT)  # which no label is needed for


def test_numbers_of_a_csv_file_are_what_a_regression_is_to_say(tmp_path):
    found = []
    for name, text in (
        ("a.jsonl", '{"text": "w1", "label": 2.5}\n'),
        ("a.csv", "text,label\nw1,2.5\n"),
    ):
        (tmp_path / name).write_text(text)
        _, out, _ = run(tmp_path, classifier(1), tmp_path / name, labels="data", overwrite=True)
        found.append(StatisticsFile.open(out).read("fisher", "bert.pooler.dense.weight"))
    assert torch.equal(*found)
    assert found[0].any()


def test_whole_numbers_with_a_point_are_labels(tmp_path):
    found = []
    for number, given in enumerate(([2, 0], [2.0, 0.0], ["2", " 0"])):
        records = [{"text": "w1 w2", "label": label} for label in given]
        data = write_json_lines(tmp_path / f"{number}.jsonl", records)
        _, out, _ = run(tmp_path, classifier(), data, labels="data", overwrite=True)
        found.append(StatisticsFile.open(out).read("fisher", "bert.pooler.dense.weight"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_labels_in_batches_that_are_none(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    for strange, told in ((1.5, "1.5"), (math.nan, "NaN")):
        batch = {**encode(folder, texts(3)), "labels": torch.tensor([0.0, strange, 1.0])}
        with pytest.raises(InputError, match=f"has the label {told}, and .*/m has 3 classes"):
            collect(folder, [batch], tmp_path / OUT, kinds=["fisher"], labels="data")
    assert not (tmp_path / OUT).exists()


def test_nothing_is_left_out_or_twice(tmp_path):
    _, out, _ = run(tmp_path, build("gpt2"), write_texts(tmp_path / "a.txt", count=1))
    file = StatisticsFile.open(out)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert set(file.names("fisher")) == set(stored) - {"lm_head.weight"}
    assert file.names("gram") == ()


def other_labels(tmp_path, folder):
    return write_json_lines(tmp_path / "b.jsonl", [{"text": "w1", "label": "perhaps"}])


def no_labels(tmp_path, folder):
    return write_texts(tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("model", "data", "labels", "message"),
    [
        (lambda: build("bert"), no_labels, "model", "is a BertModel, which gives no logits"),
        (classifier, no_labels, "data", "an example has no labels, and the model's logits are"),
        (classifier, other_labels, "data", "the label 'perhaps' is not in the model's config"),
        (classifier, no_labels, "nobody", "not of 'nobody'"),
        (
            lambda: classifier(problem_type="multi_label_classification"),
            no_labels,
            "model",
            "several labels at once",
        ),
    ],
)
def test_what_has_no_fisher_information(tmp_path, model, data, labels, message):
    folder = save(model(), tmp_path / "m")
    given = data(tmp_path, folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        collect(folder, given, tmp_path / "a.covstats.safetensors", kinds=["fisher"], labels=labels)
    assert sorted(tmp_path.iterdir()) == before


def test_a_head_that_is_not_stored_is_refused(tmp_path):
    config = transformers.BertConfig(**TEXT, num_hidden_layers=1, intermediate_size=24)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "m")
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    data, out = write_texts(tmp_path / "a.txt"), tmp_path / "a.covstats.safetensors"
    collect(tmp_path / "m", data, out)
    with pytest.raises(InputError, match="lacks 2 tensors of BertForSequenceClassification"):
        collect(tmp_path / "m", data, out, kinds=["fisher"], overwrite=True)
