"""Adapters: base and factors are what PEFT's own merge gives, or the adapter is refused by name."""

import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    PsoftConfig,
    UniLoraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.checkpoints.open import open_checkpoint
from tests.adapters.models import (
    Attention,
    Made,
    applied,
    assert_merges,
    bert,
    gpt2,
    gpt_oss,
    llama,
    make,
    mixtral,
    qwen2,
    save,
    vit,
)
from tests.advised import advice
from tests.checkpoints.hub_server import COMMIT, connect, serve

ATTENTION = ["query", "value"]
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ATTENTION} | changes)


@pytest.mark.parametrize(
    "config, updates, replaced",
    [
        (lora(), 4, 0),
        (lora(use_rslora=True), 4, 0),
        (lora(rank_pattern={"query": 2, "layer.1.attention.self.value": 5}), 4, 0),
        (lora(alpha_pattern={r".*\.0\..*query": 7, "query": 9}), 4, 0),
        (lora(rank_pattern={"^bert.*value": 1}, alpha_pattern={"va.*": 2}, use_rslora=True), 4, 0),
        (lora(target_modules=r".*layer\.\d\.(attention\.output|output)\.dense"), 4, 0),
        (lora(target_modules="all-linear"), 14, 0),
        (lora(exclude_modules=["layer.1.attention.self.query"]), 3, 0),
        (lora(layers_to_transform=[1], layers_pattern="layer"), 2, 0),
        (lora(layers_to_transform=0), 2, 0),
        (lora(modules_to_save=["classifier", "pooler"]), 4, 4),
        (lora(task_type="SEQ_CLS"), 4, 2),
        (lora(bias="lora_only"), 4, 4),
        (lora(bias="all"), 4, 19),
        (lora(lora_bias=True), 8, 0),
        (lora(lora_bias=True, bias="lora_only"), 4, 4),
        (lora(target_modules=["word_embeddings", "query"]), 3, 0),
        (lora(target_modules=["position_embeddings"]), 1, 0),
        (lora(init_lora_weights="gaussian"), 4, 0),
        (lora(r=2, init_lora_weights="orthogonal"), 4, 0),
        (lora(init_lora_weights="mica"), 4, 0),
        (lora(lora_alpha=-3), 4, 0),
    ],
    ids=lambda value: str(
        {
            # PEFT has sets, whose order differs between processes; workers must agree on names.
            k: sorted(v) if isinstance(v, set) else v
            for k, v in value.to_dict().items()
            if v != getattr(lora(), k, None)
        }
        if isinstance(value, LoraConfig)
        else ""
    )[:60],
)
def test_bert(config, updates: int, replaced: int, tmp_path: Path) -> None:
    assert_merges(make(bert, config, tmp_path), updates=updates, replaced=replaced)


@pytest.mark.parametrize(
    "targets, updates, replaced",
    [(["c_attn", "c_proj", "c_fc"], 8, 0), ("all-linear", 8, 0), (["attn.c_proj", "wte"], 3, 0)],
)
def test_conv1d_of_gpt2(targets, updates: int, replaced: int, tmp_path: Path) -> None:
    made = make(gpt2, lora(target_modules=targets, fan_in_fan_out=True), tmp_path)
    adapter = assert_merges(made, updates=updates, replaced=replaced)
    assert all(header.transposed for header in adapter.low_rank.values())


def test_llama_and_vit(tmp_path: Path) -> None:
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    made = make(
        llama, lora(target_modules=targets, modules_to_save=["lm_head"]), tmp_path / "llama"
    )
    adapter = assert_merges(made, updates=12, replaced=1)
    assert adapter.low_rank["model.layers.0.mlp.down_proj.weight"].shape == (16, 24)
    made = make(vit, lora(target_modules=["q_proj", "v_proj"], bias="all"), tmp_path / "vit")
    assert_merges(made, updates=4, replaced=len(made.open().headers))


def test_llama_with_embedding_and_output(tmp_path: Path) -> None:
    targets = ["embed_tokens", "lm_head"]
    made = make(llama, lora(target_modules=targets), tmp_path, save_embedding_layers=False)
    adapter = assert_merges(made, updates=2)
    assert adapter.low_rank["model.embed_tokens.weight"].transposed
    made = make(llama, lora(target_modules=targets), tmp_path, save_embedding_layers=True)
    adapter = assert_merges(made, updates=0, replaced=2)
    whole = adapter.read("lm_head.weight")
    assert torch.equal(adapter.read("lm_head.weight", range(3, 7)), whole[3:7])


def test_tables_trained_whole_that_are_saved_with_their_copies(tmp_path: Path) -> None:
    """Old: PEFT's two copies of each were heads of the expert, and kept beside the merge."""
    config = lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    made = make(llama, config, tmp_path, save_embedding_layers=True)
    names = load_file(tmp_path / WEIGHTS)
    assert sum(".original_module." in name for name in names) == 2
    layers = sum(".lora_A." in name for name in names)
    adapter = assert_merges(made, updates=layers, replaced=2)
    assert adapter.headers.keys() == {"lm_head.weight", "model.embed_tokens.weight"}


def test_attention_and_convolutions(tmp_path: Path) -> None:
    """PEFT adds the update of out_proj twice, in training as in its merge."""
    config = lora(target_modules=["attn", "conv", "point"], rank_pattern={"conv": 2}, r=4)
    adapter = assert_merges(make(Attention, config, tmp_path), updates=4)
    assert adapter.low_rank["conv.weight"].shape == (8, 12)
    assert {"attn.in_proj_weight", "attn.out_proj.weight"} <= adapter.low_rank.keys()


