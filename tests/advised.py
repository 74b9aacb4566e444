"""Messages that advise something, as the source has them, and the tests that follow them.

A test names a message by words of its source, `{}` for each value: `advice("is a Git LFS pointer, ...")`
is a regular expression for what is printed. tests/test_advised.py finds these calls and compares them
with the source, so that a message with an advice that nobody followed fails the suite.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path

from covmerge.base.settings import Hint, hints_for

SOURCE = Path(__file__).parents[1] / "src" / "covmerge"
TESTS = Path(__file__).parent

# An imperative at the start of a clause with what it is done to (": take it", not a head such as
# "average (5)" or "report: "), a flag, a command, a setting or a question.
_VERBS = [
    "accept",
    "add",
    "allow",
    "ask",
    "average",
    "bring",
    "call",
    "change",
    "check",
    "choose",
    "collect",
    "compute",
    "convert",
    "copy",
    "correct",
    "create",
    "delete",
    "dequantise",
    "divide",
    "do",
    "download",
    "end",
    "export",
    "fetch",
    "fold",
    "free",
    "fuse",
    "gather",
    "give",
    "go",
    "hold",
    "install",
    "join",
    "keep",
    "label",
    "leave",
    "let",
    "load",
    "log",
    "look",
    "make",
    "mend",
    "merge",
    "move",
    "multiply",
    "name",
    "open",
    "pad",
    "pass",
    "plan",
    "point",
    "print",
    "push",
    "put",
    "quote",
    "raise",
    "read",
    "remove",
    "rename",
    "repair",
    "replace",
    "report",
    "resize",
    "resume",
    "run",
    "save",
    "say",
    "see",
    "set",
    "show",
    "split",
    "stack",
    "start",
    "state",
    "stop",
    "store",
    "take",
    "tell",
    "train",
    "try",
    "uninstall",
    "use",
    "verify",
    "wait",
    "write",
]
_CLAUSE = r"(?:^|[:;.,?] |\(|\b(?:or|and|then|so|else|please|first|instead) )"
_ADVICE = re.compile(
    rf"{_CLAUSE}(?:{'|'.join(_VERBS)})(?= [^(])"
    r"|(?<![\w-])--[a-z]|`covmerge |pip install|\?(?:$| )|`\w+: ",
    re.IGNORECASE,
)
_SETTING = re.compile(r"(?<![\w`/.-])--[a-z][a-z-]*(?: [\w.={}-]+)?")
# Calls whose strings are no messages: the help, patterns, names.
_OTHER_CALLS = {"Option", "Argument", "Field", "Typer", "compile", "command", "sub", "search"} | {
    "Reference"  # of a paper: its title, and what is of it
}
_PAGES = {"front/cli/catalogue.py"}  # docs/methods.md, whose commands tests/test_shown.py runs
_HELP = {"help", "description", "epilog"}


def rules_in(text: str) -> list[dict[str, str]]:
    """Every rule that a message advises to a caller in Python."""
    return [r for found in re.findall(r"rules=(\[[^\]]*\])", text) for r in json.loads(found)]


def advice(template: str) -> str:
    """A regular expression for words of a message, whichever form its settings are in."""
    told = re.escape(_SETTING.sub("{}", template))
    return told.replace(r"\{\}", r"[\s\S]*?")


@cache
def messages() -> dict[str, str]:
    """Every string of the source that can be a message: its text, `{}` for values, and its file."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        own = str(file.relative_to(SOURCE))
        if own not in _PAGES:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found |= {text: own for text in _strings(tree) if " " in text}
    return found


def advising() -> dict[str, str]:
    """Those of the messages that advise something."""
    return {text: file for text, file in messages().items() if _ADVICE.search(text)}


def _strings(tree: ast.AST) -> list[str]:
    """What a module holds of strings, but for docstrings, annotations and the help."""
    found, passed = [], set()
    for node in ast.walk(tree):
        if id(node) in passed or _is_docstring(node) or _is_no_message(node):
            passed |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(map(_part, node.values)))
            passed |= {id(part) for part in node.values if isinstance(part, ast.Constant)}
    return found


def _part(part: ast.expr) -> str:
    """What a part of a message is shown as: a setting as its flag."""
    if isinstance(part, ast.Constant):
        return part.value
    call = part.value
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "Hint"):
        return "{}"
    with hints_for("flags"):
        return str(Hint(*map(_written, call.args)))


def _written(value: ast.expr):
    if isinstance(value, ast.Dict):
        return dict(zip(map(_written, value.keys), map(_written, value.values), strict=True))
    return value.value if isinstance(value, ast.Constant) else "{}"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_no_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id in ("Annotated", "Literal")
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in _OTHER_CALLS
    return isinstance(node, ast.keyword) and node.arg in _HELP


@cache
def followed() -> dict[str, str]:
    """What tests pass to `advice`, and in which module."""
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "advice(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            called = node.func if isinstance(node, ast.Call) else None
            named = isinstance(called, ast.Name) and called.id == "advice"
            if named and isinstance(node.args[0], ast.Constant):
                found[str(node.args[0].value)] = str(file.relative_to(TESTS))
    return found
