"""What we write, transformers reads: weights, config and tokenizer."""

from pathlib import Path

import pytest
import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.layout import plan_layout
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.files.stores.local import LocalFolder
from covmerge.run.export.companions import copy_companions
from covmerge.run.export.config import ConfigChanges
from covmerge.run.export.files import write_indices

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("shard_size", [10**9, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_written_model_loads(tmp_path: Path, shard_size: int, dtype: torch.dtype) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    model.save_pretrained(base)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    (base / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(base / "vocab.txt")).save_pretrained(base)

    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    layout = plan_layout(
        [TensorHeader(name, tuple(t.shape), t.dtype) for name, t in state.items()], shard_size
    )
    out.mkdir()
    writer = ShardWriter(out, layout)
    for name, tensor in reversed(state.items()):
        writer.write(name, tensor)
    write_indices({"": layout}, LocalFolder(out))
    copied = copy_companions(
        base, LocalFolder(out), ConfigChanges(None if dtype is torch.float32 else dtype)
    )
    assert copied.notes == ()

    loaded, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    text = "a b f"
    expected = transformers.AutoTokenizer.from_pretrained(base)(text)["input_ids"]
    assert transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"] == expected
