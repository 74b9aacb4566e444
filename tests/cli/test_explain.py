import pytest

from covmerge.maths.linalg.auto import routes
from tests.cli.runs import covmerge, words


def test_the_table_is_the_dispatch_table():
    shown = covmerge("explain", "768x3072", "--experts", "8", "--json").json
    choices = routes(768, 3072, 8, 4)
    assert [question["taken"] for question in shown["questions"]] == [c.taken for c in choices]
    for question, choice in zip(shown["questions"], choices, strict=True):
        assert {name: cost["flops"] for name, cost in question["routes"].items()} == {
            name: cost.flops for name, cost in choice.routes.items()
        }
    assert shown["methods"]["ace"]["flops"] > shown["methods"]["average"]["flops"]


def test_it_fits_a_terminal():
    ran = covmerge("explain", "768x3072")
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "primal" in ran.stdout and "taken" in ran.stdout


def test_one_method():
    shown = covmerge("explain", "64 x 64", "--method", "ace", "--json").json
    assert list(shown["methods"]) == ["ace"]


def test_adapters_have_a_question_more():
    shown = covmerge("explain", "4096x4096", "--rank", "16", "--json").json
    assert shown["questions"][0]["taken"] == "factored"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["768"], "must be d_out x d_in"),
        (["0x4"], "must be d_out x d_in"),
        (["4x4", "--dtype", "float16"], "must be float32 or float64"),
        (["4x4", "--device", "mps"], "must be cpu or cuda"),
        (["4x4", "--method", "acee"], "Did you mean"),
    ],
)
def test_bad_input(arguments, said):
    ran = covmerge("explain", *arguments, code=2)
    assert said in words(ran.stderr)


def test_a_device_has_its_own_price_of_an_eigenproblem():
    given = ["explain", "768x3072", "--json"]
    cpu, cuda = (covmerge(*given, "--device", name).json for name in ("cpu", "cuda"))
    assert cpu == covmerge(*given).json
    assert (cpu["eigenproblem"], cuda["eigenproblem"]) == (4.5, 38.0)
    taken = [{own["question"]: own["taken"] for own in shown["questions"]} for shown in (cpu, cuda)]
    assert {"UVᵀ": "gram", "B A†, cut off": "eigen64"}.items() <= taken[0].items()
    assert {"UVᵀ": "products", "B A†, cut off": "projector64"}.items() <= taken[1].items()
    said = covmerge("explain", "768x3072", "--device", "cuda").stdout
    assert max(map(len, said.splitlines())) <= 80
    assert "that of an H100" in said
    # There, and of one shape alone: symmetric products are whole.
    more = {"RᵀR": "whole", "k leading triplets": "gram"}
    assert more.items() <= taken[1].items() and not more.items() & taken[0].items()
