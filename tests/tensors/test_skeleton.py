"""What happens where no skeleton can be built, or not in full: always an answer, and a note."""

import importlib
import sys
from pathlib import Path

import pytest
import transformers

from covmerge.base.types import Role
from covmerge.files.tensors.describe import describe
from covmerge.files.tensors.skeleton import SkeletonUnavailable, build_skeleton, quiet
from tests.tensors.models import headers_of, saved


def test_without_transformers(monkeypatch: pytest.MonkeyPatch):
    model = saved("bert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    described = model.describe()
    assert described.source == "names"
    assert described.family == "bert"
    assert described.notes == (
        "transformers is not installed (pip install 'covmerge[transformers]'): "
        "roles come from name rules",
    )


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": "nonesuch"}, "model_type 'nonesuch' is unknown to transformers"),
        ({"num_hidden_layers": 10**9}, "config.json has 'num_hidden_layers': 1000000000"),
        ({"num_hidden_layers": 9999}, "a model of far more tensors than the 23 stored ones"),
        ({"num_labels": 3_000_000}, "config.json has 'num_labels': 3000000"),
        ({"nested": {"hidden_size": 1e30}}, "config.json has 'hidden_size': 1e+30"),
        ({"hidden_size": "many"}, "cannot build a 'bert' from this config.json"),
        ({"num_attention_heads": 5}, "cannot build a 'bert' from this config.json"),
        ({"model_type": "gpt2", "architectures": []}, "GPT2Model has no tensor of any"),
    ],
)
def test_a_config_that_gives_no_skeleton(changes: dict[str, object], note: str):
    model = saved("bert")
    described = describe(model.headers, {**model.config, **changes})
    assert described.source == "names"
    assert note in described.notes[0]
    assert described.notes[0].endswith("roles come from name rules")
    assert described.tensors["pooler.dense.weight"].role is Role.LINEAR


@pytest.mark.parametrize("architecture", ["TheirBertModel", "GPT2Model", "AutoModel", "BertConfig"])
def test_an_architecture_that_is_not_of_the_model_type(architecture: str):
    model = saved("bert")
    described = describe(model.headers, {**model.config, "architectures": [architecture]})
    assert described.source == "skeleton"
    (note,) = described.notes
    assert f"architecture '{architecture}' is no class of transformers" in note
    assert note.endswith("roles come from BertModel")


def test_their_code_their_kernels_and_their_quantisation_are_left_alone():
    model = saved("bert")
    config = {
        **model.config,
        "auto_map": {"AutoModel": "theirs.TheirModel", "AutoConfig": "theirs.TheirConfig"},
        "attn_implementation": "their/kernel",
        "_attn_implementation": "their/kernel",
        "quantization_config": {"quant_method": "theirs"},
        "dtype": "theirs",
    }
    described = describe(model.headers, config)
    assert (described.source, described.notes) == ("skeleton", ())


def test_without_the_mapping_of_names_the_prefix_still_relates_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path))
    model = saved("bert_classifier")
    bare = {name.removeprefix("bert."): tensor for name, tensor in model.tensors.items()}
    mapping = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.delattr(mapping, "get_model_conversion_mapping")
    described = describe(headers_of(bare), model.config)
    (note,) = described.notes
    assert note.startswith("transformers' mapping of stored names cannot be used (AttributeError")
    assert {info.why.split()[0] for info in described.tensors.values()} == {"module"}


def test_what_fails_has_a_cause():
    with pytest.raises(SkeletonUnavailable) as raised:
        build_skeleton({}, {"model_type": "bert", "num_attention_heads": 5})
    assert isinstance(raised.value.__cause__, Exception)


def test_transformers_verbosity_is_restored():
    before = transformers.logging.get_verbosity()
    build_skeleton(saved("bert").headers, saved("bert").config)
    assert transformers.logging.get_verbosity() == before


def test_a_model_of_200_layers_is_built_even_where_little_is_stored():
    model = saved("bert")
    skeleton = build_skeleton(model.headers, {**model.config, "num_hidden_layers": 200})
    assert skeleton.architecture == "BertModel"
    assert skeleton.places.keys() == model.headers.keys()


def test_progress_bars_that_were_hidden_stay_hidden():
    hub = importlib.import_module("huggingface_hub.utils")
    before = hub.are_progress_bars_disabled()
    try:
        hub.disable_progress_bars()
        with quiet(transformers):
            assert hub.are_progress_bars_disabled()
        assert hub.are_progress_bars_disabled()
        hub.enable_progress_bars()
        with quiet(transformers):
            assert hub.are_progress_bars_disabled()
        assert not hub.are_progress_bars_disabled()
    finally:
        (hub.disable_progress_bars if before else hub.enable_progress_bars)()
