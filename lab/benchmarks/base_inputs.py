"""What the base's layers see, collected block by block and with the whole model: memory, time, results.

    python -m benchmarks.base_inputs [--examples 64] [--out FILE.json]

A random TinyLlama-1.1B in bfloat16 with a tokenizer of its 32,000 words. Each way is a process of its own;
`planned` is what covmerge says beforehand that it takes beside the process, `peak_bytes` all that the
process had, by the operating system. `whole` is the model as transformers loads it, under the same hooks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.measure import machine, spawn
from benchmarks.models import LLAMA, WORK, apart, checkpoints

RESULTS = Path(__file__).parent / "results"
WAYS = ("block by block", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "base_inputs.json")
    parser.add_argument("--way", choices=WAYS, help="in this process, for the others")
    arguments = parser.parse_args()
    base = checkpoints(LLAMA, 2)[0]
    if arguments.way:
        _collect(base, arguments.way, arguments.examples)
        return
    apart(_save_tokenizer, base, LLAMA["vocab_size"])
    command = [sys.executable, "-m", "benchmarks.base_inputs", f"--examples={arguments.examples}"]
    rows = {}
    for way in WAYS:
        used = spawn([*command, f"--way={way}"], log=WORK / "base-inputs.log")
        rows[way] = {key: used[key] for key in ("seconds", "cpu_seconds", "peak_bytes")}
        print(way, rows[way], flush=True)
    result = {
        "command": f"python -m benchmarks.base_inputs --examples {arguments.examples}",
        "machine": machine(),
        "model": "TinyLlama-1.1B, random, bfloat16",
        "planned": dict(zip(WAYS, apart(_planned, base, arguments.examples), strict=True)),
        "memory, whole over block by block": round(
            rows["whole"]["peak_bytes"] / rows["block by block"]["peak_bytes"], 2
        ),
        "equal to the bit": apart(_equal),
        "ways": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _save_tokenizer(folder: Path, size: int) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", *(f"word{number}" for number in range(size - 1))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)


def _file(way: str) -> Path:
    return WORK / f"{way.replace(' ', '-')}.covstats.safetensors"


def _collect(base: Path, way: str, examples: int) -> None:
    import torch

    from covmerge import Generated, collect
    from covmerge.files.checkpoints import open_checkpoint
    from covmerge.plan.statistics.examples import Reading, size_of
    from covmerge.plan.statistics.gram import GramCollector
    from covmerge.plan.statistics.model import load_model
    from covmerge.plan.statistics.write import Contents, write_statistics

    drawn = Generated("random")
    if way == "block by block":
        collect(base, drawn, _file(way), max_examples=examples, overwrite=True)
        return
    model = load_model(open_checkpoint(base), "cpu", head=False)
    grams = GramCollector(model.layers())
    seen = 0
    for batch in model.batches(drawn, Reading(max_examples=examples))[0]:
        with grams.watching(batch), torch.no_grad():
            model.run(batch)
        seen += size_of(batch)
    contents = Contents(model.checkpoint, {"gram": grams.statistics()}, seen)
    write_statistics({_file(way): contents}, overwrite=True)


def _planned(base: Path, examples: int) -> tuple[int, int]:
    from covmerge.files.checkpoints import open_checkpoint
    from covmerge.plan.statistics.needed import memory_by_block, memory_needed

    checkpoint = open_checkpoint(base)
    return memory_by_block(checkpoint, examples), memory_needed(checkpoint)


def _equal() -> bool:
    import torch
    from safetensors import safe_open

    with safe_open(_file(WAYS[0]), "pt") as one, safe_open(_file(WAYS[1]), "pt") as other:
        names = sorted(one.keys())
        return names == sorted(other.keys()) and all(
            torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in names
        )


if __name__ == "__main__":
    main()
