"""One merge of adapters in a process of its own, timed.

covmerge reads the adapters, merges, writes and verifies in one call, and needs the base's headers only.
PEFT merges inside a loaded model, so that loading the model with its adapters and saving the result are
stages beside the merge. Starting, with all imports, is a stage of its own for both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from covmerge.base.memory import peak_memory

MERGED = "merged"  # the adapter, and the folder it is saved in
MODULE = "benchmarks.lora.merging"


@dataclass(frozen=True)
class Order:
    """How to merge.

    Attributes:
        tool: `covmerge` or `peft`.
        method: covmerge's method, or PEFT's combination type.
        options: the method's parameters, or further arguments of `add_weighted_adapter`.
        output: covmerge's `output`: its format, and the rank that an adapter is truncated to.
        weight: of every adapter, for PEFT.
    """

    tool: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: Mapping[str, Any] = field(default_factory=lambda: {"format": "adapter"})
    weight: float = 1.0

    @property
    def title(self) -> str:
        """What the merge is called: all that it was asked for."""
        rank = {"rank": self.output["rank"]} if "rank" in self.output else {}
        weights = {"weights": f"{self.weight:.2g}"} if self.tool == "peft" else {}
        given = {**self.options, **rank, **weights}
        return " ".join([self.tool, self.method, *(f"{k}={v}" for k, v in given.items())])


@dataclass(frozen=True)
class Place:
    """What to merge, and where to.

    Attributes:
        base: folder of the base.
        experts: folders of the adapters.
        out: folder in which the result gets a folder of its own, named `merged`.
    """

    base: str
    experts: Mapping[str, str]
    out: str


def merge(order: Order, place: Place) -> dict[str, Any]:
    """Merge in a fresh process, in place of what an earlier run left.

    Returns:
        Seconds by stage, peaks of memory in bytes, and how far PEFT's result is from the weighted sum.
    """
    shutil.rmtree(place.out, ignore_errors=True)
    command = [sys.executable, "-m", MODULE, json.dumps(asdict(order)), json.dumps(asdict(place))]
    # How the workers keep memory is not how a user's process does.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{order.tool} {order.method} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Stages:
    """Seconds by stage; made when everything is imported, which is the first."""

    def __init__(self) -> None:
        self.seconds = {"start": round(time.time() - psutil.Process().create_time(), 2)}
        self._imported = peak_memory()

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Time a stage."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)

    def measured(self) -> dict[str, Any]:
        """Return all of it, with the peaks of memory after importing and until now."""
        return {
            "seconds": self.seconds,
            "imported_bytes": self._imported,
            "peak_bytes": peak_memory(),
        }


def by_covmerge(order: Order, place: Place) -> dict[str, Any]:
    from covmerge import parse_recipe, run_recipe

    # covmerge asks transformers for the classes of the base's layers.
    _model_class(place.base)
    stage = Stages()
    recipe = parse_recipe(
        {
            "base": place.base,
            "experts": dict(place.experts),
            "method": order.method,
            "parameters": dict(order.options),
            "output": dict(order.output),
        },
        origin="benchmark",
    )
    with stage("merge"):
        run_recipe(recipe, Path(place.out) / MERGED)
    return stage.measured()


def by_peft(order: Order, place: Place) -> dict[str, Any]:
    import peft

    peft_model: Any = peft.PeftModel
    architecture = _model_class(place.base)
    stage = Stages()
    with stage("load"):
        base = architecture.from_pretrained(place.base, dtype=torch.float32)
        first, *others = place.experts
        model = peft_model.from_pretrained(base, place.experts[first], first)
        for name in others:
            model.load_adapter(place.experts[name], name)
    names, weights = list(place.experts), [order.weight] * len(place.experts)
    torch.default_generator.manual_seed(0)
    with stage("merge"):
        model.add_weighted_adapter(
            names, weights, MERGED, combination_type=order.method, **order.options
        )
    with stage("save"):
        model.save_pretrained(place.out, selected_adapters=[MERGED], save_embedding_layers=False)
    return {**stage.measured(), "distance_to_sum": _distance(model, names, order.weight)}


def _model_class(base: str) -> Any:
    import transformers

    config = json.loads((Path(base) / "config.json").read_text())
    return getattr(transformers, config["architectures"][0])


def _distance(model: Any, names: list[str], weight: float) -> float:
    """Return ‖merged − Σ w Δ_t‖ / ‖Σ w Δ_t‖ over all layers."""
    from peft.tuners.lora import LoraLayer

    apart = total = 0.0
    for module in model.modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            exact = torch.stack([layer.get_delta_weight(name) for name in names]).sum(0) * weight
            apart += float((layer.get_delta_weight(MERGED) - exact).square().sum())
            total += float(exact.square().sum())
    return (apart / total) ** 0.5


if __name__ == "__main__":
    order, place = Order(**json.loads(sys.argv[1])), Place(**json.loads(sys.argv[2]))
    print(json.dumps({"covmerge": by_covmerge, "peft": by_peft}[order.tool](order, place)))
