"""Progress of long work: a bar on a terminal; elsewhere, a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from covmerge.base.sizes import format_size
from covmerge.base.text import counted
from covmerge.front.cli.console import format_seconds, printable, stderr

_LINE_EVERY = 10.0  # seconds


class _Display:
    """A bar that vanishes at the end of the work, or plain lines for logs, without control characters."""

    first = ""  # beside the empty bar

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, *, label: str = ""
    ) -> None:
        self._console = console
        self._label = label
        self._clock = clock
        self._bar = Bar(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )

    def start(self, total: int | None) -> None:
        """Show the empty bar and start the clock."""
        self._total: int | None = total
        self._done: int = 0
        self._start = self._said = self._clock()
        self._task = self._bar.add_task(self._label + self.first, total=total)
        self._bar.start()

    def finish(self) -> None:
        """Remove the bar."""
        if not self._bar.disable:  # otherwise a log would end with an empty line
            self._bar.stop()

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _show(self, line: str) -> None:
        """Update the bar, or print a line if the last one is old."""
        line = self._label + line
        self._bar.update(self._task, completed=self._done, description=line)
        if self._bar.disable and self._clock() - self._said >= _LINE_EVERY:
            self._said = self._clock()
            self._console.print(line, soft_wrap=True)


class BytesProgress(_Display):
    """Bytes read and written, their rate, the time left and the last finished item.

    Bytes that an earlier run finished count as done, but not for the rate.
    """

    first = "reading"
    _resumed = 0

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        self._done += size
        self._resumed += size if resumed else 0
        self._show(self._line(what))

    def _line(self, what: str) -> str:
        total = self._total or 0
        parts = [f"{format_size(self._done)} of {format_size(total)}"]
        elapsed, moved = self._elapsed, self._done - self._resumed
        if elapsed > 0 and moved > 0:
            rate = moved / elapsed
            parts += [
                f"{format_size(int(rate))}/s",
                f"{format_seconds((total - self._done) / rate)} left",
            ]
        return ", ".join([*parts, printable(what)])


class ExamplesProgress(_Display):
    """Examples done, their rate and the time left."""

    first = "running"

    def advance(self, count: int) -> None:
        self._done += count
        self._show(self.line())

    def line(self) -> str:
        of = "" if self._total is None else f" of {self._total}"
        parts = [f"{self._done}{of} examples"]
        elapsed = self._elapsed
        if elapsed > 0 and self._done:
            rate = self._done / elapsed
            parts.append(f"{rate:.3g}/s")
            if self._total is not None:
                parts.append(f"{format_seconds((self._total - self._done) / rate)} left")
        return ", ".join(parts)


class ScoringProgress(_Display):
    """Models scored, the one being scored, and the time left."""

    first = "scoring"
    started = False
    _label_now = ""

    def start(self, total: int | None) -> None:
        self.started = True
        super().start(total)

    def begin(self, label: str) -> None:
        """Start with the next model; a log gets a line for each model, which may take hours to score."""
        self._label_now = label
        self._said = self._clock() - _LINE_EVERY
        self._show(self.line())

    def advance(self) -> None:
        """Count a model that has been scored, or could not be."""
        self._done += 1

    def line(self) -> str:
        total = self._total or 0
        now = f"scoring {printable(self._label_now)}: " if self._done < total else ""
        parts = [f"{now}{self._done} of {counted(total, 'model')} scored"]
        if self._done:
            left = self._elapsed / self._done * (total - self._done)
            parts.append(f"about {format_seconds(left)} left")
        return ", ".join(parts)


@contextmanager
def scoring_shown(resumed: str) -> Generator[ScoringProgress]:
    """Show how far scoring is; an interruption says how to go on, and what --resume does then."""
    shown = ScoringProgress(stderr())
    try:
        yield shown
    except KeyboardInterrupt:
        if shown.started:
            raise KeyboardInterrupt(
                f"interrupted; run again with --resume, which {resumed}"
            ) from None
        raise
