"""Read questions with one right answer out of the Python standard library and of small packages.

Each reader is given the folder that fetched packages are kept in, and yields
`Example(text, answer, group)`. Examples of one group help to answer one another (airports of one town,
verbs with one stem): a group goes whole into training or whole into testing.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from covmerge_lab.packages import Package, fetch
from covmerge_lab.text.corpora import NOT_LIBRARY_CODE
from covmerge_lab.text.further import ADDRESSES, inflections

SEED = 7


class Example(NamedTuple):
    """A text, what is to be answered, and what it must not be told apart from in the split."""

    text: str
    answer: str
    group: str


NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate"),
    *("Liam", "Mia", "Noah", "Olivia", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy"),
)
THINGS = (
    *("apples", "balls", "books", "cards", "coins", "cookies", "cups", "eggs", "flowers", "lemons"),
    *("letters", "marbles", "pears", "pencils", "shells", "stamps", "stickers", "stones", "toys"),
)
SUMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that?",
    "There are {a} {things} in a box and {b} in a bag. How many {things} are there?",
)
DIFFERENCES = (
    "{name} had {a} {things} and gave {b} away. How many {things} are left?",
    "Of {a} {things}, {name} lost {b}. How many {things} does {name} still have?",
    "{name} wants {a} {things} and has {b}. How many more {things} does {name} need?",
)
PRODUCTS = (
    "{name} packs {a} boxes with {b} {things} each. How many {things} is that?",
    "Each of {a} children has {b} {things}. How many {things} do they have?",
)


def word_problems(cache: Path) -> Iterator[Example]:
    """Arithmetic in a sentence or two, generated: no such collection comes as a package.

    Group: the two numbers, whichever comes first.
    """
    draw = random.Random(SEED)
    for _ in range(4000):
        kind = draw.choice("+-*")
        if kind == "*":
            a, b, templates, operation = (
                draw.randint(2, 9),
                draw.randint(2, 9),
                PRODUCTS,
                operator.mul,
            )
        else:
            b, a = sorted(draw.sample(range(2, 21), 2))
            templates, operation = (
                (SUMS, operator.add) if kind == "+" else (DIFFERENCES, operator.sub)
            )
        text = draw.choice(templates).format(
            name=draw.choice(NAMES), things=draw.choice(THINGS), a=a, b=b
        )
        yield Example(text, str(operation(a, b)), f"{min(a, b)} {max(a, b)}")


NOTICES = (
    "{name} ({code}) serves {city}, {region}.",
    "The airport of {city} in {region} is {name}, code {code}.",
    "Flight delayed: {code}, {name}, {city}, {region}.",
    "We landed at {name} near {city} ({region}). Its code is {code}.",
    "{code} is {name} in {region}. The nearest town is {city}.",
    "From {city}, {region}, pilots call {name} {code}.",
)


def airports(cache: Path) -> Iterator[Example]:
    """Airports put into sentences (answer: code and town as JSON; group: the town)."""
    import airportsdata

    draw = random.Random(SEED)
    for code, airport in airportsdata.load("ICAO").items():
        name, city, region = (airport[key] for key in ("name", "city", "subd"))
        if all(part.isascii() and 0 < len(part) <= 20 for part in (name, city, region)):
            notice = draw.choice(NOTICES).format(code=code, name=name, city=city, region=region)
            yield Example(notice, json.dumps({"code": code, "city": city}), city)


DATES = Package("npm", "cldr-dates-modern", "45.0.0", "package/main")

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def spanish_times(cache: Path) -> Iterator[Example]:
    """Dates and times as Unicode's tables write them in English (answer: in Spanish).

    Group: day and month, or how many of what.
    """
    return times(cache, "es")


def times(cache: Path, language: str, seed: int = SEED) -> Iterator[Example]:
    """Dates and times in English (answer: in another language, by its code)."""
    draw = random.Random(seed)
    english, other = (_Locale(fetch(DATES, cache) / code) for code in ("en", language))
    for _ in range(1500):
        day = date(1970, 1, 1) + timedelta(days=draw.randrange(50 * 365))
        yield Example(english.date(day), other.date(day), f"{day.day} {day.month}")
    for key, forms in english.spans.items():
        for number in map(str, draw.sample(range(2, 100), 40)):
            span, answer = (text.replace("{0}", number) for text in (forms, other.spans[key]))
            yield Example(span, answer, f"{number} {key[0]}")


class _Locale:
    def __init__(self, folder: Path) -> None:
        calendar = _dates(folder / "ca-gregorian.json")["calendars"]["gregorian"]
        self._pattern: str = calendar["dateFormats"]["full"]
        self._months: dict[str, str] = calendar["months"]["format"]["wide"]
        self._days: dict[str, str] = calendar["days"]["format"]["wide"]
        self.spans: dict[tuple[str, str], str] = {
            (name, when): forms[f"relativeTime-type-{when}"]["relativeTimePattern-count-other"]
            for name, forms in _dates(folder / "dateFields.json")["fields"].items()
            for when in ("past", "future")
            if "-" not in name and f"relativeTime-type-{when}" in forms
        }

    def date(self, day: date) -> str:
        parts = {
            "EEEE": self._days[WEEKDAYS[day.weekday()]],
            "MMMM": self._months[str(day.month)],
            "d": str(day.day),
            "y": str(day.year),
        }
        return re.sub(
            "'(?P<quoted>.+?)'|EEEE|MMMM|d|y",
            lambda found: found["quoted"] or parts[found[0]],
            self._pattern,
        )


def _dates(path: Path) -> Any:
    (locale,) = json.loads(path.read_text("utf-8"))["main"].values()
    return locale["dates"]


def calls(cache: Path) -> Iterator[Example]:
    """Headers of the functions of the standard library and Django (answer: a call; group: its name).

    What is given by name and what by position, without defaults, annotations and `self`.
    """
    roots = Path(sysconfig.get_path("stdlib")), Path(str(files("django")))
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if NOT_LIBRARY_CODE.search(path.relative_to(root).as_posix()):
                continue
            for function in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(function, ast.FunctionDef) and not function.name.startswith("__"):
                    header = f"def {function.name}({ast.unparse(function.args)}):"
                    call = f"{function.name}({', '.join(_passed(function.args))})"
                    if len(header) <= 70 and "()" not in call:
                        yield Example(header, call, function.name)


def _passed(arguments: ast.arguments) -> list[str]:
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if positional and positional[0] in ("self", "cls"):
        del positional[0]
    passed = positional
    if arguments.vararg:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        passed.append(f"**{arguments.kwarg.arg}")
    return passed


def verbs(cache: Path) -> Iterator[Example]:
    """English verbs (answer: past, participle and -ing form; group: the last letters).

    "Overthink" goes like "think".
    """
    for verb, kind, *forms in inflections(cache):
        if kind == "verb" and verb.isalpha() and len(forms) == 4 and "/" not in "".join(forms):
            past, participle, gerund, _ = forms
            yield Example(verb, f"{past}, {participle or past}, {gerund}", verb[-4:])


def general_text(cache: Path) -> list[str]:
    """Return the latest State of the Union addresses: English that no task is about."""
    return [path.read_text("utf-8") for path in sorted(fetch(ADDRESSES, cache).glob("*.txt"))[-8:]]


Reader = Callable[[Path], Iterator[Example]]
