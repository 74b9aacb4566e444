"""A merge that is really killed, and really gone on with."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covmerge.base.types import TensorHeader
from covmerge.errors import InputError
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.layout import Layout, plan_layout
from covmerge.files.checkpoints.staging import Staging
from covmerge.files.checkpoints.writer import ShardWriter
from tests.checkpoints.test_writer_staging import manifest
from tests.forked import Forked
from tests.held import journaled, wait_until

NAMES = [f"layer{i}" for i in range(8)]
ROWS, COLUMNS, BLOCK = 64, 32, 16


def layout() -> Layout:
    headers = [TensorHeader(name, (ROWS, COLUMNS), torch.float32) for name in NAMES]
    return plan_layout(headers, 3 * ROWS * COLUMNS * 4)


def rows_of(name: str, start: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(NAMES.index(name) * ROWS + start)
    return torch.randn(BLOCK, COLUMNS, generator=generator)


def merge(out: Path, hold: Path | None = None, **options: bool) -> int:
    """Do what the engine does, item by item; return how many items were computed.

    While there is a file `hold`, the last item is not begun.
    """
    computed = 0
    with Staging(out, **options) as staging:
        begin = Journal.resume if staging.resuming else Journal.create
        journal = begin(staging.journal, "plan")
        writer = ShardWriter(staging.folder, layout())
        for name in NAMES:
            for start in range(0, ROWS, BLOCK):
                key, rows = (name, (start, start + BLOCK)), range(start, start + BLOCK)
                entry = journal.finished.get(key)
                if entry and writer.read_back(name, rows) == entry.checksum:
                    continue
                while rows.stop == ROWS and name == NAMES[-1] and hold and hold.exists():
                    time.sleep(0.005)
                checksum = writer.write(name, rows_of(name, start), rows)
                journal.append(Entry(*key, checksum))
                computed += 1
        files = [shard.file_name for shard in layout().shards]
        (staging.folder / "covmerge.json").write_text(manifest(*files))
        staging.commit()
    return computed


CHILD = f"from {__name__} import merge; from pathlib import Path; import sys; "
CHILD += "merge(*map(Path, sys.argv[1:]))"


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    path = tmp_path / "hold"
    path.touch()
    return path


def test_a_killed_merge_locks_until_it_is_dead_and_resumes_to_the_same_bytes(
    tmp_path: Path, hold: Path
) -> None:
    out, journal = tmp_path / "merged", tmp_path / ".merged.covmerge-partial" / "journal.jsonl"
    child = Forked(CHILD, out, hold)
    try:
        wait_until(partial(journaled, journal, 7), child)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match="another process is merging"):
                merge(out, **options)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "the child ended before it was killed"
    hold.unlink()
    assert not out.exists()
    with pytest.raises(InputError, match="resume=True to go on"):
        merge(out)

    finished = journal.read_bytes().count(b"\n") - 1
    with journal.open("ab") as file:
        file.write(b'{"tensor":"layer7","ro')  # a kill can do this as well
    damaged = tmp_path / ".merged.covmerge-partial" / "output" / layout().shards[0].file_name
    with damaged.open("r+b") as file:
        file.seek(layout().shards[0].entries["layer0"].offset)
        file.write(b"\xff" * 4)  # a page that never reached the disk

    total = len(NAMES) * ROWS // BLOCK
    assert finished >= 7
    assert merge(out, resume=True) == total - finished + 1  # the damaged item is computed again
    assert merge(tmp_path / "whole") == total
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "whole"]
    read = load_file(out / layout().shards[0].file_name)
    assert torch.equal(read["layer0"][:BLOCK], rows_of("layer0", 0))


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path, hold: Path) -> None:
    out, journal = tmp_path / "merged", tmp_path / ".merged.covmerge-partial" / "journal.jsonl"
    child = Forked(CHILD, out, hold)
    try:
        wait_until(partial(journaled, journal, 0), child)
        with pytest.raises(InputError, match="another process"):
            merge(out)
        hold.unlink()
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
    with pytest.raises(InputError, match="exists: pass overwrite=True"):
        merge(out)
    assert merge(out, overwrite=True) == len(NAMES) * ROWS // BLOCK
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
