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
MOST_WORDS = 41_500  # of all these pages together, with their tables and code

BANNED = {
    "a sentence that begins with 'Of …'": r"^Of\b",
    "a sentence without a subject": r"^(Are|Had|Has|Is|Made|Measured|Taken|Was|Were)\b.*[^?]$",
    "but for": r"\bbut for\b",
    "nothing but": r"\b(all|none|nothing) but\b",
    "data-free (say: without data)": r"\bdata-free\b",
}
ENDS = re.compile(
    r'(?<=[.!?])["*)]*\s+(?=["*(\[]*(?:[^\Wa-z_]|covmerge|float))|\n\s*\n|\n\s*(?=[-*]\s|\d+\.\s)'
)


def sentences(text: str) -> list[str]:
    """The sentences of a page without its code, tables, headings and pictures."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.S | re.M)
    text = re.sub(r"^( *)```.*?^\1```", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"^ *(\||#).*$", "\n\n", text, flags=re.M)
    text = re.sub(r"`[^`]+`", "Code", text)  # may begin a sentence
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.S)
    text = re.sub(r"(?<=\n\n)( {4}.*\n+)+", "\n\n", text)  # formulas; lists go on by two spaces
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
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
    most = LIMIT
    assert (mean <= most[0], longest <= most[1], len(turns) <= most[2]) == (True,) * 3, (
        f"{mean:.1f} words a sentence (at most {most[0]}), longest {longest} (at most {most[1]})",
        turns,
        max(sentences((ROOT / page).read_text("utf-8")), key=words),
    )


def test_all_pages_together_are_no_longer_than_people_read():
    total = sum(len((ROOT / page).read_text("utf-8").split()) for page in PAGES)
    assert total <= MOST_WORDS


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
