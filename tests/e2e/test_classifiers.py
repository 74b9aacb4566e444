"""A merged body with an expert's head is a classifier again, by the command of docs/full-models.md."""

import re
import shlex
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel
from transformers import BertForSequenceClassification as Classifier

import covmerge
from tests.cli.runs import covmerge as command

DOCS = Path(__file__).parents[2] / "docs" / "full-models.md"
SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_merged_body_gets_an_experts_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = BertModel(BertConfig(**SIZES, intermediate_size=24))
    base.save_pretrained("base")
    for name, labels in (("code", ["yes", "no", "perhaps"]), ("math", ["odd", "even"])):
        config = BertConfig(**SIZES, intermediate_size=24, id2label=dict(enumerate(labels)))
        expert = Classifier(config)
        expert.bert.load_state_dict(base.state_dict())
        for parameter in expert.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        expert.save_pretrained(name)
    covmerge.merge("base", {"code": "code", "math": "math"}, "average", "merged")
    line = re.search(r"`covmerge (merge --base ./code .*)`", DOCS.read_text())
    assert line is not None
    command(*shlex.split(line[1]))
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        "classifier", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert model.config.id2label == {0: "yes", 1: "no", 2: "perhaps"}
    state = model.state_dict()
    body, head = (
        load_file(f) for f in ("merged/model.safetensors", "merged/heads/code.safetensors")
    )
    assert (
        state.keys() - {"bert.embeddings.position_ids"} == {f"bert.{n}" for n in body} | head.keys()
    )
    assert all(torch.equal(state[f"bert.{name}"], tensor) for name, tensor in body.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in head.items())
