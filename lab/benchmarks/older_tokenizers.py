"""Models whose tokenizers have other added tokens: run by one transformers, without covmerge.

    python older_tokenizers.py write OUT
    python older_tokenizers.py read FOLDER…

The first writes OUT/KIND/{base,expert}: the expert has two tokens more. The second prints what this
transformers makes of TEXTS with the tokenizer in each folder, or why it cannot read it.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = "the model merges what other models know and the other model knows what it merges"
ADDED = {"old": ("<|old|>", "oldword"), "new": ("<|new|>", "newword")}
TEXTS = (
    "the model merges",
    "the <|old|> model knows oldword and what it merges",
    "<|old|>model mergesoldword",
    "the <|new|> model knows newword and what it merges",
    "<|new|>model mergesnewword",
)
LLAMA = ("LlamaConfig", "LlamaForCausalLM")
# By the tokenizer's class: the model's config and class.
KINDS = {
    "GPT2TokenizerFast": LLAMA,
    "LlamaTokenizerFast": LLAMA,
    "PreTrainedTokenizerFast": LLAMA,
    "BertTokenizerFast": ("BertConfig", "BertForMaskedLM"),
    "T5TokenizerFast": ("T5Config", "T5ForConditionalGeneration"),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SIZES_OF = {
    "LlamaConfig": {**SIZES, "num_key_value_heads": 2},
    "BertConfig": SIZES,
    "T5Config": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
}


def tokenizer(kind, folder):
    """A tokenizer of a class, trained on TEXT."""
    if kind == "BertTokenizerFast":
        letters = sorted({letter for letter in TEXT if letter != " "})
        pieces = [*letters, *(f"##{letter}" for letter in letters), *dict.fromkeys(TEXT.split())]
        file = folder / "vocab.txt"
        file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]) + "\n")
        return transformers.BertTokenizerFast(vocab_file=str(file))
    own = getattr(transformers, kind)
    if kind == "T5TokenizerFast":
        found = Tokenizer(models.Unigram())
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        found.decoder = decoders.Metaspace()
        first = ["<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(vocab_size=48, special_tokens=first, unk_token="<unk>")
    elif kind == "GPT2TokenizerFast":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        found.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=first)
    found.train_from_iterator([TEXT], trainer)
    if kind == "LlamaTokenizerFast":
        found.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    file = folder / "tokenizer.json"
    found.save(str(file))
    special = {
        "GPT2TokenizerFast": {},
        "T5TokenizerFast": {"extra_ids": 4},
        "LlamaTokenizerFast": {},
        "PreTrainedTokenizerFast": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    }[kind]
    return own(tokenizer_file=str(file), **special)


def moved(model, seed):
    """A fine-tune: every weight a little off."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def enlarged(model, pieces, which, seed):
    """A fine-tune with two tokens more, one special and one plain."""
    special, plain = ADDED[which]
    pieces.add_tokens([AddedToken(special, special=True)], special_tokens=True)
    pieces.add_tokens([AddedToken(plain)])
    model.resize_token_embeddings(len(pieces), mean_resizing=False)
    return moved(model, seed), pieces


def save(folder, model, pieces):
    """Write a model and its tokenizer."""
    model.save_pretrained(folder)
    pieces.save_pretrained(folder)


def write(out):
    """Save a base and an expert of each kind."""
    for kind, (config, name) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            pieces = tokenizer(kind, Path(folder))
            fields = {**SIZES_OF[config], "vocab_size": len(pieces)}
            model = moved(getattr(transformers, name)(getattr(transformers, config)(**fields)), 1)
            save(out / kind / "base", model, pieces)
            save(out / kind / "expert", *enlarged(model, pieces, "old", 2))


def read(folder):
    """The pieces of every text, by a tokenizer."""
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    return {text: pieces.convert_ids_to_tokens(pieces(text)["input_ids"]) for text in TEXTS}


def read_all(folders):
    """By folder, its pieces or the error."""
    found = {}
    for folder in folders:
        try:
            found[folder] = read(folder)
        except Exception as failure:
            found[folder] = f"{type(failure).__name__}: {failure}"[:160]
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        print(json.dumps(read_all(sys.argv[2:])))
