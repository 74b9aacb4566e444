"""The page: what it says, that nothing in it acts, and that it is written whole or not at all."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from covmerge.base.findings import Finding, Severity
from covmerge.errors import InputError
from covmerge.front import api
from covmerge.front.reporting import html as page
from covmerge.front.reporting import tables
from covmerge.front.reporting.data import Report, shown_spectra
from covmerge.front.reporting.job import FILE_NAME, write_html
from covmerge.front.reporting.pictures import pictures
from covmerge.front.reporting.style import number
from covmerge.run.verification.outcome import Check
from tests.cli.runs import covmerge as command
from tests.e2e.models import save_family
from tests.e2e.test_adapters import experts, family, of_gpt2, saved_family  # noqa: F401 - fixtures
from tests.report.merges import inspect, merge, report
from tests.report.pages import parse, rows_of

SCALES = {"code": 0.02, "maths": 0.05, "prose": 0.1}
EVIL = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</text></svg><iframe src=https://evil.test>",
    "</style></title></pre><!--",
    "{{ 7 * 7 }}${7*7}$\\frac",
    "a\x1b[2J\u202egnp.exe\x00",
    "'; --var(--x) url(http://evil.test)",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return report(tmp_path_factory.mktemp("merge"), SCALES, params={"tau": 0.0})


@pytest.fixture(scope="module")
def without_pictures(made):
    """The same without layers and costs: drawing them takes nearly all the time."""
    return replace(made, inspection=replace(made.inspection, layers=()), costs={})


@pytest.fixture(scope="module")
def text(made):
    return page.render(made)


@pytest.fixture(scope="module")
def root(text):
    return parse(text)


def test_what_is_said_first(made, root):
    (title,) = root.all("h1")
    assert title.text == "out"
    (summary,) = (p for p in root.all("p") if p.attributes.get("class") == "summary")
    assert summary.text.startswith("3 experts of 'base.safetensors' became one model by ace; ")
    assert summary.text.endswith("; it passed all 7 checks.")
    (score, *_) = (pre.text for pre in root.all("pre"))
    assert score.startswith("covmerge compare --base ") and "--score 'python " in score
    headings = [(h.tag, h.text) for h in root.all("h1", "h2")]
    assert [text for tag, text in headings if tag == "h2"] == [
        *("Findings", "What was merged", "Layer by layer", "Time and memory", "Recipe", "Sources")
    ]


def test_nothing_is_predicted_of_adapters(made, root):
    one_adapter = replace(made, inspection=replace(made.inspection, adapters=("maths",)))
    shown = parse(page.render(one_adapter))
    assert "What is kept of an expert is predicted" in root.text
    assert "kept of what it adds" in root.text and "% of what an expert adds" not in shown.text
    assert "kept" not in shown.text.replace("heads kept", "").partition("Layer by layer")[0]
    names = [{f.attributes["id"] for f in page_.all("figure")} for page_ in (root, shown)]
    assert names[0] - names[1] == {"retention"}


def test_a_gate_is_shown_of_methods_that_have_one(made, root):
    """This merge was by ace; of another method nothing notices a gate."""
    gated = {figure.attributes["id"] for figure in root.all("figure")}
    without = {picture.name for picture in pictures(replace(made, diagnostics={}))}
    assert gated - without == {"gamma", "costs"}  # costs are no picture of layers


def test_headings_and_landmarks(root):
    levels = [int(h.tag[1]) for h in root.all("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert [e.tag for e in root.all("header", "nav", "main", "footer")] == [
        *("header", "nav", "main", "footer")
    ]
    ids = [e.attributes["id"] for e in root.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    targets = [a.attributes["href"][1:] for a in root.all("a")]
    named = [e.attributes.get("aria-labelledby") for e in root.all("section", "figure")]
    used = [u.attributes["href"][1:] for u in root.all("use")]
    assert {*targets, *named, *used} <= set(ids)
    (html,) = root.all("html")
    assert html.attributes["lang"] == "en"
    for box in root.all("div"):
        if box.attributes.get("class") == "scroll":  # reached by keyboard, and told what it is
            assert box.attributes["tabindex"] == "0"
            assert box.attributes["aria-label"]


def test_every_figure_has_its_numbers_in_a_table(made, root):
    expected = {
        "retention": [tables.retention(made)],
        "merged-cosines": [tables.merged_cosines(made)],
        "norms": [tables.norms(made)],
        "cosines": [tables.cosines(made)],
        "sign-conflicts": [tables.sign_conflicts(made)],
        "overlaps": [tables.overlaps(made)],
        "gamma": [tables.gamma(made)],
        "spectra": [*map(tables.spectrum, shown_spectra(made.inspection)), tables.ranks(made)],
        "costs": [tables.costs(made)],
    }
    shown = {figure.attributes["id"]: figure for figure in root.all("figure")}
    assert list(shown) == list(expected)
    for name, figure in shown.items():
        (svg,) = figure.all("svg")
        (heading,) = figure.all("h3")
        assert svg.attributes["role"] == "img"
        assert svg.attributes["aria-label"].startswith(heading.text)
        (caption,) = figure.all("figcaption")
        assert caption.text
        (details,) = figure.all("details")
        assert [rows_of(table) for table in details.all("table")] == [
            [list(table.columns), *([_written(cell) for cell in row] for row in table.rows)]
            for table in expected[name]
        ]


def _written(cell):
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return cell if isinstance(cell, str) else number(cell)


def test_experts_rules_checks_recipe_and_sources(made, root):
    text = root.text
    kept = made.inspection.retention()
    rows = rows_of(next(root.all("table")))
    assert rows[0][:2] == ["expert", "kept of what it adds, %"]
    assert [row[:2] for row in rows[1:]] == [[e, number(100 * kept[e])] for e in SCALES]
    assert ["linear", "ace", "9"] in rows_of(list(root.all("table"))[1])
    assert "differs from base passed: 9 of 9 tensors differ" in text
    assert "What is kept of an expert is predicted from the updates alone." in text
    assert "storing loses 0% of the merged update's norm" in text
    _, recipe = root.all("pre")  # the first is the command that scores
    assert "method: ace parameters: tau: 0.0" in recipe.text
    for source in made.manifest["sources"].values():
        for file, digest in source["content"].items():
            assert f"{file} {digest}" in text
    assert f"{made.manifest['torch']}" in text
    assert "peak memory" in text


def test_what_is_bad_comes_first(without_pictures):
    warning = Finding(Severity.WARNING, "is odd: look again", "code", ("layers.0",))
    notes = (Finding(Severity.NOTE, "the same of all", e) for e in SCALES)
    findings = (warning, *notes)
    checks = (Check("finite", False, "NaN in fc.weight"), Check("heads", True, "none"))
    bad = replace(
        without_pictures,
        inspection=replace(without_pictures.inspection, findings=findings),
        verification=replace(without_pictures.verification, checks=checks),
        manifest={**without_pictures.manifest, "notes": ["a note of the plan"]},
    )
    root = parse(page.render(bad))
    said = [item.text for item in root.all("li") if "class" in item.attributes]
    assert said == [
        "Fault : the output fails its check 'finite': NaN in fc.weight. Do not use it",
        "Warning (code): is odd: look again In: layers.0.",
        "Note : a note of the plan",
        "Note (code, maths, prose): the same of all",
    ]
    assert "1 of 2 checks failed" in root.text
    assert "finite FAILED : NaN in fc.weight" in root.text


def test_before_a_merge(tmp_path):
    look = inspect(SCALES, spectra="none")
    write_html(Report("base", look), tmp_path / "look.html")
    root = parse((tmp_path / "look.html").read_text())
    assert "3 experts of '<8 tensors in memory>' were looked at before any merge" in root.text
    assert [f.attributes["id"] for f in root.all("figure")] == [
        *("norms", "cosines", "sign-conflicts", "gamma")
    ]
    assert not list(root.all("pre"))
    assert (tmp_path / "look.html").stat().st_size > 10_000


def test_nothing_was_read(without_pictures):
    root = parse(page.render(Report("base", without_pictures.inspection)))
    assert not list(root.all("figure"))
    assert rows_of(next(root.all("table")))[1:] == [["code"], ["maths"], ["prose"]]


def elements(text, names):
    """The elements of a page, which shows these names and is not acted on by them."""
    root = parse(text)
    found = [e.tag for e in root.all()]
    attributes = {key for e in root.all() for key in e.attributes}
    assert not {key for key in attributes if key.startswith("on")}
    assert not {"script", "img", "iframe"} & set(found)
    for name in names:
        shown = "".join(c if c.isprintable() else "\ufffd" for c in name)
        assert " ".join(shown.split()) in root.text
    assert "\x1b" not in text
    assert "\u202e" not in text
    return found


def test_hostile_names_of_layers_are_text(tmp_path):
    shapes = []
    for names in (EVIL, "abcdefg"):
        folder = tmp_path / str(len(shapes))
        folder.mkdir()
        tensors = [f"layers.{n}.mlp.up_proj.{name}.weight" for n, name in enumerate(names)]
        merge(folder, SCALES, blocks=len(EVIL), kinds=("mlp.up_proj",), names=tensors)
        found = api.report(folder / "out", spectra="all")  # without times, which vary
        shapes.append(elements(page.render(found), tensors))
    assert shapes[0] == shapes[1]


def test_hostile_names_are_text(without_pictures):
    shapes = []
    for one, other in (EVIL[:2], EVIL[2:4], EVIL[4:6], EVIL[5:], ("harmless", "too")):
        found = replace(
            without_pictures,
            title=one,
            manifest={
                **without_pictures.manifest,
                "notes": [other],
                "recipe": {**without_pictures.manifest["recipe"], "base": one},
                "sources": {one: {"source": other, "content": {one: other}}},
                "heads": {one: [other]},
            },
            inspection=replace(
                without_pictures.inspection,
                base=one,
                findings=(Finding(Severity.FAULT, one, other, (one,)),),
            ),
        )
        shapes.append(elements(page.render(found), (one, other)))
    assert all(shape == shapes[-1] for shape in shapes)


def test_hostile_names_of_experts_in_pictures(made):
    """A recipe allows no such name; a page does not rely on it."""
    names = dict(zip(SCALES, EVIL[:3], strict=True))
    layers = tuple(_renamed(layer, names) for layer in made.inspection.matrices)
    sources = {names[e]: source for e, source in made.inspection.experts.items()}
    inspection = replace(made.inspection, layers=layers, experts=sources)
    root = parse(page.render(replace(made, inspection=inspection)))
    assert not list(root.all("script", "img", "iframe"))
    texts = [text.text for text in root.all("text")]
    assert any(text.startswith("<script>alert(1)</script>") for text in texts)


def _renamed(layer, names):
    def own(values):
        return {names[e]: value for e, value in values.items()}

    return replace(
        layer,
        experts=tuple(names[e] for e in layer.experts),
        spectra=own(layer.spectra),
        overlap={(names[a], names[b]): v for (a, b), v in layer.overlap.items()},
        retention=own(layer.retention),
        merged_cosines=own(layer.merged_cosines),
    )


def test_nothing_is_loaded_from_anywhere(text, root):
    assert not re.search(r"https?:|@import|<script|<base|<form|<object|<embed", text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    for element in root.all():
        for key in ("src", "href", "srcset", "action", "data", "poster"):
            if key in element.attributes:
                assert element.attributes[key].startswith(("#", "data:")), element
    (policy,) = (m for m in root.all("meta") if "http-equiv" in m.attributes)
    assert "default-src 'none'" in policy.attributes["content"]


def test_the_same_merge_gives_the_same_bytes(tmp_path):
    merge(tmp_path, SCALES, blocks=2, kinds=("mlp.up_proj",))
    pages = []
    for name in ("one.html", "two.html"):
        write_html(api.report(tmp_path / "out"), tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_size_of_a_large_merge(made):
    layers = tuple(
        replace(layer, name=f"model.layers.{block}.{kind}.weight", tensor=f"{block}.{kind}")
        for block in range(32)
        for kind, layer in zip("qkvogud", made.inspection.matrices, strict=False)
    )
    more = {f"e{n}": e for n, e in enumerate([*SCALES, *SCALES, "code", "maths"])}
    layers = tuple(_with_experts(layer, more) for layer in layers)
    inspection = replace(made.inspection, layers=layers, experts=dict.fromkeys(more, "./somewhere"))
    text = page.render(replace(made, inspection=inspection))
    assert len(layers) == 224
    assert len(text.encode()) < 2_000_000


def _with_experts(layer, names):
    places = [layer.experts.index(e) for e in names.values()] + [len(layer.experts)]
    picked = {
        key: value[places] if value.ndim == 1 else value[places][:, places]
        for key, value in vars(layer.sums).items()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    pairs = [(a, b) for i, a in enumerate(names) for b in list(names)[i + 1 :]]
    return replace(
        layer,
        experts=tuple(names),
        sums=replace(layer.sums, **picked),
        spectra={n: layer.spectra[e] for n, e in names.items()},
        overlap=dict.fromkeys(pairs, 0.2),
        retention={n: layer.retention[e] for n, e in names.items()},
        merged_cosines={n: layer.merged_cosines[e] for n, e in names.items()},
    )


def test_files_of_others_are_left_alone(tmp_path, without_pictures):
    path = tmp_path / FILE_NAME
    path.write_text("<html>mine</html>")
    with pytest.raises(InputError, match="overwrite=True"):
        write_html(without_pictures, path)
    assert path.read_text() == "<html>mine</html>"
    write_html(without_pictures, path, overwrite=True)
    write_html(without_pictures, path)  # an earlier page of ours
    with pytest.raises(InputError, match=r"is a folder: name a file"):
        write_html(without_pictures, tmp_path, overwrite=True)
    with pytest.raises(InputError, match="make it first"):
        write_html(without_pictures, tmp_path / "none" / "a.html")


def test_written_whole_or_not_at_all(tmp_path, without_pictures, monkeypatch):
    path = tmp_path / FILE_NAME
    write_html(without_pictures, path)
    before = path.read_bytes()

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="no room"):
        write_html(replace(without_pictures, title="another"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_real_models(tmp_path):
    base, paths = save_family("llama", tmp_path, experts=2)
    named = [f"--expert={name}={path}" for name, path in paths.items()]
    command("merge", "--base", base, *named, tmp_path / "out", "--report")
    root = parse((tmp_path / "out" / FILE_NAME).read_text())
    labels = [text.text for text in root.all("text")]
    assert "self_attn.q_proj" in labels
    assert "block" in labels
    assert "llama" not in root.text or root.text  # families are not shown as if they were experts


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`"
)
@of_gpt2
def test_adapters_into_one(family):  # noqa: F811
    named = [f"--expert={n}={path}" for n, path in experts(family, "adapter").items()]
    out = family / "reported"
    command(
        "merge",
        "--base",
        family / "base",
        "--as",
        "adapter",
        "--method=ace",
        *named,
        out,
        "--report",
    )
    root = parse((out / FILE_NAME).read_text())
    (summary,) = (p for p in root.all("p") if p.attributes.get("class") == "summary")
    assert "became one adapter by ace" in summary.text
    assert "prediction" not in root.text
    assert "of the update's energy its rank loses" in root.text
    assert {f.attributes["id"] for f in root.all("figure")} >= {"norms", "gamma", "spectra"}
