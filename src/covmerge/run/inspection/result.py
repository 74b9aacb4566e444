"""The result of an inspection: measurements of every matrix, findings, a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, sqrt
from operator import add
from statistics import fmean
from typing import Any, NamedTuple, cast

from typing_extensions import TypedDict

from covmerge.base.findings import Finding, Severity
from covmerge.base.table import Cell, Table, Tabular, lines_svg, result_html
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.maths.covariance.estimate import DEFAULT_TAU, Gate, Statistic, gate
from covmerge.maths.measures.retention import along, overall
from covmerge.maths.measures.rounding import Lost
from covmerge.maths.measures.sums import Sums
from covmerge.maths.measures.table_rows import TableRows
from covmerge.run.judgement.layers import TABLES, LayerSums


class InspectionFigures(TypedDict, total=False):
    """Seconds and bytes of one inspection; empty if no tensor was read."""

    seconds: float
    read_seconds: float
    compute_seconds: float
    peak_memory: int
    expected_peak_memory: int


class ExpertTotal(NamedTuple):
    """Measurements of one expert's update over the layers that the expert has.

    Attributes:
        update_norm: ‖Δ_t‖_F.
        relative_norm: ‖Δ_t‖ / ‖W_0‖ of these layers; 0 if the base is zero.
        untouched: share of the elements that are as in the base.
        rounding_of_weights: share of ‖Δ_t‖ that rounding W_t to bfloat16 loses.
    """

    update_norm: float
    relative_norm: float
    untouched: float
    rounding_of_weights: float


@dataclass(frozen=True)
class SpectrumView:
    """Singular values of one update.

    Attributes:
        stable_rank: ‖Δ‖²_F / σ₁².
        effective_rank: exp of the entropy of σ/Σσ.
        rank: number of singular values above those that rounding of the stored weights causes.
        top_energy: share of Σσ² in the leading 5 % of singular values.
        places: indices of the singular values that are kept, from 0.
        sigma: the singular values at these indices.
    """

    stable_rank: float
    effective_rank: float
    rank: int
    top_energy: float
    places: Sequence[int]
    sigma: Sequence[float]


@dataclass(frozen=True)
class LayerView:
    """Measurements of one matrix in all experts, or of a whole tensor that holds no matrix.

    Attributes:
        tensor: the tensor's name in the base.
        name: the tensor's name, with the index of the matrix if the tensor holds several.
        role: the tensor's role, such as linear or embedding.
        shape: `(d_out, d_in)` of a matrix; the stored shape of another tensor.
        is_matrix: whether this is the matrix of a layer that has inputs.
        experts: names of the experts, in the order of `sums`. The merged model, if there is one, is the
            last in `sums` and is not named here.
        sums: sums over the elements.
        absent: experts that have no part in this layer, as in a slice or a mixture; their update is zero.
        lost: estimated loss of each expert's update by storing in half precision, for experts that are
            stored so, as the base is.
        rows: by expert, which rows of an embedding it changed; empty for every other tensor.
        spectra: spectrum of each expert's update; empty if none were taken.
        overlap: by pair of experts, how far the same inputs matter to both: ‖V_kᵀV'_k‖²/k.
        foreseen: what `auto` would do to this layer, by heading; empty without spectra, with one
            expert, or with a merged model.
        merged: spectrum of the merged update.
        before: spectrum of the merged update before spectral refinement, if the method refined it.
        retention: by expert, the share of its contribution that the merged update keeps; None for an
            expert without a contribution.
        merged_cosines: by expert, the cosine between its update and the merged update.
        merged_norm: ‖W̄ − W_0‖_F.
        quadratics: by expert, Q_s `(T, T)` of `covmerge.maths.measures.sums`, in the order of `sums`;
            None for an expert without an update. Empty if none were measured.
    """

    tensor: str
    name: str
    role: str
    shape: tuple[int, ...]
    is_matrix: bool
    experts: tuple[str, ...]
    sums: Sums
    absent: tuple[str, ...]
    lost: Mapping[str, Lost]
    rows: Mapping[str, TableRows]
    spectra: Mapping[str, SpectrumView]
    overlap: Mapping[tuple[str, str], float]
    foreseen: Mapping[str, str | float | None]
    merged: SpectrumView | None
    before: SpectrumView | None
    retention: Mapping[str, float | None]
    merged_cosines: Mapping[str, float]
    merged_norm: float | None
    quadratics: Mapping[str, Sequence[Sequence[float]] | None]

    @property
    def norms(self) -> dict[str, float]:
        """Return ‖Δ_t‖_F by expert."""
        return self._by_expert(self.sums.norms)

    @property
    def relative(self) -> dict[str, float]:
        """Return ‖Δ_t‖ / ‖W_0‖ by expert; 0 if the base is zero."""
        base = self.sums.base_norm
        return {name: norm / base if base else 0.0 for name, norm in self.norms.items()}

    @property
    def along(self) -> dict[str, float]:
        """Return the share kept along each expert's update, for experts that changed the layer."""
        merged = self.merged_norm or 0.0
        return {
            name: along(self.merged_cosines[name] * merged / norm)
            for name, norm in self.norms.items()
            if norm
        }

    @property
    def cosines_with_base(self) -> dict[str, float]:
        """Return the cosine between W_t and W_0 by expert."""
        return self._by_expert(self.sums.cosines_with_base)

    @property
    def untouched(self) -> dict[str, float]:
        """Return the share of the elements that each expert left unchanged."""
        return self._by_expert(self.sums.untouched)

    @property
    def lost_when_stored(self) -> dict[str, float]:
        """Return the estimated share of ‖Δ_t‖ lost to half precision, for experts stored so."""
        return {name: lost.share for name, lost in self.lost.items()}

    @property
    def judged(self) -> LayerSums:
        """Return the sums that the experts are judged by, without experts absent from this layer."""
        along = self._by_expert(self.sums.along)
        there = [expert for expert in self.experts if expert not in self.absent]
        return LayerSums(
            self.tensor,
            self.name,
            self.is_matrix,
            float(self.sums.base),
            {expert: self.norms[expert] ** 2 for expert in there},
            {expert: along[expert] for expert in there},
            self.role in TABLES,
        )

    def gate(self, statistic: Statistic) -> Gate:
        """Return γ of the experts that changed the layer, and whether ACE's gate would fire."""
        norms = [norm for norm in self.norms.values() if norm]
        return gate(norms, tau=DEFAULT_TAU[statistic], statistic=statistic)

    def pairs(self, matrix: Sequence[Sequence[float]]) -> dict[tuple[str, str], float]:
        """Return the entry of a `(T, T)` matrix of `sums` for each pair of experts."""
        return {
            (one, other): matrix[i][j]
            for i, one in enumerate(self.experts)
            for j, other in enumerate(self.experts)
            if i < j
        }

    def as_json(self) -> dict[str, Json]:
        """Return the measurements as plain JSON."""
        entry: dict[str, Json] = {
            "tensor": self.tensor,
            "role": self.role,
            "shape": list(self.shape),
            "base_norm": self.sums.base_norm,
            "update_norm": self.norms,
            "relative_norm": self.relative,
            "cosine_with_base": self.cosines_with_base,
            "untouched": self.untouched,
            "rounding_of_updates": self._by_expert(self.sums.rounding_of_updates),
            "rounding_of_weights": self._by_expert(self.sums.rounding_of_weights),
            "lost_when_stored": self.lost_when_stored,
            "cosine": _joined(self.pairs(self.sums.cosines)),
            "sign_conflict": _joined(self.pairs(self.sums.sign_conflict)),
        }
        if self.rows:
            entry["rows"] = {name: rows.as_json() for name, rows in self.rows.items()}
        if self.is_matrix:
            gates = {"paper": self.gate("paper"), "scale_free": self.gate("scale_free")}
            # γ is infinite at its pole, and JSON has no infinity.
            entry["gamma"] = {
                name: {**vars(gate), "gamma": gate.gamma if isfinite(gate.gamma) else None}
                for name, gate in gates.items()
            }
        if self.spectra:
            entry["spectra"] = {name: _plain(s) for name, s in self.spectra.items()}
            entry["overlap"] = _joined(self.overlap)
        if self.foreseen:
            entry["foreseen"] = dict(self.foreseen)
        if self.merged_norm is not None:
            entry["merged"] = {
                "norm": self.merged_norm,
                "cosine": dict(self.merged_cosines),
                "retention": dict(self.retention),
                "spectrum": None if self.merged is None else _plain(self.merged),
                "spectrum_before_refinement": None if self.before is None else _plain(self.before),
            }
        return entry

    def _by_expert(self, values: Sequence[float]) -> dict[str, float]:
        return dict(zip(self.experts, values, strict=False))


