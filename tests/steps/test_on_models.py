"""Steps in merges of models: on factors of adapters as on the models that they become."""

import pytest
from safetensors.torch import load_file

import covmerge
from tests.e2e.test_adapters import experts, family, saved_family  # noqa: F401 - fixtures

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`"
)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("steps", "on_factors"),
    [
        ({"before": ["pico"], "after": ["rescale"]}, True),
        ({"after": ["svc"]}, True),
        ({"before": [{"pact": {"core": 0.25, "own": 1}}]}, False),
    ],
    ids=str,
)
def test_adapters_as_the_models_they_become(family, steps, on_factors):  # noqa: F811
    given = {"method": "average", "dtype": "float64", **steps}
    thin = covmerge.merge(family / "base", experts(family, "adapter"), **given)
    full = covmerge.merge(family / "base", experts(family, "full"), **given)
    base = load_file(family / "base" / "model.safetensors")
    stepped = [name for name, entry in full.stats["tensors"].items() if " + " in entry["rule"]]
    assert stepped
    for name in stepped:
        change = (full.tensors[name] - base[name]).norm()
        assert (thin.tensors[name] - full.tensors[name]).norm() <= 1e-3 * change + 1e-5, name
    if on_factors:
        given["dtype"] = "float32"
        covmerge.merge(
            family / "base", experts(family, "adapter"), out=family / "out", form="adapter", **given
        )
        assert (family / "out" / "adapter_model.safetensors").exists()
