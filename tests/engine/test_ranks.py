"""Ranks: as many processes as you like do one merge, with the same bytes, whatever becomes of them."""

import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, CheckpointError, InputError, ResourceError, TensorError
from covmerge.files.checkpoints.base import Content
from covmerge.files.checkpoints.journal import sealed
from covmerge.files.stores.local import LocalFolder
from covmerge.front import api
from covmerge.methods import registry
from covmerge.methods.registry import GlobalPass
from covmerge.plan.recipe import dump_recipe, parse_recipe
from covmerge.run.engine.executor import own_first, shares
from covmerge.run.engine.hashing import WeightsCheck
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.ranks.rank import Rank, find_rank
from covmerge.run.engine.ranks.reading import SharedHashing, Sharing
from covmerge.run.engine.ranks.session import LeaderGoneError, Session
from tests.advised import advice
from tests.e2e.test_resume import save_plain
from tests.folders import contents
from tests.forked import Forked, fork_workers
from tests.held import COMMAND_LINE, wait_until
from tests.interrupted import InterruptAfter

PATIENCE = 3.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return save_plain(folder, layers=12, width=64)


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    """What one process writes, by method."""
    base, experts = plain
    folder = tmp_path_factory.mktemp("whole")
    for method in ("ace", "ties"):
        covmerge.merge(base, experts, method, folder / method)
    return {method: contents(folder / method) for method in ("ace", "ties")}


def recipe_of(plain, method):
    base, experts = plain
    named = {name: str(path) for name, path in experts.items()}
    return parse_recipe({"base": str(base), "experts": named, "method": method})


def with_output(recipe, **changed):
    return parse_recipe({**dump_recipe(recipe), "output": changed})


def merge_rank(plain, method, out, number, world, **options):
    """One rank, in a thread of this process."""
    given = {"patience": PATIENCE, **options}
    return api.run_recipe(
        recipe_of(plain, method), out, RunOptions(rank=Rank(number, world), **given)
    )


def merge_ranks(plain, method, out, world, **options):
    """All ranks at once: their results, or errors, in order."""
    with ThreadPoolExecutor(world) as pool:
        each = [
            pool.submit(merge_rank, plain, method, out, number, world, **options)
            for number in range(world)
        ]
        return [one.exception() or one.result() for one in each]


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ace", "ties"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_same_bytes_for_any_number_of_ranks(plain, whole, tmp_path, together, method, world):
    together(world)
    results = merge_ranks(plain, method, tmp_path / "out", world)
    assert contents(tmp_path / "out") == whole[method]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert [result.path for result in results] == [tmp_path / "out"] * world
    assert [result.verification is not None for result in results] == [True] + [False] * (world - 1)
    for result in results[1:]:
        assert result.stats["totals"] == results[0].stats["totals"]
        assert "another rank has published" in result.notes[0]
    assert world == 1 or sum(result.run["own_items"] for result in results[1:]) > 0


@pytest.mark.slow
def test_ranks_of_processes(plain, whole, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    merge_ranks(plain, "ties", tmp_path / "out", 2, workers=2)
    assert contents(tmp_path / "out") == whole["ties"]


@pytest.fixture
def together(monkeypatch):
    """Have ranks wait for each other once, and take a moment for each item, so that each has some."""
    from covmerge.run.engine import threads
    from covmerge.run.engine.ranks.executor import Ranks

    run, read = Ranks.run, threads.read_inputs

    def ranks_of(world):
        met = threading.Barrier(world)

        def waiting(self, batches, task):
            if self._stages == 0:
                met.wait(30)
            return run(self, batches, task)

        monkeypatch.setattr(Ranks, "run", waiting)
        monkeypatch.setattr(
            threads, "read_inputs", lambda *given: (time.sleep(0.02), read(*given))[1]
        )

    return ranks_of


def command(plain, method, out, number, world, *more, patience=5):
    base, experts = plain
    sources = [f"--expert={name}={path}" for name, path in experts.items()]
    arguments = ["merge", "--base", base, *sources, f"--method={method}", "--executor=ranks"]
    environment = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(world)}
    return [*arguments, f"--patience={patience}", "--threads=1", *more, out], environment


