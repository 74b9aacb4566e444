"""The bank's commands: train, score, table. Each goes on where an earlier run stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from covmerge.errors import InputError, did_you_mean
from covmerge.methods import registry
from covmerge_lab import training
from covmerge_lab.bank import (
    What,
    bases,
    candidates,
    cards,
    choosing,
    criteria,
    experts,
    informed,
    pretraining,
    rules,
    scoring,
    table,
    worst,
)
from covmerge_lab.bank.cards import Card
from covmerge_lab.workers import Job, OnProgress, Workers

Parts = Sequence[str]
Other = Literal["halves", "worst", "choosing"]


def chosen(parts: Parts) -> tuple[Card, ...]:
    """Return the sets of some parts or bases, or with some names; all where nothing is named.

    Raises:
        InputError: a name is none of these.
    """
    part_of = bases.parts()
    names = {card: {card.name, card.base, part_of[card.base]} for card in cards.cards()}
    unknown = set(parts).difference(part_of.values(), *names.values())
    if unknown:
        raise InputError(
            f"'{unknown.pop()}' is no part of the bank: name design, validation, sealed, later or "
            f"newest, a set such as 'minilm-0', or a base of {', '.join(part_of)}"
        )
    return tuple(card for card, of_card in names.items() if not parts or of_card & set(parts))


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


def score(
    cache: Path,
    parts: Parts,
    minutes: float,
    console: Console,
    what: What = "methods",
    methods: Sequence[str] = (),
) -> None:
    """Score the sets whose experts are there, until the time is over.

    Args:
        cache: folder of the bank.
        parts: as `chosen` takes them.
        minutes: begin nothing more after so long.
        console: where progress is shown.
        what: every data-free `methods`; `candidates` for a default that were tried; `auto` with other
            `constants`; methods with `inputs` of each task; the merges that are kept on `halves` of the
            test examples; or the `criteria` of these merges, without data.
        methods: these methods or candidates only, in place of those of `what`.

    Raises:
        InputError: no set is trained, or a name is no method and no candidate.
    """
    known = (*registry.names(), *rules.RULES, *rules.OF_AUTO)
    if unknown := [name for name in methods if name not in known]:
        said = did_you_mean(unknown[0], known)
        raise InputError(f"'{unknown[0]}' is no method or candidate.{said}")
    job = partial(_these, methods) if methods else _SCORES[what]
    sets = [card for card in chosen(parts) if _is_trained(card, cache)]
    if not sets:
        raise InputError(f"no set is trained in {cache}: run `covmerge bank train` first")
    late = time.monotonic() + 60 * minutes
    with Workers(console) as workers:
        workers.run({c.name: partial(_in_time, late, partial(job, c, cache)) for c in sets})


def scored(cache: Path, parts: Parts) -> list[dict[str, Any]]:
    """Return what was scored."""
    paths = (cache / "bank" / "scores" / f"{card.name}.json" for card in chosen(parts))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def write(sets: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write scored sets, a line each. Refusals lose their messages, which name folders of a machine."""
    named = ({**scored, "refused": sorted(scored.get("refused", ()))} for scored in sets)
    path.write_text("".join(f"{json.dumps(_rounded(scored))}\n" for scored in named))


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


def show(sets: Sequence[Mapping[str, Any]], against: str | None = None, *others: Other) -> str:
    """Return the table of all methods on scored sets, their differences to one method, or other tables.

    Args:
        sets: as `scored` or `read` returns them.
        against: the method that others are compared with.
        others: tables in place of it. `halves`: regret on one half of the examples by what is best on the
            other; `worst`: what is kept of a set's worst expert; `choosing`: how well criteria choose.

    Raises:
        InputError: no set was scored, or none by that method.
    """
    kept = table.usable(sets)
    if not kept:
        raise InputError("no set was scored: run `covmerge bank train` and `covmerge bank score`")
    said = f"{len(kept)} sets of {len({s['card']['base'] for s in kept})} bases"
    short = f"{len(sets) - len(kept)} more have fewer than three experts that learnt"
    if others:
        shown = [_OTHERS[other](kept) for other in others]
    elif against is None:
        shown = [table.markdown(table.rows(sets))]
    else:
        known = dict.fromkeys(method for scored in kept for method in scored["methods"])
        if against not in known:
            raise InputError(f"no set was merged by '{against}'.{did_you_mean(against, known)}")
        shown = [table.differences(kept, against)]
    return "\n\n".join([f"{said}; {short}.", *shown])


def _is_trained(card: Card, cache: Path) -> bool:
    folder = experts.folder_of(card, cache)
    return all((folder / e.name / training.MARKER).exists() for e in card.experts)


def _in_time(late: float, job: Callable[[OnProgress], object], on_progress: OnProgress) -> None:
    if time.monotonic() < late:
        job(on_progress)


def _methods(card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.score(card, cache, on_progress=on_progress)


def _these(methods: Sequence[str], card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.score(card, cache, methods, on_progress)


def _candidates(card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.score(card, cache, [*scoring.data_free(card), *rules.RULES, rules.SECOND], on_progress)
    candidates.score(card, cache, (*candidates.MEANS, *candidates.LATEST))


def _constants(card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.score(card, cache, ["auto", *rules.CONSTANTS], on_progress)


def _inputs(card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.score(card, cache, ["auto"])
    informed.score(card, cache, on_progress)


def _halves(card: Card, cache: Path, on_progress: OnProgress) -> None:
    scoring.halves(card, cache)


def _criteria(card: Card, cache: Path, on_progress: OnProgress) -> None:
    criteria.score(card, cache)


_SCORES: Mapping[What, Callable[[Card, Path, OnProgress], None]] = {
    "methods": _methods,
    "candidates": _candidates,
    "constants": _constants,
    "inputs": _inputs,
    "halves": _halves,
    "criteria": _criteria,
}
_OTHERS: Mapping[Other, Callable[[Sequence[table.Scored]], str]] = {
    "halves": table.by_halves,
    "worst": worst.markdown,
    "choosing": choosing.markdown,
}
