"""Adapters as experts, made by PEFT: the same merge as of the models they become."""

import copy
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.errors import TensorError
from tests.e2e.models import build, run

# PEFT's own, about its use of transformers, about Conv1D, and about patterns that do hold.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:The following rank_pattern keys"
)

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "bert": ["query", "value", "output.dense"],
}


def save_adapter(base, folder, *, seed, targets, scale=0.05, move=False, **options):
    """A PEFT adapter with random factors, and the full model that it makes of the base."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=targets, **{"r": 4, "lora_alpha": 8, **options})
        model = peft.get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(scale * torch.randn_like(parameter))
                elif move and parameter.requires_grad:  # what is trained whole
                    parameter.add_(scale * torch.randn_like(parameter))
    # Left to itself PEFT stores the whole embedding beside its factors.
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    model.merge_and_unload().save_pretrained(folder / "full")


def save_two_adapters(folder):
    """A tiny Llama and two adapters of its attention: the base, and the experts by name."""
    base = build("llama")
    base.save_pretrained(folder / "base")
    for seed in (1, 2):
        save_adapter(base, folder / f"e{seed}", seed=seed, targets=["q_proj", "o_proj"])
    return folder / "base", {f"e{seed}": folder / f"e{seed}" / "adapter" for seed in (1, 2)}


@pytest.fixture(scope="module", params=TARGETS)
def saved_family(request, tmp_path_factory):
    """A base, three adapters of it, and the full models that they become."""
    folder = tmp_path_factory.mktemp(request.param)
    base = build(request.param)
    base.save_pretrained(folder / "base")
    for number, options in enumerate(
        ({}, {"r": 2, "use_rslora": True}, {"r": 3, "lora_alpha": 1}), start=1
    ):
        save_adapter(
            base, folder / f"e{number}", seed=number, targets=TARGETS[request.param], **options
        )
    return folder


@pytest.fixture
def family(saved_family, tmp_path):
    """A copy for each test: it may write into it."""
    return shutil.copytree(saved_family, tmp_path, dirs_exist_ok=True)


# For what no architecture decides; of the three GPT-2 is the one whose matrices are stored transposed.
of_gpt2 = pytest.mark.parametrize("saved_family", ["gpt2"], indirect=True)


def experts(folder, kind):
    return {f"e{number}": folder / f"e{number}" / kind for number in (1, 2, 3)}


METHODS = [
    "average",
    "task_arithmetic",
    "actmat",
    "wudi",
    "tsv_m",
    "iso_c",
    "cart",
    "ties",
    "dare_ties",
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
def test_adapters_merge_like_the_models_they_become(family, method):
    # Adapters say which tensors they left alone; of full models a global trim counts those too.
    trim = {"trim": "tensor"} if "ties" in method else {}
    merged = covmerge.merge(
        family / "base", experts(family, "adapter"), method=method, dtype="float64", **trim
    ).tensors
    # The full models are rounded to float32: beyond the rank of their updates there is noise.
    given = {"rank_rtol": 1e-5} if method in ("tsv_m", "iso_c") else {}
    full = covmerge.merge(
        family / "base", experts(family, "full"), method=method, dtype="float64", **given, **trim
    ).tensors
    base = load_file(family / "base" / "model.safetensors")
    assert merged.keys() == full.keys() == base.keys()
    change = torch.cat([(full[n] - base[n]).flatten() for n in base])
    error = torch.cat([(merged[n] - full[n]).flatten() for n in base])
    assert error.norm() <= 2e-4 * change.norm()


def test_ace_on_factors_is_ace_on_their_products(family):
    merged = covmerge.merge(
        family / "base", experts(family, "adapter"), method="ace", eps=1e-3
    ).tensors
    base = load_file(family / "base" / "model.safetensors")
    from covmerge.files.checkpoints.open import open_checkpoint

    adapters = [open_checkpoint(path) for path in experts(family, "adapter").values()]
    name = next(iter(adapters[0].low_rank))
    factors = [adapter.read_factors(name) for adapter in adapters]
    if adapters[0].low_rank[name].transposed:
        factors = [covmerge.LowRank(f.right.mT, f.left.mT) for f in factors]
    expected = covmerge.merge_layer(factors, "ace", eps=1e-3).dense()
    if adapters[0].low_rank[name].transposed:
        expected = expected.mT
    torch.testing.assert_close(merged[name] - base[name], expected, rtol=1e-3, atol=1e-6)


def test_adapters_beside_full_models(family):
    mixed = {**experts(family, "adapter"), "e3": family / "e3" / "full"}
    merged = covmerge.merge(family / "base", mixed, method="actmat", dtype="float64").tensors
    full = covmerge.merge(
        family / "base", experts(family, "full"), method="actmat", dtype="float64"
    ).tensors
    base = load_file(family / "base" / "model.safetensors")
    change = torch.cat([(full[n] - base[n]).flatten() for n in base])
    error = torch.cat([(merged[n] - full[n]).flatten() for n in base])
    assert error.norm() <= 2e-4 * change.norm()


def test_the_merged_model_loads_and_runs(family):
    out = family / "merged"
    result = covmerge.merge(family / "base", experts(family, "adapter"), method="ace", out=out)
    assert result.verification.ok
    config = transformers.AutoConfig.from_pretrained(out)
    model = getattr(transformers, config.architectures[0]).from_pretrained(out).eval()
    assert torch.isfinite(run(model)).all()


def test_what_an_adapter_trained_whole_is_kept_as_a_head(tmp_path):
    encoder = build("bert")
    encoder.save_pretrained(tmp_path / "base")
    config = encoder.config
    paths = {}
    for number, labels in ((1, 3), (2, 5)):
        own = copy.deepcopy(config)
        own.num_labels = labels
        model = transformers.BertForSequenceClassification(own)
        model.bert.load_state_dict(encoder.state_dict())
        folder = tmp_path / f"e{number}"
        save_adapter(model, folder, seed=number, targets=["query"], modules_to_save=["classifier"])
        paths[f"e{number}"] = folder / "adapter"
    result = covmerge.merge(tmp_path / "base", paths, method="actmat")
    assert result.heads["e1"]["classifier.weight"].shape == (3, 16)
    assert result.heads["e2"]["classifier.weight"].shape == (5, 16)


def test_an_adapter_of_another_base(family, tmp_path):
    ours = transformers.AutoConfig.from_pretrained(family / "base").model_type
    other, target = ("llama", "q_proj") if ours != "llama" else ("bert", "query")
    save_adapter(build(other), tmp_path / "other", seed=1, targets=[target])
    wrong = {**experts(family, "adapter"), "other": tmp_path / "other" / "adapter"}
    with pytest.raises(TensorError, match="Is it an adapter of this base"):
        covmerge.merge(family / "base", wrong, method="average")


def test_an_adapter_of_another_width(family, tmp_path):
    kind = transformers.AutoConfig.from_pretrained(family / "base").model_type
    wide = type(build(kind).config)(**{**build(kind).config.to_dict(), "vocab_size": 80})
    if kind == "gpt2":
        wide.n_embd = 32
    else:
        wide.hidden_size = 32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, type(build(kind)).__name__)(wide)
    save_adapter(model, tmp_path / "other", seed=1, targets=TARGETS[kind])
    wrong = {**experts(family, "adapter"), "other": tmp_path / "other" / "adapter"}
    with pytest.raises(TensorError, match="no adapter of this base"):
        covmerge.merge(family / "base", wrong, method="average")


STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def moe(request, tmp_path_factory):
    """In float64, so that nothing is lost between an adapter and the model that it makes.

    Mixtral is stored expert by expert, GPT-OSS in stacks of transposed matrices.
    """
    folder = tmp_path_factory.mktemp(request.param)
    base = build(request.param).double()
    base.save_pretrained(folder / "base")
    for number, options in enumerate(
        (
            {"target_parameters": STACKS},
            {"target_parameters": STACKS, "rank_pattern": {"experts.down_proj": 2}, "r": 3},
            {"target_parameters": STACKS[1:], "use_rslora": True},
        ),
        start=1,
    ):
        targets = ["q_proj", "v_proj"] if number != 2 else []
        save_adapter(base, folder / f"e{number}", seed=number, targets=targets, **options)
    return folder


@pytest.mark.parametrize("number", [1, 2, 3])
def test_base_and_stacks_are_what_peft_makes_of_them(moe, number):
    adapter = {"e": moe / f"e{number}" / "adapter"}
    merged = covmerge.merge(moe / "base", adapter, method="average", dtype="float64").tensors
    full = load_file(moe / f"e{number}" / "full" / "model.safetensors")
    assert merged.keys() == full.keys()
    for name, value in full.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("saved", ["experts", "mlp"])
def test_experts_trained_whole_are_what_peft_makes_of_them(moe, saved, tmp_path):
    """PEFT stores them as the model has them in memory, Mixtral's in stacks that the base has not."""
    base = transformers.AutoModelForCausalLM.from_pretrained(moe / "base")
    given = {"targets": ["q_proj"], "modules_to_save": [saved], "move": True}
    save_adapter(base, tmp_path, seed=4, **given)
    result = covmerge.merge(moe / "base", {"e": tmp_path / "adapter"}, "average", dtype="float64")
    merged, full = result.tensors, load_file(tmp_path / "full" / "model.safetensors")
    assert merged.keys() == full.keys()
    for name, value in full.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["average", "actmat", "ace", "tsv_m", "ties"])