# Reads nothing before a file is there; or hashes nothing.
_WAIT = """
import sys, time
from pathlib import Path
import covmerge.run.engine.threads as reader
from covmerge.run.engine.ranks.reading import SharedHashing
from covmerge.run.engine.ranks.reading import Sharing
from covmerge.run.engine.hashing import WeightsCheck

go = Path(sys.argv.pop(1))

def waiting(function):
    def later(*given):
        while not go.exists():
            time.sleep(0.005)
        return function(*given)
    return later

"""
_READING = "reader.read_inputs = waiting(reader.read_inputs)\n"
_HASHING = """
SharedHashing._hash = waiting(SharedHashing._hash)
Sharing._help = lambda self: None  # one thread, so that each has a file
"""
_VERIFYING = "WeightsCheck.__call__ = waiting(WeightsCheck.__call__)\n"


@contextmanager
def started(plain, method, out, gos, waits=_READING):
    """A process for each rank, which reads, or hashes, when its file of `gos` is there."""
    with ExitStack() as stack:
        ranks = []
        for number, go in enumerate(gos):
            given, environment = command(plain, method, out, number, len(gos))
            program = _WAIT + waits + COMMAND_LINE
            ranks.append(Forked(program, go, *given, environment=environment))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        yield ranks


def has_claimed(session, number, what="[0-9]*"):
    return any(f"-{number}." in claim.read_text() for claim in session.glob(f"claims/{what}"))


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ace", "ties"])
@pytest.mark.parametrize("killed", [0, 1])
def test_what_a_killed_rank_had_is_done_by_others(plain, whole, tmp_path, method, killed):
    """In the merge or in a pass before it; the one that leads, or another."""
    out, go, never = tmp_path / "out", tmp_path / "go", tmp_path / "never"
    session = tmp_path / ".out.covmerge-partial" / "ranks" / "0"
    gos = [never if number == killed else go for number in range(3)]
    with started(plain, method, out, gos) as ranks:
        wait_until(lambda: has_claimed(session, killed), ranks[killed])
        wait_until(lambda: len(list(session.glob("*.jsonl"))) == 3, ranks[killed])
        time.sleep(2)  # the others have seen it alive
        ranks[killed].kill()
        go.touch()
        said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks].count(0) == 2, said
    assert ranks[killed].returncode == -signal.SIGKILL
    assert contents(out) == whole[method]
    assert sorted(tmp_path.iterdir()) == [go, out]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_what_a_killed_rank_would_have_hashed_is_hashed_by_others(plain, whole, tmp_path, killed):
    out, go, never = tmp_path / "out", tmp_path / "go", tmp_path / "never"
    session = tmp_path / ".out.covmerge-partial" / "ranks" / "0"
    gos = [never if number == killed else go for number in range(2)]
    with started(plain, "ace", out, gos, _HASHING) as ranks:
        for number in range(2):
            wait_until(partial(has_claimed, session, number, "hashes-*"), ranks[number])
        time.sleep(2)  # the other has seen it alive
        ranks[killed].kill()
        go.touch()
        said = [rank.communicate() for rank in ranks]
    assert sorted(rank.returncode for rank in ranks) == [-signal.SIGKILL, 0], said
    assert contents(out) == whole["ace"]
    assert sorted(tmp_path.iterdir()) == [go, out]


def test_each_file_is_hashed_once_and_by_all(plain, whole, tmp_path, together, monkeypatch):
    together(3)
    hashed = []
    hash_one, met = SharedHashing._hash, threading.Barrier(3)

    def noted(self, name, pace):
        number = self._session.rank.number
        first = all(number != by for by, _ in hashed)
        hashed.append((number, name))
        if first:
            met.wait(30)
        return hash_one(self, name, pace)

    monkeypatch.setattr(SharedHashing, "_hash", noted)
    monkeypatch.setattr(Sharing, "_help", lambda self: None)  # one thread each
    merge_ranks(plain, "ace", tmp_path / "out", 3)
    assert contents(tmp_path / "out") == whole["ace"]
    assert len(hashed) == len({name for _, name in hashed}) == 4
    assert {number for number, _ in hashed} == {0, 1, 2}