def test_parameters_that_are_matrices(tmp_path: Path) -> None:
    config = lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"], lora_dropout=0.0)
    assert_merges(make(llama, config, tmp_path / "matrix"), updates=6)


def test_adalora(tmp_path: Path) -> None:
    config = AdaLoraConfig(
        init_r=4, lora_alpha=6, target_modules=ATTENTION, total_step=10, tinit=1, tfinal=1
    )
    made = make(bert, config, tmp_path)
    assert_merges(made, updates=4)
    tensors = load_file(tmp_path / WEIGHTS)  # as PEFT saved it for years, with the rank
    ranks = {
        name.replace("lora_E", "ranknum"): torch.tensor([4.0])
        for name in tensors
        if "lora_E" in name
    }
    save_file(ranks | tensors, tmp_path / WEIGHTS)
    assert_merges(made, updates=4)
    tensors.pop(next(name for name in tensors if name.endswith("lora_E")))
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="no lora_E beside it"):
        open_checkpoint(tmp_path)


def test_adalora_with_ranks_taken_away(tmp_path: Path) -> None:
    """The file holds what the mask left, and the scale is that of the rank at the beginning."""
    config = AdaLoraConfig(
        init_r=4, lora_alpha=6, target_modules=ATTENTION, total_step=10, tinit=1, tfinal=1
    )

    def mask(model) -> None:
        layers = [f"bert.encoder.layer.{i}.attention.self.{x}" for i in (0, 1) for x in ATTENTION]
        keep = [[True, False, True, False], [False] * 4, [True] * 4, [False, True, True, True]]
        model.peft_config["default"].rank_pattern = {
            f"{layer}.lora_E": bits for layer, bits in zip(layers, keep, strict=True)
        }
        for layer, bits in zip(layers, keep, strict=True):
            module = model.get_submodule(f"base_model.model.{layer}")
            module.lora_E["default"].data *= torch.tensor(bits).view(-1, 1)

    made = make(bert, config, tmp_path, before=mask)
    adapter = assert_merges(made, updates=4)
    assert sorted(header.rank for header in adapter.low_rank.values()) == [0, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factors_are_computed_in_float32_or_better(dtype: torch.dtype, tmp_path: Path) -> None:
    make(bert, lora(), tmp_path)
    tensors = {name: value.to(dtype) for name, value in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS)
    adapter = open_checkpoint(tmp_path)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    factors = adapter.read_factors(name)
    assert adapter.low_rank[name].dtype is dtype
    assert factors.left.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    stem = "base_model.model.bert.encoder.layer.0.attention.self.query"
    up, down = (tensors[f"{stem}.lora_{part}.weight"].to(factors.left.dtype) for part in "BA")
    torch.testing.assert_close(factors.dense(), up @ down * 5 / 3)


def test_what_is_known_of_an_adapter(tmp_path: Path) -> None:
    make(bert, lora(modules_to_save=["classifier"]), tmp_path)
    change(tmp_path, base_model_name_or_path="org/base")
    adapter = open_checkpoint(tmp_path)
    assert adapter.base_model == "org/base"
    assert adapter.adapter_config["r"] == 3
    assert adapter.folder == tmp_path
    assert adapter.config is None and adapter.notes == ()
    assert set(fingerprint(adapter)) == set(adapter.identity()["files"]) == {WEIGHTS, CONFIG}
    with pytest.raises(CheckpointError, match=r"no update of 'classifier.weight'"):
        adapter.read_factors("classifier.weight")
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        adapter.read("x")
    adapter.materialize()
    adapter.close()


def test_pickled_adapters(tmp_path: Path) -> None:
    made = make(bert, lora(), tmp_path, safe_serialization=False)
    assert (tmp_path / "adapter_model.bin").exists()
    assert_merges(made, updates=4)


def test_the_file_of_an_adapter_brings_its_configuration(tmp_path: Path) -> None:
    make(bert, lora(), tmp_path)
    name = "bert.encoder.layer.1.attention.self.value.weight"
    whole = open_checkpoint(tmp_path).read_factors(name).dense()
    assert torch.equal(open_checkpoint(tmp_path / WEIGHTS).read_factors(name).dense(), whole)
    (tmp_path / CONFIG).unlink()
    said = advice("If it is lost and the factor is 1, pass the file under another name")
    for source in (tmp_path, tmp_path / WEIGHTS):  # 5 / 3 is right, and a scale of 1 was taken
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(source)
    other = tmp_path / "other.safetensors"
    (tmp_path / WEIGHTS).rename(other)
    bare = open_checkpoint(other)
    assert isinstance(bare, AdapterCheckpoint) and "nothing of its scale" in bare.notes[0]
    torch.testing.assert_close(bare.read_factors(name).dense() * 5 / 3, whole)


def test_a_model_beside_an_adapter_has_precedence(tmp_path: Path) -> None:
    make(bert, lora(), tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.headers) == ["w"]
    assert WEIGHTS in checkpoint.notes[0]


def test_several_adapters_in_a_folder(tmp_path: Path) -> None:
    make(bert, lora(), tmp_path / "fr")
    make(bert, lora(), tmp_path / "de")
    with pytest.raises(CheckpointError, match=r"holds adapters in folders.*: de, fr\. Pass one"):
        open_checkpoint(tmp_path)
    make(bert, lora(), tmp_path)
    assert "de, fr in it were not read" in open_checkpoint(tmp_path).notes[0]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_a_changed_base_is_known_or_the_adapter_was_converted(init: str, tmp_path: Path) -> None:
    def save_first(model) -> None:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(tmp_path / "first"))
        model.peft_config["default"].init_lora_weights = init
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += 0.1

    config = lora(init_lora_weights=init, r=2)
    make(bert, config, tmp_path / "own", before=save_first)
    if "niter" in init:  # random numbers chose what was taken away
        with pytest.raises(CheckpointError, match=rf"init_lora_weights = '{init}'.*merge_and"):
            open_checkpoint(tmp_path / "own")
    converted = tmp_path / "converted"
    make(
        bert,
        lora(init_lora_weights=init, r=2),
        converted,
        before=save_first,
        path_initial_model_for_weight_conversion=str(tmp_path / "first"),
    )
    adapter = open_checkpoint(converted)
    assert {header.rank for header in adapter.low_rank.values()} == {4}


