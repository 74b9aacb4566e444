"""The tables of ACTMat (arXiv:2604.01329): full fine-tuning, LoRA, and OLMo-3's RL-Zero experts."""

from __future__ import annotations

from typing import Any

from covmerge_lab.reproduce.ace import suite_base, suite_expert
from covmerge_lab.reproduce.published import (
    MEAN,
    Column,
    Row,
    Setting,
    Source,
    Table,
    scores,
)

PAPER = "ACTMat (arXiv:2604.01329)"

_SETTINGS = ("t5-base", "t5-large", "ViT-B-16", "ViT-B-32", "ViT-L-14")
_T5_TASKS = ("qasc", "wiki_qa", "quartz", "paws", "story_cloze", "winogrande", "wsc")
_VISION_TASKS = ("SUN397", "Cars", "DTD", "EuroSAT", "GTSRB", "MNIST", "RESISC45", "SVHN")
_DRIVE = (
    "the authors' code fetches it from a folder of Google Drive, and no hub id is known: pass --expert "
    "NAME=FOLDER for each"
)
_DATA = "the authors' statistics are of 10 batches of 32 inputs of each task"
_ROWS: dict[
    str, tuple[str, dict[str, Any], str, str]
] = {  # title: method, parameters, full fine-tuning, LoRA of rank 16
    "RegMean": ("regmean", {}, "74.5 80.8 87.6 83.0 90.0", "75.9 77.7 80.3 76.5 86.9"),
    "Task Arithmetic": (
        *("task_arithmetic", {"scale": 0.4}),
        *("60.5 59.8 24.3 26.5 41.8", "54.2 55.0 66.1 53.5 77.6"),
    ),
    "Average": ("average", {}, "64.8 50.9 72.2 65.5 79.3", "62.2 57.2 64.3 56.8 72.4"),
    "Iso-C": ("iso_c", {}, "66.1 57.6 88.4 81.6 90.5", "56.1 52.1 57.5 50.4 66.8"),
    "TSV": ("tsv_m", {}, "72.9 74.7 88.8 83.3 91.1", "72.2 75.4 78.4 73.0 85.4"),
    "KnOTS-Iso-C": ("knots", {"inner": "iso_c", "space": "v"}, "", "64.7 69.4 74.9 70.4 83.6"),
    "KnOTS-TSV": ("knots", {"inner": "tsv_m", "space": "v"}, "", "67.6 71.1 74.8 69.6 83.4"),
    "ACTMat": ("actmat", {}, "76.0 79.8 89.5 82.9 92.2", "72.0 76.7 78.6 74.6 86.1"),
}
_EXPERTS = ("76.0 82.4 94.6 90.4 94.1", "76.5 79.2 84.1 80.7 89.0")


def _setting(model: str, *, lora: bool) -> Setting:
    place = _SETTINGS.index(model)
    vision = model.startswith("ViT")
    tasks = _VISION_TASKS if vision else _T5_TASKS
    # The fine-tuned ViTs are the suite's kind of file; the others are the authors' own.
    experts = {
        task: suite_expert(model, task) if vision and not lora else Source(where=_DRIVE)
        for task in tasks
    }
    rows = [Row("Experts", {MEAN: float(_EXPERTS[lora].split()[place])}, "experts")]
    for title, (method, parameters, full, adapters) in _ROWS.items():
        line = adapters if lora else full
        if line:
            note = _DATA if method == "regmean" else ""
            published = {MEAN: float(line.split()[place])}
            rows.append(Row(title, published, "merge", method, parameters, note))
    return Setting(
        name=model,
        family="clip" if vision else "t5",
        model=model,
        base=suite_base(model, tasks[0]) if vision else Source(f"google-t5/{model}"),
        experts=experts,
        columns=[Column(task, task, task) for task in tasks],
        rows=rows,
        # Query, key and value apart; every matrix but those of 20000 rows and the text projection.
        tensors={"fused": "split", "embeddings": "method"} if vision else {},
        rules=[
            {"match": "*token_embedding*", "use": "average"},
            {"match": "*visual.proj", "use": "method"},
        ]
        if vision
        else [],
        gigabytes=0.0 if vision else (0.9 if model == "t5-base" else 3.0),
    )


def _mixed(name: str, label: str, what: str, *, lora: bool) -> Table:
    return Table(
        name=name,
        paper=PAPER,
        label=label,
        what=what,
        settings=[_setting(model, lora=lora) for model in _SETTINGS],
        notes=[
            "accuracy, no scale tuned. T5 ranks each example's answer choices by their likelihood; "
            "which prompts were used is in the authors' templates, so the texts are yours to give"
        ],
    )


FULL = _mixed(
    "actmat/full",
    "full fine-tuning",
    "T5-base and T5-large on 7 text tasks, CLIP ViT-B/16, B/32, L/14 on 8 image tasks",
    lora=False,
)
LORA = _mixed(
    "actmat/lora", "LoRA of rank 16", "the same models and tasks, LoRA experts", lora=True
)

_OLMO = (
    ("HumanEval", "humaneval", "Code", "pass@1"),
    ("HumanEval+", "humaneval_plus", "Code", "pass@1"),
    ("AIME24", "aime24", "Math", "exact_match"),
    ("AIME25", "aime25", "Math", "exact_match"),
    ("IFEval", "ifeval", "IF", "prompt_level_strict_acc"),
)
OLMO = Table(
    name="actmat/olmo",
    paper=PAPER,
    label="RL-Zero experts",
    what="OLMo-3-7B's RL-Zero experts for mathematics, code and instructions, by lm-eval",
    settings=[
        Setting(
            name="olmo-3-7b",
            family="lm",
            model="olmo3",
            base=Source("allenai/Olmo-3-1025-7B"),
            experts={
                name: Source(f"allenai/Olmo-3-7B-RL-Zero-{name}") for name in ("Math", "Code", "IF")
            },
            columns=[
                Column(title, task, expert, metric, runs_code=expert == "Code")
                for title, task, expert, metric in _OLMO
            ],
            rows=[
                Row("Base", {MEAN: 34.5}, "base"),
                Row("Experts", {MEAN: 54.1}, "experts"),
                Row("RegMean", {MEAN: 45.7}, "merge", "regmean", note=_DATA),
                Row("Task Arithmetic", {MEAN: 41.9}, "merge", "task_arithmetic", {"scale": 0.4}),
                Row("Average", {MEAN: 41.8}, "merge", "average"),
                Row("Iso-C", {MEAN: 40.1}, "merge", "iso_c"),
                Row("TSV", {MEAN: 43.6}, "merge", "tsv_m"),
                Row(
                    "ACTMat",
                    scores([title for title, *_ in _OLMO], "58.2 54.5 39.9 29.8 47.0 45.9"),
                    "merge",
                    "actmat",
                ),
            ],
            gigabytes=58.0,
        )
    ],
    notes=[
        "published by AI2's olmes (sampled answers, pass@1 of 32 for AIME): lm-eval's tasks of these "
        "names have other prompts, so that only differences between rows compare"
    ],
)

TABLES = (FULL, LORA, OLMO)
