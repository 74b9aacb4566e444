"""The table of methods: each registers its kernel with its needs, cost and promises."""

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
from covmerge.base.errors import RecipeError, TensorError
from covmerge.base.types import Json, LinearGroup, LowRank, Measured, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.lapack import LinAlgError, exponent_of, norm
from covmerge.maths.linalg.stored import all_finite
from covmerge.maths.methods.other_names import OTHER_NAMES
from covmerge.maths.methods.resolution import without_rounding
from covmerge.maths.registry import Declared, Parameters, Table

Kernel = Callable[..., Merged | Tensor]
# (d_out, d_in, experts, itemsize), and as keywords with defaults the parameters on which the cost
# depends.
CostModel = Callable[..., Cost]

# The part of a tensor that a method must see at once. The first three take stored tensors of any shape.
Unit = Literal["element", "row", "tensor", "matrix"]
Data = Literal["none", "gram", "fisher"]
Others = Literal["average", "base"]
# The sides on which a layer may be written in an orthonormal basis that holds its updates.
Sides = Literal["none", "outputs", "inputs", "both"]
# What a method sees of each expert: Δ_t, or W_t itself.
Sees = Literal["updates", "weights"]
_NO_FLOAT = "without overflow"  # part of torch's message for a factor too large for the dtype
_STATISTICS = {"gram": "Gram matrix", "fisher": "Fisher information"}
# Exponents of the largest entry that need no scaling: d³ times its cube is far below float32's 2^127, and
# cubes of entries 2^-20 as large are far above its 2^-149.
_EASY = 20


@dataclass(frozen=True)
class GlobalPass:
    """A pass over all tensors before the merge: it finds the magnitude from which entries are kept.

    The threshold of expert t is the (N − ⌊density·N⌋)-th smallest of the N magnitudes that
    `vectors` gives for it over all tensors of the method.

    Attributes:
        density: function of the method's parameters that returns the share of entries to keep; None: these
            parameters need no global pass.
        vectors: `(group, parameters)` -> one tensor per expert.
    """

    density: Callable[[Parameters], float | None]
    vectors: Callable[[LinearGroup, Parameters], tuple[Tensor, ...]]


# Older names of declarations, accepted for one release.
FORMER_DECLARATIONS = {"noticed": "diagnostics", "overview": "tensor_pass", "survey": "global_pass"}


class Known(Protocol):
    """The result of a tensor pass for one expert's tensor."""

    def rows(self, rows: range) -> Any:
        """Return the part of the result that some rows need."""
        ...


@dataclass(frozen=True)
class AnyRows:
    """A result of a tensor pass that applies to any rows."""

    found: Any

    def rows(self, rows: range) -> Any:
        del rows
        return self.found


class Groups(Protocol):
    """A tensor in blocks of rows; each call starts from the first."""

    def __call__(self, experts: Sequence[int] | None = None) -> Iterator[LinearGroup]:
        """Yield blocks with one expert's part, or with those of the experts at these places (None: all)."""
        ...


@dataclass(frozen=True)
class TensorPass:
    """A pass over a whole tensor before its rows are merged, for methods that need the whole tensor.

    With it a large tensor is read twice or more and merged row by row. Then at most one expert's whole
    tensor is held, or as many tensors as the pass makes. The result equals that of the whole, bit for
    bit.

    Attributes:
        of: `(groups, shape, parameters)` -> the facts about the whole that its rows need.
        entry_bytes: function of the parameters: the most memory per entry that the pass takes, result
            included.
        together: whether the pass reads all experts at once; else it runs for each expert by itself.
        applies: whether the pass finds all that these parameters need.
        readings: how often the pass reads its input with these parameters.
    """

    of: Callable[[Groups, Sequence[int], Parameters], Known]
    entry_bytes: Callable[[Parameters], float]
    together: bool = False
    applies: Callable[[Parameters], bool] = lambda parameters: True
    readings: Callable[[Parameters], int] = lambda parameters: 1


