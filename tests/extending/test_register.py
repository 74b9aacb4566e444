"""A method in a few lines: what need not be declared, and what is refused."""

import json
import re
import sys

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup
from covmerge.errors import CovmergeError, RecipeError, TensorError
from covmerge.maths.registry import origin_of
from tests.advised import advice

pytestmark = pytest.mark.usefixtures("forget")

OTHERS = advice("which others do not have: register it in a file that the program imports, or")
UPDATES = [torch.eye(3), 2 * torch.eye(3)]


def largest(group: covmerge.LinearGroup, *, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.stack(group.updates).amax(0)


def test_a_method_in_three_lines():
    covmerge.register("largest")(largest)
    assert torch.equal(covmerge.merge_layer(UPDATES, "largest", scale=0.5), torch.eye(3))
    assert "largest" in covmerge.methods.names()
    base = {"fc.weight": torch.zeros(3, 3), "norm.weight": torch.zeros(3)}
    experts = [{"fc.weight": update, "norm.weight": torch.ones(3)} for update in UPDATES]
    merged = covmerge.merge(base, experts, "largest").tensors
    assert torch.equal(merged["fc.weight"], 2 * torch.eye(3))
    assert torch.equal(merged["norm.weight"], torch.ones(3))  # averaged, as it is no matrix
    covmerge.testing.check_method("largest")


def test_a_method_that_works_in_place_spoils_no_other():
    base = {"fc.weight": torch.zeros(3, 3)}
    experts = [{"fc.weight": update.clone()} for update in UPDATES]

    def in_place(group):
        first, second = group.updates
        return first.add_(second)

    def on_a_copy(group):
        first, second = group.updates
        return first.clone().add_(second)

    said = advice("the same: have it work on copies, such as `update.clone()`")
    with pytest.raises(TensorError, match=said):
        covmerge.compare(base, experts, [in_place, "average"])
    with pytest.raises(TensorError, match="method 'in_place' changed in place"):
        covmerge.merge_layer([update.clone() for update in UPDATES], in_place)
    found = covmerge.compare(base, experts, [on_a_copy, "average"])
    assert [row.norm for row in found.rows] == pytest.approx([3 * 3**0.5, 1.5 * 3**0.5])
    with torch.inference_mode():  # where torch counts no changes
        updates = [2 * update for update in UPDATES]
        assert torch.equal(covmerge.merge_layer(updates, "average"), 3 * torch.eye(3))


def test_a_function_or_a_class_as_method():
    """It is registered under its own name; a cell that runs again replaces it."""

    class Largest:
        def __call__(self, group, *, scale: float = 1.0):
            return largest(group, scale=scale)

    base = {"fc.weight": torch.zeros(3, 3)}
    experts = [{"fc.weight": update} for update in UPDATES]
    for passed in (largest, Largest, largest, "largest(scale=0.5)"):
        more = {} if isinstance(passed, str) else {"scale": 0.5}
        result = covmerge.merge(base, experts, passed, **more)
        assert torch.equal(result.tensors["fc.weight"], torch.eye(3))
        assert result.recipe.parameters == {"scale": 0.5}
    assert torch.equal(covmerge.merge_layer(UPDATES, Largest), 2 * torch.eye(3))
    rows = covmerge.compare(base, experts, [(largest, {"scale": 0.5}), (largest, {"scale": 1.0})])
    assert [row.label for row in rows.rows] == ["largest-scale=0.5", "largest-scale=1.0"]

    def redefined(factor):
        def cell(group):
            return factor * group.updates[0]

        return cell

    for factor in (2.0, 3.0):
        assert torch.equal(covmerge.merge_layer(UPDATES, redefined(factor)), factor * torch.eye(3))

    def ties(group):
        return group.updates[0]

    with pytest.raises(RecipeError, match="method 'ties' is registered twice"):
        covmerge.merge(base, experts, ties)
    with pytest.raises(
        RecipeError, match=advice("a lambda has no name for a {}: define the function by def")
    ):
        covmerge.merge(base, experts, lambda group: group.updates[0])


def test_a_function_in_a_rule_and_one_that_fails():
    base = {"fc.weight": torch.zeros(3, 3), "layers.0.fc.weight": torch.zeros(3, 3)}
    experts = [dict.fromkeys(base, update) for update in UPDATES]
    rule = {"match": "layers.*", "method": largest, "parameters": {"scale": 0.5}}
    result = covmerge.merge(base, experts, "task_arithmetic(scale=1.0)", rules=[rule])
    assert torch.equal(result.tensors["layers.0.fc.weight"], torch.eye(3))
    assert torch.equal(result.tensors["fc.weight"], 3 * torch.eye(3))

    def failing(group):
        return group.updates[0] @ torch.ones(4)

    with pytest.raises(RuntimeError, match="size mismatch") as failed:
        covmerge.merge(base, experts, failing)
    if sys.version_info >= (3, 11):
        assert failed.value.__notes__ == ["while 'fc.weight' was merged"]


def test_a_method_that_had_nothing_to_merge_is_told():
    base = {"fc": torch.zeros(3, 3), "norm.weight": torch.zeros(3)}
    experts = [dict.fromkeys(base, torch.ones(3, 3)) | {"norm.weight": torch.ones(3)}] * 2
    told = advice("merged nothing: no tensor is known for a layer's matrix, so all {} are averaged")
    (warning,) = covmerge.merge(base, experts, largest).warnings
    assert re.search(told, warning)
    rule = json.loads(warning.partition("add rules such as ")[2])
    by_rule = covmerge.merge(base, experts, largest, scale=0.5, rules=[rule])
    assert not by_rule.warnings
    assert torch.equal(by_rule.tensors["fc"], torch.full((3, 3), 0.5))


def test_a_function_that_other_processes_do_not_have(tmp_path):
    from tests.cli.runs import save_plain

    folder = save_plain(tmp_path)
    experts = [folder / f"{name}.safetensors" for name in ("a", "b")]
    with pytest.raises(covmerge.errors.InputError, match=OTHERS):
        covmerge.merge(folder / "base.safetensors", experts, largest, tmp_path / "out", workers=2)
    covmerge.merge(folder / "base.safetensors", experts, largest, tmp_path / "out")


def test_code_that_no_file_has_is_known_by_what_it_does():
    """A notebook's method that was typed anew and changed is not gone on with."""

    def typed(text):
        found = {"__name__": "a_notebook"}
        exec(compile(text, "<cell>", "exec"), found)
        return origin_of("method", "m", found["m"], None).code

    text = "def m(group):\n    return sum(1.0 * u for u in group.updates if u in {'a', 'b'})"
    assert typed(text) == typed(f"\n\n{text}  # said")
    codes = [
        text,
        text.replace("1.0", "2.0"),
        text.replace("updates", "models"),
        text.replace("b", "c"),
    ]
    assert len({*map(typed, codes)}) == 4


def test_what_is_not_declared():
    covmerge.register("largest")(largest)
    covmerge.register("any_shape", unit="element")(largest)
    method, anywhere = covmerge.methods.get("largest"), covmerge.methods.get("any_shape")
    assert (method.unit, method.others, method.data) == ("matrix", "average", "none")
    assert not (method.needs_base or method.writes_masks or method.factored_for({}))
    laws = method.laws
    assert {laws.order_invariant, laws.scale_equivariant, laws.rotation_equivariant} == {None}
    assert laws.replicas is None
    assert method.reference is None
    own = [covmerge.methods.get(n).cost(64, 64, 4, 4) for n in covmerge.methods.names()]
    cost = method.cost(64, 64, 4, 4)
    assert (
        cost.flops > 0 and cost.workspace >= sorted(each.workspace for each in own)[len(own) // 2]
    )
    # A bias of 4096 entries is no reason to hold a matrix of 4096 × 4096.
    assert anywhere.cost(1, 4096, 4, 4).workspace < 2**20


def test_a_name_is_registered_once():
    covmerge.register("largest")(largest)
    said = advice(
        "is registered twice: by {} and by {}; choose another name, or unregister({}) first"
    )
    with pytest.raises(ValueError, match=said):
        covmerge.register("largest")(largest)
    covmerge.register("another")(largest)
    with pytest.raises(
        ValueError, match=r"method 'ace' is registered twice: by covmerge\.maths\.methods\.ace"
    ):
        covmerge.register("ace")(largest)
    covmerge.methods.registry.unregister("largest")
    covmerge.register("largest")(largest)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"unit": "elephant"}, "method 'odd': unit='elephant'; it is one of 'element', 'row'"),
        ({"others": "drop"}, "others='drop'; it is one of 'average', 'base'"),
        ({"data": "grams"}, "data='grams'; it is one of 'none', 'gram'"),
        ({"factored": True}, "factored=True; it is one of 'none', 'outputs'"),
    ],
)
def test_what_cannot_be_declared(declared, says):
    with pytest.raises(ValueError, match=says):
        covmerge.register("odd", **declared)(largest)


