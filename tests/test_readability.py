"""The pages that people write can be read: short sentences, plain turns, a limit of words in all.

`python -m tests.test_readability` prints the figures of each page.
"""

import re
from pathlib import Path

import pytest

import covmerge

ROOT = Path(covmerge.__file__).parents[2]
# Written by commands, or a log.
LEFT_OUT = {"docs/methods.md", "docs/adapter-types.md", "docs/edge-cases.md", "docs/auto-log.md"}
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += sorted({p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md")} - LEFT_OUT)

# At most: words of a page's mean sentence, words of its longest, banned turns.
LIMIT = (17, 40, 0)
# Pages that are not rewritten yet, as they are. A page leaves this table when it is; none comes in.
LATER: dict[str, tuple[float, int, int]] = {
    "README.md": (15.0, 36, 1),
    "CONTRIBUTING.md": (15.1, 58, 0),
    "SECURITY.md": (17.7, 70, 1),
    "docs/adapters.md": (28.7, 67, 2),
    "docs/auto-measured.md": (30.5, 92, 1),
    "docs/auto.md": (13.0, 34, 1),
    "docs/big-models.md": (19.9, 40, 1),
    "docs/choosing.md": (17.1, 40, 4),
    "docs/design.md": (26.4, 97, 9),
    "docs/extending.md": (19.6, 64, 1),
    "docs/fold.md": (15.5, 41, 1),
    "docs/full-models.md": (18.4, 46, 1),
    "docs/index.md": (16.0, 42, 0),
    "docs/layers-and-tokens.md": (19.4, 42, 1),
    "docs/mergekit.md": (26.0, 81, 0),
    "docs/numbers.md": (26.0, 87, 1),
    "docs/privacy.md": (18.6, 49, 2),
    "docs/publishing.md": (18.6, 31, 0),
    "docs/quantised.md": (25.9, 140, 4),
    "docs/reference/files.md": (17.5, 29, 0),
    "docs/reference/recipe.md": (17.4, 32, 0),
    "docs/remote.md": (23.9, 65, 2),
    "docs/report.md": (24.7, 57, 5),
    "docs/results.md": (30.9, 77, 2),
    "docs/scale.md": (29.1, 120, 4),
    "docs/serving.md": (23.5, 73, 1),
    "docs/start.md": (12.5, 23, 1),
    "docs/statistics.md": (27.4, 65, 0),
    "docs/trust.md": (29.0, 124, 0),
    "docs/view.md": (19.2, 38, 2),
}
MOST_WORDS = 64_000  # of all these pages together, with their tables and code

BANNED = {
    "a sentence that begins with 'Of …'": r"^Of\b",
    "a sentence without a subject": r"^(Are|Had|Has|Is|Made|Measured|Taken|Was|Were)\b.*[^?]$",
    "but for": r"\bbut for\b",
    "nothing but": r"\b(all|none|nothing) but\b",
    "data-free (say: without data)": r"\bdata-free\b",
}
ENDS = re.compile(r'(?<=[.!?])["*)]*\s+(?=["*(\[]*(?:[^\Wa-z_]|covmerge|float))|\n\s*\n|\n\s*(?=[-*]\s|\d+\.\s)')


def sentences(text: str) -> list[str]:
    """The sentences of a page without its code, tables, headings and pictures."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.S | re.M)
    text = re.sub(r"^( *)```.*?^\1```", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.S)
    text = re.sub(r"^ *(\||#).*$", "\n\n", text, flags=re.M)
    text = re.sub(r"(?<=\n\n)( {4}.*\n+)+", "\n\n", text)  # formulas; lists go on by two spaces
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "Code", text)  # may begin a sentence
    found = (" ".join(part.split()).strip("-* ") for part in ENDS.split(text))
    return [part for part in found if re.search(r"\w", part)]


def words(sentence: str) -> int:
    return len(re.findall(r"\w[\w'’.,-]*", sentence))


def figures(page: str) -> tuple[float, int, list[str]]:
    """Words of the mean and of the longest sentence, and the banned turns."""
    found = sentences((ROOT / page).read_text("utf-8"))
    lengths = [words(sentence) for sentence in found] or [0]
    turns = [
        f"{why}: {sentence}"
        for sentence in found
        for why, turn in BANNED.items()
        if re.search(turn, sentence)
    ]
    return sum(lengths) / len(lengths), max(lengths), turns


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_read_at_once(page):
    mean, longest, turns = figures(page)
    most = LATER.get(page, LIMIT)
    assert (mean <= most[0], longest <= most[1], len(turns) <= most[2]) == (True,) * 3, (
        f"{mean:.1f} words a sentence (at most {most[0]}), longest {longest} (at most {most[1]})",
        turns,
        max(sentences((ROOT / page).read_text("utf-8")), key=words),
    )


def test_all_pages_together_are_no_longer_than_people_read():
    total = sum(len((ROOT / page).read_text("utf-8").split()) for page in PAGES)
    assert total <= MOST_WORDS and set(LATER) <= set(PAGES)


def test_what_is_counted():
    text = (
        "# No\n\nOne two. Of three, `four five`:\n\n    x = 1\n\n| no |\n\n- Six [se ven](a.md).\n"
    )
    assert sentences(text) == ["One two.", "Of three, Code:", "Six se ven."]


if __name__ == "__main__":
    for page in PAGES:
        mean, longest, turns = figures(page)
        count = len((ROOT / page).read_text("utf-8").split())
        print(
            f"{page:32} {count:6} words {mean:5.1f} a sentence {longest:4} longest {len(turns):3} turns"
        )
