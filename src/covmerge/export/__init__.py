"""What an output needs besides its weights: config, tokenizer, index, heads, manifest, model card."""

from covmerge.export.adapter import AdaptedTensor, AdapterWriter, WholeTensor
from covmerge.export.card import write_card
from covmerge.export.companions import (
    Companions,
    copy_companions,
    hash_companions,
    is_weights,
)
from covmerge.export.expert_models import find_masks, load_expert, rescalers_of, write_rescalers
from covmerge.export.front_matter import read_front_matter
from covmerge.export.heads import HEADS_FOLDER, write_heads
from covmerge.export.index import write_index
from covmerge.export.manifest import write_manifest
from covmerge.export.parents import Parents, read_parents

__all__ = [
    "HEADS_FOLDER",
    "AdaptedTensor",
    "AdapterWriter",
    "Companions",
    "Parents",
    "WholeTensor",
    "copy_companions",
    "find_masks",
    "hash_companions",
    "is_weights",
    "load_expert",
    "read_front_matter",
    "read_parents",
    "rescalers_of",
    "write_card",
    "write_heads",
    "write_index",
    "write_manifest",
    "write_rescalers",
]
