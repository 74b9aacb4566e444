"""A merge that is really killed, and really gone on with."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covmerge.checkpoints.journal import Entry, Journal
from covmerge.checkpoints.layout import Layout, plan_layout
from covmerge.checkpoints.staging import Staging
from covmerge.checkpoints.writer import ShardWriter
from covmerge.errors import InputError
from covmerge.types import TensorHeader

NAMES = [f"layer{i}" for i in range(8)]
ROWS, COLUMNS, BLOCK = 64, 32, 16


def layout() -> Layout:
    headers = [TensorHeader(name, (ROWS, COLUMNS), torch.float32) for name in NAMES]
    return plan_layout(headers, 3 * ROWS * COLUMNS * 4)


def rows_of(name: str, start: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(NAMES.index(name) * ROWS + start)
    return torch.randn(BLOCK, COLUMNS, generator=generator)


def merge(out: Path, pause: float = 0, **options: bool) -> int:
    """Do what the engine does, item by item; return how many items were computed."""
    computed = 0
    with Staging(out, **options) as staging:
        begin = Journal.resume if staging.resuming else Journal.create
        with begin(staging.journal, "plan") as journal:
            writer = ShardWriter(staging.folder, layout())
            for name in NAMES:
                for start in range(0, ROWS, BLOCK):
                    key, rows = (name, (start, start + BLOCK)), range(start, start + BLOCK)
                    entry = journal.finished.get(key)
                    if entry and writer.read_back(name, rows) == entry.checksum:
                        continue
                    checksum = writer.write(name, rows_of(name, start), rows)
                    journal.append(Entry(*key, checksum))
                    computed += 1
                    time.sleep(pause)
        (staging.folder / "covmerge.json").write_text("{}")
        staging.commit()
    return computed


CHILD = f"from {__name__} import merge; from pathlib import Path; import sys; "
CHILD += "merge(Path(sys.argv[1]), pause=0.02)"


def wait_for(path: Path, lines: int) -> None:
    limit = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < limit, f"{path} does not grow"
        time.sleep(0.005)


def test_a_killed_merge_locks_until_it_is_dead_and_resumes_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    out, journal = tmp_path / "merged", tmp_path / ".merged.covmerge-partial" / "journal.jsonl"
    child = subprocess.Popen([sys.executable, "-c", CHILD, out], cwd=Path(__file__).parents[2])
    try:
        wait_for(journal, lines=8)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match="another process is merging"):
                merge(out, **options)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "the child ended before it was killed"
    assert not out.exists()
    with pytest.raises(InputError, match="--resume to go on"):
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


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    out, journal = tmp_path / "merged", tmp_path / ".merged.covmerge-partial" / "journal.jsonl"
    child = subprocess.Popen([sys.executable, "-c", CHILD, out], cwd=Path(__file__).parents[2])
    try:
        wait_for(journal, lines=1)
        with pytest.raises(InputError, match="another process"):
            merge(out)
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
    with pytest.raises(InputError, match="exists: pass --overwrite"):
        merge(out)
    assert merge(out, overwrite=True) == len(NAMES) * ROWS // BLOCK
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
