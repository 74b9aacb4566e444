"""Models whose output layer is their embedding, and experts that changed one of the two."""

import copy
import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, CovmergeError, InputError
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.forked import fork_workers

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.arange(3, 13)[None]
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SPEECH = {
    **{"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 1,
}
# By family: class, config, a layer of attention, the embedding and the output layer.
FAMILIES = {
    "llama": ("LlamaForCausalLM", {**TEXT}, "q_proj", "embed_tokens", "lm_head"),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2},
        *("c_attn", "wte", "lm_head"),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SPEECH, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16},
        *("q_proj", "embed_tokens", "proj_out"),
    ),
    "bart": (
        "BartForConditionalGeneration",
        {**SPEECH, "max_position_embeddings": 16},
        *("q_proj", "shared", "lm_head"),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        *("q", "shared", "lm_head"),
    ),
    "mt5": (
        "MT5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        *("q", "shared", "lm_head"),
    ),
    "bert": ("BertForMaskedLM", {**TEXT}, "query", "word_embeddings", "decoder"),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "num_key_value_heads": 1, "head_dim": 8},
            "vision_config": {**TEXT, "image_size": 8, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "image_token_index": 39,
        },
        *("q_proj", "embed_tokens", "lm_head"),
    ),
}


def built(family, *, tied=True):
    name, fields, *_ = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**copy.deepcopy(fields), tie_word_embeddings=tied))
    return moved(model, 0.05)


def moved(model, size=0.1, only=""):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter += size * torch.randn_like(parameter)
    return model.eval()


def logits(model):
    given = {"input_ids": IDS}
    if model.config.model_type == "whisper":
        sound = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
        given = {"input_features": sound}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = IDS
    with torch.no_grad():
        return model(**given).logits


def trained(base, folder, *, seed=1, embeddings="auto", **how):
    """An adapter as PEFT trains and saves it; what it computes before any merge."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, lora_alpha=4, **how)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return logits(model)


def loaded(folder, family="llama"):
    return getattr(transformers, FAMILIES[family][0]).from_pretrained(folder).eval()


def assert_computes(model, wanted):
    assert (logits(model) - wanted).norm() <= 1e-5 * wanted.norm()


def is_tied(folder):
    return json.loads((folder / "config.json").read_text("utf-8"))["tie_word_embeddings"]


def set_in(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | fields), "utf-8")


# What of the pair has factors, and what was trained whole.
KINDS = {
    "factors of the embedding": ("e", ""),
    "factors of the head": ("h", ""),
    "factors of both": ("eh", ""),
    "the embedding whole": ("", "e"),
    "the head whole": ("", "h"),
    "both whole": ("", "eh"),
    "factors of one, the other whole": ("e", "h"),
}
CASES = [("llama", kind) for kind in KINDS] + [
    ("gpt2", "factors of the head"),
    ("whisper", "the head whole"),
    ("whisper", "factors of the embedding"),
    ("bart", "factors of the embedding"),
    ("bert", "the head whole"),
    ("gemma3", "factors of the head"),
]


def targets(family, factors, whole):
    *_, layer, embedding, head = FAMILIES[family]
    names = {"e": embedding, "h": head}
    saved = [names[which] for which in whole]
    return {
        "target_modules": [layer, *(names[which] for which in factors)],
        "modules_to_save": saved or None,
    }


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_adapter_of_one_of_a_tied_pair(family, kind, tmp_path):
    """The model, and the adapter, compute what PEFT's unmerged model does."""
    base = built(family)
    base.save_pretrained(tmp_path / "base")
    wanted = trained(base, tmp_path / "lora", **targets(family, *KINDS[kind]))
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    merged = covmerge.merge(*given, tmp_path / "out")
    assert not is_tied(tmp_path / "out") and not merged.heads
    assert any("ties them" in note for note in merged.notes)
    assert_computes(loaded(tmp_path / "out", family), wanted)
    covmerge.merge(*given, tmp_path / "adapter", form="adapter")
    assert not (tmp_path / "adapter" / "heads").exists()
    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "base", family), tmp_path / "adapter")
    assert_computes(again.eval(), wanted)


