"""One merge in a process of its own, timed: nothing else is in its memory, nothing is warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from covmerge import RunOptions, parse_recipe, plan_recipe, run_recipe
from covmerge.base.memory import peak_memory
from covmerge.errors import InputError

_MODULE = "covmerge_lab.alone"


@dataclass(frozen=True)
class Order:
    """What to merge, and how.

    Attributes:
        base: folder of the base.
        experts: folders by name.
        method: a registered one.
        parameters: those that are not at their defaults.
        out: folder that the result is written to.
        device: where the mathematics runs.
    """

    base: str
    experts: Mapping[str, str]
    method: str
    out: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    device: str = "cpu"


@dataclass(frozen=True)
class Cost:
    """What a merge took.

    Attributes:
        mathematics: seconds of the method itself.
        merge: seconds from the first byte read to the verified output.
        process: seconds of the whole process, Python's start and all imports included.
        memory: most bytes resident, beyond those after importing and planning.
        device_memory: most bytes of the GPU; None on the CPU.
    """

    mathematics: float
    merge: float
    process: float
    memory: int
    device_memory: int | None


def run_alone(order: Order) -> Cost:
    """Merge in a fresh process.

    Raises:
        InputError: it failed; the message ends in its last line.
    """
    # How the workers keep memory is not how a user's process does.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, "-m", _MODULE, json.dumps(asdict(order))]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise InputError(f"merging by '{order.method}' alone failed: {last}")
    return Cost(process=seconds, **json.loads(done.stdout.splitlines()[-1]))


def _merge(order: Order) -> dict[str, Any]:
    recipe = parse_recipe(
        {
            "base": order.base,
            "experts": dict(order.experts),
            "method": order.method,
            "parameters": dict(order.parameters),
        },
        origin="study",
    )
    # Imports what the merge will import: transformers is asked for the model's layers.
    plan_recipe(recipe)
    before = peak_memory()
    started = time.perf_counter()
    result: Any = run_recipe(
        recipe, Path(order.out), RunOptions(device=order.device, overwrite=True)
    )
    on_gpu = torch.device(order.device).type == "cuda"
    return {
        "mathematics": result.run["compute_seconds"],
        "merge": time.perf_counter() - started,
        "memory": peak_memory() - before,
        "device_memory": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


if __name__ == "__main__":
    print(json.dumps(_merge(Order(**json.loads(sys.argv[1])))))
