"""The text of a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

from covmerge.base.diagnostics import summarise
from covmerge.base.findings import Finding, Severity, by_text
from covmerge.base.sizes import format_size
from covmerge.base.text import counted, some
from covmerge.front.reporting.data import Report
from covmerge.front.reporting.style import number, quoted, share
from covmerge.maths.methods import registry
from covmerge.maths.methods.mergekit import called
from covmerge.maths.steps import registry as steps
from covmerge.plan.planning.varied import shown_parameters
from covmerge.run.engine.entries import account_of_losses, rounding_said

RETENTION = (
    "What is kept of an expert is predicted from the updates alone. It is the share of what an expert "
    "adds to a layer's outputs that the merged model still adds. At 100% all of it is there. At 0% as "
    "much is wrong as in the base without the expert; below that more is, and a mean over layers counts "
    "it as 0%. It is no score: it tells little of which expert suffers more (docs/report.md)."
)


@dataclass(frozen=True)
class Message:
    """A message that readers should not miss."""

    severity: str
    who: str
    text: str
    tensors: str


def summary(report: Report) -> str:
    """Return what was merged, how, and whether the output is sound; it contains facts, not predictions."""
    inspection = report.inspection
    count = counted(len(inspection.experts), "expert")
    base = quoted(PurePath(inspection.base).name or inspection.base)
    if report.manifest is None:
        faults = counted(len(inspection.faults), "fault")
        return (
            f"{count} of {base} {'was' if count[:2] == '1 ' else 'were'} looked at before any merge, with "
            f"{faults} that would spoil one."
        )
    recipe = report.manifest["recipe"]
    what = "adapter" if recipe["output"]["format"] == "adapter" else "model"
    parts = [
        f"{count} of {base} became one {what} by {called(recipe['method'], recipe['parameters'])}"
    ]
    if report.verification is not None:
        checks = report.verification.checks
        failed = sum(not check.ok for check in checks)
        all_ = counted(len(checks), "check")
        parts.append(f"{failed} of {all_} failed" if failed else f"it passed all {all_}")
    return "; ".join(parts) + "."


def messages(report: Report) -> list[Message]:
    """Return failed checks, warnings and notes, the worst first; equal texts on several experts are joined.

    Notes on the merge come first, then notes on single experts, then notes on the report.
    """
    checks = () if report.verification is None else report.verification.checks
    manifest = report.manifest
    losses = () if manifest is None else account_of_losses(manifest["totals"]).warnings
    said: list[tuple[Severity, str]] = [
        *(
            (Severity.FAULT, f"the output fails its check '{c.name}': {c.detail}. Do not use it")
            for c in checks
            if not c.ok
        ),
        *(
            (Severity.WARNING, w)
            for w in (*summarise(tuple(report.diagnostics.values())).warnings, *losses)
        ),
        *((Severity.NOTE, n) for n in (() if manifest is None else manifest["notes"])),
    ]
    of_experts_first = sorted(
        report.inspection.findings, key=lambda finding: finding.expert is None
    )
    found = {key: list[Finding]() for key in said} | by_text(of_experts_first)
    order = list(Severity)
    worst_first = sorted(found.items(), key=lambda item: order.index(item[0][0]))
    shown: list[Message] = []
    for (severity, text), alike in worst_first:
        who = ", ".join(finding.expert for finding in alike if finding.expert is not None)
        tensors = dict.fromkeys(tensor for finding in alike for tensor in finding.tensors)
        shown.append(Message(str(severity), who, text, some(tensors)))
    return shown


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the other facts about a merge, with headings."""
    if report.manifest is None:
        return
    recipe, totals = report.manifest["recipe"], report.manifest["totals"]
    method = registry.get(recipe["method"])
    yield "method", f"{called(method.name, recipe['parameters'])}: {method.summary}"
    parameters = shown_parameters(method.name, recipe["parameters"], report.manifest["family"])
    given = {key: value for key, value in parameters.items() if value is not None}
    if given:
        yield "parameters", ", ".join(f"{k}: {json.dumps(v)}" for k, v in given.items())
    for when in ("before", "after"):
        for entry in recipe.get(when, ()):
            ((name, given),) = entry.items()
            chosen = "".join(f"; {k}: {json.dumps(v)}" for k, v in given.items())
            yield f"{when} it", f"{name}: {steps.get(name).summary}{chosen}"
    yield "rounding", rounding_said(totals, share(totals["rounding_loss"]))
    if "discarded_energy" in totals:
        yield (
            "adapter",
            f"of the update's energy its rank loses {share(totals['discarded_energy'])}, and "
            f"{share(totals['left_out_energy'])} lies in tensors that it leaves out",
        )
    heads: Mapping[str, Sequence[str]] = report.manifest["heads"]
    if heads:
        texts = (f"{expert} ({counted(len(names), 'tensor')})" for expert, names in heads.items())
        yield "heads kept", f"{', '.join(texts)}; one file each under heads/"
    yield from summarise(tuple(report.diagnostics.values())).rows
    yield from account_of_losses(totals).rows


def run_facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield time and memory of the merge, if it was just run."""
    run: Mapping[str, Any] = report.run
    if "seconds" in run:
        stages = [stage for stage in ("read", "compute", "write") if f"{stage}_seconds" in run]
        parts = [f"{stage} {number(run[f'{stage}_seconds'])} s" for stage in stages]
        detail = f"; overlapping: {', '.join(parts)}" if parts else ""
        yield "time", f"{number(run['seconds'])} s{detail}"
    if "peak_memory" in run:
        expected = run.get("expected_peak_memory")
        detail = f", {format_size(expected)} expected" if expected else ""
        yield "peak memory", f"{format_size(run['peak_memory'])} measured{detail}"


def sources(report: Report) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return each source: its name, its place, and the hashes of its files."""
    if report.manifest is None:
        experts = report.inspection.experts.items()
        return [
            ("base", report.inspection.base, []),
            *((f"expert {name}", source, []) for name, source in experts),
        ]
    return [
        (key, str(entry["source"]), _hashes(entry["content"]))
        for key, entry in report.manifest["sources"].items()
    ]


def _hashes(content: Any) -> list[tuple[str, str]]:
    """Return the hashes by file; a source that is a single file has the name ""."""
    if not isinstance(content, Mapping):
        return [("", str(content))]
    return [(name, str(value)) for name, value in cast("Mapping[str, Any]", content).items()]