@pytest.mark.parametrize(
    ("family", "factors", "whole"),
    [("llama", "e", ""), ("llama", "", "e"), ("gpt2", "h", "")],
)
def test_what_was_trained_as_one_stays_one(family, factors, whole, tmp_path):
    """By PEFT's `ensure_weight_tying`."""
    base = built(family)
    base.save_pretrained(tmp_path / "base")
    how = {**targets(family, factors, whole), "ensure_weight_tying": True}
    wanted = trained(base, tmp_path / "lora", **how)
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    covmerge.merge(*given, tmp_path / "out")
    assert is_tied(tmp_path / "out")
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(tmp_path / "base" / "model.safetensors").keys()
    )
    assert_computes(loaded(tmp_path / "out", family), wanted)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embeddings", ["auto", False])
@pytest.mark.parametrize("begun", ["pissa", "olora", "kasa"])
def test_a_head_of_which_peft_takes_a_part_away(begun, embeddings, tied, tmp_path):
    """From the one tensor that it is with the embedding, and not from what the file has whole."""
    base = built("llama", tied=tied)
    base.save_pretrained(tmp_path / "base")
    how = {"kasa_config": peft.KasaConfig()} if begun == "kasa" else {"init_lora_weights": begun}
    how = {**targets("llama", "h", ""), **how}
    wanted = trained(base, tmp_path / "lora", embeddings=embeddings, **how)
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    covmerge.merge(*given, tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)
    covmerge.merge(*given, tmp_path / "adapter", form="adapter", rank=60)
    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter")
    assert_computes(again.eval(), wanted)


def test_lengths_of_what_was_trained_as_one(tmp_path):
    """Those of DoRA are of columns in the embedding, and of rows in the head."""
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("llama", "e", ""), "ensure_weight_tying": True, "use_dora": True}
    wanted = trained(base, tmp_path / "lora", **how)
    covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)


def test_both_of_which_peft_takes_a_part_away(tmp_path):
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("llama", "eh", ""), "init_lora_weights": "pissa"}
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    trained(base, tmp_path / "lora", embeddings=False, **how)
    said = advice("save the adapter again with whole embeddings (save_embedding_layers=True)")
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(*given, tmp_path / "out")
    wanted = trained(base, tmp_path / "lora", embeddings=True, **how)
    covmerge.merge(*given, tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)


@pytest.mark.parametrize("rows", [{"lm_head": [3, 1]}, {"embed_tokens": [3, 1], "lm_head": [3, 5]}])
def test_trained_rows_of_a_tied_head(rows, tmp_path):
    """PEFT leaves to the head what it trains of the embedding alone, and no other rows."""
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("llama", "", ""), "trainable_token_indices": rows}
    wanted = trained(base, tmp_path / "lora", **how)
    covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)


def test_trained_rows_are_part_of_a_merged_adapter(tmp_path):
    """They have no factors, and were left out with a note."""
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("llama", "", ""), "trainable_token_indices": [3, 1]}
    wanted = trained(base, tmp_path / "lora", **how)
    given = tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out"
    covmerge.merge(*given, form="adapter")
    merged = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "out")
    assert_computes(merged, wanted)


def test_trained_rows_beside_factors_of_a_tied_head(tmp_path):
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("llama", "h", ""), "trainable_token_indices": [3, 1]}
    trained(base, tmp_path / "lora", **how)
    said = advice('Store both in the base, with "{}": false in its config.json, and train over it')
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    built("llama", tied=False).save_pretrained(tmp_path / "base")
    wanted = trained(loaded(tmp_path / "base"), tmp_path / "lora", **how)
    covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("other", [("h", ""), ("e", ""), ("", "e")], ids=str)
