"""`verify --deep` computes by reference implementations: right merges pass, wrong kernels do not."""

import functools
import inspect
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from covmerge.run import recompute as of_recompute
from covmerge.run.recompute import recompute
from tests.cli.runs import covmerge as cli
from tests.cli.runs import statistics_for
from tests.methods.variants import VARIANTS

EXPERTS = ("a", "b", "c")
MATRICES = {"up_proj": (72, 48), "down_proj": (48, 72), "o_proj": (36, 24)}


def base_of(dtype):
    generator = torch.Generator().manual_seed(0)
    drawn = {
        f"layers.{n}.mlp.{name}.weight": 0.1 * torch.randn(shape, generator=generator)
        for n in range(2)
        for name, shape in MATRICES.items()
    }
    drawn["layers.0.input_layernorm.weight"] = torch.ones(48)
    drawn["embed_tokens.weight"] = 0.1 * torch.randn(100, 48, generator=generator)
    return {name: weight.to(dtype) for name, weight in drawn.items()}


def factors(rank=3):
    """By expert, by matrix: B and A of a LoRA; norms are unlike."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for number, expert in enumerate(EXPERTS):
        made[expert] = {}
        for name, weight in base_of(torch.float32).items():
            if "proj" in name:
                left = torch.randn(len(weight), rank, generator=generator)
                right = torch.randn(rank, weight.shape[1], generator=generator)
                made[expert][name] = (left * (0.5 * 2.0**number / (left @ right).norm()), right)
    return made


def save_all(folder, dtype, updates_of):
    """A base and experts, each with the updates that a function draws for it."""
    base = base_of(dtype)
    save_file(base, folder / "base.safetensors")
    for expert in EXPERTS:
        updates = updates_of(expert, base)
        own = {n: (w.double() + updates[n].double()).to(dtype) for n, w in base.items()}
        save_file({n: w.contiguous() for n, w in own.items()}, folder / f"{expert}.safetensors")
    return {expert: folder / f"{expert}.safetensors" for expert in EXPERTS}


def fine_tuned(expert, base):
    generator = torch.Generator().manual_seed(ord(expert))
    size = 0.01 * 3.0 ** EXPERTS.index(expert)
    return {n: size * torch.randn(w.shape, generator=generator) for n, w in base.items()}


def low_rank(expert, base):
    own = {name: left @ right for name, (left, right) in factors()[expert].items()}
    return {name: own.get(name, torch.zeros(weight.shape)) for name, weight in base.items()}


def tied(expert, base):
    """Updates all of whose singular values are equal, or that change nothing."""
    generator = torch.Generator().manual_seed(ord(expert))
    size = 0.0 if expert == "b" else 0.1
    made = {n: torch.zeros(w.shape) for n, w in base.items()}
    for name in made:
        if "proj" in name:
            drawn = torch.randn(made[name].shape, generator=generator, dtype=torch.float64)
            u, _, v = torch.linalg.svd(drawn, full_matrices=False)
            made[name] = size * u @ v
    return made


def save_adapters(folder):
    save_file(base_of(torch.float32), folder / "base.safetensors")
    for expert, layers in factors().items():
        (folder / expert).mkdir()
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": list(MATRICES)}
        (folder / expert / "adapter_config.json").write_text(json.dumps(config))
        stored = {}
        for name, (left, right) in layers.items():
            stem = "base_model.model." + name.removesuffix(".weight")
            stored[f"{stem}.lora_B.weight"] = left
            stored[f"{stem}.lora_A.weight"] = right.contiguous()
        save_file(stored, folder / expert / "adapter_model.safetensors")
    return {expert: folder / expert for expert in EXPERTS}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """By kind, a folder with a base, and its experts."""
    drawn = {
        "full": (torch.float32, fine_tuned),
        "bfloat16": (torch.bfloat16, fine_tuned),
        "folded": (torch.bfloat16, low_rank),
        "tied": (torch.float32, tied),
    }
    made = {}
    for kind, (dtype, updates_of) in drawn.items():
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = folder, save_all(folder, dtype, updates_of)
    folder = tmp_path_factory.mktemp("adapters")
    made["adapters"] = folder, save_adapters(folder)
    return made


def merge(sources, out, kind, method, **given):
    folder, experts = sources[kind]
    most = registry.get(method).experts[1]
    experts = dict(list(experts.items())[-(most or len(experts)) :])
    statistics = statistics_for(method, folder, EXPERTS)
    given.setdefault("allow", ["unchanged-expert"] if kind == "tied" else [])
    base = folder / "base.safetensors"
    covmerge.merge(base, experts, method, out, statistics=statistics, **given)
    return out


def assert_by_references(out):
    check = recompute(out, tensors=99)
    assert check.ok, check.detail
    assert check.detail.endswith(
        "what the sources give by the float64 reference implementations"
    ), check.detail


def test_a_reference_has_the_parameters_of_its_method():
    assert set(REFERENCES) == set(registry.names())
    for method in registry:
        own = inspect.signature(REFERENCES[method.name]).parameters
        known = {parameter.name: parameter.default for parameter in method.parameters}
        assert {n: p.default for n, p in own.items() if n != "group"} == known


OF_EACH_UNIT = ("average", "ties", "ace", "iso_c")


def rarely(method, *given):
    """Parameters that run at night alone, unless the method is one of the few."""
    marks = () if method in OF_EACH_UNIT else pytest.mark.nightly
    return pytest.param(*given, method, marks=marks)


# Experts and results in one dtype for every method; in two for one of each unit.
@pytest.mark.parametrize(
    ("kind", "stored", "method"),
    [
        *(("full", "float32", method) for method in registry.names()),
        *(rarely(method, "bfloat16", "bfloat16") for method in registry.names()),
        *(rarely(m.name, "adapters", "float32") for m in registry if m.data == "none"),
        *(
            (kind, stored, method)
            for kind, stored in (
                *(("full", "bfloat16"), ("bfloat16", "float32"), ("adapters", "bfloat16")),
            )
            for method in OF_EACH_UNIT
        ),
    ],
)
def test_every_method(sources, tmp_path, kind, stored, method):
    assert_by_references(merge(sources, tmp_path / "out", kind, method, out_dtype=stored))


def _each(variants):
    """All of them; by day one of each method, as tests/methods/test_references.py has every one."""
    rows, seen = [], set()
    for method, parameters in variants:
        marks = pytest.mark.nightly if method in seen else ()
        rows.append(pytest.param(method, parameters, marks=marks))
        seen.add(method)
    return rows


@pytest.mark.parametrize(("method", "parameters"), _each(v for v in VARIANTS if v[1]), ids=str)
def test_their_parameters(sources, tmp_path, method, parameters):
    assert_by_references(merge(sources, tmp_path / "out", "full", method, **parameters))


def faulty(name, wrong):
    """The registered method with a kernel made wrong: `wrong(kernel, group, parameters)`."""
    method = registry.get(name)

    @functools.wraps(method.kernel)
    def kernel(group, **parameters):
        return wrong(method.kernel, group, parameters)

    return replace(method, kernel=kernel)


def longer(kernel, group, parameters):
    right = kernel(group, **parameters)
    if isinstance(right, torch.Tensor):
        return 1.01 * right
    return replace(right, delta=1.01 * right.delta)


def without_prior(kernel, group, parameters):
    return kernel(group, **{**parameters, "prior": False})


def one_direction_turned(kernel, group, parameters):
    right = kernel(group, **parameters)
    u, sigma, v = torch.linalg.svd(right.delta, full_matrices=False)
    sigma[-1] *= -1
    return replace(right, delta=u @ torch.diag(sigma) @ v)


def without_refinement(kernel, group, parameters):
    return kernel(group, **{**parameters, "refine": False})


WRONG = [
    *(rarely(name, longer) for name in registry.names()),
    (without_prior, "ace"),
    (without_refinement, "ace"),
    (one_direction_turned, "tsv_m"),
    (lambda kernel, group, given: kernel(group, **{**given, "rescale": False}), "dare_ties"),
    (lambda kernel, group, given: kernel(group, **{**given, "window": 0.0}), "della"),
]


@pytest.mark.parametrize(("wrong", "method"), WRONG)
def test_a_wrong_kernel(sources, tmp_path, monkeypatch, method, wrong):
    """The same wrong code, run again, would give the same: only a reference implementation can tell."""
    monkeypatch.setitem(registry._declared, method, faulty(method, wrong))
    out = merge(sources, tmp_path / "out", "full", method)
    assert cli("verify", out, "--json").json["ok"]
    report = cli("verify", out, "--deep", "--json", "--tensors=99", code=1).json
    (failed,) = [check for check in report["checks"] if not check["ok"]]
    assert failed["name"] == "recomputed"
    assert "up_proj.weight' is off by" in failed["detail"]
    assert failed["detail"].endswith("computed by the float64 reference implementations")


@pytest.mark.covering(1)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "method",
    [
        *("tsv_m", "dc_merge", "iso_c", "iso_cts", "core_space", "knots"),
        *("actmat", "wudi", "ace", "cart", "ctm"),
    ],
)
def test_adapters_folded_into_bfloat16(sources, tmp_path, method, stored):
    """Below the edge of rounding there is no direction of the expert: the reference knows that too."""
    assert_by_references(merge(sources, tmp_path / "out", "folded", method, out_dtype=stored))


# Of equal singular values directions are arbitrary, and so is what KnOTS' TIES and DC-Merge make of them.
ORDERED = [m.name for m in registry if m.data == "none" and m.name not in ("knots", "dc_merge")]


@pytest.mark.parametrize("method", ORDERED)
def test_equal_singular_values_and_an_expert_that_changed_nothing(sources, tmp_path, method):
    assert_by_references(merge(sources, tmp_path / "out", "tied", method))


class TestWithoutAReference:
    def test_a_method_of_somebody_else(self, sources, tmp_path, monkeypatch):
        mine = replace(registry.get("average"), name="mine")
        monkeypatch.setitem(registry._declared, "mine", mine)
        out = merge(sources, tmp_path / "out", "full", "mine")
        check = recompute(out, tensors=2)
        assert check.ok
        assert "2 of 8 merged tensors are what the sources give by covmerge's own" in check.detail
        assert "('mine' has no reference implementation)" in check.detail

    def test_a_tensor_that_is_too_large_for_one(self, sources, tmp_path, monkeypatch):
        """Others of its method are taken first, and it is said who computed it."""
        monkeypatch.setattr(of_recompute, "_MOST_NUMBERS", 3 * 72 * 72 - 1)
        out = merge(sources, tmp_path / "out", "full", "ace")
        few, everything = recompute(out, tensors=4), recompute(out, tensors=8)
        assert few.ok and everything.ok
        assert (
            few.detail
            == "4 of 8 merged tensors are what the sources give by the float64 reference implementations"
        )
        assert (
            "by the float64 reference implementations, but for 4 by covmerge's own kernels"
            in everything.detail
        )
        assert "'layers.0.mlp.up_proj.weight' (72 × 48 of 3 experts" in everything.detail

    def test_a_method_with_none_within_reach_is_not_passed_over(
        self, sources, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(of_recompute, "_MOST_PRODUCTS", 1)
        out = merge(sources, tmp_path / "out", "full", "ace")
        assert "'layers.1.mlp.up_proj.weight' (72 × 48 of 3" in recompute(out, tensors=3).detail

    def test_a_reference_that_fails(self, sources, tmp_path, monkeypatch):
        def fails(group, **parameters):
            raise torch.linalg.LinAlgError("no convergence")

        monkeypatch.setitem(REFERENCES, "tsv_m", fails)
        out = merge(sources, tmp_path / "out", "full", "tsv_m")
        check = recompute(out, tensors=8)
        assert check.ok
        assert "layers.0.mlp.up_proj.weight' (its reference implementation fails)" in check.detail
