"""KnOTS, Core Space and CtM on adapters and on the models they become, with thresholds over all layers."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.maths.linalg.select import kth_magnitude, threshold_rank
from covmerge.maths.methods.factored import merge_factors, ranked_factors
from covmerge.methods import registry
from tests.e2e.test_adapter_output import base_of
from tests.e2e.test_adapters import experts, family, of_gpt2, saved_family  # noqa: F401 - fixtures

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")

CASES = [
    ("knots", {}),
    ("knots", {"concat": "outputs", "space": "v"}),
    ("knots", {"trim": "tensor"}),
    ("core_space", {}),
    ("ctm", {"core_rank": 4}),
    ("core_space", {"inner": "ties", "isotropize": False}),
]


def distance(found, expected, base):
    """‖found − expected‖ over ‖expected − base‖, all tensors together."""
    change = torch.cat([(expected[n].double() - base[n].double()).flatten() for n in base])
    error = torch.cat([(found[n].double() - expected[n].double()).flatten() for n in base])
    return float(error.norm() / change.norm())


def merged_of(folder, kind, method, **given):
    sources = experts(folder, kind)
    return covmerge.merge(folder / "base", sources, method=method, **given).tensors


@pytest.mark.covering(2)
@pytest.mark.parametrize(("method", "parameters"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("saved_family", ["llama", "bert"], indirect=True)
def test_adapters_merge_by_their_factors(family, method, parameters, dtype):  # noqa: F811
    """Thresholds count what is merged, in whatever precision that is."""
    registered = registry.get(method)
    given = registered.resolve(parameters)
    adapters = [open_checkpoint(path) for path in experts(family, "adapter").values()]
    layers = {}
    for name in adapters[0].low_rank:
        layers[name] = [adapter.read_factors(name).to(torch.float64) for adapter in adapters]
    limits = None
    if registered.ranked(given) is not None:
        found = [ranked_factors(registered, u, [1.0] * 3, given) for u in layers.values()]
        whole = [torch.cat([v[t].flatten() for v in found]) for t in range(3)]
        limits = [kth_magnitude(v, threshold_rank(0.2, len(v))) for v in whole]
    base = load_file(family / "base" / "model.safetensors")
    expected = dict(base)
    for name, updates in layers.items():
        merged = merge_factors(registered, updates, [1.0] * 3, given, limits)
        expected[name] = base[name].double() + merged.delta.dense()
    found = merged_of(family, "adapter", method, dtype=dtype, out_dtype="float64", **parameters)
    assert distance(found, expected, base) < {"float32": 1e-5, "float64": 1e-10}[dtype]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("method", "parameters"), CASES[:-1])
def test_adapters_merge_like_the_models_they_become(family, method, parameters):  # noqa: F811
    base = load_file(family / "base" / "model.safetensors")
    # The full models are rounded to float32: beyond the rank of their updates there is noise.
    given = {**parameters, "dtype": "float64", "rank_rtol": 1e-5}
    full = merged_of(family, "full", method, **given)
    assert distance(merged_of(family, "adapter", method, **given), full, base) < 2e-4


@pytest.mark.parametrize(("method", "parameters"), CASES)
@of_gpt2
def test_one_adapter_of_adapters(family, method, parameters):  # noqa: F811
    """Loaded by PEFT, it is the full merge; its rank is at most that of all adapters together."""
    out = family / "adapter-out"
    covmerge.merge(
        family / "base",
        experts(family, "adapter"),
        method=method,
        out=out,
        form="adapter",
        **parameters,
    )
    assert json.loads((out / "adapter_config.json").read_text())["r"] <= 4 + 2 + 3
    own = peft.PeftModel.from_pretrained(base_of(family), out).merge_and_unload().state_dict()
    base = load_file(family / "base" / "model.safetensors")
    found = {name: own.get(name, own.get(f"transformer.{name}")) for name in base}
    expected = merged_of(family, "adapter", method, **parameters)
    assert distance(found, expected, base) < 1e-5


@of_gpt2
def test_a_merge_in_few_directions_is_an_adapter_of_as_few(family):  # noqa: F811
    """CtM's bases bound the rank, so that nothing is lost when the adapter is written with it."""
    out = family / "small"
    covmerge.merge(
        family / "base",
        experts(family, "adapter"),
        method="ctm",
        out=out,
        form="adapter",
        rank=4,
        core_rank=4,
    )
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    written = json.loads((out / "covmerge.json").read_text("utf-8"))["tensors"].values()
    assert max(entry["adapter"]["discarded_energy"] for entry in written) < 1e-10
