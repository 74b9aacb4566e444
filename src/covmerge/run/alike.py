"""Experts that are one model under several names: by mistake, or to weigh it more. It is said."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from covmerge.base.text import some
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.planning.operations import expert_key


def alike_by_place(experts: Mapping[str, Checkpoint]) -> Iterator[str]:
    """Say which experts lie at one place. That copies are alike is known once they are hashed.

    Args:
        experts: by name.
    """
    return _alike({name: _found_at(checkpoint) for name, checkpoint in experts.items()})


def alike_by_content(sources: Mapping[str, Any]) -> Iterator[str]:
    """Say which experts have the same files, whatever these are called.

    Args:
        sources: as in covmerge.json.

    Example:
        >>> content = {"model.safetensors": "sha256:1f"}
        >>> both = {f"expert {name}": {"source": name, "content": content} for name in ("a", "b")}
        >>> [text.partition(",")[0] for text in alike_by_content(both)]
        ["experts 'a' and 'b' are one model under 2 names"]
    """
    prefix = expert_key("")
    return _alike(
        {
            key.removeprefix(prefix): _hashes(source["content"])
            for key, source in sources.items()
            if key.startswith(prefix)
        }
    )


def _found_at(checkpoint: Checkpoint) -> Hashable | None:
    """What tells a place from others, whatever it is called; None of what lies nowhere."""
    if "://" in checkpoint.source:
        return checkpoint.hub or checkpoint.source
    path = Path(checkpoint.source).expanduser()
    return path.resolve() if path.exists() else checkpoint.hub


def _hashes(content: Mapping[str, str]) -> Hashable | None:
    """Hashes of files; what a server calls a version is none."""
    hashes = sorted(content.values())
    return tuple(hashes) if all(value.startswith("sha256:") for value in hashes) else None


def _alike(known: Mapping[str, Hashable | None]) -> Iterator[str]:
    names: dict[Hashable, list[str]] = {}
    for name, content in known.items():
        if content is not None:
            names.setdefault(content, []).append(name)
    for same in names.values():
        if len(same) > 1:
            listed = f"'{same[0]}' and '{same[1]}'" if len(same) == 2 else some(same, quoted=True)
            yield (
                f"experts {listed} are one model under {len(same)} names, which counts as often: leave out "
                "all but one, or choose its weight, unless it is meant"
            )
