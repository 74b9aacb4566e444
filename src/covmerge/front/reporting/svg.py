"""A matplotlib figure as a part of a page: one element, in the page's own ink and type."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element, fromstring, tostring

from covmerge.front.reporting.colours import COLOURS
from covmerge.front.reporting.extra import needed_for_reports
from covmerge.front.reporting.figures.canvas import style

with needed_for_reports():
    import matplotlib
    from matplotlib.figure import Figure

# Its annotations are partial.
_matplotlib: Any = matplotlib
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_DROPPED = frozenset({"metadata", "style"})
_LONG = re.compile(r"\d+\.\d{3,}")
_REFERENCE = re.compile(r"#([\w-]+)")
_PIXELS_PER_POINT = 4 / 3


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an `<svg>` element, without its title, which a page writes itself.

    Of one figure always the same bytes. Names in it are text, whatever they hold.

    Args:
        figure: it loses its title.
        name: begins the ids in it, so that those of two figures on a page differ.
        label: what it is to those who do not see it.
    """
    anything: Any = figure
    anything.suptitle("")
    content = io.BytesIO()
    with style():
        _matplotlib.rcParams["svg.hashsalt"] = "covmerge"
        anything.savefig(
            content,
            format="svg",
            bbox_inches="tight",
            pad_inches=0.05,
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
    """The same in the page's colours and type."""
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
