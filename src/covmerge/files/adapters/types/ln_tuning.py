"""LN tuning (arXiv:2312.11420): the normalisations, trained whole."""

from __future__ import annotations

from covmerge.files.adapters.types.layer import AdapterType

LN_TUNING = AdapterType(
    name="LN_TUNING",
    equation="the adapter's weight and bias",
    ends={},
    whole={".ln_tuning_layers.weight": ".weight", ".ln_tuning_layers.bias": ".bias"},
)
