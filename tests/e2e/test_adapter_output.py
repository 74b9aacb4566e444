"""Adapters in, one adapter out: loaded by PEFT, it runs like the full model of the same merge."""

import copy
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError
from tests.cli.runs import covmerge as command
from tests.e2e.models import build, run
from tests.e2e.test_adapters import (
    experts,
    family,  # noqa: F401 - a fixture
    of_gpt2,
    save_adapter,
    saved_family,  # noqa: F401 - a fixture
)
from tests.held import COMMAND_LINE, held, journaled, wait_until

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`"
)

EXACT = ["average", "task_arithmetic", "ace", "actmat", "wudi", "tsv_m", "iso_c", "iso_cts", "cart"]


def merge_adapters(folder, out, **given):
    return command(
        *("merge", "--base", folder / "base", "--as", "adapter", "--json"),
        *(f"--expert={name}={path}" for name, path in experts(folder, "adapter").items()),
        *(f"--{key}={value}" for key, value in given.items()),
        out,
    ).json


def base_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    return getattr(transformers, config.architectures[0]).from_pretrained(folder / "base").eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("saved_family", ["llama", "gpt2"], indirect=True)
def test_peft_loads_it_and_it_is_the_full_merge(family, method):  # noqa: F811
    out = family / "adapter-out"
    summary = merge_adapters(family, out, method=method)
    adapted = peft.PeftModel.from_pretrained(base_of(family), out).eval()
    merged = covmerge.merge(family / "base", experts(family, "adapter"), method=method).tensors
    own = adapted.merge_and_unload()
    weights = own.state_dict()
    base = load_file(family / "base" / "model.safetensors")
    for name, expected in merged.items():
        found = weights.get(name, weights.get(f"transformer.{name}"))
        change = (expected - base[name]).norm()
        assert (found - expected).norm() <= 1e-5 * change + 1e-6, name
    assert torch.isfinite(run(own)).all()
    assert summary["totals"]["matrices"] > 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] <= 4 + 2 + 3


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`|Input and output embeddings are no"
)
@pytest.mark.parametrize("whole", [False, True])
def test_layers_of_full_models_that_are_merged_in_parts_become_factors(tmp_path, whole):
    # More than 2^18 entries: an elementwise merge to a model goes through them part by part.
    sizes = {"hidden_size": 520, "num_attention_heads": 4, "intermediate_size": 8}
    sizes |= {"vocab_size": 510, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    query, table = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
    changes = []
    for name in ("a", "b"):
        expert = copy.deepcopy(model)
        with torch.no_grad():
            change = torch.outer(torch.randn(520), torch.randn(520)) / 100
            expert.get_parameter(query).add_(change)
            expert.get_parameter(table).add_(change[:510])
        expert.save_pretrained(tmp_path / name)
        changes.append(change.double())
    given = {name: tmp_path / name for name in ("a", "b")}
    covmerge.merge(
        tmp_path / "base", given, "average", tmp_path / "out", form="adapter", rank=2, whole=whole
    )
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "out")
    found = adapted.merge_and_unload().state_dict()
    change = sum(changes) / 2  # of rank 2, which the factors hold
    close = {"rtol": 0, "atol": 1e-6}
    expected = model.get_parameter(query).detach() + change
    torch.testing.assert_close(found[query].double(), expected, **close)
    expected = model.get_parameter(table).detach() + whole * change[:510]
    torch.testing.assert_close(found[table].double(), expected, **close)


@of_gpt2
def test_truncated_to_a_rank(family):  # noqa: F811
    out = family / "small"
    merge_adapters(family, out, method="task_arithmetic", rank=2)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {2}
    manifest = json.loads((out / "covmerge.json").read_text("utf-8"))
    full = covmerge.merge(
        family / "base", experts(family, "adapter"), method="task_arithmetic", dtype="float64"
    ).tensors
    base = load_file(family / "base" / "model.safetensors")
    for name, entry in manifest["tensors"].items():
        place = entry["adapter"]
        sigma = torch.linalg.svdvals(
            (full[name].double() - base[name]).reshape(len(base[name]), -1)
        )
        energy = sigma.square()
        lost = float(energy[2:].sum() / energy.sum())
        assert place["discarded_energy"] == pytest.approx(lost, abs=1e-4)
        assert place["singular_values"][0] == pytest.approx(float(sigma[0]), rel=1e-4)


