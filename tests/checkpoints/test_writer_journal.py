import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covmerge.errors import CheckpointError, InputError
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.json_file import dumps
from tests.advised import advice

ENTRIES = [
    Entry("h.0.weight", (0, 4), "aa", {"rank": 3, "gate": True, "loss": 0.1}),
    Entry("h.0.weight", (4, 8), "bb"),
    Entry("ü\u2028\n\x85", (0, 1), "cc", {"layers": [{"x": None}]}),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "journal.jsonl"
    journal = Journal.create(file, "plan")
    for entry in ENTRIES:
        journal.append(entry)
    return file


def finished(file: Path) -> list[Entry]:
    journal = Journal.resume(file, "plan")
    return list(journal.finished.values())


def test_what_was_appended_is_read(file: Path) -> None:
    assert finished(file) == ENTRIES
    journal = Journal.resume(file, "plan")
    assert journal.finished["h.0.weight", (4, 8)].checksum == "bb"
    journal.append(Entry("x", (0, 0), "dd"))
    assert finished(file) == [*ENTRIES, Entry("x", (0, 0), "dd")]


def test_the_first_line_names_plan_and_format(file: Path) -> None:
    head = json.loads(file.read_bytes().decode().splitlines()[0])
    assert head == {"plan": "plan", "format": 2, "of": None, "crc": head["crc"]}
    assert list(file.parent.iterdir()) == [file]


def test_a_file_cut_anywhere_gives_the_entries_before_the_cut(file: Path) -> None:
    content = file.read_bytes()
    head = content.index(b"\n") + 1
    for cut in range(head, len(content) + 1):
        file.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n") - 1
        journal = Journal.resume(file, "plan")
        assert list(journal.finished.values()) == ENTRIES[:whole]
        journal.append(Entry("next", (0, 1), "ee"))
        assert finished(file) == [*ENTRIES[:whole], Entry("next", (0, 1), "ee")]


def test_a_torn_line_of_garbage_is_ignored(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\x00\x00\xff{")
    assert finished(file) == ENTRIES


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00",
        b"",
        b"[]",
        b'{"tensor":"a"',
        b'{"tensor":"a","rows":[0],"checksum":"aa","stats":{}}',
        b'{"tensor":"a","rows":[3,1],"checksum":"aa","stats":{}}',
        b'{"tensor":"a","rows":[0,1],"checksum":5,"stats":{}}',
        b'{"tensor":"a","rows":[0,1],"checksum":"aa"}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("number", [2, 4, 5])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_line_is_an_error_that_names_it(
    file: Path, line: bytes, number: int, sealed: bool
) -> None:
    if sealed:  # with the checksum that it would have
        line = line[:-1] + f',"crc":"{zlib.crc32(line):08x}"}}'.encode()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))
    with pytest.raises(CheckpointError, match=f"line {number} of the journal .*overwrite=True"):
        finished(file)


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_line(file: Path) -> None:
    content = file.read_bytes()
    head = content.index(b"\n")
    for place in range(len(content)):
        for bit in (0, 3, 5):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            if damaged[place] == 0x0A or content[place] == 0x0A:
                continue  # a line more or less is another matter: its parts are damaged lines
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                finished(file)
            number = content[:place].count(b"\n") + 1
            told = str(caught.value)
            assert f"line {number} of the journal" in told or (place < head and "format" in told)
            assert "overwrite=True" in told


def test_statistics_that_were_changed_do_not_reach_a_manifest(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"loss":0.1', b'"loss":1e300'))
    with pytest.raises(CheckpointError, match=r"line 2 of the journal .*checksum"):
        finished(file)


def test_what_is_no_regular_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal.create(path, "plan")
    moved = path.rename(path.with_name("moved"))
    for make in (
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(moved),
        lambda: os.mkfifo(path),
        path.mkdir,
    ):
        make()
        with pytest.raises(CheckpointError, match=r"cannot read the journal .*overwrite=True"):
            Journal.resume(path, "plan")
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_of_two_lines_for_the_same_rows_the_later_counts(file: Path) -> None:
    journal = Journal.resume(file, "plan")
    journal.append(Entry("h.0.weight", (0, 4), "new"))
    assert {e.key: e.checksum for e in finished(file)}["h.0.weight", (0, 4)] == "new"
    assert len(finished(file)) == 3


def test_another_plan_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"another merge: the recipe, .*overwrite=True"):
        Journal.resume(file, "other")


def test_another_format_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"format":2', b'"format":1'))
    with pytest.raises(CheckpointError, match="has format 1, this version of covmerge reads 2"):
        finished(file)


@pytest.mark.parametrize("content", [b"", b'{"plan":"pl'])
def test_a_journal_without_its_first_line_is_damaged(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"line 1 .* damaged"):
        finished(file)


def test_a_journal_is_neither_replaced_nor_invented(file: Path) -> None:
    said = advice("{} exists: pass --resume to go on, --overwrite to start again")
    with pytest.raises(InputError, match=said):
        Journal.create(file, "plan")
    assert finished(file) == ENTRIES
    with pytest.raises(CheckpointError, match="cannot read the journal"):
        Journal.resume(file.with_name("gone"), "plan")


def test_statistics_that_json_cannot_hold_are_refused(file: Path) -> None:
    journal = Journal.resume(file, "plan")
    with pytest.raises(InputError, match=r"'w'\.stats\.loss is nan"):
        journal.append(Entry("w", (0, 1), "dd", {"loss": float("nan")}))
    assert len(journal.finished) == 3
    assert finished(file) == ENTRIES


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False).filter(lambda x: abs(x) != float("inf")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from([None, 1]))
def test_strict_json_is_read_back_the_same(value: object, indent: int | None) -> None:
    text = dumps(value, what="value", indent=indent)  # type: ignore[arg-type]
    assert json.loads(text.encode()) == value
    assert indent is not None or "\n" not in text


def test_strict_json_refuses_what_it_would_have_to_change() -> None:
    for value, message in [
        ({1: 2}, advice("{} has the key {}: JSON keys are strings, convert it")),
        ([b"x"], advice("{} is a {}: JSON cannot hold it, convert it")),
        ({"a": {2}}, r"value\.a is a set"),
        ([0.0, float("-inf")], r"value\[1\] is -inf"),
    ]:
        with pytest.raises(InputError, match=message):
            dumps(value, what="value")  # type: ignore[arg-type]
    assert json.loads(dumps({"1": 2, "x": "x"}, what="value")) == {"1": 2, "x": "x"}
