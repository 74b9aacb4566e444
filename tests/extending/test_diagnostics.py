"""Diagnostics of somebody else's method: in the table, covmerge.json, the notes and the report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import covmerge
from covmerge.errors import InputError
from covmerge.front.reporting import page
from tests.cli.runs import save_plain

pytestmark = pytest.mark.usefixtures("forget")


class Outliers(covmerge.Summary):
    def totals(self, seen: Sequence[covmerge.TensorDiagnostics]) -> Mapping[str, int]:
        return {"outliers": sum(m.outliers for one in seen for m in one.matrices)}

    def rows(self, seen: Sequence[covmerge.TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        yield "outliers", f"{self.totals(seen)['outliers']} entries in {len(seen)} tensors"

    def notes(self, seen: Sequence[covmerge.TensorDiagnostics]) -> Iterator[str]:
        yield f"outliers by {seen[0].parameters['by']} of {', '.join(seen[0].experts)}"

    def warnings(self, seen: Sequence[covmerge.TensorDiagnostics]) -> Iterator[str]:
        yield "far too many outliers"


@dataclass(frozen=True)
class Found(covmerge.Diagnostics):
    summaries: ClassVar[tuple[covmerge.Summary, ...]] = (Outliers(),)

    outliers: int = 0
    worst: float | None = None


def mine(group: covmerge.LinearGroup, *, by: float = 2.0) -> covmerge.Merged:
    delta = torch.stack(group.updates).mean(0)
    return covmerge.Merged(delta, Found(int((delta.abs() > by * delta.abs().mean()).sum())))


def as_mapping(group: covmerge.LinearGroup) -> covmerge.Merged:
    return covmerge.Merged(torch.stack(group.updates).mean(0), {"gate_fired": True, "own": [1, 2]})


def merged(tmp_path, **given):
    models = save_plain(tmp_path)
    experts = {name: models / f"{name}.safetensors" for name in ("a", "b")}
    result = covmerge.merge(models / "base.safetensors", experts, "mine", tmp_path / "out", **given)
    return result, json.loads((tmp_path / "out" / "covmerge.json").read_text("utf-8"))


@pytest.mark.parametrize("unit", ["matrix", "element"])
def test_its_words_are_everywhere(tmp_path, unit):
    covmerge.register("mine", diagnostics=Found, unit=unit)(mine)
    result, manifest = merged(tmp_path, by=0.5)
    found = [m for entry in manifest["tensors"].values() for m in entry.get("matrices", ())]
    count = sum(m["outliers"] for m in found)
    assert count and all(m.keys() == {"outliers"} for m in found)  # `worst` was None
    assert manifest["totals"]["outliers"] == count
    assert manifest["totals"]["gate_fired"] == []  # as in every covmerge.json
    row = dict(result.diagnostics)["outliers"]
    assert row.startswith(f"{count} entries in ")
    assert any(note.startswith("outliers by 0.5 of ") for note in manifest["notes"])
    assert (
        "far too many outliers" in result.warnings
        and "far too many outliers" in manifest["warnings"]
    )
    report = covmerge.report(tmp_path / "out")
    assert dict(page.facts(report))["outliers"] == row
    said = {message.text for message in page.messages(report) if message.severity == "warning"}
    assert "far too many outliers" in said


def test_a_mapping_is_written_as_it_is_and_has_no_words(tmp_path):
    covmerge.register("mine")(as_mapping)
    result, manifest = merged(tmp_path)
    found = [m for entry in manifest["tensors"].values() for m in entry.get("matrices", ())]
    assert {"gate_fired": True, "own": [1, 2]} in found
    assert manifest["totals"]["gate_fired"] == []  # ACE's word, and not its doing
    assert result.diagnostics == ()
    assert covmerge.report(tmp_path / "out").diagnostics


def test_facts_of_another_type_are_refused_by_name(tmp_path):
    covmerge.register("mine", diagnostics=Found)(mine)
    _, manifest = merged(tmp_path)
    name = next(n for n, entry in manifest["tensors"].items() if "matrices" in entry)
    manifest["tensors"][name]["matrices"][0]["outliers"] = "many"
    (tmp_path / "out" / "covmerge.json").write_text(json.dumps(manifest))
    with pytest.raises(
        InputError, match=rf"tensors\.{name}\.matrices of covmerge\.json is not what"
    ):
        covmerge.report(tmp_path / "out")
