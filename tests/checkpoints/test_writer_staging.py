import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from covmerge.errors import InputError
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.staging import Staging, check_not_input, find_unfinished
from tests.advised import advice


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "models" / "merged"


def make(out: Path, text: str, **options: bool) -> list[str]:
    """Run a whole merge whose result is one file of `text`."""
    with Staging(out, **options) as staging:
        Journal.create(staging.journal, "plan")
        (staging.folder / "weights").write_text(text)
        (staging.folder / "covmerge.json").write_text(manifest("weights"))
        staging.commit()
    return staging.notes


def manifest(*files: str) -> str:
    """What covmerge.json of an output of these files holds at least."""
    recipe = {"base": "b", "experts": {}, "method": "ace", "parameters": {}, "output": {}}
    return json.dumps(
        {
            "covmerge": "0",
            "torch": "0",
            "recipe": recipe,
            "family": None,
            "sources": {},
            "notes": [],
            "totals": {"by_rule": [], "merged_norm": 1.0, "rounding_loss": 0.0},
            "heads": {},
            "tensors": {},
            "files": {name: {"sha256": "0" * 64} for name in files},
        }
    )


def interrupt(out: Path, text: str, **options: bool) -> None:
    """Run a merge that fails after it finished some work."""
    with pytest.raises(KeyError), Staging(out, **options) as staging:
        journal = Journal.create(staging.journal, "plan")
        (staging.folder / "weights").write_text(text)
        (staging.folder / "covmerge.json").write_text(manifest("weights"))
        journal.append(Entry("w", (0, 1), "aa"))
        raise KeyError


