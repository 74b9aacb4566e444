"""Progress of a merge: a bar on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from covmerge.cli.console import printable
from covmerge.cli.units import format_seconds
from covmerge.engine import Progress
from covmerge.recipe import format_size

_LINE_EVERY = 10.0  # seconds


def progress_on(console: Console) -> Progress:
    """Return the progress display that suits the console."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BarProgress(console)
    return LineProgress(console)


class Tally:
    """Bytes read and written so far, and how fast this run is.

    What an earlier run finished counts as done, not as speed.
    """

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self.total = total
        self.done = 0
        self._resumed = 0
        self._clock = clock
        self._start = clock()

    def add(self, size: int, *, resumed: bool) -> None:
        """Count bytes that are done."""
        self.done += size
        if resumed:
            self._resumed += size

    def line(self, what: str) -> str:
        """Say bytes, rate, time left and what was just finished."""
        parts = [f"{format_size(self.done)} of {format_size(self.total)}"]
        elapsed, moved = self._clock() - self._start, self.done - self._resumed
        if elapsed > 0 and moved > 0:
            rate = moved / elapsed
            left = format_seconds((self.total - self.done) / rate)
            parts += [f"{format_size(int(rate))}/s", f"{left} left"]
        return ", ".join([*parts, printable(what)])


class BarProgress:
    """A bar that is gone when the work is over."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )

    def start(self, total: int) -> None:
        """Show the empty bar."""
        self._tally = Tally(total, time.monotonic)
        self._task = self._bar.add_task("reading", total=total)
        self._bar.start()

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """Move the bar."""
        self._tally.add(size, resumed=resumed)
        line = self._tally.line(what)
        self._bar.update(self._task, completed=self._tally.done, description=line)

    def finish(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class LineProgress:
    """A line every ten seconds at most, without control characters: for logs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock

    def start(self, total: int) -> None:
        """Start the clock."""
        self._tally = Tally(total, self._clock)
        self._last = self._clock()

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """Print a line if the last one is old."""
        self._tally.add(size, resumed=resumed)
        if self._clock() - self._last >= _LINE_EVERY:
            self._last = self._clock()
            self._console.print(self._tally.line(what), soft_wrap=True)

    def finish(self) -> None:
        """Nothing is left to take away."""
