"""What mergekit's own tests ask of a recipe's numbers, dtypes and files.

Their test_config_parameters.py, test_merge_dtypes.py, test_merge_method_interface.py, test_io.py and
test_lazy_unpickle.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from covmerge.plan.recipe.varied import value_at
from tests.mergekit import token_cases
from tests.mergekit.models import CONFIGS, weights
from tests.mergekit.outputs import loaded, merged, stored
from tests.mergekit.test_compiling import compiled, refused
from tests.mergekit.token_cases import WORDS, ids_of, save_model

HALF = torch.bfloat16
# A few entries of any size are no fine-tunes of each other.
ALLOWED = ("--allow", "not-a-fine-tune")


def of_files(place, method, files, parameters, *flags, base=False, code=0, **more):
    """Merge files; over the first of them, where there is a base."""
    paths = [str(place / f"{number}.safetensors") for number in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    recipe = {"merge_method": method, "models": [{"model": path} for path in paths[base:]], **more}
    if base:
        recipe["base_model"] = paths[0]
    ran = merged({**recipe, "parameters": parameters}, place, *flags, code=code)
    return ran if code else stored(place / "out")


PLACES = """
merge_method: linear
modules:
  default:
    slices:
      - sources: [{model: a, layer_range: [0, 3], parameters: {weight: %s}}]
        parameters: {weight: %s}
    parameters: {weight: %s}
