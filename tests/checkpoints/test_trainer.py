"""The folder of a training run: which of its checkpoints are taken, and what is refused by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covmerge.errors import CheckpointError, InputError
from covmerge.files.checkpoints.staging import check_not_input
from covmerge.files.checkpoints.trainer import last_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 100):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text("{}")
    return tmp_path / "run"


def steps(run: Path, count: int | None = None) -> list[int]:
    return [saved.step for saved in last_steps(run.name, count, run.parent)]


def test_the_last_by_their_numbers(run: Path) -> None:
    assert steps(run) == [10, 20, 100]
    assert steps(run, 2) == [20, 100]


def test_an_output_of_a_merge_is_no_checkpoint(run: Path) -> None:
    (run / "checkpoint-100" / "covmerge.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint-100 holds covmerge\.json: .*move it"):
        steps(run, 1)


@pytest.mark.parametrize("link", ["checkpoint-5", "checkpoint-200"])
def test_a_link_to_another_checkpoint_is_not_counted_twice(run: Path, link: str) -> None:
    (run / link).symlink_to("checkpoint-20")
    with pytest.raises(CheckpointError, match=rf"({link}|-20) and .*({link}|-20) are one folder"):
        steps(run)
    (run / link).unlink()
    (run / "checkpoint-20").rename(run.parent / "away")
    (run / link).symlink_to(run.parent / "away")
    assert len(steps(run)) == 3


def test_an_empty_state_is_one_whose_writing_was_killed(run: Path) -> None:
    (run / "checkpoint-100" / "trainer_state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint-100 is incomplete, .*json is empty"):
        steps(run)


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/x", "a\0b", "nowhere", "x" * 300])
def test_what_cannot_be_a_run_is_told(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be listed"):
        last_steps(folder, None, tmp_path)


def test_a_checkpoint_that_may_not_be_read_is_told(run: Path, monkeypatch) -> None:
    iterdir = Path.iterdir

    def refusing(self: Path) -> Iterator[Path]:
        if self.name == "checkpoint-20":
            raise PermissionError(13, "Permission denied")
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refusing)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-20 cannot be listed \(Permission denied"
    ):
        steps(run)


def test_an_output_is_not_laid_among_the_checkpoints(run: Path) -> None:
    given = [saved.folder for saved in last_steps(str(run), None, Path())]
    with pytest.raises(InputError, match="checkpoint-200 would be taken for a checkpoint"):
        check_not_input(run / "checkpoint-200", given)
    check_not_input(run / "merged", given)
    check_not_input(run.parent / "checkpoint-200", given)
