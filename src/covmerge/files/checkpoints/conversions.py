"""An expert's tensors shown under its base's names and in its base's pieces, by transformers' rules.

In memory, transformers names a model's tensors differently than many files do, and has all experts
of a layer in one tensor. Its rules lead from files to memory. This module applies them to both the
base and the expert, and then shows the expert in the base's pieces. `conversions.json` has the
rules and their version, so that the result does not depend on the installed transformers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from covmerge.files.checkpoints.authors_layouts import rules_for
from covmerge.files.checkpoints.json_file import as_list, as_object
from covmerge.files.checkpoints.pieces import (
    Assembly,
    Normed,
    Shape,
    StoredTensor,
    alone,
    cut,
    interleaved,
    joined,
    only,
    transposed,
)
from covmerge.files.checkpoints.view import by_inner_name, inner_name, weight_norms

Slots = list[list[Assembly]]  # for each pattern of a rule, the tensors that match it
_DIGITS = re.compile(r"(\d+)")


class _Unlike(Exception):
    """The tensors do not fit a rule."""


@dataclass(frozen=True)
class Rule:
    """One conversion rule of transformers' registry."""

    sources: tuple[re.Pattern[str], ...]  # regular expressions of names; `*.` matches anything
    # The replacements; of several, the first one is used, but a renaming uses the one of its
    # pattern.
    targets: tuple[str, ...]
    # Operations with their axes; None: the tensor is only renamed.
    by: tuple[tuple[Any, ...], ...] | None
    scope: tuple[str, ...] | None  # the two prefixes that names may have; None: any prefix

    @property
    def together(self) -> bool:
        """Whether the rule renames several patterns together, only in files that have the first of them."""
        return self.by is None and len(self.targets) > 1

    def applied(self, name: str) -> tuple[str, int] | None:
        """Return a name's new name and the number of the pattern that it matches, or None."""
        prefix = ""
        if self.scope is not None:
            found = next((scope for scope in self.scope if name.startswith(scope)), None)
            if found is None:
                return None
            prefix = found
        rest = name.removeprefix(prefix)
        matches = [(m, i) for i, source in enumerate(self.sources) if (m := source.search(rest))]
        if not matches:
            return None
        # The match that begins first decides, then the longest pattern.
        match, index = min(matches, key=lambda m: (m[0].start(), -len(m[0].re.pattern)))
        to = self.targets[index if self.together else 0]
        if r"\1" in to:
            to = to.replace(r"\1", match[1])
        return prefix + rest.replace(match[0], to, 1), index


@dataclass
class _Group:
    """Tensors that one rule turns into one or several others."""

    rule: Rule | None = None
    names: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def all(self) -> list[str]:
        return [name for index in sorted(self.names) for name in self.names[index]]


def converted(
    expert: Mapping[str, Shape],
    base: Mapping[str, Shape],
    config: Mapping[str, Any] | None,
    layout: Sequence[Mapping[str, Any]] = (),
) -> tuple[dict[str, Assembly], str]:
    """Return how the expert's tensors make up the base's tensors that the expert has not by name.

    The tensors have the base's names. The text is the origin of the rules, for notes. `layout` has the
    rules of the expert's layout where its names do not tell it.
    """
    if base.keys() <= expert.keys():
        return {}, ""
    made = _of_weight_norms(expert, base)
    by, common = _of_transformers(config)
    of_expert, of_base = _rules(layout or rules_for(expert)), _rules(rules_for(base))
    if not (common or of_expert or of_base):
        return made, by
    if of_expert or of_base:
        by = "as diffusers reads such files"
    ours = _grouped(base, (*common, *of_base))
    theirs = _grouped(expert, (*common, *of_expert))
    plain = {to: base[g.all()[0]] for to, g in ours.items() if g.rule is None}
    known: dict[str, Assembly] = {}
    for to, group in theirs.items():
        known.update(_outputs(to, group, expert, plain))
    inner = by_inner_name(known)
    of = {name: to for to, group in theirs.items() for name in group.all()}
    for to, group in ours.items():
        # The same name may belong to different tensors of the expert and the base.
        missing = [
            n for n in group.all() if n not in expert or (of.get(n, to) != to and to in known)
        ]
        if missing:
            pieces = _alike(group, theirs.get(to), base, expert)
            pieces = pieces or _pieces(to, group, base, known, inner)
            made.update({name: pieces[name] for name in missing if name in pieces})
    return made, by


