"""Methods under mergekit's names beside mergekit 0.1.5 itself, which really made the golden file.

`python -m tests.methods.test_mergekit` prints the table.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covmerge.base.types import LinearGroup
from covmerge.errors import RecipeError, TensorError
from covmerge.maths.linalg.random import mersenne_twister
from covmerge.maths.methods.mergekit import SETTINGS, Drawn, places
from covmerge.maths.methods.sparsify import Rows, keep
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from tests.mergekit.agreement import assert_agrees
from tests.methods.mergekit_cases import (
    CASES,
    DTYPES,
    ORDERED,
    RANDOM,
    SEED,
    SHAPES,
    key,
    stable_key,
)

FILE = Path(__file__).parent.parent / "golden" / "mergekit.safetensors"
GOLDEN = load_file(FILE)
MODELS = [{name: GOLDEN[f"model {n} {name}"] for name in SHAPES} for n in range(4)]


def resolved(case, dtype):
    """Our method, and its parameters for each tensor."""
    settings = {} if case.ours else SETTINGS[case.theirs]
    method = registry.get(case.ours or "generalized_task_arithmetic")
    arithmetic = str(dtype).removeprefix("torch.")
    given = {**settings, **case.given, "arithmetic": arithmetic}
    if case.theirs in RANDOM:
        densities = given["density"]
        drawn = {
            name: Drawn(given["sparsify"], densities, MODELS[0][name].numel())
            for name in case.names
        }
        given["seed"] = SEED
        return method, {n: method.resolve({**given, "drawn": p}) for n, p in places(drawn).items()}
    return method, dict.fromkeys(case.names, method.resolve(given))


def group_of(case, dtype, name, computed=torch.float32):
    base, *experts = (model[name].to(dtype).to(computed) for model in MODELS)
    return LinearGroup((), (1.0,) * case.experts, base=base, models=tuple(experts[: case.experts]))


def merged(case, dtype, computed=torch.float32):
    """What covmerge gives in float32, tensor by tensor, in an order of its own."""
    method, parameters = resolved(case, dtype)
    found = {}
    for name in reversed(case.names):
        group = group_of(case, dtype, name, computed)
        found[name] = method(group, **parameters[name]).weights
    return {name: found[name] for name in case.names}


def theirs_of(kept, names):
    """The tensors of what is kept flat and side by side."""
    parts = GOLDEN[kept].split([MODELS[0][name].numel() for name in names])
    return {name: part.view(MODELS[0][name].shape) for name, part in zip(names, parts, strict=True)}


def compare(case, dtype):
    """By tensor, the largest difference from mergekit, whose sort is stable, beside its largest entry."""
    off = {}
    theirs = theirs_of((stable_key if case.theirs in ORDERED else key)(case, dtype), case.names)
    for name, ours in merged(case, dtype).items():
        expected = theirs[name]
        same = torch.equal(ours.to(expected.dtype), expected)
        error = (ours.double() - expected.double()).abs().max() / expected.double().abs().max()
        off[name] = 0.0 if same else float(error)
    return off


def table(found):
    """The cases beside the tensors that are equal bit for bit, and the worst of the others."""
    lines = []
    for (case, dtype), off in found.items():
        same, worst = sum(not error for error in off.values()), max(off, key=off.__getitem__)
        rest = "" if same == len(off) else f"{off[worst]:.2g} ({worst})"
        word = str(dtype).removeprefix("torch.")
        lines.append(f"{case!s:96} {word:9} {same} of {len(off)} {rest}".rstrip())
    return "\n".join(lines)


def everything():
    return {(case, dtype): compare(case, dtype) for case in CASES for dtype in DTYPES}


def test_the_table():
    print(table(everything()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_mergekit(case, dtype):
    """Bit for bit by methods whose bits are the same on every machine; else to rounding."""
    theirs = theirs_of((stable_key if case.theirs in ORDERED else key)(case, dtype), case.names)
    recipe = {"merge_method": case.theirs, "dtype": str(dtype).removeprefix("torch.")}
    recipe["parameters"] = dict(case.parameters)
    for name, ours in merged(case, dtype).items():
        assert_agrees(ours.to(theirs[name].dtype), theirs[name], recipe)


def kept_sizes(case, dtype, name, expert):
    """The magnitudes that a rule keeps of an expert, sorted, and the least and the largest of them."""
    base, model = (MODELS[n][name].to(dtype) for n in (0, expert + 1))
    sizes = (model - base).abs().float().flatten().sort().values
    given = {**SETTINGS[case.theirs], **case.given}
    count, most = len(sizes), int(given["density"][expert] * len(sizes))
    if given["density"][expert] >= 1:
        return sizes, ()
    if given["sparsify"] == "magnitude":
        most = max(1, most)
        return sizes[count - most :], (sizes[count - most],)
    first = max(0, count - most - int(given["gamma"][expert] * count))
    return sizes[first : first + most], tuple(sizes[first : first + most][[0, -1]] if most else ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [own for own in CASES if own.theirs in ORDERED], ids=str)
def test_of_mergekit_as_it_is_only_equal_magnitudes_at_a_threshold_differ(case, dtype):
    """As many are kept of each expert, of the same magnitudes; all other entries are bit for bit."""
    theirs, others = theirs_of(key(case, dtype), case.names), 0
    for name, ours in merged(case, dtype).items():
        group = group_of(case, dtype, name)
        base, *models = (own.to(dtype) for own in (group.base, *group.models))
        equal = torch.zeros(base.shape, dtype=torch.bool)
        given = {**SETTINGS[case.theirs], **case.given}
        for t, model in enumerate(models):
            update = model - base
            wanted, edges = kept_sizes(case, dtype, name, t)
            one = {key: given[key][t] for key in ("density", "gamma") if key in given}
            whole = partial(iter, [Rows(update, torch.rand)])
            left = keep(whole, update.shape, given["sparsify"], **one)
            found = left.of(update).abs().float().flatten().sort().values
            assert torch.equal(found[found > 0], wanted[wanted > 0])
            for edge in edges:
                if (wanted == edge).sum() < (update.abs() == edge).sum():
                    equal |= update.abs() == edge
        differ = ours.to(dtype) != theirs[name]
        assert not (differ & ~equal).any(), name
        others += int(differ.sum())
    print(f"{case}, {dtype}: {others} entries of {GOLDEN[key(case, dtype)].numel()} differ")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_references_know_the_same(case, dtype):
    """Of the parameters of mergekit's recipes, places in the stream of random numbers among them."""
    method, parameters = resolved(case, dtype)
    for name, ours in merged(case, dtype, torch.float64).items():
        reference = REFERENCES[method.name](
            group_of(case, dtype, name, torch.float64), **parameters[name]
        )
        off = (ours - reference).abs().max() / reference.abs().max()
        assert off < (5e-2 if dtype == torch.bfloat16 else 1e-5), name


