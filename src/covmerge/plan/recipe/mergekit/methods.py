"""mergekit's methods in covmerge's terms: the method, its parameters, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from covmerge.base.errors import did_you_mean
from covmerge.base.text import shown
from covmerge.maths.methods import registry
from covmerge.maths.methods.mergekit import DELTA, SETTINGS
from covmerge.plan.recipe.mergekit.reading import Part, as_number, as_switch, as_whole


@dataclass(frozen=True)
class Parameter:
    """A parameter of a mergekit method."""

    ours: str | None  # its name in covmerge; None: it is accepted, but changes nothing
    default: Any  # mergekit's default; `REQUIRED`: the recipe must give a value

    def read(self, value: object) -> Any:
        if isinstance(self.default, bool):
            return as_switch(value)
        return as_whole(value) if isinstance(self.default, int) else as_number(value)


REQUIRED = object()
_INT8 = {"int8_mask": Parameter(None, False)}


@dataclass(frozen=True)
class TheirMethod:
    """A method of mergekit 0.1.5."""

    ours: str  # the corresponding method of covmerge
    # Whether it needs a base, may have one, or merges the base as one more model.
    base: Literal["required", "optional", "one_more"] = "required"
    # Parameters with one value for all models.
    shared: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    # Parameters with a value for each model except the base.
    each: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    # Values of covmerge's parameters that make the method behave like mergekit's.
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    experts: tuple[int, int | None] = (1, None)  # the fewest and the most models besides the base
    around: bool = False  # whether angles are measured from the base, if there is one
    ordered: bool = False  # whether it draws random numbers from one stream, as mergekit does

    def __post_init__(self) -> None:
        """Add the parameters that recipes give to every method and that change no number."""
        object.__setattr__(self, "shared", {**_INT8, **self.shared})


def _delta(name: str) -> TheirMethod:
    settings = SETTINGS[name]
    sparsify = settings.get("sparsify", "none")
    of_sparsity = {"band": "gamma", "ranked": "epsilon"}.get(sparsify)
    shares = {"gamma": 0.01, "epsilon": 0.15}
    return TheirMethod(
        DELTA,
        shared={
            "normalize": Parameter("normalize", settings.get("normalize", False)),
            "rescale": Parameter("rescale", settings.get("rescale", False)),
            "lambda": Parameter("scale", 1.0),
        },
        each={
            "weight": Parameter("weight", REQUIRED),
            "density": Parameter("density", 1.0),
            **({of_sparsity: Parameter(of_sparsity, shares[of_sparsity])} if of_sparsity else {}),
        },
        fixed={k: v for k, v in settings.items() if k in ("sparsify", "consensus")},
        ordered=sparsify in ("bernoulli", "ranked"),
    )


_WEIGHT = {"weight": Parameter("weight", REQUIRED)}
_T = {"t": Parameter("t", REQUIRED)}
METHODS: Mapping[str, TheirMethod] = {
    **{name: _delta(name) for name in SETTINGS},
    "linear": TheirMethod(
        "linear", "one_more", {"normalize": Parameter("normalize", True)}, _WEIGHT
    ),
    "passthrough": TheirMethod(
        "passthrough", "one_more", each={"scale": Parameter("scale", None)}, experts=(1, 1)
    ),
    "karcher": TheirMethod(
        "karcher",
        "one_more",
        {"max_iter": Parameter("max_iter", 10), "tol": Parameter("tol", 1e-5)},
    ),
    "slerp": TheirMethod("slerp", shared=_T, experts=(1, 1)),
    "nearswap": TheirMethod("nearswap", shared=_T, experts=(1, 1)),
    "arcee_fusion": TheirMethod("arcee_fusion", experts=(1, 1)),
    "model_stock": TheirMethod(
        "model_stock", shared={"filter_wise": Parameter("filter_wise", False)}, experts=(2, None)
    ),
    "sce": TheirMethod("sce", shared={"select_topk": Parameter("select_topk", 1.0)}),
    "ram": TheirMethod("ram", shared={"epsilon": Parameter("epsilon", 1e-5)}),
    "ramplus_tl": TheirMethod(
        "ram",
        shared={
            "epsilon": Parameter("epsilon", 1e-5),
            "r": Parameter("boost", 0.1),
            "alpha": Parameter("most", 0.2),
        },
    ),
    "multislerp": TheirMethod(
        "multislerp",
        "optional",
        {"normalize_weights": Parameter("normalize_weights", True), "eps": Parameter("eps", 1e-8)},
        _WEIGHT,
        around=True,
    ),
    "nuslerp": TheirMethod(
        "nuslerp",
        "optional",
        {
            "nuslerp_flatten": Parameter("nuslerp_flatten", True),
            "nuslerp_row_wise": Parameter("nuslerp_row_wise", False),
        },
        _WEIGHT,
        experts=(2, 2),
        around=True,
    ),
}


def named(part: Part) -> TheirMethod:
    """Return the method that a recipe names: mergekit's, or one of covmerge's with its own parameters."""
    name = part.data.get("merge_method")
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    if isinstance(name, str) and name in registry.names():
        ours = registry.get(name)
        alone = ours.without_base(ours.resolve({}))
        return TheirMethod(name, "optional" if alone else "required", experts=ours.experts)
    hint = did_you_mean(str(name), [*METHODS, *registry.names()])
    part.refuse(
        f"merge_method is {shown(name)}; it is one of mergekit's ({', '.join(sorted(METHODS))}) or of "
        f"covmerge's (`covmerge methods`).{hint}",
        "merge_method",
    )
