"""Language models by lm-eval: the harness asks, samples and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covmerge.errors import InputError
from covmerge_lab.reproduce.bench import Bench, optional, quiet
from covmerge_lab.reproduce.published import Column


def scores(bench: Bench, model: Path, columns: Sequence[Column]) -> Mapping[str, float]:
    """Return percent by column; tasks that run the model's code only where that was allowed.

    Tasks under `DATA/lm_eval` are found too, and take the place of the harness's own.
    """
    asked = [column for column in columns if bench.trusted or not column.runs_code]
    if not asked:
        return {}
    harness, tasks = optional("lm_eval"), optional("lm_eval.tasks")
    manager = _tasks(tasks, bench, asked)
    arguments = {"pretrained": str(model), "tokenizer": str(bench.models.base), "dtype": "auto"}
    try:
        with quiet():
            found = harness.simple_evaluate(
                model="hf",
                model_args=arguments,
                tasks=[column.task for column in asked],
                task_manager=manager,
                limit=bench.limit,
                batch_size=8,
                device=bench.device,
                log_samples=False,
                bootstrap_iters=0,
                confirm_run_unsafe_code=bench.trusted,
            )
    except Exception as error:  # of the harness, of its tasks' code and of the hub's client
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"lm-eval could not score {model} ({type(error).__name__}: {reason}): its tasks fetch their "
            "data from the hub; try one by `lm-eval run --model hf --tasks "
            f"{asked[0].task} --model_args pretrained={model}`"
        ) from error
    return {column.title: 100 * _value(found["results"][column.task], column) for column in asked}


def _tasks(tasks: Any, bench: Bench, columns: Sequence[Column]) -> Any:
    """The harness's tasks and the user's; to read all of the harness's takes a while."""
    if bench.data is None:
        return tasks.TaskManager()
    own = bench.data / "lm_eval"
    known = all((own / f"{column.task}.yaml").is_file() for column in columns)
    return tasks.TaskManager(include_path=str(own), include_defaults=not known)


def _value(results: Mapping[str, Any], column: Column) -> float:
    """Return a metric under the first of its filters; lm-eval calls it `metric,filter`."""
    for key, value in results.items():
        if key.partition(",")[0] == column.metric:
            return float(value)
    raise InputError(
        f"lm-eval's {column.task} has no {column.metric}, but {', '.join(results)}: is it another "
        "version of the harness?"
    )
