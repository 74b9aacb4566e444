"""The model card: results as a table between two markers, and in its metadata as the hub reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from yaml import YAMLError

from covmerge.errors import InputError
from covmerge.files.checkpoints.base import CARD_NAME
from covmerge.files.stores.disk import replace_file
from covmerge_lab.record import LM_EVAL, PYTHON, Result

BEGIN = "<!-- results of `covmerge evaluate`: begin -->"
END = "<!-- results of `covmerge evaluate`: end -->"

_EMPTY = "---\n\n---\n"  # metadata to be filled
_OURS = (f"{LM_EVAL}:", f"{PYTHON}:")  # how the datasets of our results are called


def read(folder: Path) -> ModelCard:
    """Return the model card of a folder, or a new one.

    Raises:
        InputError: its metadata cannot be read.
    """
    path = folder / CARD_NAME
    text = _content(path) if path.exists() else f"# {folder.resolve().name}\n"
    try:
        return ModelCard(text if text.lstrip().startswith("---") else _EMPTY + text)
    except (ValueError, YAMLError) as error:
        raise InputError(
            f"the metadata of {path} cannot be read ({error}): mend it first"
        ) from error


def write(folder: Path, results: Sequence[Result]) -> None:
    """Put results into the model card, which is made if there is none.

    Of a card that is there only the lines between the markers and the results in its metadata are
    replaced, of which those of others are kept.

    Raises:
        InputError: the card's metadata cannot be read.
    """
    card = read(folder)
    data: Any = card.data  # its class is one of three, by the card's
    known: list[EvalResult] = data.eval_results or []
    others = [entry for entry in known if not entry.dataset_type.startswith(_OURS)]
    data.model_name = data.model_name or folder.resolve().name
    data.eval_results = [*others, *(entry for result in results for entry in _entries(result))]
    card.text = _with_section(card.text, table(results))
    replace_file(folder / CARD_NAME, str(card))


def table(results: Sequence[Result]) -> str:
    """Return results as a table in markdown."""
    rows = [
        "| task | metric | value | examples | harness | date |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r.task} | {m.name} | {m} | {_examples(r)} | {_harness(r)} | {r.date[:10]} |"
            for r in results
            for m in r.metrics
        ),
    ]
    return "\n".join(rows)


def _content(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:  # its line ends are kept
        return file.read()


def _with_section(text: str, content: str) -> str:
    section = f"{BEGIN}\n## Results\n\n{content}\n{END}"
    # A marker begins its line, which no name in a card does.
    found = re.compile(f"^{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL | re.MULTILINE)
    end = "\r\n" if "\r\n" in text else "\n"
    section = section.replace("\n", end)
    if found.search(text):
        return found.sub(lambda _: section, text, count=1)
    return f"{text.rstrip()}{end}{end}{section}{end}"


def _examples(result: Result) -> str:
    count = "" if result.examples is None else str(result.examples)
    return count if result.limit is None else f"{count} (limited)"


def _harness(result: Result) -> str:
    return f"{result.harness} {result.version or ''}".strip()


def _entries(result: Result) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation" if result.harness == LM_EVAL else "other",
            # Known by it from the results of others.
            dataset_type=f"{result.harness}:{result.task}",
            dataset_name=result.task,
            metric_type=metric.name,
            metric_value=metric.value if metric.value is not None else "not finite",
            metric_name=metric.name,
        )
        for metric in result.metrics
    ]
