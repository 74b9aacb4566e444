"""A merge whose result is known: sources that the campaign wrote, and the values they stand for."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from covmerge.front.cli import app
from tests.campaigns.disturbed import Ended
from tests.campaigns.outcomes import REFUSED, WRONG, Tensors, Verdict, judge

_HANGS = 600  # seconds: the machine may be busy


@dataclass(frozen=True)
class Source:
    """A source of a merge.

    Attributes:
        path: where it lies.
        values: what its tensors stand for, each rounded as it is read; or why nobody can know.
    """

    path: Path
    values: Tensors | str


def plain(path: Path, tensors: Tensors) -> Source:
    """Save tensors as a model, a file by itself."""
    save_file({name: own.contiguous() for name, own in tensors.items()}, path)
    return Source(path, tensors)


@dataclass(frozen=True)
class Mean:
    """An `average`, or a `task_arithmetic`, of experts with weights."""

    weights: Mapping[str, float]
    scale: float | None

    @classmethod
    def drawn(cls, random: Random, experts: Iterable[str]) -> Mean:
        """Return one with weights of its own."""
        scale = random.choice((None, None, 1.0, 0.5, 0.3))
        return cls({name: random.choice((1.0, 1.0, 0.5, 2.0)) for name in experts}, scale)

    def recipe(self, folder: Path, base: Path, experts: Mapping[str, Path], **more: Any) -> Path:
        """Write the recipe."""
        told: dict[str, Any] = {
            "base": str(base),
            "experts": {
                name: {"source": str(path), "weight": self.weights[name]}
                for name, path in experts.items()
            },
            "method": "average",
            **more,
        }
        if self.scale is not None:
            told |= {"method": "task_arithmetic", "parameters": {"scale": self.scale}}
        (folder / "recipe.yml").write_text(json.dumps(told))
        return folder / "recipe.yml"

    def of(self, base: Tensors, experts: Mapping[str, Tensors]) -> dict[str, Tensor] | str:
        """Return the merge in float64, or why there is none."""
        scale = self.scale or 1 / sum(self.weights.values())
        result: dict[str, Tensor] = {}
        for name, weight in base.items():
            # Buffers that the base does not store are left out, which a note says.
            own = {key: tensors.get(name) for key, tensors in experts.items()}
            start, result[name] = weight.double(), weight.double()
            for key, tensor in own.items():
                if (
                    tensor is None
                    or tensor.shape != start.shape
                    or _count(experts[key]) != len(base)
                ):
                    return f"expert '{key}' has other tensors than the base"
                result[name] = result[name] + scale * self.weights[key] * (tensor.double() - start)
        return result


def _count(tensors: Tensors) -> int:
    return sum(tensor.is_floating_point() for tensor in tensors.values())


def command(*arguments: object) -> Ended:
    """Run the command line in this process, which takes a tenth of what one of its own takes."""

    def hung(number: int, frame: object) -> None:
        raise TimeoutError("it hung")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(_HANGS)
    try:
        done = CliRunner().invoke(app, [str(own) for own in arguments])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    raised = done.exception
    if raised is None or isinstance(raised, SystemExit):
        return Ended(done.exit_code, done.output)
    return Ended(done.exit_code, done.output + "".join(traceback.format_exception(raised)))


def trial(
    folder: Path,
    random: Random,
    base: Source,
    experts: Mapping[str, Source],
    *,
    right: bool,
) -> Verdict:
    """Merge, and say what became of it; `right`: nothing is wrong with the sources."""
    mean = Mean.drawn(random, experts)
    recipe = mean.recipe(folder, base.path, {name: own.path for name, own in experts.items()})
    told = [own.values for own in (base, *experts.values()) if isinstance(own.values, str)]
    known = {name: own.values for name, own in experts.items() if not isinstance(own.values, str)}
    values: Tensors | str = told[0] if told else ""
    if not told and not isinstance(base.values, str):
        values = mean.of(base.values, known)
    # An error of arithmetic is one of a tensor.
    names = {f"'{name}'" for name in (*experts, *base.values)}
    names |= {own.path.name for own in (base, *experts.values())}
    return verdict(command("merge", recipe, folder / "out"), folder / "out", values, names, right)


def verdict(
    ended: Ended, out: Path, values: Tensors | str, names: Collection[str], right: bool
) -> Verdict:
    """Return what became of a merge; `values` is what it is to give, or why it is to be refused."""
    known = None if isinstance(values, str) else values
    outcome, detail = judge(ended, out, known, names)
    if outcome == WRONG:  # what is printed is the end of it
        fault, _, said = detail.partition("\n")
        return WRONG, f"{said}\n{fault if known is not None else values}"
    if right and outcome == REFUSED:
        return WRONG, f"{detail}\nnothing is wrong with it, and it is refused"
    return outcome, detail
