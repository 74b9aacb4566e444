"""What reads files of strangers: a valid input of each kind, and the functions of covmerge that read it.

A builder writes valid inputs into the working directory's `given`, a folder each where there are several; a
reader is called with that folder, and reads all there is. Where a path is written it is relative, so that
the same seed makes the same input everywhere.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import covmerge
from covmerge.errors import RecipeError
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint, fingerprint
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.files.checkpoints.manifest import read_manifest, unknown_files
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.view import dequantised
from covmerge.files.stores import link, servers
from covmerge.files.stores.local import local_store
from covmerge.files.tensors.describe import conv1d_names, describe_checkpoint
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import dump_recipe, load_recipe, parse_recipe
from covmerge.plan.recipe.load import import_recipe, load_stages
from covmerge.plan.recipe.mergekit.reading import ImportLog
from covmerge.plan.statistics import Reading, StatisticsFile
from covmerge.plan.statistics.examples import read_texts
from covmerge.plan.vocabulary.files import template_of
from covmerge.plan.vocabulary.tokens import read_tokenizer
from covmerge.run.export.parents import read_licence
from covmerge.run.recompute import recompute
from covmerge.run.verification import verify
from tests.campaigns import pages
from tests.campaigns.inputs import Content, Sparse
from tests.cli.runs import save_plain, statistics_for
from tests.remote.servers import KEYS

IN, OUT = Path("given"), Path("out")
HOME = Path(__file__).parent.parent.parent

_MOST_READ = 1 << 22  # bytes of a tensor; larger ones are merged row by row
_HEADS = 8  # tensors of which rows are read too


@dataclass(frozen=True)
class Reader:
    """One kind of input.

    Attributes:
        build: writes valid inputs to `given`.
        read: reads one; CovmergeErrors are what it should raise.
        files: patterns of the files that are made hostile; all others stay valid.
        writes: whether it may write to `out`.
        named: whether the input itself says which other files to read, which then may lie anywhere.
        names: what an error may name in the place of a file.
        changes: whether it may change what it reads.
        reaches: the servers that it may connect to.
        forks: whether it starts processes or threads that must not be there before others are forked.
    """

    build: Callable[[], None]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("*",)
    writes: bool = False
    named: bool = False
    names: tuple[str, ...] = ()
    changes: bool = False
    reaches: Collection[tuple[str, int]] = ()
    forks: bool = False


def _seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(prod(shape)))


def _model(layers: int = 2, width: int = 4) -> dict[str, Tensor]:
    names = {f"layers.{n}.mlp.up_proj.weight": _seeded(width, width) for n in range(layers)}
    return names | {
        "norm.weight": torch.ones(width),
        "embed_tokens.weight": _seeded(6, width).bfloat16(),
    }


def _all(checkpoint: Checkpoint) -> None:
    """Read every tensor of a checkpoint, as far as a merge would hold it at once."""
    for number, (name, header) in enumerate(checkpoint.headers.items()):
        if header.nbytes <= _MOST_READ:
            checkpoint.read(name)
        if (
            header.shape
            and number < _HEADS
            and header.nbytes // max(1, header.shape[0]) <= _MOST_READ
        ):
            checkpoint.read(
                name, range(header.shape[0] // 2, min(header.shape[0], header.shape[0] // 2 + 1))
            )


def _opened(path: Path) -> None:
    with closing(open_checkpoint(path)) as checkpoint:
        _all(checkpoint)


def _plain(path: Path) -> None:
    """As a source of a merge: dequantised, its layers described."""
    with closing(open_checkpoint(path)) as checkpoint:
        plain = dequantised(checkpoint)
        describe_checkpoint(plain)
        _all(plain)
        plain.readme()


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: own.contiguous() for name, own in tensors.items()}, path, metadata={"format": "pt"}
    )


def _build_safetensors() -> None:
    every = {
        f"of.{dtype}": torch.ones(2, 3).to(dtype)
        for dtype in (torch.float16, torch.int64, torch.bool)
    }
    _save(
        _model() | every | {"scalar": torch.tensor(1.0), "none": torch.ones(0, 3)},
        IN / "model.safetensors",
    )


def _build_shards() -> None:
    parts: list[tuple[str, dict[str, Tensor]]] = [
        (
            f"model-0000{n}-of-00002.safetensors",
            {f"layers.{n}.weight": _seeded(3, 4), f"x.{n}": torch.ones(2)},
        )
        for n in (1, 2)
    ]
    for name, tensors in parts:
        _save(tensors, IN / name)
    named = {own: name for name, tensors in parts for own in tensors}
    index = {"metadata": {"total_size": 112}, "weight_map": named}
    (IN / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (IN / "config.json").write_text('{"model_type": "bert", "hidden_size": 4}')


def _build_config() -> None:
    from tests.mergekit.models import CONFIGS, layout

    for arch, config in CONFIGS.items():
        folder = IN / arch
        _save({name: _seeded(*shape) for name, shape in layout(arch)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))


_PEFT = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["up_proj", "embed_tokens"],
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": ["norm"],
    "layers_to_transform": None,
    "layers_pattern": None,
    "layer_replication": None,
    "fan_in_fan_out": False,
    "bias": "none",
    "init_lora_weights": True,
    "megatron_config": None,
    "inference_mode": True,
    "revision": None,
    "target_parameters": None,
}


def _build_peft() -> None:
    _save(_model(), IN / "base" / "model.safetensors")
    inside = "base_model.model."
    factors = {
        f"{inside}layers.{n}.mlp.up_proj.lora_{side}.weight": _seeded(*shape)
        for n in range(2)
        for side, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    table = {"embedding_A": (2, 6), "embedding_B": (4, 2)}
    factors |= {f"{inside}embed_tokens.lora_{n}": _seeded(*shape) for n, shape in table.items()}
    _save(
        factors | {f"{inside}norm.weight": torch.ones(4)},
        IN / "adapter" / "adapter_model.safetensors",
    )
    (IN / "adapter" / "adapter_config.json").write_text(json.dumps(_PEFT, indent=1))


def _build_lora() -> None:
    block = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    layers = {f"{block}.{leaf}": _seeded(4, 4) for leaf in ("to_q", "to_v", "to_out.0")}
    layers["conv_in"] = _seeded(4, 3, 3, 3)
    for form in ("kohya", "diffusers"):
        base = {f"{name}.weight": own for name, own in layers.items()}
        _save(base, IN / form / "base" / "diffusion_pytorch_model.safetensors")
        tensors: dict[str, Tensor] = {}
        for name, own in layers.items():
            down, up = _seeded(2, *own.shape[1:]), _seeded(4, 2, *[1] * (own.ndim - 2))
            if form == "kohya":
                stem = f"lora_unet_{name.replace('.', '_')}"
                tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
                tensors[f"{stem}.alpha"] = torch.tensor(2.0)
            else:
                tensors |= {f"unet.{name}.lora_A.weight": down, f"unet.{name}.lora_B.weight": up}
        _save(tensors, IN / form / "adapter" / "pytorch_lora_weights.safetensors")


def _read_adapter(path: Path) -> None:
    with (
        closing(open_checkpoint(path / "adapter")) as own,
        closing(open_checkpoint(path / "base")) as base,
    ):
        if not isinstance(own, AdapterCheckpoint):
            _all(own)
            return
        named = own.named_as(base.headers, conv1d_names(describe_checkpoint(base)))
        for name, header in named.low_rank.items():
            if name in base.headers and header.elements < _MOST_READ:
                named.read_update(name)
        _all(named)


def _build_torch() -> None:
    state = dict(_model(1))
    for form, saved in (("zip", True), ("legacy", False)):
        folder = IN / f"state-{form}"
        folder.mkdir(parents=True)
        torch.save(state, folder / "model.bin", _use_new_zipfile_serialization=saved)


def _build_gguf() -> None:
    from tests.quantised.ggufs import save_gpt2, save_llama
    from tests.quantised.models import llama

    for kind in ("Q8_0", "Q4_K", "F16"):
        (IN / kind).mkdir(parents=True)
        save_llama(
            llama(1, vocab_size=8, hidden_size=32, intermediate_size=32),
            IN / kind / "model.gguf",
            kind,
        )
    from transformers import GPT2Config, GPT2LMHeadModel

    (IN / "gpt2").mkdir()
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=8)
    save_gpt2(GPT2LMHeadModel(config), IN / "gpt2" / "model.gguf", "Q5_0")


def _build_quantised() -> None:
    from tests.quantised.models import FORMATS, gpt_oss, llama, save_packed

    for name, (pack, settings) in FORMATS.items():
        model = gpt_oss(1) if "mxfp4" in name else llama(1, vocab_size=8)
        save_packed(model, IN / name.replace(" ", "-"), pack, settings)


_RECIPES = {
    "tokens": {
        "base": "./base",
        "experts": {"a": "./a", "b": {"source": "./b", "weight": {"by_depth": [0.2, 0.6]}}},
        "method": "ties",
        "parameters": {
            "scaling": {"by_name": [{"match": "*.mlp.*", "value": 0.5}, {"value": 1.0}]}
        },
        "tokenizer": {
            "source": "union",
            "tokens": {
                "<x>": {"of": "a", "force": True},
                "<y>": {"of": "base", "token": "</s>"},
                "<z>": {"of": "zero"},
            },
            "pad_to_multiple_of": 64,
        },
        "chat_template": "a",
    },
    "slices": {
        "base": "org/base@main",
        "experts": {"a": "org/a", "b": "org/b"},
        "method": "linear",
        "slices": [
            {"experts": {"a": [0, 2], "b": [1, 3]}},
            {"experts": {"b": [0, 1]}, "base": [2, 3], "parameters": {}},
        ],
        "tensors": {"embeddings": "base", "output_head": "average"},
        "rules": [{"match": "*.norm.*", "use": "base"}, {"role": "norm", "use": "average"}],
        "output": {"dtype": "bfloat16", "shard_size": "2GB", "format": "model"},
    },
}


def _build_recipe() -> None:
    IN.mkdir(exist_ok=True)
    texts = {own.stem: own.read_text() for own in (HOME / "tests/recipe/examples").iterdir()}
    texts |= {name: json.dumps(recipe, indent=1) for name, recipe in _RECIPES.items()}
    for name, text in texts.items():
        (IN / name).mkdir()
        (IN / name / "recipe.yml").write_text(text)


def _read_recipe(path: Path) -> None:
    dump_recipe(load_recipe(path / "recipe.yml"))


def _build_mergekit() -> None:
    from random import Random

    import yaml

    from tests.mergekit.generator import drawn
    from tests.mergekit.token_cases import RECIPES

    drawings = [yaml.safe_dump(drawn(Random(number))) for number in range(30)]
    texts = dict(RECIPES) | {f"drawn{number}": own for number, own in enumerate(drawings)}
    texts["stages"] = f"name: one\n{drawings[3]}\n---\n{drawings[4]}"
    for name, text in texts.items():
        (IN / name).mkdir(parents=True)
        (IN / name / "recipe.yml").write_text(text)
        try:
            _read_mergekit(IN / name)
        except RecipeError:  # drawn for mergekit, which refuses less
            shutil.rmtree(IN / name)


def _read_mergekit(path: Path) -> None:
    file = path / "recipe.yml"
    with suppress(RecipeError):  # of several documents, or with what it passes over
        import_recipe(file, ImportLog())
    load_stages(file, OUT / "merged", ImportLog(lenient=True))


def _build_run() -> None:
    for step in (5, 10, 15):
        folder = IN / "run" / f"checkpoint-{step}"
        _save(_model(1), folder / "model.safetensors")
        state = {
            "global_step": step,
            "max_steps": 20,
            "epoch": 1.0,
            "log_history": [{"loss": 0.5, "step": 1}],
        }
        (folder / "trainer_state.json").write_text(json.dumps(state))
    (IN / "recipe.yml").write_text("base: base\nrun:\n  folder: run\n  last: 2\n")


def _build_statistics() -> None:
    folder = Path("models")
    folder.mkdir()
    save_plain(folder, experts=("a",), layers=1, width=4)
    for number, method in enumerate(("regmean", "fisher")):
        found = statistics_for(method, folder, experts=("a",))["a"]
        (IN / str(number)).mkdir(parents=True)
        found.rename(IN / str(number) / "own.covstats.safetensors")


def _read_statistics(path: Path) -> None:
    with closing(StatisticsFile.open(path / "own.covstats.safetensors")) as file:
        file.identity()
        for kind in ("gram", "fisher"):
            for name in file.names(kind):
                file.rows(kind, name)
                file.total(kind)
                if file.header(kind, name).nbytes < _MOST_READ:
                    file.read(kind, name)


def _build_journal() -> None:
    IN.mkdir(exist_ok=True)
    journal = Journal.create(IN / "journal.jsonl", plan_hash="1f")
    for number in range(4):
        diagnostics = {"norms": {"a": 1.5, "b": None}, "noticed": [{"rank": 3}]}
        journal.append(Entry(f"layers.{number}.weight", (0, number), "c0ffee", diagnostics))


def _read_journal(path: Path) -> None:
    journal = Journal.resume(path / "journal.jsonl", plan_hash="1f")
    journal.append(Entry("w", (0, 4), "c0ffee"))


def _merged(method: str, **given: Any) -> None:
    """A merge of small models, beside its sources."""
    IN.mkdir(exist_ok=True)
    save_plain(IN, layers=1, width=4)
    sources = {name: str(IN / f"{name}.safetensors") for name in ("a", "b")}
    covmerge.merge(str(IN / "base.safetensors"), sources, method, IN / "out", **given)


def _build_manifest() -> None:
    _merged("task_arithmetic")


def _read_manifest(path: Path) -> None:
    folder = path / "out"
    read_manifest(folder)
    verify(folder).summary()
    unknown_files(local_store(folder))


def _build_masks() -> None:
    _merged("emr")


def _read_masks(path: Path) -> None:
    covmerge.load_expert(path / "out", "a", path / "base.safetensors")


def _read_report(path: Path) -> None:
    covmerge.report(path / "out", spectra="none")


def _read_deep(path: Path) -> None:
    recompute(path / "out", tensors=2)


def _build_tokenizer() -> None:
    from tests.mergekit.token_cases import WORDS, ids_of, save_model

    for name in ("base", "t1"):
        save_model(IN / name, "llama", name, WORDS[name])
        (IN / name / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        special = {"eos_token": "</s>", "unk_token": {"content": "<unk>"}}
        (IN / name / "special_tokens_map.json").write_text(json.dumps(special))
        added = {"<new>": len(ids_of(IN / name))}
        (IN / name / "added_tokens.json").write_text(json.dumps(added))


def _read_tokenizer(path: Path) -> None:
    template_of(path)
    found = read_tokenizer(path, {})
    if found is not None:
        assert found.end >= 0


_CARDS = {
    "usual": "---\nlicense: apache-2.0\nbase_model: org/base\ntags:\n- a\n- b\n---\n# A model\n",
    "other": "---\nlicense: other\nlicense_name: llama3.2\nlicense_link: LICENSE.txt\nx: [1]\n---\n",
}


def _build_card() -> None:
    for name, text in _CARDS.items():
        (IN / name).mkdir(parents=True)
        (IN / name / "README.md").write_text(text)


def _read_card(path: Path) -> None:
    read_licence(path / "README.md", None)


def _build_examples() -> None:
    rows = [{"text": f"number {n}", "text_pair": "b", "label": n} for n in range(4)]
    for name, text in (
        ("a.jsonl", "\n".join(map(json.dumps, rows))),
        ("a.json", json.dumps(rows)),
        ("a.txt", "one\ntwo\n"),
    ):
        (IN / name).mkdir(parents=True)
        (IN / name / name).write_text(text)
    (IN / "csv").mkdir()
    with (IN / "csv" / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _read_examples(path: Path) -> None:
    for file in sorted(path.iterdir()):
        read_texts(file, Reading(max_examples=10))


def _build_rows() -> None:
    """Models with a tensor that is merged row by row; a hole, so that little is written."""
    for method in ("average", "ties", "dare_ties"):
        folder = IN / method
        folder.mkdir(parents=True)
        for number, name in enumerate(("base", "a", "b")):
            size = 1280 * 1024 * 4
            log = {"big.weight": {"dtype": "F32", "shape": [1280, 1024], "data_offsets": [0, size]}}
            header = json.dumps(log).encode()
            header += b" " * (-len(header) % 8 + 64)
            path = folder / f"{name}.safetensors"
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([0, 0, number, 63]))
            os.truncate(path, 8 + len(header) + size)
        recipe = {"base": "base.safetensors", "method": method}
        recipe["experts"] = {name: f"{name}.safetensors" for name in ("a", "b")}
        (folder / "recipe.yml").write_text(json.dumps(recipe))


def _read_rows(path: Path) -> None:
    run_recipe(load_recipe(path / "recipe.yml"), OUT / "merged")


def _build_remote() -> None:
    from tests.mergekit.token_cases import WORDS, save_model

    for module in ("aiohttp", "fsspec.implementations.http"):
        import_module(module)  # once, and not in each process
    save_model(IN / "one", "llama", "base", WORDS["base"])
    (IN / "one" / "README.md").write_text("---\nlicense: mit\n---\n")
    _save(_model(), IN / "shards" / "a-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(_model(), "a-00001-of-00001.safetensors")}
    (IN / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in ("one", "shards"):
        (IN / folder / pages.ANSWERS).write_text("[]")


def _read_remote(path: Path) -> None:
    """What a merge asks of a file of a web server."""
    link.WAITS, link.LONGEST, servers.SILENCE = (0.01,), 2.0, 0.4
    address = f"{pages.start(path.absolute().parent)}/{path}"
    for file in path.glob("*.safetensors"):
        with closing(open_checkpoint(f"{address}/{file.name}")) as checkpoint:
            _all(checkpoint)
            checkpoint.materialize()
            fingerprint(checkpoint)


def _build_stored(kind: str) -> None:
    """What a bucket or a Hub has; see `pages.py`."""
    for module in ("s3fs", "huggingface_hub.utils", "covmerge.files.checkpoints.remote"):
        import_module(module)
    _save(_model(), IN / "shards" / "a-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(_model(), "a-00001-of-00001.safetensors")}
    (IN / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    _save(_model(), IN / "one" / "model.safetensors")
    for name in ("one", "shards"):
        (IN / name / "config.json").write_text('{"model_type": "bert", "hidden_size": 4}')
        (IN / name / "README.md").write_text("---\nlicense: mit\n---\n")
        (IN / name / pages.ANSWERS).write_text(json.dumps([kind]))


def _read_bucket(path: Path) -> None:
    """The same of a bucket of S3."""
    link.WAITS, link.LONGEST, servers.SILENCE = (0.01,), 2.0, 0.4
    servers._READING["s3"]["config_kwargs"] |= {"read_timeout": 0.4, "connect_timeout": 0.4}
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": pages.start(path.absolute().parent)}
    _use(f"s3://{pages.listings.BUCKET}/{path}")


def _read_hub(path: Path) -> None:
    """The same of a repository of the Hub, whose client caches what it has fetched."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    from covmerge.files.stores import hub

    url, cache = pages.start(path.absolute().parent), Path("cache/hub").absolute()
    shutil.rmtree(cache, ignore_errors=True)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    constants.HUGGINGFACE_CO_URL_TEMPLATE, constants.ENDPOINT = template, url
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(cache), False
    constants.AGENT_HARNESSES_PATH = (
        "cache/harnesses"  # where the client keeps what it asks for itself
    )
    constants.HF_HUB_DISABLE_XET, constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True, True
    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = hub.TIMEOUT = 1.5  # type: ignore[assignment]
    _http.time = SimpleNamespace(sleep=lambda seconds: None, time=time.time)  # type: ignore[assignment]
    _use(pages.listings.REPOSITORY)


