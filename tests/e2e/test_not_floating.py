"""Tensors that are not floating point: complex ones are merged, others that differ are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError, TensorError
from covmerge.run.recompute import recompute
from tests.cli.runs import covmerge as cli

NAMES = ("a", "b")
FLOATS = {"h.1.fc.weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}


def models(folder, *parts):
    """A base and experts with these tensors beside a matrix that all of them trained."""
    for number, (name, own) in enumerate(zip(("base", *NAMES), parts, strict=True)):
        draw = torch.Generator().manual_seed(number)
        moved = {
            n: w + 0.01 * bool(number) * torch.randn(8, 8, generator=draw)
            for n, w in FLOATS.items()
        }
        (folder / name).mkdir()
        tensors = {n: t.clone().contiguous() for n, t in {**own, **moved}.items()}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    return folder / "base", {name: folder / name for name in NAMES}


def differing(make):
    return [{"h.0.thing": make(number)} for number in range(3)]


def held(tensors):
    """A base and experts in memory."""
    base, *experts = ({"w": own, **FLOATS} for own in tensors)
    return base, dict(zip(NAMES, experts, strict=True))


def stopped(base, experts, folder, **given):
    """Every kind of merge stops; return what was said."""
    runs = {
        "to disk": lambda: covmerge.merge(base, experts, "average", folder / "out", **given),
        "in memory": lambda: covmerge.merge(base, experts, "ties", **given),
        "of dicts": lambda: covmerge.merge(
            load_file(base / "model.safetensors"),
            {n: load_file(e / "model.safetensors") for n, e in experts.items()},
            "average",
            **given,
        ),
        "compared": lambda: covmerge.compare(
            base, experts, ["average", "ace"], folder / "out", **given
        ),
        "to an adapter": lambda: covmerge.merge(
            base, experts, "average", folder / "out", form="adapter", rank=2, **given
        ),
    }
    said = []
    for run in runs.values():
        with pytest.raises(InputError) as caught:
            run()
        assert not (folder / "out").exists()
        said.append(str(caught.value))
    return said


class TestComplex:
    @pytest.fixture
    def drawn(self):
        draw = torch.Generator().manual_seed(0)
        base, *moved = torch.randn(3, 6, 8, dtype=torch.complex64, generator=draw)
        return [base, *(base + 0.05 * own for own in moved)]

    @pytest.mark.parametrize("method", ["average", "ties", "task_arithmetic", "tsv_m", "emr"])
    def test_merged_to_disk_as_in_memory(self, method, drawn, tmp_path):
        parts = [{"h.0.filter": w, "h.0.one": w[0, 0]} for w in drawn]
        base, experts = models(tmp_path, *parts)
        covmerge.merge(base, experts, method, tmp_path / "out")
        found = load_file(tmp_path / "out" / "model.safetensors")
        memory = covmerge.merge(base, experts, method).tensors
        assert found["h.0.filter"].dtype == torch.complex64
        for name in ("h.0.filter", "h.0.one"):
            assert torch.equal(found[name], memory[name])
            assert not torch.equal(found[name], parts[0][name])
        assert covmerge.verify(tmp_path / "out").ok
        assert recompute(tmp_path / "out", tensors=99).ok
        if method in ("average", "tsv_m"):
            mean = (drawn[1].to(torch.complex128) + drawn[2]) / 2
            torch.testing.assert_close(
                found["h.0.filter"].to(torch.complex128), mean, rtol=0, atol=1e-6
            )

    def test_real_and_imaginary_parts_are_numbers(self, drawn):
        """As a tensor that is stored as these parts is merged."""
        own = covmerge.merge(*held(drawn), "ties")
        real = covmerge.merge(*held([torch.view_as_real(w) for w in drawn]), "ties")
        assert torch.equal(torch.view_as_real(own.tensors["w"]), real.tensors["w"])
        assert any("1 tensor is complex ('w')" in note for note in own.notes)

    def test_the_expert_of_masks_is_complex_again(self, drawn, tmp_path):
        base, experts = models(tmp_path, *({"h.0.filter": w} for w in drawn))
        covmerge.merge(base, experts, "emr", tmp_path / "out")
        own = covmerge.load_expert(tmp_path / "out", "a", base)
        assert own["h.0.filter"].dtype == torch.complex64 and own["h.0.filter"].shape == (6, 8)

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    @pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
    def test_a_dtype_that_no_file_holds_is_refused(self, dtype, drawn):
        with pytest.raises(
            InputError, match=r"'w' is torch\.complex.*convert it to .*torch\.complex64"
        ):
            covmerge.merge(*held([w.to(dtype) for w in drawn]), "average")

    def test_beside_a_real_one_is_refused(self, drawn):
        real = torch.view_as_real(drawn[1])
        with pytest.raises(
            TensorError, match=r"complex64 in the base and torch\.float32 in expert"
        ):
            covmerge.merge({"w": drawn[0], **FLOATS}, {"a": {"w": real, **FLOATS}}, "average")


INTEGERS = {
    "int64": lambda number: torch.arange(6) + 10 * number,
    "uint8": lambda number: (torch.arange(6) + 10 * number).to(torch.uint8),
    "bool": lambda number: torch.arange(6) % (number + 2) == 0,
    "another shape": lambda number: torch.arange(6 + number),
    "another dtype": lambda number: (torch.arange(6) + 256 * bool(number)).to(
        [torch.uint8, torch.int32][bool(number)]
    ),
    "one number": lambda number: torch.tensor(number),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_that_differ_stop_every_merge(kind, tmp_path):
    base, experts = models(tmp_path, *differing(INTEGERS[kind]))
    for said in stopped(base, experts, tmp_path):
        assert "changed-integers: expert 'a': has other values than the base in 1 tensor" in said
        assert "'h.0.thing'" in said and 'allow=["changed-integers"]' in said
    shown = cli(
        "inspect", "--base", base, *(f"--expert={n}={e}" for n, e in experts.items()), code=1
    )
    assert "h.0.thing" in shown.stdout


def test_what_is_advised_goes_on_to_the_end(tmp_path):
    base, experts = models(tmp_path, *differing(INTEGERS["int64"]))
    for number, given in enumerate(
        ({"allow": ["changed-integers"]}, {"rules": [{"match": "h.0.thing", "use": "base"}]})
    ):
        out = tmp_path / f"out{number}"
        result = covmerge.merge(base, experts, "average", out, **given)
        assert torch.equal(load_file(out / "model.safetensors")["h.0.thing"], torch.arange(6))
        assert covmerge.verify(out).ok
        said = [text for text in result.warnings if "changed-integers, which is allowed" in text]
        assert len(said) == (2 if number == 0 else 0)


def test_the_same_values_say_nothing(tmp_path):
    """In whatever dtype; and an expert that lacks the table has no other."""
    table = torch.arange(6)
    parts = [{"h.0.thing": table}, {"h.0.thing": table.to(torch.uint8)}, {}]
    result = covmerge.merge(*models(tmp_path, *parts), "average", tmp_path / "out")
    assert not any("h.0.thing" in text for text in (*result.warnings, *result.notes))


def test_counters_of_batches_are_a_note(tmp_path):
    parts = [
        {f"h.{n}.bn.num_batches_tracked": torch.tensor(10 * number) for n in range(3)}
        for number in range(3)
    ]
    result = covmerge.merge(*models(tmp_path, *parts), "average", tmp_path / "out")
    (note, _) = [text for text in result.notes if "num_batches_tracked" in text]
    assert note.startswith("expert 'a': has other values in 3 tensors") and "batches" in note


def test_a_merge_without_a_base_names_them_too(tmp_path):
    _, experts = models(tmp_path, *differing(INTEGERS["int64"]))
    recipe = {"experts": {n: str(e) for n, e in experts.items()}, "method": "linear"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"base": None, **recipe}))
    run = cli("merge", tmp_path / "recipe.yaml", tmp_path / "out", code=2)
    assert "expert 'b': has other values than expert 'a' in 1 tensor" in " ".join(
        run.stderr.split()
    )


CODES = [
    ("fc.weight", "fc.weight_quantizer._scale"),
    ("fc.weight", "fc.weight.scales"),
    ("fc.q_weight", "fc.q_scale"),
    ("fc.qweight", "fc.wscales"),
    ("fc.qw", "fc.sc"),
    ("fc.weight", "fc_scale"),
]


@pytest.mark.parametrize(("code", "scale"), CODES)
def test_codes_never_go_with_scales_of_others(code, scale, tmp_path):
    """Nothing keeps the base's codes under merged scales: not what is allowed, nor a rule for one."""
    drawn = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    scales = drawn.abs().amax(2, keepdim=True) / 127
    parts = [
        {f"h.0.{code}": (w / s).round().to(torch.int8), f"h.0.{scale}": s}
        for w, s in zip(drawn, scales, strict=True)
    ]
    base, experts = models(tmp_path, *parts)
    for given in (
        {},
        {"allow": ["changed-integers"]},
        {"rules": [{"match": f"h.0.{code}", "use": "base"}]},
    ):
        with pytest.raises(InputError, match=f"h.0.{code}.*look like quantised weights"):
            covmerge.merge(base, experts, "average", tmp_path / "out", **given)
    rules = [{"match": f"h.0.{name}", "use": "base"} for name in (code, scale)]
    covmerge.merge(base, experts, "average", tmp_path / "out", rules=rules)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged[name], parts[0][name]) for name in parts[0])


