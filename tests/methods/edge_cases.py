"""Where published code breaks: its inputs drawn anew, what it returned, where covmerge differs.

The rows and the published outcomes are those of golden/edge_cases.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

PUBLISHED = json.loads((Path(__file__).parent.parent / "golden" / "edge_cases.json").read_text())

NORMAL = "normal T=4 (24,40) norm .4"
SINGLE = "T=1"
ZERO = "one task has an all-zero delta"
ALL_ZERO = "all deltas zero"
UNIT = "norms all ~1.0 (log ~ 0), homogeneous"
NEAR_UNIT = "norms 0.95..1.05"
ADAPTERS = "LoRA rank 2 of 24, T=4"
NAN = "one NaN entry in one task"
INF = "one inf entry in one task"
TINY_HETEROG = "min dim 3 heterog (ACE k=0)"
TINY = "min dim 3 homog"
MANY = "T=8 > min dim 4"
MANY_SQUARE = "T=49, min dim 49 (float floor)"
IDENTICAL = "identical deltas x4"
OPPOSITE = "opposite deltas d,-d"
HALF = "bf16 inputs"

LABELS = {
    NORMAL: "4 of 24×40, norms 0.4",
    SINGLE: "one expert",
    ZERO: "one update zero",
    ALL_ZERO: "all updates zero",
    UNIT: "norms 1",
    NEAR_UNIT: "norms 0.95 to 1.05",
    ADAPTERS: "rank 2 (adapters)",
    NAN: "one entry NaN",
    INF: "one entry Inf",
    TINY_HETEROG: "4 of 3×40, norms 30-fold",
    TINY: "4 of 3×40",
    MANY: "8 of 4×40",
    MANY_SQUARE: "49 of 49×50",
    IDENTICAL: "Δ, Δ, Δ, Δ",
    OPPOSITE: "Δ, −Δ",
    HALF: "bfloat16",
}
HETEROG = (0.4, 0.13, 0.04, 0.013)


def draw(shape=(24, 40), norms=(0.4,) * 4, seed=0, dtype=torch.float32):
    """Full-rank updates of given norms."""
    generator = torch.Generator().manual_seed(seed)
    updates = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in norms]
    return [(u * n / u.norm()).to(dtype) for u, n in zip(updates, norms, strict=True)]


def adapters(seed=0):
    """Four updates 24 × 40 of rank 2.

    Random masks follow from the bits of the updates, so these are products in float64, rounded once:
    kernels of another processor round a product in float32 otherwise.
    """
    left = draw((24, 2), norms=(1.0,) * 4, seed=seed, dtype=torch.float64)
    right = draw((2, 40), norms=(1.0,) * 4, seed=seed + 1, dtype=torch.float64)
    products = [b @ a for b, a in zip(left, right, strict=True)]
    return [(0.4 * product / product.norm()).float() for product in products]


def inputs(seed=0):
    """The updates of every row; their norms, shapes and ranks are the published ones."""
    usual = draw(seed=seed)
    one, zero = usual[0], torch.zeros_like(usual[0])
    spoiled = {value: [update.clone() for update in usual] for value in (torch.nan, torch.inf)}
    for value, updates in spoiled.items():
        updates[2][1, 3] = value
    return {
        NORMAL: usual,
        SINGLE: [one],
        ZERO: [one, zero, *usual[2:]],
        ALL_ZERO: [zero] * 4,
        UNIT: draw(norms=(1.0,) * 4, seed=seed),
        NEAR_UNIT: draw(norms=(0.95, 0.98, 1.02, 1.05), seed=seed),
        ADAPTERS: adapters(seed),
        NAN: spoiled[torch.nan],
        INF: spoiled[torch.inf],
        TINY_HETEROG: draw((3, 40), HETEROG, seed),
        TINY: draw((3, 40), seed=seed),
        MANY: draw((4, 40), (0.4,) * 8, seed),
        MANY_SQUARE: draw((49, 50), (0.4,) * 49, seed),
        IDENTICAL: [one] * 4,
        OPPOSITE: [one, -one],
        HALF: [update.bfloat16() for update in usual],
    }


@dataclass(frozen=True)
class Column:
    """A method with its parameters, beside a column of the published table or none.

    `at_most` is what the norm may come to: a multiple of the sum, the root sum of squares or the
    largest of the updates' norms.
    """

    method: str
    at_most: tuple[float, str] = (1.0, "sum")
    published: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)


# The published norms of WUDI are those of about 50 steps: identical experts of norm 0.4 give 1.59.
ADAM = {"solver": "adam", "iterations": 50}
FACTORS = "emr γ"  # this column has the rescalers of the experts instead of a merged update
FAMILIES = {
    "Covariances read off the updates": {
        "ace eps 1e-2": Column("ace", (1.5, "sum"), "ace_1e-2", {"eps": 1e-2}),
        "ace eps 1e-5": Column("ace", (1.5, "sum"), "ace_1e-5", {"eps": 1e-5}),
        "actmat": Column("actmat", published="actmat"),
        "auto": Column("auto", (1.0, "sum")),
        "average": Column("average", (1.0, "largest")),
    },
    "WUDI": {
        "wudi": Column("wudi", published="wudi"),
        "wudi adam": Column("wudi", published="wudi", parameters=ADAM),
        "wudi adam 2e-5": Column(
            "wudi", published="wudi_nlp", parameters={**ADAM, "learning_rate": 2e-5}
        ),
        "aswudi": Column("aswudi"),
        "swudi": Column("swudi"),
    },
    "Spectra": {
        "tsv_m": Column("tsv_m", (1.0, "root"), "tsvm"),
        "iso_c": Column("iso_c", published="iso_c"),
        "iso_cts": Column("iso_cts", published="iso_cts"),
        "free": Column("free", (0.7, "sum")),
    },
    "Leading directions beside the rest": {
        "cart": Column("cart"),
        "resmerge": Column("resmerge", (1.2, "largest"), "resmerge"),
    },
    "In bases of all experts' directions": {
        "dc_merge 0.1": Column("dc_merge", (1.0, "root"), "dc_merge_top0.1", {"density": 0.1}),
        "esm": Column("esm", (30.0, "sum")),
        "esm power 0": Column("esm", (1.0, "sum"), parameters={"power": 0.0, "scale": 1.0}),
    },
    "Entry by entry": {
        "task_arithmetic": Column("task_arithmetic", (0.3, "sum")),
        "ties": Column("ties", (1.0, "root"), "ties"),
        "consensus": Column("consensus", (0.3, "sum")),
        "emr": Column("emr", (1.0, "root"), "emr"),
        FACTORS: Column("emr", published="emr_rescale"),
    },
    "In a space of their own": {
        "knots": Column("knots", (1.0, "root")),
        "knots v": Column("knots", (1.0, "root"), parameters={"space": "v"}),
        "core_space": Column("core_space", (1.0, "root")),
        "core_space ties": Column(
            "core_space", (1.0, "root"), parameters={"inner": "ties", "isotropize": False}
        ),
        "ctm": Column("ctm", (1.0, "root")),
    },
    "Entries dropped at random": {
        "dare_task_arithmetic": Column("dare_task_arithmetic", (0.6, "sum")),
        "dare_ties": Column("dare_ties", (2.0, "root")),
        "della": Column("della", (2.0, "root")),
    },
    "With data, equalised": {"auto_measured": Column("auto_measured", (1.0, "sum"))},
    "With data": {
        "regmean": Column("regmean", (1.0, "largest")),
        "lot": Column("lot", (1.0, "largest")),
        "ssr": Column("ssr", (1.0, "largest")),
        "fisher": Column("fisher", (1.0, "largest")),
    },
}
COLUMNS = {name: column for columns in FAMILIES.values() for name, column in columns.items()}
NOT_IN_COVMERGE = {"tact"}  # a variant of actmat


@dataclass(frozen=True)
class Departure:
    """Cells where covmerge does not return what the published code does.

    `says` is from the documentation of the method, or of `merge_layer` where that refuses or casts.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    says: str
    published: str