@pytest.mark.parametrize(
    "config, message",
    [
        (PsoftConfig(target_modules=ATTENTION, r=2), "'PSOFT'.*signs.*LORA, ADALORA"),
        (UniLoraConfig(target_modules=ATTENTION, r=2), "save_indices = false, and the places"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_adapters_are_refused_by_name(config, message: str, tmp_path: Path) -> None:
    save(bert(), config, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{message}.*merge_and_unload"):
        open_checkpoint(tmp_path)


def test_prompts_cannot_be_merged_at_all(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    save(llama(), config, tmp_path)
    with pytest.raises(CheckpointError, match=r"PROMPT_TUNING adapter.*cannot be merged"):
        open_checkpoint(tmp_path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    make(bert, lora(), tmp_path)
    return tmp_path


def change(folder: Path, **fields) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"peft_type": None}, "peft_type null"),
        ({"peft_type": []}, r"peft_type \[\]"),
        ({"rank_pattern": {"a{99999999999}": 3}}, "no regular expression"),
        ({"r": 4}, "stores rank 3.*says 4"),
        ({"rank_pattern": {"query": 2}}, "stores rank 3 for .*query.*says 2"),
        ({"r": "3"}, "r = '3', which is a positive whole number"),
        ({"r": True}, "positive whole number"),
        ({"lora_alpha": math.nan}, "lora_alpha = NaN, which is a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000.*which is a finite number"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"rank_pattern": {"a" * 1001: 3}}, "more than 1000 characters"),
        ({"target_modules": ["key"]}, "which target_modules = ..key.. does not cover"),
        ({"target_modules": "query"}, "does not cover"),
        ({"target_modules": [3]}, "list of strings"),
        ({"exclude_modules": ["query"]}, "exclude_modules = .*does not cover"),
        ({"layers_to_transform": [0]}, r"layer.1.*layers_to_transform = \[0\]"),
        ({"layers_to_transform": [0], "layers_pattern": ["layer"]}, "layers_to_transform"),
        ({"init_lora_weights": "corda"}, "init_lora_weights = 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes', which is true or false"),
        ({"new_in_2030": 1}, "new_in_2030 = 1"),
    ],
)
def test_configurations_that_do_not_fit(adapter: Path, fields, message: str) -> None:
    change(adapter, **fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(adapter)


def test_fields_of_a_later_peft_that_are_off_are_noted(adapter: Path) -> None:
    change(adapter, new_in_2030=None, new_in_2031=False)
    assert "all off: new_in_2030, new_in_2031" in open_checkpoint(adapter).notes[0]


def test_names_of_wrappers_are_left_out_with_a_note(adapter: Path) -> None:
    right = open_checkpoint(adapter).low_rank.keys()
    tensors = load_file(adapter / WEIGHTS)
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        wrapped = {n.replace("attention.", f"{wrapper}attention."): t for n, t in tensors.items()}
        save_file(wrapped, adapter / WEIGHTS)
        found = open_checkpoint(adapter)
        assert found.low_rank.keys() == right
        assert "and its like were read as PEFT saves them" in found.notes[-1]


OF_RUNNING = {
    "LoRA": LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    "DoRA": LoraConfig(target_modules=["q_proj"], use_dora=True),
    "tokens": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 3]),
    "AdaLoRA": AdaLoraConfig(target_modules=["q_proj"], total_step=9),
    "LoHa": LoHaConfig(target_modules=["q_proj"]),
    "IA3": IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "OFT": OFTConfig(target_modules=["q_proj"], oft_block_size=4),
    "LN tuning": LNTuningConfig(target_modules=["norm"]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kind", OF_RUNNING)
def test_a_state_dict_with_the_adapters_name(tmp_path: Path, kind: str, prefix: str) -> None:
    torch.manual_seed(0)
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, copy.deepcopy(OF_RUNNING[kind]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "saved")
    raw = tmp_path / "raw"
    raw.mkdir()
    shutil.copy(tmp_path / "saved" / "adapter_config.json", raw)
    torch.save({prefix + name: p.data for name, p in trained.items()}, raw / "adapter_model.bin")
    right = covmerge.merge(tmp_path / "base", [tmp_path / "saved"], "average")
    found = covmerge.merge(tmp_path / "base", [raw], "average")
    assert any("and its like were read as PEFT saves them" in note for note in found.notes)
    for name, tensor in right.tensors.items():
        assert torch.equal(found.tensors[name], tensor)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_state_dict_of_two_adapters_is_refused_and_each_can_be_saved(tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, lora(target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("b", lora(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "saved", selected_adapters=["b"])
    config = json.loads((tmp_path / "saved" / "b" / CONFIG).read_text())
    both = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    said = advice("save one alone (model.save_pretrained(FOLDER, selected_adapters=[NAME]))")
    with pytest.raises(CheckpointError, match=said):
        covmerge.merge(tmp_path / "base", {"a": (both, config)}, "average")
    assert covmerge.merge(tmp_path / "base", [tmp_path / "saved" / "b"], "average").tensors


STEM = "base_model.model.bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({f"{STEM}.lora_B.weight": None}, "has '.*query.lora_A.weight' and not the factor"),
        ({f"{STEM}.lora_A.weight": None}, "has '.*query.lora_B.weight' and not the factor"),
        ({f"{STEM}.lora_A.weight": torch.ones(2, 16)}, r"\[16, 3\], which does not fit"),
        ({f"{STEM}.lora_A.weight": torch.ones(0)}, "which is no matrix"),
        ({f"{STEM}.lora_A.weight": torch.ones(3, 0)}, "as the parts of a sharded model"),
        ({f"{STEM}.lora_A.weight": torch.ones(3, 16, dtype=torch.int8)}, "no matrix of floating"),
        ({f"{STEM}.lora_B.bias": torch.ones(3)}, "which are not 16 floating numbers"),
        (
            {f"{STEM}.lora_magnitude_vector": torch.ones(16)},
            advice("the files are of different versions, fetch them again"),
        ),
        (
            {f"{STEM}.lora_A.default.weight": torch.ones(3, 16)},
            r"has both '.*lora_A.*' and '.*lora_A.*', of two adapters or copies",
        ),
        ({f"{STEM}.base_layer.lora_A.weight": torch.ones(3, 16)}, "not the factor"),
    ],
)
def test_files_that_do_not_fit(adapter: Path, tensors, message: str) -> None:
    intact = load_file(adapter / WEIGHTS)
    stored = intact | tensors
    save_file({k: v for k, v in stored.items() if v is not None}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(adapter)
    save_file(intact, adapter / WEIGHTS)
    assert open_checkpoint(adapter).low_rank


def test_adapters_are_not_followed_out_of_their_folder(adapter: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / WEIGHTS).symlink_to(adapter / WEIGHTS)
    (inside / CONFIG).write_text((adapter / CONFIG).read_text())
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(inside)
    (inside / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"neither adapter_model.safetensors nor"):
        open_checkpoint(inside)


def test_adapters_of_the_hub(adapter: Path, tmp_path: Path, monkeypatch) -> None:
    (adapter / "README.md").write_text("not wanted")
    with serve(adapter) as hub:
        connect(monkeypatch, hub, tmp_path / "cache")
        found = open_checkpoint("org/name")
        assert set(hub.sent) == {WEIGHTS, CONFIG}
    assert found.identity() == {"kind": "hub", "repo": "org/name", "revision": COMMIT}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    local = open_checkpoint(adapter)
    for checkpoint in (found, open_checkpoint(f"org/name@{COMMIT}")):
        checkpoint.materialize()
        assert checkpoint.low_rank == local.low_rank
        for name in local.low_rank:
            assert torch.equal(
                checkpoint.read_factors(name).dense(), local.read_factors(name).dense()
            )


BASE = {
    "down_blocks.0.attentions.1.to_q.weight": torch.ones(8, 6),
    "down_blocks.0.resnets.0.conv1.weight": torch.ones(5, 4, 3, 3),
    "down_blocks.0.attentions.1.to_q.bias": torch.ones(8),
}


def kohya(alpha: float | None = 2.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, down, up in (
        ("lora_unet_down_blocks_0_attentions_1_to_q", (4, 6), (8, 4)),
        ("lora_unet_down_blocks_0_resnets_0_conv1", (2, 4, 3, 3), (5, 2, 1, 1)),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", (4, 6), (8, 4)),
    ):
        tensors[f"{key}.lora_down.weight"] = torch.randn(down, generator=generator)
        tensors[f"{key}.lora_up.weight"] = torch.randn(up, generator=generator)
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.mark.parametrize("alpha", [2.0, None])
def test_files_of_kohyas_scripts(alpha: float | None, tmp_path: Path) -> None:
    file = tmp_path / "style.safetensors"
    save_file(tensors := kohya(alpha), file)
    adapter = open_checkpoint(file)
    assert isinstance(adapter, AdapterCheckpoint)
    assert "lora_te_text_model_encoder_layers_0_mlp_fc1.weight" in adapter.low_rank
    assert len(adapter.notes) == (alpha is None)
    named = adapter.named_as(BASE)
    assert "1 updates of lora_te_ are of another base" in named.notes[-1]
    result = applied(named, BASE)
    key = "lora_unet_down_blocks_0_attentions_1_to_q"
    up, down = tensors[f"{key}.lora_up.weight"], tensors[f"{key}.lora_down.weight"]
    scale = 1.0 if alpha is None else alpha / 4
    torch.testing.assert_close(
        result["down_blocks.0.attentions.1.to_q.weight"], 1 + up @ down * scale
    )
    key = "lora_unet_down_blocks_0_resnets_0_conv1"
    up, down = tensors[f"{key}.lora_up.weight"], tensors[f"{key}.lora_down.weight"]
    kernel = torch.einsum("or,rihw->oihw", up[..., 0, 0], down)
    scale = 1.0 if alpha is None else alpha / 2
    torch.testing.assert_close(result["down_blocks.0.resnets.0.conv1.weight"], 1 + kernel * scale)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("input_blocks_2_1_transformer_blocks_0_attn1_to_q", "down_blocks.0.attentions.1.to_q"),
        ("input_blocks_1_0_in_layers_2", "down_blocks.0.resnets.0.conv1"),
        ("middle_block_2_emb_layers_1", "mid_block.resnets.1.time_emb_proj"),
        ("output_blocks_2_1_conv", "up_blocks.0.upsamplers.0.conv"),
        ("label_emb_0_2", "add_embedding.linear_2"),
    ],
)
def test_kohyas_names_of_sdxl_over_a_folder_of_diffusers(theirs, ours, tmp_path: Path) -> None:
    """Its scripts name the layers as single files do; they were said to be of another base."""
    ours = ours.replace(".to_q", ".transformer_blocks.0.attn1.to_q")
    factors = {"lora_down": torch.randn(2, 6), "lora_up": torch.randn(8, 2)}
    tensors = {f"lora_unet_{theirs}.{end}.weight": own for end, own in factors.items()}
    save_file(tensors, tmp_path / "style.safetensors")
    adapter = open_checkpoint(tmp_path / "style.safetensors")
    assert isinstance(adapter, AdapterCheckpoint)
    base = {f"{ours}.weight": torch.ones(8, 6)}
    result = applied(adapter.named_as(base), base)[f"{ours}.weight"]
    torch.testing.assert_close(result, 1 + factors["lora_up"] @ factors["lora_down"])


@pytest.mark.parametrize(
    "part, region",
    [
        ("lora_te2_", "conditioner.embedders.1.model."),
        ("text_encoder_2.", "conditioner.embedders.1.model."),
        ("lora_te_", "cond_stage_model.model."),
        ("text_encoder.", "cond_stage_model.model."),
        ("lora_te1_", "text_encoders.clip_l.transformer."),
    ],
)
def test_a_text_encoder_that_the_base_has_under_other_names_is_refused(part, region, tmp_path):
    """It was left aside, and said to be of another base. The advice leads to a merge."""
    inner = "text_model.encoder.layers.0.mlp.fc1"
    end = ".lora_{}.weight"
    name = inner.replace(".", "_") if part.startswith("lora") else inner
    unet = "unet.conv_in" if part.startswith("text") else "lora_unet_conv_in"
    sides = ("A", "B") if part.startswith("text") else ("down", "up")
    factors = {sides[0]: torch.randn(2, 6), sides[1]: torch.randn(8, 2)}
    tensors = {
        f"{module}{end.format(side)}": own.clone()
        for module in (part + name, unet)
        for side, own in factors.items()
    }
    base = {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(8, 6)}
    base[f"{region}transformer.resblocks.0.mlp.c_fc.weight"] = torch.ones(8, 6)
    save_file(tensors, tmp_path / "style.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"names that are not read \('{region.partition('.')[0]}"
    ):
        applied(open_checkpoint(tmp_path / "style.safetensors").named_as(base), base)
    kept = {key: own for key, own in tensors.items() if not key.startswith(part)}
    save_file(kept, tmp_path / "copy.safetensors")
    named = open_checkpoint(tmp_path / "copy.safetensors").named_as(base)
    assert [*named.low_rank] == ["model.diffusion_model.input_blocks.0.0.weight"]


@pytest.mark.parametrize("alpha", [math.nan, -math.inf])
def test_a_scale_that_is_no_number_is_told_by_its_name(alpha: float, tmp_path: Path) -> None:
    save_file(kohya(alpha), file := tmp_path / "style.safetensors")
    adapter = open_checkpoint(file)
    assert isinstance(adapter, AdapterCheckpoint)
    with pytest.raises(
        CheckpointError,
        match=advice("is {}, and a scale is finite: fetch the file again, or train it"),
    ):
        applied(adapter.named_as(BASE), BASE)
    save_file(kohya(1.0), file)
    applied(open_checkpoint(file).named_as(BASE), BASE)


@pytest.mark.parametrize(
    "down, up",
    [
        ("unet.X.lora_A.weight", "unet.X.lora_B.weight"),
        ("unet.X.lora.down.weight", "unet.X.lora.up.weight"),
        ("X.lora_A.weight", "X.lora_B.weight"),
        ("unet.Y.processor.to_q_lora.down.weight", "unet.Y.processor.to_q_lora.up.weight"),
        ("base_model.model.X.lora_A.weight", "base_model.model.X.lora_B.weight"),
    ],
)
def test_files_of_diffusers(down: str, up: str, tmp_path: Path) -> None:
    names = [
        name.replace("X", "down_blocks.0.attentions.1.to_q").replace(
            "Y", "down_blocks.0.attentions.1"
        )
        for name in (down, up)
    ]
    factors = torch.randn(4, 6), torch.randn(8, 4)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(dict(zip(names, factors, strict=True)), file)
    adapter = open_checkpoint(file)
    assert "taken as 1" in adapter.notes[0]
    result = applied(adapter.named_as(BASE), BASE)
    torch.testing.assert_close(
        result["down_blocks.0.attentions.1.to_q.weight"], 1 + factors[1] @ factors[0]
    )


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"lora_unet_a.lora_down.weight": torch.ones(2, 3)}, "not the factor that belongs"),
        ({"lora_unet_a.alpha": torch.ones(1)}, "has 'lora_unet_a.alpha' and not the factor"),
        ({"lora_unet_down_blocks_0_attentions_1_to_q.alpha": torch.ones(2)}, "not one number"),
        ({"lora_unet_a.p_layer.weight": torch.ones(2, 2)}, "T-LoRA, which begins as singular"),
        ({"lora_unet_a.a3.weight": torch.ones(2, 2)}, "of no kind that is read"),
        ({"some.weight": torch.ones(2, 2)}, "of no kind that is read"),
    ],
)
def test_files_by_themselves_that_do_not_fit(tensors, message: str, tmp_path: Path) -> None:
    save_file(kohya() | tensors, tmp_path / "style.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "style.safetensors")


def test_names_that_no_base_has(tmp_path: Path) -> None:
    save_file(kohya(), tmp_path / "style.safetensors")
    adapter = open_checkpoint(tmp_path / "style.safetensors")
    with pytest.raises(CheckpointError, match="the base has no such tensor"):
        adapter.named_as({"w": torch.ones(8, 6)})
    with pytest.raises(CheckpointError, match=r"resnets_0_conv1.*the base has no such tensor"):
        adapter.named_as({n: BASE[n] for n in ["down_blocks.0.attentions.1.to_q.weight"]})
    twice = BASE | {"down.blocks.0.attentions.1.to.q.weight": torch.ones(8, 6)}
    with pytest.raises(CheckpointError, match=r"could be .* or .* of the base"):
        adapter.named_as(twice)


@pytest.mark.parametrize(
    "fields, scale",
    [
        ({}, 1.0),
        ({"lora_alpha": 4}, 2.0),
        ({"lora_alpha": 4, "use_rslora": True}, 4 / math.sqrt(2)),
        ({"lora_alpha": 4, "alpha_pattern": {"a": 6}}, 3.0),
        ({"r": 8, "rank_pattern": {"a": 2}, "lora_alpha": 5}, 2.5),
    ],
)
@pytest.mark.parametrize("part", ["unet.", ""])
def test_scales_in_the_metadata_of_diffusers(fields, scale: float, part: str, tmp_path: Path):
    """They are those that diffusers loads: `save_lora_weights` has a prefix, `save_lora_adapter` none."""
    file = tmp_path / "pytorch_lora_weights.safetensors"
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=generator) for shape in ((2, 3), (4, 2))]
    tensors = {f"{part}a.lora_{side}.weight": own for side, own in zip("AB", factors, strict=True)}
    own = {"r": 2, "lora_alpha": 2, "use_rslora": False, "peft_type": "LORA"} | fields
    text = json.dumps({f"{part}{name}": value for name, value in own.items()})
    save_file(tensors, file, metadata={"lora_adapter_metadata": text})
    adapter = open_checkpoint(file)
    assert adapter.notes == ()
    update = adapter.read_factors(f"{part}a.weight").dense()
    torch.testing.assert_close(update, factors[1] @ factors[0] * scale)
    save_file({**tensors, f"{part}a.alpha": torch.ones(1)}, file, {"lora_adapter_metadata": text})
    with pytest.raises(CheckpointError, match=advice("save a copy without one of them")):
        open_checkpoint(file)