def names_in_memory(names: Iterable[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return names by what transformers calls them in memory; those that it does not rename are left out.

    Example:
        >>> names_in_memory(["text_model.norm.weight"], {"architectures": ["CLIPTextModel"]})
        {'norm.weight': 'text_model.norm.weight'}
    """
    _, rules = _of_transformers(config)
    renamed = _renamed(sorted(names), rules)
    times = Counter(to for _, to in renamed)
    return {to: name for name, to in renamed if name != to and times[to] == 1}


def divided(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None) -> dict[str, Assembly]:
    """Return the tensors that transformers splits from one stored tensor on loading, each as its part."""
    found: dict[str, Assembly] = {}
    _, rules = _of_transformers(config)
    if any(rule.by and len(rule.targets) > 1 for rule in rules):
        for to, group in _grouped(shapes, rules).items():
            if group.rule is not None and len(group.rule.targets) > 1:
                found.update(
                    _outputs(to, group, shapes, _by_heads(to, group, shapes, config or {}))
                )
    return found


def in_diffusers_names(shapes: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return diffusers' tensors of a transformer, of a file in its authors' layout; none in other files."""
    rules = _rules(rules_for(shapes))
    made: dict[str, Assembly] = {}
    for to, group in _grouped(shapes, rules).items() if rules else ():
        made.update(_outputs(to, group, shapes, _by_columns(to, group, shapes)))
    return made


def in_authors_names(
    names: Iterable[str], base: Mapping[str, Shape], rules: Sequence[Mapping[str, Any]]
) -> dict[str, Assembly]:
    """Return an authors' tensors, of a base that has diffusers'; without those that the base lacks."""
    made: dict[str, Assembly] = {}
    known = {name: StoredTensor(name, shape) for name, shape in base.items()}
    for to, group in _grouped(dict.fromkeys(names, ()), _rules(rules)).items():
        parts = [base.get(target, ()) for target in _targets(to, group)]
        if all(parts):
            shape = (sum(part[0] for part in parts), *parts[0][1:])
            made.update(_pieces(to, group, dict.fromkeys(group.all(), shape), known, {}))
    return made


def _by_columns(to: str, group: _Group, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the numbers of rows of Flux's q, k and v, as many as columns, and of what follows them."""
    name, targets = group.all()[0], _targets(to, group)
    weight = shapes.get(f"{name.rpartition('.')[0]}.weight", ())
    if len(targets) == 1 or len(weight) != 2:
        return {}
    rows, columns = weight
    taken = columns * (len(targets) - 1)
    return {**dict.fromkeys(targets[:-1], (columns,)), targets[-1]: (rows - taken,)}


def _by_heads(
    to: str, group: _Group, shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> dict[str, Shape]:
    """Return the numbers of rows of q, k and v, from the config's heads, for a rule that splits them."""
    targets = [] if group.rule is None else [*group.rule.targets]
    if [target.rpartition(".")[2] for target in targets] != ["q_proj", "k_proj", "v_proj"]:
        return {}
    settings = as_object(config.get("text_config")) or config
    queries = settings.get("num_attention_heads")
    keys = settings.get("num_key_value_heads") or queries
    if type(queries) is not int or type(keys) is not int or min(queries, keys) < 1:
        return {}
    each = next(iter(shapes[group.all()[0]]), 0) // (queries + 2 * keys)
    rows = (queries * each, keys * each, keys * each)
    return {to.replace(targets[0], name, 1): (n,) for name, n in zip(targets, rows, strict=True)}


def _of_weight_norms(expert: Mapping[str, Shape], base: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return plain weights of the base for which the expert stores lengths and directions (weight norm)."""
    found: dict[str, Assembly] = {}
    for name, (length, direction) in weight_norms(expert).items():
        lengths, shape = expert[length], expert[direction]
        # There is one length for each index along one axis.
        kinds = [(*(1,) * axis, n, *(1,) * (len(shape) - axis - 1)) for axis, n in enumerate(shape)]
        plain = name not in expert and base.get(name) == shape
        if plain and len(shape) > 1 and lengths in kinds:
            found[name] = Normed(
                StoredTensor(length, lengths), StoredTensor(direction, shape), shape
            )
    return found


def _alike(
    ours: _Group, theirs: _Group | None, base: Mapping[str, Shape], expert: Mapping[str, Shape]
) -> dict[str, Assembly]:
    """Return a group's tensors if expert and base have them in the same pieces, else nothing."""
    if theirs is None or ours.rule is None or theirs.rule is None:
        return {}
    pairs = list(zip(ours.all(), theirs.all(), strict=False))
    same = ours.rule.sources == theirs.rule.sources and all(
        len(ours.names[index]) == len(theirs.names.get(index, ())) for index in ours.names
    )
    if not same or any(base[name] != expert[other] for name, other in pairs):
        return {}
    return {name: StoredTensor(other, expert[other]) for name, other in pairs}


def _grouped(shapes: Mapping[str, Shape], rules: Sequence[Rule]) -> dict[str, _Group]:
    """Return groups of tensors, by the name in memory of the first tensor that each group becomes."""
    groups: dict[str, _Group] = {}
    for name, renamed in _renamed(sorted(shapes, key=_by_number), rules):
        to, index, converter = renamed, 0, None
        for rule in rules:
            if rule.by is not None and (found := rule.applied(to)):
                (to, index), converter = found, rule
                break
        group = groups.setdefault(to, _Group(converter))
        if group.rule is not converter or (converter is None and group.names):
            group.rule, group.names[-1] = None, [name]  # two rules or names lead here: ambiguous
        group.names.setdefault(index, []).append(name)
    return {to: group for to, group in groups.items() if -1 not in group.names}


def _renamed(names: Sequence[str], rules: Sequence[Rule]) -> list[tuple[str, str]]:
    """Return names with their new names by the rules that only rename, applied one after the other."""
    now = list(names)
    for rule in rules:
        if rule.by is not None:
            continue
        found = [rule.applied(name) for name in now]
        if not rule.together or any(one is not None and one[1] == 0 for one in found):
            now = [n if one is None else one[0] for n, one in zip(now, found, strict=True)]
    return list(zip(names, now, strict=True))


def _outputs(
    to: str, group: _Group, shapes: Mapping[str, Shape], plain: Mapping[str, Shape]
) -> dict[str, Assembly]:
    """Return the tensors in memory that a group becomes, by name; none if they do not fit the rule."""
    try:
        targets = _targets(to, group)
        sizes = [plain.get(target) for target in targets]
        last = _forward(group, shapes, len(targets), sizes)[-1]
    except _Unlike:
        return {}
    return dict(zip(targets, (slot[0] for slot in last), strict=True))


def _pieces(
    to: str,
    group: _Group,
    shapes: Mapping[str, Shape],
    known: Mapping[str, Assembly],
    inner: Mapping[str, str],
) -> dict[str, Assembly]:
    """Return each of the base's tensors in a group as a piece of the known tensors in memory."""
    try:
        targets = _targets(to, group)
        found = [
            known.get(target, known.get(inner.get(inner_name(target), ""))) for target in targets
        ]
        if None in found:
            return {}
        whole = [one for one in found if one is not None]
        if group.rule is None:
            return {group.all()[0]: whole[0]}
        states = _forward(group, shapes, len(targets), [one.shape for one in whole])
        slots = [[one] for one in whole]
        if [one.shape for one in whole] != [slot[0].shape for slot in states[-1]]:
            return {}
        for operation, before in zip(
            reversed(group.rule.by or ()), reversed(states[:-1]), strict=True
        ):
            slots = _undone(operation, before, slots)
    except _Unlike:
        return {}
    pieces = [piece for slot in slots for piece in slot]
    return {
        name: piece
        for name, piece in zip(group.all(), pieces, strict=True)
        if piece.shape == shapes[name]
    }


def _targets(to: str, group: _Group) -> list[str]:
    if group.rule is None or len(group.rule.targets) == 1:
        return [to]
    first = group.rule.targets[0]
    if first not in to:
        raise _Unlike
    return [to.replace(first, target, 1) for target in group.rule.targets]


def _forward(
    group: _Group, shapes: Mapping[str, Shape], count: int, sizes: Sequence[Shape | None]
) -> list[Slots]:
    """Return a group's tensors before the first and after each operation of its rule."""
    slots: Slots = [
        [StoredTensor(name, shapes[name]) for name in group.names[index]]
        for index in sorted(group.names)
    ]
    states = [slots]
    if group.rule is not None:
        if not group.rule.by or len(slots) != len(group.rule.sources):
            raise _Unlike
        for operation in group.rule.by:
            slots = _done(operation, slots, count, sizes)
            states.append(slots)
    if len(slots) != count or any(len(slot) != 1 for slot in slots):
        raise _Unlike
    return states


def _done(
    operation: Sequence[Any], slots: Slots, count: int, sizes: Sequence[Shape | None]
) -> Slots:
    kind, dim, other = _operation(operation)
    if kind == "MergeModulelist":
        if dim or len({len(slot) for slot in slots}) > 1:
            raise _Unlike
        return [[_joined([alone(one) for one in slot], 0)] for slot in slots]
    if kind == "Concatenate":
        return [[_joined([one for slot in slots for one in slot], dim)]]
    if len(slots) != 1 or len(slots[0]) != 1 or dim >= len(slots[0][0].shape):
        raise _Unlike
    whole = slots[0][0]
    if kind == "Transpose":
        return [[transposed(whole, dim, other)]]
    if kind == "Interleave":
        return [[interleaved(whole, dim, back=False)]]
    if kind == "Swap":
        return [[_swapped(whole, dim)]]
    return [
        [part] for part in _apart(whole, dim, _parts(kind, whole.shape[dim], dim, count, sizes))
    ]


def _operation(given: Sequence[Any]) -> tuple[str, int, int]:
    return str(given[0]), int(given[1]), int(given[-1])


def _parts(kind: str, size: int, dim: int, count: int, sizes: Sequence[Shape | None]) -> list[int]:
    """Return the sizes of the parts that a tensor is cut into."""
    if kind == "Chunk" and size % count == 0:
        return [size // count] * count
    if kind != "Split" or any(shape is None or dim >= len(shape) for shape in sizes):
        raise _Unlike
    return [shape[dim] for shape in sizes if shape is not None]


def _undone(operation: Sequence[Any], before: Slots, after: Slots) -> Slots:
    kind, dim, other = _operation(operation)
    if kind == "MergeModulelist":
        return [
            [only(cut(slot[0], 0, i, i + 1)) for i in range(len(old))]
            for old, slot in zip(before, after, strict=True)
        ]
    if kind == "Concatenate":
        parts = iter(_apart(after[0][0], dim, [one.shape[dim] for slot in before for one in slot]))
        return [[next(parts) for _ in slot] for slot in before]
    if kind == "Transpose":
        return [[transposed(after[0][0], dim, other)]]
    if kind == "Interleave":
        return [[interleaved(after[0][0], dim, back=True)]]
    if kind == "Swap":
        return [[_swapped(after[0][0], dim)]]
    return [[_joined([slot[0] for slot in after], dim)]]


def _swapped(whole: Assembly, dim: int) -> Assembly:
    size = whole.shape[dim]
    if size % 2:
        raise _Unlike
    return joined([cut(whole, dim, size // 2, size), cut(whole, dim, 0, size // 2)], dim)


def _joined(parts: Sequence[Assembly], dim: int) -> Assembly:
    rests = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(rests) != 1 or any(dim >= len(part.shape) for part in parts):
        raise _Unlike
    return joined(parts, dim)


def _apart(whole: Assembly, dim: int, sizes: Sequence[int]) -> list[Assembly]:
    found, start = list[Assembly](), 0
    for size in sizes:
        found.append(cut(whole, dim, start, start + size))
        start += size
    if start != whole.shape[dim]:
        raise _Unlike
    return found


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def _of_transformers(config: Mapping[str, Any] | None) -> tuple[str, tuple[Rule, ...]]:
    """Return the origin of the rules, and the rules for a config's model, in order."""
    table = _table()
    config = dict(config or {})
    names = as_list(config.get("architectures"))
    model, kind = str(names[0]) if names else "", _kind(config)
    parts = table["architectures"].get(f"{kind}/{model}")
    if parts is None:
        parts = [[key] for key in (model, kind) if key in table["rules"]][:1]
    text = _kind(config.get("text_config"))
    if text in table["rules"] and all(key != text for key, *_ in parts):
        parts = [*parts, [text, "language_model", "model"]]
    rules = [r for key, *scope in parts for r in _rules(table["rules"][key], *scope)]
    return f"as transformers {table['transformers']} reads such files", tuple(rules)


def _kind(config: object) -> str:
    return str(as_object(config).get("model_type", ""))


def _rules(given: Sequence[Mapping[str, Any]], *scope: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            tuple(_compiled(source) for source in rule["from"]),
            tuple(rule["to"]),
            None if "by" not in rule else tuple(tuple(by) for by in rule["by"]),
            _scope(*scope) if scope else None,
        )
        for rule in given
    )


def _scope(part: str, model: str) -> tuple[str, ...]:
    inside, before = (f"{name}." if name else "" for name in (part, model))
    return before + inside, inside


def _compiled(source: str) -> re.Pattern[str]:
    pattern = source.replace("*.", r".*\.")
    if re.search(r"[a-zA-Z0-9]$", pattern):
        pattern += r"(?!\w)"  # the pattern ends at the end of a part of a name
    return re.compile(pattern)
