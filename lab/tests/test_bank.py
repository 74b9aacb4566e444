"""The bank: cards that stay what they are, regret by hand, and a small set from training to the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covmerge import LinearGroup
from covmerge.errors import InputError
from covmerge.methods import registry
from covmerge_lab.bank import (
    bases,
    candidates,
    cards,
    choosing,
    criteria,
    data,
    experts,
    informed,
    rules,
    run,
    scoring,
    table,
    worst,
)
from covmerge_lab.bank.data import Part, Task
from tests.cli.runs import covmerge, words


def test_cards_are_drawn_from_their_names() -> None:
    every = cards.cards()
    assert len(every) == 94
    assert len({card.name for card in every}) == 94
    assert every == cards.cards()
    assert {card.form for card in every} == {"full", "adapters", "mixed"}
    for card in every:
        assert len({expert.name for expert in card.experts}) == len(card.experts)


def test_each_part_has_bases_of_its_own() -> None:
    part_of = bases.parts()
    assert set(part_of) == {base.name for base in bases.EVERY}
    names = ("design", "validation", "sealed", "later", "newest")
    assert [list(part_of.values()).count(name) for name in names] == [6, 5, 5, 9, 6]
    assert {card.base for card in run.chosen(["sealed"])} == {
        name for name, part in part_of.items() if part == "sealed"
    }
    with pytest.raises(InputError, match="'desing' is no part of the bank"):
        run.chosen(["desing"])


def _set(base: str, **methods: tuple[float, float, float]) -> dict[str, Any]:
    names = ("a", "b", "c")
    return {
        "card": {"name": f"{base}-0", "base": base},
        "base": dict.fromkeys(names, 0.2),
        "always": {"a": 0.3, "b": 0.1, "c": 0.1},
        "experts": dict.fromkeys(names, 0.8),
        "methods": {
            method: dict(zip(names, accuracies, strict=True))
            for method, accuracies in methods.items()
        },
    }


def test_regret_is_to_the_best_of_each_set() -> None:
    sets = [
        _set("x", first=(0.6, 0.6, 0.6), second=(0.4, 0.6, 0.8)),
        _set("y", first=(0.3, 0.3, 0.3), second=(0.6, 0.6, 0.6)),
    ]
    second, first = table.rows(sets)
    assert (first.method, second.method) == ("first", "second")
    assert first.regret == pytest.approx(15)
    assert (first.worst, first.worst_set, first.wins) == (pytest.approx(30), "y-0", 1)
    assert second.regret == pytest.approx(0)
    assert second.worst_expert == pytest.approx((50 + 75) / 2)
    assert (first.low, first.high) == (pytest.approx(0), pytest.approx(30))


def test_each_half_is_judged_by_what_is_best_on_the_other() -> None:
    scored = _set("x", first=(0.6, 0.6, 0.6), second=(0.6, 0.6, 0.6), third=(0.4, 0.4, 0.4))
    scored["halves"] = {
        "first": dict.fromkeys("abc", (0.9, 0.5)),  # the best on the even examples
        "second": dict.fromkeys("abc", (0.6, 0.7)),  # the best on the odd ones
        "third": dict.fromkeys("abc", (0.4, 0.4)),
    }
    shown = run.show([scored], None, "halves")
    for method, regret in (
        ("first", (-30 + 0) / 2),
        ("second", (0 - 20) / 2),
        ("third", (20 + 10) / 2),
    ):
        assert f"| {method} | 1 | {regret:.1f} |" in shown


FORMS = ("full", "adapters", "mixed")


def test_rows_that_are_no_method_are_no_measure_of_regret() -> None:
    """Nor does `auto` with other constants, or a method with inputs, make the others look worse."""
    best = dict.fromkeys(
        (
            *("a + b", rules.SECOND, rules.TWO_SIDED),
            *(*rules.CONSTANTS, *candidates.TITLES, *informed.TITLES),
        ),
        (0.7, 0.7, 0.7),
    )
    found = table.rows([_set("x", auto=(0.5, 0.5, 0.5), **best)])
    assert {row.method: row.regret for row in found}["auto"] == pytest.approx(0)


def test_the_page_of_auto_has_what_its_command_prints() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "auto.md").read_text()
    page = page[page.index("| method | regret |") :].partition("\n\n")[0]
    told = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = {of.strip("`"): own for of, *own in told[1:]}
    assert len(cells) > 5
    sets = run.read(root / "lab" / "benchmarks" / "results" / "bank.jsonl", ())
    every_name = {name for scored in sets for name in scored["methods"]}
    rivals = [name for name in every_name if not table.is_candidate(name)]

    def rows(*forms: str) -> dict[str, table.Row]:
        own = [scored for scored in sets if scored["card"]["form"] in forms]
        return {row.method: row for row in table.rows(own, list(cells), rivals)}

    every, *parts = rows(*FORMS), *map(rows, FORMS)
    assert cells == {
        name: [
            f"{row.regret:.1f}",
            f"{row.low:.1f} to {row.high:.1f}",
            f"{row.worst:.1f} ({row.worst_set})",
            *(f"{part[name].regret:.1f}" for part in parts),
        ]
        for name, row in every.items()
    }


def test_differences_are_between_methods_of_the_same_sets() -> None:
    sets = [
        _set("x", first=(0.6, 0.6, 0.6), second=(0.5, 0.5, 0.5)),
        _set("y", first=(0.3, 0.3, 0.3)),
    ]
    assert "| first | 1 | 10.0 | 10.0 to 10.0 |" in table.differences(sets, "second")
    with pytest.raises(InputError, match="no set was merged by 'secnd'"):
        run.show(sets, "secnd")


def test_experts_that_learnt_nothing_are_not_counted() -> None:
    scored = _set("x", first=(0.6, 0.6, 0.6))
    scored["experts"]["a"] = 0.34
    assert table.counted(scored) == ["b", "c"]
    assert table.usable([scored]) == []


def test_the_mean_of_merges_is_of_their_updates() -> None:
    base, updates = torch.tensor([1.0, 1.0]), (torch.tensor([2.0, 1.0]), torch.tensor([1.0, 4.0]))
    mean = candidates.mean_tensor(base, updates, equal_length=False)
    assert torch.equal(mean, torch.tensor([1.5, 2.5]))
    mean = candidates.mean_tensor(base, updates, equal_length=True)
    assert float((mean - base).norm()) == pytest.approx(2)  # of updates of lengths 1 and 3


def test_other_tensors_are_matrices_of_their_inputs() -> None:
    """A norm's input is 1, a convolution's is a window, an embedding's is one of its tokens."""
    shapes = {"norm.weight": (5,), "conv.weight": (4, 3, 2, 2), "embed.weight": (9, 5)}
    found = {n: candidates.as_matrix(n, torch.zeros(shape)).shape for n, shape in shapes.items()}
    assert found == {"norm.weight": (5, 1), "conv.weight": (4, 12), "embed.weight": (5, 9)}
    assert candidates.as_matrix("lm_head.weight", torch.zeros(9, 5)).shape == (9, 5)


