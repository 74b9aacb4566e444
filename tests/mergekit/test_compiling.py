"""What mergekit's recipes become, what is refused, and by which words."""

from pathlib import Path

import pytest

from covmerge.errors import RecipeError
from covmerge.plan.recipe import load_recipe, parse_recipe
from covmerge.plan.recipe.mergekit.compiling import compile_mergekit
from covmerge.plan.recipe.mergekit.models import Places, Reference, names_of
from covmerge.plan.recipe.mergekit.reading import ImportLog
from covmerge.plan.recipe.strict_yaml import parse_yaml
from covmerge.plan.recipe.varied import value_at

TIES = "merge_method: ties\nbase_model: org/base\n"
PASS = "merge_method: passthrough\n"
MODELS = "models:\n  - {model: org/a, parameters: {weight: 1}}\n  - {model: org/b}\n"
FLOW = "models: [{model: x}, {model: y}]"
BACK = "models: [{model: y}, {model: x}]"
WEIGHT = "parameters: {weight: 0.5}\n"


def compiled(text, log=None):
    data, origin = parse_yaml(text, "their.yml")
    return compile_mergekit(data, origin, log or ImportLog())


def refused(text):
    with pytest.raises(RecipeError) as caught:
        compiled(text)
    return str(caught.value)


class TestModels:
    @pytest.mark.parametrize(
        ("written", "source"),
        [
            ("org/a@v1", "org/a@v1"),
            ("{model: org/a}", "org/a"),
            ("{model: {path: org/a, revision: v1}}", "org/a@v1"),
            ("{model: org/base, lora: org/lora}", "org/lora"),
            ("org/base+org/lora@v2", "org/lora@v2"),
        ],
    )
    def test_references(self, written, source):
        ours = compiled(f"{TIES}models: [{{model: {written}}}]\n{WEIGHT}")
        assert ours["base"] == "org/base"
        assert list(ours["experts"].values()) == [source]

    def test_a_path_that_is_there_is_no_hub_id(self, tmp_path, monkeypatch):
        (tmp_path / "org" / "a+b").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        ours = compiled(f"{TIES}models: [{{model: org/a+b}}]\n{WEIGHT}")
        assert ours["experts"] == {"a-b": "./org/a+b"}
        monkeypatch.chdir("/")
        assert Places(tmp_path).located("org/a+b") == f"{tmp_path}/org/a+b"
        assert Places(tmp_path).located("org/nothing") == "org/nothing"

    @pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/x"])
    def test_what_can_be_no_path_is_none_that_is_there(self, name, tmp_path):
        ours = compiled(f"merge_method: linear\nmodels: [{{model: {name}}}]\n" + WEIGHT)
        assert list(ours["experts"].values()) == [name]
        assert Places(tmp_path).located(name) == name

    def test_names_are_told_apart(self):
        names = names_of([Reference("a/x"), Reference("b/X"), Reference("b/x y/")])
        assert list(names.values()) == ["x", "X-2", "x-y"]

    def test_adapters_of_several_models(self):
        text = "merge_method: linear\nmodels: [{model: a+l}, {model: b+l}]\n" + WEIGHT
        assert "adapters are of the base, and here of several models (a, b)" in refused(text)

    def test_without_a_base_adapters_bring_their_own(self):
        ours = compiled("merge_method: linear\nmodels: [{model: m+l}, {model: m}]\n" + WEIGHT)
        assert (ours["base"], ours["experts"]) == ("m", {"l": "l", "m": "m"})


