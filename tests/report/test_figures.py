"""The pictures: what they draw, what their titles say, and that nothing lies on anything else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import InputError
from covmerge.front.reporting import figures, tables
from covmerge.front.reporting.data import LayerCost, Report
from covmerge.front.reporting.grid import panels
from covmerge.run.inspection.result import LayerView
from tests.advised import advice
from tests.forked import printed
from tests.report.merges import inspect, report

OF_EXPERTS = ("cosines", "gamma", "norms", "overlaps", "sign_conflicts", "spectra")
SCALES = {"code": 0.02, "maths": 0.05, "prose": 0.1}
LLAMA = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    # In block 2 'big' drowns the others in any plain mean.
    scales = {"quiet": 0.01, "big": [0.05, 0.05, 0.8, 0.05], "fair": 0.05}
    return report(tmp_path_factory.mktemp("merge"), scales, "average")


@pytest.fixture(scope="module")
def refined(tmp_path_factory):
    return report(tmp_path_factory.mktemp("ace"), SCALES, params={"tau": 0.0})


def title_of(figure):
    return figure.get_suptitle().replace("\n", " ")


def drawn(figure):
    """The cells of a heat map by panel: experts by columns."""
    found = {}
    for axes in figure.axes:
        if axes.images and (axes.get_title(loc="left") or axes.get_title()):
            found[axes.get_title(loc="left")] = np.ma.filled(axes.images[0].get_array(), np.nan)
    return found


def column(table, name):
    return {row[0]: row[table.columns.index(name)] for row in table.rows}


@pytest.mark.parametrize(
    ("name", "factor"), [("norms", 100), ("retention", 100), ("merged_cosines", 1)]
)
def test_heat_maps_draw_what_their_tables_say(merged, name, factor):
    cells, table = drawn(getattr(figures, name)(merged)), getattr(tables, name)(merged)
    for row, expert in enumerate(merged.inspection.compared):
        said = column(table, expert)
        for kind in ("mlp.up_proj", "self_attn.q_proj"):
            shown = factor * cells[kind][row]
            expected = [said[f"layers.{block}.{kind}.weight"] for block in range(4)]
            assert shown == pytest.approx(expected)
        assert factor * cells["pooler.dense"][row][0] == pytest.approx(said["pooler.dense.weight"])


def test_who_keeps_least_and_where(merged):
    title = title_of(figures.retention(merged))
    assert title.startswith("'quiet' keeps least by prediction, ")
    assert "'big' most, " in title
    kept = merged.inspection.retention()
    assert min(kept, key=kept.get) == "quiet"
    least = title.partition("least in blocks ")[2].partition(";")[0]
    assert "2" in least.replace("–", ",").split(",") or "–" in least
    labels = [text.get_text() for text in figures.retention(merged).axes[0].get_yticklabels()]
    assert [label.split()[0] for label in labels] == ["quiet", "big", "fair"]
    assert labels[1].endswith(f"{100 * kept['big']:.0f}%")


def test_who_moved_farthest(merged):
    title = title_of(figures.norms(merged))
    assert title.startswith("'big' moved ")
    assert "times as far as 'quiet'" in title


def test_whom_the_merge_follows(merged):
    title = title_of(figures.merged_cosines(merged))
    assert "points most along 'big'" in title
    assert "least along 'quiet'" in title


def test_where_there_is_nobody_to_compare_with_nobody_is_most_or_least(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = {f"h.{n}.fc.weight": torch.randn(40, 40, generator=generator) for n in range(3)}
    step = {name: torch.randn(40, 40, generator=generator) for name in base}
    first = {name: base[name] + 0.1 * step[name] for name in base}
    against = {name: base[name] - 0.1 * step[name] for name in base}
    save_file(base, tmp_path / "base.safetensors")
    save_file(first, tmp_path / "a.safetensors")
    experts = {"a": tmp_path / "a.safetensors"}
    covmerge.merge(tmp_path / "base.safetensors", experts, "average", tmp_path / "out")
    alone = covmerge.report(tmp_path / "out")
    titles = [title_of(figure(alone)) for figure in (figures.retention, figures.merged_cosines)]
    assert titles[0].startswith("By prediction 'a' keeps 100% of what it adds")
    assert titles[1] == "The merged update and that of 'a' have a cosine of 1.00"
    drawn = figures.cosines, figures.sign_conflicts, figures.overlaps
    pair = covmerge.inspect(base, {"a": first, "b": against}, spectra="all")
    same = covmerge.inspect(base, {"a": first, "b": first, "c": first}, spectra="all")
    titles += [title_of(figure(look)) for look in (pair, same) for figure in drawn]
    assert titles[2] == "The updates of 'a' and 'b' have a cosine of −1.00"
    assert titles[3] == "'a' and 'b' pull 100% of the weights apart; chance is 50%"
    assert titles[4].startswith("'a' and 'b' share 100% of their leading input directions")
    assert titles[5] == "The updates of every two experts have a cosine of 1.00"
    assert titles[7].startswith("Every two experts share 100%")
    assert not [title for title in titles if "most" in title or "least" in title]


def test_pairs():
    generator = torch.Generator().manual_seed(0)
    base = {f"h.{n}.fc.weight": torch.randn(40, 40, generator=generator) for n in range(3)}
    step = {name: torch.randn(40, 40, generator=generator) for name in base}
    experts = {
        "one": {name: base[name] + 0.1 * step[name] for name in base},
        "same": {name: base[name] + 0.2 * step[name] for name in base},
        "against": {name: base[name] - 0.1 * step[name] for name in base},
        "other": {n: w + 0.1 * torch.randn(40, 40, generator=generator) for n, w in base.items()},
    }
    look = covmerge.inspect(base, experts, spectra="all")
    assert title_of(figures.cosines(look)).startswith("'one' and 'same' changed the base most")
    conflict = title_of(figures.sign_conflicts(look))
    assert conflict.startswith("'one' and 'against' disagree most: they pull 100% of the weights")
    assert "'one' and 'same' agree most, 0%" in conflict
    shared = title_of(figures.overlaps(look))
    assert "act most on the same inputs: 100%" in shared
    assert shared.endswith("chance is 5%")
    cells = np.ma.filled(figures.cosines(look).axes[0].images[0].get_array(), np.nan)
    said = column(tables.cosines(look), "cosine")
    assert cells[1][0] == pytest.approx(said["one and against"]) == pytest.approx(-1.0)
    assert np.isnan(cells[0][1:]).all()  # a pair is drawn once
    texts = [text.get_text() for text in figures.cosines(look).axes[0].texts]
    assert texts.count("−1.00") == 2


def test_gamma_over_its_threshold(refined):
    figure, table = figures.gamma(refined), tables.gamma(refined)
    assert title_of(figure).startswith("The gate fired in 9 of 9 matrices")
    assert table.columns[-1] == "gate fired in this merge"
    assert all(row[-1] is True for row in table.rows)
    # The recipe's τ is that of the picture, and 0 is below every γ.
    assert "above τ = 0, paper's" in table.columns
    free = column(table, "scale-free γ")
    (panel,) = (axes for axes in figure.axes if axes.get_title(loc="left") == "mlp.up_proj")
    shown = next(line for line in panel.lines if line.get_marker() == "s").get_ydata()
    assert shown == pytest.approx([free[f"layers.{n}.mlp.up_proj.weight"] for n in range(4)])


def test_gamma_without_a_merge_and_at_its_pole():
    base = {"fc.weight": torch.zeros(2, 2), "out.weight": torch.eye(2)}
    halves = {"a": 0.5 * torch.eye(2) / 2**0.5, "b": 2 * torch.eye(2) / 2**0.5}
    experts = {n: {"fc.weight": step, "out.weight": step} for n, step in halves.items()}
    look = covmerge.inspect(base, experts)
    assert tables.gamma(look).rows[0][1] > 1e6
    assert "ACE's gate would fire in 2 by the paper's γ" in title_of(figures.gamma(look))


def test_spectra_before_and_after(refined):
    figure = figures.spectra(refined)
    assert title_of(figure).startswith("Refinement flattens the merged spectrum")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["experts", "merged, before refinement", "merged"]
    first = refined.inspection.matrices[0]
    table = tables.spectrum(first)
    values = column(table, "merged")
    line = next(line for line in figure.axes[0].lines if line.get_label() == "merged")
    assert (
        line.get_ydata()[0] == pytest.approx(values["σ1"]) == pytest.approx(first.merged.sigma[0])
    )
    assert table.columns[1:] == (
        *("expert code", "expert maths", "expert prose"),
        *("merged, before refinement", "merged"),
    )


def test_spectra_without_refinement(merged):
    title = title_of(figures.spectra(merged))
    assert title.startswith("In the merged update the top 5%")
    assert "before refinement" not in str(tables.ranks(merged).columns)


def test_costs_as_they_were_measured(refined):
    figure, table = figures.costs(refined), tables.costs(refined)
    assert table.columns == ("tensor", "seconds", "memory, MB", "GFLOP")
    assert " of the time; the most memory" in title_of(figure)
    seconds = column(table, "seconds")
    for axes in figure.axes:
        kind = axes.get_title(loc="left")
        if kind in ("mlp.up_proj", "self_attn.q_proj"):
            shown = [bar.get_height() for bar in axes.patches]
            assert shown == pytest.approx([seconds[f"layers.{n}.{kind}.weight"] for n in range(4)])


def test_costs_by_the_plan_where_no_time_was_measured(refined):
    costs = {name: replace(cost, seconds=None) for name, cost in refined.costs.items()}
    later = replace(refined, costs=costs)
    assert tables.costs(later).columns == ("tensor", "memory, MB", "GFLOP")
    assert " of the work; " in title_of(figures.costs(later))


def test_no_merge_and_no_spectra():
    look = inspect(SCALES, spectra="none")
    for name in ("retention", "merged_cosines"):
        with pytest.raises(InputError, match="covmerge report OUT"):
            getattr(figures, name)(look)
    for name in ("spectra", "overlaps"):
        with pytest.raises(InputError, match="spectra"):
            getattr(figures, name)(look)
    with pytest.raises(InputError, match="nothing was merged"):
        figures.costs(Report("base", look))
    for name in ("norms", "cosines", "sign_conflicts", "gamma"):
        assert title_of(getattr(figures, name)(look))


def test_one_expert_has_no_pairs():
    look = inspect({"only": 0.1})
    assert title_of(figures.norms(look)).startswith("'only' moved ")
    for name in ("cosines", "sign_conflicts", "overlaps", "gamma"):
        with pytest.raises(InputError, match="two experts"):
            getattr(figures, name)(look)


def test_what_an_expert_left_alone_is_marked():
    base = {f"h.{n}.fc.weight": torch.eye(4) for n in range(3)}
    moved = {name: 1.5 * weight for name, weight in base.items()}
    frozen = {**moved, "h.1.fc.weight": base["h.1.fc.weight"]}
    figure = figures.norms(covmerge.inspect(base, {"a": moved, "b": frozen}))
    assert np.isnan(drawn(figure)["fc"]).tolist() == [[False] * 3, [False, True, False]]
    (crosses,) = (line for line in figure.axes[0].lines if line.get_marker() == "x")
    assert crosses.get_xydata().tolist() == [[1.0, 1.0]]
    assert "left the layer as it was" in figure.axes[-1].get_title(loc="left")


@pytest.mark.parametrize(
    ("experts", "blocks", "kinds", "single"),
    [
        (2, 3, LLAMA[:2], 0),
        (3, 1, LLAMA, 1),
        pytest.param(8, 6, LLAMA, 2, marks=pytest.mark.nightly),
        (5, 0, (), 20),
        (20, 40, LLAMA, 3),
    ],
    ids=["2x6", "3x8", "8x44", "5x20", "20x283"],
)
def test_nothing_lies_on_anything_else(experts, blocks, kinds, single):
    scales = {f"expert-with-a-long-name-{n}": 0.1 * (n + 1) for n in range(experts)}
    look = inspect(scales, blocks=min(blocks, 2), kinds=kinds, single=single, width=4)
    layers = [
        *look.layers,
        *(_in_block(n, layer) for n in range(2, blocks) for layer in look.layers),
    ]
    look = replace(look, layers=tuple({layer.name: layer for layer in layers}.values()))
    costs = {layer.name: LayerCost(None, 1_000_000, 1e9) for layer in look.layers}
    for name in (*OF_EXPERTS, "costs"):
        figure = getattr(figures, name)(Report("out", look, costs=costs))
        width, height = figure.bbox.size
        texts = [(text, text.get_window_extent()) for text in _texts(figure)]
        for text, box in texts:
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, (name, text.get_text(), box, figure.bbox)
        x0, y0, x1, y1 = np.array([box.extents for _, box in texts]).T
        gap = 0.5  # a pixel's edge may touch
        left_of = x1[:, None] - gap < x0
        below = y1[:, None] - gap < y0
        on_each_other = np.triu(~(left_of | left_of.T | below | below.T), k=1)
        shown = [[texts[one][0].get_text() for one in pair] for pair in np.argwhere(on_each_other)]
        assert not shown, (name, shown)


def _in_block(number, layer):
    """A layer of block 1 in another block: to look at 283 of 20 experts would take most of the time."""
    block = f"layers.{number}."
    return replace(
        layer,
        name=layer.name.replace("layers.1.", block),
        tensor=layer.tensor.replace("layers.1.", block),
    )


def _texts(figure):
    from matplotlib.text import Text

    def shown(artist):
        if not artist.get_visible():
            return
        if isinstance(artist, Text) and artist.get_text().strip():
            yield artist
        for child in artist.get_children():
            yield from shown(child)

    figure.draw_without_rendering()
    return list(shown(figure))


@pytest.mark.filterwarnings("ignore:Glyph")  # of this test's own drawing
def test_names_are_text_and_no_mathematics():
    name = "layers.0.$\\frac{<b>&{.weight"
    base = {name: torch.eye(4), "漢字.weight": torch.eye(4)}
    moved = {n: 1.5 * w for n, w in base.items()}
    figure = figures.norms(covmerge.inspect(base, {"a": moved, "b": moved}))
    labels = [text.get_text() for text in _texts(figure)]
    assert any("$\\frac{<b>&{" in label for label in labels)


def test_panels_of_two_towers_and_of_mixtures():
    names = [
        f"{tower}.encoder.layers.{n}.fc1.weight" for tower in ("text", "vision") for n in (0, 1)
    ]
    assert [p.label for p in panels((n, n) for n in names)] == ["text: fc1", "vision: fc1"]
    names = [f"layers.{n}.moe.experts.{e}.w1.weight" for n in (0, 1) for e in (0, 1, 2)]
    (panel,) = panels((n, n) for n in names)
    assert (panel.label, [len(own) for own in panel.columns.values()]) == (
        "moe.experts.*.w1",
        [3, 3],
    )
    names = ["layers.9.fc.weight", "layers.10.fc.weight", "lm_head.weight", "pooler.weight"]
    numbered, single = panels((n, n) for n in names)
    assert list(numbered.columns) == ["9", "10"]
    assert (single.label, list(single.columns)) == ("single layers", ["lm_head", "pooler"])


def test_matrices_of_a_stack_are_one_kind(merged):
    layers = [
        replace(layer, tensor="h.0.experts.w", name=f"h.0.experts.w[{n}]", role="expert_stack")
        for n, layer in enumerate(merged.inspection.matrices[:4])
    ]
    assert all(isinstance(layer, LayerView) for layer in layers)
    figure = figures.norms(replace(merged.inspection, layers=tuple(layers)))
    assert next(iter(drawn(figure).values())).shape == (3, 1)


def test_a_figure_of_the_user_keeps_the_style_of_the_user(merged):
    import matplotlib

    with matplotlib.rc_context({"text.color": "red", "font.size": 30.0}):
        figure = figures.norms(merged)
        assert matplotlib.rcParams["text.color"] == "red"
    assert all(text.get_color() != "red" for text in _texts(figure))


def test_a_missing_package_says_what_to_install():
    code = """
import sys
from covmerge.errors import InputError
from covmerge.front.reporting.job import check_packages
for missing in ("matplotlib", "jinja2"):
    sys.modules[missing] = None
    try:
        check_packages()
    except InputError as error:
        print(error)
    del sys.modules[missing]
check_packages()
"""
    said = advice("a report needs {}: pip install covmerge[report]")
    for line, missing in zip(printed(code).splitlines(), ("matplotlib", "jinja2"), strict=True):
        assert re.fullmatch(said, line) and missing in line  # and with it, `check_packages` ends


def test_the_docs_name_every_figure():
    docs = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    named = [line.split("`")[1] for line in docs.splitlines() if line.startswith("| `")]
    assert sorted(named) == sorted(figures.__all__)
    assert covmerge.figures is figures