parameters: {weight: %s}
"""


class TestNumbers:
    @pytest.mark.parametrize("place", range(4))
    def test_gradients_of_small_numbers_at_every_place(self, place):
        """`1e-5` without a point is a text to many readers of YAML."""
        said = ["[]"] * 4
        said[place] = "[{filter: w, value: [1e-5, '1e-3']}, {value: 1}]"
        weight = compiled(PLACES % tuple(said))["parameters"]["weight"]
        assert value_at(weight, "w", 0.5) == pytest.approx(0.000505)

    @pytest.mark.parametrize("first", range(4))
    def test_the_first_place_whose_filter_fits_decides(self, first):
        said = [
            f"{{filter: {'some' if place >= first else 'zzz'}, value: [{place}, {place + 2}]}}"
            for place in range(4)
        ]
        said[3] = f"[{said[3]}, {{value: 9}}]"
        weight = compiled(PLACES % tuple(said))["parameters"]["weight"]
        assert value_at(weight, "something.weight", 0.5) == first + 1
        assert value_at(weight, "other", 0.5) == 9

    def test_one_filter_without_a_list(self):
        said = "parameters: {density: {filter: embed, value: ['1e-5', '1e-3']}, weight: 1}"
        text = f"merge_method: ties\nbase_model: b\nmodels: [{{model: a}}]\n{said}"
        density = compiled(text)["parameters"]["density"]
        assert value_at(density, "embed.weight", 0.5) == pytest.approx(0.000505)
        assert value_at(density, "other", 0.5) == 1.0

    def test_a_required_one_is_named_with_its_model(self):
        text = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b}]"
        assert "b has no `weight`" in refused(text)

    def test_a_weight_of_the_base_is_not_looked_at(self):
        listed = "models: [{model: a}, {model: b, parameters: {weight: nonsense}}]"
        ours = compiled(f"merge_method: ties\nbase_model: b\n{listed}\nparameters: {{weight: 0.5}}")
        assert ours["parameters"]["weight"] == 0.5


def mixed():
    """Two files, each tensor in a dtype of its own."""
    return [
        {
            "low": torch.tensor([2.0], dtype=HALF),
            "mixed": torch.tensor([2.0], dtype=HALF),
            "norm": torch.tensor([2.0]),
            "double": torch.tensor([2.0], dtype=torch.float64),
            "counter": torch.tensor(7),
        },
        {
            "low": torch.tensor([4.0], dtype=HALF),
            "mixed": torch.tensor([4.0], dtype=torch.float16),
            "norm": torch.tensor([4.0]),
            "double": torch.tensor([4.0]),
            "counter": torch.tensor(7),
        },
    ]


class TestDtypes:
    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    @pytest.mark.parametrize("kept", [None, "float64"])
    @pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
    def test_each_tensor_has_its_own(self, method, dtype, kept, tmp_path):
        """What is stored without a word of the recipe is the base's: `mixed` is float32 in mergekit."""
        said = {name: own for name, own in (("dtype", dtype), ("out_dtype", kept)) if own}
        base = method == "task_arithmetic"
        given = {"weight": 0.5}
        found = of_files(tmp_path, method, mixed(), given, *ALLOWED, base=base, **said)
        first = mixed()[0]
        for name in first.keys() - {"counter"}:
            wanted = getattr(torch, kept or dtype or "none", first[name].dtype)
            assert (found[name].dtype, found[name].tolist()) == (wanted, [3.0])
        assert torch.equal(found["counter"], torch.tensor(7))

    @pytest.mark.parametrize(
        ("said", "wanted"),
        [
            ({"dtype": "bfloat16"}, torch.tensor([1000.0], dtype=HALF)),
            ({"out_dtype": "bfloat16"}, torch.tensor([1004.0], dtype=HALF)),
            ({"dtype": "bfloat16", "out_dtype": "float64"}, torch.tensor([1000.0]).double()),
        ],
    )
    def test_inputs_are_cast_before_and_results_after(self, said, wanted, tmp_path):
        files = [{"w": torch.tensor([1.003]), "counter": torch.tensor(7)}]
        found = of_files(tmp_path, "passthrough", files, {"scale": 1000.0}, **said)
        assert found["w"].dtype == wanted.dtype
        assert torch.equal(found["w"], wanted)
        assert torch.equal(found["counter"], torch.tensor(7))

    @pytest.mark.parametrize("key", ["dtype", "out_dtype"])
    def test_one_without_fractions_is_refused(self, key, tmp_path):
        ran = of_files(tmp_path, "linear", mixed(), {"weight": 1.0}, code=2, **{key: "int64"})
        assert f"their.yml:5: {key} is 'int64'; it is one of float32, float16" in ran.stderr

    @pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic", "passthrough"])
    def test_counters_and_switches_are_not_cast(self, method, tmp_path):
        files = []
        for number in range(1 if method == "passthrough" else 2):
            layer = torch.nn.BatchNorm1d(2)
            layer.register_buffer("enabled", torch.tensor([True, False]))
            layer.num_batches_tracked.fill_(257)
            layer.running_mean.fill_(number + 1.003)
            files.append(layer.state_dict())
        given = {"passthrough": {"scale": 2.0}, "slerp": {"t": 0.3}}.get(method, {"weight": 0.25})
        said = {"dtype": "bfloat16", "out_dtype": "float64", "base": len(files) > 1}
        found = of_files(tmp_path, method, files, given, *ALLOWED, **said)
        assert torch.equal(found["num_batches_tracked"], torch.tensor(257))
        assert torch.equal(found["enabled"], torch.tensor([True, False]))
        assert {found[name].dtype for name in ("weight", "running_mean")} == {torch.float64}

    @pytest.mark.parametrize(
        "other",
        [torch.tensor(2**24), torch.tensor(2**24 + 1, dtype=torch.int32), torch.tensor([5])],
    )
    def test_counters_that_differ_are_the_first_models(self, other, tmp_path):
        """An error in mergekit, and here; if allowed, the first model's are kept, to the last digit."""
        first = torch.tensor(2**24 + 1)
        files = [{"w": torch.ones(2), "n": first}, {"w": torch.full((2,), 3.0), "n": other}]
        given = (tmp_path, "linear", files, {"weight": 1.0})
        if not torch.equal(first, other.long()):
            refused = of_files(*given, code=2, dtype="float32")
            assert "changed-integers" in refused.stderr
        found = of_files(*given, "--allow", "changed-integers", dtype="float32")
        assert torch.equal(found["n"], first)
        assert found["w"].tolist() == [2.0, 2.0]

    @pytest.mark.parametrize(("dtype", "kept"), [(None, None), ("bfloat16", "float32")])
    def test_norms_in_float32_of_a_model_in_bfloat16(self, dtype, kept, tmp_path):
        """Without a word of the recipe each tensor stays as the first model has it."""
        recipe = of_llamas(tmp_path)
        first = tmp_path / "t0" / "model.safetensors"
        tensors = {n: t if "norm" in n else t.to(HALF) for n, t in load_file(first).items()}
        save_file(tensors, first, metadata={"format": "pt"})
        said = {key: own for key, own in (("dtype", dtype), ("out_dtype", kept)) if own}
        merged({**recipe, **said}, tmp_path)
        for name, tensor in stored(tmp_path / "out").items():
            single = kept is not None or "norm" in name
            assert tensor.dtype == (torch.float32 if single else HALF), name

    def test_a_row_of_another_model_is_rounded_to_the_dtype_of_who_lacks_it(self, tmp_path):
        """Where mergekit makes both float32 first: so the update of a new token is its rounding here."""
        save_model(tmp_path / "base", "llama", "base", WORDS["base"], "bfloat16")
        save_model(tmp_path / "t1", "llama", "t1", WORDS["t1"], "float32")
        listed = [{"model": str(tmp_path / "t1"), "parameters": {"weight": 0.5}}]
        recipe = {
            **{"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")},
            **{"models": listed, "tokenizer_source": "union", "dtype": "float32"},
        }
        merged(recipe, tmp_path)
        row = ids_of(tmp_path / "out")["<|im_start|>"]
        for name in token_cases.TABLES[:2]:
            own = stored(tmp_path / "t1")[name][ids_of(tmp_path / "t1")["<|im_start|>"]]
            wanted = own.to(HALF).float() + 0.5 * (own - own.to(HALF).float())
            torch.testing.assert_close(stored(tmp_path / "out")[name][row], wanted)


