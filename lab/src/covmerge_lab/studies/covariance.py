r"""Does the covariance estimate matter? One equation, one solver, another C_t in each row.

    W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t)†

ACTMat's claim is that ΔᵀΔ stands in for the covariance of a layer's inputs. If its directions matter,
it must do better than the same spectrum in random directions, and the measured covariance better
still. Each C_t goes to covmerge as a statistics file, so that nothing else differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import covmerge
from covmerge import open_checkpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.maths.linalg.lapack import norm
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from covmerge_lab import collecting
from covmerge_lab.bench import Bench
from covmerge_lab.merging import Experts
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.studies.accuracy import bars, findings
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.summary import Group
from covmerge_lab.workers import Job, MergeSteps, OnProgress

# Its annotations are partial.
_linalg: Any = torch.linalg


@dataclass(frozen=True)
class _Layer:
    """What is known of one layer of one expert.

    Attributes:
        update: Δ_t `(d_out, d_in)`.
        next: the update of the expert after it.
        measured: E[z zᵀ] of its inputs `(d_in, d_in)`.
        place: of the expert among all.
        name: of the tensor.
    """

    update: Tensor
    next: Tensor
    measured: Tensor
    place: int
    name: str


Estimate = Callable[[_Layer], Tensor]


def _update(layer: _Layer) -> Tensor:
    return layer.update.T @ layer.update


def _of_norm_one(layer: _Layer) -> Tensor:
    # A layer that LoRA left alone says nothing: it has no norm to be divided by.
    return _update(layer) / (float(layer.update.square().sum()) or 1.0)


def _rotation(layer: _Layer, of: int) -> Tensor:
    """Return a random orthogonal matrix: the same for the same layer and number."""
    side = layer.update.shape[1]
    seed = int.from_bytes(layer.name.encode(), "big") % 2**31 + of
    draw = torch.Generator().manual_seed(seed)
    return _linalg.qr(torch.randn(side, side, generator=draw, dtype=torch.float64))[0]


def _rotated(layer: _Layer) -> Tensor:
    turn = _rotation(layer, layer.place)
    return turn @ _update(layer) @ turn.T


def _rotated_alike(layer: _Layer) -> Tensor:
    turn = _rotation(layer, -1)
    return turn @ _update(layer) @ turn.T


def _of_another(layer: _Layer) -> Tensor:
    return layer.next.T @ layer.next


def _identity(layer: _Layer) -> Tensor:
    return torch.eye(layer.update.shape[1], dtype=torch.float64)


# Title -> C_t. All have float64 sums, and one cut-off for the pseudo-inverse.
ESTIMATES: Mapping[str, Estimate] = {
    "measured E[z zᵀ]": lambda layer: layer.measured,
    "measured, diagonal": lambda layer: layer.measured.diag().diag(),
    "ΔᵀΔ (ACTMat)": _update,
    "ΔᵀΔ / ‖Δ‖² (WUDI)": _of_norm_one,
    "ΔᵀΔ, diagonal": lambda layer: _update(layer).diag().diag(),
    "ΔᵀΔ, each turned at random": _rotated,
    "ΔᵀΔ, all turned alike": _rotated_alike,
    "ΔᵀΔ of another expert": _of_another,
    "‖Δ‖² I": lambda layer: _identity(layer) * layer.update.square().sum(),
    "I (average)": _identity,
}


class CovarianceReplaced(Study):
    """The papers' central claim, tested."""

    name = "covariance"
    about = (
        "Does the covariance estimate matter? W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t)† with the covariance of the "
        "layers' inputs as measured on 256 examples, with ΔᵀΔ, and with what is left of it when its "
        "directions, its correlations, its spectrum or its owner are taken away. Below the "
        "table: the mean cosine of each C_t with the measured one, over layers and experts."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        cosines: dict[str, dict[str, list[float]]] = {}

        def make(bench: Bench, experts: Experts) -> list[Model]:
            jobs: dict[str, Job[tuple[Model, float]]] = {
                title: partial(_merge, experts, title) for title in ESTIMATES
            }
            made = bench.work(f"{experts.variant}: merging with other covariances", jobs)
            of_kind = cosines.setdefault(experts.variant.kind, {})
            for title, (_, cosine) in made.items():
                of_kind.setdefault(title, []).append(cosine)
            tuned = bench.merge(experts, (), tuned=True)
            return [*tuned, *(model for model, _ in made.values())]

        found = findings(bench, variants, make, self.draw, statistics=["gram"])
        means = {kind: {t: fmean(c) for t, c in of.items()} for kind, of in cosines.items()}
        return Findings(
            {**found.numbers, "cosine_with_measured": means},
            "\n\n".join([found.text, *(_table(kind, of) for kind, of in means.items())]),
            found.pictures,
        )

    def draw(self, group: Group) -> Any:
        """Draw a bar for each C_t."""
        return bars(group, list(ESTIMATES), "Accuracy by the covariance C_t, all else equal")


def _table(kind: str, cosines: Mapping[str, float]) -> str:
    table = markdown(["C_t", "cosine"], [[title, f"{c:.3f}"] for title, c in cosines.items()])
    return f"Mean cosine with the measured covariance, {kind} experts:\n\n{table}"


def _merge(experts: Experts, title: str, on_progress: OnProgress) -> tuple[Model, float]:
    """Merge with one C_t; return the model and the mean cosine of C_t with the measured one."""
    names = list(experts.whole)
    folder = experts.work / f"estimate-{list(ESTIMATES).index(title)}"
    (folder / "statistics").mkdir(parents=True)
    files = {name: folder / "statistics" / f"{name}.covstats.safetensors" for name in names}
    measured = collecting.files(experts.statistics, "gram", names)
    cosines: list[float] = []
    updates = [_Updates(experts.suite.base, experts.whole[name]) for name in names]
    for place, name in enumerate(names):
        with closing(StatisticsFile.open(measured[name])) as file:
            statistics: list[Statistic] = []
            for tensor in file.names("gram"):
                shared = updates[place].shared(tensor)
                layer = _Layer(
                    updates[place].of_base(shared),
                    updates[(place + 1) % len(names)].of_base(shared),
                    file.read("gram", tensor).double(),
                    place,
                    shared,
                )
                value = ESTIMATES[title](layer)
                cosines.append(cosine(value, layer.measured))
                statistics.append(Statistic((tensor,), value, rows=1))
        contents = Contents(updates[place].expert, {"gram": statistics}, examples=1)
        write_statistics({files[name]: contents}, overwrite=False)
    covmerge.merge(
        experts.suite.base,
        experts.whole,
        method="lot",
        out=folder / "merged",
        statistics=files,
        tensors={"few_rows": "allow"},
        progress=MergeSteps(on_progress),
    )
    shutil.rmtree(folder / "statistics")
    merge = Merge("lot", section=Section.DATA_FREE, label=title)
    model = Model(merge.section, title, dict.fromkeys(names, folder / "merged"), merge)
    return model, fmean(cosines)


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two matrices as vectors; 0 where one is zero."""
    size = norm(one) * norm(other)
    return float((one * other).sum()) / size if size else 0.0


class _Updates:
    """The updates of one expert, read when asked for."""

    def __init__(self, base: Path, expert: Path) -> None:
        self.expert: Checkpoint = open_checkpoint(expert)
        self._base = open_checkpoint(base)

    def of_base(self, name: str) -> Tensor:
        """Return Δ of a tensor of the base, in float64."""
        own = next(n for n in self.expert.headers if n == name or n.endswith(f".{name}"))
        return self.expert.read(own).double() - self._base.read(name).double()

    def shared(self, name: str) -> str:
        """Return the base's name of an expert's tensor."""
        return next(n for n in self._base.headers if n == name or name.endswith(f".{n}"))