def test_criteria_of_a_merge_that_is_an_expert() -> None:
    """Of the first expert it has all; the second shares half of its first row."""
    first, second, base = torch.zeros(3, 2, 3, dtype=torch.float64)
    first[0, 0], second[0, :2], base[:] = 2.0, torch.tensor([1.0, 1.0]), torch.eye(2, 3)
    found = criteria.measure([first, second], [first, 0 * first], base)
    for name in criteria.OF_EXPERTS:
        assert found[name][0].tolist() == pytest.approx([1.0, 0.0]), name
    assert found["cosine"][1][0] == pytest.approx(0.5**0.5)
    assert found["nearness"][1][0] == pytest.approx(1 - 2 / 2)  # (2, 0) beside (1, 1)
    assert found["along"][1][0] == pytest.approx(1.0)  # ⟨M, Δ⟩ = ‖Δ‖² = 2
    assert found["retention"][1][0] == pytest.approx(1 - 0 / 4)  # MΔᵀ = ΔΔᵀ = 2
    assert found["short"] == pytest.approx([-2 / (2 + 2**0.5), 0.0])
    assert found["flat"] == pytest.approx([0.5, 0.0])
    seen = criteria.features([first, second], base)
    assert seen["alike"] == pytest.approx(0.5**0.5) and seen["columns"] == pytest.approx(1.0)
    assert seen["rows"] == pytest.approx(0.5) and seen["rank"] == pytest.approx(0.5)


