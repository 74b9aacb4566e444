"""Methods that see weights, through the engine: the same bytes in any order, by threads and processes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.random import Stream
from covmerge.maths.methods.mergekit import Drawn, places
from covmerge.methods import registry
from tests.forked import fork_workers

SHAPES = {
    "b.10.weight": (40, 20),
    "b.2.weight": (20, 40),
    "embed_tokens.weight": (600, 30),
    "norm.weight": (17,),
    "conv.weight": (4, 3, 3, 3),
    "scale": (),
    "no.rows": (0, 5),
    "no.columns": (5, 0),
}
METHODS = [method.name for method in registry if method.sees == "weights"]
WHOLE = {"generalized_task_arithmetic": {"sparsify": "magnitude", "density": 0.4}}
ALLOWED = ("not-a-fine-tune", "longer-than-experts")


def make(dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(shape, size):
        return size * torch.randn(shape, generator=generator)

    base = {n: draw(s, 1.0) for n, s in SHAPES.items()}
    experts = {e: {n: (w + draw(w.shape, 0.05)).to(dtype) for n, w in base.items()} for e in "abc"}
    return {n: w.to(dtype) for n, w in base.items()}, experts


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def states(request):
    return make(request.param)


def some(method, experts):
    """As many of the experts as a method merges."""
    most = registry.get(method).experts[1]
    return dict(list(experts.items())[: 2 if method == "nuslerp" else most or len(experts)])


@pytest.mark.parametrize("method", [method.name for method in registry if method.data == "none"])
def test_a_weight_changes_the_merge_or_is_told_to_have_no_part(method):
    base, experts = make(torch.float32)
    experts = some(method, experts)
    plain = covmerge.merge(base, experts, method).tensors
    found = covmerge.merge(base, experts, method, weights={"a": 3.0})
    same = all(torch.equal(value, plain[name]) for name, value in found.tensors.items())
    said = f"{method} takes no notice of weights: that of 'a' has no part in the merge"
    assert (said in found.notes) == same
    assert said not in covmerge.merge(base, experts, method).notes


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_is_what_the_kernel_gives(states, method):
    base, experts = states
    experts, given = some(method, experts), WHOLE.get(method, {})
    merged = covmerge.merge(base=base, experts=experts, method=method, **given).tensors
    assert merged.keys() == base.keys()
    kernel = registry.get(method)
    for name, start in base.items():
        group = LinearGroup(
            (),
            (1.0,) * len(experts),
            streams=tuple(Stream(f"{name}\0{e}") for e in experts),
            base=start.float(),
            models=tuple(own[name].float() for own in experts.values()),
        )
        weights = kernel(group, **kernel.resolve(given)).weights
        assert torch.equal(merged[name], weights.to(start.dtype)), name


def test_threads_and_processes_give_the_same_bytes(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    base, experts = make(torch.bfloat16)
    for name, tensors in {"base": base, **experts}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in experts}
    given = {"sparsify": "ranked", "density": [0.5, 0.6, 0.7], "drawn": 1000, "rescale": True}
    found = []
    for number, how in enumerate(({"threads": 1}, {"threads": 2}, {"workers": 2})):
        out, start = tmp_path / f"out{number}", tmp_path / "base.safetensors"
        covmerge.merge(start, files, "generalized_task_arithmetic", out, **how, **given)
        found.append(load_file(out / "model.safetensors"))
    for other in found[1:]:
        assert all(torch.equal(found[0][name], weight) for name, weight in other.items())


def test_torchs_stream_tensor_by_tensor(states):
    """Who draws for one tensor after the other, by name, gets what rules with places give."""
    base, experts = states
    densities = [0.5, 1.0, 0.3]
    found = places({n: Drawn("bernoulli", densities, w.numel()) for n, w in base.items()})
    given = {"sparsify": "bernoulli", "density": densities, "seed": 9, "arithmetic": "float32"}
    rules = [
        {
            "match": name,
            "method": "generalized_task_arithmetic",
            "parameters": {**given, "drawn": place},
        }
        for name, place in found.items()
    ]
    merged = covmerge.merge(
        base=base, experts=experts, method="generalized_task_arithmetic", rules=rules, **given
    ).tensors
    torch.manual_seed(9)
    for name in sorted(base):
        total = base[name].float().clone()
        for density, own in zip(densities, experts.values(), strict=True):
            update = own[name].float() - base[name].float()
            total += (
                update
                if density == 1
                else update * torch.bernoulli(torch.full_like(update, density))
            )
        torch.testing.assert_close(merged[name].float(), total.to(base[name].dtype).float())
