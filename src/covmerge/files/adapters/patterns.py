"""Regular expressions from untrusted files, matched in bounded time.

PEFT matches them by Python's `re`. Real ones look ahead, so that no other engine gives the same
matches for all of them. `re` may take forever on some patterns, so a separate process with limited
time and memory does the matching.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.json_file import shorten

CPU_SECONDS = 4

_MAX_PATTERNS = 10_000
_MAX_LENGTH = 1000  # characters
_WAIT_SECONDS = 120.0  # allows for a machine that is busy with other work
_PROCESS = Path(__file__).with_name("pattern_process.py")


class Patterns:
    """Fields of patterns; the first pattern of a field that matches a name decides.

    Args:
        where: the file that has the patterns, for errors.
        fields: the patterns of each field, and whether they must match a whole name or only its
            beginning. For the latter the group `idx` is returned.

    Raises:
        CheckpointError: a field has too many patterns, or a pattern is too long.
    """

    def __init__(self, where: str, fields: Mapping[str, tuple[Sequence[str], bool]]) -> None:
        self._where = where
        self._fields = fields
        self._found: dict[str, dict[str, tuple[int, str | None] | None]] = {}
        for field, (patterns, _) in fields.items():
            if len(patterns) > _MAX_PATTERNS:
                raise CheckpointError(
                    f"{where} has {len(patterns)} patterns in {field}, and {_MAX_PATTERNS} are read: "
                    "write one for many modules"
                )
            longest = max(patterns, key=len, default="")
            if len(longest) > _MAX_LENGTH:
                raise CheckpointError(
                    f"{where} has in {field} a pattern of more than {_MAX_LENGTH} characters, "
                    f"{shorten(longest)}: write several, or a shorter one"
                )

    def first(self, field: str, name: str) -> tuple[int, str | None] | None:
        """Return the number of the first pattern of a field that matches a name, and its group `idx`."""
        if not self._fields.get(field, ((), False))[0]:
            return None
        if name not in self._found.get(field, {}):
            self.ask([name])
        return self._found[field][name]

    def ask(self, names: Iterable[str]) -> None:
        """Match many names at once, because starting a process takes longer than matching."""
        asked = sorted(set(names))
        fields = {field: value for field, value in self._fields.items() if value[0]}
        if not fields or not asked:
            return
        for field, found in self._ask(fields, asked).items():
            matches = self._found.setdefault(field, {})
            matches |= {
                name: None if match is None else (match[0], match[1])
                for name, match in zip(asked, found, strict=True)
            }

    def _ask(
        self, fields: Mapping[str, tuple[Sequence[str], bool]], names: Sequence[str]
    ) -> dict[str, list[Any]]:
        command = [sys.executable or "python3", "-I", "-S", str(_PROCESS), str(CPU_SECONDS)]
        try:
            ran = subprocess.run(
                command,
                input=json.dumps([fields, names]),
                capture_output=True,
                text=True,
                timeout=_WAIT_SECONDS,
            )
            code = ran.returncode
            answer: dict[str, Any] = json.loads(ran.stdout) if code == 0 else {}
        except subprocess.TimeoutExpired:
            code, answer = -1, {}
        except OSError as error:
            raise CheckpointError(
                f"{self._where} has patterns in {', '.join(fields)}, and the process that matches "
                f"them cannot be started ({error}): allow it, or name the modules"
            ) from error
        if code != 0:
            raise CheckpointError(
                f"{self._where}: to match the patterns of {', '.join(fields)} against "
                f"{len(names)} names of modules takes more than {CPU_SECONDS} seconds or a lot of "
                "memory: write simpler ones, or the modules' names"
            )
        if "refused" in answer:
            field, pattern, why = answer["refused"]
            raise CheckpointError(
                f"{self._where}: {shorten(pattern)} in {field} is no regular expression ({why}): "
                "correct it"
            )
        return answer["found"]