@dataclass(frozen=True)
class Laws:
    """The promises of a method; `covmerge.testing` checks each of them.

    All methods promise that zero updates give the base, and that transposed storage gives the transposed
    result. In the attributes below None is no promise and is not checked; True and False are.

    Attributes:
        order_invariant: permuting the experts changes nothing beyond rounding.
        scale_equivariant: Δ → sΔ gives s times the merged update, at the default parameters; the base, if
            the method uses it, stays as it is.
        rotation_equivariant: Δ → QΔPᵀ with orthogonal Q, P gives Q(merged update)Pᵀ; statistics of the
            layer's inputs, and the base, are rotated with them.
        replicas: f(parameters, T) such that T copies of one update Δ give f·Δ; None if they give no
            multiple of it, NaN if that depends on Δ.
        replicas_text: `replicas` in words.
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
        """Return these laws with `replicas`, a number for all parameters or a function, and its text."""
        if callable(replicas):
            return replace(self, replicas=replicas, replicas_text=text)

        def same(parameters: Parameters, count: int) -> float | None:
            return replicas

        return replace(self, replicas=same, replicas_text=text)


# Common promises: all three; all but rotations, as the axes matter; all but the scale; order alone.
EQUIVARIANT = Laws(order_invariant=True, scale_equivariant=True, rotation_equivariant=True)
AXIS_BOUND = replace(EQUIVARIANT, rotation_equivariant=False)
SCALE_BOUND = replace(EQUIVARIANT, scale_equivariant=False)
BOUND = replace(AXIS_BOUND, scale_equivariant=False)
# Absolute bounds, which usual updates may not reach, can break scale equivariance: it is not promised.
UP_TO_BOUNDS = replace(EQUIVARIANT, scale_equivariant=None)
AXIS_BOUND_UP_TO_BOUNDS = replace(AXIS_BOUND, scale_equivariant=None)


@dataclass(frozen=True)
class Reference:
    """The paper that a method comes from.

    Attributes:
        authors: in the paper's order, as in its own citation; empty if that was not at hand.
    """

    title: str
    venue: str
    arxiv: str
    equations: str
    authors: tuple[str, ...] = ()


def generous_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Return the cost assumed for a method on matrices without a declared cost; most cost far less.

    It is that of a full SVD of every update in float64, two more copies of all updates, and two square
    matrices of each side.
    """
    short, long = sorted((d_out, d_in))
    flops = 2.0 * count * (6.0 * short * short * long + 20.0 * short**3)
    copies = 2 * (count + 2) * d_out * d_in
    return Cost(flops, 8 * (copies + 2 * (d_out * d_out + d_in * d_in)), flops)


@dataclass(frozen=True)
class PerEntry:
    """The cost of one entry of an update."""

    flops: float = 0.0  # number of operations
    copies: int = 0  # numbers held beside inputs and result, in the dtype of the computation
    bytes: int = 0  # bytes held in other dtypes


