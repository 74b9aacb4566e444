"""Models and examples that `collect` refuses with an advice, and what it is given as that says."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import processors

import covmerge
from covmerge.errors import InputError
from covmerge.plan.statistics import Generated, collect
from tests.advised import advice
from tests.e2e.models import TEXT, build
from tests.statistics.models import classifier, encode, save, save_tokenizer, texts, write_texts
from tests.statistics.test_drawn import save_vit
from tests.statistics.test_generated import with_template

OUT = "a.covstats.safetensors"


def go(folder, data, tokenizer=None, **more):
    given = {"max_examples": 4, "overwrite": True} | more
    if isinstance(data, list):
        given.pop("max_examples")
    return collect(folder, data, folder.parent / OUT, tokenizer=tokenizer, **given)


def said_in(folder, file, **changed):
    """A JSON file of a model says so; None: it does not say it."""
    path = folder / file
    content = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: own for key, own in content.items() if own is not None}))
    return folder


def bert(t):
    return save("bert", t / "bert")


def llama(t):
    return save("llama", t / "llama")


def lines(t, name, *content):
    path = t / name
    path.write_bytes(b"".join(content))
    return path


def txt(t):
    return write_texts(t / "a.txt", 40)


def without(folder, *names):
    for name in names:
        (folder / name).unlink()
    return folder


def batch(folder, **more):
    return [encode(folder, texts(4)) | more]


def t5(t, mask):
    ids = torch.arange(12).reshape(2, 6) + 3
    seen = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    given = {"input_ids": ids, "attention_mask": seen}
    size = ids.shape[1] if mask else 4
    own = ids[:, :size], given["attention_mask"][:, :size].flip(1)
    return save("t5", t / "t5"), [
        given | {"decoder_input_ids": own[0], "decoder_attention_mask": own[1]}
    ]


def of_ones(t):
    folder, (own,) = t5(t, mask=True)
    return folder, [{name: tensor[:1] for name, tensor in own.items()}]


def scaled(folder, factor):
    stored = load_file(folder / "model.safetensors")
    own = {name: factor * w if w.is_floating_point() else w for name, w in stored.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def endless(t):
    """No token that a text begins with."""
    return said_in(llama(t), "tokenizer_config.json", bos_token=None, eos_token=None)


def more_tokens(t):
    folder = llama(t)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["more"])
    tokenizer.add_special_tokens({"bos_token": "<new>"})
    tokenizer.save_pretrained(folder)
    return folder


def bounded(t):
    """Its tokenizer puts two tokens around a text."""
    folder = save(classifier(), t / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    around = [("[EOS]", 2), ("[PAD]", 0)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[EOS] $A [PAD]", special_tokens=around
    )
    tokenizer.save_pretrained(folder)
    return folder


def albert(t):
    config = transformers.AlbertConfig(
        **TEXT, embedding_size=16, num_hidden_layers=3, intermediate_size=24
    )
    return save(transformers.AlbertModel(config), t / "albert")


def resnet(t, **said):
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", **said
    )
    transformers.ResNetForImageClassification(config).save_pretrained(t / "resnet")
    return t / "resnet"


def audio(t):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.Wav2Vec2Config(
        **sizes, conv_dim=[8], conv_stride=[5], conv_kernel=[10], num_conv_pos_embedding_groups=2
    )
    transformers.Wav2Vec2Model(config).save_pretrained(t / "audio")
    return t / "audio"


def segformer(t, **said):
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        num_attention_heads=[1],
        patch_sizes=[3],
        strides=[2],
        mlp_ratios=[1],
        **said,
    )
    transformers.SegformerModel(config).save_pretrained(t / "segformer")
    return t / "segformer"


def vit(t, **said):
    return save_vit(t / "vit", said)


GENERATED = Generated(tokens=4)
PICTURES = [{"pixel_values": torch.rand(4, 3, 32, 32)}]
# What is refused, what is said of it, and what is done as it says.
CASES = {
    "no kind": (
        lambda t: go(bert(t), txt(t), kinds=[]),
        advice("no kind of statistics is asked for: pass gram, fisher or both"),
        lambda t: go(save(classifier(), t / "m"), txt(t), kinds=["gram", "fisher"]),
    ),
    "no batch": (
        lambda t: go(bert(t), []),
        advice("there is no example: pass one batch or more"),
        lambda t: go(bert(t), batch(t / "bert")),
    ),
    "a base of examples": (
        lambda t: go(llama(t), txt(t), base=t / "llama"),
        advice("--base is for --start base: leave it out, or pass both"),
        lambda t: go(llama(t), txt(t)),
        lambda t: go(save("llama", t / "m"), Generated("base", tokens=4), base=t / "llama"),
    ),
    "no mapping": (
        lambda t: go(bert(t), [[1, 2]]),
        advice("pass what the model takes, such as {'input_ids': ..., 'attention_mask': ...}"),
        lambda t: go(bert(t), batch(t / "bert")),
    ),
    "not UTF-8": (
        lambda t: go(bert(t), lines(t, "a.txt", "w1 é".encode("latin-1"))),
        advice("{} is not UTF-8 text (byte {}): convert it"),
        lambda t: go(t / "bert", lines(t, "a.txt", "w1 é".encode())),
    ),
    "a long line": (
        lambda t: go(bert(t), lines(t, "a.txt", b"w1 " * (2**24 // 3 + 2))),
        advice("than {} characters: write shorter ones"),
        lambda t: go(t / "bert", lines(t, "a.txt", b"w1 w2\n" * 9)),
    ),
    "a long list": (
        lambda t: go(bert(t), lines(t, "a.json", b'["w1"', b" " * 2**26, b"]")),
        advice("write .jsonl, a line for each example"),
        lambda t: go(t / "bert", lines(t, "a.jsonl", b'"w1 w2"\n')),
    ),
    "a size of batches": (
        lambda t: go(bert(t), txt(t), batch_size=0),
        advice("{} is {}: pass a positive number"),
        lambda t: go(bert(t), txt(t), batch_size=2),
    ),
    "tokens": (
        lambda t: Generated(tokens=0).made_for(build("llama"), "m"),
        advice("tokens is {}: pass a positive number"),
        lambda t: go(llama(t), GENERATED),
    ),
    "a label": (
        lambda t: go(
            save(classifier(), t / "m"),
            lines(t, "a.jsonl", b'{"text": "w1", "label": 0.5}'),
            kinds=["fisher"],
            labels="data",
        ),
        advice("it, or take the model's own labels (--labels model)"),
        lambda t: go(t / "m", t / "a.jsonl", kinds=["fisher"], labels="model"),
        lambda t: go(
            t / "m",
            lines(t, "a.jsonl", b'{"text": "w1", "label": 1}'),
            kinds=["fisher"],
            labels="data",
        ),
    ),
    "a label of a batch": (
        lambda t: go(
            save(classifier(), t / "m"),
            batch(t / "m", labels=torch.tensor([0.0, 1.0, 2.0, 1.5])),
            kinds=["fisher"],
            labels="data",
        ),
        advice("and {} has {} classes, numbered from 0: correct the labels"),
        lambda t: go(
            t / "m",
            batch(t / "m", labels=torch.tensor([0, 1, 2, 2])),
            kinds=["fisher"],
            labels="data",
        ),
    ),
    "few examples": (
        lambda t: told_of(go(bert(t), lines(t, "a.txt", b"w1\n"))),
        advice("inputs for {} dimensions, so the Gram matrix is singular; collect more examples"),
        lambda t: told_of(go(bert(t), txt(t), max_examples=40)),
    ),
    "padding that is alike": (
        lambda t: go(*t5(t, mask=True)),
        advice("pad the two to different lengths, or pass batches of one example"),
        lambda t: go(*t5(t, mask=False)),
        lambda t: go(*of_ones(t)),
    ),
    "texts for a decoder": (
        lambda t: go(save("t5", t / "t5"), txt(t)),
        advice("a file of texts has no decoder inputs. Pass batches with both from Python"),
        lambda t: go(*t5(t, mask=False)),
    ),
    "a size of pictures": (
        lambda t: go(segformer(t), Generated()),
        advice("(image_size is {}): pass batches from Python"),
        lambda t: go(t / "segformer", PICTURES),
    ),
    "large pictures": (
        lambda t: go(segformer(t, image_size=2**14), Generated()),
        advice("more than any model does: is its config damaged?"),
        lambda t: go(segformer(t, image_size=32), Generated()),
    ),
    "no linear layers": (
        lambda t: go(resnet(t), PICTURES),
        advice("Gram matrices are of: pass --kind fisher, or merge it by a method without data"),
        lambda t: go(t / "resnet", PICTURES, kinds=["fisher"]),
        lambda t: covmerge.merge(
            t / "resnet", [scaled(shutil.copytree(t / "resnet", t / "b"), 1.01)]
        ),
    ),
    "a length of pictures": (
        lambda t: go(vit(t), Generated(), max_length=5),
        advice("leave out --tokenizer and --max-length, which are for texts"),
        lambda t: go(vit(t), Generated()),
    ),
    "a deviation of 0": (
        lambda t: go(vit(t, image_std=[1.0, 0.0, 1.0]), Generated()),
        advice("image_std is {}, not positive: correct it"),
        lambda t: go(vit(t, image_std=[1.0, 0.5, 1.0]), Generated()),
    ),
    "two means": (
        lambda t: go(vit(t, image_mean=[0.5, 0.5]), Generated()),
        advice("and {} numbers are needed: correct it"),
        lambda t: go(vit(t, image_mean=[0.5, 0.5, 0.5]), Generated()),
    ),
    "no token to pad with": (
        lambda t: go(
            said_in(save("bert", t / "m", pad=False), "tokenizer_config.json", eos_token=None),
            txt(t),
        ),
        advice("has no token to pad with: pass --batch-size 1"),
        lambda t: go(t / "m", txt(t), batch_size=1),
    ),
    "no config": (
        lambda t: go(without(bert(t), "config.json"), txt(t)),
        advice("by which the model could be built: pass the folder of a model as transformers"),
        lambda t: go(bert(t), txt(t)),
    ),
    "no tokenizer": (
        lambda t: go(without(bert(t), "tokenizer.json", "tokenizer_config.json"), txt(t)),
        advice("put its files there, or pass the folder of one with --tokenizer to covmerge"),
        lambda t: go(t / "bert", txt(t), tokenizer=save("bert", t / "other")),
        lambda t: save_tokenizer(t / "bert") or go(t / "bert", txt(t)),
    ),
    "quantised": (
        lambda t: go(said_in(bert(t), "config.json", quantization_config={"bits": 4}), txt(t)),
        advice("{} stores quantised weights: dequantise and save it first"),
        lambda t: go(bert(t), txt(t)),
    ),
    "an overflow": (
        lambda t: go(bert(t), [{"inputs_embeds": torch.full((1, 4, 16), torch.inf)}]),
        advice("is not finite: the model overflows on these examples. Do they fit it?"),
        lambda t: go(t / "bert", [{"inputs_embeds": torch.ones(1, 4, 16)}]),
    ),
    "an empty template": (
        lambda t: go(with_template(llama(t), ""), Generated("chat", tokens=4)),
        advice("the chat template of {} is empty: pass --start bos"),
        lambda t: go(t / "llama", Generated("bos", tokens=4)),
    ),
    "a template without the user": (
        lambda t: go(with_template(llama(t), "w1"), Generated("user", tokens=4)),
        advice("leaves out what the user says: pass --start bos"),
        lambda t: go(t / "llama", Generated("bos", tokens=4)),
    ),
    "a template that fails": (
        lambda t: go(with_template(llama(t), "{{ a.b.c }}"), Generated("chat", tokens=4)),
        advice("has no chat template that works ({}): pass --start bos"),
        lambda t: go(t / "llama", Generated("bos", tokens=4)),
    ),
    "a long start": (
        lambda t: go(with_template(llama(t)), Generated("chat", tokens=4), max_length=3),
        advice("pass another --start, or a larger --max-length"),
        lambda t: go(t / "llama", Generated("bos", tokens=4), max_length=3),
        lambda t: go(t / "llama", Generated("chat", tokens=4), max_length=9),
    ),
    "nothing to begin with": (
        lambda t: go(endless(t), GENERATED),
        advice("has no token that a text begins with: pass {}a file of examples"),
        lambda t: go(t / "llama", txt(t), batch_size=1),
        lambda t: go(with_template(t / "llama"), Generated("chat", tokens=4)),
    ),
    "nothing that the base began": (
        lambda t: go(llama(t), Generated("base", tokens=4)),
        advice("--start base needs --base, which begins the texts: name it"),
        lambda t: go(llama(t), Generated("base", tokens=4), base=save("llama", t / "m")),
    ),
    "no room for a word": (
        lambda t: go(bounded(t), Generated(), max_length=2),
        advice("the tokenizer of {} {}: pass a file of examples"),
        lambda t: go(t / "m", txt(t), max_length=2),
    ),
    "an encoder with a decoder": (
        lambda t: go(save("t5", t / "t5"), Generated()),
        advice("for which covmerge makes no inputs: pass batches from Python"),
        lambda t: go(*t5(t, mask=False)),
    ),
    "sounds": (
        lambda t: go(audio(t), Generated()),
        advice("which covmerge does not make: pass batches from Python"),
        lambda t: go(t / "audio", [{"input_values": torch.rand(2, 400)}]),
    ),
    "a base that writes nothing": (
        lambda t: go(
            save(classifier(), t / "m"), Generated("base"), base=save(classifier(), t / "b")
        ),
        advice("{} is no language model that writes: leave out --start base"),
        lambda t: go(t / "m", Generated()),
    ),
    "a token without a row": (
        lambda t: go(more_tokens(t), GENERATED),
        advice("correct the tokenizer, or pass the folder of another with --tokenizer"),
        lambda t: go(t / "llama", GENERATED, tokenizer=save("llama", t / "other")),
        lambda t: save_tokenizer(t / "llama") or go(t / "llama", GENERATED),
    ),
    "an end that is no token": (
        lambda t: go(said_in(llama(t), "generation_config.json", eos_token_id="2"), GENERATED),
        advice("and a token is a whole number from 0 to {}: correct it, because texts end there"),
        lambda t: go(said_in(t / "llama", "generation_config.json", eos_token_id=2), GENERATED),
    ),
    "weights that are too large": (
        lambda t: go(scaled(llama(t), float("nan")), GENERATED),
        advice("its weights hold NaN or are too large, correct them"),
        lambda t: go(llama(t), GENERATED),
    ),
    "no room": (
        lambda t: go(save(classifier(), t / "m"), Generated(), max_length=0),
        advice("{} is {}: pass a positive number"),
        lambda t: go(t / "m", Generated(), max_length=5),
    ),
}


def told_of(done):
    """What is noted, as an error."""
    if done.notes:
        raise InputError(" ".join(done.notes))


@pytest.mark.parametrize("name", CASES)
def test_a_collection_as_it_is_advised(name, tmp_path):
    wrong, said, *right = CASES[name]
    with pytest.raises(InputError, match=said):
        wrong(tmp_path)
    for mended in right:
        mended(tmp_path)
        shutil.rmtree(tmp_path / "all", ignore_errors=True)
