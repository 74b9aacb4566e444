"""Commands that are refused with an advice, and the same as it says, which end well."""

import json
import shlex

import pytest
from safetensors.torch import load_file, save_file

from tests.advised import advice
from tests.cli.runs import covmerge, save_plain, write_recipe
from tests.e2e.following import told

PAIR = "--base base.safetensors --expert a=a.safetensors --expert b=b.safetensors"
ADAPTER = "--base lora/base --expert a=lora/a"


pytestmark = pytest.mark.usefixtures("no_pictures")

ENDED = set()  # lines that were run, each once


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Checkpoints of `save_plain` in the working directory."""
    monkeypatch.chdir(save_plain(tmp_path))
    write_recipe(tmp_path, "method: average")
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    save_file(load_file("a.safetensors"), tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    two = [{"name": n, "merge_method": "passthrough"} for n in "xy"]
    two = [own | {"models": [{"model": "./a.safetensors"}]} for own in two]
    (tmp_path / "named.yml").write_text("\n---\n".join(map(json.dumps, two)))
    sums = {"merge_method": "linear", "dtype": "float32"}
    weighed = [
        {"model": f"./{n}.safetensors", "parameters": {"weight": w}}
        for n, w in (("a", 1), ("b", -1))
    ]
    (tmp_path / "sum.yml").write_text(json.dumps(sums | {"models": weighed}))
    return tmp_path


def run(line, code=0):
    return covmerge(*shlex.split(line), code=code)


# What is typed, what is said of it, and what is typed then.
LINES = {
    "no experts": (
        "merge --base base.safetensors out",
        advice(
            "no experts are given: pass --base SOURCE and --expert NAME=SOURCE for each, or a recipe"
        ),
        f"merge {PAIR} out",
    ),
    "no experts, a recipe": (
        "merge --base base.safetensors out",
        advice("for each, or a recipe: covmerge merge RECIPE.yml OUT"),
        "merge recipe.yml out",
    ),
    "no base": (
        "merge --expert a=a.safetensors out",
        advice("no base is given: pass --base SOURCE, or a recipe with `base:`"),
        "merge --base base.safetensors --expert a=a.safetensors out",
    ),
    "no output": (
        "merge recipe.yml",
        advice("no output folder is given: covmerge merge {} OUT (without OUT, --dry-run only)"),
        "merge recipe.yml out",
    ),
    "no output, a dry run": (
        "merge recipe.yml",
        advice("no output folder is given: covmerge merge {} OUT (without OUT, --dry-run only)"),
        "merge recipe.yml --dry-run",
    ),
    "no output for flags": (
        f"merge {PAIR}",
        advice("no output folder is given: end the command with one"),
        f"merge {PAIR} out",
    ),
    "another form": (
        f"merge {PAIR} out --as things",
        advice("--as: {}: it is one of {}"),
        f"merge {PAIR} out --as model",
    ),
    "both name experts": (
        f"merge recipe.yml {PAIR} out",
        advice("both name experts: which of the two is meant? Leave out one of them"),
        "merge recipe.yml out",
    ),
    "a run and experts": (
        f"merge --run run {PAIR} out",
        advice("--run and --expert both name experts: leave out one of them"),
        f"merge {PAIR} out",
    ),
    "a run's flag": (
        f"merge {PAIR} --last 2 out",
        advice("The weight of one expert is --weight NAME=NUMBER"),
        f"merge {PAIR} --weight a=2 out",
    ),
    "stages of one": (
        "merge recipe.yml --stages dir out",
        advice(
            "stages are of several: leave out --stages, and end the command with the output folder"
        ),
        "merge recipe.yml out",
    ),
    "stages without a file": (
        f"merge {PAIR} --stages dir out",
        advice(
            "several recipes in one file: leave it out, and end the command with the output folder"
        ),
        f"merge {PAIR} out",
    ),
    "workers": (
        f"merge {PAIR} --workers many out",
        advice("--workers: {} is neither a number of processes nor '{}'"),
        f"merge {PAIR} --workers auto out",
    ),
    "an expert to subtract": (
        f"merge {PAIR} --weight b=-1 out",
        advice(
            "to subtract an expert pass --method {} and --set {}, a number for each expert in their order"
        ),
        f"merge {PAIR} --method generalized_task_arithmetic --set 'weight=[1.0, -1.0]' out",
    ),
    "a method in brackets": (
        f"compare {PAIR} --out out --methods 'task_arithmetic(scale' ",
        r"is not NAME\(KEY=VALUE,...\), such as task_arithmetic\(scale=0.3\)",
        f"compare {PAIR} --out out --methods 'task_arithmetic(scale=0.3)'",
    ),
    "whose parameter": (
        f"compare {PAIR} --out out --methods average,task_arithmetic --set scale=0.3",
        advice("--set {}: whose parameter? Write --set METHOD.{}=VALUE"),
        f"compare {PAIR} --out out --methods average,task_arithmetic --set task_arithmetic.scale=0.3",
    ),
    "a method twice": (
        f"compare {PAIR} --out out --methods average,average",
        advice("method '{}' is named twice: name it once"),
        f"compare {PAIR} --out out --methods average",
    ),
    "an option twice": (
        f"inspect {PAIR} --device cpu --device auto",
        advice("stands {} times, and takes one value: leave out the others"),
        f"inspect {PAIR} --device cpu",
    ),
    "JSON and CSV": (
        f"inspect {PAIR} --json --csv",
        advice("--json and --csv both say what is printed: leave out one of them"),
        f"inspect {PAIR} --csv",
    ),
    "a shape": (
        "explain 30x20 --dtype float16",
        advice("--dtype is {}; it must be float32 or float64"),
        "explain 30x20 --dtype float64",
    ),
    "a device": (
        "explain 30x20 --device tpu",
        advice("--device is {}; it must be {}"),
        "explain 30x20 --device cpu",
    ),
    "an existing output": (
        f"merge {PAIR} done",
        advice("the output {} exists: pass --overwrite to replace it, or choose another name"),
        f"merge {PAIR} done --overwrite",
    ),
    "an existing output, another name": (
        f"merge {PAIR} done",
        advice("the output {} exists: pass --overwrite to replace it, or choose another name"),
        f"merge {PAIR} another",
    ),
    "an output in an input": (
        f"merge {PAIR} a.safetensors",
        advice("{} overlap: choose an output elsewhere"),
        f"merge {PAIR} elsewhere",
    ),
    "patience": (
        f"merge {PAIR} --patience 0 out",
        advice("--patience {}: give seconds above 0"),
        f"merge {PAIR} --patience 120 out",
    ),
    "threads and workers": (
        f"merge {PAIR} --executor threads --workers 2 out",
        advice("--executor threads is one process: leave out --workers"),
        f"merge {PAIR} --executor threads out",
    ),
    "an address": (
        f"merge {PAIR} --address auto out",
        advice("--address {} is that of a Ray cluster: give --executor ray too"),
        None,
    ),
    "ranks that nobody started": (
        f"merge {PAIR} --executor ranks out",
        advice("Start the merge by srun or torchrun, or set RANK and WORLD_SIZE"),
        None,
    ),
    "a device of none": (
        f"merge {PAIR} --device tpu out",
        advice(
            "cannot be used here: it is cpu, cuda, cuda:1, mps, or auto, which is cuda where there is"
        ),
        f"merge {PAIR} --device auto out",
    ),
    "too little memory": (
        f"merge {PAIR} --max-memory 1MB out",
        advice("are allowed (--max-memory)"),
        f"merge {PAIR} --max-memory 4GB out",
    ),
    "a size": (
        f"merge {PAIR} --max-memory much out",
        advice("{} is not a size; write bytes, '5GB' or '512MiB'"),
        f"merge {PAIR} --max-memory 4GiB out",
    ),
    "a comparison": (
        "verify compared",
        advice("{} holds a comparison: verify one of its models, such as {}/{}"),
        "verify compared/average",
    ),
    "no output to verify": (
        "verify .",
        advice(
            "it is not a finished output of covmerge. Name the folder that `covmerge merge` wrote."
        ),
        "verify done",
    ),
    "no output to view": (
        "report nowhere",
        advice(
            "it is not a finished output of covmerge. Name the folder that `covmerge merge` wrote."
        ),
        "report done",
    ),
    "a report that is a folder": (
        "report done --html .",
        advice("{} is a folder: name a file, such as {}"),
        "report done --html ./report.html",
    ),
    "a report in no folder": (
        "report done --html no/report.html",
        advice("there is no folder {} for {}: make it first"),
        "report done --html report.html",
    ),
    "a report over a file": (
        "report done --html recipe.yml",
        advice(
            "exists and is no {} of covmerge: pass --overwrite to replace it, or name another file"
        ),
        "report done --html other.html",
    ),
    "a report over a file, all the same": (
        "report done --html recipe.yml",
        advice(
            "exists and is no {} of covmerge: pass --overwrite to replace it, or name another file"
        ),
        "report done --html recipe.yml --overwrite",
    ),
    "a weight that is a share": (
        "merge --base base.safetensors --expert a=a.safetensors --weight a=2 --method emr out",
        advice("is the share of its update, and {}: leave out its weight"),
        "merge --base base.safetensors --expert a=a.safetensors --method emr out",
    ),
    "too few experts": (
        "merge --base base.safetensors --expert a=a.safetensors --method nuslerp out",
        advice("merges {}, and the recipe has {} ({}): choose another method"),
        "merge --base base.safetensors --expert a=a.safetensors --method average out",
    ),
    "weights that add up to nothing": (
        "merge sum.yml out",
        advice("add up to 0: set `normalize: false`, or change one"),
        "merge sum.yml --set normalize=false out",
    ),
    "a window": (
        f"merge {PAIR} --method della --set density=0.05 --set window=0.4 out",
        advice("an entry is divided by its probability; choose a smaller window"),
        f"merge {PAIR} --method della --set density=0.05 --set window=0.05 out",
    ),
    "steps of masks": (
        f"merge {PAIR} --method emr --after rescale out",
        advice("which steps would not know of: leave out `before` and `after`"),
        f"merge {PAIR} --method emr out",
    ),
    "steps of weights": (
        f"merge {PAIR} --method linear --before norm_balance out",
        advice("and steps change updates: leave out `before` and `after`"),
        f"merge {PAIR} --method linear out",
    ),
    "an unfinished merge is done elsewhere": (
        f"merge {PAIR} --method averag out",
        advice(" Did you mean '{}'?"),
        f"merge {PAIR} --method average out",
    ),
    "a dry run of stages": (
        "merge named.yml --stages dir --dry-run",
        advice(
            "--stages is of several recipes in a file, and --dry-run shows one: leave out one of them"
        ),
        "merge named.yml --stages dir",
    ),
    "a weight of several recipes": (
        "merge named.yml --stages dir --weight a=2",
        advice(
            "{} has several recipes: --base, --weight and --stats are of one, and written there"
        ),
        "merge named.yml --stages dir",
    ),
    "a file of a table": (
        f"inspect {PAIR} --csv table.csv",
        advice("--csv takes no file, and prints: leave {} out, and end the command with > {}"),
        f"inspect {PAIR} --csv",
    ),
    "a report without a base": (
        "merge sum.yml --report --set normalize=false out",
        advice("--report shows updates of a base, and the recipe has none: leave it out"),
        "merge sum.yml --set normalize=false out",
    ),
    "named stages": (
        "merge named.yml --stages dir --as model",
        advice("--keep and --report are of one; leave out the `name` of the one that is meant"),
        None,
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_as_it_is_advised(name, here):
    wrong, said, right = LINES[name]
    if "done" in f"{wrong} {right}":
        run(f"merge {PAIR} done")
    if "compared" in wrong:
        run(f"compare {PAIR} --out compared --methods average,ties")
    told(said, *shlex.split(wrong))
    if right is not None and right not in ENDED:
        ENDED.add(right)
        run(right)
        outs = [place for place in shlex.split(right) if place in ("out", "another", "elsewhere")]
        for out in outs if "dry" not in right and "compare" not in right else ():
            run(f"verify {out}")
