"""Results in a line, as tables, data frames and pages of a notebook; progress in the caller's form."""

import csv
import io
import re
from functools import partial
from html.parser import HTMLParser

import pandas
import pytest
import torch
from tqdm import tqdm

import covmerge
from covmerge.base.table import Table, lines_svg, table_html
from covmerge.errors import InputError
from covmerge.run.engine.progress import as_progress
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.cli.runs import flags, save_plain

GENERATOR = torch.Generator().manual_seed(0)
BASE = {f"layers.{n}.mlp.up_proj.weight": torch.randn(8, 8, generator=GENERATOR) for n in range(30)}
EXPERTS = {
    name: {n: w + 0.01 * torch.randn(w.shape, generator=GENERATOR) for n, w in BASE.items()}
    for name in ("a", "b")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    models = save_plain(tmp_path_factory.mktemp("models"))
    base, *experts = (models / f"{name}.safetensors" for name in ("base", "a", "b"))
    folder = covmerge.merge(base, experts, "average", models / "merged")
    return {
        "tensors": covmerge.merge(BASE, EXPERTS, "average"),
        "folder": folder,
        "inspection": covmerge.inspect(BASE, EXPERTS),
        "comparison": covmerge.compare(BASE, EXPERTS, ["average", "ties"]),
        "report": covmerge.report(models / "merged"),
    }


ALL = ("tensors", "folder", "inspection", "comparison", "report")


@pytest.mark.parametrize("name", ALL)
def test_a_result_says_itself_in_a_line(results, name):
    said = repr(results[name])
    assert len(said) < 300 and "\n" not in said
    assert type(results[name]).__name__ in said


def test_what_the_lines_say(results):
    assert repr(results["tensors"]).endswith(
        "a, b on <state dict> by average; 30 tensors in memory>"
    )
    assert repr(results["folder"]).endswith("merged, verified>")
    assert "30 tensors" in repr(results["inspection"])
    assert "average, ties of a, b" in repr(results["comparison"])
    assert "recommended" not in repr(
        covmerge.compare(BASE, [BASE], ["average"], allow=["unchanged-expert"])
    )


@pytest.mark.parametrize("name", ALL)
def test_a_data_frame_and_its_csv_have_the_same_rows(results, name):
    frame = results[name].to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    again = pandas.read_csv(io.StringIO(results[name].table().csv()))
    pandas.testing.assert_frame_equal(frame, again, check_dtype=False)


def test_the_numbers_are_those_of_the_result(results):
    rows = results["tensors"].to_dataframe().set_index("tensor")
    entries = results["tensors"].stats["tensors"]
    assert rows["update_norm a"].to_dict() == {n: e["update_norm"]["a"] for n, e in entries.items()}
    rows = results["inspection"].to_dataframe()
    assert list(rows["layer"]) == [layer.name for layer in results["inspection"].layers]
    rows = results["comparison"].to_dataframe()
    assert list(rows["retention b"]) == [r.retention["b"] for r in results["comparison"].rows]


def test_without_a_library_a_data_frame_says_what_to_install(results, monkeypatch):
    def none(name):
        raise ImportError(name)

    said = advice(
        "a data frame needs pandas or polars: pip install pandas; or take `.table().csv()`"
    )
    with monkeypatch.context() as hidden:
        hidden.setattr("covmerge.base.table.import_module", none)
        with pytest.raises(InputError, match=said):
            results["comparison"].to_dataframe()
        assert results["comparison"].table().csv()
    results["comparison"].to_dataframe()


class Balanced(HTMLParser):
    """Fails on tags that are not closed; notes what could load or run something."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen |= {tag, *(name for name, _ in attrs)}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ALL)
def test_a_page_of_a_notebook_is_whole_and_loads_nothing(results, name):
    page = Balanced()
    page.feed(results[name]._repr_html_())
    assert not page.open
    assert "table" in page.seen and not page.seen & {
        "script",
        "img",
        "src",
        "href",
        "onload",
        "link",
    }


def test_an_inspection_is_drawn_and_long_tables_are_cut(results):
    page = results["inspection"]._repr_html_()
    assert page.count("<polyline") == 2 and "10 more" in page
    assert page.count("<tr>") == 1 + 20 + 1


def test_strangers_names_are_text_everywhere():
    name = "<script>alert(1)</script>\x1b[2J"
    table = Table(("tensor", "norm"), ((name, 1.0), ("=HYPERLINK(1)", 2.0), ("-x", None)))
    assert "<script" not in table_html(table) and "\x1b" not in table_html(table)
    assert "<script" not in lines_svg({name: [1.0, 2.0]}, name)
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert [row[0][:2] for row in rows[2:]] == ["'=", "'-"]
    assert rows[3][1] == ""


def test_a_picture_of_nothing_is_none():
    assert lines_svg({"a": [0.0, None, 1.0]}, "x") == ""
    assert lines_svg({}, "x") == ""


def test_csv_on_the_command_line(tmp_path):
    save_plain(tmp_path)
    compared = command("compare", *flags(tmp_path), "--methods", "average,ties", "--csv").stdout
    assert [line.split(",")[0] for line in compared.splitlines()] == ["label", "average", "ties"]
    inspected = command("inspect", *flags(tmp_path), "--csv").stdout
    assert len(inspected.splitlines()) == 5
    command("merge", *flags(tmp_path), "--method", "average", tmp_path / "out")
    reported = command("report", tmp_path / "out", "--csv").stdout
    assert "retention a" in reported.splitlines()[0]
    assert not (tmp_path / "out" / "report.html").exists()
    for name in ("inspect", "compare"):
        taken = command(name, *flags(tmp_path), "--csv", tmp_path / "x.csv", code=2).stderr
        assert "--csv takes no file, and prints" in " ".join(taken.split())
    wrong = command("report", tmp_path / "out", "--csv", "--json", code=2).stderr
    assert "leave out one of them" in wrong


class Own:
    """Progress by its methods alone."""

    def __init__(self):
        self.calls = []

    def start(self, total):
        self.calls.append(total)

    def advance(self, what, size, *, resumed=False):
        self.calls.append(size)

    def finish(self):
        self.calls.append("end")


def test_progress_as_a_function_an_object_and_a_class_of_bars():
    calls, own, text = [], Own(), io.StringIO()
    for given in (lambda *told: calls.append(told), own, partial(tqdm, file=text, ncols=60)):
        covmerge.merge(BASE, EXPERTS, "average", progress=given)
    assert len(calls) == 30 and calls[-1][0] == calls[-1][1] == own.calls[0]
    assert {what for *_, what in calls} == set(BASE)
    assert own.calls[-1] == "end" and sum(own.calls[1:-1]) == own.calls[0]
    assert re.search(r"100%.*B/s", text.getvalue())


@pytest.mark.parametrize("wrong", [3, "tqdm", dict])
def test_what_is_no_progress_is_refused_before_the_work(wrong):
    with pytest.raises(InputError, match="pass a function"):
        covmerge.merge("nowhere", ["nobody"], progress=wrong)


def test_a_class_of_bars_is_known_by_what_it_can():
    assert type(as_progress(tqdm)) is not type(as_progress(print))
