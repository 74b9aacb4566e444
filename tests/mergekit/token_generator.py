"""Recipes of mergekit with tokenizers, drawn at random over the models of `token_cases.py`.

The vocabularies are those of its base and experts, and of one whose last token has no row. Nothing here
imports mergekit or covmerge.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.mergekit import token_cases
from tests.mergekit.generator import DTYPES, METHODS, say_parameters, slices
from tests.mergekit.token_cases import WORDS, Words

# What stands in another model's vocabulary, or in none, is what rules of tokens are about.
TOKENS = ("a", "ab", "op", "</s>", "<|im_start|>", "<|im_end|>", "<tool>", "<pad>", "<new>")
# Of a base's tokens and a `<pad>` that was added without a row for it.
SHORT = Words(WORDS["base"].order, ("<pad>",), padding=-1)
_EXPERTS = ("t0", "t1", "t2")


def save_models(folder: Path) -> None:
    """Write the models."""
    token_cases.save_models(folder)
    for name in token_cases.FOLDERS:
        token_cases.save_one(folder, name, "t3", SHORT)


def drawn(random: Random) -> dict[str, Any]:
    """Return a recipe with a tokenizer; one in twelve names one of a model that is not merged."""
    name = random.choice(list(METHODS))
    method = METHODS[name]
    folder = random.choice(list(token_cases.FOLDERS))
    least, most = method.experts
    models = [f"./{folder}/{own}" for own in random.sample(_EXPERTS, random.randint(least, most))]
    if random.random() < 1 / 12:
        models[-1] = f"./{folder}/t3"
    recipe: dict[str, Any] = {"merge_method": name}
    based = method.base == "required" or (method.base == "optional" and random.random() < 0.5)
    base = f"./{folder}/base"
    if based:
        recipe["base_model"] = base
    if random.random() < 0.2:
        pieces = recipe["slices"] = slices(random, method, models, base if based else None)
        sources = [own for piece in pieces for own in piece["sources"]]
    else:
        pieces = []
        sources = recipe["models"] = [{"model": model} for model in models]
        if based and random.random() < 0.3:
            sources.insert(random.randint(0, len(sources)), {"model": base})
    say_parameters(random, method, recipe, pieces, sources)
    for key, share in (("dtype", 0.4), ("out_dtype", 0.15)):
        if random.random() < share:
            recipe[key] = random.choice(DTYPES)
    known = [*dict.fromkeys(own["model"] for own in sources), *([base] if based else [])]
    if random.random() < 1 / 12:
        known.append(f"./{folder}/{random.choice(_EXPERTS)}")
    _say_tokenizer(random, recipe, known)
    return recipe


def _say_tokenizer(random: Random, recipe: dict[str, Any], known: list[str]) -> None:
    source = random.choice(["union", "union", "base", random.choice(known)])
    if random.random() < 0.3:
        recipe["tokenizer_source"] = source
        return
    rules: dict[str, Any] = {"source": source}
    if random.random() < 0.1:
        rules = {}  # a union
    if random.random() < 0.4:
        rules["pad_to_multiple_of"] = random.choice([8, 16, 23])
    if random.random() < 0.6:
        tokens = random.sample(TOKENS, random.randint(1, 3))
        rules["tokens"] = {token: _row(random, known) for token in tokens}
    recipe["tokenizer"] = rules


def _row(random: Random, known: list[str]) -> dict[str, Any]:
    model = random.choice(known)
    of_a_token = {"kind": "model_token", "model": model}
    source: Any = random.choice(
        [
            model,
            {"kind": "zero"},
            {**of_a_token, "token": random.choice(TOKENS[:6])},
            {**of_a_token, "token_id": random.randrange(22)},
        ]
    )
    force = {"force": random.random() < 0.7} if random.random() < 0.8 else {}
    return {"source": source, **force}
