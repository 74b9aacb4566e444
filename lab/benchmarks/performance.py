"""Pictures and tables of docs/performance.md, of the committed results.

    python -m benchmarks.performance

roofline   each layer merge: work per byte, and the FLOPs a second that it reached
growth     time against experts, width, layers and rank
timeline   when a merge from disk read, computed and wrote
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = {
    "average": "#7f7f7f",
    "ties": "#bcbd22",
    "ace": "#1f77b4",
    "actmat": "#d62728",
    "iso_c": "#2ca02c",
    "tsv_m": "#9467bd",
    "iso_cts": "#8c564b",
    "wudi": "#e377c2",
    "auto": "#17becf",
}
# Of a block its name in full, and how many a model has.
MODELS = {"vit-l14": ("ViT-L/14 × 8", 24), "gpt2": ("GPT-2 × 7", 12)}
STAGES = {"global pass": "#bcbd22", "read": "#7f7f7f", "compute": "#1f77b4", "write": "#2ca02c"}


PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def main() -> None:
    draw()
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")


def written(text: str) -> str:
    """The page with its tables made anew."""
    for name, table in (
        ("kernels", kernels(_read("kernels"))),
        ("gpu", gpu(_read("kernels-cuda"))),
        ("gpu routes", gpu_routes(_read("routes-cuda"))),
        ("checkpoints", checkpoints(_read("checkpoints-gpt2"), _read("checkpoints-llama"))),
        ("mergekit", mergekit(_read("mergekit"))),
        ("memory", memory(_read("streaming"), _read("streaming-tenfold"))),
        ("routes", routes(_read("routes"))),
        ("overlap", overlap(_read("timeline"))),
        ("large", large(_read("large"))),
        ("start", start(_read("start"))),
        ("forecast", forecast(_read("forecast"))),
        ("many", many(_read("many"))),
        ("eight", eight(_read("eight"))),
    ):
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}"
    return text


def draw() -> None:
    matplotlib.use("svg")
    plt.rcParams.update({"svg.hashsalt": "covmerge", "font.size": 9})
    IMAGES.mkdir(parents=True, exist_ok=True)
    roofline(_read("kernels"))
    growth(_read("growth"))
    timeline(_read("timeline"))


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def kernels(results: Mapping[str, Any]) -> str:
    rows = []
    for total in results["blocks"]:
        own, theirs = total["covmerge"], total.get("published")
        rows.append(
            [
                f"{total['block']}, {total['kind']}, {total['method']}",
                f"{own['seconds']:.2f}",
                f"{own['cpu_seconds']:.2f}",
                *(
                    [
                        f"{theirs['seconds']:.2f}",
                        f"{theirs['cpu_seconds']:.2f}",
                        f"**{total['cpu_seconds, published / covmerge']:.1f}**",
                    ]
                    if theirs
                    else ["", "", ""]
                ),
                _efficiency(results["layers"], total),
            ]
        )
    head = ["block", "seconds", "CPU seconds", "published, seconds", "CPU seconds", "ratio"]
    return _table([*head, "efficiency"], rows)


def start(results: Mapping[str, Any]) -> str:
    keys = ("before", "now", "now / before")
    rows = [
        [row["command"], *(row[kind][key] for kind in ("cpu_seconds", "seconds") for key in keys)]
        for row in results["commands"]
    ]
    head = ["command", "CPU s before", "now", "now / before", "seconds before", "now"]
    return _table([*head, "now / before"], rows)


def forecast(results: Mapping[str, Any]) -> str:
    keys = ("forecast", "idle", "forecast / idle", "share", "seconds")
    rows = [
        [row["method"], *(f"{row[key]['median']:.2f}" for key in keys)] for row in results["merges"]
    ]
    return _table(["method", "forecast, s", "idle, s", "ratio", "share", "by the clock, s"], rows)


def many(results: Mapping[str, Any]) -> str:
    """Many experts at once."""
    kinds = {"full": "full models", "adapters": f"adapters of rank {results['rank']}"}
    rows = [
        [
            f"{row['count']:,} {kinds[row['kind']]}, {row['method']}",
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.0f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        ]
        for row in results["rows"]
    ]
    return _table(["experts, method", "seconds", "CPU seconds", "peak GB"], rows)


def eight(results: Mapping[str, Any]) -> str:
    """A merge of three 8B-shaped models, by its sittings."""
    keys = ["seconds", "CPU seconds", "bytes read, GB", "peak GB"]
    scales = {"seconds": 1, "cpu_seconds": 1, "bytes_read": 1e-9}
    rows = [
        [
            f"sitting {number}",
            *(f"{run[key] * scale:,.0f}" for key, scale in scales.items()),
            f"{run['peak_bytes'] / 1e9:.2f}",
        ]
        for number, run in enumerate(results["runs"], 1)
    ]
    sums = {key: sum(run[key] for run in results["runs"]) for key in scales}
    together = (f"{sums[key] * scale:,.0f}" for key, scale in scales.items())
    cores, forecast = results["machine"]["cores"], results["forecast"]["seconds"]
    rows.append(["together", *together, ""])
    rows.append(["CPU seconds over the cores", f"{sums['cpu_seconds'] / cores:,.0f}", "", "", ""])
    ratio = forecast / (sums["cpu_seconds"] / cores)
    rows.append(["the forecast", f"{forecast:,.0f} ({ratio:.2f} of that)", "", "", ""])
    rows.append(["verification", f"{results['verify']['seconds']:.0f}", "", "", ""])
    return _table(["", *keys], rows)


def gpu(results: Mapping[str, Any]) -> str:
    """Of whole models, as ACE's Table 6 has them."""
    rows = []
    for total in results["blocks"]:
        if total["block"] not in MODELS:
            continue
        name, blocks = MODELS[total["block"]]
        own, theirs = total["covmerge"], total.get("published")
        # 3 iterations of its first layer loaded what the others found.
        loaded = total["method"] == "wudi"
        rows.append(
            [
                f"{name}, {total['method']}",
                f"{blocks * own['seconds']:.2f}",
                "" if theirs is None or loaded else f"{blocks * theirs['seconds']:.1f}",
                _of_wudi(results["layers"], total) if loaded else _ratio(total),
                f"{own['peak_bytes'] / 1e6:.0f}",
                "" if theirs is None else f"{theirs['peak_bytes'] / 1e6:.0f}",
            ]
        )
    head = ["model, method", "seconds", "published, seconds", "ratio", "MB beside the updates"]
    return _table([*head, "published"], sorted(rows, key=lambda row: str(row[0]).split(",")[0]))


