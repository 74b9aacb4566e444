"""CLIP's image encoders with zero-shot heads, on folders of images."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from covmerge.errors import CheckpointError, InputError
from covmerge_lab.module_file import read_weights
from covmerge_lab.reproduce.bench import Bench, optional
from covmerge_lab.reproduce.published import Column

_PICTURES = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".webp", ".tif", ".tiff")
_VISUAL = "visual."
_PRETRAINED = "openai"  # what the suite's encoders were fine-tuned from
_BATCH = 64


@dataclass(frozen=True)
class Head:
    """A linear layer on normalised features: `weight` `(classes, features)`, `bias` `(classes,)`."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Images:
    """One task's test set: files, the number of the class of each, and the names of the classes."""

    files: Sequence[Path]
    labels: Sequence[int]
    classes: Sequence[str]


def scores(bench: Bench, model: Path, columns: Sequence[Column]) -> Mapping[str, float]:
    """Return accuracy in percent by column.

    A task's images are `DATA/TASK/CLASS/*.png` (or .jpg, ...). The classes are in the order of their
    folders' names, or of the lines of `DATA/TASK/classes.txt`.
    """
    open_clip = optional("open_clip")
    with _unwarned():
        encoder, _, prepare = open_clip.create_model_and_transforms(
            bench.setting.model, force_quick_gelu=True
        )
    _load_visual(encoder, model)
    encoder = encoder.eval().to(bench.device)
    with torch.inference_mode():
        return {column.title: 100 * _score(bench, encoder, prepare, column) for column in columns}


@contextmanager
def _unwarned() -> Generator[None, None, None]:
    """Keep open_clip from warning of random weights, which are replaced at once."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _load_visual(encoder: Any, file: Path) -> None:
    """Put the image tower of a checkpoint into a model; the text tower is not needed."""
    tensors = {
        name[name.index(_VISUAL) + len(_VISUAL) :]: tensor
        for name, tensor in read_weights(file).items()
        if name.startswith((_VISUAL, f"model.{_VISUAL}"))
    }
    try:
        encoder.visual.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{file} does not fit the image encoder of open_clip: {str(error).splitlines()[-1].strip()}"
        ) from error


def _score(bench: Bench, encoder: Any, prepare: Any, column: Column) -> float:
    images = _images(bench, column.task)
    head = _head(bench, column, images.classes)
    if len(head.weight) != len(images.classes):
        raise InputError(
            f"{column.task}: its head has {len(head.weight)} classes and its images {len(images.classes)}:"
            " name all of them, in the head's order, in classes.txt beside their folders"
        )
    right = 0
    for start in range(0, len(images.files), _BATCH):
        batch = torch.stack(
            [_picture(file, prepare) for file in images.files[start : start + _BATCH]]
        )
        features = normalize(encoder.encode_image(batch.to(bench.device)).float().cpu(), dim=-1)
        chosen = linear(features, head.weight, head.bias).argmax(dim=1)
        right += int((chosen == torch.tensor(images.labels[start : start + _BATCH])).sum())
    return right / len(images.files)


def _picture(file: Path, prepare: Any) -> Tensor:
    pictures = optional("PIL.Image")
    with pictures.open(file) as picture:
        return prepare(picture)


def _images(bench: Bench, task: str) -> Images:
    if bench.data is None:
        raise InputError(
            f"{task}'s images are not fetched: pass --data DIR with DIR/{task}/CLASS/*.png"
        )
    folder = bench.data / task
    if not folder.is_dir():
        raise InputError(f"there is no {folder}: put {task}'s test images there, a folder a class")
    names = _lines(folder / "classes.txt") or sorted(
        place.name for place in folder.iterdir() if place.is_dir()
    )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(
            file for file in (folder / name).glob("*") if file.suffix.lower() in _PICTURES
        )
        files += found
        labels += [label] * len(found)
    if not files:
        raise InputError(f"{folder} holds no images ({', '.join(_PICTURES)}), a folder a class")
    # Every so many, so that a limited run sees all classes.
    step = 1 if bench.limit is None else max(1, len(files) // bench.limit)
    kept = range(0, len(files), step)[: bench.limit]
    return Images([files[n] for n in kept], [labels[n] for n in kept], names)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _head(bench: Bench, column: Column, classes: Sequence[str]) -> Head:
    """The suite's file beside the expert or its folder, or else a head made of the class names."""
    origin = bench.models.experts[column.expert]
    for folder in (origin.parent, origin.parent.parent):
        for name in (f"head_{column.task}Val.pt", f"head_{column.task}.pt"):
            if (folder / name).is_file():
                return _read_head(folder / name)
    return _zero_shot_head(bench, column.task, classes)


def _read_head(file: Path) -> Head:
    tensors = read_weights(file)
    if "weight" not in tensors:
        raise CheckpointError(f"{file} has no 'weight' but {', '.join(tensors)}: is it a head?")
    weight = tensors["weight"].float()
    return Head(weight, tensors.get("bias", torch.zeros(len(weight))).float())


def _zero_shot_head(bench: Bench, task: str, classes: Sequence[str]) -> Head:
    """Mean text features of a class's prompts, scaled as CLIP's logits."""
    open_clip = optional("open_clip")
    templates = _lines((bench.data or Path()) / task / "templates.txt") or ["a photo of a {}."]
    try:
        model, _, _ = open_clip.create_model_and_transforms(
            bench.setting.model, pretrained=_PRETRAINED, cache_dir=str(bench.cache / "open_clip")
        )
    except Exception as error:  # the client's transport, and with it its errors, changes by version
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"{task} has no head file beside its expert, and CLIP's text encoder, to make one, could not "
            f"be fetched ({type(error).__name__}: {reason}): add head_{task}Val.pt, or check the connection"
        ) from error
    tokenize = open_clip.get_tokenizer(bench.setting.model)
    weight = torch.stack([_class_feature(model.eval(), tokenize, templates, n) for n in classes])
    return Head(model.logit_scale.exp() * weight, torch.zeros(len(classes)))


def _class_feature(model: Any, tokenize: Any, templates: Sequence[str], name: str) -> Tensor:
    spoken = name.replace("_", " ")
    texts = tokenize([template.replace("{}", spoken) for template in templates])
    features = normalize(model.encode_text(texts).float(), dim=-1)
    return normalize(features.mean(dim=0), dim=0)