@pytest.mark.parametrize("world", [1, 3])
def test_each_file_of_the_output_is_verified_once_and_by_all(
    plain, tmp_path, together, monkeypatch, world
):
    together(world)
    monkeypatch.setattr("covmerge.run.engine.hashing._CORES", 10**6)  # one thread each
    recipe = with_output(recipe_of(plain, "ace"), shard_size=40_000)
    api.run_recipe(recipe, tmp_path / "whole", RunOptions())
    seen, look, met = [], WeightsCheck.__call__, threading.Barrier(world)

    def noted(self, base, name):
        thread = threading.get_ident()
        first = all(thread != by for by, _ in seen)
        seen.append((thread, name))
        if first:
            met.wait(30)
        return look(self, base, name)

    monkeypatch.setattr(WeightsCheck, "__call__", noted)
    monkeypatch.setattr("tests.engine.test_ranks.recipe_of", lambda *_: recipe)
    results = merge_ranks(plain, "ace", tmp_path / "out", world)
    assert results[0].verification.ok
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    weights = {path.name for path in (tmp_path / "out").glob("model-*.safetensors")}
    assert len(weights) > 4
    assert sorted(name for _, name in seen) == sorted(weights)


@pytest.mark.parametrize(
    "form", [{"format": "adapter", "rank": 4}, {"quantise": "int8-channel", "shard_size": 20_000}]
)
def test_outputs_of_which_one_rank_checks_more(plain, tmp_path, together, monkeypatch, form):
    """An adapter is its alone; of packed tensors it looks at the numbers."""
    base, experts = plain
    model = tmp_path / "base"
    model.mkdir()
    shutil.copy(base, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "none-that-is-known"}')
    recipe = with_output(recipe_of((model, experts), "average"), **form)
    api.run_recipe(recipe, tmp_path / "whole", RunOptions())
    together(2)
    monkeypatch.setattr("tests.engine.test_ranks.recipe_of", lambda *_: recipe)
    first, _ = merge_ranks(plain, "average", tmp_path / "out", 2)
    assert first.verification.ok
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_another_rank_sees_of_the_output_fails_it(plain, tmp_path, together, monkeypatch):
    together(2)
    look = WeightsCheck.__call__

    def damaged(self, base, name):
        return {**look(self, base, name), "not_finite": ["layers.0.proj.weight"]}

    monkeypatch.setattr(WeightsCheck, "__call__", damaged)
    results = merge_ranks(plain, "ace", tmp_path / "out", 2, patience=1.0)
    assert isinstance(results[0], CheckFailed)
    assert "finite: layers.0.proj.weight" in str(results[0])
    assert isinstance(results[1], InputError)  # nobody leads
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_while_ranks_hash_is_noticed(plain, tmp_path, together, monkeypatch):
    together(2)
    base, experts = plain
    changing = tmp_path / "changing.safetensors"
    shutil.copy(experts["e1"], changing)
    merged, hash_one, result = threading.Event(), SharedHashing._hash, SharedHashing.result

    def late(self, name, pace):
        merged.wait(30)
        return hash_one(self, name, pace)

    def changed(self):
        if not merged.is_set():
            os.utime(changing, ns=(0, 0))
            merged.set()
        return result(self)

    monkeypatch.setattr(SharedHashing, "_hash", late)
    monkeypatch.setattr(SharedHashing, "result", changed)
    given = base, {**experts, "e1": changing}
    results = merge_ranks(given, "average", tmp_path / "out", 2, patience=1.0)
    assert all(isinstance(one, InputError) for one in results)
    assert any("changing.safetensors changed while it was in use" in str(one) for one in results)
    assert list(tmp_path.iterdir()) == [changing]


@pytest.mark.parametrize(
    "told, said",
    [
        (
            {"of": "base w", "found": "sha256:1f"},
            r"what no rank does \(hashes of 'base w'",
        ),
        ({"of": ["base w"], "found": f"sha256:{'0' * 64}"}, "what no rank does"),
        ({"of": "base v", "found": f"sha256:{'0' * 64}"}, "is one version of covmerge"),
        ({"error": "TensorError", "message": "w has NaN"}, "^w has NaN$"),
        (
            {"of": "base w", "found": f"sha256:{'0' * 64}"},
            "has the hash sha256:0+ where",
        ),
    ],
)
def test_what_a_rank_says_of_hashes_is_checked(tmp_path, told, said):
    """One that is of another version, has failed, or reads another file of the same name."""
    session = Session(tmp_path, Rank(0, 2), PATIENCE, None)
    record = sealed({"stage": "hashes", **told}, "told")
    (tmp_path / "1.1f2e3d4c.jsonl").write_bytes(record)

    def hashed(pace):
        session.ledgers.refresh()
        return f"sha256:{'1' * 64}"

    contents = {"base": [Content("w", 1, hashed), Content("commit", 0, lambda pace: "1f2e")]}
    with (
        session,
        SharedHashing(session, contents) as hashing,
        pytest.raises(InputError, match=said),
    ):
        hashing.result()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_what_a_killed_rank_would_have_verified_is_verified_by_others(
    plain, whole, tmp_path, killed
):
    """The one that leads, or another: whichever has claimed the one file of weights."""
    out, go, never = tmp_path / "out", tmp_path / "go", tmp_path / "never"
    session = tmp_path / ".out.covmerge-partial" / "ranks" / "0"
    gos = [never if number == killed else go for number in range(2)]
    with started(plain, "ace", out, gos, _VERIFYING) as ranks:
        wait_until(lambda: any(session.glob("claims/files-*")), ranks[killed])
        time.sleep(2)  # the other has seen it alive
        ranks[killed].kill()
        go.touch()
        said = [rank.communicate() for rank in ranks]
    assert sorted(rank.returncode for rank in ranks) == [-signal.SIGKILL, 0], said
    assert contents(out) == whole["ace"]
    assert sorted(tmp_path.iterdir()) == [go, out]


@pytest.mark.slow
def test_ranks_that_were_all_killed_are_resumed_by_any_number(plain, whole, tmp_path):
    out, never = tmp_path / "out", tmp_path / "never"
    session = tmp_path / ".out.covmerge-partial" / "ranks" / "0"
    with started(plain, "ace", out, [never] * 2) as ranks:
        for number in range(2):
            wait_until(partial(has_claimed, session, number), ranks[number])
    assert not out.exists()
    with pytest.raises(InputError, match="pass resume=True to go on"):
        covmerge.merge(*plain, "ace", out)
    covmerge.merge(*plain, "ace", out, resume=True)
    assert contents(out) == whole["ace"]
    assert list(tmp_path.iterdir()) == [out]


def test_what_ranks_had_done_is_not_done_again(plain, whole, tmp_path):
    """Ctrl-C at the rank that leads; with nobody to take over, a restart believes what is there."""
    stop = InterruptAfter(5)
    with pytest.raises(KeyboardInterrupt):
        merge_rank(plain, "ace", tmp_path / "out", 0, 2, progress=stop)
    session = tmp_path / ".out.covmerge-partial" / "ranks" / "0"
    assert sum(path.read_text().count("checksum") for path in session.glob("*.jsonl")) >= 5
    first, *_ = merge_ranks(plain, "ace", tmp_path / "out", 2, resume=True)
    assert first.run["resumed_items"] >= 5
    assert contents(tmp_path / "out") == whole["ace"]


def test_a_rank_that_was_taken_for_gone_counts_nothing_twice(
    plain, whole, tmp_path, together, monkeypatch
):
    """The others void what it had counted, while it goes on as if nothing was."""
    from covmerge.run.engine.ranks import executor, ledger

    together(2)
    slow, waiting = threading.Event(), executor.settle

    def late(path, content):
        if content and "-1." in path.name and not slow.is_set():
            slow.set()
            time.sleep(3)  # far longer than anybody waits
        return waiting(path, content)

    def dead(self, every):
        if not self._path.name.startswith("1."):
            beat(self, every)

    beat = ledger.Ledger._beat
    monkeypatch.setattr(executor, "settle", late)
    monkeypatch.setattr(ledger.Ledger, "_beat", dead)
    results = merge_ranks(plain, "ties", tmp_path / "out", 2, patience=0.5)
    assert slow.is_set() and not any(isinstance(one, Exception) for one in results)
    assert contents(tmp_path / "out") == whole["ties"]


def test_what_others_voided_that_are_gone_is_counted_again(plain, whole, tmp_path, monkeypatch):
    from covmerge.run.engine.ranks import executor

    settle, voided = executor.settle, []

    def after_it_was_voided(path, content):
        if content and not voided:
            voided.append(settle(path, b""))
        return settle(path, content)

    monkeypatch.setattr(executor, "settle", after_it_was_voided)
    merge_rank(plain, "ties", tmp_path / "out", 0, 1)
    assert voided == [True]
    assert contents(tmp_path / "out") == whole["ties"]


def test_a_late_rank_finds_the_work_done(plain, tmp_path):
    merge_rank(plain, "ace", tmp_path / "out", 0, 2)
    late = merge_rank(plain, "ace", tmp_path / "out", 1, 2)
    assert late.run["own_items"] == 0
    # What is there might be what another rank is about to replace: it waits whether one leads.
    late = merge_rank(plain, "ace", tmp_path / "out", 1, 2, overwrite=True, patience=0.5)
    assert late.run["own_items"] == 0 and "another rank has published" in late.notes[0]
    said = advice("is of another recipe: pass --overwrite to replace it, or choose another name")
    with pytest.raises(InputError, match=said):
        merge_rank(plain, "ties", tmp_path / "out", 1, 2)
    with pytest.raises(InputError, match="overwrite=True to replace it"):
        merge_rank(plain, "ace", tmp_path / "out", 0, 2)
    merge_rank(plain, "ties", tmp_path / "another", 0, 1)
    merge_rank(plain, "ties", tmp_path / "out", 0, 1, overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "another")


def test_an_output_is_replaced_by_ranks(plain, whole, tmp_path):
    covmerge.merge(*plain, "average", tmp_path / "out")
    results = merge_ranks(plain, "ace", tmp_path / "out", 2, overwrite=True)
    assert not any(isinstance(one, Exception) for one in results)
    assert contents(tmp_path / "out") == whole["ace"]


def test_an_error_of_one_ends_all(plain, tmp_path, together):
    together(3)
    base, experts = plain
    bad = load_file(experts["e1"])
    bad["layers.7.proj.weight"][2, 3] = float("nan")
    save_file(bad, tmp_path / "bad.safetensors")
    given = base, {**experts, "e1": tmp_path / "bad.safetensors"}
    results = merge_ranks(given, "average", tmp_path / "out", 3, patience=1.0)
    assert all(isinstance(one, InputError) for one in results)
    assert any(isinstance(one, TensorError) and "layers.7" in str(one) for one in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.safetensors"]


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (
            SystemExit,
            TensorError,
            "'task_arithmetic' tried to end the program .* for its global pass",
        ),
        (MemoryError, ResourceError, "'task_arithmetic' had no memory for its global pass"),
    ],
)
def test_a_global_pass_that_ends_the_program_ends_all_ranks(
    plain, tmp_path, monkeypatch, raised, error, said
):
    """Its rank ended without a word, and what was unfinished stayed."""

    def ends(*given):
        raise raised

    own = replace(registry.get("task_arithmetic"), global_pass=GlobalPass(lambda given: 0.5, ends))
    monkeypatch.setitem(registry._declared, "task_arithmetic", own)
    results = merge_ranks(plain, "task_arithmetic", tmp_path / "out", 2, patience=1.0)
    assert all(isinstance(one, InputError | ResourceError) for one in results)
    assert any(isinstance(one, error) and re.search(said, str(one)) for one in results)
    assert not any(tmp_path.iterdir())