def found(folder: Path) -> dict[str, str]:
    """All that lies in a folder, at any depth."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_output_appears_at_the_commit_and_nothing_else_stays(out: Path) -> None:
    with Staging(out) as staging:
        assert not staging.resuming
        Journal.create(staging.journal, "plan")
        (staging.folder / "heads").mkdir()
        (staging.folder / "heads" / "a.safetensors").write_text("head")
        (staging.folder / "covmerge.json").write_text("{}")
        assert not out.exists()
        staging.commit()
        assert out.exists()
    assert found(out.parent) == {
        "merged/covmerge.json": "{}",
        "merged/heads/a.safetensors": "head",
    }
    assert names(out.parent) == ["merged"]
    assert staging.notes == []


def test_an_output_is_replaced_on_demand_only(out: Path) -> None:
    make(out, "first")
    with pytest.raises(InputError, match=f"{out} exists: pass overwrite=True"):
        make(out, "second")
    with pytest.raises(InputError, match="overwrite=True"):
        make(out, "second", resume=True)
    assert found(out)["weights"] == "first"
    make(out, "second", overwrite=True)
    assert found(out)["weights"] == "second"
    assert names(out.parent) == ["merged"]


def test_the_old_output_stays_until_the_commit(out: Path) -> None:
    make(out, "first")
    interrupt(out, "half", overwrite=True)
    assert found(out)["weights"] == "first"


def test_an_empty_folder_may_be_overwritten(out: Path) -> None:
    out.mkdir(parents=True)
    make(out, "first", overwrite=True)
    assert found(out)["weights"] == "first"


@pytest.mark.parametrize("how", [{"overwrite": True}, {}, {"resume": True}], ids=str)
def test_what_is_not_an_output_is_never_deleted(how: dict[str, bool], out: Path) -> None:
    """Nor is anybody told to overwrite it, which would be refused."""
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=f"{out} is not known for an output of covmerge"):
        make(out, "x", **how)
    file = out / "thesis.tex"
    with pytest.raises(InputError, match="is no folder"):
        make(file, "x", **how)
    assert found(out.parent) == {"merged/thesis.tex": "precious"}
    assert names(out.parent) == ["merged"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"tensors": {}}', '{"recipe": null}'])
def test_a_strangers_folder_with_a_file_of_that_name_is_not_deleted(
    out: Path, content: str
) -> None:
    out.mkdir(parents=True)
    (out / "covmerge.json").write_text(content)
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"not known for an output of covmerge, .*covmerge\.json"):
        make(out, "x", overwrite=True)
    assert found(out) == {"covmerge.json": content, "thesis.tex": "precious"}
    assert names(out.parent) == ["merged"]


def test_what_an_output_holds_beside_its_files_is_not_deleted(out: Path) -> None:
    make(out, "first")
    (out / "report.html").write_text("covmerge report")
    (out / "evaluation.json").write_text("covmerge evaluate")
    (out / ".report.html.0123abcd.unfinished").write_text("of a report that was killed")
    make(out, "second", overwrite=True)
    assert names(out) == ["covmerge.json", "weights"]
    for lay in (
        lambda path: path.write_text("precious"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(out.parent),
        lambda path: os.mkfifo(path),
    ):
        (out / "notes").mkdir()
        lay(out / "notes" / "thesis.tex")
        with pytest.raises(InputError, match=r"did not write, .*: notes/thesis.tex\. Move"):
            make(out, "third", overwrite=True)
        assert (out / "weights").read_text() == "second"
        assert names(out.parent) == ["merged"]
        (out / "notes").rename(out.parent / "moved")
        make(out, "second", overwrite=True)
        (out.parent / "moved").rename(out.parent / "away")
        os.system(f"rm -r {out.parent / 'away'}")


def test_an_output_that_does_not_list_its_files_is_not_deleted(out: Path) -> None:
    make(out, "first")
    old = json.loads(manifest("weights"))
    del old["files"]
    (out / "covmerge.json").write_text(json.dumps(old))
    with pytest.raises(InputError, match="does not list the files"):
        make(out, "second", overwrite=True)
    assert found(out)["weights"] == "first"


@pytest.mark.parametrize("name", ["x" * 240, "x" * 300, "x/" * 3000 + "y", "a\0b", "\ud800"])
def test_a_name_that_no_output_can_have(tmp_path: Path, name: str) -> None:
    said = advice("{} cannot be the name of an output ({}): choose another")
    with pytest.raises(InputError, match=said):
        Staging(tmp_path / name)
    with pytest.raises(InputError, match="cannot be the name of an output"):
        check_not_input(tmp_path / name, [tmp_path])
    with pytest.raises(InputError, match="cannot be the name of an output"):
        find_unfinished(tmp_path / name)
    make(tmp_path / "another", "x")


def test_work_behind_a_link_is_not_resumed(out: Path) -> None:
    interrupt(out, "half")
    partial = out.parent / ".merged.covmerge-partial"
    (partial / "output").rename(out.parent / "elsewhere")
    (partial / "output").symlink_to(out.parent / "elsewhere")
    with pytest.raises(InputError, match="symbolic link"):
        make(out, "x", resume=True)
    assert (out.parent / "elsewhere" / "weights").read_text() == "half"


def test_a_mount_point_is_refused_before_the_work() -> None:
    said = advice("which cannot be replaced as a whole: choose a folder inside it, such as {}")
    with pytest.raises(InputError, match=f"mount point, {said}") as told:
        make(Path("/proc"), "x", overwrite=True)
    assert str(told.value).endswith("such as /proc/merged")
    said = advice("the output {} is the root of the file system: choose a folder in it")
    with pytest.raises(InputError, match=said):
        Staging(Path("/"))
    Staging(Path("/merged"))


def test_what_appears_while_the_merge_runs_is_not_deleted(out: Path) -> None:
    with pytest.raises(InputError, match="overwrite=True"), Staging(out) as staging:
        Journal.create(staging.journal, "plan")
        (staging.folder / "weights").write_text("merged")
        out.mkdir()
        staging.commit()
    assert names(out) == []
    out.rmdir()
    with Staging(out, resume=True) as staging:
        assert staging.resuming
        staging.commit()
    assert found(out) == {"weights": "merged"}


def test_a_link_goes_on_to_point_to_the_output(out: Path) -> None:
    out.parent.mkdir()
    link = out.parent / "latest"
    link.symlink_to(out)
    make(link, "first")
    make(link, "second", overwrite=True)
    assert link.is_symlink()
    assert found(out)["weights"] == "second"
    loop = out.parent / "loop"
    loop.symlink_to(loop)
    with pytest.raises(
        InputError, match=advice("{} cannot be the name of an output ({}): choose another")
    ):
        make(loop, "x", overwrite=True)
    loop.unlink()
    loop.symlink_to(out)
    make(loop, "x", overwrite=True)


def test_an_unfinished_merge_waits_for_a_decision(out: Path) -> None:
    interrupt(out, "half")
    assert not out.exists()
    with pytest.raises(InputError, match=r"resume=True to go on, overwrite=True to start again"):
        make(out, "x")
    with Staging(out, resume=True) as staging:
        assert staging.resuming and staging.notes == []
        assert (staging.folder / "weights").read_text() == "half"
        journal = Journal.resume(staging.journal, "plan")
        assert len(journal.finished) == 1
        staging.commit()
    assert found(out.parent) == {
        "merged/covmerge.json": manifest("weights"),
        "merged/weights": "half",
    }


def test_overwrite_starts_an_unfinished_merge_again(out: Path) -> None:
    interrupt(out, "half")
    with Staging(out, overwrite=True) as staging:
        assert not staging.resuming
        assert names(staging.folder) == [] and not staging.journal.exists()
        assert "was discarded" in staging.notes[0]


def test_resume_and_overwrite_go_on_and_replace(out: Path) -> None:
    make(out, "first")
    interrupt(out, "half", overwrite=True)
    said = advice("lies unfinished in {}: pass --overwrite too to go on with that")
    with pytest.raises(InputError, match=said):  # and not that a merge that ended is not resumed
        Staging(out, resume=True).__enter__()
    with Staging(out, resume=True, overwrite=True) as staging:
        assert staging.resuming
        staging.commit()
    assert found(out.parent) == {
        "merged/covmerge.json": manifest("weights"),
        "merged/weights": "half",
    }


def test_nothing_to_resume_is_said(out: Path) -> None:
    notes = make(out, "x", resume=True)
    assert len(notes) == 1 and "nothing to resume" in notes[0]


def test_work_that_no_journal_knows_is_not_kept(out: Path) -> None:
    with pytest.raises(KeyError), Staging(out) as staging:
        (staging.folder / "weights").write_text("half")
        raise KeyError
    assert names(out.parent) == []


def test_discard_removes_the_work_and_leaves_the_output(out: Path) -> None:
    make(out, "first")
    with Staging(out, overwrite=True) as staging:
        Journal.create(staging.journal, "plan")
        staging.discard()
        staging.discard()
    assert names(out.parent) == ["merged"]
    assert found(out)["weights"] == "first"


def test_a_kill_between_the_two_renames_loses_nothing(out: Path) -> None:
    make(out, "first")
    interrupt(out, "half", overwrite=True)
    out.rename(out.parent / ".merged.covmerge-partial" / "replaced")  # as `commit` does
    with pytest.raises(InputError, match="overwrite=True"):
        make(out, "x", resume=True)
    assert found(out)["weights"] == "first"
    out.rename(out.parent / ".merged.covmerge-partial" / "replaced")
    with Staging(out, resume=True, overwrite=True) as staging:
        assert staging.resuming and "was put back" in staging.notes[0]
        staging.commit()
    assert found(out.parent) == {
        "merged/covmerge.json": manifest("weights"),
        "merged/weights": "half",
    }


def test_a_kill_after_the_renames_leaves_a_finished_output(out: Path) -> None:
    make(out, "first")
    interrupt(out, "second", overwrite=True)
    partial = out.parent / ".merged.covmerge-partial"
    out.rename(partial / "replaced")
    (partial / "output").rename(out)
    with pytest.raises(InputError, match="overwrite=True"):
        make(out, "x")
    assert found(out)["weights"] == "second"
    make(out, "third", resume=True, overwrite=True)
    assert found(out)["weights"] == "third"
    assert names(out.parent) == ["merged"]


def test_a_failed_exchange_is_undone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(out, "first")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "output":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match=f"cannot write {out}: Input/output error"):
        make(out, "second", overwrite=True)
    monkeypatch.undo()
    assert found(out)["weights"] == "first"
    with Staging(out, overwrite=True, resume=True) as staging:
        assert staging.resuming
        staging.commit()
    assert found(out)["weights"] == "second"


def test_a_link_in_the_place_of_the_work_is_refused(out: Path) -> None:
    precious = out.parent / "precious"
    precious.mkdir(parents=True)
    (precious / "thesis.tex").write_text("precious")
    (out.parent / ".merged.covmerge-partial").symlink_to(precious)
    with pytest.raises(InputError, match="is a symbolic link"):
        make(out, "x", overwrite=True)
    assert names(precious) == ["thesis.tex"]


def test_the_second_of_two_merges_is_refused(out: Path) -> None:
    with Staging(out) as first:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            said = advice("another process is merging into {}: wait for it, or choose another name")
            with pytest.raises(InputError, match=said):
                Staging(out, **options).__enter__()
        (first.folder / "weights").write_text("first")
        first.commit()
    assert found(out.parent) == {"merged/weights": "first"}
    make(out.parent / "another", "second")
    shutil.rmtree(out)
    make(out, "second")


def test_a_file_system_without_locks_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    notes = make(out, "x")
    assert len(notes) == 1 and "has no locks" in notes[0]
    assert found(out)["weights"] == "x"


def test_many_merges_into_one_output_exclude_each_other(out: Path) -> None:
    inside = threading.Semaphore()
    collisions: list[str] = []
    done: list[int] = []

    def merge_often(number: int) -> None:
        for _ in range(15):
            try:
                with Staging(out, overwrite=True) as staging:
                    if not inside.acquire(blocking=False):
                        collisions.append("two at once")
                    (staging.folder / "covmerge.json").write_text(manifest() + " " * number)
                    inside.release()
                    staging.commit()
                    done.append(number)
            except InputError as error:
                if "another process is merging" not in str(error):
                    collisions.append(str(error))

    threads = [threading.Thread(target=merge_often, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collisions == []
    assert done
    assert names(out.parent) == ["merged"]
    assert names(out) == ["covmerge.json"]


def test_an_output_that_overlaps_an_input_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "models" / "base"
    base.mkdir(parents=True)
    (base / "model.safetensors").write_text("")
    (tmp_path / "link").symlink_to(base)
    for out, given in [
        (base, base),
        (base / "merged", base),
        (base / ".." / "base" / "a" / "b", base),
        (tmp_path / "link", base),
        (tmp_path / "link" / "merged", base),
        (base, tmp_path / "link"),
        (tmp_path / "models", base),
        (base, base / "model.safetensors"),
        (tmp_path, tmp_path / "link"),
    ]:
        with pytest.raises(InputError, match="overlap"):
            check_not_input(out, [tmp_path / "missing", given])


def test_an_input_at_the_place_of_the_work_is_refused(out: Path) -> None:
    partial = out.parent / ".merged.covmerge-partial"
    (partial / "output").mkdir(parents=True)
    (partial / "output" / "model.safetensors").write_text("precious")
    (out.parent / "link").symlink_to(partial)
    for given in (partial, partial / "output", partial / "output" / "model.safetensors"):
        with pytest.raises(InputError, match=rf"{given} lies in {partial}, .*overlap"):
            check_not_input(out, [given])
    with pytest.raises(InputError, match="overlap"):
        check_not_input(out, [out.parent / "link"])
    check_not_input(out.parent / "other", [partial])


@pytest.mark.parametrize("name", ["thesis.tex", "model/config.json", "journal.jsonl/x", "output"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_what_lies_at_the_place_of_the_work_is_not_deleted(
    out: Path, name: str, options: dict[str, bool]
) -> None:
    precious = out.parent / ".merged.covmerge-partial" / name
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    said = advice("would lie there: move it away, or choose another name for the output")
    with pytest.raises(InputError, match=said) as told:
        make(out, "x", **options)
    assert f"covmerge-partial/{name.split('/')[0]} is not " in str(told.value)
    assert found(out.parent) == {f".merged.covmerge-partial/{name}": "precious"}
    make(out.parent / "another", "x")
    shutil.move(out.parent / ".merged.covmerge-partial", out.parent / "away")
    make(out, "x")


def test_what_appears_at_the_place_of_the_work_meanwhile_stays(out: Path) -> None:
    with Staging(out) as staging:
        (out.parent / ".merged.covmerge-partial" / "thesis.tex").write_text("precious")
        (staging.folder / "weights").write_text("merged")
        staging.commit()
    assert found(out.parent) == {
        ".merged.covmerge-partial/thesis.tex": "precious",
        "merged/weights": "merged",
    }


@pytest.mark.parametrize("name", ["", "output", "deep/er"])
def test_the_place_of_the_work_is_no_output(out: Path, name: str) -> None:
    partial = out.parent / ".merged.covmerge-partial"
    said = advice("which is removed when that is finished: choose another name")
    with pytest.raises(InputError, match=f"the work on another one .{partial}.*{said}"):
        make(partial / name, "x", overwrite=True)
    assert not out.parent.exists()
    make(out.parent / "x.covmerge-partial", "x")


def test_an_output_beside_the_inputs_is_accepted(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_text("")
    file = tmp_path / "model.safetensors"
    file.write_text("")
    check_not_input(tmp_path / "base2", [base, file, Path("org/name@main")])
    check_not_input(tmp_path / "new" / "deep", [base, file])


def test_an_interrupt_after_the_output_is_there_leaves_nothing_beside_it(
    out: Path, monkeypatch
) -> None:
    """The journal stayed for good: there was nothing that `resume` could have gone on with."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Staging(out) as staging:
        Journal.create(staging.journal, "plan")
        (staging.folder / "covmerge.json").write_text('{"files": {}}')
        monkeypatch.setattr(staging.out, "discard", interrupt)
        try:
            staging.commit()
        finally:
            monkeypatch.undo()
    assert names(out) == ["covmerge.json"] and names(out.parent) == ["merged"]
