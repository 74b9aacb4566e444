"""Train tiny SentencePiece models, as Llama (BPE, bytes for what is unknown) and T5 (unigram) have them.

In an environment with sentencepiece 0.2.3:

    python -m tests.vocabulary.make_sentencepiece
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "sentencepiece"
TEXT = """
the model merges two experts of one base and writes tokens that read well while other words
appear here now often code math chat hello world paper layer weight sum
"""
WORDS = TEXT.split()
OTHERS = [*WORDS[:20], "alpha", "beta", "gamma", "delta"]
LLAMA: dict[str, Any] = {
    **{"model_type": "bpe", "byte_fallback": True, "split_digits": True, "vocab_size": 340},
    **{"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
    **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
}
T5: dict[str, Any] = {
    **{"model_type": "unigram", "normalization_rule_name": "identity"},
    **{"unk_id": 2, "bos_id": -1, "eos_id": 1, "pad_id": 0},
}


def train(name: str, words: list[str], **how: Any) -> None:
    """Train a model on sentences of these words."""
    package: Any = importlib.import_module("sentencepiece")
    drawn = random.Random(name)
    sentences = (" ".join(drawn.choice(words) for _ in range(12)) for _ in range(400))
    path = FOLDER / f"{name}.model"
    with path.open("wb") as file:
        package.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=file, minloglevel=2, **how
        )


if __name__ == "__main__":
    train("llama", WORDS, **LLAMA)
    train("llama_other", OTHERS, **LLAMA)
    train("t5", WORDS, **T5, vocab_size=45)
    train("t5_other", OTHERS, **T5, vocab_size=40)
