"""The Python of README.md and docs/ as files that `make types` checks: python tests/examples.py FOLDER."""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What the examples take from around them. They are those of users, who need not be strict.
PREAMBLE = """\
# pyright: standard, reportUnusedExpression=false
import torch

base_model = model1 = model2 = torch.nn.Linear(2, 2)
w0 = w1 = w2 = A1 = A2 = B1 = B2 = torch.zeros(2, 2)
"""

# What is public is called by its short name, whatever was imported before.
CALLS = """\
# pyright: standard
import covmerge
import covmerge.run.verification
import covmerge.plan.statistics

covmerge.verify("./merged").raise_if_failed()
covmerge.collect("./code", "texts.jsonl", "code.covstats.safetensors")
covmerge.push("./merged", "org/name")
covmerge.inspect("./base", {"code": "./code"}).faults
covmerge.extract("./base", "./code", "./lora", rank=8, allow=["unchanged-expert"])
covmerge.merge("./base", ["./code", "./math"]).stats["totals"]["merged_norm"]
covmerge.merge("./base", ["./code"]).tensors["fc.weight"].shape
nothing: None = covmerge.merge("./base", ["./code"], "ace", "./merged", eps=1e-4).tensors
seconds: float = covmerge.merge("./base", ["./code"]).run["compute_seconds"]
"""


def write(folder: Path) -> None:
    """Write a file for each example, and nothing else, into a folder of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "calls.py").write_text(CALLS)
    pages = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for page in pages:
        found = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
        for count, code in enumerate(found, start=1):
            file = folder / f"{page.stem.lower().replace('-', '_')}_{count}.py"
            file.write_text(f"{PREAMBLE}\n{code}", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
