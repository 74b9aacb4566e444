"""Models of one base with different vocabularies, and recipes of mergekit that merge them.

Nothing here imports mergekit or covmerge. `make_token_goldens.py` keeps what mergekit makes of them in
tests/golden/mergekit_tokens.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.mergekit.models import CONFIGS, flat, layout
from tests.mergekit.numbers import normal

LETTERS = "abcdefghijklmnop"
SPECIAL = ("<unk>", "<s>", "</s>")
PAIRS = ("ab", "cd", "ef", "gh")
TABLES = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight")


@dataclass(frozen=True)
class Words:
    """A vocabulary, and what a model says of it.

    Attributes:
        order: its tokens but for those that were added.
        added: special tokens that were added, in the order of their numbers.
        padding: rows of the embedding beyond the tokens; fewer than none: so many tokens have no row.
        eos: tokens that end a text.
        template: of a chat.
    """

    order: Sequence[str]
    added: Sequence[str] = ()
    padding: int = 0
    eos: Sequence[str] = ("</s>",)
    template: str | None = None

    @property
    def tokens(self) -> list[str]:
        return [*self.order, *self.added]


_BASE = [*SPECIAL, *LETTERS, *PAIRS]
HELLO = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
WORDS = {
    "base": Words(_BASE, template="base: {{ messages[0]['content'] }}"),
    "t0": Words(_BASE, template=HELLO),
    "t1": Words(
        _BASE, ("<|im_start|>", "<|im_end|>"), eos=("</s>", "<|im_end|>"), template=f" {HELLO}\n"
    ),
    # Another order, a pair less and one more, and an embedding that is larger than the vocabulary.
    "t2": Words(
        ["</s>", "<s>", "<unk>", *reversed(LETTERS), "ab", "cd", "ef", "op"],
        ("<tool>", "<|im_end|>"),
        padding=5,
        eos=("</s>",),
    ),
}


def tokenizer(words: Words) -> Tokenizer:
    """A BPE tokenizer of these tokens."""
    pairs = [token for token in words.order if len(token) == 2]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(words.order)},
        merges=[(pair[0], pair[1]) for pair in pairs],
        unk_token="<unk>",
    )
    found = Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIAL, *words.added)])
    return found


def weights(arch: str, model: str, words: Words, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a model: whatever the order, a token's row is the base's and what was learnt."""
    learnt = 0.0 if model == "base" else 0.05 * (int(model[1:]) + 1)
    found: dict[str, Tensor] = {}
    for name, shape in layout(arch):
        if name in TABLES:
            own = torch.stack([_row(model, name, t, learnt) for t in words.tokens])
            padding = torch.full((max(words.padding, 0), shape[1]), 9.0)  # seen if it is ever used
            own = torch.cat([own[: len(words.tokens) + min(words.padding, 0)], padding])
        else:
            own = normal(shape, arch, name)
            own += learnt * normal(shape, arch, model, name)
        found[name] = own.to(dtype).contiguous()
    return found


def _row(model: str, name: str, token: str, learnt: float) -> Tensor:
    row = normal((8,), name, token)
    return row + learnt * normal((8,), model, name, token)


# By folder: the architecture, and the dtype.
FOLDERS = {
    "llama": ("llama", "float32"),
    "gpt2": ("gpt2", "float32"),
    "half": ("llama", "bfloat16"),
}


def save_models(folder: Path) -> None:
    """Write llama, gpt2 (tied) and the same llama in bfloat16, each with a base and three experts."""
    for name in FOLDERS:
        for model, words in WORDS.items():
            save_one(folder, name, model, words)


def save_one(folder: Path, name: str, model: str, words: Words) -> None:
    """Write one model of a folder."""
    arch, dtype = FOLDERS[name]
    save_model(folder / name / model, arch, model, words, dtype)


def save_model(path: Path, arch: str, model: str, words: Words, dtype: str = "float32") -> None:
    """Write a model with its tokenizer and configs."""
    path.mkdir(parents=True)
    stored = weights(arch, model, words, getattr(torch, dtype))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(path, words)
    ids = {token: number for number, token in enumerate(words.tokens)}
    eos = [ids[token] for token in words.eos]
    special = {"bos_token_id": ids["<s>"], "eos_token_id": eos if len(eos) > 1 else eos[0]}
    rows = len(words.tokens) + words.padding
    config = {**CONFIGS[arch], "vocab_size": rows, "torch_dtype": dtype, **special}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({**special, "top_k": 5}))


