"""What `covmerge inspect` prints: findings, and pictures of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from covmerge.base.findings import Severity, by_text
from covmerge.base.settings import PREFERRED
from covmerge.base.sizes import format_size
from covmerge.base.text import counted
from covmerge.front.cli.console import facts, format_seconds, printable, table
from covmerge.maths.covariance.estimate import Statistic
from covmerge.run.inspection.result import Inspection, LayerView, root_mean_square
from covmerge.run.judgement.layers import block_of, kind_of

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_STYLES = {Severity.FAULT: "red", Severity.WARNING: "yellow", Severity.NOTE: None}
_WIDEST = 32  # characters in a picture
_MOST_LINES = 24  # lines in one picture; with more, all kinds of layers share a line
_MOST_PAIRS = 8


def show(console: Console, inspection: Inspection, *, verbose: bool = False) -> None:
    """Print findings and 80-column pictures that need no colour."""
    base, count = printable(inspection.base), len(inspection.experts)
    verdict = _verdict(inspection)
    console.print(f"Inspected {counted(count, 'expert')} of {base}: {verdict}", soft_wrap=True)
    said = Table.grid(padding=(0, 2))
    for (severity, text), alike in by_text(inspection.findings).items():
        experts = [f"'{finding.expert}'" for finding in alike if finding.expert is not None]
        who = ", ".join(experts) + (": " if len(experts) > 1 else " " if experts else "")
        said.add_row(str(severity), printable(who + text), style=_STYLES[severity])
    if inspection.findings:
        console.print(said)
    if inspection.matrices:
        bars = _BARS if console.encoding.lower().startswith("utf") else _ASCII_BARS
        console.print(_experts(inspection))
        console.print(*_norms(inspection, bars), sep="\n")
        if len(inspection.compared) > 1:
            console.print("Pairs of experts, over all tensors")
            console.print(_pairs(inspection))
        if verbose:
            _show_of_methods(console, inspection, bars)
    run = inspection.run
    if "seconds" in run and "peak_memory" in run:
        peak = f"peak memory {format_size(run['peak_memory'])}"
        console.print(facts([("run", f"{format_seconds(run['seconds'])}, {peak}")]))


def _show_of_methods(console: Console, inspection: Inspection, bars: str) -> None:
    if len(inspection.compared) > 1:
        console.print("γ over its threshold: above 1 ACE puts the experts on one scale")
        console.print(_gammas(inspection, bars))
    if any(layer.foreseen for layer in inspection.matrices):
        console.print(*_foreseen(inspection), sep="\n")


def _verdict(inspection: Inspection) -> str:
    if inspection.faults:
        return "a merge would stop, by the faults below"
    warned = any(found.severity is Severity.WARNING for found in inspection.findings)
    return "they can be merged" + (
        ", with the warnings below" if warned else ", nothing stands out"
    )


def spark(values: Sequence[float], most: float, bars: str = _BARS) -> str:
    """Draw values from 0 to `most` as one character each; if there are too many, draw means of groups.

    Example:
        >>> spark([0.0, 0.5, 1.0], 1.0)
        '▁▅█'
    """
    if len(values) > _WIDEST:
        edges = [round(i * len(values) / _WIDEST) for i in range(_WIDEST + 1)]
        values = [fmean(values[a:b]) for a, b in pairwise(edges)]
    top = len(bars) - 1
    return "".join(bars[min(top, round(top * value / most)) if most else 0] for value in values)


def _experts(inspection: Inspection) -> Table:
    spectra = any(layer.spectra for layer in inspection.matrices)
    stored = inspection.lost_when_stored()
    columns = [
        "‖Δ‖",
        "‖Δ‖/‖W₀‖",
        "untouched",
        "lost in bf16",
        *(["lost when stored"] * bool(stored)),
    ]
    ranks = ["eff. rank", "rank"] if spectra else []
    rows = table("expert", *columns, *ranks, right=[*columns, *ranks])
    for expert, total in inspection.totals().items():
        part = [
            layer.spectra[expert]
            for layer in inspection.matrices
            if expert in layer.spectra and expert not in layer.absent
        ]
        taken = (
            [f"{median(s.effective_rank for s in part):.0f}", f"{median(s.rank for s in part):.0f}"]
            if part
            else []
        )
        rows.add_row(
            printable(expert),
            f"{total.update_norm:.3g}",
            f"{total.relative_norm:.3g}",
            f"{total.untouched:.1%}",
            f"{total.rounding_of_weights:.1%}",
            *([f"≈ {stored[expert]:.0%}" if expert in stored else ""] * bool(stored)),
            *taken,
        )
    return rows


def _norms(inspection: Inspection, bars: str) -> tuple[str, Table]:
    groups = _groups(inspection)
    series = {
        (expert, name): [
            root_mean_square(layer.relative[expert] for layer in there) if there else None
            for block in blocks
            for there in [[layer for layer in block if expert not in layer.absent]]
        ]
        for expert in inspection.compared
        for name, blocks in groups.items()
    }
    moved = [value for values in series.values() for value in values if value] or [1.0]
    least, most = min(moved), max(moved)
    rows = table("expert", "layers", "picture", "median", "most", right=["median", "most"])
    for (expert, name), found in series.items():
        values = [value for value in found if value is not None]
        if not values:
            continue  # the expert has no part in these layers
        # From 1 for the smallest update to 8 for the largest; 0, drawn as a blank, for no update.
        steps = [1 + 7 * log(v / least) / (log(most / least) or 1.0) if v else 0.0 for v in found]
        picture = spark(steps, 8.0, f" {bars}")
        rows.add_row(
            printable(expert),
            printable(name),
            picture,
            f"{median(values):.2g}",
            f"{max(values):.2g}",
        )
    scale = f"{bars[0]} {least:.2g} to {bars[-1]} {most:.2g}, logarithmic"
    return f"‖Δ‖/‖W₀‖ from the first block to the last; {scale}", rows


def _gammas(inspection: Inspection, bars: str) -> Table:
    rows = table("γ", "picture", "median", "fires", right=["median", "fires"])
    titles: dict[Statistic, str] = {"paper": "paper, Eq. 7", "scale_free": "scale-free"}
    for statistic, title in titles.items():
        gates = [layer.gate(statistic) for layer in inspection.matrices]
        over = [gate.gamma / gate.tau for gate in gates]
        fired = sum(gate.fired for gate in gates)
        # The pole of the paper's γ would make everything else look flat.
        picture = spark([min(value, 2.0) for value in over], 2.0, bars)
        rows.add_row(title, picture, f"{median(over):.2g}", f"{fired} of {len(gates)}")
    return rows


def _pairs(inspection: Inspection) -> Table:
    total = inspection.total()
    assert total is not None
    experts = inspection.compared
    pairs = [(i, j) for i in range(len(experts)) for j in range(i + 1, len(experts))]
    pairs.sort(key=lambda pair: -abs(total.cosines[pair[0]][pair[1]]))
    overlaps = _overlaps(inspection)
    columns = ["cosine", "opposite signs", *(["shared inputs"] if overlaps else [])]
    rows = table("experts", *columns, right=columns)
    for i, j in pairs[:_MOST_PAIRS]:
        pair = (experts[i], experts[j])
        shared = [f"{overlaps[pair]:.2f}"] if overlaps else []
        cells = (f"{total.cosines[i][j]:.3f}", f"{total.sign_conflict[i][j]:.1%}", *shared)
        rows.add_row(printable(" and ".join(pair)), *cells)
    if len(pairs) > _MOST_PAIRS:
        rows.add_row(f"and {len(pairs) - _MOST_PAIRS} pairs with smaller cosines")
    return rows


def _foreseen(inspection: Inspection) -> tuple[str, Table]:
    """Return, for each kind of layers, the medians of the numeric diagnostics, headed by symbols."""
    found: dict[str, dict[str, list[float]]] = {}
    for layer in inspection.matrices:
        for heading, value in layer.foreseen.items():
            if isinstance(value, float):
                found.setdefault(heading, {}).setdefault(kind_of(layer.name), []).append(value)
    symbols = [heading.partition(",")[0] for heading in found]
    rows = table("layers", *symbols, right=symbols)
    for kind in dict.fromkeys(kind for kinds in found.values() for kind in kinds):
        cells = (f"{median(kinds[kind]):.3g}" if kind in kinds else "" for kinds in found.values())
        rows.add_row(printable(kind), *cells)
    title = f"What {PREFERRED} would do, medians of {'; '.join(found)}"
    return title, rows


def _overlaps(inspection: Inspection) -> Mapping[tuple[str, str], float]:
    """Return the mean overlap of the inputs that two experts act on, over all matrices."""
    taken = [layer.overlap for layer in inspection.matrices if layer.overlap]
    if not taken:
        return {}
    return {pair: fmean(overlap[pair] for overlap in taken) for pair in taken[0]}


def _groups(inspection: Inspection) -> dict[str, list[list[LayerView]]]:
    """Return the layers by kind and block; all kinds are one group if there would be too many lines."""
    kinds = {kind_of(layer.name) for layer in inspection.matrices}
    together = len(kinds) * len(inspection.compared) > _MOST_LINES
    groups: dict[str, dict[int | None, list[LayerView]]] = {}
    for layer in inspection.matrices:
        name = "all" if together else kind_of(layer.name)
        groups.setdefault(name, {}).setdefault(block_of(layer.name), []).append(layer)
    return {name: list(blocks.values()) for name, blocks in groups.items()}
