"""How many branches of each folder the tests have taken, of a report of coverage's; `make coverage`.

    python -m tests.branches build/coverage.json

coverage's own total is one of lines and branches together, in which lines that are easy to reach hide
branches that are not. With less than `LEAST` of all branches the exit code is 1.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LEAST = 95.0  # per cent
_CODE = "src/covmerge/"


def table(report: Mapping[str, Any]) -> tuple[str, float]:
    """Return a table in Markdown, and the share of branches that were taken in per cent."""
    taken, there = Counter[str](), Counter[str]()
    for file, found in report["files"].items():
        floor, folder, *inner = file.removeprefix(_CODE).split("/")
        for name in (f"{floor}/{folder}/" if inner else "the rest", "all"):
            taken[name] += found["summary"]["covered_branches"]
            there[name] += found["summary"]["num_branches"]
    names = sorted(there, key=lambda name: (name == "all", -there[name]))
    lines = ["| folder | branches | of | |", "|---|---|---|---|"]
    for name in names:
        share = 100 * taken[name] / max(1, there[name])
        lines.append(f"| {name} | {taken[name]} | {there[name]} | {share:.1f} % |")
    return "\n".join(lines), 100 * taken["all"] / max(1, there["all"])


def missing(report: Mapping[str, Any]) -> str:
    """Return by file from which line to which no test has gone."""
    return "\n".join(
        f"{file}: " + ", ".join(f"{one}→{other}" for one, other in found["missing_branches"])
        for file, found in sorted(report["files"].items())
        if found["missing_branches"]
    )


def main(arguments: Sequence[str]) -> int:
    """Print what was not taken, and the table."""
    report = json.loads(Path(arguments[0]).read_text())
    print(missing(report), end="\n\n")
    told, share = table(report)
    print(told)
    if share < LEAST:
        print(f"{share:.2f} % of branches are less than {LEAST} %")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