def arguments(folder, *given):
    sources = [f"--expert={name}={path}" for name, path in experts(folder, "adapter").items()]
    return ["merge", "--base", folder / "base", *sources, *given]


@of_gpt2
def test_methods_that_look_at_entries_need_a_rank(family):  # noqa: F811
    given = arguments(family, "--as=adapter", "--method=ties", family / "out")
    failed = command(*given, code=2)
    assert "--rank" in failed.stderr
    assert not (family / "out").exists()
    ran = command(*given, "--rank=3")
    assert "rank 3" in ran.stdout and "discarded" not in ran.stdout
    peft.PeftModel.from_pretrained(base_of(family), family / "out")


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "consensus", "free"])
def test_at_full_rank_every_method_is_its_full_merge(family, method):  # noqa: F811
    """Thresholds over all tensors, random masks and the base itself are those of the full merge."""
    given = arguments(family, f"--method={method}", "--dtype=float64")
    command(*given, "--as=adapter", "--rank=999", family / "out")
    merged = covmerge.merge(
        family / "base", experts(family, "adapter"), method=method, dtype="float64"
    ).tensors
    own = peft.PeftModel.from_pretrained(base_of(family), family / "out").merge_and_unload()
    same_weights(own.state_dict(), merged)


@of_gpt2
def test_the_global_pass_may_look_at_a_sample_first(family, monkeypatch):  # noqa: F811
    def merged(out):
        given = {"form": "adapter", "rank": 999}
        covmerge.merge(family / "base", experts(family, "adapter"), "ties", out, **given)
        return (out / "adapter_model.safetensors").read_bytes()

    usual = merged(family / "usual")
    monkeypatch.setattr("covmerge.plan.planning.types._LEAST_SAMPLED", 0)
    monkeypatch.setattr("covmerge.plan.planning.types._SAMPLED", 0.5)
    assert merged(family / "sampled") == usual


def same_weights(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        own = found.get(name, found.get(f"transformer.{name}"))
        torch.testing.assert_close(own, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--as=adapter", "--method=emr", "--rank=4"], "masks"),
        (["--as=adapter", "--max-memory=1MB"], "are allowed (--max-memory)"),
        (["--rank=4"], "--rank 4 belongs to --as adapter"),
        (["--whole"], "--whole belongs to --as adapter"),
        (["--as=adapter", "--shard-size=1GB"], "--shard-size belongs to --as model"),
    ],
)
def test_what_an_adapter_cannot_have_is_refused(tmp_path, flags, word):
    base = build("bert")
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2, 3):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=["query"])
    before = sorted(tmp_path.iterdir())
    failed = command(*arguments(tmp_path, *flags), tmp_path / "out", code=2)
    assert word in failed.stderr
    assert sorted(tmp_path.iterdir()) == before


@of_gpt2
def test_the_dry_run_is_that_of_the_merge(family):  # noqa: F811
    merge_adapters(family, family / "out")
    sources = [f"--expert={n}={path}" for n, path in experts(family, "adapter").items()]
    given = ["merge", "--base", family / "base", *sources, "--as=adapter", family / "again"]
    planned = command(*given, "--dry-run", "--json").json
    assert not (family / "again").exists()
    written = load_file(family / "out" / "adapter_model.safetensors")
    assert planned["write_bytes"] == sum(factor.nbytes for factor in written.values())
    assert "Nothing is written" in command(*given, "--dry-run").stdout
    done = command(*given, "--max-memory=8GB", "--json").json
    assert done["run"]["expected_peak_memory"] <= 8e9


@pytest.mark.parametrize(
    ("saved_family", "method"),
    [("gpt2", "core_space"), ("llama", "ties")],
    indirect=["saved_family"],
)
def test_kill_and_resume_gives_the_same_bytes(family, method):  # noqa: F811
    def merging(out, *more):
        sources = [f"--expert={n}={path}" for n, path in experts(family, "adapter").items()]
        flags = ["--as=adapter", f"--method={method}", "--rank=2", "--threads=1"]
        return ["merge", "--base", family / "base", *sources, *flags, *more, family / out]

    command(*merging("whole"))
    stats = json.loads((family / "whole" / "covmerge.json").read_text())["tensors"]
    last = list(stats)[-1]
    journal = family / ".killed.covmerge-partial" / "journal.jsonl"
    with held(COMMAND_LINE, *merging("killed"), before=last) as process:
        wait_until(lambda: journaled(journal, 1), process)
        process.kill()
    assert not (family / "killed").exists()
    resumed = command(*merging("killed", "--resume"), "--json").json
    assert 0 < resumed["run"]["resumed_items"] < resumed["run"]["items"]
    for name in ("adapter_model.safetensors", "adapter_config.json", "covmerge.json"):
        assert (family / "killed" / name).read_bytes() == (family / "whole" / name).read_bytes()


