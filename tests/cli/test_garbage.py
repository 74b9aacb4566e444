"""The process of a command does not spend its time looking for garbage."""

import subprocess
import sys

STEPS = """
import gc
{begin}
class Heard:
    def __init__(self, when):
        self.when, self.itself = when, self
    def __del__(self):
        print(self.when, flush=True)
gc.freeze()  # what was imported
Heard("on the way")
kept = [[] for _ in range(20_000)]
Heard("at the end")
"""
BEGIN = "from covmerge.front.cli import collect_seldom; collect_seldom()"


def said(begin):
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(begin=begin)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_neither_on_the_way_nor_at_the_end():
    assert said(begin="") == ["on the way", "at the end"]
    assert said(begin=BEGIN) == []
