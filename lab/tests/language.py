"""A tiny language model with a tokenizer of bytes, and questions for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from covmerge_lab import training
from covmerge_lab.llm import definitions, model, tasks
from covmerge_lab.llm.tasks import Question

END = "<end>"
LEARNT = [Question(f"{number} and\nNext:", f"{number + 1}") for number in range(6)]
UNKNOWN = [Question(f"{number}?\nWord:", "word") for number in range(3)]


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Prepare datasets in a folder of the test's own, and ask no hub."""
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save_llama(folder: Path) -> Path:
    """A random model."""
    vocabulary = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(vocabulary)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token=END, eos_token=END, pad_token=END
    ).save_pretrained(folder)
    return folder


def save_taught(folder: Path) -> Path:
    """A model that answers what is in `LEARNT`, by heart."""
    taught = model.load(save_llama(folder))
    encoder = model.Encoder(folder)
    training.fit(
        taught.train(),
        encoder.answered(LEARNT, len(LEARNT), seed=0),
        lambda batch: model.answer_loss(taught, *batch),
        training.Settings(150, 1e-2),
        lambda done, total: None,
    )
    taught.save_pretrained(folder)
    return folder


def define(folder: Path, task: str = "next") -> Path:
    """`covmerge_next` for lm-eval: what a taught model knows, and half as much that it does not."""
    tasks.save(LEARNT + UNKNOWN, folder / "questions.jsonl")
    definitions.write(task, folder / "questions.jsonl", 8, folder / "definitions")
    return folder / "definitions"
