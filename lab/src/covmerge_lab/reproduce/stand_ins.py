"""Tiny models and data in exactly the formats of the real ones, to run a table without a network.

They are random, moved a little per expert: their scores say nothing, but every file is read, merged and
scored by the same code.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
import torch
import transformers
from safetensors import torch as safetensors_torch
from torch import nn

from covmerge_lab.reproduce.bench import Record, optional, quiet
from covmerge_lab.reproduce.glue import FIELDS
from covmerge_lab.reproduce.published import Setting
from covmerge_lab.reproduce.sources import BASE, Given

# Their annotations are partial.
_transformers: Any = transformers
_tokenizers: Any = tokenizers
_safetensors: Any = safetensors_torch
_torch: Any = torch

_WORDS = (
    *("the", "a", "red", "blue", "bird", "dog", "sings", "runs", "not", "very"),
    *("is", "was", "who", "what", "why", "yes", "no", "0", "1"),
)
_EXAMPLES = 6
_TRAINING = 24  # of six words, more than any layer has inputs
_PIXELS = 32
_CLASSES = ("circle", "line", "square")
_TINY_CLIP = "covmerge-stand-in"


@dataclass(frozen=True)
class StandIns:
    """A setting on stand-ins, where they are, and their data."""

    setting: Setting
    given: Given
    data: Path


def make(setting: Setting, cache: Path) -> StandIns:
    """Write the stand-ins of a setting under `cache`, in place of what an earlier run left.

    Raises:
        InputError: a package that the family needs is not installed.
    """
    folder = cache / "stand-ins" / setting.name
    makers: Mapping[str, Callable[[Setting, Path], StandIns]] = {
        "clip": _clip,
        "glue": _glue,
        "t5": _t5,
        "lm": _lm,
    }
    with _torch.random.fork_rng(devices=[]), quiet():
        _torch.manual_seed(0)
        return makers[setting.family](setting, folder)


# Text models


def _glue(setting: Setting, folder: Path) -> StandIns:
    tokenizer = _tokenizer()
    for column in setting.columns:
        for split, count in (("validation", _EXAMPLES), ("train", _TRAINING)):
            records = [_glue_record(column.task, f"{split} {n}", n) for n in range(count)]
            _write_records(folder / "data" / "glue" / column.task / f"{split}.jsonl", records)
    if setting.model == "gpt2":
        config = _transformers.GPT2Config(
            **{"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 2},
            **{"n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
        )
        base = _transformers.GPT2Model(config)
        kind = _transformers.GPT2ForSequenceClassification
        # The hub's gpt2 also holds the masks of its attention.
        masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(2)}
    else:
        config = _transformers.RobertaConfig(
            **{"vocab_size": len(tokenizer), "hidden_size": 16, "num_attention_heads": 2},
            **{"num_hidden_layers": 2, "intermediate_size": 24, "max_position_embeddings": 72},
            **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "type_vocab_size": 1},
        )
        base = _transformers.RobertaForMaskedLM(config)
        kind = _transformers.RobertaForSequenceClassification
        masks = {}
    _save(base, tokenizer, folder / BASE)
    if masks:
        state = {**base.state_dict(), **masks}
        _safetensors.save_file(
            state, folder / BASE / "model.safetensors", metadata={"format": "pt"}
        )
    labels = {"mnli": 3, "stsb": 1}
    for name in setting.experts:
        expert = kind.from_pretrained(folder / BASE, num_labels=labels.get(name, 2))
        _save(_moved(expert), tokenizer, folder / name)
    return _standing(setting, folder)


def _glue_record(task: str, seed: str, number: int) -> Record:
    texts = {field: _sentence(f"{task} {field} {seed}") for field in FIELDS[task]}
    return {"label": _label(task, number), **texts}


def _label(task: str, number: int) -> float:
    return number % 6 / 1.2 if task == "stsb" else number % (3 if task == "mnli" else 2)


def _t5(setting: Setting, folder: Path) -> StandIns:
    tokenizer = _tokenizer()
    for column in setting.columns:
        records = [
            {
                "input": _sentence(f"{column.task} {number}"),
                "answer_choices": ["yes", "no", "very red"],
                "lbl": number % 3,
            }
            for number in range(_EXAMPLES)
        ]
        _write_records(folder / "data" / "t5" / f"{column.task}.jsonl", records)
    config = _transformers.T5Config(
        **{"vocab_size": len(tokenizer), "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1},
        **{"num_heads": 2, "pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1},
    )
    return _family(setting, folder, _transformers.T5ForConditionalGeneration(config), tokenizer)


def _lm(setting: Setting, folder: Path) -> StandIns:
    tokenizer = _tokenizer()
    for column in setting.columns:
        _write_lm_task(folder / "data" / "lm_eval", column.task, column.metric)
    shape = {
        **{"vocab_size": len(tokenizer), "hidden_size": 16, "num_attention_heads": 2},
        **{"num_hidden_layers": 2, "intermediate_size": 24, "num_key_value_heads": 2},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 64},
    }
    if setting.model == "llama":
        base = _transformers.LlamaForCausalLM(_transformers.LlamaConfig(**shape))
    else:
        base = _transformers.Olmo3ForCausalLM(_transformers.Olmo3Config(**shape))
    return _family(setting, folder, base, tokenizer)


def _family(setting: Setting, folder: Path, base: Any, tokenizer: Any) -> StandIns:
    """Save a base and experts of the same class."""
    _save(base, tokenizer, folder / BASE)
    for name in setting.experts:
        _save(_moved(copy.deepcopy(base)), tokenizer, folder / name)
    return _standing(setting, folder)


def _standing(setting: Setting, folder: Path) -> StandIns:
    experts = {name: str(folder / name) for name in (BASE, *setting.experts)}
    return StandIns(setting, Given(folder.parent.parent, experts), folder / "data")


def _write_lm_task(folder: Path, task: str, metric: str) -> None:
    """A task of lm-eval under the name of the real one, on texts of this folder."""
    records = [
        {"question": _sentence(f"{task} {number}"), "answer": "yes" if number % 2 else "no"}
        for number in range(_EXAMPLES)
    ]
    _write_records(folder / f"{task}.jsonl", records)
    (folder / f"{task}.yaml").write_text(
        "\n".join(
            [
                f"task: {task}",
                "dataset_path: json",
                f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(folder / f'{task}.jsonl'))}}}}}",
                "test_split: test",
                "output_type: multiple_choice",
                'doc_to_text: "{{question}}"',
                'doc_to_target: "{{answer}}"',
                'doc_to_choice: ["yes", "no"]',
                f"process_results: !function scoring.{_function(metric)}",
                f"metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]",
                "",
            ]
        ),
        encoding="utf-8",
    )
    with (folder / "scoring.py").open("a", encoding="utf-8") as code:
        code.write(
            f"def {_function(metric)}(doc, results):\n"
            "    chosen = max(range(2), key=lambda number: results[number][0])\n"
            f"    return {{{metric!r}: float(('yes', 'no')[chosen] == doc['answer'])}}\n"
        )


def _function(metric: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in metric)


def _tokenizer() -> Any:
    """A tokenizer of whole words."""
    vocabulary = {word: n for n, word in enumerate(["</s>", "<pad>", "<unk>", *_WORDS])}
    words = _tokenizers.Tokenizer(_tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = _tokenizers.pre_tokenizers.Whitespace()
    return _transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=64,
    )


def _sentence(seed: str) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=6))


def _write_records(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _moved(model: Any) -> Any:
    """Move every parameter a little, as fine-tuning does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