def _use(source: str) -> None:
    with closing(open_checkpoint(source)) as checkpoint:
        checkpoint.readme()
        checkpoint.materialize()
        _all(checkpoint)
        checkpoint.companions()
        fingerprint(checkpoint)


def _build_merge() -> None:
    from tests.mergekit.token_cases import WORDS, save_model

    for name in ("base", "t0", "t1"):
        save_model(IN / name, "llama", name, WORDS[name])


def _read_merge(path: Path) -> None:
    """A whole merge of models with tokenizers, and the check of its output."""
    recipe = parse_recipe(
        {
            "base": str(path / "base"),
            "experts": {name: str(path / name) for name in ("t0", "t1")},
            "method": "ties",
            "tokenizer": {"source": "union"},
            "chat_template": "auto",
        }
    )
    run_recipe(recipe, OUT / "merged")
    verify(OUT / "merged").raise_if_failed()


READERS: dict[str, Reader] = {
    "safetensors": Reader(
        _build_safetensors, lambda path: _opened(path / "model.safetensors"), named=True
    ),
    "shards and index": Reader(_build_shards, _opened),
    "config.json": Reader(_build_config, _plain, ("config.json",)),
    "adapter (PEFT)": Reader(_build_peft, _read_adapter, ("adapter/*",)),
    "adapter (Kohya, diffusers)": Reader(_build_lora, _read_adapter, ("adapter/*",)),
    "torch": Reader(_build_torch, lambda path: _opened(path / "model.bin"), named=True),
    "GGUF": Reader(_build_gguf, lambda path: _plain(path / "model.gguf"), named=True),
    "quantised": Reader(_build_quantised, _plain, ("config.json", "*.safetensors")),
    "recipe": Reader(_build_recipe, _read_recipe, named=True),
    "recipe of mergekit": Reader(_build_mergekit, _read_mergekit, named=True),
    # A run may be named anywhere: that name is told.
    "training run": Reader(
        _build_run, _read_recipe, named=True, names=("the run ", " is an address")
    ),
    "statistics": Reader(_build_statistics, _read_statistics, named=True),
    "journal": Reader(_build_journal, _read_journal, changes=True),
    "manifest": Reader(_build_manifest, _read_manifest, ("out/*",), named=True),
    "masks": Reader(_build_masks, _read_masks, ("out/*",), named=True),
    "report": Reader(_build_manifest, _read_report, ("out/covmerge.json",), named=True),
    "verify --deep": Reader(_build_manifest, _read_deep, ("out/covmerge.json",), named=True),
    "tokenizer": Reader(_build_tokenizer, _read_tokenizer),
    "model card": Reader(_build_card, _read_card, named=True),
    "examples": Reader(_build_examples, _read_examples, named=True),
    "large tensors": Reader(
        _build_rows,
        _read_rows,
        ("*.safetensors",),
        writes=True,
        named=True,
        names=("'big.weight'", "expert 'a'", "expert 'b'"),
    ),
    "remote": Reader(
        _build_remote, _read_remote, (pages.ANSWERS,), reaches=pages.REACHED, forks=True
    ),
    "bucket": Reader(
        lambda: _build_stored("s3"),
        _read_bucket,
        (pages.ANSWERS,),
        names=(f"s3://{pages.listings.BUCKET}",),
        reaches=pages.REACHED,
        forks=True,
    ),
    "Hub": Reader(
        lambda: _build_stored("hub"),
        _read_hub,
        (pages.ANSWERS,),
        names=(pages.listings.REPOSITORY,),
        reaches=pages.REACHED,
        forks=True,
    ),
    "whole merge": Reader(
        _build_merge,
        _read_merge,
        ("base/*", "t0/*", "t1/*"),
        writes=True,
        names=("the base", "expert 't0'", "expert 't1'"),
    ),
}


def inputs_of(reader: Reader) -> Iterator[dict[str, Content]]:
    """Build the valid inputs of a reader, as files by path; in an empty working directory."""
    reader.build()
    top = sorted(IN.iterdir())
    several = not any(own.is_file() for own in top) and not _patterned(reader, top)
    for folder in top if several else [IN]:
        yield {
            own.relative_to(folder).as_posix(): _content(own)
            for own in sorted(folder.rglob("*"))
            if own.is_file()
        }


def _content(path: Path) -> Content:
    """What a file holds; of one of several MB, which is a hole after the first value, up to there."""
    size = path.stat().st_size
    if size <= _MOST_READ:
        return path.read_bytes()
    with path.open("rb") as file:
        length = file.read(8)
        return Sparse(length + file.read(int.from_bytes(length, "little") + 4), size)


def _patterned(reader: Reader, top: list[Path]) -> bool:
    """Whether the folders are parts of one input: its patterns begin with their names."""
    names = {pattern.partition("/")[0] for pattern in reader.files if "/" in pattern}
    return any(own.name in names for own in top)
