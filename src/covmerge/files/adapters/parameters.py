"""The parameters that an adapter's factors belong to, above all stacks of experts.

PEFT puts one wrapper around the module for each parameter that it adapts, in the order in which the
module registers them. Whether it transposes the factors of a stack depends on the module's class
and on PEFT's version. The files contain none of this. The shapes of the base's tensors tell which
factors belong to which parameter, and whether they are transposed. If the factors fit in more than
one way, the adapter is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, pairwise

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.config import MERGE_FIRST, AdapterConfig
from covmerge.files.adapters.names import Stacked, Update, Wrapped

# Stacks that transformers packs on loading, with the names of the single experts in the files.
_APART = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the model, as the base stores it.

    Attributes:
        name: the name of the parameter in the configuration.
        shape: its shape in the model.
        rank: its rank in the configuration.
        pieces: the base's tensors, each with its place in the stack; no place: it is one matrix.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    pieces: tuple[tuple[str, Stacked | None], ...]

    @property
    def terms(self) -> int:
        """Number of terms of all matrices together."""
        return self.rank * (self.shape[0] if self.is_stack else 1)

    @property
    def is_stack(self) -> bool:
        """Whether the parameter is a stack of matrices."""
        return len(self.shape) == 3

    def fits(self, factors: Wrapped, *, transposed: bool) -> bool:
        """Return whether the factors may be this parameter's; PEFT transposes stacks, not matrices."""
        turned = transposed and self.is_stack
        shape = factors.shape[::-1] if turned else factors.shape
        return factors.terms == self.terms and shape == self.shape[-2:]

    def updates(
        self, factors: Wrapped, config: AdapterConfig, *, transposed: bool, held: int
    ) -> Iterator[Update]:
        """Yield the updates of the base's tensors; for `held` see `Stacked`."""
        rows, columns = self.shape[-2:]
        by_expert = config.packs_by_expert(self.name.rpartition(".")[2])
        for name, stack in self.pieces:
            shape = (rows, columns)
            if stack is not None and stack.index is None:
                shape = (stack.count, rows * columns)
            elif stack is not None and stack.rows is not None:
                shape = (len(stack.rows), columns)
            yield Update(
                name=name,
                shape=shape,
                rank=self.rank,
                dtype=factors.dtype,
                up=factors.up,
                down=factors.down,
                scale=config.scale(self.name, self.rank),
                transposed=transposed and self.is_stack,
                stack=stack and replace(stack, held=held, by_expert=by_expert),
            )


def find_parameters(
    wrapped: Mapping[str, Wrapped],
    base: Mapping[str, TensorHeader],
    config: AdapterConfig,
) -> tuple[dict[str, Update], dict[str, Wrapped]]:
    """Return the updates of the base's tensors, and the factors whose tensors the base does not have.

    Raises:
        CheckpointError: the factors do not fit the base's tensors, or fit them in several ways.
    """
    tensors = _Base(base)
    modules: defaultdict[str, dict[str, Wrapped]] = defaultdict(dict)
    for module, factors in wrapped.items():
        modules[factors.owner][module] = factors
    updates: dict[str, Update] = {}
    missing: dict[str, Wrapped] = {}
    for owner, by_module in modules.items():
        levels = list(by_module.values())
        named = (
            tensors.find(owner, leaf, config.rank(f"{owner}.{leaf}"))
            for leaf in levels[0].parameters
        )
        parameters = [parameter for parameter in named if parameter is not None]
        if not parameters:
            missing |= by_module
            continue
        found, transposed = _pair(owner, levels, parameters, config.where)
        held = sum(factors.numel for factors in levels)
        for factors, parameter in zip(levels, found, strict=True):
            made = parameter.updates(factors, config, transposed=transposed, held=held)
            updates |= {update.name: update for update in made}
    return updates, missing


