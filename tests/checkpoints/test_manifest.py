"""covmerge.json of any shape is read, or refused in plain words."""

import copy
import json
import os

import pytest

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.run.export.expert_models import _check_base
from tests.cli.runs import covmerge as cli
from tests.cli.runs import flags, save_plain


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = save_plain(tmp_path_factory.mktemp("models"))
    cli("merge", *flags(folder), folder / "out")
    return folder / "out"


@pytest.fixture
def manifest(merged):
    """What covmerge.json says; the file is put back."""
    path = merged / MANIFEST_NAME
    content = path.read_bytes()
    yield json.loads(content)
    path.unlink()
    path.write_bytes(content)


def places(value, path=()):
    """Paths to all that a manifest holds; of lists and mappings of one kind the first alone."""
    if path:
        yield path
    if isinstance(value, dict):
        alike = path[-1:] in (("tensors",), ("files",), ("experts",), ("sources",), ("heads",))
        for key in [*value][: 1 if alike else None]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def put(manifest, path, value):
    changed = copy.deepcopy(manifest)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def test_every_place_with_every_wrong_type(merged, manifest):
    """Read, or refused with the place: hundreds of variants, and no other error."""
    refused, tried = set(), 0
    for path in places(manifest):
        for value in (None, [], ["x"], {}, {"x": 1}, 1, -1, 1.5, "x", True, [[None]]):
            tried += 1
            (merged / MANIFEST_NAME).write_text(json.dumps(put(manifest, path, value)))
            try:
                read_manifest(merged)
                covmerge.verify(merged)
            except InputError as error:
                assert "cannot be read as a covmerge manifest: '" in str(error)
                refused.add((path, json.dumps(value)))
    assert tried > 600
    keys = (
        "covmerge",
        "torch",
        "recipe",
        "sources",
        "notes",
        "totals",
        "heads",
        "tensors",
        "files",
    )
    for key in keys:
        assert {((key,), value) for value in ("null", "1", "true")} < refused


VARIANTS = [
    (key, value)
    for key in ("covmerge", "recipe", "sources", "notes", "totals", "heads", "tensors", "files")
    for value in (None, [1], 1, "x", {"x": "y"})
    if (key, value) != ("covmerge", "x")
] + [
    ("family", 1),
    ("rescalers", {"a": "x"}),
    ("comparison", None),
    ("comparison", {"methods": []}),
    ("comparison", {"methods": [{"method": "../.."}]}),
]


@pytest.mark.parametrize(("key", "value"), VARIANTS)
def test_the_commands_refuse_it_by_name(merged, manifest, key, value):
    (merged / MANIFEST_NAME).write_text(json.dumps({**manifest, key: value}))
    for arguments in (["verify", merged], ["push", merged, "org/name"], ["report", merged]):
        ran = cli(*arguments, code=2)
        assert ran.stderr.startswith(f"error: {merged}/covmerge.json cannot be read as a covmerge")
        assert f"'{key}" in ran.stderr


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (place, value)
        for place in ("base", "experts", "method", "parameters", "output")
        for value in (None, [], 1, True)
        if (place, value) != ("base", None)  # a merge without a base
    ],
)
def test_a_recipe_of_wrong_types(merged, manifest, place, value):
    (merged / MANIFEST_NAME).write_text(json.dumps(put(manifest, ("recipe", place), value)))
    for command in ("verify", "report"):
        assert f"recipe.{place}" in cli(command, merged, code=2).stderr


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[1]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":1,"a":2}',
        b"\x00" * 99,
    ],
)
def test_what_is_no_json_object(merged, manifest, content):
    (merged / MANIFEST_NAME).write_bytes(content)
    for arguments in (["verify", merged], ["push", merged, "org/name"], ["report", merged]):
        assert "cannot be read as a covmerge manifest" in cli(*arguments, code=2).stderr


def test_numbers_that_are_none(merged, manifest):
    changed = put(manifest, ("totals", "rounding_loss"), float("nan"))
    (merged / MANIFEST_NAME).write_text(json.dumps(changed))
    assert "totals.rounding_loss" in cli("verify", merged, code=2).stderr


def test_what_is_no_regular_file(merged, manifest):
    path = merged / MANIFEST_NAME
    for lay in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)):
        path.unlink()
        lay()
        with pytest.raises(InputError, match="cannot be read"):
            covmerge.verify(merged)
    path.unlink()
    path.write_text("put back by the fixture")


def test_load_expert_tells_it_too(merged, manifest):
    path = merged / MANIFEST_NAME
    path.write_text(json.dumps(put(manifest, ("sources", "base", "content"), "x")))
    with pytest.raises(InputError, match=r"sources\.base\.content"):
        _check_base(merged, read_manifest(merged), open_checkpoint(merged / "model.safetensors"))
