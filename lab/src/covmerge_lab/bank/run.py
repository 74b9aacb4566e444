"""The bank's commands: train, score, table. Each goes on where an earlier run stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from covmerge.errors import InputError, did_you_mean
from covmerge_lab import training
from covmerge_lab.bank import bases, candidates, cards, experts, pretraining, scoring, table
from covmerge_lab.bank.cards import Card
from covmerge_lab.workers import Job, OnProgress, Workers

Parts = Sequence[str]


def chosen(parts: Parts) -> tuple[Card, ...]:
    """Return the sets of some thirds or bases; of all where none is named.

    Raises:
        InputError: a name is neither.
    """
    thirds = bases.thirds()
    unknown = set(parts) - set(thirds) - set(thirds.values())
    if unknown:
        raise InputError(
            f"'{unknown.pop()}' is no part of the bank: name design, validation or sealed, or a base of "
            f"{', '.join(thirds)}"
        )
    return tuple(
        card
        for card in cards.cards()
        if not parts or card.base in parts or thirds[card.base] in parts
    )


def train(cache: Path, parts: Parts, minutes: float, console: Console) -> None:
    """Make bases and experts until the time is over."""
    sets = chosen(parts)
    late = time.monotonic() + 60 * minutes
    with Workers(console) as workers:
        wanted = {card.base: experts.BY_NAME[card.base] for card in sets}
        jobs: dict[str, Job[None]] = {
            name: partial(_in_time, late, partial(pretraining.prepare, base, cache))
            for name, base in wanted.items()
        }
        workers.run(jobs)
        workers.run(
            {c.name: partial(_in_time, late, partial(experts.train, c, cache)) for c in sets}
        )


def score(cache: Path, parts: Parts, minutes: float, console: Console) -> None:
    """Score every method and candidate on the sets whose experts are there, until the time is over."""
    sets = [card for card in chosen(parts) if _is_trained(card, cache)]
    if not sets:
        raise InputError(f"no set is trained in {cache}: run `covmerge bank train` first")
    late = time.monotonic() + 60 * minutes
    with Workers(console) as workers:
        workers.run({c.name: partial(_in_time, late, partial(_score, c, cache)) for c in sets})


def scored(cache: Path, parts: Parts) -> list[dict[str, Any]]:
    """Return what was scored."""
    paths = (cache / "bank" / "scores" / f"{card.name}.json" for card in chosen(parts))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def write(sets: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write scored sets, a line each."""
    path.write_text("".join(f"{json.dumps(_rounded(scored))}\n" for scored in sets))


def read(path: Path, parts: Parts) -> list[dict[str, Any]]:
    """Return scored sets that `write` wrote.

    Raises:
        InputError: the file is not there, or is another one.
    """
    wanted = {card.name for card in chosen(parts)}
    try:
        sets = [json.loads(line) for line in path.read_text().splitlines()]
        return [scored for scored in sets if scored["card"]["name"] in wanted]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read as scores ({error}): name a file that "
            "`covmerge bank table --save` wrote"
        ) from None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_rounded(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return round(value, 6) if isinstance(value, float) else value


def show(sets: Sequence[Mapping[str, Any]], against: str | None = None) -> str:
    """Return the table of all methods on scored sets, or their differences to one method.

    Raises:
        InputError: no set was scored, or none by that method.
    """
    kept = table.usable(sets)
    if not kept:
        raise InputError("no set was scored: run `covmerge bank train` and `covmerge bank score`")
    said = f"{len(kept)} sets of {len({s['card']['base'] for s in kept})} bases"
    short = f"{len(sets) - len(kept)} more have fewer than three experts that learnt"
    if against is None:
        return f"{said}; {short}.\n\n{table.markdown(table.rows(sets))}"
    known = dict.fromkeys(method for scored in kept for method in scored["methods"])
    if against not in known:
        raise InputError(f"no set was merged by '{against}'.{did_you_mean(against, known)}")
    return f"{said}; {short}.\n\n{table.differences(kept, against)}"


def _is_trained(card: Card, cache: Path) -> bool:
    folder = experts.folder_of(card, cache)
    return all((folder / e.name / training.MARKER).exists() for e in card.experts)


def _in_time(late: float, job: Callable[[OnProgress], object], on_progress: OnProgress) -> None:
    if time.monotonic() < late:
        job(on_progress)


def _score(card: Card, cache: Path, on_progress: OnProgress) -> Mapping[str, Any]:
    found = scoring.score(card, cache, on_progress=on_progress)
    for methods, equal in candidates.MEANS:
        candidates.mean_of(card, cache, methods, equal_length=equal)
    return found
