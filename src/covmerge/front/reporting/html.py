"""One self-contained page: it has no script, loads nothing, and is readable on phones and on paper."""

from __future__ import annotations

from typing import Any

import yaml

from covmerge.base.text import printable
from covmerge.base.version import __version__
from covmerge.front.reporting import page, tables
from covmerge.front.reporting.data import Report
from covmerge.front.reporting.style import COLOURS, needed_for_reports, number
from covmerge.front.scoring import score_command

with needed_for_reports():
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from covmerge.front.reporting.pictures import cost_pictures, pictures


def render(report: Report) -> str:
    """Return the page; a report always gives the same bytes."""
    environment = Environment(
        autoescape=True,
        finalize=_shown,
        loader=PackageLoader("covmerge.front.reporting"),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["cell"] = _cell
    manifest = report.manifest
    # Before a merge there is no retention; for adapters its prediction is not valid.
    predicted = manifest is not None and not report.inspection.adapters
    recipe = None if manifest is None else manifest["recipe"]
    return environment.get_template("report.html.jinja").render(
        report=report,
        version=__version__,
        colours=COLOURS,
        summary=page.summary(report),
        messages=page.messages(report),
        experts=tables.experts(report),
        rules=() if manifest is None else manifest["totals"]["by_rule"],
        facts=list(page.facts(report)),
        method_tables=tables.method_columns(report),
        losses=tables.losses(report),
        retention=page.RETENTION if predicted else None,
        score=None if recipe is None else score_command(recipe, report.title),
        pictures=list(pictures(report)),
        cost_pictures=list(cost_pictures(report)),
        run=list(page.run_facts(report)),
        recipe=recipe and yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=88),
        sources=page.sources(report),
        versions={} if manifest is None else {k: manifest[k] for k in ("covmerge", "torch")},
        svg=Markup,
    )


def _shown(value: Any) -> Any:
    """Return a text without characters that could turn or end the text around it."""
    return printable(value) if type(value) is str else value


def _cell(value: tables.Cell) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else number(value)
