"""Evaluate any model by any harness: lm-eval, or a Python function."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from covmerge.errors import InputError, did_you_mean
from covmerge.run.scoring import lm_eval
from covmerge_lab import card, record
from covmerge_lab.record import LM_EVAL, PYTHON, Metric, Result, finite

Callback = Callable[[Path], Mapping[str, float]]


def evaluate(
    model: str | Path,
    *,
    tasks: Sequence[str],
    harness: str = LM_EVAL,
    limit: int | None = None,
    callback: Callback | None = None,
    include_path: str | Path | None = None,
    batch_size: int = 8,
    device: str | None = None,
) -> list[Result]:
    """Evaluate a model and write the results beside it, into evaluation.json and its model card.

    What was measured before stays there, but for the same tasks.

    Args:
        model: folder of a model, or of an adapter that names its base.
        tasks: names of lm-eval's tasks, groups or tags; or what `callback` measures, one name.
        harness: `lm-eval`; with a callback `python`, whatever is given.
        limit: most examples of a task, for a first look.
        callback: is given the folder and returns metrics by name.
        include_path: folder with definitions of further tasks for lm-eval.
        batch_size: examples at a time.
        device: where the model runs; None for a GPU, if there is one.

    Returns:
        What was measured now.

    Raises:
        InputError: a folder, a task or the harness is not there.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> _ = (folder / "config.json").write_text("{}")
        >>> (result,) = evaluate(folder, tasks=["files"], callback=lambda path: {"count": 1.0})
        >>> result.harness, result.metrics
        ('python', (Metric(name='count', value=1.0, stderr=None),))
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'config.json', 'evaluation.json']
    """
    folder = Path(model)
    _check(folder, tasks, callback)
    # What cannot be added to is told before the work.
    record.read(folder)
    card.read(folder)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    started = time.perf_counter()
    if callback is not None:
        harness, release = PYTHON, None
        metrics = tuple(Metric(name, finite(value)) for name, value in callback(folder).items())
        measured = [_Measured(tasks[0], metrics, None)]
    elif harness == LM_EVAL:
        release = _version()
        measured = _lm_eval(folder, list(tasks), limit, include_path, batch_size, device)
    else:
        raise InputError(f"there is no harness '{harness}'.{did_you_mean(harness, [LM_EVAL])}")
    seconds = round(time.perf_counter() - started, 1)
    results = [
        Result(
            task=found.task,
            harness=harness,
            version=release,
            metrics=found.metrics,
            examples=found.examples,
            limit=limit,
            date=date,
            seconds=seconds,
            model=record.fingerprint(folder),
        )
        for found in measured
    ]
    card.write(folder, record.write(folder, results))
    return results


@dataclass(frozen=True)
class _Measured:
    task: str
    metrics: tuple[Metric, ...]
    examples: int | None


def _check(folder: Path, tasks: Sequence[str], callback: Callback | None) -> None:
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise InputError(
            f"{folder} is no model folder: it has neither config.json nor adapter_config.json. "
            "Name a folder that `covmerge merge` wrote, or that transformers loads"
        )
    if not tasks:
        raise InputError("no task is given: name one or more, such as arc_easy,gsm8k")
    if callback is not None and len(tasks) > 1:
        raise InputError(
            f"a callback measures one task, and {len(tasks)} are named: call evaluate for each"
        )


def _version() -> str:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError('lm-eval is not installed: pip install "covmerge-lab[evaluate]"')
    return version("lm_eval")


def _lm_eval(
    folder: Path,
    tasks: Sequence[str],
    limit: int | None,
    include_path: str | Path | None,
    batch_size: int,
    device: str | None,
) -> list[_Measured]:
    found = lm_eval.evaluate(
        folder,
        tasks,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        device=device,
    )
    return [
        _Measured(task, _metrics(entries), found["n-samples"].get(task, {}).get("effective"))
        for task, entries in found["results"].items()
    ]


def _metrics(entries: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Read lm-eval's `{"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": ...}`."""
    metrics: list[Metric] = []
    for key, value in entries.items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = entries.get(f"{name}_stderr,{filtered}")
        metrics.append(
            Metric(
                name if filtered == "none" else f"{name} ({filtered})",
                finite(value),
                finite(stderr) if isinstance(stderr, (int, float)) else None,
            )
        )
    return tuple(metrics)
