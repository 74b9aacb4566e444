"""What `covmerge collect`, and merges by its files, are refused with: the same as it is advised."""

import re
import shlex

import pytest
from peft import LoraConfig

from tests.adapters.models import save as save_adapter
from tests.advised import advice
from tests.cli.runs import covmerge
from tests.e2e.following import told
from tests.e2e.models import build
from tests.statistics.models import classifier, save, save_family, write_json_lines, write_texts

OUT = "x.covstats.safetensors"
MADE = f"collect e1 {OUT} --inputs generated --tokens 6"
LABELLED = f"collect m lines.jsonl {OUT} --kind fisher --labels data"
ALL = "--expert e1=e1 --expert e2=e2"
STATS = "--stats e1=stats/e1.covstats.safetensors --stats e2=stats/e2.covstats.safetensors"
MERGE = f"merge --base base {ALL}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A classifier `m`, a Llama `base` and two experts of it, texts and files of statistics."""
    folder = tmp_path_factory.mktemp("models")
    save_family(build("llama"), folder)
    save(classifier(), folder / "m")
    write_texts(folder / "a.txt", 40)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    save_adapter(build("llama"), lora, folder / "lora")
    (folder / "stats").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("e1", "e2"):
            covmerge("collect", name, "a.txt", f"stats/{name}.covstats.safetensors")
            covmerge(
                "collect", name, "a.txt", f"fisher-{name}.covstats.safetensors", "--kind=fisher"
            )
        covmerge("collect", "base", "a.txt", "base.covstats.safetensors")
        write_texts(folder / "few.txt", 1)
        for name in ("e1", "e2"):
            covmerge("collect", name, "few.txt", f"few-{name}.covstats.safetensors")
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    write_json_lines(
        tmp_path / "lines.jsonl", [{"text": f"w{n}", "label": 3 * n} for n in range(4)]
    )
    write_json_lines(
        tmp_path / "right.jsonl", [{"text": f"w{n}", "label": n % 3} for n in range(4)]
    )
    write_json_lines(tmp_path / "other.jsonl", [{"body": f"w{n}"} for n in range(40)])
    (tmp_path / "some.md").write_text("w1 w2")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.covstats.safetensors").write_text("text")
    return tmp_path


COMMAND = re.compile("`covmerge ([^`]*)`")
ENDED = set()  # lines that were run, each once
FEW = "--stats e1=few-e1.covstats.safetensors --stats e2=few-e2.covstats.safetensors"
FISHER = FEW.replace("few", "fisher")
# Files of examples, what is said of them, and how they are corrected.
EXAMPLES = {
    "a label": (
        ("x.jsonl", '{"text": "w1", "label": 9}'),
        advice(
            "{} has {} labels, numbered from 0, and an example has the label {}: correct the labels"
        ),
        '{"text": "w1", "label": 1}',
    ),
    "no text": (
        ("x.jsonl", '{"text": 3, "label": 1}'),
        advice("{}: {} is no text: correct it, or leave it out"),
        '{"text": "w3", "label": 1}',
    ),
    "half of a pair": (
        ("x.jsonl", '{"text": "\\ud800", "label": 1}'),
        advice("{}: {} holds half of a surrogate pair, which is not valid Unicode: correct it"),
        '{"text": "w3", "label": 1}',
    ),
    "commas": (
        ("x.csv", "text,label\nw1, w2,1"),
        advice("and the first line {}: correct it; a text with commas or quotes stands in quotes"),
        'text,label\n"w1, w2",1',
    ),
}


