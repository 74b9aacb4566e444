"""Methods that look over all experts of a tensor: block by block, the bytes of the whole."""

import pytest
import torch

from covmerge.base.types import LinearGroup
from covmerge.methods import registry
from covmerge.run.engine.thread_count import torch_threads

CASES = {
    "model_stock": [{}],
    "nuslerp": [{}, {"around": "base", "weight": [0.3, 0.9]}],
    "multislerp": [{}, {"around": "base", "weight": [0.3, 0.9, 0.2]}],
    "karcher": [{}, {"base_place": 1, "max_iter": 3}],
    "sce": [{}, {"select_topk": 0.3}],
    "ram": [{"boost": 0.1}],
}
SHAPE = (601, 1009)


def models(dtype, count):
    torch.manual_seed(0)
    base = 0.02 * torch.randn(SHAPE)
    moved = (base + 2e-3 * torch.randn(SHAPE) * (torch.rand(SHAPE) < 0.7) for _ in range(count))
    return base.to(dtype), tuple(model.to(dtype) for model in moved)


def of(base, experts, rows=slice(None), places=None, known=()):
    chosen = range(len(experts)) if places is None else places
    own = tuple(experts[place][rows] for place in chosen)
    return LinearGroup((), (1.0,) * len(own), base=base[rows], models=own, known=known)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, all_of in CASES.items() for given in all_of]
)
def test_rows_are_those_of_the_whole(name, given, dtype, monkeypatch):
    monkeypatch.setattr("covmerge.maths.methods.gathered._HELD", 2 * SHAPE[0] * SHAPE[1])
    method = registry.get(name)
    base, experts = models(dtype, method.experts[1] or 3)
    parameters = method.resolve(given)
    blocks = [slice(start, start + 97) for start in range(0, SHAPE[0], 97)]

    def groups(places=None):
        return (of(base, experts, rows, places) for rows in blocks)

    with torch_threads(1):
        known = method.tensor_pass.of(groups, SHAPE, parameters)
        rows = [
            method.kernel(
                of(base, experts, own, known=(known.rows(range(SHAPE[0])[own]),)), **parameters
            )
            for own in blocks
        ]
        assert torch.equal(torch.cat(rows), method.kernel(of(base, experts), **parameters))


def test_equal_variances_are_taken_as_torch_takes_them():
    """Of entries of half precision many vary alike, and only some of them are kept."""
    base = torch.zeros(40, 50)
    torch.manual_seed(0)
    experts = tuple(torch.randint(-1, 2, (40, 50)).float() for _ in range(3))
    method = registry.get("sce")
    parameters = method.resolve({"select_topk": 0.4})
    updates = torch.stack(experts)
    variance = updates.var(dim=0, unbiased=False).view(-1)
    count = int(torch.count_nonzero(variance) * 0.4)
    kept = torch.zeros(2000)
    kept[torch.topk(variance, count).indices] = 1
    assert int(kept.sum()) == count < int((variance >= variance[kept == 1].min()).sum())
    chosen = tuple(expert * kept.view(40, 50) for expert in experts)
    expected = method.kernel(of(base, chosen), **method.resolve({}))
    assert torch.equal(method.kernel(of(base, experts), **parameters), expected)