def test_rank_correlation_by_hand() -> None:
    assert choosing.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert choosing.rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert choosing.rank_correlation([1, 1, 2], [1, 2, 2]) == pytest.approx(0.5)  # ties: ½ of √1.5²
    assert choosing.rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def _with_criteria(base: str, better: float, worse: float) -> dict[str, Any]:
    """Return a set where a criterion is larger for the better method, and features tell nothing."""
    rows = {"one": better, "two": worse, "auto": 0.5, rules.SECOND: 0.5}
    scored = _set(base, **{name: (value,) * 3 for name, value in rows.items()})
    values = {"one": better, "two": worse, "auto": 0.0}
    scored["criteria"] = {m: dict.fromkeys(criteria.CRITERIA, v) for m, v in values.items()}
    scored["features"] = dict.fromkeys(criteria.FEATURES, 0.1)
    scored["lengths"] = {"a": 1.0, "b": 1.0, "c": 3.0}
    halves = {"one": (better, better), "two": (worse, worse)}
    scored["halves"] = {m: dict.fromkeys("abc", half) for m, half in halves.items()}
    scored["card"] |= {
        "form": "full",
        "experts": [
            {"name": n, "task": t, "kind": "full", "shuffled": False}
            for n, t in zip("abc", "xyx", strict=True)
        ],
    }
    return scored


def test_ways_of_choosing_are_fitted_on_other_bases() -> None:
    """Where the methods change places, what is best elsewhere is worst here, and a criterion is right."""
    sets = [_with_criteria("x", 0.7, 0.4), _with_criteria("y", 0.4, 0.7)]
    lines = choosing.markdown(sets).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in lines}
    assert rows["half of the test examples"][0] == "1.00"
    assert rows["retention"][0] == "1.00" and rows["retention"][5] == "0.0"
    for way in ("other bases", "selector", "neighbours"):
        assert rows[way][0] == "-1.00" and rows[way][5] == "30.0"
    assert rows["`auto`"][-1] == "20.0 |"


def test_the_worst_expert_by_kind_of_set() -> None:
    shown = worst.markdown([_with_criteria("x", 0.8, 0.4)])
    assert "one long expert (1) | two of one task (1) | one useless expert (0)" in shown
    assert "| two | 50, 50 behind, 0 near |" in shown and "| one | 100, 0 behind, 1 near |" in shown


@pytest.mark.parametrize("title", rules.RULES)
def test_a_rule_gives_one_expert_and_copies_back(title: str) -> None:
    draw = torch.Generator().manual_seed(0)
    update = torch.randn(5, 3, generator=draw) @ torch.randn(3, 7, generator=draw)
    length = 0.8 if "length 0.8" in title else 1.0
    for updates in ([update], [update] * 3):
        found = rules.RULES[title](updates).float()
        assert torch.allclose(found, length * update, atol=1e-4)


def test_a_merge_is_shortened_as_far_as_it_makes_the_weights_longer() -> None:
    first, second = torch.zeros(2, 4, 4).unbind()
    first[0, 0], second[1, 1] = 3.0, 3.0
    base = 4.0 * torch.eye(4)[2:3].repeat(4, 1) / 2  # of length 4
    for updates in ([first], [first, first]):
        group = LinearGroup(tuple(updates), (1.0,) * len(updates), base=base)
        assert torch.allclose(rules.shorter_by_weights(group), first, atol=1e-4)
    pair = LinearGroup((first, second), (1.0, 1.0), base=base)
    merged = registry.get("auto")(pair).delta
    found, whole = rules.shorter_by_weights(pair).norm() / merged.norm(), float(merged.norm())
    assert float(found) == pytest.approx((25 / (16 + whole**2)) ** 0.5, rel=1e-4)


def test_experts_that_share_nothing_are_added_by_both_sides() -> None:
    first, second = torch.zeros(2, 4, 4).unbind()
    first[0, 0], second[1, 1] = 3.0, 2.0
    for rule in (rules.two_sided, rules.by_roots):
        assert torch.allclose(rule([first, second], 1e-9).float(), first + second, atol=1e-4)


@pytest.mark.parametrize("rule", [rules.shorter_by_updates, rules.shorter_by_sum])
def test_a_shorter_merge_is_shorter_where_updates_have_few_directions(
    rule: Callable[[LinearGroup], Tensor],
) -> None:
    draw = torch.Generator().manual_seed(0)

    def length(*updates: Tensor) -> float:
        group = LinearGroup(updates, weights=(1.0,) * len(updates))
        return float(rule(group).norm() / rules.whole_length(group).norm())

    wide = [torch.linalg.qr(torch.randn(32, 32, generator=draw)).Q for _ in range(4)]
    thin = [torch.outer(*torch.randn(2, 256, generator=draw)) for _ in range(4)]
    assert length(thin[0]) == length(thin[0], thin[0]) == 1.0
    assert length(*thin) < 0.8 < 0.95 < length(*wide)