def test_places_count_what_is_drawn():
    drawn = [Drawn("ranked", [0.5, 0.0, 1.0, 0.2], 7), Drawn("bernoulli", [0.5, 0.0], 3)]
    assert [one.numbers() for one in drawn] == [[7, 0, 0, 7], [3, 3]]
    assert Drawn("magnitude", [0.5], 9).numbers() == [0]


def test_a_place_in_torchs_stream_whoever_asks_first():
    torch.manual_seed(2**40 + 5)
    numbers = torch.rand(50_000)
    for place, size in ((40_000, 100), (3, 5), (39_999, 3), (0, 50_000), (20_000, 0)):
        found = mersenne_twister(2**40 + 5).along(place, size)((size,))
        assert torch.equal(found, numbers[place : place + size])


def test_a_density_that_leaves_no_room_is_refused():
    group = group_of(CASES[0], torch.float32, "far")
    with pytest.raises(RecipeError, match=r"density 0.9 ± epsilon 0.15 must stay within \(0, 1\)"):
        method = registry.get("generalized_task_arithmetic")
        method(group, **method.resolve({"sparsify": "ranked", "density": 0.9}))


def test_directions_that_cancel_have_no_mean():
    base = torch.zeros(4)
    models = (torch.tensor([1.0, 0, 0, 0]), torch.tensor([-1.0, 0, 0, 0]), torch.zeros(4))
    method = registry.get("multislerp")
    with pytest.raises(TensorError, match="the directions cancel by these weights"):
        method(LinearGroup((), (1.0,) * 3, base=base, models=models), **method.resolve({}))


if __name__ == "__main__":
    print(table(everything()))
