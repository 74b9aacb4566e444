"""Every method where published code breaks: what it returned there beside what covmerge does.

`python -m tests.methods.test_edge_cases` prints the table, `--markdown` writes docs/edge-cases.md.
"""

import inspect
import json
import math
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.base.types import LinearGroup
from covmerge.errors import TensorError
from covmerge.maths.methods.emr import rescalers
from covmerge.methods import registry
from tests.methods.edge_cases import (
    ACE,
    ALL_ZERO,
    COLUMNS,
    DEPARTURES,
    EVERYWHERE,
    FACTORS,
    FAMILIES,
    IDENTICAL,
    INF,
    LABELS,
    NAN,
    NORMAL,
    NOT_IN_COVMERGE,
    NOTES,
    OPPOSITE,
    PUBLISHED,
    SINGLE,
    TINY_HETEROG,
    UNIT,
    ZERO,
    inputs,
)
from tests.methods.groups import group_of, permuted

GOLDEN = Path(__file__).parent.parent / "golden"
PAGE = Path(__file__).parent.parent.parent / "docs" / "edge-cases.md"
REFUSED = (NAN, INF)
ROWS = [row for row in LABELS if row not in REFUSED]
DRAWS = [inputs(seed) for seed in range(8)]
UPDATES = DRAWS[0]
METHODS = [name for name in COLUMNS if name != FACTORS]
DTYPES = [torch.float32, torch.float64]
ALL_DEPARTURES = [*EVERYWHERE, *(each for family in DEPARTURES.values() for each in family)]

# Which methods do what where experts say nothing, or the opposite of each other.
SEEDED = [name for name in METHODS if registry.get(COLUMNS[name].method).seeded]
DATA = [name for name in METHODS if registry.get(COLUMNS[name].method).data != "none"]
# An unchanged expert has its say, but where inputs are known by what it makes of them.
COUNT_ZEROS = [
    "average",
    "cart",
    *(name for name in DATA if COLUMNS[name].method not in ("ssr", "esm")),
]
# Its length is that of the sum, whatever the inputs.
OF_THE_SUM = "auto_measured"
CANCEL = [name for name in METHODS if name not in ("emr", *SEEDED, *DATA) or name == OF_THE_SUM]
MERGED_TO_THE_BASE = {
    *((name, ALL_ZERO) for name in METHODS),
    *((name, OPPOSITE) for name in CANCEL),
    ("consensus", IDENTICAL),  # 1 > 0.4 · 3 holds for nobody
}
TURNED_AROUND = {("ace eps 1e-2", TINY_HETEROG)}


def group_for(name, updates):
    return group_of(registry.get(COLUMNS[name].method), updates)


def kernel(name, group):
    column = COLUMNS[name]
    method = registry.get(column.method)
    return method(group, **method.resolve(column.parameters))


def merged(name, updates):
    """What the public function returns; for the column of EMR's rescalers those."""
    single = [update.to(torch.promote_types(update.dtype, torch.float32)) for update in updates]
    group = group_for(name, single)
    column = COLUMNS[name]
    data = [measured.value for measured in group.expert_statistics]
    stored = torch.float64 if updates[0].dtype == torch.float64 else None  # exact, with few digits
    delta = covmerge.merge_layer(
        updates, column.method, data=data, stored=stored, **column.parameters
    )
    return torch.tensor(rescalers([kernel(name, group).diagnostics])) if name == FACTORS else delta


@cache
def result(name, row, dtype=None):
    return merged(name, [update.to(dtype or update.dtype) for update in UPDATES[row]])


def total_of(norms, how):
    return {"sum": sum, "root": lambda n: math.hypot(*n), "largest": max}[how](norms)


# The table is complete, and so is what is said of it.


def test_every_row_and_column_is_there():
    # Of methods on weights there is a table of their own: test_mergekit.py.
    of_updates = {method.name for method in registry if method.sees == "updates"}
    assert {column.method for column in COLUMNS.values()} == of_updates
    assert LABELS.keys() == UPDATES.keys() == PUBLISHED.keys()
    shown = {column.published for column in COLUMNS.values() if column.published}
    for row in PUBLISHED.values():
        assert row.keys() == shown | NOT_IN_COVMERGE


@pytest.mark.parametrize("departure", ALL_DEPARTURES, ids=lambda each: each.says[:40])
def test_departures_are_documented(departure):
    methods = [registry.get(COLUMNS[name].method) for name in departure.columns]
    sources = [sys.modules[method.kernel.__module__] for method in methods]
    for source in [covmerge.merge_layer] if departure in EVERYWHERE else sources:
        assert departure.says in " ".join(inspect.getsource(source).split())


