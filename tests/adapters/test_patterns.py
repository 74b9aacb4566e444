"""Regular expressions of strangers: what PEFT's `re` says of them, in a time that is bounded."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covmerge.errors import CheckpointError
from covmerge.files.adapters import patterns
from covmerge.files.adapters.patterns import Patterns
from covmerge.files.checkpoints.open import open_checkpoint

FOR_EVER = "(.*.*.*.*.*.*.*.*.*.*)x"
MODULE = "model.layers.0.self_attn.some_rather_long_name_of_a_module.q_proj"


def adapter(folder: Path, **fields) -> Path:
    weights = {f"base_model.model.{MODULE}.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": FOR_EVER},
        {"exclude_modules": FOR_EVER},
        {"rank_pattern": {FOR_EVER: 4}},
        {"alpha_pattern": {FOR_EVER: 4}},
        {"layers_to_transform": [0], "layers_pattern": [FOR_EVER]},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_patterns_that_take_for_ever(tmp_path, monkeypatch, fields):
    monkeypatch.setattr(patterns, "CPU_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"patterns of .* takes more than 1 seconds"):
        open_checkpoint(adapter(tmp_path, **fields))
    assert time.monotonic() - started < 60


def test_patterns_that_take_much_memory(tmp_path):
    bomb = "(?:(?:a{0,9999}){0,9999}){0,9999}" + "(?P<a>a){0,65000}" * 50
    with pytest.raises(CheckpointError, match=r"a lot of memory|no regular expression|rank 4"):
        open_checkpoint(adapter(tmp_path, rank_pattern={bomb: 2, r".*": 3}))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_too_many_patterns_are_refused(tmp_path, field):
    many = {f"model.layers.{number}.q_proj": 4 for number in range(20_000)}
    with pytest.raises(CheckpointError, match=rf"20000 patterns in {field}, and 10000 are read"):
        open_checkpoint(adapter(tmp_path, **{field: many}))


def test_a_rank_for_each_of_many_modules_is_read(tmp_path):
    many = {f"model.layers.{number}.k_proj": 8 for number in range(5_000)}
    checkpoint = open_checkpoint(adapter(tmp_path, rank_pattern={**many, "q_proj": 4}, r=2))
    assert checkpoint.low_rank[f"{MODULE}.weight"].rank == 4


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!.*vision).*proj$",  # of models with pictures
        r"^(model(?=\.).*\.(q_proj|v_proj))$",  # as ms-swift writes them
        r".*\.(q|k)_proj",
        r"(?i).*Q_PROJ",
        r"(\w+)\.layers\.(\d+).*",
        r"(.)(.).*\2",
        r".*q_pro",
        r"q_proj",
        r".*\.{,3}q_proj",
    ],
)
def test_they_mean_what_peft_means(pattern):
    matcher = Patterns("an adapter", {"target_modules": ([pattern], True)})
    matches = matcher.first("target_modules", MODULE) is not None
    assert matches == (re.fullmatch(pattern, MODULE) is not None)


def test_the_first_that_matches_decides():
    matcher = Patterns("an adapter", {"a": (["x", r"(.*\.)?(b)$", r".*"], False)})
    matcher.ask(["a.b", "c"])
    assert matcher.first("a", "a.b") == (1, None)
    assert matcher.first("a", "c") == (2, None)
    assert matcher.first("a", "x.y") == (0, None)


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(patterns.sys, "executable", "/nowhere/python")
    with pytest.raises(CheckpointError, match=r"patterns in a, .*cannot be started.*name the mod"):
        Patterns("an adapter", {"a": (["x"], False)}).first("a", "x")
