"""Which other layer of the base a layer holds, where it does not hold its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from covmerge.base.findings import Finding, Severity
from covmerge.files.tensors.views import MatrixLayout, matrices
from covmerge.maths.linalg.lapack import norm
from covmerge.plan.planning.align import Model
from covmerge.run.judgement.names import block_of
from covmerge.run.judgement.verdicts import Foreign

_LOOKED_UP = 8  # layers of an expert whose true place is searched for
_ALIKE = 0.9  # cosine with another layer of the base from which it is that one


def find_swaps(foreign: Sequence[Foreign], base: Model, expert: Model) -> Iterator[Finding]:
    """Say which other layers of the base an expert's layers hold.

    A layer that holds no other was trained anew, or is lost: whether a merge is worse for it, who
    merges must know.
    """
    for each in foreign[:_LOOKED_UP]:
        yield _find_in_base(each, base, expert)
    if len(foreign) > _LOOKED_UP:
        yield Finding(
            Severity.WARNING,
            f"{len(foreign)} layers in all are not the base's",
            foreign[0].expert,
            tuple(each.tensor for each in foreign),
        )


def _find_in_base(foreign: Foreign, base: Model, expert: Model) -> Finding:
    name = foreign.tensor
    parts = _parts(expert, name)
    found: list[str] = []
    for label, part in parts.items():
        for other in _candidates(name, base):
            for place, candidate in _parts(base, other).items():
                if (other, place) == (name, label) or candidate.shape != part.shape:
                    continue
                cosine = float((candidate * part).sum()) / ((norm(candidate) * norm(part)) or 1.0)
                if cosine > _ALIKE:
                    where = f"'{other}'" + (f" ({place})" if place else "")
                    what = f"its {label} is" if label else "it is"
                    found.append(f"{what} the base's {where} (cosine {cosine:.2f})")
    text = f"'{name}' is not the base's (cosine {foreign.cosine:.2f} with it)"
    if found:
        text += f": {'; '.join(found)}. Swapped when it was saved?"
        return Finding(Severity.FAULT, text, foreign.expert, (name,), "swapped-tensors")
    text += (
        ": a layer of its own? No merge can bring it together with the others'; leave it to the base "
        f"by the rule {{match: '{name}', use: base}}, or to each expert by use: head"
    )
    return Finding(Severity.WARNING, text, foreign.expert, (name,))


def _candidates(name: str, base: Model) -> list[str]:
    """Layers of the same shape in the same block, then the same layer of other blocks."""
    shape, block = base.headers[name].shape, block_of(name)
    same = [n for n, header in base.headers.items() if header.shape == shape]
    siblings = [n for n in same if block_of(n) == block]
    return [*siblings, *(n for n in same if n not in siblings)][:64]


def _parts(model: Model, name: str) -> dict[str, Tensor]:
    """A stored tensor as its projections by name, or as one matrix without a name."""
    info = model.description.tensors.get(name)
    if info is None:
        return {}
    tensor = model.checkpoint.read(name).float()
    layout: MatrixLayout = info.layout
    if info.parts is None or layout.stacked:
        return {"": tensor}
    split = replace(layout, parts=info.parts)
    return dict(zip(info.parts.names, matrices(tensor, split), strict=True))