def _ratio(total: Mapping[str, Any]) -> str:
    ratio = total.get("seconds, published / covmerge")
    return "" if ratio is None else f"**{ratio:.1f}**"


def _of_wudi(layers: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> str:
    keys = ("block", "kind", "method")
    own = [row for row in layers if all(row[key] == total[key] for key in keys)][1:]
    ratios = [row["seconds, published / covmerge"] for row in own]
    return f"**{min(ratios):.0f} to {max(ratios):.0f}**"


def gpu_routes(results: Mapping[str, Any]) -> str:
    rows = []
    for rate in results["rates"]:
        took = rate["milliseconds"]
        rows.append([rate["side"], *(f"{took[name]:.2f}" for name in took)])
    return _table(["side", *results["rates"][0]["milliseconds"]], rows)


def _efficiency(layers: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> str:
    keys = ("block", "kind", "method")
    own = [row for row in layers if all(row[key] == total[key] for key in keys)]
    found = [row["efficiency"] for row in own if "efficiency" in row]
    return f"{min(found):.2f} to {max(found):.2f}" if found else ""


def checkpoints(*results: Mapping[str, Any]) -> str:
    rows = []
    for found in results:
        for name, run in found["runs"].items():
            seconds, cpu, peak = (run[key] for key in ("seconds", "cpu_seconds", "peak_bytes"))
            against = found["ratios"].get(f"{name} / covmerge", {})
            rows.append(
                [
                    f"{found['case']}, {name}",
                    f"{seconds['median']:.1f}",
                    f"{seconds['min']:.1f} to {seconds['max']:.1f}",
                    f"{cpu['median']:.1f}",
                    f"{peak['median'] / 1e9:.2f}",
                    f"**{against['seconds']:.1f}**" if against else "",
                    f"{against['peak_bytes']:.1f}" if against else "",
                ]
            )
        rows += [
            [f"{found['case']}, {name}", "failed", "", "", "", "", ""] for name in found["failures"]
        ]
    head = ["case, what: tool", "seconds", "least to most", "CPU seconds", "peak GB"]
    return _table([*head, "seconds / covmerge's", "memory / covmerge's"], rows)


def mergekit(results: Mapping[str, Any]) -> str:
    rows = []
    for models, recipes in results["models"].items():
        for recipe, found in recipes.items():
            theirs, ours = found["mergekit"], found["covmerge"]
            times = [
                f"{theirs[key]['median']:.1f} / {ours[key]['median']:.1f} = "
                f"**{theirs[key]['median'] / ours[key]['median']:.1f}**"
                for key in ("cpu_seconds", "seconds")
            ]
            sizes = [
                f"{theirs[key]['median'] / 1e9:.2f} / {ours[key]['median'] / 1e9:.2f} = "
                f"**{theirs[key]['median'] / ours[key]['median']:.1f}**"
                for key in ("peak_bytes", "own_bytes")
            ]
            worst = f"{found['worst']:.0e}" if found["worst"] else "0"
            equal = f"{found['equal']} of {found['tensors']}"
            rows.append([f"{models}, {recipe}", *times, *sizes, equal, worst])
    head = ["models, recipe", "CPU seconds", "seconds", "peak GB", "own GB", "tensors equal"]
    return _table([*head, "worst difference"], rows)


def memory(*results: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{row['layers']} layers, {row['what']}",
            f"{row['bytes_read'] / 1e9:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['seconds']:.0f}",
            row.get("seconds / read and sum", ""),
            row.get("model / max_memory", ""),
            _from_disk(row) if "--cold" in found["command"] else "",
        ]
        for found in results
        for row in found["rows"]
    ]
    head = ["model", "GB read", "peak GB", "seconds", "over reading and summing"]
    return _table([*head, "model / max-memory", "read from the disk / input"], rows)


def _from_disk(row: Mapping[str, Any]) -> str:
    return f"{row['disk_bytes_read'] / row['bytes_read']:.2f}"


def routes(results: Mapping[str, Any]) -> str:
    rows = [
        [
            row["question"],
            " × ".join(map(str, row["shape"])),
            row["taken"],
            row["fastest"],
            row["regret"],
        ]
        for row in results["rows"]
    ]
    return _table(["question", "shape", "taken", "fastest", "time over the fastest"], rows)


def overlap(results: Mapping[str, Any]) -> str:
    rows = [
        [merge["title"], *merge["seconds"].values(), *merge["overlap"].values()]
        for merge in results["merges"]
    ]
    first = results["merges"][0]
    return _table(["merge", *(f"{s}, s" for s in first["seconds"]), *first["overlap"]], rows)


def large(results: Mapping[str, Any]) -> str:
    """Layers of language models by two builds."""
    head = [
        "layer", "method", "CPU s before", "now", "before / now", "now / products",
        "peak GB before", "now", "difference",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for row in results["layers"]:
        before, now = row["before"], row["now"]
        peaks = [f"{build['peak_bytes'] / 1e9:.2f}" for build in (before, now)]
        rows.append(
            [
                " × ".join(map(str, row["shape"])),
                row["method"],
                before["cpu_seconds"],
                now["cpu_seconds"],
                row["before / now"],
                f"{now['cpu_seconds'] / row['products']:.1f}",
                *peaks,
                f"{row['difference']:.0e}" if row["difference"] else "none",
            ]
        )
    return _table(head, rows)


def roofline(results: Mapping[str, Any]) -> None:
    rows = [row for row in results["layers"] if "least FLOPs" in row and row["block"] == "vit-b16"]
    flops = median(row["machine's FLOPs a second"] for row in rows)
    stream = median(row["machine's bytes a second"] for row in rows)
    figure, axes = plt.subplots(figsize=(6, 4))
    intensities = [0.1, flops / stream, 3000]
    axes.plot(intensities, [min(flops, i * stream) / 1e9 for i in intensities], "k-", lw=1)
    axes.annotate("matrix products", (3000, flops / 1e9), ha="right", va="bottom")
    axes.annotate("memory", (0.12, 0.12 * stream / 1e9), ha="left", va="bottom", rotation=35)
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        x = [row["least FLOPs"] / row["least bytes"] for row in own]
        y = [row["least FLOPs"] / row["covmerge"]["seconds"]["median"] / 1e9 for row in own]
        axes.scatter(x, y, s=18, color=COLOURS[method], label=method, zorder=3)
        theirs = [row for row in own if "published" in row]
        if theirs:
            x = [row["least FLOPs"] / row["least bytes"] for row in theirs]
            y = [row["least FLOPs"] / row["published"]["seconds"]["median"] / 1e9 for row in theirs]
            axes.scatter(x, y, s=18, marker="x", color=COLOURS[method])
    axes.scatter([], [], s=18, marker="x", color="black", label="published")
    axes.set(xscale="log", yscale="log", xlabel="least FLOPs per least byte")
    axes.set_ylabel("least GFLOPs a second")
    axes.legend(frameon=False, loc="lower right")
    _save(figure, "roofline")


def growth(results: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(curve["varied"] for curve in results["curves"]))
    figure, grid = plt.subplots(1, len(names), figsize=(3 * len(names), 3.4), sharey=True)
    for axes, name in zip(grid, names, strict=True):
        for curve in results["curves"]:
            if curve["varied"] == name:
                label = f"{curve['method']} {curve['exponent']} ({curve['theory']})"
                axes.plot(
                    curve["sizes"],
                    curve["seconds"],
                    "o-",
                    ms=3,
                    lw=1,
                    color=COLOURS[curve["method"]],
                    label=label,
                )
        axes.set(xscale="log", yscale="log", title=name)
        axes.set_xticks(
            results_sizes(results, name), [str(s) for s in results_sizes(results, name)]
        )
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=7, title="exponent (theory)", title_fontsize=7)
    grid[0].set_ylabel("seconds")
    _save(figure, "growth")


def results_sizes(results: Mapping[str, Any], name: str) -> list[int]:
    return next(curve["sizes"] for curve in results["curves"] if curve["varied"] == name)


def timeline(results: Mapping[str, Any]) -> None:
    figure, grid = plt.subplots(len(results["merges"]), 1, figsize=(8, 2 * len(results["merges"])))
    for axes, merge in zip(grid, results["merges"], strict=True):
        lanes = sorted({(span["stage"], span["thread"]) for span in merge["spans"]}, key=_order)
        for height, lane in enumerate(reversed(lanes)):
            spans = [s for s in merge["spans"] if (s["stage"], s["thread"]) == lane]
            axes.broken_barh(
                [(s["start"], s["stop"] - s["start"]) for s in spans],
                (height - 0.4, 0.8),
                color=STAGES[lane[0]],
                lw=0,
            )
        axes.set_yticks(range(len(lanes)), [stage for stage, _ in reversed(lanes)])
        axes.set_title(merge["title"], fontsize=9, loc="left")
    grid[-1].set_xlabel("seconds")
    _save(figure, "timeline")


def _order(lane: tuple[str, int]) -> tuple[int, int]:
    return list(STAGES).index(lane[0]), lane[1]


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