ACE = ("ace eps 1e-2", "ace eps 1e-5")
WUDI = ("wudi", "wudi adam", "wudi adam 2e-5")
EVERYWHERE = (
    Departure(tuple(COLUMNS), (NAN, INF), "NaN or Inf", "NaN, an error of LAPACK, or hidden"),
    Departure(
        (*ACE, "actmat", "tsv_m", "iso_c", "iso_cts", "dc_merge 0.1"),
        (HALF,),
        "half precision is computed in float32",
        "an error",
    ),
)
DEPARTURES = {
    "Covariances read off the updates": (
        Departure(
            ACE,
            (ZERO,),
            "an expert that did not change the layer is left out of the sums",
            "its covariance is divided by a trace of 1e-12",
        ),
        Departure(ACE, (TINY_HETEROG,), "1 ≤ k ≤ rank", "k = ⌊0.3 · 3⌋ = 0, a mean of nothing"),
    ),
    "WUDI": (
        Departure(
            WUDI,
            (ZERO, ALL_ZERO),
            "An expert that did not change the layer is left out of the sums",
            "0/0",
        ),
        Departure(
            ("wudi",),
            (
                *(NORMAL, UNIT, NEAR_UNIT, ADAPTERS, TINY_HETEROG),
                *(MANY, MANY_SQUARE, IDENTICAL, HALF),
            ),
            "the default is the minimiser, not the result of 300 steps",
            "stops near the sum",
        ),
        Departure(
            ("wudi adam 2e-5",),
            tuple(row for row in LABELS if row not in (SINGLE, MANY, NAN, INF)),
            "2e-5 in the published code for RoBERTa",
            "written for 8 experts, an error for any other number above 1",
        ),
    ),
    "Spectra": (
        Departure(
            ("tsv_m",),
            (TINY_HETEROG, TINY, MANY, MANY_SQUARE),
            "keeps at least one triplet",
            "the layer silently becomes 0",
        ),
        Departure(
            ("tsv_m",),
            (ZERO,),
            "an expert that did not change the layer is left out, and T counts the others",
            "arbitrary singular vectors of the zero update join",
        ),
        Departure(
            ("tsv_m",),
            (IDENTICAL, OPPOSITE),
            "polar takes a pseudo-inverse: where experts share directions, the published factor adds "
            "arbitrary ones",
            "keeps an arbitrary side",
        ),
        Departure(
            ("iso_c",),
            (ADAPTERS,),
            "the mean and the directions are those within the numerical rank of the sum",
            "raises null directions to a mean that counts their zeros",
        ),
        Departure(
            ("iso_cts",),
            (ADAPTERS, OPPOSITE),
            "r is the numerical rank of the sum, not min(d_out, d_in)",
            "directions of rounding noise join",
        ),
        Departure(
            ("iso_cts",),
            (TINY_HETEROG, TINY, MANY, MANY_SQUARE),
            "s is at least 1 and c at least 0",
            "no direction for any task, as in Iso-C",
        ),
        Departure(
            ("iso_cts",),
            (ZERO,),
            "An expert that did not change the layer is left out, and T counts the others",
            "arbitrary singular vectors of the zero update join",
        ),
        Departure(
            ("iso_cts",),
            (IDENTICAL,),
            "polar takes a pseudo-inverse, and equal singular values at a cut are kept, both as in `tsv_m`",
            "the polar factor of repeated vectors adds arbitrary ones",
        ),
    ),
    "Leading directions beside the rest": (
        Departure(
            ("resmerge",),
            (ZERO,),
            "An expert that did not change the layer is left out",
            "it counts in every mean",
        ),
    ),
    "In bases of all experts' directions": (
        Departure(
            ("dc_merge 0.1",),
            (TINY_HETEROG, TINY, MANY, MANY_SQUARE),
            "Every other expert keeps at least one triplet",
            "the layer silently becomes 0",
        ),
        Departure(
            ("dc_merge 0.1",),
            (ZERO,),
            "An expert that did not change the layer is left out",
            "arbitrary singular vectors of the zero update join",
        ),
        Departure(
            ("dc_merge 0.1",),
            (ADAPTERS,),
            "none beyond its numerical rank",
            "directions of rounding noise join; float32 and float64 differ by 59 %",
        ),
        Departure(
            ("dc_merge 0.1",),
            (IDENTICAL,),
            "polar takes a pseudo-inverse",
            "the polar factor of repeated vectors adds arbitrary ones",
        ),
    ),
    "Entry by entry": (
        Departure(
            ("ties",),
            (OPPOSITE,),
            "where the votes cancel exactly, no sign is elected and the entry keeps the base's value",
            "elects the majority sign of the whole model",
        ),
        Departure((FACTORS,), (ZERO, ALL_ZERO), "has γ_t = 1 (published: NaN or Inf)", "0/0"),
    ),
}
# As surprising as published, and not changed.
NOTES = {
    "Covariances read off the updates": (
        "`ace`, norms 1: γ would be a quotient of rounding errors; norms that agree to rounding have "
        "γ = 0.",
        "`ace eps 1e-2`, norms 30-fold: γ fires, and Σ̄ of the residual counts ε over the tiny traces: "
        "the refinement points away from the experts, in the published code as well. At any ε an "
        "expert with ‖Δ_t‖² far below it does that; `refine: false` leaves the refinement out.",
    ),
    "WUDI": (
        "The norms of the published table are those of about 50 steps of Adam, and so are these.",
    ),
    "In bases of all experts' directions": (
        "`dc_merge 0.1`: a tenth of a core's entries vote, here and in the published code, whose "
        "`keep_topk_percent` has that default. Of layers as small as these a thousandth, with which it is "
        "called, is one entry or two.",
        "`dc_merge 0.1`, Δ, Δ, Δ, Δ: of directions that all have in common each expert keeps its own "
        "block, which comes to a fourth of them.",
        "`esm` has data, so that Δ and −Δ do not cancel. Norms 30-fold: its factors are squares of norms "
        "over their mean, and the result is 24 times as long as the updates together; with `power: 0` it "
        "is not.",
    ),
    "Entry by entry": (
        "`emr γ`: what the experts rescale their masked entries by, and the norm of all these factors.",
        "`consensus`, Δ, Δ, Δ, Δ: from λ(T − 1) ≥ 1 on no expert holds on to what all agree on; "
        "λ = 0.4 here.",
    ),
    "With data": (
        "Every expert has its own data, so Δ and −Δ do not cancel, and an update of zero counts: its "
        "data says that the layer should stay. In `ssr` it leaves, as where an adapter has no factors for "
        "the layer in the published code.",
    ),
}
