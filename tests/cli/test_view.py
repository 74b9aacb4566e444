"""`covmerge view`: says its address, ends on Ctrl-C, and refuses what cannot be weighed."""

import os
import signal
import time
import urllib.request

import pytest

from tests.cli.runs import covmerge as command
from tests.cli.runs import save_plain, write_recipe
from tests.cli.runs import words as flowing
from tests.forked import Forked

PROGRAM = "from covmerge.front.cli import main; import sys; sys.argv[0] = 'covmerge'; main()"


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is another thing there")
def test_it_serves_until_it_is_interrupted(tmp_path):
    recipe = write_recipe(save_plain(tmp_path), "method: average")
    said = tmp_path / "said"
    program = f"import sys; sys.stdout = open({str(said)!r}, 'w', buffering=1); {PROGRAM}"
    process = Forked(program, "view", recipe, "--no-browser")
    try:
        until = time.monotonic() + 120
        while "Ctrl-C" not in (said.read_text() if said.exists() else ""):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        url = said.read_text().split()[0]
        with urllib.request.urlopen(f"{url}scene.json", timeout=10) as answer:
            assert b'"a"' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
    assert said.read_text().endswith("ended\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["a.safetensors", "b.safetensors", "base.safetensors", "recipe.yml", "said"]
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "nothing is not there: name a folder that `covmerge merge` wrote, or a recipe"),
        ("", "covmerge.json"),
        ("s3://bucket/out", "s3"),
    ],
)
def test_what_cannot_be_looked_at_is_bad_input(tmp_path, path, words):
    place = path if "://" in path else tmp_path / path
    assert words in flowing(command("view", place, "--no-browser", code=2).stderr)


def test_a_browser_is_opened_unless_it_is_not_wanted(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def interrupted(server):
        until = time.monotonic() + 10
        while not opened and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("covmerge.front.viewer.Server.serve", interrupted)
    recipe = write_recipe(save_plain(tmp_path))
    url = command("view", recipe).stdout.split()[0]
    assert opened == [url]
