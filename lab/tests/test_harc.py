"""HARC against the authors' code, against its equation solved densely, and on whole models."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from covmerge import Generated
from covmerge.errors import InputError
from covmerge_lab.harc import calibrate, solve
from tests.e2e.models import TEXT, build, fine_tuned
from tests.statistics.models import encode, save, save_family, texts

GOLDEN = Path(__file__).parent / "golden" / "harc.safetensors"


def written_out(routers, inputs, off_diagonal):
    """The matrix of the equation `(experts · d, experts · d)` and its right side, token by token."""
    size = routers[0].numel()
    left, right = torch.zeros(size, size).double(), torch.zeros(size).double()
    for w, rows in zip(routers, inputs, strict=True):
        mean = torch.zeros(size, size).double()
        for x in rows.double():
            r = torch.softmax(w.double() @ x, dim=0)
            mean += torch.kron(r.diag() - torch.outer(r, r), torch.outer(x, x)) / len(rows)
        mean = off_diagonal * mean + (1 - off_diagonal) * mean.diag().diag()
        left += mean
        right += mean @ w.double().flatten()
    return left, right


def a_problem(count=3, experts=4, width=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    routers = [torch.randn(experts, width, generator=draw).double() for _ in range(count)]
    inputs = [torch.randn(20 + n, width, generator=draw).double() for n in range(count)]
    return routers, inputs, torch.randn(experts, width, generator=draw).double()


@pytest.mark.parametrize("off_diagonal", [0.0, 0.5, 0.9])
def test_it_solves_the_equation(off_diagonal):
    routers, inputs, start = a_problem()
    left, right = written_out(routers, inputs, off_diagonal)
    expected = torch.linalg.solve(left, right).view_as(start)
    found = solve(routers, inputs, start, off_diagonal=off_diagonal, tolerance=1e-14)
    torch.testing.assert_close(found.weight, expected, rtol=1e-9, atol=1e-9)
    assert found.residual <= 1e-14


def test_where_it_has_many_solutions_it_is_the_one_by_the_start():
    routers, inputs, start = a_problem()
    left, right = written_out(routers, inputs, 1.0)
    assert (
        torch.linalg.matrix_rank(left) == 3 * 6
    )  # a vector that is added to all rows changes nothing
    nearest = torch.linalg.pinv(left, hermitian=True) @ (right - left @ start.flatten())
    found = solve(routers, inputs, start, off_diagonal=1.0, tolerance=1e-14)
    torch.testing.assert_close(found.weight, start + nearest.view_as(start), rtol=1e-8, atol=1e-8)


# With 0.9 the last of 29 steps are of rounding's size, in their code and here.
@pytest.mark.parametrize(("off_diagonal", "apart"), [(0.9, 5e-6), (1.0, 1e-9)])
def test_it_is_what_the_authors_code_gives(off_diagonal, apart):
    """Their functions for the product and for conjugate gradients, in float64 to a residual of 1e-6."""
    golden = load_file(GOLDEN)
    routers, inputs = ([golden[f"{name}_{n}"] for n in range(3)] for name in ("router", "inputs"))
    found = solve(routers, inputs, golden["start"], off_diagonal=off_diagonal).weight
    torch.testing.assert_close(found, golden[f"merged_{off_diagonal}"], rtol=apart, atol=apart)


def test_a_router_that_all_experts_have_stays():
    (router, *_), inputs, start = a_problem()
    found = solve([router] * 3, inputs, start, tolerance=1e-13)
    torch.testing.assert_close(found.weight, router, rtol=1e-9, atol=1e-9)
    assert solve([router] * 3, inputs, router).steps == 0


def test_steps_end_where_they_are_told():
    assert solve(*a_problem(), most=2).steps == 2


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base and two experts of a mixture of two layers; the base is what is calibrated."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **TEXT,
                num_hidden_layers=2,
                intermediate_size=24,
                num_key_value_heads=1,
                num_local_experts=3,
                max_position_embeddings=32,
                initializer_range=0.3,
            )
        )
    return save_family(base, tmp_path_factory.mktemp("mixture"))


def batches(folder, seed):
    return [encode(folder, texts(6, seed=seed)), encode(folder, texts(6, seed=seed + 10))]


def seen(model, layer, given):
    """What a layer's router gets, of tokens that are no padding."""
    found, router = [], model.model.layers[layer].mlp.gate
    handle = router.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with torch.no_grad():
        for batch in given:
            model(**batch)
    handle.remove()
    return torch.cat(
        [x[b["attention_mask"].flatten().bool()] for x, b in zip(found, given, strict=True)]
    )


def test_every_router_is_solved_behind_those_before_it(family, tmp_path):
    base, experts = family
    shown = {name: batches(base, seed) for seed, name in enumerate(experts)}
    found = calibrate(base, experts, shown)
    own = {n: transformers.MixtralForCausalLM.from_pretrained(p) for n, p in experts.items()}
    for layer in range(2):
        routers = [model.model.layers[layer].mlp.gate.weight.detach() for model in own.values()]
        inputs = [seen(found.model, layer, given) for given in shown.values()]
        left, right = written_out(routers, inputs, 0.9)
        weight = found.model.model.layers[layer].mlp.gate.weight.detach().double().flatten()
        assert (left @ weight - right).norm() < 2e-6 * right.norm()
    assert list(found.routers) == [f"model.layers.{n}.mlp.gate" for n in range(2)]
    assert not found.notes
    found.model.save_pretrained(tmp_path / "out")
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = transformers.MixtralForCausalLM.from_pretrained(base).state_dict()
    moved = {name for name in before if not torch.equal(before[name], again[name])}
    assert moved == {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}


def test_inputs_that_the_experts_write_or_that_are_drawn(family):
    base, experts = family
    for made in (Generated(tokens=6), Generated("random")):
        found = calibrate(base, experts, made, max_examples=4)
        assert all(solved.residual < 1e-6 for solved in found.routers.values())


def test_models_that_are_refused(family, tmp_path):
    base, experts = family
    shown = {name: batches(base, 0) for name in experts}
    with pytest.raises(InputError, match=r"LlamaForCausalLM\) has no routers"):
        calibrate(save("llama", tmp_path / "llama"), experts, shown)
    with pytest.raises(InputError, match="has GptOssTopKRouter, and HARC is for Mixtral"):
        calibrate(save("gpt_oss", tmp_path / "oss"), experts, shown)
    other = save(fine_tuned(build("mixtral"), seed=1), tmp_path / "other")
    with pytest.raises(InputError, match=r"router '.*1.mlp.gate' is None in .*other and \[3, 16\]"):
        calibrate(base, {**experts, "other": other}, {**shown, "other": batches(base, 0)})
    with pytest.raises(InputError, match="'e2' is not both an expert and a name of examples"):
        calibrate(base, experts, {"e1": shown["e1"]})
    with pytest.raises(InputError, match="e2 has no examples: pass one batch or more"):
        calibrate(base, experts, {**shown, "e2": []})