class TestModules:
    def test_one_that_is_the_whole_model_is_one_place_more(self):
        text = f"{TIES}modules: {{default: {{{FLOW}, parameters: {{density: 0.4}}}}}}\n"
        ours = compiled(f"{text}parameters: {{weight: 0.5, density: 0.9}}")
        plain = compiled(f"{TIES}{FLOW}\nparameters: {{weight: 0.5, density: 0.4}}")
        assert ours == plain

    def test_what_differs_goes_by_name_and_who_has_no_part_weighs_nothing(self):
        ours = compiled(
            f"merge_method: linear\nmodules:\n  shared: {{{FLOW}, parameters: {{weight: 1}}}}\n"
            "  decoder: {models: [{model: y}], parameters: {weight: [0, 1]}}\n"
        )
        decoder = ["decoder.*", "model.decoder.*"]
        encoder = {"match": ["encoder.*", "model.encoder.*"], "value": 0.0}
        assert ours["experts"] == {
            "x": {
                "source": "x",
                "weight": {"by_name": [encoder, {"match": decoder, "value": 0.0}, {"value": 1.0}]},
            },
            "y": {"source": "y", "weight": {"by_name": [encoder, {"value": 1.0}]}},
        }
        weight = {"match": decoder, "value": {"by_depth": [0, 1]}}
        assert ours["parameters"]["weight"]["by_name"][-2:] == [weight, {"value": 1}]

    def test_what_is_left_out_is_told_from_what_is_merged(self):
        text = "merge_method: linear\nmodules: {vision_tower: {models: [{model: x}]}}\n"
        weight = compiled(f"{text}parameters: {{weight: 1}}")["experts"]["x"]["weight"]["by_name"]
        assert [own["value"] for own in weight] == [0.0, 1.0, 0.0]
        assert weight[0]["match"][1] == "*visual.merger.*" and weight[1]["match"][2] == "*visual.*"

    def test_models_have_one_order_in_all(self):
        text = f"{TIES}parameters: {{weight: 1}}\nmodules:\n  decoder: {{models: [{{model: y}}]}}\n"
        assert list(compiled(f"{text}  encoder: {{{FLOW}}}\n")["experts"]) == ["x", "y"]


class TestSlices:
    SLICE = "{sources: [{model: b, layer_range: [0, 2]}, {model: c, layer_range: [0, 2]}]%s}"

    def of(self, *slices, base="", inside="{%s}"):
        listed = ", ".join(self.SLICE % own for own in slices)
        text = f"merge_method: slerp\n{base}parameters: {{t: 0.5}}\n"
        way = inside % f"slices: [{listed}]"
        return text + (way[1:-1] if inside == "{%s}" else f"modules: {{default: {way}}}")

    def test_a_base_that_all_of_them_name_is_the_recipes(self):
        wanted = compiled(self.of("", "", base="base_model: b\n"))
        own = ", base_model: b"
        assert compiled(self.of(own, own)) == wanted
        assert compiled(self.of("", own, base="base_model: b\n")) == wanted
        assert compiled(self.of(own, own, inside="{parameters: {}, %s}")) == wanted

    @pytest.mark.parametrize(
        ("slices", "base", "said"),
        [
            (
                (", base_model: b", ", base_model: c"),
                "",
                "the base of this slice is c, and that of",
            ),
            (("", ", base_model: b"), "", "of the first slice not said"),
            ((", base_model: b", ""), "", "the base of this slice is not said"),
            ((", base_model: c",), "base_model: b\n", "of the recipe or of the first slice b"),
        ],
    )
    def test_bases_that_differ(self, slices, base, said):
        assert said in refused(self.of(*slices, base=base))

    def test_a_model_that_is_there_twice(self):
        text = f"{PASS}slices: [{{sources: [{'{model: a, layer_range: [0, 2]}, ' * 2}]}}]"
        assert "a is named twice" in refused(text)


