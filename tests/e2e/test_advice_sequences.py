"""No sequence of advised settings ends with a merge that is nearly the base."""

import json
import re
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CovmergeError
from tests.advised import advice, rules_in
from tests.e2e.test_other_names import BASE, EXPERT, STRANGE

LAYERS = [name for name in BASE if "fc" in name]
WIDE = {f"layers.{n}.fc.weight": torch.eye(6) for n in range(3)} | {"norm.weight": torch.ones(4)}
CODES = {name: torch.arange(16, dtype=torch.int8).view(4, 4) for name in LAYERS}
PACKED = {name.replace("weight", "codes"): codes for name, codes in CODES.items()}
SCALES = {name.replace("weight", "quant_step"): torch.ones(4) for name in LAYERS}
NORM = {"norm.weight": torch.ones(4)}


def moved(tensors):
    return {n: t + (1 if t.dtype == torch.int8 else 0.1) for n, t in tensors.items()}


def broken(layers, entries=16):
    """NaN in so many entries of these layers of an expert."""
    tensors = {name: tensor.clone() for name, tensor in EXPERT.items()}
    for name in layers:
        tensors[name].view(-1)[-entries:] = float("nan")
    return tensors


# Base and expert.
KINDS = {
    **{what: (BASE, expert) for what, expert in STRANGE.items()},
    "as it should be": (BASE, EXPERT),
    "another width": (BASE, WIDE),
    "quantised, the base not": (BASE, CODES | NORM),
    "quantised base": (CODES | NORM, EXPERT),
    "both quantised, undeclared": (CODES | NORM, moved(CODES | NORM)),
    "codes with scales": (PACKED | SCALES | NORM, moved(PACKED | SCALES | NORM)),
    "wrapped by PEFT": (
        BASE,
        {n.replace("fc.", "fc.base_layer."): t for n, t in BASE.items()}
        | {f"layers.{n}.fc.lora_A.default.weight": torch.ones(1, 4) for n in range(3)},
    ),
    "NaN in all layers": (BASE, broken(LAYERS)),
    "a NaN in each layer": (BASE, broken(LAYERS, 1)),
    "NaN in a layer": (BASE, broken(LAYERS[:1])),
    "without most layers": (
        BASE,
        {n: t for n, t in EXPERT.items() if "layers.0" in n or "norm" in n},
    ),
    "in each other's place": (
        BASE,
        dict(
            zip(
                BASE,
                [EXPERT[n] for n in (LAYERS[1], LAYERS[0], LAYERS[2], "norm.weight")],
                strict=True,
            )
        ),
    ),
    "a part more": (BASE, EXPERT | {f"visual.{n}.fc.weight": torch.ones(2, 2) for n in range(2)}),
    "not trained": (BASE, BASE),
    "half of it in another dtype": (
        BASE,
        EXPERT | {LAYERS[0]: CODES[LAYERS[0]], LAYERS[1]: CODES[LAYERS[1]]},
    ),
}
TENSORS = re.compile(r'tensors=(\{"\w+": "\w+"\})')
ALLOW = re.compile(r"allow=(\[[^\]]*\])")


def advised(text: str, settings: dict) -> Iterator[dict]:
    """The settings with each that a message advises."""
    rules = rules_in(text)
    if '"use": "head"' in text:  # for the first tensor that it names, and its like
        named = re.search(r"'([\w.]+\.[\w.]+)'", text)
        rules.append({"match": re.sub(r"\d+", "*", named[1]), "use": "head"})
    for rule in rules:
        yield settings | {"rules": [*settings.get("rules", ()), rule]}
    if len(rules) > 1:
        yield settings | {"rules": [*settings.get("rules", ()), *rules]}
    for found in TENSORS.findall(text):
        yield settings | {"tensors": settings.get("tensors", {}) | json.loads(found)}
    for found in ALLOW.findall(text):
        yield settings | {"allow": [*settings.get("allow", ()), *json.loads(found)]}


def ends(base: dict, expert: dict, settings: dict, depth: int) -> Iterator[tuple[dict, dict]]:
    """Every merge at which the advised settings end, after at most so many."""
    try:
        yield settings, covmerge.merge(base, {"a": expert}, "average", **settings).tensors
    except CovmergeError as error:
        if depth:
            for more in advised(str(error), settings):
                yield from ends(base, expert, more, depth - 1)


def taken(base: dict, merged: dict) -> float:
    """The share of the base's numbers in layers that changed."""
    changed = sum(int((merged[n] != base[n]).sum()) for n in base if "fc" in n and n in merged)
    return changed / max(1, sum(base[n].numel() for n in base if "fc" in n))


@pytest.mark.parametrize("what", KINDS)
def test_no_sequence_of_advice_ends_nearly_at_the_base(what):
    base, expert = KINDS[what]
    for settings, merged in ends(base, expert, {}, depth=3):
        assert taken(base, merged) >= 0.3, settings


def test_the_way_is_found_where_there_is_one():
    assert list(ends(*KINDS["as it should be"], {}, depth=0))
    found = [settings for settings, _ in ends(*KINDS["a part more"], {}, depth=2)]
    assert {"tensors": {"extra": "ignore"}} in found


@pytest.mark.parametrize("entries", [1, 16])
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_an_expert_of_nan_is_no_matter_of_rules(entries, executor, tmp_path):
    files = {"base": BASE, "a": broken(LAYERS, entries), "b": EXPERT}
    base, a, b = (tmp_path / f"{name}.safetensors" for name in files)
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    said = advice(
        "if that is what was trained, pass a checkpoint from before the training diverged, or leave the"
    )
    for rules in ([], [{"match": LAYERS[0], "use": "base"}], [{"match": "*fc*", "use": "base"}]):
        with pytest.raises(CovmergeError, match=f"^lost-update: expert 'a'.*{said}"):
            given = {"rules": rules, "executor": executor}
            covmerge.merge(base, {"a": a, "b": b}, "average", tmp_path / "out", **given)
    found = covmerge.merge(base, {"b": b}, "average", tmp_path / "out")  # left out
    assert found.verification.ok
    saved = tmp_path / "a.safetensors"  # the one before
    save_file(EXPERT, saved)
    covmerge.merge(base, {"a": saved, "b": b}, "average", tmp_path / "out", overwrite=True)


def test_a_layer_of_nan_is_left_to_the_base_by_the_rule():
    base, expert = KINDS["NaN in a layer"]
    (found,) = [merged for settings, merged in ends(base, expert, {}, depth=1) if settings]
    for name in BASE:
        torch.testing.assert_close(found[name], (BASE if name == LAYERS[0] else EXPERT)[name])


def test_a_model_of_codes_is_given_as_numbers():
    base, expert = KINDS["codes with scales"]
    said = advice("the output would be nearly {}. Give the models in a floating-point dtype")
    with pytest.raises(CovmergeError, match=f"^lost-update: .*{said}"):
        covmerge.merge(base, {"a": expert}, "average")
    covmerge.merge(BASE, {"a": EXPERT}, "average")
