"""Any model, any harness; what was measured is added to, and nothing of others is lost."""

import json

import pytest
from huggingface_hub import ModelCard

from covmerge.errors import InputError
from covmerge_lab import card, record
from covmerge_lab.harness import evaluate
from language import LEARNT, UNKNOWN, define, offline, save_llama, save_taught

# Its dependencies warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

README = """---
license: mit
model-index:
- name: theirs
  results:
  - task:
      type: text-generation
    dataset:
      name: Their data
      type: theirs/data
    metrics:
    - type: accuracy
      value: 0.25
---
# A model

Some words.
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def measure(folder, task="reading", value=0.5):
    return evaluate(folder, tasks=[task], callback=lambda path: {"accuracy": value})


def entries(folder):
    return {
        entry.dataset_type: entry.metric_value
        for entry in ModelCard.load(folder / "README.md").data.eval_results
    }


def test_a_callback_is_written_beside_the_model(folder):
    (folder / "covmerge.json").write_text("{}")
    (result,) = measure(folder)
    stored = json.loads((folder / "evaluation.json").read_text())
    assert stored == {"results": [json.loads(json.dumps(result.summary()))]}
    assert record.read(folder) == [result]
    assert result.model == record.fingerprint(folder) is not None
    text = (folder / "README.md").read_text()
    assert "| reading | accuracy | 0.5 |" in text
    assert "\n# model\n" in text
    assert entries(folder) == {"python:reading": 0.5}


def test_only_the_same_task_is_replaced(folder):
    measure(folder, "reading", 0.5)
    measure(folder, "writing", 0.75)
    measure(folder, "reading", 1.0)
    assert {r.task: r.metrics[0].value for r in record.read(folder)} == {
        "reading": 1.0,
        "writing": 0.75,
    }
    assert entries(folder) == {"python:reading": 1.0, "python:writing": 0.75}
    assert (folder / "README.md").read_text().count(card.BEGIN) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_card_of_others_is_kept(folder, end):
    path = folder / "README.md"
    path.write_bytes(README.replace("\n", end).encode())
    measure(folder)
    more = f"{end}Words after it.{end}"
    with path.open("a", newline="") as file:
        file.write(more)
    measure(folder, value=0.75)
    text = path.read_bytes().decode()
    assert f"{end}# A model{end}{end}Some words." in text
    assert text.endswith(f"{card.END}{end}{more}")
    assert ModelCard.load(path).data.license == "mit"
    assert entries(folder) == {"theirs/data": 0.25, "python:reading": 0.75}


def test_a_card_without_metadata(folder):
    (folder / "README.md").write_text("# A model\n\nSome words.\n")
    measure(folder)
    assert "# A model\n\nSome words.\n\n<!--" in (folder / "README.md").read_text()
    assert entries(folder) == {"python:reading": 0.5}


def test_a_card_that_cannot_be_read(folder):
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(InputError, match=r"(?s)README\.md cannot be read .*: mend it"):
        measure(folder)


def test_what_is_not_finite_is_said(folder):
    (result,) = measure(folder, value=float("inf"))
    assert result.metrics[0].value is None
    assert "not finite" in (folder / "README.md").read_text()


def test_results_of_another_model(folder):
    measure(folder)
    (folder / "covmerge.json").write_text("{}")
    with pytest.raises(InputError, match="holds results of another model"):
        measure(folder)
    (folder / "evaluation.json").write_text("{}")
    with pytest.raises(InputError, match="was not written by covmerge"):
        measure(folder)


def test_what_is_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"is no model folder: it has neither config\.json"):
        evaluate(tmp_path, tasks=["reading"])
    with pytest.raises(InputError, match="no task is given"):
        evaluate(folder, tasks=[])
    with pytest.raises(InputError, match="a callback measures one task"):
        evaluate(folder, tasks=["a", "b"], callback=lambda path: {})
    with pytest.raises(InputError, match=r"no harness 'lmeval'\. Did you mean 'lm-eval'"):
        evaluate(folder, tasks=["a"], harness="lmeval")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "covmerge-lab\[evaluate\]"'):
        evaluate(folder, tasks=["a"])


def test_an_adapter_names_its_base(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"adapter_config\.json names no base"):
        evaluate(tmp_path, tasks=["covmerge_next"], include_path=define(tmp_path))


@pytest.mark.slow
def test_lm_eval(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    folder, tasks = save_taught(tmp_path / "model"), define(tmp_path)
    (result,) = evaluate(folder, tasks=["covmerge_next"], include_path=tasks, device="cpu")
    assert (result.harness, result.examples, result.limit) == ("lm-eval", 9, None)
    (metric,) = result.metrics
    assert metric.name == "exact_match (strip)"
    assert metric.value == len(LEARNT) / len(LEARNT + UNKNOWN)
    assert metric.stderr > 0
    assert entries(folder) == {"lm-eval:covmerge_next": metric.value}

    (tasks / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\ndoc_to_text: a\ndoc_to_target: b\n"
        "output_type: generate_until\ntest_split: test\n"
    )
    with pytest.raises(InputError, match="cannot be evaluated on far: "):
        evaluate(folder, tasks=["far"], include_path=tasks, device="cpu")


@pytest.mark.slow
def test_lm_eval_of_an_adapter(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    peft = pytest.importorskip("peft")
    import transformers

    base = save_llama(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    before = {path.name for path in (tmp_path / "adapter").iterdir()}
    (result,) = evaluate(
        tmp_path / "adapter", tasks=["covmerge_next"], include_path=define(tmp_path), device="cpu"
    )
    assert result.examples == 9
    added = {path.name for path in (tmp_path / "adapter").iterdir()} - before
    assert added <= {"README.md", "evaluation.json"}
    assert "evaluation.json" in added
