"""The pictures of a page, each with an explanation and the numbers behind it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element, fromstring, tostring

from matplotlib.figure import Figure

from covmerge.base.table import Table
from covmerge.front.reporting import figures, tables
from covmerge.front.reporting.data import Report, gammas, shown_spectra
from covmerge.front.reporting.figures.canvas import NothingToDraw, style
from covmerge.front.reporting.style import COLOURS

# A matplotlib figure as a part of a page: one element, with the colours and fonts of the page.

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_DROPPED = frozenset({"metadata", "style"})
_LONG = re.compile(r"\d+\.\d{3,}")
_REFERENCE = re.compile(r"#([\w-]+)")
_PIXELS_PER_POINT = 4 / 3


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an `<svg>` element, without its title, which the page writes itself.

    A figure always gives the same bytes. Names in it are plain text, whatever they contain. Ids begin with
    `name`, so that two figures on a page have different ids; `label` is for screen readers.
    """
    anything: Any = figure
    anything.suptitle("")
    content = io.BytesIO()
    with style():
        anything.savefig(
            content,
            format="svg",
            # All parts are there: "tight" would draw the figure once more before it asks the same.
            bbox_inches=anything.get_tightbbox().padded(0.05),
            transparent=True,
            metadata=_NO_METADATA,
        )
    root = fromstring(content.getvalue())
    _clean(root, name)
    width, height = (float(part) for part in root.attrib.pop("viewBox").split()[2:])
    root.attrib = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": f"{_PIXELS_PER_POINT * width:.0f}",
        "height": f"{_PIXELS_PER_POINT * height:.0f}",
        "preserveAspectRatio": "xMinYMin",
        "role": "img",
        "aria-label": label,
    }
    return tostring(root, encoding="unicode")


def _clean(root: Element, name: str) -> None:
    used = {found for element in root.iter() for found in _references(element)}
    for parent in list(root.iter()):
        for child in list(parent):
            child.tag = _local(child.tag)
            if child.tag in _DROPPED:
                parent.remove(child)
    root.tag = _local(root.tag)
    for element in root.iter():
        element.attrib = dict(_attributes(element, name, used))
        if element.tag != "text":
            element.text = None
        element.tail = None


def _attributes(element: Element, name: str, used: set[str]) -> Iterator[tuple[str, str]]:
    for key, value in element.attrib.items():
        match _local(key):
            case "id":
                if value in used:
                    yield "id", f"{name}-{value}"
            case "style":
                yield "style", _style(value)
            case "href" if value.startswith("data:"):
                yield "href", "".join(value.split())
            case "href" | "clip-path" as found:
                yield found, _REFERENCE.sub(rf"#{name}-\1", value)
            case "transform" if value.startswith("rotate(-0 "):
                pass
            case found:
                yield (
                    found,
                    _LONG.sub(lambda long: f"{float(long[0]):.2f}", " ".join(value.split())),
                )


def _style(value: str) -> str:
    parts = [part.strip() for part in value.split(";")]
    style = "; ".join(part for part in parts if part and not part.startswith("font-family"))
    for name, colour in COLOURS.items():
        style = style.replace(colour.light, f"var(--{name})")
    return style


def _references(element: Element) -> Iterator[str]:
    for key, value in element.attrib.items():
        if _local(key) in ("href", "clip-path") and not value.startswith("data:"):
            yield from _REFERENCE.findall(value)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


@dataclass(frozen=True)
class Picture:
    """A picture on a page."""

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
    """Draw the pictures of layers for which there is data."""
    left_out = {
        # The prediction is not valid for adapters; a gate belongs to the methods that have one.
        "retention": bool(report.inspection.adapters),
        "gamma": report.manifest is not None
        and all(gamma.fired is None for gamma in gammas(report)),
    }
    return _drawn(report, [kind for kind in _OF_LAYERS if not left_out.get(kind.name)])


def cost_pictures(report: Report) -> Iterator[Picture]:
    """Draw time and memory, if something was merged."""
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
        "The share of weights that two experts move in opposite directions, among those that both changed.",
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