class TestParameters:
    def test_the_nearest_place_decides(self):
        ours = compiled(TIES + MODELS + "parameters: {weight: 0.5, density: 0.2, lambda: 2}\n")
        assert ours["parameters"] == {
            "sparsify": "magnitude",
            "consensus": True,
            "arithmetic": "stored",
            "weight": [1, 0.5],
            "density": 0.2,
            "normalize": True,
            "rescale": False,
            "scale": 2,
        }

    def test_filters_fall_through_to_the_next_place(self):
        models = "models: [{model: a, parameters: {weight: [{filter: mlp, value: [0, 1]}]}}]\n"
        ours = compiled(
            TIES + models + "parameters: {weight: [{filter: attn, value: 2}, {value: 3}]}"
        )
        assert ours["parameters"]["weight"] == {
            "by_name": [
                {"match": "*mlp*", "value": {"by_depth": [0, 1]}},
                {"match": "*attn*", "value": 2},
                {"value": 3},
            ]
        }

    def test_quoted_numbers_are_numbers(self):
        value = "[{filter: mlp, value: ['0', ' 1e-1']}, {value: '.5'}]"
        text = "parameters: {weight: %s, normalize: %s, density: %s}"
        plain = text % (value.replace("'", ""), "false", "0.2")
        assert compiled(TIES + MODELS + text % (value, "'false'", '"2e-1"')) == compiled(
            TIES + MODELS + plain
        )
        sources = "slices: [{sources: [{model: a, layer_range: %s}]}]\ntokenizer: {%s}\n"
        quoted = sources % ("['0', '4']", "pad_to_multiple_of: '8'")
        assert compiled(f"{PASS}{quoted}") == compiled(f"{PASS}{quoted}".replace("'", ""))
        assert "it is [first, end)" in refused(f"{PASS}{sources % ('[0, four]', '')}")

    def test_a_filter_for_everything(self):
        models = "models: [{model: a, parameters: {weight: {filter: '*', value: 2}}}]\n"
        assert compiled(TIES + models)["parameters"]["weight"] == 2

    def test_a_required_one_that_is_not_said(self):
        assert "org/b has no `weight`" in refused(TIES + MODELS)
        models = "models: [{model: a, parameters: {weight: [{filter: mlp, value: 1}]}}]\n"
        assert "a has no `weight` where no filter fits" in refused(TIES + models)

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (
                "parameters: {wieght: 1}",
                "their.yml:5: ties has no parameter 'wieght'. Did you mean 'weight'?",
            ),
            ("parameters: {epsilon: 0.1}", "their.yml:5: ties has no parameter 'epsilon'."),
            (
                "paramters: {weight: 1}",
                "their.yml:5: unknown key 'paramters'. Did you mean 'parameters'?",
            ),
        ],
    )
    def test_what_is_unknown_is_named_with_the_nearest(self, more, said):
        text = f"{TIES}models:\n  - {{model: org/a, parameters: {{weight: 1}}}}\n{more}"
        assert refused(text).startswith(said)
        log = ImportLog(lenient=True)
        compiled(text, log)
        assert log.warnings[0].startswith(said)
        assert log.warnings[0].endswith("It is left out (lenient=True)")

    def test_of_a_model_and_one_for_all(self):
        models = "models: [{model: a, parameters: {weight: 1, normalize: false}}]\n"
        assert "'normalize' of a model: it is one for all" in refused(TIES + models)

    @pytest.mark.parametrize("method", ["slerp", "sce", "nearswap"])
    def test_a_weight_that_a_method_has_not_is_no_error(self, method):
        log = ImportLog()
        text = f"merge_method: {method}\nbase_model: b\nmodels: [{{model: a, parameters: {{weight: 1}}}}]\n"
        ours = compiled(text + "parameters: {weight: 2%s}" % (", t: 0.5" * (method != "sce")), log)
        assert "weight" not in ours["parameters"]
        assert log.notes == [f"a model's `weight` changes nothing: {method} has none"]

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("banana", "`int8_mask` is 'banana'; it is true or false"),
            ("[{filter: mlp, value: 0.5}, {value: true}]", "`int8_mask` is 0.5; it is true or"),
            ("[true, 0.5]", "`int8_mask` is 0.5; it is true or"),
        ],
    )
    def test_int8_mask_is_a_truth_value(self, value, said):
        assert said in refused(TIES + MODELS + f"parameters: {{weight: 1, int8_mask: {value}}}")

    @pytest.mark.parametrize("method", ["linear", "karcher", "ram", "multislerp"])
    def test_int8_mask_of_a_method_without_masks_changes_nothing(self, method):
        weighed = method in ("linear", "multislerp")
        base = "base_model: org/base\n" if method == "ram" else ""
        text = f"merge_method: {method}\n{base}{FLOW}\nparameters: {{%s}}"
        plain = "weight: 1" if weighed else ""
        mask = f"{plain}{', ' if weighed else ''}int8_mask: true"
        assert compiled(text % mask) == compiled(text % plain)

    def test_int8_mask_by_filters(self):
        plain = TIES + MODELS + "parameters: {weight: 1%s}"
        switch = ", int8_mask: [{filter: mlp, value: true}, {value: false}]"
        assert compiled(plain % switch) == compiled(plain % "")

    def test_a_gradient_of_truth_values_goes_by_steps(self):
        """As mergekit's: of n values the one of the whole part of t (n - 1)."""
        steps = "[true, false, true]"
        ours = compiled(TIES + MODELS + f"parameters: {{weight: 1, rescale: {steps}}}")
        value = ours["parameters"]["rescale"]
        assert value == {"by_depth": [True, False, True]}
        found = [value_at(value, "n", layer / 4) for layer in range(5)]
        assert found == [True, True, False, False, True]
        assert parse_recipe(ours).parameters["rescale"] == value

    @pytest.mark.parametrize(
        ("written", "value"),
        [
            *(("1", True), ("'0'", False), ("1.0", True), ("yes", True), ("' Off '", False)),
            ("[0, 1]", {"by_depth": [False, True]}),
        ],
    )
    def test_other_words_for_truth_values(self, written, value):
        ours = compiled(TIES + MODELS + f"parameters: {{weight: 1, rescale: {written}}}")
        assert ours["parameters"]["rescale"] == value

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("nan", "'nan'; numbers must be finite"),
            (".nan", "NaN; numbers must be finite"),
            ("'-inf'", "'-inf'; numbers must be finite"),
            ("[0, .inf]", "Infinity; numbers must be finite"),
            ("[{filter: mlp, value: nan}, {value: 1}]", "'nan'; numbers must be finite"),
            ("banana", "'banana'; it is a number, such as 0.5"),
            ("[a, b]", "'a'; it is a number, such as 0.5"),
            ("true", "true; it is a number, such as 0.5"),
        ],
    )
    def test_what_is_no_number_is_named_with_its_line(self, value, said):
        models = f"models:\n  - model: a\n    parameters: {{weight: {value}}}"
        assert refused(TIES + models) == f"their.yml:5: `weight` is {said}"

    def test_what_is_no_number_of_covmerges_own_method(self):
        text = f"merge_method: ace\nbase_model: b\n{FLOW}\nparameters: {{eps: .nan}}"
        assert refused(text) == "their.yml:4: `eps` is NaN; numbers must be finite"
        text = f"merge_method: ace\nbase_model: b\n{FLOW}\nparameters: {{eps: [a, b]}}"
        assert "a gradient is a list of numbers, or of truth values" in refused(text)

    def test_nuslerps_two_switches_are_one_word(self):
        text = (
            "merge_method: nuslerp\n" + MODELS + "parameters: {weight: 1, nuslerp_flatten: false}"
        )
        assert compiled(text)["parameters"]["by"] == "rows"

    def test_covmerges_own_method_with_its_own_parameters(self):
        log = ImportLog()
        ours = compiled(
            "merge_method: ace\nbase_model: org/base\n"
            + MODELS
            + "parameters: {eps: 0.01, density: 1}",
            log,
        )
        assert ours["method"] == "ace"
        assert ours["parameters"] == {"eps": 0.01}
        assert ours["experts"] == {"a": {"source": "org/a", "weight": 1}, "b": "org/b"}
        assert "density" in log.notes[0]


