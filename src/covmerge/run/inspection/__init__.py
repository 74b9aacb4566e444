"""A look at experts before they are merged, and at what a merge made of them.

compatibility  headers, configs, tokenizers
job            one streaming pass over all tensors
merged         a merged model that is looked at with them
result         what it measured, by layer
verdicts       what the numbers give away
findings       what a reader must not miss, in words
names          blocks and layers for people
"""

from covmerge.base.findings import Finding, Severity
from covmerge.run.inspection.job import InspectJob, SpectraOf
from covmerge.run.inspection.merged import open_merged
from covmerge.run.inspection.result import Inspection, LayerView, SpectrumView

__all__ = [
    "Finding",
    "InspectJob",
    "Inspection",
    "LayerView",
    "Severity",
    "SpectraOf",
    "SpectrumView",
    "open_merged",
]
