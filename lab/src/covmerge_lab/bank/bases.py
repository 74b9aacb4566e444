"""The bank's bases: small networks of different kinds, all pretrained here except one from a package.

The first sixteen are in three thirds, drawn once within each kind of data. Nine came later, when the second
rule of `auto` had been written, and the newest six when the third had been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor

from covmerge_lab.bank import architectures, data, own_nets
from covmerge_lab.bank.architectures import LENGTH, PAD, VOCABULARY
from covmerge_lab.bank.data import Kind

_t: Any = transformers
_files: Any = safetensors.torch
_tokenizers: Any = tokenizers

Part = Literal["design", "validation", "sealed", "later", "newest"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # what language models answer with


@dataclass(frozen=True)
class Base:
    """A base of the bank.

    Attributes:
        name: what it is called.
        kind: of its data.
        build: makes its network, without weights that mean anything.
        answers: by a head of each task's own on its features, or, as language models do, by the next token.
        adapted: endings of the names of linear layers that adapters go to: attention, then all.
        rate: a learning rate of AdamW that suits it; experts' are drawn around it.
        steps: of its pretraining.
        steps_of_experts: about as many as its experts take.
        sets: of experts that it has.
    """

    name: str
    kind: Kind
    build: Callable[[], Any]
    answers: Literal["heads", "tokens"]
    adapted: tuple[tuple[str, ...], tuple[str, ...]]
    rate: float
    steps: int = 1000
    steps_of_experts: int = 280
    sets: int = 4


def _names(some: str, more: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return endings of names: those of attention, and with them all others."""
    return tuple(some.split()), (*some.split(), *more.split())


_BERT = _names("query value", "key dense")
_LLAMA = _names("q_proj v_proj", "k_proj o_proj gate_proj up_proj down_proj")
_VIT = _names("q_proj v_proj query value", "k_proj o_proj key dense fc1 fc2")
_WAV2VEC = _names("q_proj v_proj", "k_proj out_proj intermediate_dense output_dense")
_NEOX = _names("query_key_value", "dense dense_h_to_4h dense_4h_to_h")
_T5 = _names("q v", "k o wi_0 wi_1 wo")
_TABLES = _names("query value", "key out up down")
_MODERN = _names("Wqkv", "Wo Wi")
BASES = (
    Base("minilm", "text", architectures.minilm, "heads", _BERT, 3e-4, 0, 100),
    Base("bert", "text", architectures.bert, "heads", _BERT, 8e-4),
    Base("modernbert", "text", architectures.modernbert, "heads", _MODERN, 8e-4),
    Base("gpt2", "text", architectures.gpt2, "tokens", _names("c_attn", "c_proj c_fc"), 1e-3),
    Base("llama", "text", architectures.llama, "tokens", _LLAMA, 1e-3),
    Base("neox", "text", architectures.neox, "tokens", _NEOX, 1e-3),
    Base(
        "moe", "text", architectures.moe, "tokens", _names("q_proj v_proj", "k_proj o_proj"), 1e-3
    ),
    Base("t5", "text", architectures.t5, "tokens", _T5, 1e-3),
    Base("vit", "pictures", architectures.vit, "heads", _VIT, 1e-3),
    Base(
        "convnext", "pictures", architectures.convnext, "heads", _names("pwconv1", "pwconv2"), 1e-3
    ),
    Base("resnet", "pictures", architectures.resnet, "heads", _names("convolution"), 1e-3),
    Base("mixer", "pictures", own_nets.Mixer, "heads", _names("up", "down"), 1e-3),
    Base("tables", "tables", own_nets.TableTransformer, "heads", _TABLES, 1e-3),
    Base("rows", "tables", own_nets.TableMLP, "heads", _names("up", "into down"), 1e-3),
    Base("wav2vec", "sounds", architectures.wav2vec, "heads", _WAV2VEC, 8e-4),
    Base("soundnet", "sounds", own_nets.SoundNet, "heads", _names("last"), 1e-3),
)
_DISTILBERT = _names("q_lin v_lin", "k_lin out_lin lin1 lin2")
_DEBERTA = _names("query_proj value_proj", "key_proj dense")
_OPT = _names("q_proj v_proj", "k_proj out_proj fc1 fc2")
_SWIN = _names("q_proj v_proj", "k_proj o_proj fc1 fc2")
_POOLFORMER = _names("conv1 conv2")
LATER = (
    Base("distilbert", "text", architectures.distilbert, "heads", _DISTILBERT, 8e-4, sets=2),
    Base("deberta", "text", architectures.deberta, "heads", _DEBERTA, 8e-4, sets=2),
    Base("qwen3", "text", architectures.qwen3, "tokens", _LLAMA, 1e-3, sets=2),
    Base("opt", "text", architectures.opt, "tokens", _OPT, 1e-3, sets=2),
    Base("bart", "text", architectures.bart, "tokens", _OPT, 1e-3, sets=2),
    Base("swin", "pictures", architectures.swin, "heads", _SWIN, 1e-3, sets=2),
    Base("poolformer", "pictures", architectures.poolformer, "heads", _POOLFORMER, 1e-3, sets=2),
    Base("columns", "tables", own_nets.TableMixer, "heads", _names("up", "down"), 1e-3, sets=2),
    Base("hubert", "sounds", architectures.hubert, "heads", _WAV2VEC, 8e-4, sets=2),
)
_PHI3 = _names("qkv_proj", "o_proj gate_up_proj down_proj")
NEWEST = (
    Base("roformer", "text", architectures.roformer, "heads", _BERT, 8e-4, sets=2),
    Base("gemma3", "text", architectures.gemma3, "tokens", _LLAMA, 1e-3, sets=2),
    Base("phi3", "text", architectures.phi3, "tokens", _PHI3, 1e-3, sets=2),
    Base("dinov2", "pictures", architectures.dinov2, "heads", _VIT, 1e-3, sets=2),
    Base(
        "convnextv2", "pictures", architectures.convnextv2, "heads", _names("pwconv1", "pwconv2"),
        1e-3, sets=2,
    ),
    Base("data2vec", "sounds", architectures.data2vec, "heads", _WAV2VEC, 8e-4, sets=2),
)  # fmt: skip
EVERY = (*BASES, *LATER, *NEWEST)