@pytest.mark.parametrize("kind", ["rows", "factors", "whole"])
def test_what_stays_tied_beside_an_expert_that_unties(kind, other, tmp_path):
    """Rows that PEFT trains, and embeddings that mlx-lm does, change the head as they do alone."""
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    start = load_file(tmp_path / "base" / "model.safetensors")[EMBED]
    if kind == "rows":
        how = {**targets("llama", "", ""), "trainable_token_indices": [3, 1]}
        trained(base, tmp_path / "kept", **how)
    else:
        (tmp_path / "kept").mkdir()
        down, up = torch.randn(40, 2), torch.randn(2, 16)
        of_mlx = {f"{EMBED.removesuffix('.weight')}.lora_a": down}
        of_mlx[f"{EMBED.removesuffix('.weight')}.lora_b"] = up
        of_mlx = of_mlx if kind == "factors" else {EMBED: start + down @ up}
        save_file(of_mlx, tmp_path / "kept" / "adapters.safetensors")
        fields = {"fine_tune_type": {"factors": "lora", "whole": "full"}[kind]}
        fields["lora_parameters"] = {"rank": 2, "scale": 1.0, "dropout": 0.0}
        (tmp_path / "kept" / "adapter_config.json").write_text(json.dumps(fields), "utf-8")
    trained(base, tmp_path / "other", seed=2, **targets("llama", *other))
    merged, experts = {}, {name: tmp_path / name for name in ("kept", "other")}
    for name, which in {**{n: {n: e} for n, e in experts.items()}, "both": experts}.items():
        covmerge.merge(tmp_path / "base", which, "average", tmp_path / f"out-{name}")
        held = load_file(tmp_path / f"out-{name}" / "model.safetensors")
        merged[name] = [(held[n] if n in held else held[EMBED]) - start for n in (EMBED, HEAD)]
    assert is_tied(tmp_path / "out-kept") and not is_tied(tmp_path / "out-both")
    for of_kept, of_other, of_both in zip(*merged.values(), strict=True):
        torch.testing.assert_close(of_both, (of_kept + of_other) / 2, rtol=0, atol=1e-6)
    assert command("verify", tmp_path / "out-both", "--deep").code == 0


def test_a_tied_head_that_peft_runs_without_its_bias(tmp_path):
    """PEFT 0.21.2's layer of trained rows passes over the bias of the linear layer in it."""
    base = built("bert")
    base.save_pretrained(tmp_path / "base")
    how = {**targets("bert", "", ""), "trainable_token_indices": {"word_embeddings": [3, 1]}}
    wanted = trained(base, tmp_path / "lora", **how) + base.cls.predictions.bias.detach()
    covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    assert_computes(loaded(tmp_path / "out", "bert"), wanted)


def test_a_model_that_is_another_when_untied(tmp_path):
    """T5 scales what its head is given by the key that says that it is tied; the advice is followed."""
    base = built("t5")
    base.save_pretrained(tmp_path / "base")
    wanted = trained(base, tmp_path / "lora", **targets("t5", "h", ""))
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    with pytest.raises(
        InputError,
        match=advice("which is the same model, untied; or merge to an adapter (--as adapter)"),
    ):
        covmerge.merge(*given)
    covmerge.merge(*given, tmp_path / "adapter", form="adapter")
    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "base", "t5"), tmp_path / "adapter")
    assert_computes(again.eval(), wanted)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    shared = weights["shared.weight"]
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD):
        weights[name] = shared.clone()
    weights["decoder.final_layer_norm.weight"] *= base.config.d_model**-0.5
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    set_in(tmp_path / "base", tie_word_embeddings=False, scale_decoder_outputs=False)
    covmerge.merge(*given, tmp_path / "out")
    assert_computes(loaded(tmp_path / "out", "t5"), wanted)


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_a_head_of_its_own_that_a_config_calls_tied(tmp_path, kind):
    """transformers 5.23.0 writes so of every T5, Flan-T5 too; 4.57.1 wrote false, as the base has it."""
    base, again, expert = (tmp_path / name for name in ("base", "again", "expert"))
    built(kind).save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    weights[HEAD] = torch.randn(weights["shared.weight"].shape)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text("utf-8"))
    config.pop("scale_decoder_outputs", None)
    (base / "config.json").write_text(json.dumps(config), "utf-8")
    set_in(base, tie_word_embeddings=False)
    loaded(base, kind).save_pretrained(again)
    tuned = moved(loaded(base, kind), 0.01)
    tuned.save_pretrained(expert)
    assert is_tied(expert) and HEAD in load_file(expert / "model.safetensors")
    wanted = logits(tuned)
    report = str(covmerge.inspect(base, {"x": expert}).table())
    assert "tie_word_embeddings" not in report
    for start in (base, again):
        out = tmp_path / f"over-{start.name}"
        covmerge.merge(start, {"x": expert}, "average", out)
        assert_computes(loaded(out, kind), wanted)
        assert covmerge.verify(out).ok
    merged = covmerge.merge(base, {"x": tuned}, "average")
    torch.testing.assert_close(merged.tensors[HEAD], tuned.lm_head.weight.data)