class TestWholeRecipes:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("merge_method: tise\nmodels: [{model: a}]", "merge_method is 'tise'"),
            ("merge_method: [ties]\nmodels: [{model: a}]", 'merge_method is ["ties"]'),
            ("merge_method: {ties: 1}\nmodels: [{model: a}]", 'merge_method is {"ties": 1}'),
            ("merge_method: ties\nmodels: [{model: a}]", "ties needs `base_model`"),
            (TIES, "exactly one of `models` and `slices` and `modules`"),
            (f"{TIES}models: []", "`models` is []; it is a list"),
            (f"{TIES}models: [{{model: a}}, {{model: a}}]", "a is named twice"),
            (f"{TIES}models: [3]", "3 is not a mapping"),
            (f"{TIES}models: [{{model: a+b+c}}]", "it is a model, or model+adapter"),
            (f"{TIES}models: [{{model: {{modle: a}}}}]", "unknown key 'modle'"),
            (f"{TIES}modules: {{text: 1}}", "1 is not a mapping"),
            (f"{TIES}modules: {{}}", "`modules` has no module"),
            (f"{TIES}modules: {{a: {{parameters: {{}}}}}}", "exactly one of `models` and `slices`"),
            (
                f"{TIES}modules: {{a: {{slices: [{{sources: [{{model: x, layer_range: [0, 1]}}]}}]}}}}",
                "layers of one of several modules are not stacked anew",
            ),
            (
                f"{TIES}modules: {{encoder: {{{FLOW}}}, decoder: {{{BACK}}}}}",
                "two modules name the same models in another order",
            ),
            (
                f"{TIES}parameters: {{weight: [{{filter: mlp, value: 1}}, {{value: 0}}]}}\n"
                f"modules: {{encoder: {{{FLOW}}}, decoder: {{{FLOW}}}}}",
                "filters beside several modules",
            ),
            (f"{TIES}{MODELS}{WEIGHT}dtype: int8", "dtype is 'int8'; it is one of float32"),
            (
                "merge_method: slerp\nbase_model: b\nmodels: [{model: a}, {model: c}]\nparameters: {t: 0}",
                "slerp merges 1 models beside a base, and there are 2: a, c",
            ),
        ],
    )
    def test_what_is_refused(self, text, said):
        assert said in refused(text)

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("{model: a}", "layer_range is null; it is [first, end)"),
            ("{model: a, layer_range: [0, 1, 2]}", "it is [first, end)"),
            (
                "{model: a, layer_range: [4, 8], parameters: {scale: [{filter: layers.5, value: 0}]}}",
                "the filter 'layers.5' has a number",
            ),
        ],
    )
    def test_slices_that_are_refused(self, source, said):
        assert said in refused(f"merge_method: passthrough\nslices: [{{sources: [{source}]}}]")

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_filter_by_the_number_of_a_layer_that_gets_another(self, place):
        """It would be for another layer: mergekit means the source's."""
        filtered = "[{filter: layers.5, value: 2}, {value: 1}]"
        source, own, recipe = [filtered if place == at else "1" for at in range(3)]
        text = f"""
merge_method: linear
slices:
  - sources: [{{model: a, layer_range: [0, 4]}}]
    parameters: {{weight: 1}}
  - sources: [{{model: b, layer_range: [5, 8], parameters: {{weight: {source}}}}}]
    parameters: {{weight: {own}}}
parameters: {{weight: {recipe}}}
"""
        assert "the filter 'layers.5' has a number" in refused(text)
        compiled(text.replace("[5, 8]", "[4, 8]"))  # layer 5 is layer 5
        compiled(text.replace("layers.5", "ln_1"))  # no number of a layer

    def test_slices(self):
        ours = compiled(
            "merge_method: passthrough\nslices:\n"
            "  - sources: [{model: a, layer_range: [0, 8]}]\n"
            "  - sources: [{model: b, layer_range: [4, 8], parameters: {scale: 0.5}}]\n"
            "dtype: torch.float16\nout_dtype: bfloat16\n"
        )
        assert ours == {
            "base": None,
            "experts": {"a": "a", "b": "b"},
            "method": "passthrough",
            "parameters": {"arithmetic": "float16"},
            "slices": [
                {"experts": {"a": [0, 8]}, "parameters": {"scale": None}},
                {"experts": {"b": [4, 8]}, "parameters": {"scale": 0.5}},
            ],
            "output": {"dtype": "bfloat16"},
        }

    def test_a_mapping_is_read_as_a_file_is(self):
        recipe = parse_recipe(
            {"merge_method": "linear", "models": [{"model": "org/a", "parameters": {"weight": 1}}]}
        )
        assert (recipe.method, recipe.base) == ("linear", None)

    def test_a_second_document_is_refused(self, tmp_path: Path):
        file = tmp_path / "their.yml"
        file.write_text("merge_method: linear\n---\nmerge_method: ties\n")
        with pytest.raises(RecipeError, match="a second document starts here"):
            load_recipe(file)


class TestRanges:
    @pytest.mark.parametrize(
        ("method", "written", "why"),
        [
            (
                "ties",
                "density: [0.5, -1]",
                "`density` is -1; input should be greater than or equal to 0",
            ),
            (
                "ties",
                "density: [{filter: w, value: -0.5}]",
                "`density` is -0.5; input should be",
            ),
            ("karcher", "max_iter: 10.5", "`max_iter` is 10.5; it is a whole number"),
            ("karcher", "max_iter: -1", "`max_iter` is -1; input should be greater"),
        ],
    )
    def test_a_value_out_of_range_is_refused_where_it_stands(self, method, written, why):
        head = TIES if method == "ties" else f"merge_method: {method}\ndtype: float32\n"
        weight = "weight: 1" if method == "ties" else "tol: 0.1"
        said = refused(f"{head}{FLOW}\nparameters:\n  {weight}\n  {written}\n")
        assert said.startswith("their.yml:6: ")
        assert why in said

    def test_a_whole_number_may_have_a_point(self):
        ours = compiled(f"merge_method: karcher\n{FLOW}\nparameters: {{max_iter: 10.0}}\n")
        assert ours["parameters"]["max_iter"] == 10