@of_gpt2
def test_adapters_are_compared_as_adapters(family):  # noqa: F811
    recipe = {
        "base": str(family / "base"),
        "experts": {n: str(path) for n, path in experts(family, "adapter").items()},
        "output": {"format": "adapter", "rank": 4},
    }
    (family / "recipe.yml").write_text(json.dumps(recipe))
    methods = ["core_space", "average", "ties", "tsv_m"]
    command(
        "compare",
        family / "recipe.yml",
        f"--methods={','.join(methods)}",
        f"--out={family / 'all'}",
    )
    for method in methods:
        merge_adapters(family, family / method, method=method, rank=4)
        alone, compared = (
            load_file(folder / method / "adapter_model.safetensors")
            for folder in (family, family / "all")
        )
        assert alone.keys() == compared.keys()
        assert covmerge.verify(family / "all" / method).ok
        for name in [n for n in alone if n.endswith("lora_A.weight")]:
            other = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(
                compared[other] @ compared[name], alone[other] @ alone[name], rtol=1e-4, atol=1e-6
            )


def test_methods_that_leave_other_tensors_to_the_base_are_compared_too(tmp_path):
    """What one of the adapters merges, another leaves out: the plans have the same tensors."""
    base = {"layers.0.mlp.up_proj.weight": torch.eye(8), "layers.0.norm.weight": torch.ones(8)}
    save_file(base, tmp_path / "base.safetensors")
    for name in ("a", "b"):
        own = {n: w + 0.1 * torch.randn(w.shape) for n, w in base.items()}
        save_file(own, tmp_path / f"{name}.safetensors")
    recipe = {
        "base": "base.safetensors",
        "experts": {"a": "a.safetensors", "b": "b.safetensors"},
        "output": {"format": "adapter", "rank": 2},
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    methods = ["average", "wudi", "free"]
    given = [f"--methods={','.join(methods)}", f"--out={tmp_path / 'all'}"]
    command("compare", tmp_path / "recipe.yml", *given)
    for method in methods:
        command("merge", tmp_path / "recipe.yml", f"--method={method}", tmp_path / method)
        alone, together = (
            load_file(folder / method / "adapter_model.safetensors")
            for folder in (tmp_path, tmp_path / "all")
        )
        assert alone.keys() == together.keys()
        assert covmerge.verify(tmp_path / "all" / method).ok


def test_full_models_among_adapters(family):  # noqa: F811
    mixed = {**experts(family, "adapter"), "e3": family / "e3" / "full"}
    sources = [f"--expert={name}={path}" for name, path in mixed.items()]
    given = ["merge", "--base", family / "base", *sources, "--as=adapter", family / "out"]
    failed = command(*given, code=2)
    assert "has it whole, and no factors of it" in failed.stderr and "--rank" in failed.stderr
    command(*given, "--method=actmat", "--rank=999")
    merged = covmerge.merge(family / "base", mixed, method="actmat").tensors
    own = peft.PeftModel.from_pretrained(base_of(family), family / "out").merge_and_unload()
    same_weights(own.state_dict(), merged)


@of_gpt2
def test_the_rank_and_the_progress_are_seen(family):  # noqa: F811
    class TensorDiagnostics:
        def __init__(self):
            self.total = self.done = 0
            self.finished = False

        def start(self, total):
            self.total = total

        def advance(self, what, size, *, resumed=False):
            self.done += size

        def finish(self):
            self.finished = True

    seen = TensorDiagnostics()
    covmerge.merge(
        family / "base",
        experts(family, "adapter"),
        "ties",
        family / "out",
        form="adapter",
        rank=2,
        progress=seen,
    )
    assert seen.finished and seen.total == seen.done > 0


@of_gpt2
def test_verification_of_a_merged_adapter(family):  # noqa: F811
    merge_adapters(family, family / "out", method="ace")
    command("verify", family / "out")
    path = family / "out" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, path)
    failed = command("verify", family / "out", code=1)
    assert "finite" in failed.stdout + failed.stderr
    other = name.replace("lora_B", "lora_A")
    save_file({n: t for n, t in tensors.items() if n not in (name, other)}, path)
    failed = command("verify", family / "out", code=1)
    assert "missing" in failed.stdout + failed.stderr