# Every cell.


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", METHODS)
def test_every_cell_is_sensible(name, row, dtype):
    updates = [update.double() for update in UPDATES[row]]
    delta = result(name, row, dtype)
    assert (delta.dtype, delta.shape) == (dtype, updates[0].shape)
    assert torch.isfinite(delta).all()
    norms = [float(update.norm()) for update in updates]
    size = float(delta.double().norm())
    if (name, row) in MERGED_TO_THE_BASE:
        assert size <= 1e-3 * max(norms)
        return
    if (name, row) in TURNED_AROUND:
        return
    factor, how = COLUMNS[name].at_most
    assert 0.1 * max(norms) < size < factor * total_of(norms, how) * (1 + 1e-5)
    if row != OPPOSITE:
        assert (delta.double() * sum(updates)).sum() > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("row", REFUSED)
@pytest.mark.parametrize("name", COLUMNS)
def test_nan_and_inf_are_refused_by_name(name, row):
    with pytest.raises(TensorError, match="update 2 holds NaN or Inf"):
        result(name, row)


@pytest.mark.covering(1)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", METHODS)
def test_statistics_are_plain_json(name, row):
    stats = kernel(name, group_for(name, [update.float() for update in UPDATES[row]])).stats
    json.dumps(dict(stats), allow_nan=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_computed_in_float32(name, dtype):
    half = [update.to(dtype) for update in UPDATES[NORMAL]]
    rounded = merged(name, half)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, merged(name, [update.float() for update in half]).to(dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [SINGLE, IDENTICAL])
@pytest.mark.parametrize("name", METHODS)
def test_copies_of_one_expert(name, row, dtype):
    method = registry.get(COLUMNS[name].method)
    parameters = method.resolve(COLUMNS[name].parameters)
    factor = method.laws.replicas(parameters, len(UPDATES[row]))
    one, delta = UPDATES[row][0].to(dtype), result(name, row, dtype)
    if factor is None or math.isnan(factor):
        assert torch.cosine_similarity(delta.flatten(), one.flatten(), dim=0) > 0.5
    else:
        assert (delta - factor * one).norm() <= 1e-5 * one.norm()


@pytest.mark.parametrize("name", ACE)
@pytest.mark.parametrize("row", [SINGLE, IDENTICAL])
def test_copies_of_one_expert_come_back_from_ace_shrunk_by_the_prior(name, row):
    assert 0.9 < float(result(name, row).norm() / UPDATES[row][0].norm()) < 1.0


@pytest.mark.parametrize("name", METHODS)
def test_an_unchanged_expert_leaves_the_sums(name):
    """But for averages, and for methods that know from data that the layer should stay."""
    group = group_for(name, UPDATES[ZERO])
    frozen, without = kernel(name, group), kernel(name, permuted(group, [0, 2, 3]))
    assert torch.equal(frozen.delta, without.delta) == (name not in COUNT_ZEROS)
    assert frozen.stats.get("unchanged", 1) == 1
    assert kernel(name, group_for(name, UPDATES[ALL_ZERO])).stats.get("unchanged", 4) == 4
    if name in COUNT_ZEROS and name not in ("cart", OF_THE_SUM):
        assert frozen.delta.norm() < 0.9 * without.delta.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*SEEDED, "emr")])
def test_opposite_experts_cancel(name, dtype):
    update = UPDATES[OPPOSITE][0].to(dtype)
    group = group_for(name, [update, -update])
    alike = LinearGroup(
        group.updates, group.weights, expert_statistics=group.expert_statistics[:1] * 2
    )
    # Adam's steps are as long as ever around the cancelled sum; ACE divides by a ridge of 1e-5.
    tolerance = {"wudi adam": 1e-3, "wudi adam 2e-5": 1e-3, "ace eps 1e-5": 1e-4}.get(name, 1e-6)
    assert kernel(name, alike).delta.norm() < tolerance * update.norm()


@pytest.mark.parametrize("row", ROWS)
def test_emr_does_not_rescale_an_unchanged_expert(row):
    factors, changed = result(FACTORS, row), [bool(update.any()) for update in UPDATES[row]]
    assert torch.isfinite(factors).all()
    assert (factors > 0).all()
    if row in (ZERO, ALL_ZERO):
        assert [float(factor) != 1.0 for factor in factors] == changed


# Beside the published code.


def published(name, row):
    """The norm of the published result; NaN where it was not finite, or an error."""
    said = PUBLISHED[row][COLUMNS[name].published]
    return float(said.removeprefix("norm ")) if said.startswith("norm ") else math.nan


@pytest.mark.parametrize("name", [name for name, column in COLUMNS.items() if column.published])
def test_norms_are_the_published_ones_but_for_the_departures(name):
    for row in LABELS:
        departs = any(name in each.columns and row in each.rows for each in ALL_DEPARTURES)
        theirs = published(name, row)
        if row in REFUSED or math.isnan(theirs):
            assert departs, row
            continue
        # Other random numbers of the same norms and shapes: among eight draws, or near them.
        norms = []
        for draw in DRAWS:
            norms.append(float(merged(name, draw[row]).norm()))
            near = 0.96 * min(norms) - 1e-4 <= theirs <= 1.04 * max(norms) + 1e-4
            if near:  # and so with more draws
                break
        assert near != departs, row