@pytest.mark.parametrize("name", ["../out", "a b", "", "all", "a/b", ".hidden", "a" * 101])
def test_what_cannot_be_a_name(name):
    said = advice(
        "cannot name a {}: use up to 100 letters, digits, '_', '.', '+' or '-', and not '{}'"
    )
    with pytest.raises(ValueError, match=said):
        covmerge.register(name)(largest)
    covmerge.register("a_1.b+c-D")(largest)


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        lambda group, scale: None,
        lambda group, *rest: None,
        lambda group, **rest: None,
    ],
)
def test_a_function_of_another_form(function):
    said = advice(
        "is a function {}: write it as ({}, *, parameters), its parameters after the star"
    )
    with pytest.raises(ValueError, match=said):
        covmerge.register("odd")(function)
    covmerge.register("odd")(lambda group, *, scale=1.0: scale * group.updates[0])
    assert torch.equal(covmerge.merge_layer(UPDATES, "odd"), UPDATES[0])


FACTORS = advice("the base has no basis of low rank; leave `factored` out")
WEIGHTS = advice("and without a global pass; declare another `unit`, and leave out the others")


@pytest.mark.parametrize(
    ("declared", "says", "right"),
    [
        ({"needs_base": True, "factored": "both"}, FACTORS, {"needs_base": True}),
        ({"sees": "weights", "unit": "matrix"}, WEIGHTS, {"sees": "weights", "unit": "tensor"}),
        (
            {"sees": "weights", "unit": "element", "data": "gram"},
            WEIGHTS,
            {"sees": "weights", "unit": "element"},
        ),
    ],
)
def test_what_does_not_go_together(declared, says, right):
    with pytest.raises(ValueError, match=says):
        covmerge.register("odd", **declared)(largest)
    covmerge.register("odd", **right)(largest)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (SystemExit(0), advice("and gave nothing for {}: choose another {}, or repair it")),
        (MemoryError(), advice("fewer --workers and --threads, or another {}")),
    ],
)
def test_a_method_that_ends_the_program(raised, says):
    def ends(group):
        raise raised

    covmerge.register("odd")(ends)
    with pytest.raises(CovmergeError, match=says):
        covmerge.merge_layer(UPDATES, "odd")
    covmerge.merge_layer(UPDATES, "average")
    covmerge.methods.registry.unregister("odd")
    covmerge.register("odd")(largest)
    covmerge.merge_layer(UPDATES, "odd")


