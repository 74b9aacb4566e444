"""Crossed ground: files of other libraries and of older releases, merged here.

    python -m benchmarks.crossed --work DIR [--torch DIR]

DIR gets the old releases, each in a folder of its own (`pip install --no-deps --target`), with the torch of
this environment. `--torch` is a folder with a virtual environment `torch-VERSION` of each older torch that
shall write checkpoints (with numpy and safetensors); the others are left out. A number is the
largest difference from what the old release or the library computes itself, in float64, over the largest
value; otherwise the error. Written into results/crossed.json, and as tables into docs/crossed.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import covmerge
from benchmarks import (
    older_bases,
    older_peft,
    older_peft_over,
    older_tokenizers,
    older_torch,
    older_transformers,
)
from benchmarks.older_peft import TOKENS, Small
from covmerge.files.quantised.view import open_plain

RESULTS = Path(__file__).parent / "results" / "crossed.json"
PEFT = ("0.5.0", "0.8.2", "0.10.0", "0.11.1", "0.14.0", "0.17.1", "0.19.1", "0.21.2")
BESIDE = ("transformers==4.46.3", "tokenizers==0.20.3", "huggingface_hub==0.26.5")
OVER = ("0.10.0", "0.14.0", "0.21.2")
TORCHAO = "torchao==0.18.0"
MODELS = {
    "4.46.3": BESIDE,
    "4.57.6": ("transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0"),
}
TORCH = ("2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.15.0")
GGUF = ("0.10.0", "0.14.0", "0.17.1", "0.19.0")
MLX = ("0.29.4", "0.32.4")
SAFETENSORS = ("0.3.3", "0.4.5", "0.5.3", "0.7.0", "0.8.0")
SOURCES = ("union", "base", "old", "new")
_MLP = "model.layers.0.mlp."
Found = dict[str, dict[str, dict[str, float | str]]]

_GGUF = """
import sys
import gguf
import numpy as np
arrays = np.load(sys.argv[1])
for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
    writer = gguf.GGUFWriter(f"{sys.argv[2]}/{kind}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(32)
    writer.add_vocab_size(64)
    own = gguf.GGMLQuantizationType[kind]
    for name in arrays.files:
        writer.add_tensor(name, gguf.quants.quantize(arrays[name], own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
"""
_SAFETENSORS = """
import sys
import numpy as np
import torch
import safetensors.numpy
import safetensors.torch
arrays = dict(np.load(sys.argv[1]))
for dtype in ("float32", "float16"):
    own = {n: array.astype(dtype) for n, array in arrays.items()}
    safetensors.numpy.save_file(own, f"{sys.argv[2]}/numpy-{dtype}.safetensors")
for dtype in ("float32", "float16", "bfloat16"):
    tensors = {n: torch.from_numpy(own).to(getattr(torch, dtype)) for n, own in arrays.items()}
    safetensors.torch.save_file(tensors, f"{sys.argv[2]}/torch-{dtype}.safetensors")
"""
_MLX = """
import sys
import mlx.core as mx
import numpy as np
arrays = dict(np.load(sys.argv[1]))
for dtype in ("float32", "float16", "bfloat16"):
    own = {n: mx.array(array).astype(getattr(mx, dtype)) for n, array in arrays.items()}
    mx.save_safetensors(f"{sys.argv[2]}/mlx-{dtype}.safetensors", own)
"""


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference over the largest number of each."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in pairs)


def told(found: Callable[..., float], *given: Any) -> float | str:
    """A number, or the error that is raised instead, its folder left out."""
    try:
        return float(f"{found(*given):.1e}")
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure).partition(': ')[2] or failure}"[:200]


def installed(folder: Path, *packages: str) -> dict[str, str]:
    """The environment in which releases of packages come before those of this one."""
    if not folder.exists():
        argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        subprocess.run([*argv, *packages], check=True)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(script: ModuleType, *given: str | Path, env: Mapping[str, str]) -> None:
    """Run a script by itself, without this folder among the places of modules."""
    subprocess.run([sys.executable, "-P", str(script.__file__), *given], env=env, check=True)


def older(work: Path, release: str) -> dict[str, str]:
    """The environment of one PEFT; of this environment's own, that is all."""
    if release == peft.__version__:
        return dict(os.environ)
    return installed(work / f"peft-{release}", f"peft=={release}", *BESIDE)


def of_peft(work: Path) -> Found:
    """Every type of adapter of each version, merged here and loaded by the PEFT of this environment."""
    rows: Found = {}
    for release in PEFT:
        out = work / f"adapters-{release}"
        if not out.exists():
            out.mkdir()
            run(older_peft, out, env=older(work, release))
        base = Small()
        base.load_state_dict(load_file(out / "base.safetensors"))
        for what, where in json.loads((out / "told.json").read_text()).items():
            if not where.isdigit():
                continue  # this release has no such type or option
            folder = out / where
            given = load_file(folder / "outputs.safetensors")
            expected = [given[str(number)] for number in range(len(given))]
            rows.setdefault(what, {})[f"peft {release}"] = {
                "covmerge": told(by_covmerge, base, folder, expected),
                f"peft {peft.__version__}": told(by_peft, base, folder, expected),
            }
    return rows


@torch.no_grad()
def by_covmerge(base: Small, folder: Path, expected: Sequence[Tensor]) -> float:
    """How far off the merged model is, in float64."""
    kept = {"dtype": "float64", "out_dtype": "float64"}
    merged = covmerge.merge(base.state_dict(), {"a": folder}, "linear", **kept)
    model = Small().double()
    model.load_state_dict(dict(merged.tensors))
    return apart(model(TOKENS), expected)


@torch.no_grad()
def by_peft(base: Small, folder: Path, expected: Sequence[Tensor]) -> float:
    """How far off the model with the adapter is."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
    try:
        return apart(copy.deepcopy(model).double()(TOKENS), expected)
    except RuntimeError:
        return apart(model(TOKENS), expected)  # some types have float32 inside


def of_bases(work: Path) -> Found:
    """Adapters of several PEFTs over one model that libraries quantised, merged over what they stored."""
    bases = work / "bases"
    if not bases.exists():
        bases.mkdir()
        run(older_bases, bases, env=installed(work / "torchao", TORCHAO))
    rows: Found = {}
    for release in OVER:
        out = work / f"over-{release}"
        if not out.exists():
            run(older_peft_over, bases, out, env=older(work, release))
        for path in sorted(out.glob("*/told.json")):
            stored = bases / path.parent.name
            for what, where in json.loads(path.read_text()).items():
                if where.isdigit():
                    found = told(by_layers, stored, path.parent / where)
                    row = rows.setdefault(f"{what}, {stored.name}", {})
                    row[f"peft {release}"] = {"covmerge": found}
    return rows


def by_layers(stored: Path, folder: Path) -> float:
    """How far the layers of the merge are off, in float64."""
    right = load_file(folder / "weights.safetensors")
    kept = {"dtype": "float64", "out_dtype": "float64"}
    merged = covmerge.merge(stored, {"a": folder}, "linear", **kept).tensors
    return apart([merged[name] for name in right], list(right.values()))


def of_torch(work: Path, venvs: Path) -> Found:
    """Checkpoints of torch.distributed.checkpoint by older and newer torches, read here."""
    rows: Found = {}
    for release in TORCH:
        out = work / f"dcp-{release}"
        if not (out / "told.json").exists():
            python = venvs / f"torch-{release}" / "bin" / "python"
            if release == torch.__version__.partition("+")[0]:
                python = Path(sys.executable)
            elif not python.exists():
                continue
            out.mkdir(exist_ok=True)
            subprocess.run([python, "-P", older_torch.__file__, out], check=True)
        for case, where in json.loads((out / "told.json").read_text()).items():
            found = told(by_checkpoint, out / where) if where.isdigit() else "–"
            rows.setdefault(case, {})[f"torch {release}"] = {"covmerge": found}
    return rows


def by_checkpoint(folder: Path) -> float:
    """Whether every tensor is there, with its dtype, and its numbers."""
    right = load_file(folder.with_suffix(".safetensors"))
    found = open_plain(folder)
    if {n: (h.dtype, tuple(h.shape)) for n, h in found.headers.items()} != {
        name: (own.dtype, tuple(own.shape)) for name, own in right.items()
    }:
        raise ValueError(f"other tensors: {sorted(found.headers)}")
    names = sorted(right)
    return max(float((found.read(n).double() - right[n].double()).abs().max()) for n in names)


def of_transformers(work: Path) -> Found:
    """A base and an expert of an older transformers, merged with an expert that this one saved."""
    rows: Found = {}
    for release, packages in MODELS.items():
        out = work / f"models-{release}"
        if not out.exists():
            out.mkdir()
            run(older_transformers, out, env=installed(work / f"transformers-{release}", *packages))
        for name in older_transformers.MODELS:
            found = told(by_both, name, out / name)
            rows.setdefault(name, {})[f"transformers {release}"] = {"covmerge": found}
    return rows


@torch.no_grad()
def by_both(name: str, folder: Path) -> float:
    """How far off the merge is, loaded by this transformers; the base in the old names and in the new."""
    own = getattr(transformers, name)
    base, expert = own.from_pretrained(folder / "base"), own.from_pretrained(folder / "expert")
    base.save_pretrained(folder / "base-new")
    newer = older_transformers.moved(copy.deepcopy(base), 3)
    newer.save_pretrained(folder / "expert-new")
    states = [model.double().state_dict() for model in (expert, newer)]
    off = 0.0
    for start in ("base", "base-new"):
        out = folder / f"merged-{start}"
        experts = {"old": folder / "expert", "new": folder / "expert-new"}
        covmerge.merge(folder / start, experts, "linear", out, overwrite=True)
        merged, info = own.from_pretrained(out, output_loading_info=True)
        if info["missing_keys"] or info["unexpected_keys"]:
            raise ValueError(f"merged names: {info['missing_keys']}, {info['unexpected_keys']}")
        given = merged.state_dict()
        kept = [n for n in given if given[n].is_floating_point()]
        right = [(states[0][n] + states[1][n]) / 2 for n in kept]
        off = max(off, apart([given[n] for n in kept], right))
    return off


def of_tokenizers(work: Path) -> Found:
    """A base and an expert of an older transformers, and an expert of this one with other added tokens."""
    rows: Found = {}
    for release, packages in MODELS.items():
        out, env = work / f"tokenizers-{release}", dict(os.environ)
        if release != transformers.__version__:
            env = installed(work / f"transformers-{release}", *packages)
        if not out.exists():
            out.mkdir()
            run(older_tokenizers, "write", out, env=env)
        cells = [(kind, source) for kind in older_tokenizers.KINDS for source in SOURCES]
        found = {cell: told(by_tokens, cell[0], out / cell[0], cell[1]) for cell in cells}
        folders = [own for kind in older_tokenizers.KINDS for own in (out / kind).iterdir()]
        argv = [sys.executable, "-P", older_tokenizers.__file__, "read", *folders]
        said = subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout
        pieces = json.loads(said)
        for (kind, source), number in found.items():
            row = rows.setdefault(f"{kind}, {source}", {})
            row[f"transformers {release}"] = {
                "covmerge": number,
                f"transformers {release}": told(by_pieces, out / kind, source, pieces),
            }
    return rows


def by_tokens(kind: str, folder: Path, source: str) -> float:
    """How far off the rows of the merge are, by this transformers' tokens.

    Raises:
        ValueError: tokens are missing, or a text is other tokens than its expert's.
    """
    own = getattr(transformers, older_tokenizers.KINDS[kind][1])
    places = {"base": folder / "base", "old": folder / "expert", "new": folder / "expert-new"}
    pieces = transformers.AutoTokenizer.from_pretrained(places["base"])
    newer = older_tokenizers.enlarged(own.from_pretrained(places["base"]), pieces, "new", 3)
    older_tokenizers.save(places["new"], *newer)
    out = folder / f"merged-{source}"
    experts = ("old", "new")
    recipe = {
        "base": str(places["base"]),
        "experts": {name: str(places[name]) for name in experts},
        "method": "average",
        "tokenizer": {"source": source},
    }
    covmerge.run_recipe(covmerge.parse_recipe(recipe), out, covmerge.RunOptions(overwrite=True))
    ids = {
        name: transformers.AutoTokenizer.from_pretrained(places[name]).get_vocab()
        for name in places
    }
    got = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    wanted = {*ids["old"], *ids["new"]} if source == "union" else set(ids[source])
    if set(got) != wanted:
        raise ValueError(f"other tokens: {sorted(set(got) ^ wanted)}")
    by_pieces(folder, source, older_tokenizers.read_all([str(out), *map(str, places.values())]))
    tables = {name: _tables(own.from_pretrained(places[name])) for name in places}
    merged, info = own.from_pretrained(out, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"merged names: {info}")
    off = 0.0
    for name, table in _tables(merged).items():
        for token, row in got.items():
            rows = {one: tables[one][name][ids[one][token]] for one in places if token in ids[one]}
            having = [rows[one] for one in experts if one in rows]
            absent = rows["base"] if "base" in rows else torch.stack(having).mean(0)
            right = (rows.get("old", absent) + rows.get("new", absent)) / 2
            off = max(off, apart([table[row]], [right]))
    return off


def by_pieces(folder: Path, source: str, pieces: Mapping[str, Any]) -> float:
    """0 where a transformers makes the same pieces of a text with the merge as with what was merged.

    A union cuts text as the base's tokenizer does: of an expert that cuts otherwise, or that this
    transformers cannot read, only the special token is looked for.

    Args:
        folder: of the kind of tokenizer.
        source: whose tokens the merge has.
        pieces: by folder, what it makes of every text.

    Raises:
        ValueError: it makes others, or cannot read a folder.
    """
    out = folder / f"merged-{source}"
    merged = pieces[str(out)]
    for name in SOURCES[1:] if source == "union" else (source,):
        own = folder / {"old": "expert", "new": "expert-new"}.get(name, name)
        right = pieces[str(own)]
        if isinstance(merged, str):
            raise ValueError(f"{'as before the merge, ' * isinstance(right, str)}{merged}")
        alike = isinstance(right, dict) and _cuts(own) == _cuts(out)
        absent = [t for one, both in older_tokenizers.ADDED.items() if one != name for t in both]
        for text in older_tokenizers.TEXTS:
            if any(token in text for token in absent):
                continue
            if alike and merged[text] != right[text]:
                raise ValueError(f"{text} is {merged[text]}, and with {name} {right[text]}")
            special = older_tokenizers.ADDED.get(name, ("",))[0]
            if not alike and special in text and special not in ["", *merged[text]]:
                raise ValueError(f"{text} is {merged[text]}, without {special}")
    return 0.0


def _cuts(folder: Path) -> list[Any]:
    """What says how a tokenizer cuts a text, beside its tokens."""
    found = json.loads((folder / "tokenizer.json").read_text())
    return [found[part] for part in ("normalizer", "pre_tokenizer", "post_processor")]


def _tables(model: Any) -> dict[str, Tensor]:
    """What has a row for each token, in float64."""
    head = model.get_output_embeddings()
    found = {"embedding": model.get_input_embeddings().weight, "head": head.weight}
    if head.bias is not None:
        found["bias"] = head.bias[:, None]
    return {name: own.detach().double() for name, own in found.items()}


def of_files(work: Path) -> Found:
    """Files of one set of numbers by older writers, read here."""
    draw = torch.Generator().manual_seed(0)
    names = {f"blk.0.ffn_{own}.weight": (64, 96) for own in ("up", "gate")}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in names.items()}
    np.savez(work / "arrays.npz", **{name: own.numpy() for name, own in tensors.items()})
    rows: Found = {}
    for package, releases, code in (
        ("gguf", GGUF, _GGUF),
        ("safetensors", SAFETENSORS, _SAFETENSORS),
        ("mlx", MLX, _MLX),
    ):
        for release in releases:
            out = work / f"{package}-files-{release}"
            if not out.exists():
                out.mkdir()
                names = (package, "mlx-cpu") if package == "mlx" else (package,)
                env = installed(work / f"{package}-{release}", *(f"{n}=={release}" for n in names))
                argv = [sys.executable, "-c", code, str(work / "arrays.npz"), str(out)]
                subprocess.run(argv, env=env, check=True)
            for file in sorted(out.iterdir()):
                found = told(by_reader, file, tensors)
                rows.setdefault(file.name, {})[f"{package} {release}"] = {"covmerge": found}
    return rows


def by_reader(file: Path, tensors: dict[str, Tensor]) -> float:
    """How far what is read is from what was put in, rounded once by this environment's gguf."""
    names = sorted(tensors)
    if file.suffix == ".gguf":
        kind = gguf.GGMLQuantizationType[file.stem]
        rounded = [gguf.dequantize(gguf.quantize(tensors[n].numpy(), kind), kind) for n in names]
        expected = [torch.from_numpy(own.copy()) for own in rounded]
        plain = open_plain(file)
        read = [plain.read(n.replace("blk.0.ffn_", _MLP).replace(".w", "_proj.w")) for n in names]
        return apart(read, [own.to(read[0].dtype) for own in expected])  # it has no config.json
    base = file.with_name("base")
    save_file({name: torch.zeros_like(own) for name, own in tensors.items()}, base)
    merged = covmerge.merge(load_file(base), {"a": file}, "linear").tensors
    base.unlink()
    dtype = getattr(torch, file.stem.partition("-")[2])
    return apart([merged[n] for n in names], [tensors[n].to(dtype) for n in names])


def page(result: Mapping[str, Any]) -> str:
    """The tables of docs/crossed.md."""
    lines = [HEAD]
    for part, what in TITLES.items():
        rows = result.get(part, {})
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines += [
            f"## {what}",
            "",
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for name, row in rows.items():
            cells = (row.get(column, {}) for column in columns)
            said = ("; ".join(_cell(*each) for each in cell.items()) for cell in cells)
            lines.append(f"| {name} | {' | '.join(said)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(by: str, found: float | str) -> str:
    said = "equal" if isinstance(found, float) and found < EQUAL else str(found)
    return said if by == "covmerge" else f"{by}: {said}"


EQUAL = 1e-5  # what a decomposition in float32 on the way leaves
HEAD = """# Crossed ground

Files of other libraries and of older releases, read and merged here. *equal*: the result is that of an
independent computation in float64, to 1e-5 of its largest number. A larger number is the difference
in these units: wrong, but finished. An error is what covmerge says. –: the release cannot write it.
An empty cell was not run. `peft 0.21.2:` is what that PEFT makes of the file, `transformers 4.57.6:`
whether it reads the merge as it reads the models (a union cuts text as the base's tokenizer). The command
`python -m benchmarks.crossed --work DIR` in `lab/` makes this page.
"""
TITLES = {
    "checkpoints": "torch.distributed.checkpoint, by the torch that wrote it",
    "models": "A base and an expert of an older transformers, and an expert of 5.23, loaded by 5.23",
    "tokenizers": "Tokenizers with other tokens under the same numbers, and whose tokens the merge has",
    "quantised": "An adapter by the PEFT that saved it, over a base as a library quantised it",
    "adapters": "An adapter by the PEFT that saved it, over a plain base",
    "files": "Files by the release that wrote them",
}
PAGE = Path(__file__).parents[1] / "docs" / "crossed.md"
PARTS: Mapping[str, Callable[[Path, Path], Found]] = {
    "adapters": lambda work, _: of_peft(work),
    "quantised": lambda work, _: of_bases(work),
    "files": lambda work, _: of_files(work),
    "checkpoints": of_torch,
    "models": lambda work, _: of_transformers(work),
    "tokenizers": lambda work, _: of_tokenizers(work),
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--torch", type=Path, default=Path())
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["versions"] = {
        own: version(own)
        for own in ("torch", "peft", "transformers", "safetensors", "gguf", "bitsandbytes")
    }
    for part in given.only:
        result[part] = PARTS[part](given.work, given.torch)
        RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(result))