def test_what_is_tied_whatever_the_config_says(tmp_path):
    base = built("t5")
    base.save_pretrained(tmp_path / "base")
    trained(base, tmp_path / "lora", **targets("t5", "e", ""))
    with pytest.raises(InputError, match=r"'shared.weight' differently, and transformers ties"):
        covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average")


@pytest.fixture
def pair(tmp_path):
    """A tied base, an expert that is tied, and one with a head of its own."""
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    moved(copy.deepcopy(base), 0.01).save_pretrained(tmp_path / "tied")
    own = built("llama", tied=False)
    own.load_state_dict(base.state_dict())
    moved(own, 0.01).save_pretrained(tmp_path / "own")
    return tmp_path


def updates(folder):
    """By expert, the updates of embedding and head in float64."""
    start = load_file(folder / "base" / "model.safetensors")[EMBED].double()
    found = {}
    for name in ("tied", "own"):
        held = load_file(folder / name / "model.safetensors")
        found[name] = [held[EMBED].double() - start, held.get(HEAD, held[EMBED]).double() - start]
    return start, found


def test_experts_of_both_kinds(pair, monkeypatch):
    """The one that is tied gives the same update to both tensors; in other processes too."""
    fork_workers(monkeypatch)
    experts = [f"--expert={name}={pair / name}" for name in ("tied", "own")]
    command(
        "merge", "--base", pair / "base", *experts, "--method=average", "--workers=2", pair / "out"
    )
    merged = load_file(pair / "out" / "model.safetensors")
    start, found = updates(pair)
    for place, name in enumerate((EMBED, HEAD)):
        wanted = start + (found["tied"][place] + found["own"][place]) / 2
        torch.testing.assert_close(merged[name].double(), wanted, rtol=0, atol=1e-6)
    assert not is_tied(pair / "out") and loaded(pair / "out").lm_head is not None
    assert command("verify", pair / "out", "--deep").code == 0


def test_the_order_of_experts_without_a_base(pair):
    """The first expert is the layout of the output, and is seen untied like a base."""
    experts = [pair / name for name in ("tied", "own")]
    for number, order in enumerate((experts, experts[::-1])):
        recipe = {
            "experts": {path.name: str(path) for path in order},
            "base": None,
            "method": "linear",
        }
        (pair / "recipe.yml").write_text(json.dumps(recipe), "utf-8")
        command("merge", pair / "recipe.yml", pair / f"out{number}")
        merged = load_file(pair / f"out{number}" / "model.safetensors")
        start, found = updates(pair)
        wanted = start + (found["tied"][1] + found["own"][1]) / 2
        torch.testing.assert_close(merged[HEAD].double(), wanted, rtol=0, atol=1e-6)


def test_a_base_that_stores_both(tmp_path):
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, HEAD: weights[EMBED].clone()}, file, {"format": "pt"})
    wanted = trained(base, tmp_path / "lora", **targets("llama", "h", ""))
    covmerge.merge(tmp_path / "base", {"x": tmp_path / "lora"}, "average", tmp_path / "out")
    assert_computes(loaded(tmp_path / "out"), wanted)


def test_a_state_dict_has_both_names(pair):
    """No config says what is tied in it: copies are one tensor, others are two."""
    for name, tied in (("tied", True), ("own", False)):
        state = loaded(pair / name).state_dict()
        assert HEAD in state
        merged = covmerge.merge(pair / "base", {"x": state}, "average")
        assert (HEAD not in merged.tensors) == tied and not merged.heads
        torch.testing.assert_close(merged.tensors[EMBED], state[EMBED])
        torch.testing.assert_close(merged.tensors.get(HEAD, state[HEAD]), state[HEAD])