def test_models_with_lora_in_their_names_are_models(tmp_path: Path) -> None:
    save_file({"attn.w_lora.lora.0.weight": torch.ones(2, 2)}, tmp_path / "rwkv.safetensors")
    assert not isinstance(open_checkpoint(tmp_path / "rwkv.safetensors"), AdapterCheckpoint)


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def stacks_of(made: Made) -> AdapterCheckpoint:
    """The adapter beside its base, all of whose updates give what PEFT merges them to."""
    adapter = made.open().named_as(open_checkpoint(made.base).headers)
    for name, value in made.merged.items():
        if name not in adapter.low_rank:
            assert torch.equal(value, made.base[name])
            continue
        update = adapter.read_update(name)
        matrices = update if isinstance(update, tuple) else (update,)
        header = adapter.low_rank[name]
        assert header.shape == (value.shape[0], value[0].numel())
        assert {matrix.rank for matrix in matrices} == {header.rank}
        assert header.stacked == isinstance(update, tuple)
        product = torch.stack([matrix.dense() for matrix in matrices]).view(value.shape)
        torch.testing.assert_close(made.base[name] + product, value, rtol=1e-6, atol=1e-6)
    return adapter


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:]},
        {"target_parameters": EXPERTS, "use_rslora": True},
        {"target_parameters": EXPERTS, "target_modules": []},
        {
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 2, "0.mlp.experts.gate_up_proj": 4},
            "alpha_pattern": {r".*gate_up_proj": 7, "q_proj": 9},
        },
    ],
    ids=["inner", "outer", "both", "alone", "patterns"],
)
def test_stacks_of_experts(build, options, tmp_path: Path) -> None:
    made = make(build, lora(**{"target_modules": ["q_proj"]} | options), tmp_path)
    adapter = stacks_of(made)
    others = len(made.open().low_rank) - len(adapter.low_rank)
    assert others == 0 and len(adapter.low_rank) == 2 * (
        len(options["target_parameters"]) + (options.get("target_modules") != [])
    )


