"""The table of methods: each registers its kernel with what it needs, costs and promises."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics
from covmerge.base.errors import TensorError
from covmerge.base.types import LinearGroup, LowRank, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.lapack import LinAlgError, norm
from covmerge.maths.linalg.stored import all_finite
from covmerge.maths.methods.other_names import OTHER_NAMES
from covmerge.maths.methods.scaled import run_near_one
from covmerge.maths.registry import Declared, Parameters, Table

Kernel = Callable[..., Merged | Tensor]
# (d_out, d_in, experts, itemsize), and by keyword the parameters that it follows, with their defaults.
CostModel = Callable[..., Cost]

# What a method must see at once. The first three take tensors of any shape, as they are stored.
Unit = Literal["element", "row", "tensor", "matrix"]
Data = Literal["none", "gram", "fisher"]
Others = Literal["average", "base"]
# On which sides a layer may be written in an orthonormal basis that holds its updates.
Sides = Literal["none", "outputs", "inputs", "both"]
# What it sees of each expert: Δ_t, or W_t itself.
Sees = Literal["updates", "weights"]
_NO_FLOAT = "without overflow"  # of torch's message where a factor is too large for the dtype


@dataclass(frozen=True)
class GlobalPass:
    """A pass over all tensors before the merge: how large must an entry be to be kept?

    The threshold of expert t is the (N − ⌊density·N⌋)-th smallest of the N magnitudes that
    `vectors` gives for it over all tensors of the method.

    Attributes:
        density: share of the entries that is kept, from the method's parameters; None: these
            parameters need no global pass.
        vectors: `(group, parameters)` -> one tensor per expert.
    """

    density: Callable[[Parameters], float | None]
    vectors: Callable[[LinearGroup, Parameters], tuple[Tensor, ...]]


# Older names of what is declared, for one release.
FORMER_DECLARATIONS = {"noticed": "diagnostics", "overview": "tensor_pass", "survey": "global_pass"}


class Known(Protocol):
    """What a tensor pass found of an expert's tensor."""

    def rows(self, rows: range) -> Any:
        """Return what it says of some rows."""
        ...


@dataclass(frozen=True)
class AnyRows:
    """What a tensor pass found that is the same of any rows."""

    found: Any

    def rows(self, rows: range) -> Any:
        """Return it."""
        del rows
        return self.found


class Groups(Protocol):
    """A tensor in blocks of rows, each time from the first."""

    def __call__(self, experts: Sequence[int] | None = None) -> Iterator[LinearGroup]:
        """Yield the part of the one expert that is read, or of those at these places (None: all)."""
        ...


@dataclass(frozen=True)
class TensorPass:
    """A pass over a whole tensor before its rows are merged, of a method that sees a tensor.

    With it a large tensor is read twice or more and merged row by row, so that it is held of one expert at
    most, or of as many tensors as the pass makes; the result is, bit for bit, that of the whole.

    Attributes:
        of: `(groups, shape, parameters)` -> what its rows must know of the whole.
        entry_bytes: memory for each entry that this takes at most, with what is kept, from the parameters.
        together: whether it reads all experts, once; else each expert by itself.
        applies: whether it tells all that is needed, with these parameters.
        readings: how often it reads its input, as far as the parameters say.
    """

    of: Callable[[Groups, Sequence[int], Parameters], Known]
    entry_bytes: Callable[[Parameters], float]
    together: bool = False
    applies: Callable[[Parameters], bool] = lambda parameters: True
    readings: Callable[[Parameters], int] = lambda parameters: 1


@dataclass(frozen=True)
class Laws:
    """What a method promises; `covmerge.testing` checks every line of it.

    All methods: zero updates give the base; transposed storage gives the transposed result. Of the
    rest, None is no promise, and nothing is checked; True and False are held to.

    Attributes:
        order_invariant: permuting the experts changes nothing beyond rounding.
        scale_equivariant: Δ → sΔ gives s times the merged update, at the default parameters; a base
            that it asks for stays as it is.
        rotation_equivariant: Δ → QΔPᵀ with orthogonal Q, P gives Q(merged update)Pᵀ; statistics of
            the layer's inputs, and the base, turn with them.
        replicas: f(parameters, T) such that T copies of one update Δ give f·Δ; None where they give
            no multiple of it, NaN where that depends on Δ.
        replicas_text: the same for a reader.
        scales_with: whether `scale_equivariant` holds with other parameters too.
    """

    order_invariant: bool | None = None
    scale_equivariant: bool | None = None
    rotation_equivariant: bool | None = None
    replicas: Callable[[Parameters, int], float | None] | None = None
    replicas_text: str = "nothing that is declared"
    scales_with: Callable[[Parameters], bool] = lambda parameters: True

    def copies_give(
        self, replicas: Callable[[Parameters, int], float | None] | float | None, text: str
    ) -> Laws:
        """Return these with `replicas`, one number for all parameters or a function, and its text."""
        if callable(replicas):
            return replace(self, replicas=replicas, replicas_text=text)

        def same(parameters: Parameters, count: int) -> float | None:
            return replicas

        return replace(self, replicas=same, replicas_text=text)