def test_a_rank_without_one_that_leads(plain, tmp_path):
    said = advice(
        "found no rank that leads the merge in {} for {} s: it did not start (then its own"
    )
    with pytest.raises(InputError, match=f"rank 1 of 2 {said}"):
        merge_rank(plain, "ace", tmp_path / "out", 1, 2, patience=0.3)
    results = merge_ranks(plain, "ace", tmp_path / "out", 2)
    assert not any(isinstance(one, Exception) for one in results)


def test_unfinished_work_is_gone_on_with_only_where_that_is_said(plain, tmp_path):
    stop = InterruptAfter(5)
    with pytest.raises(KeyboardInterrupt):
        merge_rank(plain, "ace", tmp_path / "out", 0, 2, progress=stop)
    first, second = merge_ranks(plain, "ace", tmp_path / "out", 2, patience=0.5)
    assert "pass resume=True to go on" in str(first)
    assert "found no rank that leads" in str(second)
    assert not (tmp_path / "out").exists()


def test_a_rank_that_is_late_ends_while_the_folder_is_being_removed(tmp_path):
    """Its own file was gone, and the folder was not yet: "cannot write"."""
    with (
        Session(tmp_path, Rank(0, 2), PATIENCE, None) as leading,
        Session(tmp_path, Rank(1, 2), PATIENCE, leading.who) as late,
    ):
        (tmp_path / f"{late.who}.jsonl").unlink()
        with pytest.raises(LeaderGoneError):
            late.tell({})


def test_what_a_killed_merge_left_without_its_files_is_nobodys_to_join(plain, whole, tmp_path):
    """A rank that comes before the one that begins anew waits for that one."""
    stop = InterruptAfter(5)
    with pytest.raises(KeyboardInterrupt):
        merge_rank(plain, "ace", tmp_path / "out", 0, 2, progress=stop)
    partial = tmp_path / ".out.covmerge-partial"
    shutil.rmtree(partial / "output")
    (ledger,) = partial.glob("ranks/0/*.jsonl")
    *said, left = ledger.read_bytes().splitlines(keepends=True)
    assert b'"left":true' in left  # which one that was killed does not say
    ledger.write_bytes(b"".join(said))
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(merge_rank, plain, "ace", tmp_path / "out", 1, 2, overwrite=True)
        time.sleep(0.5)
        assert not early.done()
        merge_rank(plain, "ace", tmp_path / "out", 0, 2, overwrite=True)
        assert "another rank has published" in early.result().notes[0]
    assert contents(tmp_path / "out") == whole["ace"]


