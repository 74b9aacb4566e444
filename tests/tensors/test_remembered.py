"""A skeleton that is remembered is the one that was built; whatever is wrong with the file, it is built."""

import os
import sys
from pathlib import Path

import pytest

from covmerge.files.tensors import remembered
from covmerge.files.tensors.remembered import remembered_skeleton
from covmerge.files.tensors.skeleton import Skeleton, SkeletonUnavailable, build_skeleton
from tests.tensors.models import MODELS, saved


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "skeletons"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that had to be built."""
    built: list[str] = []

    def counted(headers, config) -> Skeleton:
        built.append(config["architectures"][0])
        return build_skeleton(headers, config)

    monkeypatch.setattr(remembered, "build_skeleton", counted)
    return built


@pytest.mark.parametrize("key", MODELS)
def test_what_is_remembered_is_what_was_built(key: str, builds: list[str]):
    model = saved(key)
    first = remembered_skeleton(model.headers, model.config)
    assert remembered_skeleton(model.headers, model.config) == first
    assert first == build_skeleton(model.headers, model.config)
    assert len(builds) == 1


def test_another_config_other_names_and_another_release_are_built(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
):
    model = saved("bert")
    fewer = dict(list(model.headers.items())[1:])
    for headers, config in (
        (model.headers, model.config),
        (fewer, model.config),
        (model.headers, {**model.config, "tie_word_embeddings": False}),
    ):
        remembered_skeleton(headers, config)
    assert len(builds) == 3
    monkeypatch.setattr(remembered, "_release", lambda: "99.0.0")
    remembered_skeleton(model.headers, model.config)
    assert len(builds) == 4


def test_between_releases_nothing_is_kept(
    builds: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
):
    model = saved("bert")
    monkeypatch.setattr(remembered, "_release", lambda: "6.0.0.dev0")
    remembered_skeleton(model.headers, model.config)
    remembered_skeleton(model.headers, model.config)
    assert len(builds) == 2
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"architecture": "BertModel"', b"\xff\xfe"])
def test_a_file_that_is_not_whole_is_replaced(builds: list[str], cache: Path, content: bytes):
    model = saved("bert")
    first = remembered_skeleton(model.headers, model.config)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    assert remembered_skeleton(model.headers, model.config) == first
    assert file.read_bytes() == whole
    assert len(builds) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(builds: list[str], cache: Path):
    cache.parent.mkdir()
    cache.write_text("no folder")
    model = saved("bert")
    assert remembered_skeleton(model.headers, model.config).architecture == "BertModel"
    assert builds == ["BertModel"]


def test_a_cache_that_cannot_be_written_may_be_read(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
):
    model = saved("bert")
    first = remembered_skeleton(model.headers, model.config)

    def refused(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refused)
    assert remembered_skeleton(model.headers, model.config) == first
    assert len(builds) == 1


def test_a_write_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    model = saved("bert")
    assert remembered_skeleton(model.headers, model.config).architecture == "BertModel"
    assert list(cache.iterdir()) == []


def test_a_failure_is_not_remembered(cache: Path):
    for _ in range(2):
        with pytest.raises(SkeletonUnavailable, match="unknown to transformers"):
            remembered_skeleton({}, {"model_type": "nonesuch"})
    assert not cache.exists()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch):
    model = saved("bert")
    remembered_skeleton(model.headers, model.config)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SkeletonUnavailable, match="not installed"):
        remembered_skeleton(model.headers, model.config)


def test_the_least_used_go(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "_KEPT", 2)
    bert, gpt2, llama = (saved(key) for key in ("bert", "gpt2", "llama"))
    remembered_skeleton(bert.headers, bert.config)
    (of_bert,) = cache.iterdir()
    os.utime(of_bert, (0, 0))
    remembered_skeleton(gpt2.headers, gpt2.config)
    (of_gpt2,) = set(cache.iterdir()) - {of_bert}
    os.utime(of_gpt2, (1, 1))
    remembered_skeleton(bert.headers, bert.config)  # used again
    remembered_skeleton(llama.headers, llama.config)
    assert of_bert.exists()
    assert not of_gpt2.exists()
