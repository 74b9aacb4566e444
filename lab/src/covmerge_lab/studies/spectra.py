"""What spectral refinement does to the merged update, in the layers whose gate fires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
from torch import Tensor

from covmerge import merge_layer
from covmerge.maths.covariance.estimate import gate
from covmerge.maths.linalg.lapack import norm, svd
from covmerge.maths.measures.spectrum import TOP, leading
from covmerge_lab.bench import Bench
from covmerge_lab.studies.layers import (
    METHOD,
    Layer,
    numbers,
    open_layers,
    short,
    spread,
    train,
)
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_plt: Any = plt

LEADING = 5  # directions that are compared one by one
_LAYERS, _QUICK_LAYERS, _SHOWN = 24, 3, 4
_FLOOR = 1e-4  # of the pictures; below lies what float32 leaves of an adapter's zeros
_INK = {"before": "#b3541e", "after": "#1f5fa8", "experts": "#9a9a9a"}


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one layer, and directions of its merged update.

    Attributes:
        before: σ of the merged update without refinement, descending.
        after: σ with it.
        experts: σ of every Δ_t.
        cosines: |⟨u_i, u'_i⟩| |⟨v_i, v'_i⟩| of the leading directions before and after.
        overlap: of the spaces of the top 5 % of left directions: 1 where they are the same.
    """

    layer: str
    before: Sequence[float]
    after: Sequence[float]
    experts: Sequence[Sequence[float]]
    cosines: Sequence[float]
    overlap: float

    def as_json(self) -> dict[str, Any]:
        """What the table is made of."""
        return {
            "layer": self.layer,
            "top_energy_before": top_energy(self.before),
            "top_energy_after": top_energy(self.after),
            "top_energy_experts": fmean(top_energy(of) for of in self.experts),
            "cosines": list(self.cosines),
            "overlap": self.overlap,
        }


@dataclass(frozen=True)
class Spectra:
    """Of one variant.

    Attributes:
        layers: how many ACE merges.
        fired: in how many the gate fires.
        seen: some of these.
    """

    layers: int
    fired: int
    seen: Sequence[Spectrum]