def test_updates_that_a_method_cannot_take():
    """In float64 for one that goes with the scale; in other units for one that does not."""
    laws = covmerge.Laws(scale_equivariant=True)
    covmerge.register("large", laws=laws)(lambda group: group.updates[0] * 1e30 * 1e30)
    with pytest.raises(TensorError, match=advice("is too large for {}: compute in float64")):
        covmerge.merge_layer(UPDATES, "large")
    assert covmerge.merge_layer([own.double() for own in UPDATES], "large").isfinite().all()
    laws = covmerge.Laws(scale_equivariant=False)
    covmerge.register("odd", laws=laws)(
        lambda group: group.updates[0] / group.updates[0].norm() ** 9
    )
    small = [1e-6 * own for own in UPDATES]
    said = advice(
        "needs updates of usual size: multiply them by one factor and divide the result by it"
    )
    with pytest.raises(TensorError, match=said):
        covmerge.merge_layer(small, "odd")
    assert (covmerge.merge_layer([own * 1e6 for own in small], "odd") / 1e6).isfinite().all()
    said = advice("(in the experts' order); {}, or merge this tensor by `average`")
    with pytest.raises(TensorError, match=said):
        covmerge.merge_layer(small, "odd")
    assert covmerge.merge_layer(small, "average").isfinite().all()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda d: d.double(), r"method 'odd' returns \[3, 3\] torch.float64 .* torch.float32"),
        (lambda d: d[:2], r"method 'odd' returns \[2, 3\]"),
        (lambda d: d.tolist(), "method 'odd' returns a list"),
        (lambda d: d / 0, "method 'odd' gives NaN or Inf"),
        (lambda d: d.to_sparse(), r"method 'odd' returns .*sparse.*to_dense"),
    ],
)
def test_a_result_that_cannot_be_merged(result, says):
    covmerge.register("odd")(lambda group: result(group.updates[0]))
    with pytest.raises(TensorError, match=says):
        covmerge.merge_layer(UPDATES, "odd")


def test_a_result_that_torch_tracks_is_added_to_the_base():
    covmerge.register("tracked")(lambda group: group.updates[0].clone().requires_grad_())
    base = {"fc.weight": torch.zeros(3, 3)}
    merged = covmerge.merge(base, [{"fc.weight": UPDATES[0]}], "tracked").tensors["fc.weight"]
    assert torch.equal(merged, UPDATES[0])


def test_parameters_are_those_of_the_signature():
    covmerge.register("largest")(largest)
    with pytest.raises(
        RecipeError, match=r"method 'largest' has no parameter 'scal'. Did you mean"
    ):
        covmerge.merge_layer(UPDATES, "largest", scal=1.0)
    with pytest.raises(RecipeError, match="method 'largest': scale = 'x'"):
        covmerge.merge_layer(UPDATES, "largest", scale="x")

    @covmerge.register("needy")
    def needy(group, *, power):
        return group.updates[0] * power

    with pytest.raises(RecipeError, match="method 'needy': power: it has no default"):
        covmerge.merge_layer(UPDATES, "needy")
    assert torch.equal(covmerge.merge_layer(UPDATES, "needy", power=2), 2 * torch.eye(3))


def test_the_types_are_public():
    for name in ("Cost", "Laws", "LinearGroup", "Merged", "Reference", "GlobalPass"):
        assert name in covmerge.__all__
        assert isinstance(getattr(covmerge, name), type)
    assert covmerge.LinearGroup is LinearGroup


def test_a_result_that_is_the_base_is_not_added_to_itself():
    covmerge.register("twice", needs_base=True)(lambda group: group.base)
    base = {"fc.weight": torch.full((3, 3), 5.0)}
    kept = base["fc.weight"].clone()
    merged = covmerge.merge(base, [{"fc.weight": kept + 1}], "twice").tensors["fc.weight"]
    assert torch.equal(merged, 2 * kept)
    assert torch.equal(base["fc.weight"], kept)


def test_a_script_is_recorded_by_its_code(tmp_path):
    from tests.cli.runs import save_plain

    covmerge.register("largest")(largest)
    covmerge.register_step("halve", when="after")(lambda group, merged: merged.delta / 2)
    folder = save_plain(tmp_path)
    experts = {name: folder / f"{name}.safetensors" for name in ("a", "b")}
    rule = {"match": "*layers.0.mlp*", "method": "average", "after": ["halve"]}
    out = tmp_path / "out"
    done = covmerge.merge(folder / "base.safetensors", experts, "largest", out, rules=[rule])
    recorded = json.loads((out / "covmerge.json").read_text())["extensions"]
    assert [(own["kind"], own["name"]) for own in recorded] == [
        ("method", "largest"),
        ("step", "halve"),
    ]
    for own in recorded:
        assert (own["distribution"], own["version"]) == (None, None)
        assert own["module"] == "tests.extending.test_register"
        assert len(own["code"]) == 64
    note = "method 'largest' is not covmerge's own: module tests.extending.test_register, of no installed"
    assert any(note in each for each in done.notes)
    assert "`halve` is not covmerge's own step" in (out / "README.md").read_text()
    ours = tmp_path / "ours"
    covmerge.merge(folder / "base.safetensors", experts, "ace", ours, after=["rescale"])
    assert "extensions" not in json.loads((ours / "covmerge.json").read_text())
