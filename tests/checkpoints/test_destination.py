"""An output appears at once, is made by one at a time, and goes on."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from covmerge.errors import InputError
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.staging import Staging
from covmerge.files.stores.destination import Destination
from covmerge.files.stores.lock import TakenError
from covmerge.files.stores.store import StoredFile, tree
from tests.checkpoints.test_writer_staging import manifest

# Makes a destination again, as another process would.
Makes = Callable[[], Destination]


@pytest.fixture
def makes(tmp_path: Path) -> Makes:
    return lambda: Destination(tmp_path / "merged")


def put(destination: Destination, text: str) -> None:
    destination.work.inside("heads").put("a", text.encode())
    destination.work.put("covmerge.json", manifest("heads/a").encode())


def make(destination: Destination, text: str, **options: bool) -> list[str]:
    with Staging(destination, **options) as staging:
        Journal.create(staging.journal, "plan")
        put(destination, text)
        staging.commit()
    return staging.notes


def interrupt(destination: Destination, text: str, **options: bool) -> None:
    with pytest.raises(KeyError), Staging(destination, **options) as staging:
        Journal.create(staging.journal, "plan").append(Entry("w", (0, 1), "aa"))
        put(destination, text)
        raise KeyError


def found(destination: Destination) -> dict[str, str]:
    """What is there of the output, but for its manifest."""
    names = [name for name in tree(destination.output) if name != "covmerge.json"]
    return {name: StoredFile(destination.output, name).read(100).decode() for name in names}


def nothing_aside(destination: Destination) -> bool:
    work = destination.work.exists("covmerge.json") or destination.work.inside("heads").exists("a")
    return not work and not destination.journal.exists()


def test_the_output_appears_at_the_commit_and_nothing_else_stays(makes: Makes) -> None:
    destination = makes()
    with Staging(destination) as staging:
        assert destination.occupant() is None and not staging.resuming
        Journal.create(staging.journal, "plan")
        put(destination, "x")
        assert destination.occupant() is None
        staging.commit()
    assert destination.occupant() is not None
    assert found(destination) == {"heads/a": "x"} and nothing_aside(destination)
    assert staging.notes == []


def test_an_output_is_replaced_on_demand_only(makes: Makes) -> None:
    make(makes(), "first")
    there = makes().occupant()
    for options in ({}, {"resume": True}):
        with pytest.raises(InputError, match=r"merged exists.* pass overwrite=True"):
            make(makes(), "second", **options)
    assert makes().occupant() == there
    make(makes(), "second", overwrite=True)
    assert found(makes()) == {"heads/a": "second"} and makes().occupant() != there


def test_what_covmerge_did_not_write_is_not_deleted(makes: Makes) -> None:
    with Staging(makes()) as staging:
        staging.store.put("thesis.tex", b"precious")
        staging.commit()
    with pytest.raises(InputError, match=r"not known for an output of covmerge"):
        make(makes(), "x", overwrite=True)
    assert found(makes()) == {"thesis.tex": "precious"}


def test_an_unfinished_merge_waits_for_a_decision(makes: Makes) -> None:
    interrupt(makes(), "half")
    assert makes().occupant() is None
    with pytest.raises(
        InputError, match=r"unfinished merge .*resume=True to go on, overwrite=True"
    ):
        make(makes(), "x")
    with Staging(makes(), resume=True) as staging:
        assert staging.resuming
        assert len(Journal.resume(staging.journal, "plan").finished) == 1
        staging.commit()
    assert found(makes()) == {"heads/a": "half"} and nothing_aside(makes())


def test_overwrite_starts_an_unfinished_merge_again(makes: Makes) -> None:
    make(makes(), "first")
    interrupt(makes(), "half", overwrite=True)
    assert found(makes()) == {"heads/a": "first"}
    with Staging(makes(), overwrite=True) as staging:
        assert not staging.resuming and "was discarded" in staging.notes[0]
        assert nothing_aside(makes())
    assert found(makes()) == {"heads/a": "first"}


def test_what_appears_while_the_merge_runs_is_not_deleted(makes: Makes) -> None:
    with (
        pytest.raises(InputError, match="is not known for an output of covmerge"),
        Staging(makes()) as staging,
    ):
        Journal.create(staging.journal, "plan")
        put(makes(), "merged")
        folder = makes().output.folder
        folder.mkdir()
        (folder / "thesis.tex").write_bytes(b"precious")
        staging.commit()
    assert found(makes()) == {"thesis.tex": "precious"} and not nothing_aside(makes())


def test_one_at_a_time(makes: Makes) -> None:
    first = makes()
    with Staging(first) as staging:
        with pytest.raises(TakenError):
            makes().take()
        refused: list[str] = []

        def second() -> None:
            for options in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(InputError, match="another process is merging into") as error:
                    make(makes(), "second", **options)
                refused.append(str(error.value))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert len(refused) == 3
        put(first, "first")
        staging.commit()
    assert found(makes()) == {"heads/a": "first"}
    make(makes(), "second", overwrite=True)  # the lock was let go


def test_work_that_no_journal_knows_is_not_kept(makes: Makes) -> None:
    with pytest.raises(KeyError), Staging(makes()) as staging:
        put(makes(), "half")
        raise KeyError
    assert nothing_aside(makes()) and makes().occupant() is None
    with Staging(makes()) as staging:
        Journal.create(staging.journal, "plan")
        staging.discard()
        staging.discard()
    assert nothing_aside(makes()) and makes().occupant() is None
