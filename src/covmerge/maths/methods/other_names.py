"""Names of the methods in other tools and papers, used in messages only.

A recipe accepts none of them: some have two meanings, and a record must have one name.
"""

from __future__ import annotations

_MERGEKIT = "or, with mergekit's rules to the bit, `generalized_task_arithmetic`"

_BEHIND = "`regmean` with `off_diagonal: 0.95`, on statistics of covmerge-lab's `regmean_pp`"

# Keys are in lower case, with `_` between words.
OTHER_NAMES = {
    "breadcrumbs": "`generalized_task_arithmetic` with `sparsify: band`",
    "breadcrumbs_ties": "`generalized_task_arithmetic` with `sparsify: band` and `consensus: true`",
    "cat": "`task_arithmetic`, which is the exact sum of adapters",
    "consensus_ta": "`consensus`",
    "dare": "`dare_ties` or `dare_task_arithmetic`",
    "dare_linear": f"`dare_task_arithmetic`, {_MERGEKIT}",
    "dare_ta": "`dare_task_arithmetic`",
    "della_linear": "`generalized_task_arithmetic` with `sparsify: ranked`",
    "della_ties": "`della`",
    "emr_merging": "`emr`",
    "fisher_merging": "`fisher`",
    "isotropic": "`iso_c` or `iso_cts`",
    "isoc": "`iso_c`",
    "isocts": "`iso_cts`",
    "lerp": "`linear`",
    "magnitude_prune": "`ties`, or `generalized_task_arithmetic` with `sparsify: magnitude`",
    "mean": "`average`",
    "model_soup": "`average`",
    "model_soups": "`average`",
    "model_stock_merging": "`model_stock`",
    "ramplus_tl": "`ram` with `boost: 0.1`",
    "regmean_pp": _BEHIND,
    "regmean_plus_plus": _BEHIND,
    "regmeanpp": _BEHIND,
    "simple_average": "`average`",
    "soup": "`average`",
    "svd": "`task_arithmetic` with a rank of the output",
    "ta": "`task_arithmetic`",
    "task_vector": "`task_arithmetic`",
    "task_vectors": "`task_arithmetic`",
    "ties_merging": "`ties`",
    "ties_svd": "`ties` with a rank of the output",
    "tsv": "`tsv_m`",
    "tsv_merge": "`tsv_m`",
    "tsvm": "`tsv_m`",
    "uniform": "`average`",
    "weight_average": "`average`",
    "weight_averaging": "`average`",
    "wudi_merging": "`wudi`",
    "ace_merging": "`ace`",
}