class TestFiles:
    FILES = (
        {"shared": torch.full((4,), 2.0), "a": torch.tensor([6.0])},
        {"shared": torch.full((4,), 4.0), "b": torch.tensor([8.0, 8.0]), "n": torch.tensor(257)},
    )

    def test_other_tensors_are_an_error(self, tmp_path):
        ran = of_files(tmp_path, "linear", self.FILES, {"weight": 1.0}, code=2)
        assert "lacks: 'b'" in ran.stderr

    @pytest.mark.parametrize("missing", ["present", "base"])
    def test_other_tensors_that_are_asked_for(self, missing, tmp_path):
        """Names are those of the base or the first model, whichever of mergekit's flags it stands for."""
        flags = ("--tensors", f"missing={missing}", "--tensors", "extra=ignore")
        found = of_files(tmp_path, "linear", self.FILES, {"weight": 1.0}, *flags)
        assert {n: own.tolist() for n, own in found.items()} == {"shared": [3.0] * 4, "a": [6.0]}

    def test_a_base_that_lacks_a_tensor_is_not_left_out(self, tmp_path):
        files = [{"w": torch.ones(2)}, *({"w": torch.ones(2), "b": torch.ones(2)} for _ in "ab")]
        ran = of_files(tmp_path, "nuslerp", files, {"weight": 0.5}, base=True, code=2)
        assert "that the base" in ran.stderr
        assert "lacks: 'b'" in ran.stderr

    @pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
    def test_other_shapes_are_an_error(self, shape, tmp_path):
        files = [
            {"embed_tokens.weight": torch.ones(2, 2)},
            {"embed_tokens.weight": torch.ones(shape)},
        ]
        ran = of_files(tmp_path, "linear", files, {"weight": 1.0}, code=2)
        assert "'embed_tokens.weight'" in ran.stderr

    def test_pickled_files_are_read_and_not_run(self, tmp_path):
        """To what the same model in safetensors gives."""
        found = []
        for pickled in (False, True):
            place = tmp_path / str(pickled)
            recipe = of_llamas(place, pickled=pickled)
            merged(recipe, place, "--lazy-unpickle")
            found.append(stored(place / "out"))
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

    def test_shards(self, tmp_path):
        flags = ("--out-shard-size", "4K", "--async-write", "--safe-serialization")
        merged(of_llamas(tmp_path), tmp_path, *flags)
        shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
        assert len(shards) > 2
        names = {name for shard in shards for name in load_file(shard)}
        assert names == weights("llama", "t0", torch.float32).keys()
        loaded(tmp_path / "out")


def of_llamas(place, *, pickled=False):
    """A recipe of two models that are written for it."""
    listed = []
    for name in ("t0", "t1"):
        path = place / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        tensors = weights("llama", name, torch.float32)
        if pickled:
            torch.save(tensors, path / "pytorch_model.bin")
        else:
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        listed.append({"model": str(path), "parameters": {"weight": 1.0}})
    return {"merge_method": "linear", "models": listed}
