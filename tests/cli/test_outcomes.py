"""How commands end: exit codes, messages, and nothing left behind."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge as covmerge_in_python
from covmerge.errors import CheckFailed, TensorError
from covmerge.front import api
from covmerge.front.cli import merging, outcome
from covmerge.maths.methods.other_names import OTHER_NAMES
from covmerge.methods import registry
from tests.cli.runs import covmerge, flags, save_plain, words, write_recipe
from tests.e2e.test_resume import PARTIAL
from tests.e2e.test_resume import save_plain as save_large
from tests.held import COMMAND_LINE, held, journaled, wait_until

BAD = {
    "no base": (["--expert=a=a", "OUT"], "no base is given: pass --base"),
    "no experts": (["--base=base.safetensors", "OUT"], "no experts are given"),
    "no out": (["FLAGS"], "no output folder is given"),
    "recipe without out": (["RECIPE"], "no output folder is given: covmerge merge"),
    "recipe and experts": (["RECIPE", "OUT", "--expert=a=x"], "which of the two is meant?"),
    "recipe not there": (["nothing.yml", "OUT"], "nothing.yml: the recipe cannot be read"),
    "expert twice": (["FLAGS", "--expert=a=x", "OUT"], "--expert gives 'a' twice"),
    "expert not a pair": (["FLAGS", "--expert=x", "OUT"], "--expert 'x' is not NAME=VALUE"),
    "expert not there": (["FLAGS", "--expert=c=./nowhere", "OUT"], "nowhere"),
    "base not there": (["--base=./nowhere", "--expert=a=./nothing", "OUT"], "nowhere"),
    "base twice": (["FLAGS", "--base=./nowhere", "OUT"], "--base stands 2 times"),
    "method": (["FLAGS", "--method=acee", "OUT"], "Did you mean 'ace'?"),
    "parameter": (
        ["FLAGS", "--method=ace", "--set=epss=1", "OUT"],
        "no parameter 'epss'. Did you mean 'eps'?",
    ),
    "parameter value": (["FLAGS", "--method=ace", "--set=eps=-1", "OUT"], "eps = -1"),
    "tensors key": (["FLAGS", "--tensors=embedings=base", "OUT"], "Did you mean 'embeddings'?"),
    "weight": (["FLAGS", "--weight=a=0", "OUT"], "--weight a is 0"),
    "dtype": (["FLAGS", "--dtype=int8", "OUT"], "dtype is 'int8'"),
    "shard size": (["FLAGS", "--shard-size=5Gb", "OUT"], "unknown unit 'Gb'"),
    "max memory": (["FLAGS", "--max-memory=little", "OUT"], "'little' is not a size"),
    "too little memory": (["FLAGS", "--max-memory=1MB", "OUT"], "are allowed (--max-memory)"),
    "threads": (["FLAGS", "--threads=0", "OUT"], "--threads"),
    "device": (["FLAGS", "--device=cuda:99", "OUT"], "--device cuda:99 cannot be used here"),
    "unknown flag": (["FLAGS", "--turbo", "OUT"], "--turbo"),
    "three paths": (["a", "b", "c"], "c"),
    "out is an input": (["FLAGS", "base.safetensors"], "overlap: choose an output elsewhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, models, monkeypatch):
    monkeypatch.chdir(models)
    recipe = write_recipe(models)
    arguments, message = BAD[case]
    places = {"FLAGS": flags(models), "RECIPE": [recipe], "OUT": [models / "out"]}
    before = sorted(models.iterdir())
    given = [part for argument in arguments for part in places.get(argument, [argument])]
    ran = covmerge("merge", *given, code=2)
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    assert sorted(models.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paramters: {}", "recipe.yml:5: unknown key 'paramters' in the recipe. Did you mean"),
        ("method: [", "not valid YAML"),
        ("merge_method: ties", "unknown key 'base'"),
        ("rules: [{role: nrm, use: base}]", "recipe.yml:5"),
    ],
)
def test_bad_recipe(models, text, message):
    recipe = write_recipe(models, text)
    ran = covmerge("merge", recipe, models / "out", code=2)
    assert ran.stderr.startswith("error: ")
    assert message in ran.stderr
    assert not (models / "out").exists()


def test_bad_tensors_leave_nothing_behind(models):
    broken = load_file(models / "b.safetensors")
    broken["layers.1.mlp.up_proj.weight"][2, 3] = torch.inf
    save_file(broken, models / "b.safetensors")
    before = sorted(models.iterdir())
    ran = covmerge("merge", *flags(models), models / "out", "--json", code=2)
    assert "'layers.1.mlp.up_proj.weight' of expert 'b' holds 1 NaN or Inf" in ran.stderr
    assert ran.stdout == ""
    assert sorted(models.iterdir()) == before


def replace_run(monkeypatch, outcome):
    def run(*args, **options):
        raise outcome

    monkeypatch.setattr(api, "run_recipe", run)


def test_a_failed_check_exits_with_1(models, monkeypatch):
    replace_run(monkeypatch, CheckFailed("out fails its verification. finite: w"))
    ran = covmerge("merge", *flags(models), models / "out", code=1)
    assert ran.stderr == "error: out fails its verification. finite: w\n"


REFUSED = [
    MemoryError(),
    RuntimeError("can't start new thread"),
    RuntimeError("std::bad_alloc"),  # as torch passes C++'s exception on
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]


@pytest.mark.parametrize("error", REFUSED, ids=str)
def test_memory_that_the_system_refuses_exits_with_2(models, monkeypatch, error):
    replace_run(monkeypatch, error)
    ran = covmerge("merge", *flags(models), models / "out", code=2)
    assert words(ran.stderr).startswith("error: the memory is used up (")
    assert "fewer --workers and --threads" in words(ran.stderr)


def test_memory_that_is_refused_while_a_source_is_opened_is_no_wrong_path(models, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("covmerge.files.checkpoints.open.open_adapter_file", refuse)
    ran = covmerge("merge", *flags(models), models / "out", code=2)
    assert "correct the path" not in ran.stderr
    assert words(ran.stderr).startswith("error: the memory is used up (can't start new thread)")


def test_an_interrupt_exits_with_130_and_a_hint(models, monkeypatch):
    replace_run(monkeypatch, KeyboardInterrupt())
    ran = covmerge("merge", *flags(models), models / "out", code=130)
    assert (ran.stdout, ran.stderr) == ("", "interrupted; run again with --resume\n")


def test_sigterm_says_what_an_interrupt_says(models, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(outcome, "_terminated", [])

    def run(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(api, "run_recipe", run)
    try:
        outcome.interrupt_on_sigterm()
        ran = covmerge("merge", *flags(models), models / "out", code=143)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ran.stdout, ran.stderr) == ("", "interrupted; run again with --resume\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_before_a_command_has_begun(monkeypatch, capsys, number, code):
    before = {own: signal.getsignal(own) for own in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(outcome, "_terminated", [])

    def begin():
        os.kill(os.getpid(), number)
        time.sleep(10)

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run aside
        with pytest.raises(SystemExit) as ended, outcome.interruptible():
            begin()
        assert (ended.value.code, capsys.readouterr().err) == (code, "interrupted\n")
        with pytest.raises(SystemExit) as ended, outcome.interruptible():
            sys.exit(130)  # what typer makes of both
        assert ended.value.code == code
    finally:
        for own, handler in before.items():
            signal.signal(own, handler)


def test_errors_name_the_fix_in_the_form_that_was_typed(models, monkeypatch):
    monkeypatch.chdir(models)
    extra = load_file(models / "a.safetensors")
    save_file({**extra, "more": torch.ones(2)}, models / "a.safetensors")
    recipe = write_recipe(models)
    typed = covmerge("merge", *flags(models), "out", code=2).stderr
    assert "set --tensors extra=ignore;" in typed
    written = covmerge("merge", recipe, "out", code=2).stderr
    assert "`tensors: {extra: ignore}`" in written
    with pytest.raises(TensorError, match=r'set tensors=\{"extra": "ignore"\};'):
        covmerge_in_python.merge("base.safetensors", {"a": "a.safetensors"})
    unchanged = ["--expert=c=base.safetensors", "--tensors=extra=ignore"]
    typed = covmerge("merge", *flags(models), *unchanged, "out", code=2)
    assert "go on with --allow unchanged-expert" in typed.stderr
    experts = "{b: b.safetensors, c: base.safetensors}"
    recipe.write_text(f"base: base.safetensors\nexperts: {experts}\nmethod: ace\n")
    assert (
        "go on with `allow: [unchanged-expert]`" in covmerge("merge", recipe, "out", code=2).stderr
    )


def test_a_dry_run_says_that_the_output_is_there(models):
    covmerge("merge", *flags(models), "--method=average", models / "out")
    dry = covmerge("merge", *flags(models), models / "out", "--dry-run", code=2)
    assert "out exists: pass --overwrite" in dry.stderr and "disk" in dry.stdout
    covmerge("merge", *flags(models), models / "out", "--dry-run", "--overwrite")
    (models / "out" / "mine.txt").write_text("x")
    dry = covmerge("merge", *flags(models), models / "out", "--dry-run", "--overwrite", code=2)
    assert "mine.txt" in dry.stderr


def test_what_others_call_a_method_is_known(models):
    def said(name):
        return covmerge("merge", *flags(models), "--method", name, models / "out", code=2).stderr

    assert "Here it is `dare_task_arithmetic`" in said("dare_linear")
    assert "Here it is `tsv_m`" in said("TSVM")
    assert "Did you mean 'iso_c'?" in said("Iso-C")
    assert "Did you mean 'ties'?" in said("tiess")
    for name, own in OTHER_NAMES.items():
        assert name not in registry, name
        assert re.search(r"`([\w+]+)`", own)[1] in registry, name


def test_an_interrupt_elsewhere_has_no_hint(models, monkeypatch):
    def plan(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "measure_speed", plan)
    ran = covmerge("merge", *flags(models), "--dry-run", code=130)
    assert ran.stderr == "interrupted\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_exits_with_2(models, monkeypatch, number):
    replace_run(monkeypatch, OSError(number, os.strerror(number), "/disk/out"))
    ran = covmerge("merge", *flags(models), models / "out", code=2)
    assert ran.stderr.startswith(f"error: no room for /disk/out ({os.strerror(number)}): free some")


def test_what_nobody_expected_keeps_its_traceback(models, monkeypatch):
    replace_run(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        covmerge("merge", *flags(models), models / "out")
    replace_run(monkeypatch, OSError(errno.EIO, "broken disk"))
    with pytest.raises(OSError, match="broken disk"):
        covmerge("merge", *flags(models), models / "out")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_memory_beyond_the_limit_is_said(models, monkeypatch, options):
    merged = merging._merged

    def large(*given):
        result = merged(*given)
        return replace(result, run={**result.run, "peak_memory": 200 * 10**9})

    monkeypatch.setattr(merging, "_merged", large)
    limit = ["--max-memory", "150GB"]
    ran = covmerge("merge", *flags(models), models / "out", *limit, *options)
    assert ran.stderr.startswith(
        "warning: the peak memory was 200 GB, more than --max-memory 150 GB"
    )


def test_python_m_covmerge(tmp_path):
    save_plain(tmp_path)
    arguments = ["merge", *map(str, flags(tmp_path)), "--threads=1", "--json", "./out"]
    done = subprocess.run(
        [sys.executable, "-m", "covmerge", *arguments], capture_output=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"{")


@pytest.mark.slow
def test_ctrl_c_then_resume(tmp_path):
    base, experts = save_large(tmp_path)
    named = [f"--expert={name}={path}" for name, path in experts.items()]
    arguments = ["merge", "--base", base, *named, "--threads=1", tmp_path / "out"]
    last = "layers.9.proj.weight"
    journal = tmp_path / PARTIAL / "journal.jsonl"
    with held(COMMAND_LINE, *arguments, before=last) as process:
        wait_until(partial(journaled, journal, 3), process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "interrupted; run again with --resume\n"
    assert not (tmp_path / "out").exists()
    resumed = covmerge(*arguments, "--resume", "--json").json
    assert resumed["run"]["resumed_items"] > 0


# Each try is a fork of a process that has imported torch, which takes seconds; it ends as Python does.
STARTING = """
import os, shutil, signal, sys, threading
import covmerge.front.job
from covmerge.front.cli import main

partial = sys.argv.pop(1)
for name in ["covmerge_0", "covmerge_1", "covmerge-hash_0"] * 3:
    if os.fork() == 0:
        break
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)
    shutil.rmtree(partial, ignore_errors=True)
else:
    sys.exit()
start = threading.Thread.start

def interrupted(self):
    if self.name == name:
        wait = self._started.wait
        self._started.wait = lambda: (os.kill(os.getpid(), signal.SIGINT), wait())[1]
    start(self)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread.start = interrupted
main()
"""


@pytest.mark.slow
def test_ctrl_c_while_a_thread_starts(tmp_path):
    """A thread that is left in torch when Python exits aborts the process."""
    base, experts = save_large(tmp_path)
    named = [f"--expert={name}={path}" for name, path in experts.items()]
    before = sorted(tmp_path.iterdir())
    arguments = ["merge", "--base", base, *named, "--threads=1", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", STARTING, tmp_path / PARTIAL, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "130\n" * 9
    assert done.stderr == "interrupted; run again with --resume\n" * 9
    assert sorted(tmp_path.iterdir()) == before


def test_a_reader_that_stops_reading_is_no_error():
    """As of `covmerge compare --help | head -1`; rich ends the program."""
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "covmerge", "compare", "--help"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")
