"""What mergekit's own tests ask of a recipe's method: merged, loaded, of the right dtype and shapes.

Their test_basic_merges.py and test_merge_method_regressions.py. How many models, which base and which
parameters are theirs; the models are fine-tunes of one base, which theirs are not.
"""

from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.runs import words
from tests.e2e.models import build, save_family
from tests.mergekit.outputs import loaded, merged, stored

# By method: whether there is a base, and the parameters beside the models' weights of 0.6 and 0.4.
METHODS = [
    ("linear", False, {}),
    *(
        ("nuslerp", based, {"nuslerp_row_wise": rows, "nuslerp_flatten": whole})
        for based, rows, whole in product((False, True), repeat=3)
    ),
    ("task_arithmetic", True, {}),
    ("breadcrumbs", True, {}),
    ("ties", True, {"density": 0.3}),
    ("sce", True, {"select_topk": 0.5}),
    ("ram", True, {}),
    ("ramplus_tl", True, {"r": 0.05, "alpha": 1.0}),
    ("multislerp", True, {}),
    ("dare_ties", True, {"density": 0.66}),
    ("model_stock", True, {}),
    ("model_stock", True, {"filter_wise": True}),
    ("della", True, {"density": 0.66, "epsilon": 0.05, "lambda": 0.5}),
    ("karcher", True, {"max_iter": 5, "tol": 1e-5}),
]
# Those of two models, one of which is the base.
OF_TWO = [("slerp", {"t": 0.35}), ("nearswap", {"t": 0.0001}), ("arcee_fusion", {})]
# Of a model of vision and text their tests have these.
OF_A_COMPOSITE = {
    *("linear", "nuslerp", "task_arithmetic", "breadcrumbs", "ties", "dare_ties", "model_stock"),
    "slerp",
}
EVERY = [
    *((method, "base" if based else None, given) for method, based, given in METHODS),
    *((method, "expert1", given) for method, given in OF_TWO),
]
CASES = [
    *(("llama", *case) for case in EVERY),
    *(("llava", *case) for case in EVERY if case[0] in OF_A_COMPOSITE),
]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders of models by their kind, each made when it is asked for."""
    made = {}

    def family(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_family(kind, made[kind], experts=2)
        return made[kind]

    return family


def two(folder, method, base, parameters, weights=(0.6, 0.4), models=("expert1", "expert2")):
    """A recipe of two models, as most of their tests have it."""
    listed = [
        {"model": str(folder / own), "parameters": {"weight": weight}}
        for own, weight in zip(models, weights, strict=True)
    ]
    recipe = {"merge_method": method, "models": listed, "dtype": "bfloat16"}
    if base is not None:
        recipe["base_model"] = str(folder / base)
    return {**recipe, **({"parameters": parameters} if parameters else {})}


@pytest.mark.parametrize(("kind", "method", "base", "parameters"), CASES)
def test_two_models(kind, method, base, parameters, families, tmp_path):
    folder = families(kind)
    merged(two(folder, method, base, parameters), tmp_path)
    tensors, sources = stored(tmp_path / "out"), stored(folder / "base")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in sources.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert loaded(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "llava"])
def test_weights_that_sum_to_nothing(kind, families, tmp_path):
    folder = families(kind)
    rows = {"nuslerp_row_wise": False, "nuslerp_flatten": False}
    merged(two(folder, "nuslerp", "base", rows, weights=(-0.5, 0.5)), tmp_path)
    assert all(tensor.isfinite().all() for tensor in stored(tmp_path / "out").values())
    loaded(tmp_path / "out")


@pytest.mark.parametrize("kind", ["granite", "gpt2"])
def test_one_model_is_a_copy_in_the_dtype(kind, families, tmp_path):
    folder = families(kind)
    models = [{"model": str(folder / "expert1")}]
    merged({"merge_method": "passthrough", "models": models, "dtype": "bfloat16"}, tmp_path)
    wanted = {name: own.bfloat16() for name, own in stored(folder / "expert1").items()}
    found = stored(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loaded(tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "base", "given"), [("linear", None, {}), ("slerp", "expert1", {"t": 0.5})]
)
def test_granite(method, base, given, families, tmp_path):
    merged(two(families("granite"), method, base, given), tmp_path)
    loaded(tmp_path / "out")


def test_all_layers_twice(families, tmp_path):
    source = {"model": str(families("gpt2") / "expert1"), "layer_range": [0, 2]}
    slices = [{"sources": [source]}] * 2
    merged({"merge_method": "passthrough", "slices": slices, "dtype": "bfloat16"}, tmp_path)
    assert loaded(tmp_path / "out").config.n_layer == 4


def test_a_scale_of_nothing_for_some_tensors(families, tmp_path):
    scale = [{"filter": "o_proj", "value": 0}, {"value": 1}]
    model = {"model": str(families("llama") / "expert1"), "parameters": {"scale": scale}}
    merged({"merge_method": "passthrough", "models": [model]}, tmp_path)
    tensors, sources = stored(tmp_path / "out"), stored(families("llama") / "expert1")
    emptied = {name for name, own in tensors.items() if not own.any()}
    assert emptied == {name for name in tensors if "o_proj" in name} != set()
    assert all(torch.equal(tensors[n], sources[n]) for n in tensors.keys() - emptied)


def test_an_epsilon_that_leaves_no_probability_is_refused(families, tmp_path):
    given = {"density": 0.66, "epsilon": 1.35, "lambda": 0.5}
    ran = merged(two(families("llama"), "della", "base", given), tmp_path, code=2)
    assert "epsilon" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_models_that_have_nothing_in_common_with_the_base(families, tmp_path):
    """As theirs are, each with random weights of its own: said, and merged where that is meant."""
    folder = tmp_path / "strangers"
    for number, name in enumerate(("base", "expert1", "expert2")):
        build("llama", seed=number).save_pretrained(folder / name)
    recipe = two(folder, "task_arithmetic", "base", {})
    assert "not-a-fine-tune" in merged(recipe, tmp_path, code=2).stderr
    assert not (tmp_path / "out").exists()
    merged(recipe, tmp_path, "--allow", "not-a-fine-tune")
    loaded(tmp_path / "out")


# Single tensors, by mergekit's recipes of files.


def of_files(place, method, tensors, parameters=None, each=(), base=True, code=0, **more):
    """Merge files of a tensor `w` each, the first the base; beside it is one that every method changes."""
    for number, own in enumerate(tensors):
        other = torch.full((2, 2), 1.0 + number * (number > 0))
        save_file({"w": torch.as_tensor(own), "other": other}, place / f"{number}.safetensors")
    listed = [{"model": str(place / f"{number}.safetensors")} for number in range(len(tensors))]
    for model, own in zip(listed, each, strict=False):
        model["parameters"] = {"weight": own}
    recipe = {"merge_method": method, "models": listed[1:] if base else listed, **more}
    if base:
        recipe["base_model"] = str(place / "0.safetensors")
    ran = merged({**recipe, "parameters": parameters or {}}, place, code=code)
    return ran if code else stored(place / "out")["w"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
def test_ties_of_a_single_entry(shape, density, tmp_path):
    tensors = [torch.zeros(shape), torch.ones(shape)]
    found = of_files(tmp_path, "ties", tensors, {"weight": 1.0, "density": density})
    assert torch.equal(found, torch.ones(shape))


def test_ties_that_keeps_nothing_is_the_base_and_no_merge(tmp_path):
    given = {"weight": 1.0, "density": 0.0}
    ran = of_files(tmp_path, "ties", [torch.zeros(1), torch.ones(1)], given, code=1)
    assert "every tensor equals the base's" in words(ran.stderr + ran.stdout)


@pytest.mark.parametrize("transposed", [False, True])
def test_nuslerp_of_rows_of_one_direction(transposed, tmp_path):
    """Equal, longer and opposite rows are means; at right angles it is halfway round."""
    one = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    other = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    wanted = torch.tensor([[1.0, 0.0], [1.25, 0.0], [0.5, 0.0], [0.9238795325, 0.3826834324]])
    tensors = [own.T.contiguous() if transposed else own for own in (one, other)]
    given = {"nuslerp_flatten": False, "nuslerp_row_wise": transposed}
    found = of_files(tmp_path, "nuslerp", tensors, given, each=(0.75, 0.25), base=False)
    torch.testing.assert_close((found.T if transposed else found).float(), wanted)


def test_slerp_with_zeros_is_no_mean(tmp_path):
    """Zero is at right angles to everything: sin(π/4) of the other, as mergekit 0.1.5 gives it."""
    tensors = [torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])]
    found = of_files(tmp_path, "slerp", tensors, {"t": 0.5})
    torch.testing.assert_close(found, 0.5**0.5 * tensors[1])


def test_karcher_of_one_direction_has_the_mean_length(tmp_path):
    tensors = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])]
    found = of_files(tmp_path, "karcher", tensors, base=False)
    torch.testing.assert_close(found, torch.tensor([1.5, 0.0]))


@pytest.mark.parametrize("value", [0.0, 1e-7])
def test_karcher_of_what_is_below_its_tolerance(value, tmp_path):
    found = of_files(tmp_path, "karcher", [torch.full((3,), value)] * 2, base=False)
    assert torch.equal(found, torch.zeros(3))


def test_arcee_fusion_of_one_number(tmp_path):
    assert of_files(tmp_path, "arcee_fusion", [torch.tensor(1.0), torch.tensor(2.5)]) == 2.5


@pytest.mark.parametrize("by_rows", [False, True])
def test_model_stock_where_updates_cancel_keeps_the_base(by_rows, tmp_path):
    tensors = [torch.tensor([[first, 3.0]]) for first in (2.0, 3.0, 1.0)]
    found = of_files(tmp_path, "model_stock", tensors, {"filter_wise": by_rows})
    assert torch.equal(found, tensors[0])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_sce_of_what_does_not_vary(shape, share, tmp_path):
    tensors = [torch.ones(shape), torch.full(shape, 3.0), torch.full(shape, 3.0)]
    found = of_files(tmp_path, "sce", tensors, {"select_topk": share})
    assert torch.equal(found, tensors[1] if share == 1 else tensors[0])


def test_linear_is_divided_before_it_is_rounded(tmp_path):
    tensors = [torch.full((4,), 60000.0, dtype=torch.float16)] * 2
    found = of_files(tmp_path, "linear", tensors, {"weight": 1.0}, base=False)
    assert torch.equal(found, tensors[0])


def test_linear_of_weights_that_sum_to_nothing(tmp_path):
    """NaN there; here an error with the tensor. Where nothing is divided both subtract."""
    tensors = [torch.ones(3), torch.full((3,), 2.0)]
    ran = of_files(tmp_path, "linear", tensors, each=(1.0, -1.0), base=False, code=2)
    assert "other" in ran.stderr or "w" in ran.stderr
    given = {"normalize": False}
    found = of_files(tmp_path, "linear", tensors, given, each=(1.0, -1.0), base=False)
    assert torch.equal(found, torch.full((3,), -1.0))