@pytest.mark.parametrize(("file", "said", "right"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples_that_are_corrected(file, said, right, here):
    name, content = file
    (here / name).write_text(content)
    line = ["collect", "m", name, OUT, "--kind=fisher", "--labels=data"]
    told(said, *line)
    (here / name).write_text(right)
    covmerge(*line)


LINES = {
    "made, no file": (
        "collect e1 --inputs generated",
        advice(
            "a model and a file to write are needed: covmerge collect EXPERT OUT.covstats.safetensors"
        ),
        MADE,
    ),
    "random, no file": (
        "collect base --inputs random",
        advice("covmerge collect BASE OUT.covstats.safetensors --inputs random"),
        f"collect base {OUT} --inputs random --max-examples 4",
    ),
    "made of a file": (
        f"collect e1 a.txt {OUT} --inputs generated",
        advice("--inputs {} needs no {}: leave it out"),
        MADE,
    ),
    "an input": (
        f"collect e1 a.txt {OUT} --inputs made",
        advice("--inputs is '{}': pass data, generated or random"),
        f"collect e1 a.txt {OUT} --inputs data",
    ),
    "tokens of data": (
        f"collect e1 a.txt {OUT} --tokens 6",
        advice("--{} belongs to --inputs generated: leave it out, or pass that"),
        f"collect e1 a.txt {OUT}",
    ),
    "a start at random": (
        f"collect base {OUT} --inputs random --start bos",
        advice("--start {} belongs to --inputs generated: leave it out"),
        f"collect base {OUT} --inputs random --max-examples 4",
    ),
    "labels of a Gram matrix": (
        f"collect m a.txt {OUT} --labels data",
        advice("and none is asked for: leave it out, or pass --kind fisher"),
        f"collect m a.txt {OUT}",
    ),
    "labels of a Gram matrix, Fisher": (
        f"collect m right.jsonl {OUT} --labels data",
        advice("and none is asked for: leave it out, or pass --kind fisher"),
        f"collect m right.jsonl {OUT} --labels data --kind fisher",
    ),
    "labels of what is made": (
        f"collect m {OUT} --inputs generated --kind fisher --labels data",
        advice("what is generated has no labels: pass --labels model"),
        f"collect m {OUT} --inputs generated --kind fisher --labels model --max-examples 4",
    ),
    "a column of what is made": (
        f"{MADE} --text-column body",
        advice("--{} is for a file of examples, and --inputs generated reads none: leave it out"),
        MADE,
    ),
    "a start of the base": (
        f"{MADE} --start base",
        advice("--start base needs --base, which begins the texts: name it"),
        f"{MADE} --start base --base base",
    ),
    "a temperature": (
        f"{MADE} --temperature 0",
        advice("temperature is {}: pass a positive number"),
        f"{MADE} --temperature 1",
    ),
    "a label": (
        LABELLED,
        advice(
            "{} has {} labels, numbered from 0, and an example has the label {}: correct the labels"
        ),
        LABELLED.replace("lines", "right"),
    ),
    "no labels": (
        LABELLED.replace("lines.jsonl", "a.txt"),
        advice("label the examples, or take the model's own labels (--labels model)"),
        LABELLED.replace("lines.jsonl", "a.txt").replace("data", "model"),
    ),
    "a column": (
        f"collect e1 other.jsonl {OUT}",
        advice(" Name the column of the text with --text-column"),
        f"collect e1 other.jsonl {OUT} --text-column body",
    ),
    "a seed": (
        f"{MADE} --seed -1",
        advice("seed is {}: pass a number from 0 to {}"),
        MADE,
    ),
    "tokens at random": (
        f"collect base {OUT} --inputs random --tokens 5",
        advice("random inputs are not written: leave out --{}"),
        f"collect base {OUT} --inputs random --max-examples 4",
    ),
    "a classifier that writes": (
        f"collect m {OUT} --inputs generated --tokens 6",
        advice("{}, no language model that writes: leave out --{}"),
        f"collect m {OUT} --inputs generated --max-examples 4",
    ),
    "likelier than the likeliest": (
        f"{MADE} --temperature 1e-9",
        advice("temperature is {}: pass {} or more, where the likeliest token follows already"),
        f"{MADE} --temperature 0.1",
    ),
    "no chat": (
        f"{MADE} --start chat",
        advice(
            "which --start {} goes on from: pass {}, or with --tokenizer the folder of one that has it"
        ),
        f"{MADE} --start bos",
    ),
    "another file": (
        "collect e1 a.txt text.covstats.safetensors --overwrite",
        advice("{} is not replaced, because it is no statistics file ({}): choose another output"),
        f"collect e1 a.txt {OUT}",
    ),
    "no folder": (
        f"collect e1 a.txt no/{OUT}",
        advice("there is no folder {} to write {} to: create it"),
        None,
    ),
    "a file that is there": (
        "collect e1 a.txt base.covstats.safetensors",
        advice("{} exists: choose another output, or pass --overwrite"),
        f"collect e1 a.txt {OUT}",
    ),
    "a kind of file": (
        f"collect e1 some.md {OUT}",
        advice(
            "is no file of examples that covmerge reads ({}): convert it, or pass batches from Python"
        ),
        f"collect e1 a.txt {OUT}",
    ),
    "no text": (
        f"collect e1 empty.txt {OUT}",
        advice("{} holds no text: pass a file with one example or more"),
        f"collect e1 a.txt {OUT}",
    ),
    "a name": (
        "collect e1 a.txt x.safetensors",
        advice("the output {} does not end with {}: name it so"),
        f"collect e1 a.txt {OUT}",
    ),
    "a tokenizer": (
        f"collect e1 a.txt {OUT} --tokenizer nowhere",
        advice("{} is no folder: pass the folder of a tokenizer with --tokenizer"),
        f"collect e1 a.txt {OUT} --tokenizer e2",
    ),
    "an adapter": (
        f"collect lora a.txt {OUT}",
        advice("then collect on OUT, and name OUT as the expert where the statistics are used"),
        "merge --base base --expert a=lora folded --out-dtype float32; "
        f"collect folded a.txt {OUT} --max-examples 4 --tokenizer base",
    ),
    "no statistics": (
        f"{MERGE} out --method regmean",
        advice("needs the statistics of expert '{}': run {}, then name the file by --stats {}"),
        f"{MERGE} out --method regmean {STATS} --tensors few_rows=allow",
    ),
    "few rows": (
        f"{MERGE} out --method regmean {FEW}",
        advice("Collect more examples, or allow it with --tensors few_rows=allow"),
        f"{MERGE} out --method regmean {FEW} --tensors few_rows=allow",
    ),
    "few rows, more": (
        f"{MERGE} out --method regmean {FEW}",
        advice("Collect more examples, or allow it with --tensors few_rows=allow"),
        f"{MERGE} out --method regmean {STATS}",
    ),
    "another kind": (
        f"{MERGE} out --method fisher {STATS}",
        advice("holds no {}, which method '{}' needs: run {}."),
        f"{MERGE} out --method fisher {FISHER}",
    ),
    "of another model": (
        f"{MERGE} out --method regmean {STATS.replace('stats/e1', 'stats/e2')}",
        advice("which has other weights than {} ({}): pass the statistics of this model, or {}"),
        f"{MERGE} out --method regmean {STATS} --tensors few_rows=allow",
    ),
    "no file of statistics": (
        f"{MERGE} out --method regmean {STATS.replace('stats/e1.covstats', 'e1/model')}",
        advice("(its metadata has no '{}'): pass one that `covmerge collect` wrote"),
        f"{MERGE} out --method regmean {STATS} --tensors few_rows=allow",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_as_it_is_advised(name, here):
    wrong, said, right = LINES[name]
    if said is not None:
        told(said, *shlex.split(wrong))
    for line in (right or "").split("; "):
        if line and line not in ENDED:
            ENDED.add(line)
            covmerge(*shlex.split(line))


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        (
            "regmean",
            "",
            advice("needs the statistics of expert '{}': run {}, then name the file by --stats {}"),
        ),
    ],
)
def test_the_command_that_collects(method, given, said, here):
    """As it is typed, for each expert or for all at once."""
    merge = [*shlex.split(f"{MERGE} out"), f"--method={method}"]
    stats = shlex.split(given)
    for _ in range(2):
        found = told(said, *merge, *stats)
        name, typed = (
            re.search(r"expert '(\w+)'|$", found.string)[1],
            COMMAND.search(found.string)[1],
        )
        covmerge(*shlex.split(typed.replace("DATA", "a.txt")))
        stats += [f"--stats={name}={name}.covstats.safetensors"]
    covmerge(*merge, *stats)
    covmerge("verify", "out")
