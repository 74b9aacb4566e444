"""The terminal of README.md and the site's first page: a real run of docs/start.md, drawn by rich.

    python website/terminal.py FOLDER

FOLDER is where the page was followed up to its merge: `minilm`, `feelings`, `places`, `tasks.py`. The
commands are run there, and what they print becomes docs/images/terminal.svg.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
WIDTH = 84
COMMANDS = (
    "python tasks.py minilm feelings places",
    "covmerge merge --base ./minilm --expert feelings=./feelings --expert places=./places ./merged",
    "python tasks.py merged",
)
# Colours, and no bars: those are for an eye that looks on.
SHOWN = {
    "FORCE_COLOR": "1",
    "TTY_INTERACTIVE": "0",
    "COLUMNS": str(WIDTH),
    "PYTHONWARNINGS": "ignore",
}


def main(folder: Path) -> None:
    """Run the commands and draw what they print."""
    shutil.rmtree(folder / "merged", ignore_errors=True)
    console = Console(record=True, width=WIDTH, file=StringIO())
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "bold green"), command))
        done = subprocess.run(
            command, shell=True, cwd=folder, env={**os.environ, **SHOWN}, stdout=subprocess.PIPE
        )
        if done.returncode:
            raise SystemExit(f"`{command}` failed in {folder}")
        console.print(Text.from_ansi(done.stdout.decode()))
    drawn = console.export_svg(title="covmerge", unique_id="terminal")
    # rich names fonts of another server there.
    drawn = re.sub(r"@font-face\s*\{.*?\}\s*", "", drawn, flags=re.DOTALL)
    PICTURE.write_text(drawn, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
