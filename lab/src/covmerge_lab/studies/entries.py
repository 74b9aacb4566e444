"""Are the entries of an update Gaussian and centred at zero, as ACE's assumption (A3) has it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, pi, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from covmerge_lab.bench import Bench
from covmerge_lab.studies.layers import METHOD, numbers, open_layers, short, spread, train
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_plt: Any = plt

BINS, WIDTH = 120, 6.0  # of the histograms, from −6 to 6 standard deviations
CENTRED = 0.05  # |mean| over the standard deviation, up to which entries count as centred
GAUSSIAN = 0.5  # |excess kurtosis| up to which they count as Gaussian
GAUSSIAN_TAIL = 0.0027  # share of a Gaussian beyond three standard deviations
_LAYERS, _EXPERTS = 3, 3  # that are drawn


@dataclass(frozen=True)
class Moments:
    """Of the entries of one update.

    Attributes:
        kurtosis: excess kurtosis: 0 for a Gaussian, 3 for a Laplace distribution.
        tail: share of entries beyond three standard deviations of the mean.
    """

    mean: float
    std: float
    kurtosis: float
    tail: float

    @property
    def centred(self) -> bool:
        """Whether the mean is small beside the standard deviation."""
        return abs(self.mean) <= CENTRED * self.std

    @property
    def gaussian(self) -> bool:
        """Whether the tails are about those of a Gaussian."""
        return abs(self.kurtosis) <= GAUSSIAN


@dataclass(frozen=True)
class Entries:
    """What was found of one variant, by layer and expert; histograms of some, as densities."""

    moments: Mapping[str, Mapping[str, Moments]]
    histograms: Mapping[str, Mapping[str, Sequence[float]]]


class EntriesOfUpdates(Study):
    """ACE's Figure 3."""

    name = "entries"
    about = (
        "Are the entries of the updates zero-centred and about Gaussian (ACE, Figure 3)? Mean, standard "
        "deviation and excess kurtosis of every layer of every expert, and histograms of some."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        results: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        for variant in variants:
            folders = train(bench, variant)
            job = partial(find_entries, bench.suite.base, folders)
            (found,) = bench.work(f"{variant}: entries of the updates", {METHOD: job}).values()
            results[str(variant)] = {
                layer: {expert: asdict(moments) for expert, moments in of.items()}
                for layer, of in found.moments.items()
            }
            texts.append(f"## {variant}\n\n{text(found.moments)}")
            pictures[f"entries-{variant}"] = _draw(str(variant), found)
        return Findings({"variants": results}, "\n\n".join(texts), pictures)


def find_entries(base: Path, experts: Mapping[str, Path], on_progress: OnProgress) -> Entries:
    """Return the moments of every update, and histograms of some layers of some experts."""
    found: dict[str, dict[str, Moments]] = {}
    histograms: dict[str, dict[str, list[float]]] = {}
    with open_layers(base, experts) as layers:
        names = [layer.name for layer in layers.all()]
        for layer in layers.all():
            changed = {e: update for e, update in layer.updates.items() if update.count_nonzero()}
            found[layer.name] = {expert: moments(update) for expert, update in changed.items()}
            if layer.name in spread(names, _LAYERS):
                histograms[layer.name] = {
                    expert: histogram(changed[expert]) for expert in spread(list(changed), _EXPERTS)
                }
            on_progress(len(found), len(names))
    return Entries(found, histograms)


def moments(update: Tensor) -> Moments:
    """Return the moments of a matrix's entries.

    Example:
        >>> moments(torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
        Moments(mean=0.0, std=1.0, kurtosis=-2.0, tail=0.0)
    """
    values = update.double().flatten()
    mean = float(values.mean())
    off = values - mean
    variance = float(off.square().mean())
    fourth = float(off.pow(4).mean())
    tail = float((off.abs() > 3 * sqrt(variance)).double().mean())
    return Moments(mean, sqrt(variance), fourth / variance**2 - 3, tail)


def histogram(update: Tensor) -> list[float]:
    """Return the density of the entries over their standard deviation, in `BINS` bins."""
    values = update.float().flatten()
    scaled = values / values.square().mean().sqrt()
    counts = torch.histc(scaled, BINS, -WIDTH, WIDTH)
    return numbers(counts / (len(values) * 2 * WIDTH / BINS))


def text(found: Mapping[str, Mapping[str, Moments]]) -> str:
    """Say what came out, and give the table by expert."""
    everything = [each for of in found.values() for each in of.values()]
    centred = sum(each.centred for each in everything)
    gaussian = sum(each.gaussian for each in everything)
    count = len(everything)
    said = f"""\
Zero-centred: {_verdict(centred, count)}; |mean| is at most {CENTRED} standard deviations in {centred} of \
{count} updates (layers × experts), at worst {max(abs(e.mean) / e.std for e in everything):.3f}.

Gaussian: {_verdict(gaussian, count)}; |excess kurtosis| is at most {GAUSSIAN} in {gaussian} of {count}. \
It lies between {min(e.kurtosis for e in everything):.1f} and \
{max(e.kurtosis for e in everything):.1f}, {median(e.kurtosis for e in everything):.2f} at the median (a \
Gaussian has 0, a Laplace distribution 3, a uniform one -1.2), and \
{median(e.tail for e in everything):.2%} of the entries lie beyond three standard deviations (of a \
Gaussian {GAUSSIAN_TAIL:.2%})."""
    experts = list(dict.fromkeys(expert for of in found.values() for expert in of))
    rows: list[list[str]] = []
    for expert in experts:
        own = [of[expert] for of in found.values() if expert in of]
        rows.append(
            [
                expert,
                f"{median(abs(e.mean) / e.std for e in own):.4f}",
                f"{max(abs(e.mean) / e.std for e in own):.4f}",
                f"{median(e.std for e in own):.2e}",
                f"{median(e.kurtosis for e in own):.2f}",
                f"{max((e.kurtosis for e in own), key=abs):.1f}",
                f"{median(e.tail for e in own):.2%}",
            ]
        )
    columns = [
        "expert",
        "abs. mean / std",
        "worst",
        "std",
        "excess kurtosis",
        "worst",
        "beyond 3 std",
    ]
    return f"{said}\n\n{markdown(columns, rows)}\n\nMedians over the layers."


def _verdict(count: int, of: int) -> str:
    if count == of:
        return "yes"
    return "no" if count < of / 2 else "mostly"


def _draw(title: str, found: Entries) -> Any:
    layers = list(found.histograms)
    columns = max(len(of) for of in found.histograms.values())
    figure, grid = _plt.subplots(
        len(layers),
        columns,
        figsize=(3.1 * columns, 2.3 * len(layers) + 0.6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    step = 2 * WIDTH / BINS
    middles = [-WIDTH + (place + 0.5) * step for place in range(BINS)]
    for row, layer in zip(grid, layers, strict=True):
        for axes, (expert, density) in zip(row, found.histograms[layer].items(), strict=False):
            own = found.moments[layer][expert]
            axes.bar(middles, density, width=step, color="#1f5fa8", alpha=0.6, label="entries of Δ")
            curve = [exp(-(x**2) / 2) / sqrt(2 * pi) for x in middles]
            axes.plot(middles, curve, color="#b3541e", lw=1.2, label="Gaussian")
            axes.set_yscale("log")
            axes.set_ylim(1e-6, 3)
            axes.set_title(f"{short(layer)}, {expert}", fontsize=7)
            note = f"mean {own.mean:.1e}\nstd {own.std:.1e}\nex. kurtosis {own.kurtosis:.1f}"
            axes.text(0.03, 0.96, note, transform=axes.transAxes, va="top", fontsize=6)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("density", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("entry / √E[entry²]", fontsize=8)
    figure.suptitle(f"Entries of updates against a Gaussian of their size: {title}", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure
