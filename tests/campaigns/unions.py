"""Merges of models with different tokens: added ones, other orders, resized tables, damaged files.

    python -m tests.campaigns.unions --count 200

What a row is to be is found by its token, in the vocabularies that the library tokenizers reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, load_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.campaigns import formats, outcomes
from tests.campaigns.merged import Mean, Tensors, command, verdict
from tests.mergekit.token_cases import LETTERS, PAIRS, SPECIAL, TABLES, Words, save_model

_NEW = ("<tool>", "<|im_start|>", "<|im_end|>", "<pad>", "<x>")
_FILES = ("tokenizer.json", "tokenizer.json", "config.json", "model.safetensors")
_FILES += ("tokenizer_config.json",)
# No fine-tunes: what is random is compared as it is.
_ALLOWED = ["large-update", "unlike-updates", "outlier-tensor"]


def words(random: Random, base: Words | None) -> Words:
    """A vocabulary, mostly that of a base with more tokens."""
    added = random.sample(_NEW, random.randrange(4))
    order = [*SPECIAL, *LETTERS, *PAIRS]
    if base is None:
        return Words(order, added[:1], padding=random.choice((0, 0, 3)))
    if random.random() < 0.3:  # the same numbers are other tokens
        letters = random.sample(LETTERS, len(LETTERS))
        order = [
            *random.sample(SPECIAL, 3),
            *letters,
            *random.sample(PAIRS, random.randrange(1, 5)),
        ]
        if random.random() < 0.4:  # what is a word of the base's is added here
            added += [pair for pair in PAIRS if pair not in order][:1]
    elif random.random() < 0.7:
        added = [*base.added, *(token for token in added if token not in base.added)]
    return Words(order, added, padding=random.choice((0, 0, 0, 5, -1)))


def _ids(folder: Path) -> dict[str, int]:
    """Tokens and their numbers; transformers adds special ones that tokenizer_config.json alone states."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = stated.get(key)
        if isinstance(token, str) and token and token not in ids:
            ids[token] = max(ids.values()) + 1
    return ids


def read(folder: Path) -> tuple[dict[str, int], Tensors] | str:
    """Tokens and tensors of a model, or why there are none."""
    try:
        ids = _ids(folder)
        tensors = load((folder / "model.safetensors").read_bytes())
    except Exception as error:
        return str(error)
    if len({tensors[name].shape for name in TABLES if name in tensors}) > 1:
        return "embedding and head have other shapes"
    return ids, tensors


def seen(
    ids: Mapping[str, int], rows: int, sources: Mapping[str, tuple[Mapping[str, int], Tensors]]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of all sources in float64, with the rows of the output's tokens."""
    found = {key: {n: t.double() for n, t in own.items()} for key, (_, own) in sources.items()}
    for name in TABLES:
        tables = {key: own[name] for key, own in found.items() if name in own}
        made = {key: torch.zeros(rows, own.shape[1]).double() for key, own in tables.items()}
        for token, at in ids.items():
            has = {}
            for key, table in tables.items():
                number = sources[key][0].get(token, len(table))
                if number < len(table):
                    has[key] = table[number]
            others = [has["base"]] if "base" in has else [*has.values()]
            given = torch.stack(others).mean(0) if others else torch.zeros(8).double()
            for key, table in made.items():
                table[at] = has.get(key, given.to(sources[key][1][name].dtype))
        named = sorted(ids.values())
        padding = sorted({*range(rows)} - {*named})
        for key, table in made.items():
            table[padding] = table[named].mean(0).to(sources[key][1][name].dtype).double()
            found[key][name] = table
    return found


def merge(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge two or three vocabularies, one in two times with a file of one damaged."""
    own: Words | None = None
    dtype = random.choice(("float32", "float32", "bfloat16"))
    arch = random.choice(("llama", "llama", "gpt2"))  # whose head is its embedding
    names = ["base", *random.sample(("t0", "t1", "t2"), random.choice((2, 2, 3)))]
    for name in names:
        drawn = words(random, own)
        own = own or drawn
        save_model(folder / name, arch, name, drawn, dtype)
    damaged = random.random() < 0.5
    if damaged:
        path = folder / random.choice(names) / random.choice(_FILES)
        path.write_bytes(formats.change(path.name, path.read_bytes(), random))
    more: dict[str, Any] = {"source": random.choice(("union", "union", "union", *names))}
    if random.random() < 0.3:
        more["pad_to_multiple_of"] = random.choice((8, 64))
    mean = Mean.drawn(random, names[1:])
    recipe = mean.recipe(
        folder,
        folder / "base",
        {name: folder / name for name in names[1:]},
        tokenizer=more,
        output={"dtype": "float32"},
        tensors={"embeddings": "method", "output_head": "method"},
    )
    out = folder / "out"
    ended = command("merge", recipe, out)
    values = _expected(out, mean, {name: read(folder / name) for name in names}, more)
    return verdict(ended, out, values, {*names, "tokenizer"}, right=not damaged)


def _table(tensors: Tensors) -> Tensor:
    """The embedding."""
    return next(tensors[name] for name in TABLES if name in tensors and name != "lm_head.weight")


def _expected(
    out: Path, mean: Mean, sources: Mapping[str, Any], rules: Mapping[str, Any]
) -> Tensors | str:
    """What the output is to be by its own tokens, which must be all that were asked for."""
    for found in sources.values():
        if isinstance(found, str):
            return found
    if not (out / "tokenizer.json").is_file():
        return "the output has no tokenizer"
    ids = _ids(out)
    source = rules["source"]
    first = sources["base" if source == "union" else source][0]
    wanted = set(first)
    for own, tensors in sources.values() if source == "union" else ():
        wanted |= {token for token, at in own.items() if at < len(_table(tensors))}
    if wanted != {*ids} or any(ids[token] != at for token, at in first.items()):
        return f"tokens {sorted(wanted ^ {*ids})} are not as asked for"
    step = rules.get("pad_to_multiple_of", 1)
    rows = -(-(max(ids.values()) + 1) // step) * step
    size = json.loads((out / "config.json").read_text())["vocab_size"]
    if size != rows or len(_table(load_file(out / "model.safetensors"))) != rows:
        return f"config.json has {size} tokens, where {rows} are right"
    found = seen(ids, rows, sources)
    return mean.of(found.pop("base"), found)


KINDS: dict[str, outcomes.Kind] = {"vocabularies": merge}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
