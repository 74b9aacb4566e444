"""`covmerge collect`: what it prints, and how it ends."""

import re

import pytest
from rich.console import Console

from covmerge.front.cli.progress import ExamplesProgress
from covmerge.plan.statistics import StatisticsFile
from tests.cli.runs import covmerge, words
from tests.cli.test_light import printed_without_torch
from tests.statistics.models import classifier, save, write_texts

OUT = "a.covstats.safetensors"


@pytest.fixture
def expert(tmp_path):
    write_texts(tmp_path / "a.txt")
    return save(classifier(), tmp_path / "m")


def test_good(expert, tmp_path):
    ran = covmerge("collect", expert, tmp_path / "a.txt", tmp_path / OUT)
    (row,) = re.findall(
        r"^ ?(a\.covstats\S*) +gram +(\d+) +(\S+) +(.*?B) +(.*) s +$", ran.stdout, re.M
    )
    assert row[0] == OUT
    assert int(row[1]) == 13
    assert row[2].startswith("12–")
    assert "note: 'bert.pooler.dense.weight': 12 inputs for 16 dimensions" in ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert StatisticsFile.open(tmp_path / OUT).about.examples == 12


def test_json_and_options(expert, tmp_path):
    kinds = ["--kind=gram", "--kind=fisher"]
    how = ["--max-examples=5", "--batch-size=2", "--max-length=3", "--seed=1", "--json"]
    ran = covmerge("collect", expert, tmp_path / "a.txt", tmp_path / OUT, *kinds, *how)
    (file,) = ran.json["files"]
    assert file["path"] == str(tmp_path / OUT)
    assert file["examples"] == 5
    assert file["kinds"]["gram"]["rows"][0] == 5
    assert file["kinds"]["gram"]["rows"][1] <= 15
    assert file["kinds"]["gram"]["stored"] < file["kinds"]["gram"]["tensors"]
    assert file["kinds"]["fisher"]["rows"] == [5, 5]
    assert file["bytes"] == (tmp_path / OUT).stat().st_size
    again = covmerge("collect", expert, tmp_path / "a.txt", tmp_path / OUT, code=2)
    assert "exists: choose another output, or pass --overwrite" in again.stderr
    covmerge("collect", expert, tmp_path / "a.txt", tmp_path / OUT, "--overwrite")


BAD = {
    "nothing": ([], "a model, a file of examples and a file to write are needed"),
    "no out": (["m", "a.txt"], "are needed: covmerge collect EXPERT DATA OUT"),
    "no model": (["nowhere", "a.txt", OUT], "no such file or folder: nowhere"),
    "no data": (["m", "b.txt", OUT], "b.txt cannot be read: No such file"),
    "kind": (["m", "a.txt", OUT, "--kind=grem"], "no statistic 'grem'. Did you mean 'gram'?"),
    "labels that nothing is of": (
        ["m", "a.txt", OUT, "--labels=data"],
        "--labels data is for Fisher information, and none is asked for",
    ),
    "labels": (["m", "a.txt", OUT, "--labels=mine"], "not of 'mine'"),
    "suffix": (["m", "a.txt", "a.safetensors"], "does not end with .covstats.safetensors"),
    "folder": (["m", "a.txt", f"no/{OUT}"], "there is no folder no"),
    "device": (["m", "a.txt", OUT, "--device=cuda:99"], "--device cuda:99 cannot be used here"),
    "batch size": (["m", "a.txt", OUT, "--batch-size=0"], "--batch-size"),
    "a seed of no generator": (
        ["m", OUT, "--inputs=generated", "--seed=99999999999999999999999"],
        "seed is 99999999999999999999999: pass a number from 0",
    ),
    "a seed below 0": (
        ["m", OUT, "--inputs=generated", "--seed=-1"],
        "seed is -1: pass a number from 0",
    ),
    "memory": (["m", "a.txt", OUT, "--max-memory=300MB"], "are allowed (--max-memory)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, expert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    before = sorted(tmp_path.iterdir())
    ran = covmerge("collect", *arguments, code=2)
    assert message in words(ran.stderr)
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_help_comes_without_torch_and_fits():
    text, _ = printed_without_torch([["collect", "--help"]])
    assert max(map(len, text.splitlines())) <= 80
    for flag in (
        "kind", "max-examples", "labels", "seed", "max-length", "tokenizer", "text-column",
        "pair-column", "label-column", "base", "batch-size",
        "device", "max-memory", "overwrite", "json",
    ):  # fmt: skip
        assert f"--{flag} " in text


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (40, "10 of 40 examples, 0.5/s, 1 min 00 s left"),
        (None, "10 examples, 0.5/s"),
    ],
)
def test_progress_in_a_log(total, expected):
    clock = Clock()
    console = Console(record=True, force_terminal=False, width=80)
    progress = ExamplesProgress(console, clock)
    progress.start(total)
    clock.now = 5.0
    progress.advance(5)
    assert console.export_text(clear=False) == ""
    clock.now = 20.0
    progress.advance(5)
    progress.finish()
    assert console.export_text().strip() == expected


def test_progress_on_a_terminal_is_gone_at_the_end():
    console = Console(force_terminal=True, width=80, record=True, legacy_windows=False)
    progress = ExamplesProgress(console)
    progress.start(8)
    progress.advance(4)
    assert "4 of 8 examples" in progress.line()
    progress.finish()


def test_random_inputs_on_the_command_line(tmp_path):
    refused = covmerge(
        "collect", "m", tmp_path / OUT, "--inputs", "random", "--start", "bos", code=2
    )
    assert "--start bos belongs to --inputs generated" in words(refused.stderr)
    refused = covmerge(
        "collect", "m", tmp_path / OUT, "--inputs", "random", "--tokens", "5", code=2
    )
    assert "random inputs are not written: leave out --tokens" in words(refused.stderr)
    refused = covmerge("collect", "m", "data.txt", tmp_path / OUT, "--inputs", "random", code=2)
    assert "--inputs random needs no data.txt" in words(refused.stderr)