@of_gpt2
def test_a_quantised_base_is_not_touched(family):  # noqa: F811
    path = family / "base" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(config))
    merge_adapters(family, family / "out", method="ace")
    with pytest.raises(InputError, match="quantised"):
        covmerge.merge(family / "base", experts(family, "adapter"), method="ace")


def test_an_embedding_adapter(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=["embed_tokens", "q_proj"])
    paths = {f"e{n}": tmp_path / f"e{n}" / "adapter" for n in (1, 2)}
    sources = [f"--expert={name}={path}" for name, path in paths.items()]
    command("merge", "--base", tmp_path / "base", *sources, "--as=adapter", tmp_path / "out")
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    merged = covmerge.merge(tmp_path / "base", paths).tensors
    weights = adapted.merge_and_unload().state_dict()
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(weights[name], merged[name], rtol=1e-4, atol=1e-6)


def test_a_model_whose_files_call_tensors_otherwise(tmp_path):
    """PEFT goes by the modules of the model, not by the names in its files."""
    base = build("vit")
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2, 3):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=["q_proj", "fc1"])
    merged = covmerge.merge(tmp_path / "base", experts(tmp_path, "adapter"), "actmat").tensors
    full = covmerge.merge(tmp_path / "base", experts(tmp_path, "full"), "actmat").tensors
    same_weights(merged, full, tolerance=1e-4)
    merge_adapters(tmp_path, tmp_path / "out", method="actmat")
    adapted = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "out")
    adapted.merge_and_unload().save_pretrained(tmp_path / "saved")
    same_weights(load_file(tmp_path / "saved" / "model.safetensors"), merged)


@of_gpt2
def test_the_spectrum_says_which_rank_would_do(family):  # noqa: F811
    ran = command(
        *arguments(family, "--as=adapter", "--method=average", "--verbose", family / "out")
    )
    assert "90 %: " in ran.stdout and "99.9 %: " in ran.stdout
    stats = json.loads((family / "out" / "covmerge.json").read_text("utf-8"))["tensors"]
    wanted = 0
    for entry in stats.values():
        energy = torch.tensor(entry["adapter"]["singular_values"]).double().square().cumsum(0)
        wanted = max(wanted, 1 + int((energy < 0.99 * energy[-1]).sum()))
    assert f"99 %: {wanted}," in " ".join(ran.stdout.split())


@of_gpt2
def test_adapters_of_different_bases_name_none(family):  # noqa: F811
    path = family / "e1" / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "org/one"}))
    summary = merge_adapters(family, family / "out", method="average")
    assert any("name different bases" in note for note in summary["notes"])
    config = json.loads((family / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def with_head(encoder, model_class, **options):
    """A model with a head around an encoder's own weights."""
    config = copy.deepcopy(encoder.config)
    for name, value in options.items():
        setattr(config, name, value)
    model = model_class(config).eval()
    model.bert.load_state_dict(encoder.state_dict(), strict=False)
    return model


def test_adapters_of_models_with_and_without_a_head(tmp_path):
    encoder = build("bert")
    encoder.save_pretrained(tmp_path / "base")
    masked = with_head(encoder, transformers.BertForMaskedLM)
    save_adapter(encoder, tmp_path / "e1", seed=1, targets=["query", "value"])
    save_adapter(masked, tmp_path / "e2", seed=2, targets=["query"])
    paths = {f"e{n}": tmp_path / f"e{n}" / "adapter" for n in (1, 2)}
    result = covmerge.merge(tmp_path / "base", paths, "average", tmp_path / "out", form="adapter")
    assert any("name the layers in different ways" in note for note in result.notes)
    merged = covmerge.merge(tmp_path / "base", paths, "average").tensors
    own = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "out").merge_and_unload()
    same_weights(own.state_dict(), merged)


def test_heads_are_kept_beside_the_adapter(tmp_path):
    """PEFT would look for a classifier in an adapter for classification."""
    encoder = build("bert")
    encoder.save_pretrained(tmp_path / "base")
    kind, paths = transformers.BertForSequenceClassification, {}
    for number, labels in ((1, 3), (2, 5)):
        model = with_head(encoder, kind, num_labels=labels)
        options = {"modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}
        save_adapter(model, tmp_path / f"e{number}", seed=number, targets=["query"], **options)
        paths[f"e{number}"] = tmp_path / f"e{number}" / "adapter"
    covmerge.merge(tmp_path / "base", paths, "average", tmp_path / "out", form="adapter")
    assert sorted(p.name for p in (tmp_path / "out" / "heads").iterdir()) == [
        "e1.safetensors",
        "e2.safetensors",
    ]
    merged = covmerge.merge(tmp_path / "base", paths, "average").tensors
    model = with_head(encoder, kind, num_labels=3)
    own = peft.PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload().state_dict()
    same_weights({name.removeprefix("bert."): value for name, value in own.items()}, merged)


@pytest.mark.parametrize("targets", [["attn.c_proj", "lm_head"], ["c_attn", "lm_head"]])
def test_layers_that_are_stored_both_ways(tmp_path, targets):
    """PEFT writes one `fan_in_fan_out`, and goes by the modules."""
    config = build("gpt2").config
    config.tie_word_embeddings = False
    base = transformers.GPT2LMHeadModel(config).eval()
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2, 3):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=targets)
    merged = covmerge.merge(tmp_path / "base", experts(tmp_path, "adapter"), "average").tensors
    full = covmerge.merge(tmp_path / "base", experts(tmp_path, "full"), "average").tensors
    same_weights(merged, full)
    merge_adapters(tmp_path, tmp_path / "out", method="average")
    own = peft.PeftModel.from_pretrained(base_of(tmp_path), tmp_path / "out").merge_and_unload()
    same_weights(own.state_dict(), merged)


