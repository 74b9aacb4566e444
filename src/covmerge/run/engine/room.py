"""Room on the disk for an output."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covmerge.base.errors import ResourceError
from covmerge.plan.planning import Plan
from covmerge.plan.recipe import format_size


@dataclass(frozen=True)
class Room:
    """Disk space that an output needs, and where it would lie."""

    needed: int
    free: int
    folder: Path

    def check(self) -> None:
        """Refuse an output that does not fit.

        Raises:
            ResourceError: with the bytes needed and free.
        """
        if self.needed > self.free:
            raise ResourceError(
                f"no room for the output: {format_size(self.needed)} needed, "
                f"{format_size(self.free)} free at {self.folder}; free some space or choose "
                "another output folder"
            )


def room_for(plans: Sequence[Plan], out: Path) -> Room:
    """Return what the plans' outputs need, and what is free where `out` would be made."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    needed = sum(plan.write_bytes for plan in plans)
    return Room(needed, shutil.disk_usage(existing).free, existing)
