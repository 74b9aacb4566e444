"""Adapted parameters of modules, stacks of experts above all, found in the base by their shapes.

PEFT puts a wrapper around the module for each parameter that it adapts, in the order in which the
module registers them, and turns the factors of a stack around or not by the module's class and by
its own version. The files keep none of this. The shapes of the base tell which factors are whose
and which way round they lie; where they fit in more than one way, the adapter is refused.
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

# What transformers packs into a stack on loading, where each expert is stored by itself.
_APART = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the model, as the base stores it.

    Attributes:
        name: by which the configuration knows it.
        shape: in the model.
        rank: that the configuration gives it.
        pieces: the base's tensors, each with its place in the stack; None: it is one matrix.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    pieces: tuple[tuple[str, Stacked | None], ...]

    @property
    def terms(self) -> int:
        """Terms of all matrices together."""
        return self.rank * (self.shape[0] if self.is_stack else 1)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices."""
        return len(self.shape) == 3

    def fits(self, factors: Wrapped, *, transposed: bool) -> bool:
        """Whether it may be what the factors are of; PEFT turns stacks around, not matrices."""
        turned = transposed and self.is_stack
        shape = factors.shape[::-1] if turned else factors.shape
        return factors.terms == self.terms and shape == self.shape[-2:]

    def updates(
        self, factors: Wrapped, config: AdapterConfig, *, transposed: bool, held: int
    ) -> Iterator[Update]:
        """Make the updates of the base's tensors; `held`: see `Stacked`."""
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
    """Return the updates of the base's tensors, and the factors of which it has none.

    Raises:
        CheckpointError: the factors fit the base's tensors in no way, or in several.
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
    """Return the parameter that each of the factors is of, and whether stacks are turned around."""
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
    """Every way to give each of the factors a parameter that it fits."""
    if not levels:
        yield ()
        return
    for parameter in parameters:
        if parameter.fits(levels[0], transposed=transposed):
            others = [other for other in parameters if other is not parameter]
            for rest in _pairings(levels[1:], others, transposed=transposed):
                yield (parameter, *rest)


class _Base:
    """The base's tensors, by the names that the adapter has for them."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        # What one of the two models may have before the names of the other, as `model.`
        self._prefixes = {name.partition(".")[0] for name in headers if "." in name}

    def find(self, owner: str, leaf: str, rank: int) -> _Parameter | None:
        """Return a parameter of a module, stored as it is or expert by expert."""
        name = f"{owner}.{leaf}"
        stored = self._stored(name)
        if stored is not None:
            shape = stored.shape
            stack = Stacked(shape[0]) if len(shape) == 3 else None
            return _Parameter(name, shape, rank, ((stored.name, stack),))
        homes = (owner, owner.replace(".mlp.", ".block_sparse_moe."))
        for home, kinds in ((home, kinds) for home in homes for kinds in _APART.get(leaf, ())):
            experts = list(self._experts(home, kinds))
            if experts and all(len(matrix.shape) == 2 for matrix in experts[0]):
                return _packed(name, rank, experts)
        return None

    def _experts(self, home: str, kinds: Sequence[str]) -> Iterator[list[TensorHeader]]:
        """The matrices of one expert after another."""
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
    """A stack of which the base stores every expert by itself, its rows in pieces."""
    ends = list(accumulate((matrix.shape[0] for matrix in experts[0]), initial=0))
    pieces = tuple(
        (matrix.name, Stacked(len(experts), expert, range(start, end)))
        for expert, matrices in enumerate(experts)
        for matrix, (start, end) in zip(matrices, pairwise(ends), strict=True)
    )
    return _Parameter(name, (len(experts), ends[-1], experts[0][0].shape[1]), rank, pieces)