@dataclass(frozen=True)
class EntryCost:
    """The cost model of a method that works entry by entry."""

    each: PerEntry = field(default_factory=PerEntry)  # the cost of an entry of each expert
    # the cost of an entry, whatever the number of experts
    once: PerEntry = field(default_factory=PerEntry)

    def __call__(self, d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
        each, once = self.each, self.once
        copies, other = count * each.copies + once.copies, count * each.bytes + once.bytes
        flops = float(count * each.flops + once.flops)
        return Cost(flops * d_out * d_in, (copies * itemsize + other) * d_out * d_in)


# One multiply-add per entry and expert; nothing is held beside inputs and result.
MULTIPLY_ADD = EntryCost(PerEntry(2))
# The cost assumed for methods on tensors of any shape: 100 operations per entry, copies in float64.
GENEROUS_ENTRY_COST = EntryCost(PerEntry(100, bytes=16), PerEntry(200, bytes=32))


@dataclass(frozen=True)
class Computation(Declared):
    """What methods and steps declare alike; `Method` describes it."""

    equation: str = ""
    reference: Reference | None = None
    laws: Laws = field(default_factory=Laws)
    unit: Unit | Callable[[Parameters], Unit] = "matrix"
    cost: CostModel = generous_cost
    factored: Sides | Callable[[Parameters], Sides] = "none"
    needs_base: bool = False

    def __post_init__(self) -> None:
        """Check that the declarations fit together, and that the cost depends on parameters that exist."""
        super().__post_init__()
        self.one_of("unit", Unit)
        self.one_of("factored", Sides)
        if self.needs_base and self.factored != "none":
            raise ValueError(
                f"{self.kind} '{self.name}' needs the base and is `factored`: the base has no basis of low "
                "rank; leave `factored` out"
            )
        unknown = next((name for name in self._cost_follows if not self.has(name)), None)
        if unknown is not None:
            raise ValueError(
                f"{self.kind} '{self.name}': its cost follows '{unknown}', which is no parameter of it"
            )
        if self.cost is generous_cost and self.takes_any_shape:
            object.__setattr__(self, "cost", GENEROUS_ENTRY_COST)

    @property
    def takes_any_shape(self) -> bool:
        """Whether tensors are taken as they are stored rather than as oriented matrices."""
        return self.unit != "matrix"

    def scales_with(self, parameters: Parameters) -> bool:
        """Return whether Δ → sΔ gives s times the result with these parameters."""
        return self.laws.scale_equivariant is True and self.laws.scales_with(parameters)

    @property
    def _cost_follows(self) -> tuple[str, ...]:
        given = inspect.signature(self.cost).parameters.values()
        return tuple(each.name for each in given if each.kind is inspect.Parameter.KEYWORD_ONLY)

    def cost_for(self, parameters: Parameters) -> CostModel:
        """Return the cost model `(d_out, d_in, experts, itemsize) -> Cost` with these parameters."""
        known = {name: parameters[name] for name in self._cost_follows}

        def at(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
            with self.naming_failures(f"its cost of a {d_out} x {d_in} matrix"):
                return self.cost(d_out, d_in, count, itemsize, **known)

        return at


@dataclass(frozen=True)
class Method(Computation):
    """A registered method. Only its name and its kernel have to be declared.

    Attributes:
        name: its name in recipes.
        kernel: a pure function `(LinearGroup, *, parameters) -> Merged`, or one that returns the merged
            update alone.
        equation: one line of mathematics, in Unicode.
        reference: the paper; None: there is no paper.
        laws: the promises about the result; by default none.
        cost: function for the FLOPs and workspace of one matrix, used by plans; parameters that change
            them are its keyword arguments. By default `generous_cost`, or `GENEROUS_ENTRY_COST` for
            methods that take tensors of any shape.
        unit: what the method must see at once, or a function of the parameters that returns it. A `matrix`
            method merges the oriented matrices of linear layers; the others take tensors of any shape as
            they are stored: by `element`, by `row` (of the first axis; a tensor with one axis is one row),
            or whole.
        others: how a matrix method treats tensors that are not matrices.
        data: the statistics of the experts' data that the method needs.
        global_pass: the pass over all tensors that the method needs before the first is merged.
        tensor_pass: for a method that sees whole tensors, the pass that collects what its rows need of the
            whole; a large tensor is then merged by rows, with `LinearGroup.known`.
        factored: the sides on which the result turns with low-rank updates, so that adapters are merged
            exactly in a basis of their factors there (see `covmerge.maths.methods.factored`), or a
            function of the parameters that returns them.
        diagnostics: the type of the method's diagnostics; by default it has none.
        writes_masks: whether the method returns `Merged.masks`; its result is one model per expert.
        needs_base: whether the method needs `LinearGroup.base`, W_0 oriented like the updates. It excludes
            `factored`, because the base has no basis of low rank.
        sees: whether the method sees the `updates` or the `weights` bit for bit (`LinearGroup.models`, and
            the base's by `needs_base`). A method that sees weights takes tensors as they are stored, and a
            tensor that it returns is W̄ itself.
        experts: the least and the largest number of experts that it merges; None: there is no limit.
        base_norm: whether the method uses `LinearGroup.base_norm`, the norm of W_0, where it was read.
        weighted: whether the experts' weights affect the result.
        stands_alone: whether the merged weights do not depend on W_0, so that no base is needed, or a
            function of the parameters that returns it.
        published_tuning: what the published results tuned on labelled data; empty: nothing.
        family_defaults: parameters that the paper sets per model family.
    """

    kind: ClassVar[str] = "method"

    kernel: Kernel
    others: Others = "average"
    data: Data = "none"
    global_pass: GlobalPass | None = None
    tensor_pass: TensorPass | None = None
    diagnostics: type[Diagnostics] = Diagnostics
    writes_masks: bool = False
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
        """Check that the declarations fit together."""
        self.one_of("sees", Sees)
        if self.sees == "weights":
            object.__setattr__(self, "needs_base", True)
        super().__post_init__()
        self.one_of("others", Others)
        self.one_of("data", Data)
        more = not self.takes_any_shape or self.data != "none" or self.global_pass is not None
        if self.sees == "weights" and more:
            raise ValueError(
                f"method '{self.name}' sees weights: it takes tensors as they are stored, without data and "
                "without a global pass; declare another `unit`, and leave out the others"
            )
        if self.data == "gram" and self.takes_any_shape:
            raise ValueError(
                f"method '{self.name}' needs Gram matrices, which belong to oriented matrices: leave out "
                "`unit`"
            )

    @property
    def seeded(self) -> bool:
        """Whether the method draws random numbers."""
        return self.has("seed")

    def takes(self, count: int) -> bool:
        """Return whether the method merges `count` experts."""
        least, most = self.experts
        return least <= count and (most is None or count <= most)

    def without_base(self, parameters: Parameters) -> bool:
        """Return whether the merged weights do not depend on the base with these parameters."""
        alone = self.stands_alone
        return alone(parameters) if callable(alone) else alone

    @property
    def experts_text(self) -> str:
        """How many experts the method merges, in words; "" for any number."""
        least, most = self.experts
        if most is not None:
            number = str(most) if least == most else f"{least} to {most}"
            return f"{number} expert{'s' if most > 1 else ''} beside the base"
        return f"{least} experts or more" if least > 1 else ""

    def unit_for(self, parameters: Parameters) -> Unit:
        """Return the unit that the method must see at once with these parameters."""
        return self.unit(parameters) if callable(self.unit) else self.unit

    def sides_for(self, parameters: Parameters) -> Sides:
        """Return the sides on which low-rank updates may be written in a basis of their factors."""
        return self.factored(parameters) if callable(self.factored) else self.factored

    def factored_for(self, parameters: Parameters) -> bool:
        """Return whether adapters are merged exactly on their factors with these parameters."""
        return self.sides_for(parameters) != "none"

    def is_linear_for(self, parameters: Parameters) -> bool:
        """Return whether the merged update is Σ c_t Δ_t, with numbers c_t that no update changes.

        That is so if an element depends on the same element of each update only, and the result turns
        with the updates on both sides: only linear functions of elements do.
        """
        needs_a_pass = self.global_pass is not None or self.tensor_pass is not None
        needs_more = needs_a_pass or self.base_norm or self.data != "none" or self.seeded
        gives_more = self.diagnostics is not Diagnostics or self.writes_masks
        if needs_more or gives_more or self.unit_for(parameters) != "element":
            return False
        return self.sides_for(parameters) == "both"

    def coefficients_for(self, weights: Sequence[float], parameters: Parameters) -> list[float]:
        """Return the c_t of a linear method: its result for 1 in update t and 0 in the others."""
        ones = torch.eye(len(weights), dtype=torch.float64).unbind()
        return list(map(float, self(LinearGroup(ones, tuple(weights)), **parameters).delta))

    def ranked(self, parameters: Parameters) -> float | None:
        """Return the density that the global pass looks for; None: there is no global pass."""
        if self.global_pass is None:
            return None
        with self.naming_failures("the density of its global pass"):
            return self.global_pass.density(parameters)

    def ranked_values(self, group: LinearGroup, parameters: Parameters) -> tuple[Tensor, ...]:
        """Return per expert the values whose magnitudes the global pass ranks."""
        assert self.global_pass is not None
        group = self._changes(group, parameters)
        with self.naming_failures("its global pass"):
            return self.global_pass.vectors(group, parameters)

    def resolve(self, given: Parameters, family: str | None = None) -> dict[str, Any]:
        """Return all parameters: given values first, then the family's, then the paper's defaults.

        Raises:
            RecipeError: a parameter is unknown, or its value is out of range.
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
        self.check_data(group.expert_statistics, sizes[0], len(sizes))
        group = self._changes(group, parameters)
        # Where entries of the updates are multiplied with each other, or with data.
        multiplies = not self.takes_any_shape or self.data != "none"
        scales = multiplies and group.thresholds is None and self.scales_with(parameters)
        try:
            with self.naming_failures(f"updates of {sizes}"):
                merged = (self._run_near_one if scales else self._run)(group, parameters)
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

    def _changes(self, group: LinearGroup, parameters: Parameters) -> LinearGroup:
        """Return the group without updates that are only rounding, for methods that see matrices."""
        given = any(parameters.get(name) is not None for name in ("rank_rtol", "rtol"))
        if self.takes_any_shape or given:
            return group
        return without_rounding(group)

    def check_data(self, statistics: Sequence[Measured], update: Sequence[int], count: int) -> None:
        """Check that `count` experts have statistics, shaped as updates of this shape need them.

        Raises:
            RecipeError: an expert has none.
            TensorError: those of an expert have another shape.
        """
        if self.data == "none":
            return
        what = _STATISTICS[self.data]
        if len(statistics) != count:
            raise RecipeError(
                f"method '{self.name}' needs the {what} of every expert, and has {len(statistics)} for "
                f"{count}: pass one for each update (data=)"
            )
        shape = [update[1]] * 2 if self.data == "gram" else list(update)
        for index, measured in enumerate(statistics):
            if list(measured.value.shape) != shape:
                raise TensorError(
                    f"method '{self.name}': the {what} of expert {index} is "
                    f"{list(measured.value.shape)}, its update {list(update)} needs {shape}: "
                    "collect it on this model"
                )

    def _run_near_one(self, group: LinearGroup, parameters: Parameters) -> Merged:
        """Run the kernel on updates scaled near 1, and scale its result back.

        A kernel multiplies entries with each other: squares in Gram matrices, cubes in Σ Δ_tC_t. Far from
        1 these leave the dtype, although updates and result are well within it. Updates are multiplied by a
        power of two, which changes no digit. Thresholds of a global pass are in units that only the method
        knows; a group with them is not scaled.
        """
        exponent = exponent_of(group.updates)
        if abs(exponent) <= _EASY:
            return self._run(group, parameters)
        # An even power, so that its square root is a power of two as well.
        factor = 2.0 ** -(exponent + exponent % 2)
        near = group.times([factor] * len(group.updates))
        if near.base_norm is not None:  # the kernel compares updates with it
            near = replace(near, base_norm=factor * near.base_norm)
        merged = self._run(near, parameters)
        lengths = self.diagnostics.lengths
        diagnostics: dict[str, Json] = {
            name: fact / factor if name in lengths and isinstance(fact, float) else fact
            for name, fact in merged.stats.items()
        }
        return replace(merged, delta=merged.delta / factor, diagnostics=diagnostics)

    def _run(self, group: LinearGroup, parameters: Parameters) -> Merged:
        """Run the kernel, and check that its result can be added to the base."""
        with self.leaving(group.given):
            found = self.kernel(group, **parameters)
        return self._fitting(group, found)

    def _fitting(self, group: LinearGroup, found: object) -> Merged:
        """Check that a result, which may come from a foreign kernel, can be added to the base."""
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
            given = given.detach()  # it will be added to in place, which torch would refuse
            merged = replace(merged, delta=given)
        if self.sees == "weights":
            assert group.base is not None
            dtype = torch.promote_types(given.dtype, torch.float32)
            delta = given.to(dtype) - group.base.to(dtype)
            return replace(merged, delta=delta, weights=given)
        if group.base is not None and given.data_ptr() == group.base.data_ptr():
            return replace(merged, delta=given.clone())  # it will be added to in place
        return merged

    def beyond(
        self, updates: Sequence[Tensor | LowRank], what: str, parameters: Parameters
    ) -> TensorError:
        """Return the error that finite updates are too large or small for the method, with a way out."""
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
    descriptions in their annotations. It may return the merged update alone, as a tensor. It must not
    modify the updates, or depend on anything but its arguments.

    Args:
        name: the method's name in recipes and on the command line.
        **declared: the method's needs, cost and promises: see `Method`. All of them may be left out: the
            method then sees one oriented matrix of a linear layer at a time, other tensors are averaged,
            its cost is bounded generously, and it promises nothing.

    Raises:
        ValueError: the name is taken, or is not a possible name.

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
