"""The commands and the Python of the pages, and a folder in which they run."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import covmerge
from tests.e2e.models import build, fine_tuned
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.mergekit.token_cases import WORDS, save_model
from tests.statistics.models import save, texts

ROOT = Path(covmerge.__file__).parents[2]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
PAGES += [
    "lab/README.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("lab/docs/*.md")),
]
_BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
# What bash makes of a line is told, and not done: its arguments, and where it writes.
_TOLD = 'covmerge() { printf "%s\\0" covmerge "$@" >&3; }; python() { printf "%s\\0" python "$@" >&3; }\n'

THEIRS = """\
merge_method: ties
base_model: ./base
models:
  - {model: ./code, parameters: {density: 0.5, weight: 1.0}}
  - {model: ./math, parameters: {density: 0.5, weight: 0.5}}
dtype: float32
"""


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        kind: what stands behind the fence: `sh`, `python`.
        title: the file that the reader saves it as.
    """

    kind: str
    title: str | None
    text: str

    def commands(self) -> list[str]:
        """Its commands, each with the lines that it goes on in."""
        lines = self.text.replace("\\\n", "\\\0").splitlines()
        return [
            line.replace("\0", "\n")
            for line in lines
            if line.strip() and not line.lstrip().startswith("#")
        ]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(kind, title or None, re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
        for indent, kind, title, body in _BLOCK.findall(text)
    ]


def arguments(command: str, folder: Path) -> tuple[list[str], Path | None]:
    """What bash would start, word by word, and the file that its output goes to."""
    told = folder / ".told"
    script = f"exec 3> {told}\n{_TOLD}{command}"
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True, env={"PATH": "/usr/bin:/bin"})
    words = told.read_text().split("\0")[:-1]
    to = re.search(r" > (\S+)\s*(?:#.*)?$", command)
    return words, folder / to[1] if to else None


def furnish(folder: Path) -> None:
    """Put the models, recipes and texts there that the pages speak of."""
    base = build("llama")
    save(base, folder / "base")
    (folder / "org").mkdir()
    (folder / "org" / "base").symlink_to("../base")
    for number, name in enumerate(("code", "math"), start=1):
        save(fine_tuned(base, seed=number, scale=0.05 * number), folder / name)
        adapter = folder / f"of-{name}"
        save_adapter(base, adapter, seed=number, targets=TARGETS["llama"])
        (adapter / "adapter").rename(folder / f"lora-{name}")
        for run, saved in (("outputs", folder / name), ("lora-outputs", folder / f"lora-{name}")):
            for step in range(500 * number, 3000, 1000):
                checkpoint = folder / run / f"checkpoint-{step}"
                shutil.copytree(saved, checkpoint)
                state = f'{{"num_input_tokens_seen": {step * 10**7}}}'
                (checkpoint / "trainer_state.json").write_text(state)
    recipe = "base: ./base\nexperts: {code: ./code, math: ./math}\nmethod: ties\n"
    (folder / "recipe.yml").write_text(recipe)
    (folder / "eval.py").write_text("print(0.5)")
    (folder / "their.yml").write_text(THEIRS)
    for name, own in (("base", "base"), ("polite", "t0"), ("chat", "t1")):
        save_model(folder / "talk" / name, "llama", own, WORDS[own])
    lines = [f'{{"text": "{line}"}}\n' for line in texts()]
    (folder / "texts.jsonl").write_text("".join(lines))