@pytest.mark.parametrize("name", ACE)
def test_equal_norms_of_one_are_homogeneous(name):
    """γ would be a quotient of rounding errors."""
    eps = COLUMNS[name].parameters["eps"]
    off = covmerge.merge_layer(UPDATES[UNIT], "ace", eps=eps, normalize=False)
    assert torch.equal(result(name, UNIT), off)


def test_a_large_ridge_turns_ace_away_from_tiny_experts_as_published():
    for name, row in TURNED_AROUND:
        assert (result(name, row) * sum(UPDATES[row])).sum() < 0
    theirs, given = (load_file(GOLDEN / f"{n}.safetensors") for n in ("ace_eps0.01", "inputs"))
    name = "blocks.0.attn.out_proj.weight"
    total = sum(given[f"heterog/delta/{t}/{name}"] for t in range(4))
    assert (theirs[f"heterog/{name}"] * total).sum() < 0


# The table.


def outcome(name, row):
    """One cell: `published → covmerge`, norms with three digits."""
    ours = "refused" if row in REFUSED else rounded(float(result(name, row).norm()))
    if not COLUMNS[name].published:
        return ours
    said, _, value = PUBLISHED[row][COLUMNS[name].published].partition(" ")
    theirs = {"norm": value, "NON-FINITE": "NaN", "EXC": "error"}[said]
    return f"{theirs} → {ours}"


def rounded(norm):
    return "0" if norm < 1e-4 else f"{norm:.3g}"


def table(columns):
    """Rows of cells with a heading, and last what a norm may come to."""
    symbols = {"sum": "Σ‖Δ_t‖", "root": "√Σ‖Δ_t‖²", "largest": "max ‖Δ_t‖"}
    bounds = ["–" if n == FACTORS else columns[n].at_most for n in columns]
    limits = [b if b == "–" else f"{b[0]:g} {symbols[b[1]]}".removeprefix("1 ") for b in bounds]
    return [
        ["published → covmerge", *columns],
        *([label, *(outcome(name, row) for name in columns)] for row, label in LABELS.items()),
        ["at most", *limits],
    ]


def lines_below(family):
    for each in DEPARTURES.get(family, ()):
        rows = "; ".join(LABELS[row] for row in each.rows)
        columns = ", ".join(f"`{name}`" for name in each.columns)
        yield f"- {columns} ({rows}): “{each.says}”; published: {each.published}."
    for note in NOTES.get(family, ()):
        yield f"- {note}"


INTRO = """# Edge cases

This page shows what methods make of strange updates: the authors' published code, then covmerge. Look
here if your layers are small, equal or zero, or if covmerge's numbers differ from a paper's code.

A cell has the norm of what the published code returned → the norm of what covmerge returns. It has one
number where nothing is published.

- A row has T = 4 updates of 24 × 40 of norm 0.4, unless it says otherwise. The random numbers are not
  those of the published runs, so norms of the same thing differ by a few percent.
- *NaN*: the result was not finite. *error*: the code raised. *refused*: a named error before any
  mathematics. 0 is below 1e-4.
- Every other cell of covmerge is finite. Its norm is at least a tenth of the largest update's, and at most
  what the last row says. It points towards the sum of the updates, with one exception that is named.
- NaN or Inf in an update is an error that names the update. Half precision is computed in float32 and
  rounded once.
- Below each table are the other differences, in the words of the [method's page](methods.md).

`python -m tests.methods.test_edge_cases --markdown` writes this page from `tests/golden/edge_cases.json`
and the code."""


def markdown():
    parts = [INTRO]
    for family, columns in FAMILIES.items():
        heading, *rows = ("| " + " | ".join(line) + " |" for line in table(columns))
        rule = "|---" * (len(columns) + 1) + "|"
        below = list(lines_below(family))
        parts.append(
            "\n".join([f"## {family}\n", heading, rule, *rows, *([""] if below else []), *below])
        )
    return "\n".join(part + "\n" for part in parts)


def text():
    for family, columns in FAMILIES.items():
        yield f"\n{family}"
        for label, *row in table(columns):
            yield f"{label:<24}" + "".join(f"{cell:>19}" for cell in row)


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def test_the_page_is_current():
    committed, now = PAGE.read_text().splitlines(), markdown().splitlines()
    assert [NUMBER.sub("#", line) for line in committed] == [NUMBER.sub("#", line) for line in now]
    for old, new in zip(committed, now, strict=True):
        numbers = [float(number) for number in NUMBER.findall(new)]
        assert [float(n) for n in NUMBER.findall(old)] == pytest.approx(numbers, rel=0.01)


def test_the_printed_table_fits_a_terminal():
    assert max(map(len, text())) <= 120


if __name__ == "__main__":
    if "--markdown" in sys.argv:
        PAGE.write_text(markdown())
    else:
        print("\n".join(text()))
