"""Tiny saved models with a tokenizer, and examples for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.models import TEXT, build, fine_tuned

WORDS = [f"w{number}" for number in range(60)]


def save_tokenizer(folder: Path, *, pad: bool = True) -> None:
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        eos_token="[EOS]",
        pad_token="[PAD]" if pad else None,
        model_max_length=16,
    ).save_pretrained(folder)


def classifier(labels: int = 3, **options: object) -> torch.nn.Module:
    """A BERT with a head for labels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(
                **TEXT,
                num_hidden_layers=2,
                intermediate_size=24,
                max_position_embeddings=32,
                num_labels=labels,
                **options,
            )
        ).eval()


def save(model: torch.nn.Module | str, folder: Path, *, pad: bool = True) -> Path:
    """Save a model, or the one of `tests.e2e.models` of that name, with a tokenizer."""
    (build(model) if isinstance(model, str) else model).save_pretrained(folder)
    save_tokenizer(folder, pad=pad)
    return folder


def save_family(base: torch.nn.Module, folder: Path, experts: int = 2) -> tuple[Path, dict]:
    paths = {
        f"e{n}": save(fine_tuned(base, seed=n, scale=0.05 * n), folder / f"e{n}")
        for n in range(1, experts + 1)
    }
    return save(base, folder / "base"), paths


def texts(count: int = 12, seed: int = 0) -> list[str]:
    """Texts of 2 to 9 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[i] for i in torch.randint(0, 60, (length,), generator=generator).tolist())
        for length in lengths
    ]


def write_texts(path: Path, count: int = 12, seed: int = 0) -> Path:
    path.write_text("\n".join(texts(count, seed)) + "\n", encoding="utf-8")
    return path


def write_json_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def encode(folder: Path, lines: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(lines, padding=len(lines) > 1, return_tensors="pt"))
