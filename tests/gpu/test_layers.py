"""Layers on a GPU: every method, its batches, its factored form and its memory, held to the CPU."""

import pytest
import torch

from covmerge.base.types import LowRank
from covmerge.maths.linalg.pinv import cut_off_right
from covmerge.maths.linalg.polar import polar, polar_by_products
from covmerge.maths.linalg.spectral import RankRule, leading_directions
from covmerge.maths.methods.factored import merge_factors
from covmerge.methods import registry
from tests.linalg.test_by_products import SPECTRA, default, of_spectrum, truth
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.test_factored import VARIANTS as OF_FACTORS
from tests.methods.test_factored import adapters
from tests.methods.test_references import of_so_many
from tests.methods.variants import VARIANTS

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)

GPU = torch.device("cuda")
DTYPES = [torch.float64, torch.float32]
# What float64 and float32 may be off by at least, of the result's norm: a GPU sums in another order.
LEAST = {torch.float64: 1e-8, torch.float32: 1e-4}
FACTORED = [own for own in OF_FACTORS if registry.get(own[0]).data == "none"]
# A block of cuBLAS's or cuSOLVER's own, which torch's counter has too.
LIBRARIES = 64 * 2**20


def merged(name, params, updates):
    method = registry.get(name)
    return method(group_of(method, updates), **method.resolve(params)).delta


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(48, 40), (24, 96), (96, 24)], ids=str)
@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_a_method_gives_what_it_gives_on_a_cpu(name, params, shape, dtype):
    drawn = random_updates(*shape, of_so_many(name, 4), min(shape), 5.0, seed=3)
    updates = [update.to(dtype) for update in drawn]
    exact = merged(name, params, [update.double() for update in updates])
    here = merged(name, params, updates)
    there = merged(name, params, [update.to(GPU) for update in updates])
    assert there.device.type == "cuda" and there.dtype == dtype
    # Recipes of mergekit are computed in a precision of their own, which is float32.
    least = LEAST[torch.float32 if registry.get(name).sees == "weights" else dtype]
    assert relative(there.cpu(), exact) <= max(10 * relative(here, exact), least)


@pytest.mark.parametrize("name", ["ace", "auto", "actmat", "tsv_m", "iso_c", "iso_cts", "wudi"])
def test_layers_of_a_models_size(name):
    """The routes that are taken there, which small shapes do not reach."""
    updates = random_updates(512, 640, 4, 512, 30.0, seed=1, dtype=torch.float32)
    exact = merged(name, {}, [update.double() for update in updates])
    here = relative(merged(name, {}, updates), exact)
    there = relative(merged(name, {}, [update.to(GPU) for update in updates]).cpu(), exact)
    assert there <= max(10 * here, LEAST[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "params"), FACTORED, ids=str)
def test_adapters_are_merged_by_their_factors(name, params, dtype):
    method = registry.get(name)
    updates = adapters(60, 40, [4, 3, 4][: of_so_many(name, 3)], 5.0, seed=2, dtype=dtype)
    given, weights = method.resolve(params), [1.0] * len(updates)
    here = merge_factors(method, updates, weights, given).delta
    there = merge_factors(
        method, [LowRank(u.left.to(GPU), u.right.to(GPU)) for u in updates], weights, given
    ).delta
    assert there.left.device.type == "cuda"
    assert relative(there.dense().cpu(), here.dense().double()) <= LEAST[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12)], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_polar_factors(name, shape, dtype):
    matrix = of_spectrum(SPECTRA[name], *shape, dtype)
    expected, k, nuclear = truth(matrix, default(matrix))
    tolerance = 3e-6 if dtype == torch.float32 else 1e-10
    found = [polar(matrix.to(GPU), rtol=default(matrix))]
    products = polar_by_products(matrix.to(GPU), RankRule(default(matrix)))
    assert products is not None or dtype == torch.float64
    for own in [*found, *([] if products is None else [products])]:
        assert own.k == k and own.nuclear == pytest.approx(nuclear, rel=1e-6)
        assert (own.isometry.cpu().double() - expected).norm() < tolerance
    whole = leading_directions(matrix.to(GPU), min(shape), rtol=default(matrix))
    assert whole.k == k and (whole.isometry.cpu().double() - expected).norm() < tolerance


@pytest.mark.parametrize(("side", "rank"), [(96, 40), (96, 96), (768, 300)])
def test_inverses_that_are_cut_off(side, rank):
    """The largest by a projector, the others by an eigenproblem."""
    root = random_updates(side, side, 1, rank, 1.0, seed=1)[0]
    system, right = root.mT @ root, random_updates(30, side, 1, 30, 1.0, seed=2)[0]
    here, kept, _ = cut_off_right(system, right, RankRule(1e-10))
    there, there_kept, solver = cut_off_right(system.to(GPU), right.to(GPU), RankRule(1e-10))
    assert solver == ("projector64" if side > 96 else "eigen64")
    assert there_kept == kept and relative(there.cpu(), here) < 1e-6


def within(method, params, updates, shape):
    """The most that a method has on the GPU beside its updates, and what it declares."""
    given = method.resolve(params)
    group = group_of(method, [update.to(GPU) for update in updates])
    method(group, **given)  # handles of the libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    method(group, **given)
    torch.cuda.synchronize()
    itemsize = updates[0].dtype.itemsize
    cost = method.cost_for(given)(*shape, len(updates), itemsize)
    return torch.cuda.max_memory_allocated() - before, cost.workspace + itemsize * shape[0] * shape[
        1
    ]


@pytest.mark.parametrize("name", registry.names())
def test_no_method_takes_more_memory_than_it_declares(name):
    shape = (768, 1024)
    method = registry.get(name)
    updates = random_updates(*shape, of_so_many(name, 4), 768, 3.0, seed=1, dtype=torch.float32)
    peak, declared = within(method, {}, updates, shape)
    assert peak <= declared + LIBRARIES, f"{peak / 2**20:.0f} of {declared / 2**20:.0f} MiB"