def _task(name: str, seed: int) -> Task:
    """Return a task whose label is the half that all of a row's values lie in."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (240,), generator=draw)
    values = 16 * labels[:, None] + torch.randint(16, (240, 6), generator=draw)
    rows = torch.stack((torch.arange(6).expand(240, 6), values), dim=2)
    return Task(name, 2, Part(rows[:200], labels[:200]), Part(rows[200:], labels[200:]))


def test_a_set_from_training_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {name: _task(name, seed) for seed, name in enumerate(("one", "two", "three"))}
    monkeypatch.setattr(data, "tasks", lambda kind, cache: tasks)
    monkeypatch.setattr(
        data, "table_rows", lambda cache: [task.train.inputs for task in tasks.values()]
    )
    (base,) = (base for base in bases.BASES if base.name == "rows")
    monkeypatch.setitem(experts.BY_NAME, "rows", replace(base, steps=2))
    drawn = cards.draw(base, 0).experts[0]
    card = cards.Card(
        "rows-0",
        "rows",
        tuple(
            replace(
                drawn, name=name, task=name, kind=kind, steps=60, rate=3e-3, batch=32,
                optimizer="adamw", frozen="nothing", rounded=False, shuffled=False,
            )
            for name, kind in zip(tasks, ("full", "dora", "lora"), strict=True)
        ),
    )  # fmt: skip
    assert card.form == "mixed"
    experts.train(card, tmp_path)
    kept = experts.folder_of(card, tmp_path) / "one" / "model" / "model.safetensors"
    written = kept.stat().st_mtime_ns
    experts.train(card, tmp_path)
    assert kept.stat().st_mtime_ns == written

    wanted = ("average", "aswudi", "auto", rules.TWO_SIDED)
    found = scoring.score(card, tmp_path, wanted)
    assert set(found["methods"]) == set(wanted)
    assert "bank_candidate" not in registry.names()
    assert all(found["experts"][name] > found["base"][name] for name in tasks)
    scoring.halves(card, tmp_path)
    stored = json.loads((tmp_path / "bank" / "scores" / "rows-0.json").read_text())
    for name in tasks:
        assert sum(stored["halves"]["aswudi"][name]) / 2 == pytest.approx(
            found["methods"]["aswudi"][name]
        )
    candidates.score(card, tmp_path, [candidates.Mean(("auto", "aswudi"))])
    criteria.score(card, tmp_path)
    stored = json.loads((tmp_path / "bank" / "scores" / "rows-0.json").read_text())
    assert set(stored["methods"]["auto + aswudi"]) == set(tasks)
    assert set(stored["criteria"]) == {"average", "aswudi", "auto"}
    assert stored["criteria"]["aswudi"]["retention"] > stored["criteria"]["average"]["retention"]
    assert stored["card"]["form"] == "mixed"

    monkeypatch.setattr(cards, "cards", lambda: (card,))
    run.write(run.scored(tmp_path, ()), tmp_path / "scores.jsonl")
    shown = run.show(run.read(tmp_path / "scores.jsonl", ()))
    assert shown == run.show(run.scored(tmp_path, ()))
    assert "1 sets of 1 bases" in shown
    assert "| average |" in shown


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("[1]\n")
    for name in ("no.jsonl", "other.jsonl"):
        done = covmerge("bank", "table", "--stored", tmp_path / name, code=2)
        assert f"{name} cannot be read as scores" in words(done.stderr)
    for stage, said in (
        ("score", "run `covmerge bank train` first"),
        ("table", "no set was scored"),
    ):
        assert said in words(covmerge("bank", stage, "--cache", tmp_path, code=2).stderr)
    unknown = covmerge("bank", "score", "--method", "ise_c", "--cache", tmp_path, code=2)
    assert "'ise_c' is no method or candidate. Did you mean 'iso_c'?" in words(unknown.stderr)


@pytest.mark.parametrize("part", ["design", "validation"])
def test_the_committed_scores_are_of_the_cards_that_are_drawn(part: str) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "bank.jsonl"
    sets = run.read(path, [part])
    drawn = {card.name: card.described() for card in run.chosen([part])}
    names = {name: [e["name"] for e in card["experts"]] for name, card in drawn.items()}
    assert {s["card"]["name"]: [e["name"] for e in s["card"]["experts"]] for s in sets} == names
    kinds = {
        name: [(e["kind"], e["optimizer"], e["steps"]) for e in c["experts"]]
        for name, c in drawn.items()
    }
    for scored in sets:
        own = [(e["kind"], e["optimizer"], e["steps"]) for e in scored["card"]["experts"]]
        assert own == kinds[scored["card"]["name"]]