def test_a_router_beside_its_experts_has_another_name_in_the_files(tmp_path: Path) -> None:
    """PEFT makes parameters of all three where "all-linear" is asked for."""
    made = make(mixtral, lora(target_modules="all-linear"), tmp_path)
    in_files = "model.layers.0.block_sparse_moe.gate.weight"
    in_memory = in_files.replace("block_sparse_moe", "mlp")
    base = {n.replace("mlp.gate", "block_sparse_moe.gate"): own for n, own in made.base.items()}
    adapter = made.open().named_as(open_checkpoint(base).headers)
    update = adapter.read_factors(in_files).dense()
    torch.testing.assert_close(base[in_files] + update, made.merged[in_memory])


def test_rows_of_a_stack_are_its_matrices(tmp_path: Path) -> None:
    made = make(gpt_oss, lora(target_modules=[], target_parameters=EXPERTS), tmp_path)
    adapter = made.open().named_as(open_checkpoint(made.base).headers)
    name = "model.layers.1.mlp.experts.down_proj"
    factors = load_file(tmp_path / WEIGHTS)
    held = sum(value.numel() for key, value in factors.items() if "layers.1" in key)
    assert adapter.low_rank[name].elements == held
    whole, last = adapter.read_update(name), adapter.read_update(name, range(1, 3))
    assert len(whole) == 3 and len(last) == 2
    assert all(
        torch.equal(one.dense(), other.dense()) for one, other in zip(whole[1:], last, strict=True)
    )
    with pytest.raises(CheckpointError, match="stack of 3 matrices"):
        adapter.read_factors(name)