def test_scales_over_the_same_codes_are_merged(tmp_path):
    """Then the mean of the scales is that of the weights."""
    codes = torch.randint(-127, 128, (8, 8), dtype=torch.int8)
    parts = [
        {"h.0.fc.weight": codes, "h.0.fc.scale_factor": torch.full((8, 1), 1.0 + n)}
        for n in range(3)
    ]
    covmerge.merge(*models(tmp_path, *parts), "average", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["h.0.fc.scale_factor"].eq(2.5).all()


def masks(size, dtype=torch.bool, value=-1e4):
    """What GPT-2's older checkpoints have beside its weights."""
    mask = torch.ones(1, 1, size, size).tril().to(dtype)
    return {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(value)}


MASKS = {
    "another size": (masks(8), masks(4)),
    "the base's alone": (masks(8), {}),
    "the experts' alone": ({}, masks(8)),
    "numbers of another size": (masks(8, torch.float32), masks(4, torch.float32)),
    "numbers, of the base alone": (masks(8, torch.float32), {}),
    "numbers and truth values": (masks(8, torch.float32), masks(8)),
    "other values": (masks(8), {n: ~t if t.ndim else t for n, t in masks(8).items()}),
}


@pytest.mark.parametrize("missing", ["error", "base"])
@pytest.mark.parametrize("which", MASKS)
def test_masks_that_the_model_makes_again_stop_no_merge(tmp_path, which, missing):
    of_base, of_experts = MASKS[which]
    base, experts = models(tmp_path, of_base, of_experts, of_experts)
    result = covmerge.merge(base, experts, "average", tensors={"missing": missing})
    for name, mask in of_base.items():
        assert torch.equal(result.tensors[name], mask)
    assert result.tensors.keys() == {*of_base, *FLOATS}
    weights = [load_file(e / "model.safetensors")["h.1.fc.weight"] for e in experts.values()]
    torch.testing.assert_close(result.tensors["h.1.fc.weight"], sum(weights) / 2)
    assert any("'a'" in n and "h.0.attn" in n and "buffer" in n for n in result.notes)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (0,)])
def test_a_tensor_without_elements_is_that_of_the_base(shape, tmp_path):
    """Matrix methods have nothing to decompose in it, and no share of its elements is changed."""
    base, experts = models(tmp_path, *differing(lambda number: torch.zeros(shape)))
    for method in ("iso_c", "cart", "free", "ties"):
        merged = covmerge.merge(base, experts, method)
        assert merged.tensors["h.0.thing"].shape == shape
        assert merged.stats["tensors"]["h.0.thing"]["rule"] == "base (it is empty)"
    seen = covmerge.inspect(base, experts).as_json()
    assert list(seen["layers"]) == ["h.1.fc.weight"]
