"""What an output needs besides its weights: config, tokenizer, index, heads, manifest."""

from covmerge.export.adapter import AdaptedTensor, AdapterWriter, WholeTensor
from covmerge.export.companions import Companions, copy_companions
from covmerge.export.expert_models import find_masks, load_expert, rescalers_of, write_rescalers
from covmerge.export.heads import write_heads
from covmerge.export.index import write_index
from covmerge.export.manifest import write_manifest

__all__ = [
    "AdaptedTensor",
    "AdapterWriter",
    "Companions",
    "WholeTensor",
    "copy_companions",
    "find_masks",
    "load_expert",
    "rescalers_of",
    "write_heads",
    "write_index",
    "write_manifest",
    "write_rescalers",
]