class Two(torch.nn.Module):
    """One name is the end of another, and an embedding is not called one."""

    def __init__(self):
        super().__init__()
        self.tok = torch.nn.Embedding(12, 8)
        self.block = torch.nn.ModuleDict({"proj": torch.nn.Linear(8, 8)})
        self.proj = torch.nn.Linear(8, 8)

    def forward(self, ids):
        return self.proj(self.block["proj"](self.tok(ids)))


@pytest.mark.parametrize("targets", [["tok", "proj"], ["tok", "block.proj"], "tok|.*proj"])
def test_a_base_without_a_config(tmp_path, targets):
    base, paths = Two().eval(), {}
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    for number, rank in ((1, 2), (2, 3)):
        options = {"rank_pattern": {"block.proj": rank + 2}}
        config = peft.LoraConfig(target_modules=targets, r=rank, lora_alpha=4, **options)
        model = peft.get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) / 4)
        paths[f"e{number}"] = tmp_path / f"e{number}"
        model.save_pretrained(paths[f"e{number}"], save_embedding_layers=False)
    source = tmp_path / "base.safetensors"
    covmerge.merge(source, paths, "actmat", tmp_path / "out", form="adapter")
    merged = covmerge.merge(source, paths, "actmat").tensors
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out").eval()
    ids = torch.arange(12)[None]
    logits = adapted(ids)
    own = adapted.merge_and_unload()
    torch.testing.assert_close(own(ids), logits, rtol=1e-4, atol=1e-5)
    same_weights(own.state_dict(), merged)


