"""The base's part in texts that its experts write: it begins them, and each expert goes on.

So experts are met where the base would be, and not only where they would go by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.statistics.examples import Reading, longest_text, size_of
from covmerge.plan.statistics.generated import Generated
from covmerge.plan.statistics.model import load_model
from covmerge.plan.statistics.written import (
    BEGUN,
    Begun,
    Written,
    ends_of,
    rows_of,
    words_of,
    writes,
)


def begin(
    base: Checkpoint,
    generated: Generated,
    reading: Reading,
    device: str | torch.device,
    advance: Callable[[int], None],
) -> Generated:
    """Return the inputs with what the base began, at the same temperature and seed; the base is let go.

    Args:
        base: a language model.
        generated: inputs that start from the base.
        reading: how many.
        device: where the base runs.
        advance: called with the number of texts that were begun.

    Raises:
        InputError: it writes nothing, or cannot be run.
    """
    model = load_model(base, device, head=False, writing=True)
    if not writes(model.whole):
        raise InputError(
            f"{base.source} is no language model that writes: leave out {Hint('start', 'base')}"
        )
    tokenizer = model.tokenizer(reading)
    limit = reading.max_length or longest_text(tokenizer, model.whole.config)
    # Of short texts half, so that there is room to go on.
    tokens = BEGUN if limit is None else max(1, min(BEGUN, limit // 2 - 1))
    how = Written("bos", tokens, generated.temperature or 1.0, generated.seed)
    ends = ends_of(model, tokenizer)
    texts: list[tuple[int, ...]] = []
    for batch in how.batches(model, reading):
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            unpadded: Any = ids[mask.bool()]
            text = cast("list[int]", unpadded.tolist())
            # The first token is the start, which may be one that ends texts too.
            over = len(text) > 1 and text[-1] in ends
            texts.append(tuple(text[:-1] if over else text))
        advance(size_of(batch))
    known, written = words_of(tokenizer), sorted({token for text in texts for token in text})
    words = tuple((token, known[token]) for token in written if token in known)
    begun = Begun(base.source, tokens, tuple(texts), rows_of(model), words)
    return replace(generated, begun=begun)