def test_a_file_that_contradicts_its_config(pair):
    """The refusal's advice, followed, gives the model that transformers loads."""
    wanted = logits(loaded(pair / "own"))
    set_in(pair / "own", tie_word_embeddings=True)
    given = ("merge", "--base", pair / "base", f"--expert=x={pair / 'own'}", pair / "out")
    refused = command(*given, code=2)
    assert "ties 'lm_head.weight'" in refused.stderr and "tie_word_embeddings" in refused.stderr
    set_in(pair / "own", tie_word_embeddings=False)
    command(*given)
    assert_computes(loaded(pair / "out"), wanted)


@pytest.mark.parametrize("which", ["base", "own"])
def test_a_head_that_is_nowhere(pair, which):
    """A model whose config says that its head is its own, and which has none."""
    set_in(pair / which, tie_word_embeddings=False)
    file = pair / which / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if name != HEAD}
    save_file(weights, file, {"format": "pt"})
    given = (pair / "base", {"x": pair / "own"}, "average", pair / "out")
    with pytest.raises(
        InputError, match=r"stores no 'lm_head.weight'.*\"tie_word_embeddings\": true"
    ):
        covmerge.merge(*given)
    set_in(pair / which, tie_word_embeddings=True)
    covmerge.merge(*given)
    assert covmerge.verify(pair / "out").ok


def test_verify_knows_ties(pair):
    covmerge.merge(pair / "base", {"x": pair / "own"}, "average", pair / "out")
    assert covmerge.verify(pair / "out").ok
    set_in(pair / "out", tie_word_embeddings=True)
    assert "'lm_head.weight' differs from" in str(covmerge.verify(pair / "out").table())
    covmerge.merge(pair / "base", {"x": pair / "tied"}, "average", pair / "one")
    set_in(pair / "one", tie_word_embeddings=False)
    report = covmerge.verify(pair / "one")
    assert "'lm_head.weight' is not stored, and config.json ties it" in str(report.table())
    with pytest.raises(CheckFailed):
        report.raise_if_failed()


def test_ties_that_nobody_knows(pair):
    """Of a model that transformers does not know; what the refusal advises is followed."""
    wanted = trained(loaded(pair / "base"), pair / "lora", **targets("llama", "", "h"))
    for name in ("base", "own"):
        shutil.copytree(pair / name, pair / f"odd-{name}")
        set_in(pair / f"odd-{name}", model_type="odd", architectures=["Odd"])
    given = (pair / "odd-base", {"x": pair / "lora"}, "average", pair / "out")
    with pytest.raises(
        InputError,
        match=advice("if it does not know the model, store its head in the base too, with"),
    ):
        covmerge.merge(*given)
    weights = load_file(pair / "odd-base" / "model.safetensors")
    weights[HEAD] = weights[EMBED].clone()
    save_file(weights, pair / "odd-base" / "model.safetensors", {"format": "pt"})
    set_in(pair / "odd-base", tie_word_embeddings=False)
    covmerge.merge(*given)
    set_in(pair / "out", model_type="llama", architectures=["LlamaForCausalLM"])
    assert_computes(loaded(pair / "out"), wanted)


def test_an_expert_by_masks(pair):
    """A model for each expert, of one that unties the base."""
    covmerge.merge(pair / "base", {"x": pair / "own"}, "emr", pair / "out")
    held = covmerge.load_expert(pair / "out", "x", pair / "base")
    for name, value in load_file(pair / "own" / "model.safetensors").items():
        torch.testing.assert_close(held[name], value, rtol=0, atol=1e-6)


def test_packed_layers_beside_an_untied_head(tmp_path):
    base = built("llama")
    base.save_pretrained(tmp_path / "base")
    wanted = trained(base, tmp_path / "lora", **targets("llama", "h", ""))
    given = (tmp_path / "base", {"x": tmp_path / "lora"}, "average")
    covmerge.merge(*given, tmp_path / "out", quantise="fp8-channel")
    held = load_file(tmp_path / "out" / "model.safetensors")
    plain = covmerge.merge(*given).tensors
    assert torch.equal(held[HEAD], plain[HEAD]) and not torch.equal(held[HEAD], held[EMBED])
    assert not is_tied(tmp_path / "out") and wanted.isfinite().all()