def test_what_rounding_the_factors_loses(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    for number in (1, 2, 3):
        save_adapter(base, tmp_path / f"e{number}", seed=number, targets=["up_proj", "o_proj"])
    given = arguments(tmp_path, "--as=adapter", "--method=actmat")
    for dtype in ("float64", "bfloat16"):
        command(*given, f"--out-dtype={dtype}", tmp_path / dtype)
    found = json.loads((tmp_path / "bfloat16" / "covmerge.json").read_text("utf-8"))["tensors"]
    stored = {
        d: load_file(tmp_path / d / "adapter_model.safetensors") for d in ("float64", "bfloat16")
    }
    for name, entry in found.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        exact, rounded = (
            own[f"{key}B.weight"].double() @ own[f"{key}A.weight"].double()
            for own in stored.values()
        )
        lost = float((exact - rounded).norm() / exact.norm())
        assert entry["rounding_loss"] == pytest.approx(lost, rel=0.2)


@of_gpt2
def test_steps_that_are_exact_on_factors(family):  # noqa: F811
    given = [*arguments(family), "--before=norm_balance", "--after=rescale"]
    command(*given, "--as=adapter", "--method=ace", family / "stepped")
    adapted = peft.PeftModel.from_pretrained(base_of(family), family / "stepped").eval()
    weights = adapted.merge_and_unload().state_dict()
    merged = covmerge.merge(
        family / "base",
        experts(family, "adapter"),
        method="ace",
        before=["norm_balance"],
        after=["rescale"],
    )
    base = load_file(family / "base" / "model.safetensors")
    for name, expected in merged.tensors.items():
        found = weights.get(name, weights.get(f"transformer.{name}"))
        change = (expected - base[name]).norm()
        assert (found - expected).norm() <= 1e-5 * change + 1e-6, name
    assert any(
        "norm_balance + ace + rescale" in e["rule"] for e in merged.stats["tensors"].values()
    )


class Layers(torch.nn.Module):
    """One layer of each kind that PEFT has factors for."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.turned = transformers.pytorch_utils.Conv1D(12, 8)  # (d_in, d_out), as GPT-2 has it
        self.along = torch.nn.Conv1d(12, 5, 3, padding=1)
        self.plane = torch.nn.Conv2d(5, 4, (2, 3), bias=False)
        self.space = torch.nn.Conv3d(4, 3, (1, 2, 1))

    def forward(self, ids):
        found = self.along(self.turned(self.table(ids)).mT)
        return self.space(self.plane(found.unsqueeze(2).repeat(1, 1, 4, 1)).unsqueeze(2))


def test_every_kind_of_layer_that_peft_has_factors_for(tmp_path):
    torch.manual_seed(0)
    base, kinds = Layers().eval(), [name for name, _ in Layers().named_children()]
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    given = {}
    for name, rank in (("a", 2), ("b", 1)):
        config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=kinds)
        expert = peft.get_peft_model(copy.deepcopy(base), config)
        for key, value in expert.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.1)
        expert.save_pretrained(tmp_path / name)
        given[name] = tmp_path / name
    merged = covmerge.merge(
        tmp_path / "base.safetensors", given, "task_arithmetic", scale=1.0
    ).tensors
    expected = Layers().eval()
    expected.load_state_dict(merged)
    # Independently: what PEFT itself adds to each weight.
    weights = dict(base.state_dict())
    for folder in given.values():
        own = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).merge_and_unload()
        for key, value in own.state_dict().items():
            weights[key] = weights[key] + (value - base.state_dict()[key])
    for key, value in weights.items():
        assert torch.allclose(merged[key], value, atol=1e-5), key
    flags = [f"--expert={name}={folder}" for name, folder in given.items()]
    out = tmp_path / "out"
    command(
        *("merge", f"--base={tmp_path}/base.safetensors", *flags, "--method=task_arithmetic"),
        *("--set=scale=1", "--as=adapter", out),
    )
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), out).eval()
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        change = (expected(ids) - base(ids)).norm()
        assert (adapted(ids) - expected(ids)).norm() < 1e-3 * change


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT reads it all the same
def test_a_module_that_peft_adapts_by_its_parameter_alone(tmp_path):
    """GPT-OSS's router is no layer to PEFT, which takes it as a target by the name of its weight."""
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.GptOssConfig(**sizes, **heads, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    base = transformers.GptOssForCausalLM(config).eval()
    base.save_pretrained(tmp_path / "base")
    targets = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.router.weight"]
    )
    adapters, ids = {}, torch.arange(3, 13)[None]
    for name in "ab":
        model = peft.get_peft_model(copy.deepcopy(base), targets).eval()
        with torch.no_grad():
            for own, parameter in model.named_parameters():
                parameter += 0.2 * torch.randn_like(parameter) * ("lora_" in own)
            wanted = model(ids).logits
        model.save_pretrained(tmp_path / name)
        adapters[name] = tmp_path / name
    for experts_ in ({"b": adapters["b"]}, adapters):
        out = covmerge.merge(
            tmp_path / "base",
            experts_,
            "average",
            form="adapter",
            overwrite=True,
            out=tmp_path / "out",
        )
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), out.path).eval()
        whole = covmerge.merge(
            tmp_path / "base", experts_, "average", tmp_path / "whole", overwrite=True
        )
        merged = transformers.GptOssForCausalLM.from_pretrained(whole.path).eval()
        with torch.no_grad():
            found, expected = loaded(ids).logits, merged(ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if len(experts_) == 1:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    again = covmerge.merge(tmp_path / "base", {"merged": out.path}, "average").tensors
    torch.testing.assert_close(again, load_file(tmp_path / "whole" / "model.safetensors"))
