import io

import pytest
from rich.console import Console

from covmerge.base.sizes import format_size
from covmerge.front import api
from covmerge.front.cli.console import format_seconds
from covmerge.front.cli.progress import BytesProgress, ScoringProgress
from covmerge.plan.recipe import parse_recipe
from tests.cli.runs import save_plain


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def plan(tmp_path):
    save_plain(tmp_path, layers=4, width=16)
    sources = {name: str(tmp_path / f"{name}.safetensors") for name in ("a", "b")}
    recipe = parse_recipe({"base": str(tmp_path / "base.safetensors"), "experts": sources})
    return api.plan_recipe(recipe)[0]


def console(**options):
    return Console(file=io.StringIO(), width=120, **options)


def size(items):
    return sum(item.read_bytes + item.write_bytes for item in items)


def advance(progress, item, resumed=False):
    progress.advance(item.tensor.name, size([item]), resumed=resumed)


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb")])
def test_a_log_and_a_dumb_terminal_get_no_bar(monkeypatch, plan, terminal, term):
    monkeypatch.setenv("TERM", term)
    log = console(force_terminal=terminal)
    progress = BytesProgress(log)
    progress.start(size(plan.items))
    advance(progress, plan.items[0])
    progress.finish()
    assert log.file.getvalue() == ""


def test_a_line_every_ten_seconds_at_most(plan):
    clock, log = Clock(), console()
    progress = BytesProgress(log, clock)
    progress.start(size(plan.items))
    for item in plan.items:
        clock.now += 4
        advance(progress, item)
    progress.finish()
    lines = log.file.getvalue().splitlines()
    assert len(lines) == len(plan.items) * 4 // 12
    assert "\x1b" not in "".join(lines)
    done, total = size(plan.items[:3]), size(plan.items)
    assert lines[0] == (
        f"{format_size(done)} of {format_size(total)}, {format_size(done // 12)}/s, "
        f"{format_seconds((total - done) / (done / 12))} left, {plan.items[2].tensor.name}"
    )


def test_resumed_work_counts_as_done_and_not_as_speed(plan):
    clock, log = Clock(), console()
    progress = BytesProgress(log, clock)
    progress.start(size(plan.items))
    clock.now += 10
    advance(progress, plan.items[0], resumed=True)
    first = log.file.getvalue()
    assert "/s" not in first
    assert " of " in first
    clock.now += 10
    advance(progress, plan.items[1])
    assert f"{format_size(size(plan.items[1:2]) // 20)}/s" in log.file.getvalue()


def test_a_bar_on_a_terminal(plan):
    terminal = console(force_terminal=True)
    progress = BytesProgress(terminal)
    progress.start(size(plan.items))
    for item in plan.items:
        advance(progress, item)
    progress._bar.refresh()
    progress.finish()
    shown = terminal.file.getvalue()
    assert plan.items[-1].tensor.name in shown
    assert " 0.00 s left" in shown
    assert shown.endswith("\x1b[2K")  # the bar is gone when the report comes


def test_a_second_pass_says_what_it_is_for(plan):
    clock, log = Clock(), console()
    progress = BytesProgress(log, clock, label="report: ")
    progress.start(size(plan.items))
    clock.now += 20
    advance(progress, plan.items[0])
    assert log.file.getvalue().startswith("report: ")


def test_scoring_says_which_model_is_in_hand_and_how_long_the_others_take():
    clock, shown = Clock(), console()
    progress = ScoringProgress(shown, clock)
    progress.start(3)
    for label in ("ties", "auto", "iso_c"):
        progress.begin(label)
        clock.now += 60
        progress.advance()
    progress.finish()
    assert shown.file.getvalue().splitlines() == [
        "scoring ties: 0 of 3 models scored",
        "scoring auto: 1 of 3 models scored, about 2 min 00 s left",
        "scoring iso_c: 2 of 3 models scored, about 1 min 00 s left",
    ]
