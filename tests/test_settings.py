"""Every hint of the source, in each form: a flag that exists, a key that the schema has, an argument."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import covmerge
from covmerge.base.settings import IN_PYTHON, KEYS, Hint, hints_for
from covmerge.front.cli import app
from covmerge.plan.recipe import json_schema
from covmerge.plan.statistics import Generated
from covmerge.plan.statistics.examples import Reading

FOLDER = Path(covmerge.__file__).parent
PUBLIC = (
    "merge",
    "extract",
    "compare",
    "search",
    "inspect",
    "report",
    "collect",
    "verify",
    "push",
    "load_recipe",
)
# Of commands, and of recipes whose file has several; no function of Python's takes them.
COMMANDS_ALONE = {
    *("port", "stages", "deep", "lenient"),
    *("last", "tokens", "tokens_per_step", "decay"),
}
# Flags of other programs.
FOREIGN = (
    r"--(max-lora-rank|enable-lora|model|adapter-path|save-path|dequantize|merge|num-gpus|outtype)"
)


def hints():
    """Name and value of each; of a value that is not written out, its kind."""
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "Hint(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Hint":
                name, *value = node.args
                if isinstance(name, ast.Constant):
                    yield name.value, *(map(written, value))


def written(value):
    try:
        return ast.literal_eval(value)
    except ValueError:
        if isinstance(value, ast.Dict):
            return {
                written(key): written(own)
                for key, own in zip(value.keys, value.values, strict=True)
            }
        return "VALUE"


SCHEMA = json_schema()
FLAGS = {
    flag
    for command in get_command(app).commands.values()
    for own in command.params
    for flag in own.opts
}
ARGUMENTS = {
    *(
        name
        for public in PUBLIC
        for name in inspect.signature(getattr(covmerge, public)).parameters
    ),
    *(name for own in (Reading, Generated) for name in own.__annotations__),
    *IN_PYTHON,
    "parameters",
    *COMMANDS_ALONE,
}
HINTS = sorted({(name, json.dumps(value)) for name, *value in hints()})


def test_there_are_hints():
    assert len(HINTS) > 40


@pytest.mark.parametrize(("name", "value"), HINTS)
def test_a_hint_names_what_there_is(name, value):
    (*given,) = json.loads(value)
    hint = Hint(name, *given)
    with hints_for("flags"):
        assert str(hint).split()[0] in FLAGS
    with hints_for("recipe"):
        if name in KEYS and given:
            check(yaml.safe_load(str(hint).strip("`")), SCHEMA)
        elif name not in KEYS:
            assert str(hint).startswith("--")
    with hints_for("python"):
        assert "--" not in str(hint)
        assert name in ARGUMENTS


def check(data, schema, whole=None):
    """Follow the keys of a recipe, which need not be whole, through the schema; words are placeholders."""
    whole = whole or schema
    schema = whole["$defs"][schema["$ref"].rsplit("/")[-1]] if "$ref" in schema else schema
    if isinstance(data, dict) and "anyOf" in schema:
        (schema,) = (own for own in schema["anyOf"] if "$ref" in own)
        return check(data, schema, whole)
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "VALUE":
                continue
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            assert inner, (key, schema)
            if inner is not True:
                check(value, inner, whole)
    elif isinstance(data, list):
        for value in data:
            check(value, schema["items"], whole)
    elif "enum" in schema and not (isinstance(data, str) and data.isupper()):
        assert data in schema["enum"]
    return None


# Whole commands, or what goes on with one.
TYPED = ("--expert 0=", " with --out-dtype float32, then collect")
TYPES = {FOLDER / "base/settings.py", FOLDER / "front/scoring.py", *FOLDER.glob("front/cli/*")}


def test_no_message_has_a_flag_but_by_a_hint():
    """Commands to type stay as they are, and so do other programs' flags."""
    found = []
    for path in {*FOLDER.rglob("*.py")} - TYPES:
        for text in messages(ast.parse(path.read_text("utf-8"))):
            text = re.sub("`covmerge [^`]*`|`ray [^`]*`", "", text)
            typed = text.count("`") % 2 or text.startswith(TYPED)
            if not typed and re.search(r"(?<![\w./-])--[a-z]", re.sub(FOREIGN, "", text)):
                found.append((path.name, text))
    assert not found


def messages(tree):
    """All texts of a program but docstrings; 0 for what is put into one."""
    shown = [
        n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    ]
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    for node in joined:
        yield "".join(p.value if isinstance(p, ast.Constant) else "0" for p in node.values)
    passed = {id(part) for node in joined for part in node.values} | {id(n.value) for n in shown}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in passed
        ):
            yield node.value


FORMS = [
    (("form", "peft"), "--as peft", "`output: {format: adapter, names: peft}`", 'form="peft"'),
    (("form", "model"), "--as model", "`output: {format: model}`", 'form="model"'),
    (("out_dtype", "float32"), "--out-dtype float32", "`output: {dtype: float32}`", 'out_dtype="float32"'),
    (("workers",), "--workers", "--workers", "workers"),
    (("allow", ["a", "b"]), "--allow a --allow b", "`allow: [a, b]`", 'allow=["a", "b"]'),
    (("whole",), "--whole", "`output: {whole: true}`", "whole=True"),
    (("resume",), "--resume", "--resume", "resume=True"),
    (("rank", 2), "--rank 2", "`output: {rank: 2}`", "rank=2"),
    (("kinds", "gram"), "--kind gram", "--kind gram", 'kinds=["gram"]'),
    (("statistics", {"a": "F"}), "--stats a=F", "`experts: {a: {statistics: F}}`", 'statistics={"a": "F"}'),
    (("parameters", {"gate": "x"}), "--set gate=x", "`parameters: {gate: x}`", 'gate="x"'),
    (("tensors", {"extra": "ignore"}), "--tensors extra=ignore", "`tensors: {extra: ignore}`",
     'tensors={"extra": "ignore"}'),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "flags", "recipe", "python"), FORMS)
def test_a_hint_in_each_form(hint, flags, recipe, python):
    for form, text in (("flags", flags), ("recipe", recipe), ("python", python)):
        with hints_for(form):
            assert str(Hint(*hint)) == text
    assert str(Hint(*hint)) == python
