"""Files of other names that hold a method of covmerge all the same, and those that do not."""

import torch
from torch import Tensor

from tests.methods.golden_cases.common import (
    LINEAR,
    NAMES,
    Case,
    group_of,
    inputs,
    merged,
    per_layer,
    updates_of,
)


def literal_actmat() -> Case:
    """ACTMat's Eq. 3 as it is printed, with W_t in the numerator: W₀ is lost outside the span.

    W = W₀ (ΣC_t)(ΣC_t)† + the merged update of the difference form, so what is returned here is
    that minus W₀. As published, the cut-off is d_in · eps(float64).
    """

    def run(variant: str) -> dict[str, Tensor]:
        results = {}
        for name in NAMES:
            updates = updates_of(variant, name, torch.float64)
            if updates[0].dim() < 2:
                results[name] = merged("average", group_of(updates))
                continue
            rtol = updates[0].shape[1] * torch.finfo(torch.float64).eps
            gram = sum(update.T @ update for update in updates)
            values, vectors = torch.linalg.eigh(gram)
            kept = vectors[:, values > rtol * values[-1]]
            base = inputs()[f"{variant}/base/{name}"].double()
            lost = base - (base @ kept) @ kept.T
            results[name] = merged("actmat", group_of(updates), rtol=rtol) - lost
        return results

    return Case(run, "W₀·P + actmat, P the projector on the span: the printed Eq. 3")


CASES = {
    "actmat_w_fp64": literal_actmat(),
}

# Files that hold no method of covmerge: what they are, and the method whose distance is shown.
NOT_HERE = {
    "actmat_general_cov_alpha": ("an unpublished variant with normalised Grams", "actmat"),
    "actmat_general_lstsq_lam1e-3": ("an unpublished variant with a ridge", "actmat"),
    "actmatrepo_ace": ("a simplified ACE: no ridge, prior or refinement", "ace"),
    "tact_k0.5": ("an unpublished variant with thinned Grams", "actmat"),
    "wudi_ace_repo": ("not WUDI: the loss of a scalar inner product", "wudi"),
}


def nearest(file: str) -> Case:
    """The method at its defaults that a file which is not here comes closest to in name."""
    return per_layer(NOT_HERE[file][1], names=LINEAR)