@dataclass(frozen=True, repr=False)
class Inspection(Tabular):
    """The result of inspecting a base and its experts, and a merged model if there is one.

    Attributes:
        base: the base's source.
        experts: sources of all given experts, by name.
        adapters: names of the experts that are adapters; their predictions do not agree with accuracy.
        family: model family, which decides ACE's ε.
        findings: faults, warnings and notes, the worst first.
        layers: every matrix and every other tensor, from input to output.
        run: seconds and memory of the inspection.
    """

    base: str
    experts: Mapping[str, str]
    adapters: tuple[str, ...]
    family: str | None
    findings: tuple[Finding, ...]
    layers: tuple[LayerView, ...]
    run: InspectionFigures = field(default_factory=InspectionFigures)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Return the findings that a merge would fail on."""
        return tuple(f for f in self.findings if f.severity is Severity.FAULT)

    @property
    def matrices(self) -> tuple[LayerView, ...]:
        """Return the layers that have inputs, from input to output."""
        return tuple(layer for layer in self.layers if layer.is_matrix)

    @property
    def compared(self) -> tuple[str, ...]:
        """Return the names of the experts whose tensors were read."""
        return self.layers[0].experts if self.layers else ()

    def total(self, layers: Iterable[LayerView] | None = None) -> Sums | None:
        """Return the sums over all layers, or over `layers`; None if there is no layer."""
        found = [layer.sums for layer in (self.layers if layers is None else layers)]
        return reduce(add, found) if found else None

    def totals(self) -> dict[str, ExpertTotal]:
        """Return measurements of each expert's whole update, over the layers that the expert has."""
        found: dict[str, ExpertTotal] = {}
        for place, name in enumerate(self.compared):
            there = [layer for layer in self.layers if name not in layer.absent]
            sums = self.total(there or self.layers)
            assert sums is not None
            base = sums.base_norm
            found[name] = ExpertTotal(
                sums.norms[place],
                sums.norms[place] / base if base else 0.0,
                sums.untouched[place],
                sums.rounding_of_weights[place],
            )
        return found

    def lost_when_stored(self) -> dict[str, float]:
        """Return the estimated share of ‖Δ_t‖ lost to half precision, for experts wholly stored so."""
        return lost_when_stored(self.layers)

    def by_expert(self, value: Callable[[LayerView], Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Return `value` of every matrix from input to output, by expert; None where it has no value."""
        return {e: [value(layer).get(e) for layer in self.matrices] for e in self.compared}

    def retention(self) -> dict[str, float]:
        """Return by expert the share that the merged update is predicted to keep, over all matrices."""
        layers = self.by_expert(lambda layer: layer.retention)
        return {e: share for e, of in layers.items() if (share := overall(of)) is not None}

    def __repr__(self) -> str:
        found = [f.severity for f in self.findings]
        said = [counted(found.count(kind), str(kind)) for kind in Severity if kind in found]
        return (
            f"<Inspection: {some(self.experts)} of {self.base}; {counted(len(self.layers), 'tensor')}; "
            f"{', '.join(said) or 'nothing to warn of'}>"
        )

    def table(self) -> Table:
        """Return a table with one row for each matrix and each other tensor, from input to output.

        The columns are, for each expert, the norm of its update, ‖Δ‖/‖W₀‖, and ranks if spectra were taken;
        for each pair of experts, the cosine of their updates; with a merged model, the norm of the merged
        update and the retention of each expert.
        """
        experts, merged = self.compared, any(layer.merged_norm is not None for layer in self.layers)
        pairs = [(one, two) for place, one in enumerate(experts) for two in experts[place + 1 :]]
        of_each = ("update_norm", "relative_norm", "effective_rank", "rank")
        columns = [f"{what} {name}" for what in of_each for name in experts]
        columns += [f"cosine {one} {two}" for one, two in pairs]
        after = ["merged_norm", *(f"retention {name}" for name in experts)] if merged else []
        rows: list[tuple[Cell, ...]] = []
        for layer in self.layers:
            norms, relative, taken = layer.norms, layer.relative, layer.spectra
            cosines = layer.pairs(layer.sums.cosines)
            spectra = [taken.get(name) for name in experts]
            retention = [layer.retention.get(name) for name in experts]
            rows.append(
                (
                    layer.name,
                    layer.role,
                    "x".join(map(str, layer.shape)),
                    layer.sums.base_norm,
                    *(norms.get(name) for name in experts),
                    *(relative.get(name) for name in experts),
                    *(spectrum and spectrum.effective_rank for spectrum in spectra),
                    *(spectrum and spectrum.rank for spectrum in spectra),
                    *(cosines.get(pair) for pair in pairs),
                    *([layer.merged_norm, *retention] if merged else []),
                )
            )
        return Table(("layer", "role", "shape", "base_norm", *columns, *after), tuple(rows))

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        said: list[str] = []
        for finding in self.findings:
            who = "" if finding.expert is None else f"'{finding.expert}' "
            said.append(f"{finding.severity}: {who}{finding.text}")
        moved = self.by_expert(lambda layer: layer.relative)
        lines = lines_svg(moved, "‖Δ‖/‖W₀‖ of the matrices from the first to the last")
        return result_html(self, said, more=lines, drawn=("relative", "merged", "retention"))

    def as_json(self) -> dict[str, Json]:
        """Return the whole inspection as plain JSON."""
        summary: dict[str, Json] = {}
        if self.layers:
            totals = self.totals()
            summary = {
                **{
                    key: {name: total[place] for name, total in totals.items()}
                    for place, key in enumerate(ExpertTotal._fields)
                },
                "lost_when_stored": self.lost_when_stored(),
                "retention": self.retention(),
            }
        return {
            "base": self.base,
            "experts": dict(self.experts),
            "adapters": list(self.adapters),
            "family": self.family,
            "findings": [finding.as_json() for finding in self.findings],
            "summary": summary,
            "layers": {layer.name: layer.as_json() for layer in self.layers},
            "run": cast("Mapping[str, Json]", dict(self.run)),
        }


def lost_when_stored(layers: Sequence[LayerView]) -> dict[str, float]:
    """Return the estimated share of ‖Δ_t‖ lost to half precision, for experts wholly stored so."""
    found: dict[str, float] = {}
    for name in layers[0].experts if layers else ():
        changed = [layer for layer in layers if layer.norms[name]]
        if changed and all(name in layer.lost for layer in changed):
            found[name] = sum((layer.lost[name] for layer in changed), Lost()).share
    return found


def root_mean_square(values: Iterable[float]) -> float:
    """Return the root of the mean of squares; 0 without values."""
    squares = [value**2 for value in values]
    return sqrt(fmean(squares)) if squares else 0.0


def _joined(pairs: Mapping[tuple[str, str], float]) -> dict[str, Json]:
    # A space separates the names unambiguously: no expert's name has one.
    return {f"{one} {other}": value for (one, other), value in pairs.items()}


def _plain(spectrum: SpectrumView) -> dict[str, Json]:
    return {**vars(spectrum), "places": list(spectrum.places), "sigma": list(spectrum.sigma)}
