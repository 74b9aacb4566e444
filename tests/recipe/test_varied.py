"""Values by depth and by name: their form, what they give, and what is refused."""

import pytest

from covmerge.errors import RecipeError
from covmerge.plan.recipe import dump_recipe, parse_recipe
from covmerge.plan.recipe.varied import UNSAID, check_varied, containing, value_at


def recipe(**given):
    return parse_recipe({"base": "b", "experts": {"a": "x"}, **given}, origin="test")


class TestWhatTheyGive:
    @pytest.mark.parametrize(
        ("depth", "value"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 0.75), (1.0, 0.5)]
    )
    def test_by_depth_is_linear_between_points(self, depth, value):
        assert value_at({"by_depth": [0, 1, 0.5]}, "h.0.fc", depth) == value

    def test_one_point_is_that_number(self):
        assert value_at({"by_depth": [0.3]}, "h.0.fc", 0.7) == 0.3

    def test_whole_numbers_stay_whole(self):
        assert isinstance(value_at({"by_depth": [2, 4]}, "h.0.fc", 0.5), int)

    def test_the_first_pattern_that_matches_decides(self):
        form = {
            "by_name": [
                {"match": "*.attn.*", "value": {"by_depth": [0, 1]}},
                {"match": "*.attn.q", "value": 7},
                {"match": "*.mlp.*", "value": 2},
            ]
        }
        assert value_at(form, "h.1.attn.q", 0.5) == 0.5
        assert value_at(form, "h.1.mlp.fc", 0.5) == 2
        assert value_at(form, "ln_f", 0.0) is UNSAID

    def test_of_a_list_each_entry_may_differ(self):
        assert value_at([{"by_depth": [0, 1]}, 0.2], "h.1.fc", 0.5) == [0.5, 0.2]

    def test_a_pattern_of_what_contains_a_text(self):
        form = {"by_name": [{"match": containing("h[0].*"), "value": 1}]}
        assert value_at(form, "x.h[0].*.y", 0.0) == 1
        assert value_at(form, "x.h0.z.y", 0.0) is UNSAID


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("form", "said"),
        [
            ({"by_depth": []}, "it is a list of numbers"),
            ({"by_depth": [0, True]}, "it is a list of numbers"),
            ({"by_depth": [0], "by_name": []}, "has the keys by_depth, by_name"),
            ({"by_name": []}, r"a list of \{match: PATTERN"),
            ({"by_name": [{"value": 1}] * 2000}, "by_name has 2000 entries, and may have 1000"),
            ({"by_depth": ["a"] * 2000}, r"by_depth is \['a', 'a', 'a', 'a' and 1996 more\]"),
            ({"by_name": [{"filter": "x", "value": 1}]}, r"by_name\[0\] is"),
            ({"by_name": [{"match": "", "value": 1}]}, "it is a pattern of names"),
            (
                {"by_name": [{"match": ["a", 1], "value": 1}]},
                r'match is \["a", 1\]; it is a pattern',
            ),
            ({"by_name": [{"match": [], "value": 1}]}, "or a list of them"),
            ({"by_name": [{"value": {"by_name": [{"value": 1}]}}]}, "write its entries into this"),
        ],
    )
    def test_a_form_that_cannot_be_read(self, form, said):
        with pytest.raises(ValueError, match=said):
            check_varied(form)
        with pytest.raises(RecipeError, match=f"density: .*{said}"):
            recipe(method="ties", parameters={"density": form})

    def test_a_weight_below_zero(self):
        varied = {"source": "x", "weight": {"by_depth": [1, -1]}}
        with pytest.raises(RecipeError, match=r"experts\.a\.weight: the weight -1 is not"):
            recipe(experts={"a": varied})

    def test_a_weight_of_another_kind_is_told_as_before(self):
        with pytest.raises(
            RecipeError, match=r"experts\.a\.weight is '1'; it must be a valid number"
        ):
            recipe(experts={"a": {"source": "x", "weight": "1"}})


def test_a_recipe_keeps_them_as_they_are_written():
    weight = {"by_name": [{"match": "*.mlp.*", "value": {"by_depth": [0, 1]}}, {"value": 0.5}]}
    data = dump_recipe(recipe(experts={"a": {"source": "x", "weight": weight}}))
    assert data["experts"]["a"]["weight"] == weight
    assert dump_recipe(parse_recipe(data)) == data
