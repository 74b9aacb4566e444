"""The base of the suite `gpt2`: a small GPT-2 that learns English, and to answer questions in a line.

What it reads is in `lines.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from covmerge_lab import training
from covmerge_lab.llm.lines import Lines
from covmerge_lab.training import Settings, device, products
from covmerge_lab.workers import OnProgress

# Their annotations are partial.
_Config: Any = transformers.GPT2Config
_Gpt2: Any = transformers.GPT2LMHeadModel
_Fast: Any = transformers.PreTrainedTokenizerFast

SEED = 7
WINDOW = 256  # tokens
VOCABULARY = 1024
LEARNT_FROM = 20_000  # lines
SETTINGS = Settings(steps=6000, learning_rate=2e-3, batch_size=8, weight_decay=0.05)

_END = "<|endoftext|>"


def config(vocabulary: int) -> Any:
    """Return the architecture, 3.0 million parameters."""
    return _Config(
        vocab_size=vocabulary,
        n_positions=2 * WINDOW,
        n_embd=192,
        n_layer=6,
        n_head=3,
        initializer_range=0.07,  # about 1 / √192, as in the suite `vision`
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def tokenizer(lines: Iterator[str]) -> Any:
    """Return a tokenizer of byte pairs, learnt from lines; each digit is a token."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    learnt.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(islice(lines, LEARNT_FROM), trainer)
    return _Fast(tokenizer_object=learnt, bos_token=_END, eos_token=_END, pad_token=_END)


def windows(lines: Iterator[str], tokens: Any, settings: Settings) -> Iterator[Tensor]:
    """Put lines one after another, an end of text between them; batches `(batch, WINDOW)` of their ids."""
    held: list[int] = []
    while True:
        while len(held) < settings.batch_size * WINDOW:
            held += [tokens.eos_token_id, *tokens(next(lines))["input_ids"]]
        batch, held = held[: settings.batch_size * WINDOW], held[settings.batch_size * WINDOW :]
        yield torch.tensor(batch).view(settings.batch_size, WINDOW)


def pretrain(cache: Path, settings: Settings, folder: Path, on_progress: OnProgress) -> None:
    """Train the base, and save it with its tokenizer."""
    tokens = tokenizer(iter(Lines(cache, SEED)))
    torch.default_generator.manual_seed(SEED)
    model = _Gpt2(config(len(tokens))).to(device()).train()

    def loss(ids: Tensor) -> Tensor:
        there = ids.to(device())
        with products():
            return model(there, attention_mask=torch.ones_like(there), labels=there).loss

    batches = windows(iter(Lines(cache, SEED)), tokens, settings)
    training.fit(model, batches, loss, settings, on_progress)
    model.save_pretrained(str(folder))
    tokens.save_pretrained(str(folder))
