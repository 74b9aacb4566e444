"""What is checked of a merged adapter."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch

from covmerge.base.text import some
from covmerge.base.threads import ThreadPool
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.stores.store import Store
from covmerge.maths.linalg.lapack import norm
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.verification.outcome import DIFFERS, Check, all_there, check_heads


def check_adapter(
    store: Store, manifest: Mapping[str, Any], written: Checkpoint
) -> tuple[Check, ...]:
    """Check an adapter that covmerge merged, which was just opened.

    Coverage (each update of the manifest with its rank, each tensor that is held whole, no other),
    finite values, that it changes anything, and the task heads.
    """
    if not isinstance(written, AdapterCheckpoint):
        return (Check("coverage", ok=False, detail="there is no adapter in the folder"),)
    entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
    places = [entry["adapter"] for entry in entries.values() if "adapter" in entry]
    # Of a tensor that is held whole the rank is None.
    wanted = {
        name: place.get("rank")
        for place in places
        for name in (place["tensor"], *place.get("ties", ()))
    }
    ranks: dict[str, int | None] = {n: header.rank for n, header in written.low_rank.items()}
    sizes = _sizes(written)
    ranks |= dict.fromkeys(written.headers)
    wrong = sorted(n for n in {*ranks, *wanted} if ranks.get(n, 0) != wanted.get(n, 0))
    bad = [name for name, size in sizes.items() if not isfinite(size)]
    changed = any(size for name, size in sizes.items() if ranks[name] is not None)
    return (
        Check(
            "coverage",
            not wrong,
            f"missing, unknown or of another rank: {some(wrong, 5)}"
            if wrong
            else all_there(len(wanted)),
        ),
        Check("finite", not bad, some(bad, 5) or "no NaN or Inf"),
        Check(
            DIFFERS,
            changed,
            "the updates are not all zero" if changed else "every update is zero",
        ),
        check_heads(store, manifest),
    )


def _sizes(written: AdapterCheckpoint) -> dict[str, float]:
    """Norms: of an update a bound, which is zero, or not finite, where the update is."""

    def of_factors(name: str) -> float:
        factors = written.read_factors(name)
        return norm(factors.left) * norm(factors.right)

    def of_whole(name: str) -> float:
        return norm(written.read(name).float())

    # Factors are too thin to share a sum among cores: each core has tensors of its own.
    with ThreadPool(torch.get_num_threads(), initializer=use_threads, initargs=(1,)) as pool:
        low_rank = dict(zip(written.low_rank, pool.map(of_factors, written.low_rank), strict=True))
        whole = dict(zip(written.headers, pool.map(of_whole, written.headers), strict=True))
    return low_rank | whole
