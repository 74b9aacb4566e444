import json
import os
from pathlib import Path

import pytest
import torch

from covmerge.errors import CheckpointError
from covmerge.files.stores.local import LocalFolder
from covmerge.run.export.companions import copy_companions
from covmerge.run.export.config import ConfigChanges
from tests.folders import contents

COMPANIONS = [
    "1_Pooling/config.json",
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
]
LEFT = [
    ".gitattributes",
    "README.md",
    "covmerge.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    for name in [*COMPANIONS, *LEFT]:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([] if name == "modules.json" else {"file": name}))
    return base


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    return out


def test_companions_are_copied_byte_for_byte_and_nothing_else(base: Path, out: Path) -> None:
    copied = copy_companions(base, LocalFolder(out))
    assert sorted(copied.copied) == COMPANIONS
    assert copied.notes == ()
    assert contents(out) == {name: (base / name).read_bytes() for name in COMPANIONS}
    assert copy_companions(base, LocalFolder(out)) == copied  # a resumed merge does it again


def test_a_base_without_a_folder_is_said(out: Path) -> None:
    copied = copy_companions(None, LocalFolder(out))
    assert copied.copied == () and "no config or tokenizer" in copied.notes[0]
    assert contents(out) == {}


def test_code_is_named_and_not_copied(base: Path, out: Path) -> None:
    auto_map = {"AutoModel": "modeling_x.XModel"}
    (base / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    (base / "modeling_x.py").write_text("raise SystemExit")
    (base / "handler.txt").write_text("")
    (base / "onnx").mkdir()
    copied = copy_companions(base, LocalFolder(out))
    assert sorted(contents(out)) == COMPANIONS
    needs, code, other = copied.notes
    assert "AutoModel" in needs and "modeling_x.XModel" in needs
    assert code.startswith("custom code of the base is not copied: modeling_x.py;")
    assert other == f"not copied from {base}: handler.txt, onnx/"


def test_folders_of_modules_are_those_that_are_named(base: Path, out: Path) -> None:
    """Whatever their numbers and names; a router names its own."""
    files = {
        "modules.json": [{"path": "10_Custom"}, {"path": "2_Router"}],
        "10_Custom/any_config.json": {},
        "10_Custom/custom.py": {},
        "10_Custom/model.safetensors": {},
        "2_Router/router_config.json": {"types": {"doc_0_Dense": "Dense"}, "structure": {}},
        "2_Router/doc_0_Dense/config.json": {},
        "2_Router/doc_0_Dense/model.safetensors.index.json": {},
    }
    for name, content in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(json.dumps(content))
    copied = copy_companions(base, LocalFolder(out))
    beside = {n for n in files if n.endswith(".json") and "safetensors" not in n}
    assert {*copied.copied} == {*COMPANIONS, *beside}
    assert copied.notes == (f"not copied from {base}: 10_Custom/custom.py",)


CONFIG = """{
    "dtype": "float32", "torch_dtype": "float32",
    "eps": 1e-05, "limit": [0.0, Infinity], "name": "mod\\u00e8le",
    "text_config": {"dtype": "float32", "inner_config": {"torch_dtype": "float16"}},
    "quantization_config": {"dtype": "float32"},
    "head": {"dtype": "float32"}
}"""


def test_config_states_the_outputs_dtype(base: Path, out: Path) -> None:
    (base / "config.json").write_text(CONFIG)
    copy_companions(base, LocalFolder(out), ConfigChanges(torch.bfloat16))
    expected = json.loads(CONFIG)
    expected["dtype"] = expected["torch_dtype"] = "bfloat16"
    expected["text_config"] = {"dtype": "bfloat16", "inner_config": {"torch_dtype": "bfloat16"}}
    written = json.loads((out / "config.json").read_text())
    assert written == expected
    assert list(written) == list(expected)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ('{"dtype" : "bfloat16"}', torch.bfloat16),
        ('{"torch_dtype" : null}', torch.bfloat16),
        ('{"hidden_size" : 8}', torch.bfloat16),
        (CONFIG, None),
    ],
)
def test_config_keeps_its_bytes_where_nothing_is_wrong(
    base: Path, out: Path, config: str, dtype: torch.dtype | None
) -> None:
    (base / "config.json").write_text(config)
    copy_companions(base, LocalFolder(out), ConfigChanges(dtype))
    assert (out / "config.json").read_text() == config


@pytest.mark.parametrize("config", ["{", "[]", "[" * 100_000, '{"a": 1, "a": 2}', "\xff"])
def test_a_config_that_is_no_object_is_refused(base: Path, out: Path, config: str) -> None:
    (base / "config.json").write_text(config, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        copy_companions(base, LocalFolder(out), ConfigChanges(torch.float16))


@pytest.mark.parametrize("link", ["tokenizer.json", "config.json", "1_Pooling"])
def test_a_link_that_leaves_the_folder_is_refused(
    base: Path, out: Path, tmp_path: Path, link: str
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text('{"secret": true}')
    target = base / link
    if target.is_dir():
        (target / "config.json").unlink()
        target.rmdir()
        target.symlink_to(secret)
    else:
        target.unlink()
        target.symlink_to(secret / "config.json")
    with pytest.raises(CheckpointError, match=f"{link} is a link to {secret}"):
        copy_companions(base, LocalFolder(out))
    assert not any(b"secret" in content for content in contents(out).values())


def test_the_hubs_cache_is_followed(base: Path, out: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    for i, name in enumerate(COMPANIONS):
        (repository / "blobs" / f"{i}").write_bytes((base / name).read_bytes())
        (snapshot / name).parent.mkdir(exist_ok=True)
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{i}")
    copy_companions(snapshot, LocalFolder(out))
    assert contents(out) == {name: (base / name).read_bytes() for name in COMPANIONS}
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_what_is_too_large_is_refused_unread(base: Path, out: Path) -> None:
    for name, size in [("config.json", 17 << 20), ("tokenizer.json", 513 << 20)]:
        content = (base / name).read_bytes()
        os.truncate(base / name, size)
        with pytest.raises(CheckpointError, match=f"{name} has {size} bytes"):
            copy_companions(base, LocalFolder(out))
        (base / name).write_bytes(content)


def test_a_pipe_is_not_waited_for(base: Path, out: Path) -> None:
    (base / "tokenizer.json").unlink()
    os.mkfifo(base / "tokenizer.json")
    assert copy_companions(base, LocalFolder(out)).notes == (
        f"not copied from {base}: tokenizer.json",
    )