def save_tokenizer(path: Path, words: Words) -> None:
    """Write a tokenizer as transformers does."""
    tokenizer(words).save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": words.eos[-1],
        "unk_token": "<unk>",
        "model_max_length": 16,
        "clean_up_tokenization_spaces": False,
        **({} if words.template is None else {"chat_template": words.template}),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def ids_of(folder: Path) -> dict[str, int]:
    """The numbers of the tokens in a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)


def by_token(tensors: Mapping[str, Tensor], ids: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """All tensors as one vector, tables in the order of the tokens' texts; and their padding."""
    order = [ids[token] for token in sorted(ids)]
    tables = {name: tensors[name] for name in TABLES if name in tensors}
    found = {**tensors, **{name: own[order] for name, own in tables.items()}}
    return flat(found), flat({name: own[len(ids) :] for name, own in tables.items()})


def _recipe(method: str, arch: str, experts: Sequence[str], parameters: str, *more: str) -> str:
    models = "".join(
        f"  - {{model: ./{arch}/{own}, parameters: {{{parameters}}}}}\n" for own in experts
    )
    return "\n".join((f"merge_method: {method}", f"models:\n{models}", *more))


RECIPES: dict[str, str] = {
    "union": _recipe(
        "ties",
        "llama",
        ("t0", "t1"),
        "weight: 0.5, density: 0.5",
        "base_model: ./llama/base",
        "tokenizer: {source: union, pad_to_multiple_of: 8, tokens: {<|im_start|>: {source: ./llama/t1},",
        "  <|im_end|>: {source: ./llama/t1, force: true}}}",
        "chat_template: chatml",
    ),
    "union_of_other_orders": _recipe(
        "task_arithmetic",
        "llama",
        ("t0", "t1", "t2"),
        "weight: 0.7",
        "base_model: ./llama/base",
        "tokenizer_source: union",
        "chat_template: auto",
    ),
    "union_of_half_precision": _recipe(
        "ties",
        "half",
        ("t0", "t1", "t2"),
        "weight: 0.7, density: 0.6",
        "base_model: ./half/base",
        "tokenizer_source: union",
    ),
    "union_without_a_base": _recipe(
        "linear", "gpt2", ("t1", "t2"), "weight: 0.5", "tokenizer_source: union"
    ),
    "union_over_a_base_that_is_listed": _recipe(
        "linear",
        "llama",
        ("t2", "base", "t1"),
        "weight: 0.5",
        "base_model: ./llama/base",
        "tokenizer_source: union",
    ),
    "base": _recipe(
        "dare_ties",
        "gpt2",
        ("t0", "t1", "t2"),
        "weight: 0.4, density: 0.6",
        "base_model: ./gpt2/base",
        "tokenizer_source: base",
    ),
    "of_a_model": _recipe(
        "dare_linear",
        "llama",
        ("t1", "t2"),
        "weight: 0.4, density: 0.6",
        "base_model: ./llama/base",
        "tokenizer_source: ./llama/t2",
    ),
    "rows_of_others": _recipe(
        "model_stock",
        "gpt2",
        ("t1", "t2"),
        "",
        "base_model: ./gpt2/base",
        "tokenizer: {source: ./gpt2/t1, tokens: {",
        "  <|im_start|>: {source: {kind: model_token, model: ./gpt2/t2, token: <tool>}},",
        "  <|im_end|>: {source: {kind: model_token, model: ./gpt2/base, token_id: 2}, force: true},",
        "  ab: {source: {kind: zero}, force: true},",
        "  <new>: {source: {kind: zero}}}}",
    ),
    "sphere": _recipe(
        "slerp",
        "llama",
        ("t1",),
        "",
        "base_model: ./llama/base",
        "parameters: {t: 0.3}",
        "tokenizer: {source: union, pad_to_multiple_of: 16}",
    ),
    "stack": """
slices:
  - sources: [{model: ./llama/t1, layer_range: [0, 3]}]
  - sources: [{model: ./llama/t1, layer_range: [2, 4]}]
merge_method: passthrough
tokenizer_source: union
dtype: float16
""",
}