def test_stacks_merge_like_the_models_they_become(moe, method):
    given = {"trim": "tensor"} if method == "ties" else {}
    results = [
        covmerge.merge(
            moe / "base", experts(moe, kind), method=method, dtype="float64", **given
        ).tensors
        for kind in ("adapter", "full")
    ]
    base = load_file(moe / "base" / "model.safetensors")
    for name, value in base.items():
        merged, full = (result[name] - value for result in results)
        assert (merged - full).norm() <= 1e-6 * full.norm(), name


def test_stacks_are_merged_on_their_factors(moe, monkeypatch):
    monkeypatch.setattr("covmerge.run.engine.layer.dense", None)
    covmerge.merge(moe / "base", experts(moe, "adapter"), method="actmat")


def test_full_models_beside_stacks(moe):
    mixed = {**experts(moe, "adapter"), "e2": moe / "e2" / "full"}
    merged, full = (
        covmerge.merge(moe / "base", given, method="actmat", dtype="float64").tensors
        for given in (mixed, experts(moe, "full"))
    )
    for name, value in full.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)


def test_methods_that_see_more_of_a_stack_share_its_reading(moe):
    """The rows that are read at once are those of the one that must see the most."""
    norms = [
        [
            row.norm
            for row in covmerge.compare(
                moe / "base",
                experts(moe, kind),
                ["actmat", "average", "ties"],
                parameters={"ties": {"trim": "tensor"}},
                dtype="float64",
            ).rows
        ]
        for kind in ("adapter", "full")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_merged_model_of_stacks_loads_and_runs(moe, tmp_path):
    out = tmp_path / "merged"
    result = covmerge.merge(
        moe / "base",
        experts(moe, "adapter"),
        method="ace",
        out=out,
        out_dtype="float32",
        eps=1e-3,
    )
    assert result.verification.ok
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.isfinite(run(model)).all()
