"""The pictures of a page, each with how to read it and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from covmerge.base.table import Table
from covmerge.front.reporting import figures, tables
from covmerge.front.reporting.data import Report
from covmerge.front.reporting.extra import needed_for_reports
from covmerge.front.reporting.figures.canvas import NothingToDraw
from covmerge.front.reporting.numbers import gammas, shown_spectra
from covmerge.front.reporting.svg import inline_svg

with needed_for_reports():
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A picture on a page.

    Attributes:
        name: for links to it.
        title: what to read from it.
        caption: how to read it.
        svg: the drawing.
        tables: the numbers behind it.
        small: whether it may stand beside another.
    """

    name: str
    title: str
    caption: str
    svg: str
    tables: Sequence[Table]
    small: bool


@dataclass(frozen=True)
class _Kind:
    name: str
    draw: Callable[[Report], Figure]
    table: Callable[[Report], Sequence[Table]]
    caption: str
    small: bool = False


def pictures(report: Report) -> Iterator[Picture]:
    """Draw what there is to draw of the layers."""
    left_out = {
        # Of adapters the prediction says nothing; a gate belongs to the methods that have one.
        "retention": bool(report.inspection.adapters),
        "gamma": report.manifest is not None
        and all(gamma.fired is None for gamma in gammas(report)),
    }
    return _drawn(report, [kind for kind in _OF_LAYERS if not left_out.get(kind.name)])


def cost_pictures(report: Report) -> Iterator[Picture]:
    """Draw time and memory, where something was merged."""
    return _drawn(report, _OF_COSTS)


def _drawn(report: Report, kinds: Sequence[_Kind]) -> Iterator[Picture]:
    for kind in kinds:
        try:
            figure = kind.draw(report)
        except NothingToDraw:
            continue
        title = figure.get_suptitle().replace("\n", " ")
        svg = inline_svg(figure, kind.name, f"{title}. The numbers are in the table below.")
        yield Picture(kind.name, title, kind.caption, svg, kind.table(report), kind.small)


def _spectra(report: Report) -> list[Table]:
    return [*map(tables.spectrum, shown_spectra(report)), tables.ranks(report)]


_OF_LAYERS = (
    _Kind(
        "retention",
        figures.retention,
        lambda report: [tables.retention(report)],
        "A panel for each kind of layer, a column for each block, a row for each expert with its mean, "
        "in which less than 0% counts as 0%. Blue is kept; white: as much is wrong as in the base "
        "without the expert; red: more is.",
    ),
    _Kind(
        "merged-cosines",
        figures.merged_cosines,
        lambda report: [tables.merged_cosines(report)],
        "Cosine between an expert's update and the merged one, by layer: which experts the merged "
        "model follows.",
    ),
    _Kind(
        "norms",
        figures.norms,
        lambda report: [tables.norms(report)],
        "The norm of each expert's update over that of the base's weights, by layer. Experts of very "
        "different size are what scale-free methods are for.",
    ),
    _Kind(
        "cosines",
        figures.cosines,
        lambda report: [tables.cosines(report)],
        "Cosine between the updates of two experts, mean over the matrices that both changed.",
        small=True,
    ),
    _Kind(
        "sign-conflicts",
        figures.sign_conflicts,
        lambda report: [tables.sign_conflicts(report)],
        "Of the weights that both experts changed, the share that they move in opposite directions.",
        small=True,
    ),
    _Kind(
        "overlaps",
        figures.overlaps,
        lambda report: [tables.overlaps(report)],
        "How far the leading 5% of input directions of two updates span the same space. Experts that "
        "act on the same inputs must share what is done with them.",
        small=True,
    ),
    _Kind(
        "gamma",
        figures.gamma,
        lambda report: [tables.gamma(report)],
        "γ says how differently scaled the experts' updates of a matrix are. Where it is above its "
        "threshold τ, ACE puts the experts on one scale. The scale of the pictures is logarithmic, "
        "and linear below 0.1.",
    ),
    _Kind(
        "spectra",
        figures.spectra,
        _spectra,
        "Singular values of a few updates, largest first, on a logarithmic scale. A curve that falls "
        "fast is an update of few directions.",
    ),
)
_OF_COSTS = (
    _Kind(
        "costs",
        figures.costs,
        lambda report: [tables.costs(report)],
        "Mathematics of each layer of the merge; what takes next to nothing is in the table only. The "
        "number in a panel is the memory that one layer needs while it is merged, by the plan.",
    ),
)
