"""What `make test` leaves out of a product of parameters, and how all of it is run."""

import shutil
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.covering import covering
from tests.forked import printed

ROOT = Path(__file__).parent.parent
SIZES = {"subject": 50, "law": 17, "shape": 4, "dtype": 2}
ROWS = [dict(zip(SIZES, row, strict=True)) for row in product(*map(range, SIZES.values()))]


def met(rows, strength):
    return {own for row in rows for own in combinations(sorted(row.items()), strength)}


@pytest.mark.parametrize(("strength", "least"), [(1, 50), (2, 50 * 17)])
@pytest.mark.parametrize("left_out", [(), range(3, 900, 7)], ids=["whole", "with holes"])
def test_all_that_meets_meets_in_a_chosen_row(strength, least, left_out):
    rows = [row for place, row in enumerate(ROWS) if place not in left_out]
    chosen = [rows[place] for place in covering(rows, strength)]
    assert met(chosen, strength) == met(rows, strength)
    assert len(chosen) == least or (left_out and len(chosen) < 1.2 * least)


def test_short_axes_go_round():
    chosen = [ROWS[place] for place in covering(ROWS, 1)]
    assert met(chosen, 2) >= met([{"shape": n % 4, "dtype": n // 4} for n in range(8)], 2)


SOME = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [[1], [2]], ids=str)
@pytest.mark.parametrize(("name", "params"), [("a", {}), ("b", {}), ("b", {"x": 1})], ids=str)
def test_product(name, params, shape):
    pass

@pytest.mark.nightly
def test_rare():
    pass

def test_usual():
    pass
"""


# Several runs in one process, which have pytest imported once.
RUNS = """
import sys, pytest
for given in sys.argv[1:]:
    print("RUN", given)
    assert pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", *given.split()]) == 0
"""


def test_the_switch(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "pyproject.toml", "tests/__init__.py", "tests/covering.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "test_some.py").write_text(SOME)
    counts = {"test_some.py": 4, "--nightly test_some.py": 8, "test_some.py::test_product": 6}
    _, *each = printed(RUNS, *counts, cwd=tmp_path).split("RUN ")
    found = {said.splitlines()[0]: said.count("\ntest_some.py::") for said in each}
    assert found == counts
