"""Examples from files and programs, and models that cannot take them."""

import json
import shutil
import sys

import pytest
import torch

from covmerge.errors import InputError
from covmerge.files.tensors.skeleton import SkeletonUnavailable, build_skeleton
from covmerge.plan.statistics import StatisticsFile, collect
from covmerge.plan.statistics.examples import Reading, Text, read_texts
from tests.advised import advice
from tests.e2e.models import build
from tests.statistics.models import classifier, encode, save, save_tokenizer, texts, write_texts

OUT = "a.covstats.safetensors"
DENSE = "encoder.layer.0.output.dense.weight"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\n two \r\nthree", [Text("one"), Text(" two "), Text("three")]),
        ("a.txt", "\ufeffone\n", [Text("one")]),
        ("a.jsonl", '{"text": "one", "label": 1}\n\n"two"\n', [Text("one", None, 1), Text("two")]),
        ("a.json", '["one", {"text": "two", "text_pair": "b"}]', [Text("one"), Text("two", "b")]),
        ("a.csv", 'text,label\n"one, two",yes\n', [Text("one, two", None, "yes")]),
        ("a.csv", "text,label,,\n \none,yes,,\n", [Text("one", None, "yes")]),
    ],
)
def test_files(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_texts(tmp_path / name, Reading()) == expected


def test_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,y\nwhy,because,0\n")
    reading = Reading(text_column="question", pair_column="answer", label_column="y")
    assert read_texts(path, reading) == [Text("why", "because", "0")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1", "is no file of examples that covmerge reads"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n", "holds no text"),
        ("a.txt", b"caf\xe9\n", "is not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\n{text}\n', "line 2: not JSON"),
        ("a.jsonl", b'{"txet": "a"}', "line 1 has no 'text'. Did you mean 'txet'?"),
        ("a.jsonl", b'{"text": 3}', "line 1: 3 is no text"),
        ("a.jsonl", b'{"text": "a", "text_pair": 3}', "line 1: 3 is no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', "line 2: null is no text"),
        ("a.jsonl", b'{"text": "a", "text_pair": true}', "line 1: true is no text"),
        ("a.jsonl", b"[null, true, NaN]", r"line 1 is \[null, true, NaN\], not a text"),
        (
            "a.jsonl",
            b'{"text": "a", "label": [null, true]}',
            r"the label \[null, true\] is neither",
        ),
        (
            "a.jsonl",
            b'"b"\n{"text": "a \\ud800 b"}',
            r"line 2: 'a \\ud800 b' holds half of a surrogate",
        ),
        ("a.jsonl", b'"\\udc00"', "line 1: .* holds half of a surrogate pair"),
        (
            "a.json",
            b'[{"text": "a", "text_pair": "\\ud800"}]',
            "entry 1: .* half of a surrogate pair",
        ),
        ("a.jsonl", b'{"text": "a", "label": [1]}', "the label \\[1\\] is neither"),
        ("a.jsonl", b'"b"\n{"text": "a", "text": "b"}', "line 2 has the key 'text' twice"),
        ("a.json", b'[{"text": "a", "text": "b"}]', "the whole has the key 'text' twice"),
        ("a.jsonl", b"[1, 2]", "line 1 is \\[1, 2\\], not a text or an object"),
        ("a.json", b'{"text": "a"}', "a JSON list of texts"),
        ("a.json", b"[" * 100_000, "cannot be read as .json"),
        ("a.csv", b"a,b\n1,2\n", "row 1 has no 'text'"),
        ("a.csv", b"label,text\n1,a\n1\n", "row 2 has 1 value, and the first line 2 names"),
        (
            "a.csv",
            b"text,label\na,1\nwell, a,1\n",
            "row 2 has 3 values, and the first line 2 names",
        ),
        ("a.csv", b"text\n" + b"x" * 200_000, "cannot be read as .csv"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_texts(tmp_path / name, Reading())
    assert str(caught.value).startswith(str(tmp_path / name))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_texts(tmp_path / "a.txt", Reading())


def test_pairs_and_their_length(tmp_path):
    folder = save("bert", tmp_path / "m")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "w1 w2", "text_pair": "w3 w4 w5"}]))
    collect(folder, tmp_path / "a.json", tmp_path / OUT)
    assert StatisticsFile.open(tmp_path / OUT).rows("gram", DENSE) == 5