def _pair(
    owner: str, levels: Sequence[Wrapped], parameters: Sequence[_Parameter], where: str
) -> tuple[tuple[_Parameter, ...], bool]:
    """Return the parameter of each of the factors, and whether the factors of stacks are transposed."""
    turned = (False, True) if any(parameter.is_stack for parameter in parameters) else (False,)
    ways = [
        (pairing, transposed)
        for transposed in turned
        for pairing in islice(_pairings(levels, parameters, transposed=transposed), 2)
    ]
    if len(ways) == 1 and len(levels) == len(parameters):
        return ways[0]
    stored = ", ".join(f"'{f.down}' {[f.terms, f.shape[1]]}" for f in levels)
    targets = ", ".join(
        f"'{p.name}' {list(p.shape)} (rank {p.rank}, {p.terms} terms)" for p in parameters
    )
    if len(ways) > 1:
        raise CheckpointError(
            f"{where}: the factors {stored} fit {targets} in more than one way, and PEFT does not "
            f"keep which is meant: {MERGE_FIRST}"
        )
    raise CheckpointError(
        f"{where}: the factors of '{owner}', {stored}, are not those of {targets}: the files are of "
        "different versions, or the adapter is of another base. Fetch it again, or pass its base"
    )


def _pairings(
    levels: Sequence[Wrapped], parameters: Sequence[_Parameter], *, transposed: bool
) -> Iterator[tuple[_Parameter, ...]]:
    """Yield every way to assign to each of the factors a parameter that it fits."""
    if not levels:
        yield ()
        return
    for parameter in parameters:
        if parameter.fits(levels[0], transposed=transposed):
            others = [other for other in parameters if other is not parameter]
            for rest in _pairings(levels[1:], others, transposed=transposed):
                yield (parameter, *rest)


class _Base:
    """The base's tensors, looked up by the adapter's names for them."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        # Prefixes that only one of the two models may have before its names, such as `model.`
        self._prefixes = {name.partition(".")[0] for name in headers if "." in name}

    def find(self, owner: str, leaf: str, rank: int) -> _Parameter | None:
        """Return a module's parameter, which the base may store whole or expert by expert."""
        name = f"{owner}.{leaf}"
        homes = (owner, owner.replace(".mlp.", ".block_sparse_moe."))
        stored = next(filter(None, (self._stored(f"{home}.{leaf}") for home in homes)), None)
        if stored is not None:
            shape = stored.shape
            stack = Stacked(shape[0]) if len(shape) == 3 else None
            return _Parameter(name, shape, rank, ((stored.name, stack),))
        for home, kinds in ((home, kinds) for home in homes for kinds in _APART.get(leaf, ())):
            experts = list(self._experts(home, kinds))
            if experts and all(len(matrix.shape) == 2 for matrix in experts[0]):
                return _packed(name, rank, experts)
        return None

    def _experts(self, home: str, kinds: Sequence[str]) -> Iterator[list[TensorHeader]]:
        """Yield the matrices of each expert."""
        for expert in count():
            found = [self._stored(f"{home}.{expert}.{kind}.weight") for kind in kinds]
            stored = [header for header in found if header is not None]
            if len(stored) < len(kinds):
                return
            yield stored

    def _stored(self, name: str) -> TensorHeader | None:
        shorter = name.partition(".")[2]
        longer = (f"{prefix}.{name}" for prefix in self._prefixes)
        found = next((n for n in (name, shorter, *longer) if n in self._headers), None)
        return None if found is None else self._headers[found]


def _packed(name: str, rank: int, experts: Sequence[Sequence[TensorHeader]]) -> _Parameter:
    """Return a stack whose experts the base stores separately, each perhaps as several pieces of rows."""
    ends = list(accumulate((matrix.shape[0] for matrix in experts[0]), initial=0))
    pieces = tuple(
        (matrix.name, Stacked(len(experts), expert, range(start, end)))
        for expert, matrices in enumerate(experts)
        for matrix, (start, end) in zip(matrices, pairwise(ends), strict=True)
    )
    return _Parameter(name, (len(experts), ends[-1], experts[0][0].shape[1]), rank, pieces)