# What methods promise: all three; all but rotations, as the axes matter; all but the scale; order alone.
EQUIVARIANT = Laws(order_invariant=True, scale_equivariant=True, rotation_equivariant=True)
AXIS_BOUND = replace(EQUIVARIANT, rotation_equivariant=False)
SCALE_BOUND = replace(EQUIVARIANT, scale_equivariant=False)
BOUND = replace(AXIS_BOUND, scale_equivariant=False)
# Absolute bounds, which usual updates may not reach, can break the scale: nothing is promised of it.
UP_TO_BOUNDS = replace(EQUIVARIANT, scale_equivariant=None)
AXIS_BOUND_UP_TO_BOUNDS = replace(AXIS_BOUND, scale_equivariant=None)


@dataclass(frozen=True)
class Reference:
    """The paper a method comes from.

    Attributes:
        authors: in the paper's order, as its own citation has them; empty where that was not at hand.
    """

    title: str
    venue: str
    arxiv: str
    equations: str
    authors: tuple[str, ...] = ()


def generous_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """What a method on matrices is taken to cost that does not say: a bound that most keep far below.

    A full SVD of every update in float64, two more copies of all updates, and two square matrices of
    each side.
    """
    short, long = sorted((d_out, d_in))
    flops = 2.0 * count * (6.0 * short * short * long + 20.0 * short**3)
    copies = 2 * (count + 2) * d_out * d_in
    return Cost(flops, 8 * (copies + 2 * (d_out * d_out + d_in * d_in)), flops)


