"""The second merge of an architecture does without transformers, and writes the same bytes."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.forked import printed

_MERGE = """
import sys
import covmerge

base, expert, out = sys.argv[1:]
covmerge.merge(base, {"a": expert}, "task_arithmetic", out, allow=["not-a-fine-tune"])
print("transformers" in sys.modules)
"""


@pytest.mark.slow
def test_the_second_merge_does_not_import_transformers(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    for seed, name in enumerate(("base", "a")):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)

    def merged(out: str) -> str:
        folders = [str(tmp_path / name) for name in ("base", "a", out)]
        return printed(_MERGE, *folders).split()[-1]

    assert (merged("first"), merged("second")) == ("True", "False")
    files = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