def test_ranks_that_would_merge_different_things(plain, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        slow = InterruptAfter(100)
        advance = slow.advance
        slow.advance = lambda *given, **more: (time.sleep(0.3), advance(*given, **more))
        first = pool.submit(merge_rank, plain, "ace", tmp_path / "out", 0, 2, progress=slow)
        other = pool.submit(merge_rank, plain, "ties", tmp_path / "out", 1, 2, patience=1.0)
        assert "would merge something else" in str(other.exception())
        assert first.exception() is None


def test_rows_that_another_machine_does_not_show(plain, tmp_path, together, monkeypatch):
    together(2)
    monkeypatch.setattr("covmerge.run.engine.worker._LOOKS", 2)
    monkeypatch.setattr(
        "covmerge.run.engine.outputs.FileOutput.read_back", lambda self, places: "another"
    )
    results = merge_ranks(plain, "ace", tmp_path / "out", 2, patience=1.0)
    assert isinstance(results[0], CheckpointError)
    said = advice("is the output on a folder that all machines share, whose file system shows one")
    assert re.search(said, str(results[0]))
    monkeypatch.undo()
    together(2)
    results = merge_ranks(plain, "ace", tmp_path / "out", 2, resume=True)
    assert not any(isinstance(one, Exception) for one in results)


def test_memory_is_that_of_each_rank(plain, tmp_path):
    with pytest.raises(ResourceError, match="are allowed"):
        merge_rank(plain, "ace", tmp_path / "out", 0, 1, max_memory=2**20)
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_says_of_files_is_checked(tmp_path):
    look = WeightsCheck(LocalFolder(tmp_path), compared=True)
    good = {"sha256": "0" * 64, "tensors": {"w": "1" * 64}, "not_finite": ["w"], "changed": []}
    assert look.check("a", good) == good
    assert look.check("a", {"problem": "is missing"}) == {"problem": "is missing"}
    for wrong in (
        None,
        [],
        {"problem": 1},
        {**good, "problem": "is missing"},
        {**good, "sha256": "0"},
        {**good, "sha256": 0},
        {**good, "tensors": ["w"]},
        {**good, "changed": ["v"]},
        {**good, "changed": None},
    ):
        with pytest.raises((TypeError, ValueError)):
            look.check("a", wrong)


def test_which_rank_this_is():
    assert find_rank({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == Rank(1, 4, 2, 1)
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # a shell within an allocation
    assert find_rank(slurm) == Rank(0, 1)
    assert find_rank({**slurm, "RANK": "2", "WORLD_SIZE": "3"}) == Rank(2, 3, 1, 2)
    # As Slurm 22.05 set them, by srun -N 2 -n 3 in an allocation of --ntasks-per-node=4
    step = {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    for number, node, local, place in (("0", "0", 2, 0), ("1", "0", 2, 1), ("2", "1", 1, 0)):
        given = {**step, "SLURM_PROCID": number, "SLURM_NODEID": node, "SLURM_LOCALID": str(place)}
        assert find_rank(given) == Rank(int(number), 3, local, place)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert find_rank({**torchrun, **given}) == Rank(5, 8, 4, 1)
    given = {**step, "SLURM_PROCID": "2", "SLURM_NODEID": "2"}
    assert find_rank({**given, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}) == Rank(2, 3, 1, 2)
    for tasks, words in (
        ("2,1", "has no node SLURM_NODEID=2"),
        ("2(x", "should be as in"),
        ("0(x3)", advice("{} is 0, and counts the ranks of this machine: set it right")),
    ):
        with pytest.raises(InputError, match=words):
            find_rank({**given, "SLURM_STEP_TASKS_PER_NODE": tasks})
    for wrong, words in (
        ({}, "neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS"),
        ({"RANK": "0"}, "neither RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "is no rank"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1'"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x'"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ):
        with pytest.raises(InputError, match=words):
            find_rank(wrong)


def test_shares_are_balanced_and_all_is_done_once():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 1000, (200,), generator=generator).tolist()
    for count in (1, 2, 3, 7):
        loads = [sum(sizes[place] for place in share) for share in shares(sizes, count)]
        assert max(loads) - min(loads) <= max(sizes)
        for number in range(count):
            assert sorted(own_first(sizes, number, count)) == list(range(200))


def test_options_that_do_not_go_together(plain, tmp_path, monkeypatch):
    base, experts = plain
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for given, words in (
        ({"executor": "rank"}, "Did you mean 'ranks'"),
        ({"executor": "threads", "workers": 2}, "leave out workers"),
        ({"executor": "ranks", "patience": 0}, "patience=0"),
        (
            {"executor": "ranks", "out": None},
            advice("ranks share a merge to a folder: give an output folder"),
        ),
    ):
        with pytest.raises(InputError, match=words):
            covmerge.merge(base, experts, "ace", **{"out": tmp_path / "out", **given})
    covmerge.merge(base, experts, "ace", tmp_path / "another", executor="ranks")
    stateful = load_file(base)
    covmerge.merge(
        stateful, [experts["e1"], experts["e0"]], "ace", tmp_path / "out", executor="ranks"
    )
    assert (tmp_path / "out" / "covmerge.json").exists()