@dataclass(frozen=True)
class PerEntry:
    """What an entry of an update costs.

    Attributes:
        flops: operations.
        copies: numbers that are held beside inputs and result, in the dtype of the computation.
        bytes: what is held in other dtypes.
    """

    flops: float = 0.0
    copies: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class EntryCost:
    """The cost model of a method that goes entry by entry.

    Attributes:
        each: of an entry of each expert.
        once: of an entry, however many experts there are.
    """

    each: PerEntry = field(default_factory=PerEntry)
    once: PerEntry = field(default_factory=PerEntry)

    def __call__(self, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
        each, once = self.each, self.once
        copies, other = count * each.copies + once.copies, count * each.bytes + once.bytes
        flops = float(count * each.flops + once.flops)
        return Cost(flops * d_out * d_in, (copies * itemsize + other) * d_out * d_in)


# One multiply-add an entry and expert; nothing is held beside inputs and result.
MULTIPLY_ADD = EntryCost(PerEntry(2))
# The same bound of a method on tensors of any shape: a hundred operations an entry, copies in float64.
GENEROUS_ENTRY_COST = EntryCost(PerEntry(100, bytes=16), PerEntry(200, bytes=32))


def followed_by(cost: CostModel) -> tuple[str, ...]:
    """Names of the parameters that a cost model follows."""
    given = inspect.signature(cost).parameters.values()
    return tuple(each.name for each in given if each.kind is inspect.Parameter.KEYWORD_ONLY)


def check_cost(declared: Declared, cost: CostModel) -> None:
    """Refuse a cost model that follows parameters which there are not.

    Raises:
        ValueError: the message names one.
    """
    unknown = next((name for name in followed_by(cost) if not declared.has(name)), None)
    if unknown is not None:
        raise ValueError(
            f"{declared.kind} '{declared.name}': its cost follows '{unknown}', which is no parameter "
            "of it"
        )


def cost_with(declared: Declared, cost: CostModel, parameters: Parameters) -> CostModel:
    """Return its cost model `(d_out, d_in, experts, itemsize) -> Cost` at these parameters."""
    known = {name: parameters[name] for name in followed_by(cost)}

    def at(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
        with declared.naming_failures(f"its cost of a {d_out} x {d_in} matrix"):
            return cost(d_out, d_in, count, itemsize, **known)

    return at


@dataclass(frozen=True)
class Method(Declared):
    """A registered method; all but its name and its function may be left undeclared.

    Attributes:
        name: as written in recipes.
        kernel: pure function `(LinearGroup, *, parameters) -> Merged`, or the merged update alone.
        equation: one line of mathematics, in Unicode.
        reference: the paper; None: there is none.
        laws: what the result satisfies; undeclared, it promises nothing.
        cost: FLOPs and workspace of one matrix, for the plan; where parameters change them, these are
            its keyword arguments. Undeclared, `generous_cost`, or `GENEROUS_ENTRY_COST` where
            tensors of any shape are taken.
        unit: what it must see at once, or a function of the parameters that says so. A `matrix`
            method merges the oriented matrices of linear layers; the others take tensors of any
            shape as they are stored: by `element`, by `row` (of the first axis; a tensor with one
            axis is one row), or whole.
        others: what a matrix method does with tensors that are not matrices.
        data: the statistics of the experts' data that it needs.
        global_pass: what it must know of all tensors before the first is merged.
        tensor_pass: what of a whole tensor its rows need to know, where it sees a tensor; then it goes by
            rows, with `LinearGroup.known`, where a tensor is large.
        factored: the sides on which its result turns with low-rank updates, so that adapters are
            merged exactly in a basis of their factors there (see `covmerge.maths.methods.factored`); or a
            function of the parameters that says so.
        diagnostics: the type of its diagnostics. Undeclared, it has none.
        writes_masks: returns `Merged.masks`: the result is a model per expert, not one for all.
        needs_base: `LinearGroup.base` is W_0, oriented like the updates. Not with `factored`: the
            base has no basis of low rank.
        sees: of each expert its update, or its `weights` bit for bit (`LinearGroup.models`), and then
            the base's too (`needs_base`). A method that sees weights takes tensors as they are stored,
            and a tensor that it returns is W̄ itself.
        experts: the fewest and the most experts that it merges; None: there is no most.
        base_norm: `LinearGroup.base_norm` is how long W_0 is, where it was read; it can do without.
        weighted: whether experts' weights have a part in the result.
        stands_alone: whether the merged weights do not depend on W_0, so that there need not be one; or a
            function of the parameters that says so.
        published_tuning: what the published numbers chose by labelled data; empty for nothing.
        family_defaults: parameters that the paper sets per model family.
    """

    kind: ClassVar[str] = "method"

    kernel: Kernel
    equation: str = ""
    reference: Reference | None = None
    laws: Laws = field(default_factory=Laws)
    unit: Unit | Callable[[Parameters], Unit] = "matrix"
    cost: CostModel = generous_cost
    others: Others = "average"
    data: Data = "none"
    global_pass: GlobalPass | None = None
    tensor_pass: TensorPass | None = None
    factored: Sides | Callable[[Parameters], Sides] = "none"
    diagnostics: type[Diagnostics] = Diagnostics
    writes_masks: bool = False
    needs_base: bool = False
    sees: Sees = "updates"
    experts: tuple[int, int | None] = (1, None)
    base_norm: bool = False
    weighted: bool = True
    stands_alone: bool | Callable[[Parameters], bool] = False
    published_tuning: str = ""
    family_defaults: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        super().__post_init__()
        self.one_of("unit", Unit)
        self.one_of("others", Others)
        self.one_of("data", Data)
        self.one_of("factored", Sides)
        self.one_of("sees", Sees)
        if self.sees == "weights":
            object.__setattr__(self, "needs_base", True)
            if not self.takes_any_shape or self.data != "none" or self.global_pass is not None:
                raise ValueError(
                    f"method '{self.name}' sees weights: it takes tensors as they are stored, without "
                    "data and without a global pass; declare another `unit`, and leave out the others"
                )
        if self.needs_base and self.factored != "none":
            raise ValueError(
                f"method '{self.name}' needs the base and is `factored`: the base has no basis of low "
                "rank; leave `factored` out"
            )
        check_cost(self, self.cost)
        if self.cost is generous_cost and self.takes_any_shape:
            object.__setattr__(self, "cost", GENEROUS_ENTRY_COST)

    @property
    def takes_any_shape(self) -> bool:
        """Whether it merges tensors as they are stored rather than oriented matrices."""
        return self.unit != "matrix"

    @property
    def seeded(self) -> bool:
        """Whether it draws random numbers."""
        return self.has("seed")

    def takes(self, count: int) -> bool:
        """Whether it merges so many experts."""
        least, most = self.experts
        return least <= count and (most is None or count <= most)

    def without_base(self, parameters: Parameters) -> bool:
        """Whether the merged weights do not depend on the base with these parameters."""
        alone = self.stands_alone
        return alone(parameters) if callable(alone) else alone

    @property
    def experts_text(self) -> str:
        """How many experts it merges, in words; "" for any number."""
        least, most = self.experts
        if most is not None:
            number = str(most) if least == most else f"{least} to {most}"
            return f"{number} expert{'s' if most > 1 else ''} beside the base"
        return f"{least} experts or more" if least > 1 else ""

    def unit_for(self, parameters: Parameters) -> Unit:
        """Return what it must see at once with these parameters."""
        return self.unit(parameters) if callable(self.unit) else self.unit

    def sides_for(self, parameters: Parameters) -> Sides:
        """Return the sides on which low-rank updates may be written in a basis of their factors."""
        return self.factored(parameters) if callable(self.factored) else self.factored

    def factored_for(self, parameters: Parameters) -> bool:
        """Return whether adapters are merged exactly on their factors with these parameters."""
        return self.sides_for(parameters) != "none"

    def is_linear_for(self, parameters: Parameters) -> bool:
        """Return whether the merged update is Σ c_t Δ_t, with numbers c_t that no update changes.

        It is where an element depends on that of each update and on nothing else, and the result turns
        with the updates on both sides: no other function of elements turns.
        """
        needs_a_pass = self.global_pass is not None or self.tensor_pass is not None
        needs_more = needs_a_pass or self.base_norm or self.data != "none" or self.seeded
        gives_more = self.diagnostics is not Diagnostics or self.writes_masks
        if needs_more or gives_more or self.unit_for(parameters) != "element":
            return False
        return self.sides_for(parameters) == "both"

    def coefficients_for(self, weights: Sequence[float], parameters: Parameters) -> list[float]:
        """Return the c_t of a linear method: c_t is what it makes of 1 in update t and 0 in the others."""
        ones = torch.eye(len(weights), dtype=torch.float64).unbind()
        return list(map(float, self(LinearGroup(ones, tuple(weights)), **parameters).delta))

    def scales_with(self, parameters: Parameters) -> bool:
        """Return whether Δ → sΔ gives s times the merged update with these parameters."""
        return self.laws.scale_equivariant is True and self.laws.scales_with(parameters)

    def ranked(self, parameters: Parameters) -> float | None:
        """Return the density that its global pass looks for; None: no global pass."""
        if self.global_pass is None:
            return None
        with self.naming_failures("the density of its global pass"):
            return self.global_pass.density(parameters)

    def ranked_values(self, group: LinearGroup, parameters: Parameters) -> tuple[Tensor, ...]:
        """Return per expert the values whose magnitudes its global pass ranks."""
        assert self.global_pass is not None
        with self.naming_failures("its global pass"):
            return self.global_pass.vectors(group, parameters)

    def resolve(self, given: Parameters, family: str | None = None) -> dict[str, Any]:
        """Return all parameters: given ones over the family's over the paper's defaults.

        Raises:
            RecipeError: an unknown name, or a value out of its range.
        """
        return super().resolve({**self.family_defaults.get(family or "", {}), **given})

    def __call__(self, group: LinearGroup, **parameters: Any) -> Merged:
        """Run the kernel on one layer; `parameters` as `resolve` returns them.

        Raises:
            TensorError: the updates cannot be merged, or the result is not finite.
        """
        if not self.takes(len(group.weights)):
            raise TensorError(
                f"method '{self.name}' merges {self.experts_text}, and there are {len(group.weights)}: "
                "choose another method"
            )
        sizes = [list(tensor.shape) for tensor in group.tensors]
        try:
            with self.naming_failures(f"updates of {sizes}"):
                if self._scales(parameters):
                    merged = run_near_one(self._run, group, parameters, self.diagnostics.lengths)
                else:
                    merged = self._run(group, **parameters)
        except (LinAlgError, ArithmeticError) as error:
            raise self.beyond(
                group.tensors, f"fails ({type(error).__name__.strip('_')})", parameters
            ) from error
        except RuntimeError as error:
            if _NO_FLOAT not in str(error):
                raise
            raise self.beyond(group.tensors, "overflows", parameters) from error
        if not all_finite(merged.delta):
            raise self.beyond(group.tensors, "gives NaN or Inf", parameters)
        return merged

    def _scales(self, parameters: Parameters) -> bool:
        """Whether it is run on updates near 1, whatever their size."""
        return self._multiplies and self.scales_with(parameters)

    def _run(self, group: LinearGroup, **parameters: Any) -> Merged:
        """Run the kernel, and see that it gives what can be added to the base."""
        with self.leaving(group.given):
            found = self.kernel(group, **parameters)
        return self._fitting(group, found)

    def _fitting(self, group: LinearGroup, found: object) -> Merged:
        """See that a result can be added to the base; other people's may be anything."""
        merged = Merged(found) if isinstance(found, Tensor) else found
        if not isinstance(merged, Merged):
            raise TensorError(
                f"method '{self.name}' returns a {type(found).__name__}: it must return the merged "
                "update as a tensor, or a covmerge.Merged"
            )
        given, wanted = merged.delta, group.tensors[0]
        if (given.shape, given.dtype, given.device) != (wanted.shape, wanted.dtype, wanted.device):
            raise TensorError(
                f"method '{self.name}' returns {list(given.shape)} {given.dtype} on {given.device} of "
                f"updates that are {list(wanted.shape)} {wanted.dtype} on {wanted.device}: it must "
                "return the merged update in their shape, dtype and device"
            )
        if given.layout is not torch.strided:
            raise TensorError(
                f"method '{self.name}' returns a tensor of layout {given.layout}: it must return a dense "
                "one, such as its `.to_dense()`"
            )
        if given.requires_grad:
            given = given.detach()  # it will be added to, which torch would refuse
            merged = replace(merged, delta=given)
        if self.sees == "weights":
            assert group.base is not None
            return replace(merged, delta=given - group.base, weights=given)
        if group.base is not None and given.data_ptr() == group.base.data_ptr():
            return replace(merged, delta=given.clone())  # it will be added to
        return merged

    @property
    def _multiplies(self) -> bool:
        """Whether it multiplies entries of the updates with each other, or with data."""
        return not self.takes_any_shape or self.data != "none"

    def beyond(
        self, updates: Sequence[Tensor | LowRank], what: str, parameters: Parameters
    ) -> TensorError:
        """Say that finite updates are beyond this method, and which would be within it."""
        norms = [sqrt(u.square_norm()) if isinstance(u, LowRank) else norm(u) for u in updates]
        sizes = ", ".join(f"{size:.3g}" for size in norms)
        if self.scales_with(parameters):
            why = (
                "these norms, weights or parameters are too far apart, or the result is too large "
                f"for {updates[0].dtype}: compute in float64"
            )
        else:
            why = (
                "its constants are absolute, so that it needs updates of usual size: multiply them "
                "by one factor and divide the result by it"
            )
        return TensorError(
            f"method '{self.name}' {what} on finite {self.sees} of norms {sizes} (in the experts' "
            f"order); {why}, or merge this tensor by `average`"
        )


_Function = TypeVar("_Function", bound=Kernel)

registry: Table[Method] = Table(Method, "covmerge.methods", OTHER_NAMES)


def register(name: str, **declared: Any) -> Callable[[_Function], _Function]:
    """Register a function `(group: LinearGroup, *, parameters) -> Merged` as the method `name`.

    Its keyword arguments are the parameters of the method, with defaults, and with ranges and
    descriptions in their annotations. It may return the merged update alone, as a tensor. What it may
    not do: modify the updates, or depend on anything but its arguments.

    Args:
        name: as it is to be written in recipes and on the command line.
        **declared: what it needs, costs and promises: see `Method`. All of it may be left out: then
            it sees one oriented matrix of a linear layer at a time, other tensors are averaged, its
            cost is bounded generously, and it promises nothing.

    Raises:
        ValueError: the name is taken, or cannot be one.

    Example:
        >>> import torch, covmerge
        >>> @covmerge.register("mine", equation="W̄ = W₀ + max_t |Δ_t|", unit="element")
        ... def mine(group, *, scale: float = 1.0):
        ...     return scale * torch.stack(group.updates).abs().amax(0)
        >>> covmerge.merge_layer([torch.eye(2), -3 * torch.eye(2)], "mine", scale=0.5).tolist()
        [[1.5, 0.0], [0.0, 1.5]]
        >>> covmerge.methods.registry.unregister("mine")
    """
    for old in FORMER_DECLARATIONS.keys() & declared.keys():
        new = FORMER_DECLARATIONS[old]
        warnings.warn(
            f"register({old}=…) is now register({new}=…)", DeprecationWarning, stacklevel=2
        )
        declared[new] = declared.pop(old)
    return registry.register(name, **declared)