def test_a_stack_needs_its_base(tmp_path: Path) -> None:
    made = make(mixtral, lora(target_modules=[], target_parameters=EXPERTS), tmp_path)
    alone = made.open()
    assert "model.layers.0.mlp.experts.base_layer" in alone.low_rank
    said = advice("are to it, only the base tells: pass the adapter together with its base")
    with pytest.raises(CheckpointError, match=said):
        alone.read_factors("model.layers.0.mlp.experts.base_layer")
    assert made.open().named_as(open_checkpoint(made.base).headers).low_rank
    other = open_checkpoint({"model.layers.0.w": torch.ones(2)}).headers
    assert alone.named_as(other).low_rank == alone.low_rank


def square(model):
    """A model of experts whose hidden and inner sizes are the same, as those of GPT-OSS 20B."""

    def build():
        config = model().config
        config.intermediate_size = config.hidden_size
        return type(model())(config)

    return build


@pytest.mark.parametrize("model", [mixtral, gpt_oss])
def test_a_square_stack_lies_as_the_one_beside_it(model, tmp_path: Path) -> None:
    both = lora(target_modules=[], target_parameters=EXPERTS)
    stacks_of(make(square(model), both, tmp_path / "both"))
    one = lora(target_modules=[], target_parameters=EXPERTS[1:])
    made = make(square(model), one, tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"more than one way.*merge_and_unload"):
        made.open().named_as(open_checkpoint(made.base).headers)