# Images


class ImageEncoder(nn.Module):
    """As the suite's: an open_clip model without its text tower."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        if hasattr(self.model, "transformer"):
            del self.model.transformer


class ClassificationHead(nn.Linear):
    """As the suite's: a linear layer, told to normalise its inputs."""

    normalize = True


def _clip(setting: Setting, folder: Path) -> StandIns:
    """The suite's folders, its pickled modules, its heads, and folders of images."""
    open_clip = optional("open_clip")
    _register(open_clip, folder)
    model = open_clip.create_model(_TINY_CLIP, force_quick_gelu=True)
    base = ImageEncoder(model)
    suite = folder / "checkpoints"
    sources = {BASE: setting.base, **setting.experts}
    with _module_of("src.models.modeling", (ImageEncoder, ClassificationHead)):
        for name, source in sources.items():
            file = suite / (source.file or f"{setting.model}/{name}Val/nonlinear_finetuned.pt")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(base if name == BASE else _moved(copy.deepcopy(base)), file)
        for column in setting.columns:
            head = ClassificationHead(model.visual.output_dim, len(_CLASSES))
            torch.save(head, suite / setting.model / f"head_{column.task}Val.pt")
    for column in setting.columns:
        _draw(folder / "data" / column.task)
    placed = {
        name: str(suite / f"{setting.model}/{name}Val/nonlinear_finetuned.pt")
        for name, source in sources.items()
        if not source.file
    }
    given = Given(folder.parent.parent, placed, checkpoints=suite)
    return StandIns(replace(setting, model=_TINY_CLIP), given, folder / "data")


def _register(open_clip: Any, folder: Path) -> None:
    """Make a tiny architecture known to open_clip, by a config file as its own are."""
    tower = {"layers": 2, "width": 32}
    config = {
        "embed_dim": 16,
        "vision_cfg": {**tower, "image_size": _PIXELS, "patch_size": 16, "head_width": 16},
        "text_cfg": {"layers": 1, "width": 16, "heads": 2, "context_length": 8, "vocab_size": 32},
    }
    path = folder / "architectures" / f"{_TINY_CLIP}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    open_clip.add_model_config(path)


def _draw(folder: Path) -> None:
    """Noise with a brighter part for each class."""
    pictures, arrays = optional("PIL.Image"), optional("numpy")
    generator = random.Random(folder.name)
    for label, name in enumerate(_CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(_EXAMPLES // len(_CLASSES)):
            noise = generator.randbytes(_PIXELS * _PIXELS * 3)
            pixels = arrays.frombuffer(noise, dtype="uint8").reshape(_PIXELS, _PIXELS, 3).copy()
            pixels[label * 10 : label * 10 + 10] //= 2
            pictures.fromarray(pixels).save(folder / name / f"{number}.png")


@contextlib.contextmanager
def _module_of(name: str, classes: Sequence[type]) -> Generator[None, None, None]:
    """Let classes be pickled as those of a module that nobody can import afterwards."""
    parts = [".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)]
    before = {part: sys.modules.get(part) for part in parts}
    homes = [kind.__module__ for kind in classes]
    for part in parts:
        sys.modules[part] = ModuleType(part)
    for kind in classes:
        kind.__module__ = name
        setattr(sys.modules[name], kind.__name__, kind)
    try:
        yield
    finally:
        for kind, home in zip(classes, homes, strict=True):
            kind.__module__ = home
        for part, module in before.items():
            if module is None:
                del sys.modules[part]
            else:
                sys.modules[part] = module
