import json
from random import Random

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageFont

import covmerge
from covmerge.errors import InputError
from covmerge_lab.studies.controlled import Size, Training, run_training
from covmerge_lab.suite import Variant
from covmerge_lab.vision import VisionSuite, canvas, materials, pretraining, sources, tasks
from covmerge_lab.vision.canvas import SIDE
from covmerge_lab.vision.sources import Picture
from covmerge_lab.workers import ignore_progress


def noise(seed):
    return np.random.default_rng(seed).integers(0, 256, (1, SIDE, SIDE), dtype=np.uint8)


def test_a_group_is_wholly_in_training_or_in_testing(tmp_path):
    def read(cache, draw):
        for number in range(900):
            yield Picture(noise(number), str(number % 3), group=f"group {number // 3}")

    task = tasks.build(tasks.TaskSpec("t", "about", read), tmp_path)
    group_of = {noise(number).tobytes(): number // 3 for number in range(900)}
    parts = [
        {group_of[pixels.tobytes()] for pixels in part.pixels}
        for part in (task.train, task.validation, task.test)
    ]
    assert len(task.test.labels) == 400 and len(task.validation.labels) == 100
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    path = tmp_path / "tasks" / "t.npz"
    tasks.save(task, path)
    found = tasks.load(path)
    assert found.labels == task.labels == ("0", "1", "2")
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(found, name).pixels, getattr(task, name).pixels)
        np.testing.assert_array_equal(getattr(found, name).labels, getattr(task, name).labels)


def test_the_same_picture_with_two_labels_is_left_out(tmp_path):
    def read(cache, draw):
        for number in range(700):
            yield Picture(noise(number), "a", str(number))
            yield Picture(noise(number), "b" if number % 7 == 0 else "a", str(number))

    task = tasks.build(tasks.TaskSpec("t", "about", read), tmp_path)
    kept = [task.train, task.validation, task.test]
    assert sum(len(part.labels) for part in kept) == 600
    assert all(part.labels.max() == 0 for part in kept)


def test_emoji_of_one_beginning_are_one_group(tmp_path, monkeypatch):
    """A runner, a man running and a woman running are often the very same drawing."""
    monkeypatch.setattr(materials, "fetch", lambda package, cache: tmp_path)
    for artist in materials.ARTISTS:
        (tmp_path / "img" / artist / "64").mkdir(parents=True)
        for name in ("runner", "man"):
            Image.new("RGBA", (64, 64), "red").save(tmp_path / f"img/{artist}/64/{name}.png")
    entries = [
        {"unified": "1F3C3", "image": "runner.png", "category": "People & Body", "subcategory": ""},
        {
            "unified": "1F3C3-200D-2642",
            "image": "man.png",
            "category": "People & Body",
            "subcategory": "",
        },
        {
            "unified": "1F3C4",
            "image": "not drawn.png",
            "category": "People & Body",
            "subcategory": "",
        },
    ]
    (tmp_path / "emoji.json").write_text(json.dumps(entries))
    found = list(sources.emoji(tmp_path, Random(0)))
    assert [(picture.label, picture.group) for picture in found] == 4 * [("People & Body", "1F3C3")]
    assert list(materials.emoji(tmp_path, base=True)) == []
    assert all(picture.pixels.shape == (3, SIDE, SIDE) for picture in found)


def test_patches_of_two_cells_share_no_pixel():
    image = Image.fromarray(np.arange(256 * 256, dtype=np.int32).reshape(256, 256))
    cells = [set(np.asarray(cell).ravel().tolist()) for cell in materials.cells(image)]
    assert len(cells) == 16 and len(set.union(*cells)) == sum(map(len, cells))


def test_a_font_says_what_it_lacks(tmp_path):
    path = tmp_path / "font.ttf"
    path.write_bytes(ImageFont.load_default(16).font_bytes)
    font = canvas.Font(path)
    assert font.mask("A").getbbox() is not None
    assert font.mask("\u0e01") is None and font.mask(" ") is None


def test_pictures_are_never_shown_twice_alike():
    side = pretraining.STORED_SIDE
    pixels = np.zeros((5, 4, side, side), dtype=np.uint8)
    pixels[:, :, 12:36, 12:36] = 255
    pictures = pretraining.Pictures(pixels, np.arange(5), np.array([1.0, 1.0, 1.0, 3.0, 0.0]))
    batches = iter(pretraining.Views(pictures, 200, seed=0))
    shown, labels = next(batches)
    assert shown.shape == (200, 3, SIDE, SIDE) and shown.abs().max() <= 1
    assert len({each.numpy().tobytes() for each in shown}) == 200
    seen = torch.bincount(labels, minlength=5)
    assert seen[4] == 0 and seen[3] > 2 * seen[:3].max()


def test_what_the_base_saw_is_in_no_task():
    groups = [f"group {number}" for number in range(400)]
    share = sum(map(materials.for_base, groups)) / len(groups)
    assert 0.15 < share < 0.35
    assert not any(
        name.startswith(tuple(s.upper() for s in sources.SCRIPTS)) for name in pretraining.SYSTEMS
    )


def test_tasks_and_subsets(tmp_path):
    suite = VisionSuite(tmp_path)
    assert len(suite.tasks) == 8
    assert [len(names) for names in suite.subsets] == [4, 8]
    assert set(VisionSuite(tmp_path, quick=True).tasks) < set(suite.tasks)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    made = VisionSuite(tmp_path_factory.mktemp("cache"), quick=True)
    try:
        made.prepare(ignore_progress)
    except InputError as unreachable:
        pytest.skip(str(unreachable))
    return made


# By day the suite of texts is trained (test_text.py), through the same code; this one is pretrained before.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_experts_are_trained_once_merged_and_scored(suite, kind, tmp_path):
    variant = Variant(kind, 0)
    experts = {task: suite.expert(task, variant) for task in suite.tasks}
    for task in suite.tasks:
        assert suite.train(task, variant, ignore_progress) > 0
        assert suite.train(task, variant, ignore_progress) is None
    out = tmp_path / "merged"
    result = covmerge.merge(suite.base, experts, method="ace", out=out)
    matrices = 6 * 6  # query, key, value, output and the MLP's two, by layer
    assert result.stats["totals"]["matrices"] == matrices
    merged = transformers.ViTModel.from_pretrained(out, add_pooling_layer=False).state_dict()
    base = transformers.ViTModel.from_pretrained(suite.base, add_pooling_layer=False).state_dict()
    changed = {name for name, value in merged.items() if not value.equal(base[name])}
    assert len(changed) == (len(base) if kind == "full" else matrices)
    for task, expert in experts.items():
        scores = suite.score(task, "test", out, expert)
        assert len(scores) == 32 and set(scores) <= {0.0, 1.0}
    (batch,) = suite.inputs("letters", 8)
    assert batch["pixel_values"].shape == (8, 3, SIDE, SIDE)
    assert batch["pixel_values"].abs().max() <= 1
    assert suite.describe("digits")["test"] == tasks.splits.TEST_SIZE


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_its_base_can_be_trained_under_control(suite, lora, monkeypatch):
    monkeypatch.setattr(VisionSuite, "controlled_task", "digits")
    training = Training("AdamW", 1e-3, lora)
    found = run_training(suite, training, 0, Size(2, steps=(1,), held=1), ignore_progress)
    assert len(found[1]) == 6 * 6