def test_factors_as_peft_laid_them_before_0_19(tmp_path: Path) -> None:
    """It took every stack for (experts, d_in, d_out), whichever way its class meant it."""
    made = make(mixtral, lora(target_modules=[], target_parameters=EXPERTS[1:]), tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    experts, d_out, d_in = made.base[name].shape
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(3 * experts, d_out, generator=generator)
    up = torch.randn(d_in, 3 * experts, generator=generator)
    stem = "base_model.model.model.layers.0.mlp.experts"
    tensors = load_file(tmp_path / WEIGHTS)
    tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    save_file(tensors, tmp_path / WEIGHTS)
    adapter = made.open().named_as(open_checkpoint(made.base).headers)
    expected = torch.einsum("ore,eri->eio", up.view(d_in, 3, experts), down.view(experts, 3, d_out))
    update = torch.stack([matrix.dense() for matrix in adapter.read_update(name)])
    torch.testing.assert_close(update, expected * 5 / 3)


@pytest.mark.parametrize(
    "fields, by_expert",
    [
        ({"lora_B_layout": "rank_major"}, False),
        ({"lora_B_layout": "grouped_by_expert"}, True),
        ({"lora_B_layout": "expert_major"}, True),
        ({"auto_mapping": {"lora_B_layout": "grouped_by_expert"}}, True),
        (
            {
                "unsloth_fused_expert_lora": {
                    "parameters": {"down_proj": {"lora_B_layout": "grouped_by_expert"}}
                }
            },
            True,
        ),
        (
            {"auto_mapping": {"unsloth_fixed": True, "parent_library": "x.models.qwen2_moe.y"}},
            False,
        ),
    ],
    ids=lambda value: "",
)
def test_experts_as_unsloth_lays_them(fields, by_expert: bool, tmp_path: Path) -> None:
    """Its `lora_B_layout` says whether B's columns lie expert after expert; PEFT reads rank-major."""
    made = make(mixtral, lora(target_modules=[], target_parameters=EXPERTS[1:]), tmp_path)
    if by_expert:
        regroup(tmp_path, experts=3)
    change(tmp_path, **fields)
    stacks_of(made)


@pytest.mark.parametrize(
    "library",
    ["transformers.models.mixtral.modeling_mixtral", "unsloth_compiled_module_mixtral"],
)
def test_experts_of_an_older_unsloth_are_not_folded_without_a_word(
    library: str, tmp_path: Path
) -> None:
    made = make(mixtral, lora(target_modules=[], target_parameters=EXPERTS[1:]), tmp_path)
    told = {"unsloth_fixed": True, "parent_library": library}
    change(tmp_path, auto_mapping=told, lora_B_layout="rank_major")
    assert not stacks_of(made).notes
    regroup(tmp_path, experts=3)
    change(tmp_path, lora_B_layout=None)
    said = '"lora_B_layout": "rank_major" in adapter_config.json takes them as PEFT\'s'
    assert any(said in note for note in stacks_of(made).notes)
    change(tmp_path, lora_B_layout="mixed")
    with pytest.raises(
        CheckpointError, match="lora_B_layout = 'mixed', and rank_major and grouped"
    ):
        stacks_of(made)


def regroup(folder: Path, experts: int) -> None:
    """Lay the columns of every B expert after expert."""
    tensors = load_file(folder / WEIGHTS)
    for name, value in tensors.items():
        if "lora_B" in name:
            tensors[name] = value.unflatten(1, (-1, experts)).mT.flatten(1).contiguous()
    save_file(tensors, folder / WEIGHTS)


STACK = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            {f"{STACK}.lora_A.weight": (8, 20), f"{STACK}.lora_B.weight": (16, 8)},
            r"lora_A.weight' \[8, 20\], are not those of .*down_proj' \[3, 16, 20\] \(rank 3, 9 terms",
        ),
        (
            {f"{STACK}.lora_A.weight": (6, 20), f"{STACK}.lora_B.weight": (16, 6)},
            advice("or the adapter is of another base. Fetch it again, or pass its base"),
        ),
        (
            {f"{STACK}.lora_A.weight": (9, 21), f"{STACK}.lora_B.weight": (16, 9)},
            "of another base",
        ),
        ({f"{STACK}.lora_A.weight": (9, 20), f"{STACK}.lora_B.weight": (16, 8)}, "does not fit"),
        ({f"{STACK}.lora_B.bias": (16,)}, "which PEFT has for no parameter"),
        (
            {
                f"{STACK}.base_layer.base_layer.lora_A.weight": (9, 20),
                f"{STACK}.base_layer.base_layer.lora_B.weight": (16, 9),
            },
            "are not those of",
        ),
        (
            {f"{STACK}.base_layer.lora_A.weight": None, f"{STACK}.base_layer.lora_B.weight": None},
            "are not those of",
        ),
        (
            {f"{STACK}.down_proj": (3, 16, 20)},
            advice("whole, and factors for it: the adapter is damaged, fetch it again"),
        ),
    ],
)
def test_stacks_that_do_not_fit(tensors, message: str, tmp_path: Path) -> None:
    made = make(mixtral, lora(target_modules=[], target_parameters=EXPERTS), tmp_path)
    intact = load_file(tmp_path / WEIGHTS)
    stored = intact | {name: shape and torch.ones(shape) for name, shape in tensors.items()}
    save_file({k: v for k, v in stored.items() if v is not None}, tmp_path / WEIGHTS)
    base = open_checkpoint(made.base).headers
    with pytest.raises(CheckpointError, match=message):
        made.open().named_as(base)
    save_file(intact, tmp_path / WEIGHTS)
    assert made.open().named_as(base).low_rank


def gguf_of(
    made: Made,
    file: Path,
    architecture: str = "llama",
    heads: tuple[int, int] = (4, 2),
    *,
    alpha: float | None = 5.0,
    quantised: bool = False,
) -> None:
    """Write PEFT's factors as llama.cpp's convert_lora_to_gguf.py does: its names, and q's and k's rows."""
    gguf = pytest.importorskip("gguf")
    (kind,) = (own for own, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, 3)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in load_file(made.folder / WEIGHTS).items():
        module, side = re.fullmatch(
            r"base_model\.model\.(.*)\.lora_(?:embedding_)?([AB]).*", key
        ).groups()
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if side == "B" and architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            value = value.view(heads["attn_k." in name], 2, -1, value.shape[1])
            value = value.transpose(1, 2).flatten(0, 2)
        turned = value.T if name == "token_embd.weight" and side == "A" else value
        stored, kind = turned.contiguous().numpy(), None
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quantize(torch.zeros(3, 32).numpy(), kind)
        writer.add_tensor(f"{name}.lora_{side.lower()}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("build, architecture", [(llama, "llama"), (qwen2, "qwen2")])
def test_a_lora_of_llama_cpp(build, architecture: str, tmp_path: Path) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"]
    config = lora(target_modules=targets, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 5})
    made = make(build, config, tmp_path / "peft", save_embedding_layers=False)
    gguf_of(made, tmp_path / "lora.gguf", architecture)
    build().save_pretrained(tmp_path / "base")
    save_file(made.base, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    found = covmerge.merge(tmp_path / "base", {"a": tmp_path / "lora.gguf"}, "linear").tensors
    for name, value in made.merged.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_a_lora_of_llama_cpp_that_cannot_be_read(tmp_path: Path) -> None:
    """Plain numbers, an alpha, the base's config, or the adapter before it was converted."""
    made = make(llama, lora(target_modules=["q_proj"]), tmp_path / "peft")
    file, base = tmp_path / "lora.gguf", tmp_path / "base"

    def refused(said: str) -> None:
        with pytest.raises(CheckpointError, match=said):
            covmerge.merge(made.base, {"a": file}, "linear")

    gguf_of(made, file, quantised=True)
    refused(advice("is quantised: convert the adapter with --outtype f32"))
    gguf_of(made, file, alpha=None)
    refused(advice("and a LoRA with a number is read: convert it again"))
    gguf_of(made, file, "qwen2")
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"qwenX"))
    refused(
        "'qwenX', and those that are read.*"
        + advice("merge the adapter that it was converted from")
    )
    gguf_of(made, file)
    refused(advice("pass the base with its config.json, or {}"))
    llama().save_pretrained(base)
    save_file(made.base, base / "model.safetensors", {"format": "pt"})
    for adapter in (file, made.folder):
        found = covmerge.merge(base, {"a": adapter}, "linear").tensors
        for name, value in made.merged.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_a_table_beside_its_trained_tokens(tmp_path: Path) -> None:
    """PEFT stores the whole table where the vocabulary was resized; that was refused."""
    config = lora(target_modules=["q_proj"], trainable_token_indices=[3, 4])
    made = make(llama, config, tmp_path, save_embedding_layers=True)
    assert any(".token_adapter.base_layer.weight" in name for name in load_file(tmp_path / WEIGHTS))
    found = covmerge.merge(made.base, {"a": tmp_path}, "linear").tensors
    for name, value in made.merged.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