@pytest.mark.parametrize(("given", "rows"), [({}, 16), ({"max_length": 4}, 4)])
def test_long_texts_are_cut(tmp_path, given, rows):
    folder = save("bert", tmp_path / "m")
    (tmp_path / "a.txt").write_text("w1 " * 100)
    collect(folder, tmp_path / "a.txt", tmp_path / OUT, **given)
    assert StatisticsFile.open(tmp_path / OUT).rows("gram", DENSE) == rows


def test_a_truth_value_is_no_length(tmp_path):
    folder = save("bert", tmp_path / "m")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": True}))
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    collect(folder, tmp_path / "a.txt", tmp_path / OUT)
    assert StatisticsFile.open(tmp_path / OUT).rows("gram", DENSE) == 3


def test_another_tokenizer(tmp_path):
    build("bert").save_pretrained(tmp_path / "m")
    data = write_texts(tmp_path / "a.txt")
    with pytest.raises(InputError, match="pass the folder of one with tokenizer"):
        collect(tmp_path / "m", data, tmp_path / OUT)
    save_tokenizer(tmp_path / "t")
    assert collect(tmp_path / "m", data, tmp_path / OUT, tokenizer=tmp_path / "t").examples == 12


def test_no_token_to_pad_with(tmp_path):
    folder = save("bert", tmp_path / "m", pad=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    data = write_texts(tmp_path / "a.txt")
    with pytest.raises(InputError, match="pass batch_size=1"):
        collect(folder, data, tmp_path / OUT)
    assert collect(folder, data, tmp_path / OUT, batch_size=1).examples == 12


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there is no example"),
        ([[1, 2]], "batch 1 is no mapping"),
        ([{}], "batch 1 is no mapping"),
        ([{"input_ids": [1, 2]}], "batch 1 is no mapping"),
        ([{"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(1, 3)}], "batch 1"),
        ([{"input_ids": torch.full((1, 3), 999)}], "cannot run on these examples"),
        ([{"pixels": torch.ones(1, 3)}], r"cannot run on these examples \(pixels \[1, 3\]\)"),
    ],
)
def test_bad_batches(tmp_path, batches, message):
    folder = save("bert", tmp_path / "m")
    with pytest.raises(InputError, match=message):
        collect(folder, batches, tmp_path / OUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_labels_stay_out_of_the_model(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    batch = {**encode(folder, texts(2)), "labels": torch.tensor([0, 1])}
    assert collect(folder, [batch], tmp_path / OUT).examples == 2


def test_without_transformers(tmp_path, monkeypatch):
    folder = save("bert", tmp_path / "m")
    data = write_texts(tmp_path / "a.txt")
    said = advice("install it with: pip install 'covmerge[transformers]'")
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "transformers", None)  # as if it were not installed
        with pytest.raises(InputError, match=said):
            collect(folder, data, tmp_path / OUT)
        with pytest.raises(
            SkeletonUnavailable, match=advice("not installed (pip install 'covmerge[tr")
        ):
            build_skeleton({}, {"model_type": "bert"})
    assert collect(folder, data, tmp_path / OUT).examples
    with pytest.raises(SkeletonUnavailable) as other:
        build_skeleton({}, {"model_type": "nobody's"})
    assert "not installed" not in str(other.value)


def edit_config(folder, **changed):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))


def remove_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[DENSE]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: edit_config(f, model_type="nosuchmodel"), "cannot be run"),
        (lambda f: edit_config(f, hidden_size=18, num_attention_heads=2), "cannot be loaded|lacks"),
        (lambda f: edit_config(f, quantization_config={"bits": 4}), "stores quantised weights"),
        (remove_tensor, f"lacks 1 tensors of BertModel, such as '{DENSE}': they would be random"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "model.safetensors"),
        (shutil.rmtree, "no such file or folder"),
    ],
)
def test_models_that_cannot_run(tmp_path, harm, message):
    folder = save("bert", tmp_path / "m")
    data = write_texts(tmp_path / "a.txt")
    harm(folder)
    with pytest.raises(InputError, match=message):
        collect(folder, data, tmp_path / OUT)
    assert not (tmp_path / OUT).exists()


@pytest.mark.parametrize(
    ("kinds", "message"), [(["grams"], "Did you mean 'gram'"), ([], "no kind")]
)
def test_kinds(tmp_path, kinds, message):
    with pytest.raises(InputError, match=message):
        collect(tmp_path, tmp_path / "a.txt", tmp_path / OUT, kinds=kinds)