def parts() -> Mapping[str, Part]:
    """Return each base's part. Thirds are drawn, so that each has its share of each kind of data."""
    draw, found = Random(63), dict[str, Part]()
    of: Sequence[Part] = ("design", "validation", "sealed")
    turn = 0
    for kind in ("text", "pictures", "tables", "sounds"):
        names = [base.name for base in BASES if base.kind == kind]
        draw.shuffle(names)
        for name in names:
            found[name] = of[turn % 3]
            turn += 1
    found.update(dict.fromkeys((base.name for base in LATER), "later"))
    found.update(dict.fromkeys((base.name for base in NEWEST), "newest"))
    return found


# --- Features and answers, alike for training and scoring.
def features(net: Any, base: Base, inputs: Tensor) -> Tensor:
    """Return what a head reads of the examples `(n, width)`."""
    if base.kind == "text":
        mask = (inputs != PAD).long()
        hidden = net(input_ids=inputs, attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    if type(net).__module__ == own_nets.__name__:
        return net(inputs)
    found = net(inputs).last_hidden_state
    return found.mean(dim=1) if found.ndim == 3 else found.mean(dim=(2, 3))


def next_tokens(net: Any, inputs: Tensor) -> Tensor:
    """Return logits of the token that follows each prompt `(n, tokens)`."""
    mask = (inputs != PAD).long()
    if net.config.is_encoder_decoder:
        start = torch.full((len(inputs), 1), PAD)
        return net(input_ids=inputs, attention_mask=mask, decoder_input_ids=start).logits[:, -1]
    return net(input_ids=inputs, attention_mask=mask, logits_to_keep=1).logits[:, -1]


def encode(base: Base, task: data.Task, part: data.Part, cache: Path) -> Tensor:
    """Return a part's examples as a base takes them; texts as tokens `(n, LENGTH)`."""
    if isinstance(part.inputs, Tensor):
        return part.inputs
    tokenizer = tokenizer_of(base, cache)
    if base.answers == "heads":
        rows = [each.ids[:LENGTH] for each in tokenizer.encode_batch(list(part.inputs))]
        return torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in rows])
    before, after = tokenizer.encode(f"{task.name}: ").ids, tokenizer.encode(" =").ids
    room = LENGTH - len(before) - len(after)
    rows = [before + each.ids[:room] + after for each in tokenizer.encode_batch(list(part.inputs))]
    return torch.tensor([[PAD] * (LENGTH - len(row)) + row for row in rows])


def answers(base: Base, labels: Tensor, cache: Path) -> Tensor:
    """Return the tokens that stand for labels."""
    tokenizer = tokenizer_of(base, cache)
    return torch.tensor([tokenizer.token_to_id(letter) for letter in LETTERS])[labels]


@lru_cache
def tokenizer_of(base: Base, cache: Path) -> Any:
    """Return the tokenizer: the package's, or one that is trained on the tasks' training texts."""
    if base.name == "minilm":
        found = _tokenizers.Tokenizer.from_file(
            str(architectures.minilm_folder() / "tokenizer.json")
        )
        found.no_padding()
        return found
    path = cache / "bank" / "data" / "tokenizer.json"
    if not path.exists():
        made = _tokenizers.Tokenizer(_tokenizers.models.BPE(unk_token=None))
        made.pre_tokenizer = _tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = _tokenizers.trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<end>", "<mask>"],
            initial_alphabet=_tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = [text for task in data.tasks("text", cache).values() for text in task.train.inputs]
        made.train_from_iterator(texts, trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(str(path))
    return _tokenizers.Tokenizer.from_file(str(path))


# --- Files.
def save(net: Any, folder: Path) -> None:
    """Write a network: as transformers does, or its tensors alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(net, "save_pretrained"):
        net.save_pretrained(folder)
    else:
        tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
        _files.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


_HAS_A_POOLER = ("BertModel", "ViTModel", "SwinModel")  # which no base uses


def save_tokenizer(base: Base, cache: Path, folder: Path) -> None:
    """Write the tokenizer beside a base of texts, as transformers reads it."""
    found = _t.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(base, cache))
    found.add_special_tokens({"pad_token": "[PAD]" if base.name == "minilm" else "<pad>"})
    found.save_pretrained(folder)


def load(base: Base, folder: Path) -> Any:
    """Return a network with the weights of a folder."""
    net = base.build()
    if hasattr(net, "save_pretrained"):
        left_out = {"add_pooling_layer": False} if type(net).__name__ in _HAS_A_POOLER else {}
        return net.from_pretrained(folder, **left_out)
    net.load_state_dict(_files.load_file(folder / "model.safetensors"))
    return net
