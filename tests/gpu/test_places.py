"""Nothing of a layer is on the CPU where its updates are on a GPU, which is pretended here."""

import pytest
import torch

from covmerge.base.types import LowRank
from covmerge.maths.linalg import auto, select
from covmerge.maths.methods.factored import merge_factors
from covmerge.methods import registry
from covmerge.steps import registry as steps
from covmerge.steps import resolve_steps, with_steps
from tests.gpu.pretended import Pretended, fetched, pretended_gpu
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.test_factored import VARIANTS as OF_FACTORS
from tests.methods.test_factored import adapters
from tests.methods.test_references import of_so_many
from tests.methods.variants import VARIANTS

FACTORED = [own for own in OF_FACTORS if registry.get(own[0]).data == "none"]
DTYPES = [torch.float64, torch.float32]
LEAST = {torch.float64: 1e-8, torch.float32: 1e-4}


def agrees(method, given, updates):
    """The same routes and numbers there, where a GPU is not told to be slow at eigenproblems."""
    here = method(group_of(method, updates), **given).delta
    with pretended_gpu() as gpu:
        there = method(group_of(method, [update.to(gpu) for update in updates]), **given).delta
    assert isinstance(there, Pretended)
    assert relative(fetched(there), here.double()) <= LEAST[here.dtype]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(14, 12), (6, 24)], ids=str)
@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_a_method(name, params, shape, dtype):
    """Old: `ties` looked for its threshold for ever, and `aswudi` made its filter on the CPU."""
    method = registry.get(name)
    updates = random_updates(*shape, of_so_many(name, 4), min(shape), 5.0, 3, dtype)
    agrees(method, method.resolve(params), updates)


@pytest.mark.parametrize("step", [step.name for step in steps])
def test_a_step(step):
    when = next(own.when for own in steps if own.name == step)
    around = {"before": (), "after": (), when: resolve_steps([step], when)}
    method = with_steps(registry.get("task_arithmetic"), around["before"], around["after"])
    updates = random_updates(14, 12, 4, 12, 5.0, 3)
    agrees(method, registry.get("task_arithmetic").resolve({}), updates)


@pytest.mark.parametrize("name", ["auto", "ace", "tsv_m", "iso_c", "iso_cts", "actmat", "wudi"])
def test_by_products_and_not(name, monkeypatch):
    for price in (1e6, 1.0):
        monkeypatch.setitem(auto.EIGENPROBLEM, "cuda", price)
        assert (auto.cut_off_choice(300, 96, "cuda").taken == "projector64") == (price > 1.0)
        method = registry.get(name)
        agrees(method, method.resolve({}), random_updates(96, 300, 2, 96, 30.0, 1, torch.float32))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "params"), FACTORED, ids=str)
def test_adapters(name, params, dtype):
    method = registry.get(name)
    updates = adapters(12, 14, [3, 2, 3][: of_so_many(name, 3)], 5.0, seed=2, dtype=dtype)
    given, weights = method.resolve(params), [1.0] * len(updates)
    here = merge_factors(method, updates, weights, given).delta.dense()
    with pretended_gpu() as gpu:
        factors = [LowRank(own.left.to(gpu), own.right.to(gpu)) for own in updates]
        there = merge_factors(method, factors, weights, given).delta.dense()
    assert relative(fetched(there), here.double()) <= LEAST[dtype]


def test_the_first_number_that_integers_have_not():
    """Old: compared with it, on a GPU alone, nothing was below, and `ties` looked for ever."""
    numbers = torch.tensor([-1, 0, 7, 2**31 - 1], dtype=torch.int32)
    with pretended_gpu() as gpu:
        below, inside = select._split(numbers.to(gpu), 2**31)
    assert below == 1 and fetched(inside).tolist() == [0, 7, 2**31 - 1]


def test_what_a_gpu_refuses():
    with pretended_gpu() as gpu:
        there, here = torch.ones(3).to(gpu), torch.ones(3)
        for work in (
            lambda: there + here,
            lambda: there.addcmul_(there, here),
            lambda: there.numpy(),
            lambda: torch.rand(3, device=gpu, generator=torch.Generator()),
        ):
            with pytest.raises((RuntimeError, TypeError), match=r"device|numpy"):
                work()
        assert fetched(there + 1.0).tolist() == [2.0, 2.0, 2.0] and (there.cpu() + here).sum() == 6