class SpectraBeforeAndAfter(Study):
    """ACE's Figure 2."""

    name = "spectra"
    about = (
        "What spectral refinement changes (ACE, Figure 2), in layers whose gate fires: the share of energy "
        "in the top 5 % of singular values of the merged update before it and after it, beside the "
        "experts' own, and whether the leading singular vectors stay."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        results: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        count = _QUICK_LAYERS if bench.suite.quick else _LAYERS
        for variant in variants:
            folders = train(bench, variant)
            job = partial(find_spectra, bench.suite.base, folders, count)
            (found,) = bench.work(f"{variant}: spectra", {METHOD: job}).values()
            results[str(variant)] = {
                "layers": found.layers,
                "fired": found.fired,
                "spectra": [spectrum.as_json() for spectrum in found.seen],
            }
            texts.append(f"## {variant}\n\n{text(found)}")
            if found.seen:
                pictures[f"spectra-{variant}"] = _draw(str(variant), spread(found.seen, _SHOWN))
        return Findings({"variants": results}, "\n\n".join(texts), pictures)


def find_spectra(
    base: Path, experts: Mapping[str, Path], count: int, on_progress: OnProgress
) -> Spectra:
    """Return the spectra of some of the layers whose gate fires."""
    with open_layers(base, experts) as layers:
        fires = {layer.name: _fires(layer) for layer in layers.all()}
        fired = [name for name in fires if fires[name]]
        chosen = spread(fired, count)
        seen: list[Spectrum] = []
        for layer in layers.all():
            if layer.name in chosen:
                seen.append(spectrum_of(layer))
                on_progress(len(seen), len(chosen))
    return Spectra(len(fires), len(fired), seen)


def spectrum_of(layer: Layer) -> Spectrum:
    """Merge a layer with refinement and without, and compare the two."""
    updates = list(layer.updates.values())
    given = {key: value for key, value in layer.parameters.items() if key != "refine"}
    before, after = (
        svd(merge_layer(updates, METHOD, refine=refine, **given).double())
        for refine in (False, True)
    )
    return Spectrum(
        layer.name,
        numbers(before[1]),
        numbers(after[1]),
        [numbers(svd(update.double())[1]) for update in updates],
        cosines_of(before, after),
        overlap_of(before[0], after[0]),
    )


def cosines_of(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> list[float]:
    """Return how far the leading singular directions of two decompositions U, σ, Vᵀ agree."""
    left = (one[0] * other[0]).sum(0).abs()
    right = (one[2] * other[2]).sum(1).abs()
    return numbers((left * right)[:LEADING])


def overlap_of(one: Tensor, other: Tensor) -> float:
    """Return ‖U_kᵀU'_k‖² / k of the top 5 % of two sets of orthonormal columns."""
    k = leading(one.shape[1])
    return norm(one[:, :k].mT @ other[:, :k]) ** 2 / k


def top_energy(sigma: Sequence[float]) -> float:
    """Return the share of Σσ² in the top 5 % of singular values, descending.

    Example:
        >>> top_energy([3.0] + 9 * [1.0])
        0.5
    """
    squares = [value**2 for value in sigma]
    return sum(squares[: leading(len(squares))]) / (sum(squares) or 1.0)


def _fires(layer: Layer) -> bool:
    norms = [norm(update) for update in layer.updates.values()]
    tau, statistic = layer.parameters["tau"], layer.parameters["gate"]
    return gate([size for size in norms if size], tau=tau, statistic=statistic).fired


def text(found: Spectra) -> str:
    """Say what came out, and give the table."""
    if not found.seen:
        return (
            f"The gate fires in none of {found.layers} layers: nothing is refined, and there is nothing to "
            "compare."
        )
    rows = [spectrum.as_json() for spectrum in found.seen]
    before, after, experts, overlap = (
        median(row[key] for row in rows)
        for key in ("top_energy_before", "top_energy_after", "top_energy_experts", "overlap")
    )
    first = median(row["cosines"][0] for row in rows)
    all_leading = median(min(row["cosines"]) for row in rows)
    said = f"""\
The gate fires in {found.fired} of {found.layers} layers; {len(rows)} of them are looked at. Medians: the \
top {TOP:.0%} of singular values hold {before:.1%} of the energy before refinement, {after:.1%} after it, \
and {experts:.1%} in the experts' own updates (the paper: more than 99 % before). The first singular \
directions before and after have a cosine of {first:.3f} (1: the same, as the paper says), the worst of \
the first {LEADING} one of {all_leading:.3f}; the spaces of the top {TOP:.0%} overlap by {overlap:.3f}."""
    columns = ["layer", "top 5 % before", "after", "experts", "cosine 1st", f"worst of {LEADING}"]
    table = markdown(
        [*columns, "overlap"],
        [
            [
                short(row["layer"]),
                *(f"{row[f'top_energy_{key}']:.1%}" for key in ("before", "after", "experts")),
                f"{row['cosines'][0]:.3f}",
                f"{min(row['cosines']):.3f}",
                f"{row['overlap']:.3f}",
            ]
            for row in rows
        ],
    )
    return f"{said}\n\n{table}"


def _draw(title: str, spectra: Sequence[Spectrum]) -> Any:
    figure, _ = _plt.subplots(
        1, len(spectra), figsize=(2.8 * len(spectra) + 0.6, 3.4), sharey=True, layout="constrained"
    )
    for axes, spectrum in zip(figure.axes, spectra, strict=True):
        for number, sigma in enumerate(spectrum.experts):
            label = None if number else "experts"
            axes.plot(_scaled(sigma), color=_INK["experts"], lw=0.6, label=label)
        for key, name in (("before", "merged, not refined"), ("after", "merged, refined")):
            axes.plot(_scaled(getattr(spectrum, key)), color=_INK[key], lw=1.6, label=name)
        axes.set_yscale("log")
        axes.set_ylim(_FLOOR, 1.5)
        axes.set_title(short(spectrum.layer), fontsize=7)
        axes.set_xlabel("index of the singular value", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("σ over the largest σ")
    figure.suptitle(f"Refinement lifts the tail of the merged spectrum: {title}", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _scaled(sigma: Sequence[float]) -> list[float]:
    return [value / (sigma[0] or 1.0) for value in sigma]
