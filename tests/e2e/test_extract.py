"""A full fine-tune as an adapter: loaded by PEFT it is the fine-tune, but for what is said to be lost."""

import copy
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.errors import CheckFailed, InputError
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.e2e.models import build, fine_tuned, run
from tests.e2e.test_adapter_output import base_of, experts
from tests.e2e.test_adapters import family, save_adapter  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore:fan_in_fan_out",
    "ignore:Model has `tie_word_embeddings",
    "ignore:Input and output embeddings",
)


MORE = {
    # Two tied matrices, and two tied biases in one of their modules.
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(
            vocab_size=64,
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=24,
            max_position_embeddings=34,
        )
    ),
    # Positions in a subclass of nn.Embedding, which is called with a mask.
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=64,
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            ffn_dim=24,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
        )
    ),
}


def build_any(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in MORE:
            return MORE[name]().eval()
        if name != "tied":
            return build(name)
        config = build("llama").config
        config.tie_word_embeddings = True
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(params=["llama", "tied", "gpt2", "bert", "vit", "mixtral", *MORE])
def pair(request, tmp_path):
    base = build_any(request.param)
    base.save_pretrained(tmp_path / "base")
    fine_tuned(base, seed=1).save_pretrained(tmp_path / "expert")
    return tmp_path


NO_PLACE = ("cls_token", "position_embeddings", "experts.gate_up_proj", "experts.down_proj")


def test_at_full_rank_with_everything_held_whole_it_is_the_expert(pair):
    out = pair / "lora"
    ran = command("extract", pair / "base", pair / "expert", out, "--rank=999", "--whole", "--json")
    adapted = peft.PeftModel.from_pretrained(base_of(pair), out).eval()
    logits = run(adapted)
    merged = adapted.merge_and_unload()
    assert (run(merged) - logits).abs().max() <= 1e-4 * logits.abs().max()
    expert = type(merged).from_pretrained(pair / "expert").state_dict()
    wrong = [
        n
        for n, v in merged.state_dict().items()
        if n in expert and (v - expert[n]).abs().max() > 1e-5
    ]
    # PEFT has no place for parameters of a module that has modules inside, nor for stacks that
    # are stored expert by expert.
    assert wrong == [n for n in wrong if n.endswith(NO_PLACE)]
    totals = ran.json["totals"]
    assert totals["discarded_energy"] == pytest.approx(0.0, abs=1e-6)
    assert (totals["left_out_energy"] > 0) == bool(wrong)
    assert any("not in the adapter" in note for note in ran.json["notes"]) == bool(wrong)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(pair / "base")


def test_what_is_lost_is_said(pair):
    out = pair / "lora"
    result = covmerge.extract(pair / "base", pair / "expert", out, rank=2)
    base = load_file(pair / "base" / "model.safetensors")
    expert = load_file(pair / "expert" / "model.safetensors")
    kept = load_file(out / "adapter_model.safetensors")
    assert all("lora_" in name for name in kept)
    energy = {name: float((expert[name].double() - base[name]).square().sum()) for name in base}
    lost = outside = 0.0
    for name, entry in result.stats["tensors"].items():
        if "left_out" in entry:
            outside += energy[name]
            continue
        sigma = torch.linalg.svdvals(
            (expert[name].double() - base[name]).reshape(len(base[name]), -1)
        )
        own = float(sigma[2:].square().sum())
        assert entry["adapter"]["discarded_energy"] == pytest.approx(own / energy[name], abs=1e-5)
        lost += own
    total = sum(energy.values())
    assert result.stats["totals"]["discarded_energy"] == pytest.approx(lost / total, rel=1e-4)
    assert result.stats["totals"]["left_out_energy"] == pytest.approx(outside / total, rel=1e-4)
    assert any("whole=True" in note for note in result.notes)
    peft.PeftModel.from_pretrained(base_of(pair), out)


def test_an_expert_that_changed_no_layer(tmp_path):
    """The change is what is held whole; without it the adapter would be empty."""
    base = {"h.0.fc.weight": torch.randn(4, 4), "h.0.ln.weight": torch.ones(4)}
    expert = {**base, "h.0.ln.weight": torch.full((4,), 1.5)}
    said = advice(", and what changed has no place in it: --whole holds that whole")
    with pytest.raises(CheckFailed, match=f"every update is zero{said}"):
        covmerge.extract(base, expert, tmp_path / "lora", rank=2)
    out = covmerge.extract(base, expert, tmp_path / "lora", rank=2, whole=True).path
    merged = covmerge.merge(base, {"lora": out}).tensors
    assert torch.equal(merged["h.0.ln.weight"], expert["h.0.ln.weight"])


TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
RANKS = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
UNUSUAL = {
    # Its layers are of a subclass of nn.Linear.
    "falcon": (transformers.FalconForCausalLM, {"bos_token_id": 1, "eos_token_id": 2}),
    # PEFT takes dense and shared layers for the packed experts, whose names they have.
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        {**RANKS, "v_head_dim": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
        | {"topk_group": 1, "intermediate_size": 24, "moe_intermediate_size": 12}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 2},
    ),
    # transformers writes an infinite number of its config as {"__float__": "Infinity"}.
    "mamba2": (
        transformers.Mamba2ForCausalLM,
        {
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "state_size": 4,
            "tie_word_embeddings": True,
        },
    ),
}
# transformers reads the weights of dt_proj and of WavLM's attention past PEFT's layers.
UNUSUAL |= {
    "jamba": (
        transformers.JambaForCausalLM,
        {"num_key_value_heads": 2, "intermediate_size": 24, "num_experts": 1}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "initializer_range": 0.5}
        | {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "wavlm": (
        transformers.WavLMForCTC,
        {"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
        | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_buckets": 8},
    ),
}
LAYERS = {"falcon": 8, "deepseek_v3": 18, "mamba2": 2, "jamba": 15, "wavlm": 8}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT reads it all the same
@pytest.mark.parametrize("name", UNUSUAL)
def test_peft_changes_every_layer_that_was_extracted(tmp_path, name):
    kind, sizes = UNUSUAL[name]
    torch.manual_seed(0)
    base = kind(kind.config_class(**TEXT, **sizes)).eval()
    base.save_pretrained(tmp_path / "base")
    expert = fine_tuned(base, seed=1)
    expert.save_pretrained(tmp_path / "expert")
    made = covmerge.extract(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=99)
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert not [note for note in made.notes if "roles come from name rules" in note]
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").eval()
    given = torch.arange(2, 14).reshape(2, 6)
    if name == "wavlm":
        given = torch.randn(2, 400)
    with torch.no_grad():
        there = model(given).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(there, merged(given).logits, rtol=1e-4, atol=1e-4)
    found, wanted = merged.state_dict(), expert.state_dict()
    changed = [n for n, value in base.state_dict().items() if not torch.equal(found[n], value)]
    assert len(changed) == len(factors) / 2 == LAYERS[name]
    for layer in changed:
        torch.testing.assert_close(found[layer], wanted[layer], rtol=0, atol=1e-5)
    again = covmerge.merge(tmp_path / "base", {"lora": tmp_path / "lora"}, "average").tensors
    for layer in changed:
        torch.testing.assert_close(again[layer], wanted[layer], rtol=0, atol=1e-5)


def test_rules_leave_tensors_to_the_base(pair):
    rules = [{"match": "*weight", "use": "base"}]
    with pytest.raises(InputError, match=r"layer that an adapter updates|nothing to merge"):
        covmerge.extract(pair / "base", pair / "expert", pair / "lora", rank=2, rules=rules)
    assert not (pair / "lora").exists()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_what_adapters_trained_whole_stays_whole(name, tmp_path):
    """Norms by modules_to_save, biases of all layers, a bias of the factors."""
    options = {
        "bert": {"targets": ["query"], "modules_to_save": ["output.LayerNorm"], "bias": "all"},
        "llama": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]},
        "gpt2": {"targets": ["c_attn"], "modules_to_save": ["ln_f"], "bias": "lora_only"},
    }[name]
    base = build(name)
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2, 3):
        save_adapter(base, tmp_path / f"e{number}", seed=number, move=True, **options)
    sources = [f"--expert={n}={path}" for n, path in experts(tmp_path, "adapter").items()]
    command(
        "merge",
        "--base",
        tmp_path / "base",
        *sources,
        "--as=adapter",
        "--method=actmat",
        tmp_path / "out",
    )
    merged = covmerge.merge(tmp_path / "base", experts(tmp_path, "adapter"), "actmat").tensors
    plain = load_file(tmp_path / "base" / "model.safetensors")
    held = json.loads((tmp_path / "out" / "covmerge.json").read_text("utf-8"))["tensors"]
    assert any("rank" not in entry["adapter"] for entry in held.values())
    own = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "out").merge_and_unload()
    weights = own.state_dict()
    changed = 0
    for key, value in merged.items():
        found = weights.get(key, weights.get(f"transformer.{key}"))
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
        changed += not torch.equal(value, plain[key])
    assert changed > 2


