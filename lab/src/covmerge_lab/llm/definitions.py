"""The tasks as definitions for lm-eval, so that its numbers and the suite's can be held side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PREFIX = "covmerge_"


def write(task: str, test: Path, most: int, folder: Path) -> None:
    """Write the definition of a task.

    Args:
        task: its name.
        test: its test, as JSON lines.
        most: tokens that an answer may take.
        folder: what `lm-eval --include_path` is given.
    """
    definition: dict[str, Any] = {
        "task": PREFIX + task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(test.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["\n"],
            "do_sample": False,
            "max_gen_toks": most,
        },
        "filter_list": [
            {
                "name": "strip",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{definition['task']}.yaml"
    path.write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