def test_extracted_adapters_are_experts_again(pair):
    """What PEFT stores once for each of two tied names is one tensor, and no task head."""
    fine_tuned(base_of(pair), seed=2).save_pretrained(pair / "other")
    full = {name: pair / name for name in ("expert", "other")}
    lora = {name: pair / f"{name}-lora" for name in full}
    for name, source in full.items():
        covmerge.extract(pair / "base", source, lora[name], rank=999, whole=True)
    result = covmerge.merge(pair / "base", lora, "average")
    assert not result.heads
    expected = covmerge.merge(pair / "base", full, "average").tensors
    base = load_file(pair / "base" / "model.safetensors")
    for name, value in result.tensors.items():
        left_out = name.endswith(NO_PLACE[:2]) or ".experts." in name
        wanted = base[name] if left_out else expected[name]
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_a_base_tensor_completes_a_module_that_is_held_whole(pair):
    rules = [{"match": "*norm*.bias", "use": "base"}, {"match": "*Norm*.bias", "use": "base"}]
    result = covmerge.extract(
        pair / "base", pair / "expert", pair / "lora", rank=2, whole=True, rules=rules
    )
    assert result.verification.ok
    peft.PeftModel.from_pretrained(base_of(pair), pair / "lora")


def test_a_parametrised_weight_is_left_out(tmp_path):
    """PEFT replaces no list of modules, which torch keeps the parts of a normalised weight in."""
    config = transformers.Wav2Vec2Config(
        **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (4,)},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    )
    base = transformers.Wav2Vec2ForCTC(config)
    base.save_pretrained(tmp_path / "base")
    fine_tuned(base, seed=1).save_pretrained(tmp_path / "expert")
    result = covmerge.extract(
        tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=16, whole=True
    )
    assert any("parametrizations.weight.original0" in note for note in result.notes)
    own = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "lora").merge_and_unload()
    found = own.state_dict()
    for name, wanted in load_file(tmp_path / "expert" / "model.safetensors").items():
        if "parametrizations" not in name and not name.endswith("masked_spec_embed"):
            torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)


def test_a_larger_vocabulary(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    expert = fine_tuned(base, seed=1)
    expert.resize_token_embeddings(70, mean_resizing=False)
    expert.save_pretrained(tmp_path / "expert")
    vocabulary = {"vocabulary": "base"}
    covmerge.extract(
        tmp_path / "base", tmp_path / "expert", tmp_path / "lora", 999, tensors=vocabulary
    )
    merged = covmerge.merge(
        tmp_path / "base", [tmp_path / "expert"], "average", tensors=vocabulary
    ).tensors
    own = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "lora").merge_and_unload()
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(own.state_dict()[name], merged[name], rtol=1e-5, atol=1e-6)
