"""What an output needs besides its weights: config, tokenizer, index, heads, manifest, model card."""

from covmerge.run.export.adapter import (
    bases_that_differ,
    changed_and_left_out,
    write_adapter_config,
)
from covmerge.run.export.card import write_card
from covmerge.run.export.companions import (
    Companions,
    copy_companions,
    hash_companions,
    is_weights,
)
from covmerge.run.export.config import write_config
from covmerge.run.export.expert_models import find_masks, load_expert, write_rescalers
from covmerge.run.export.files import (
    files_of,
    open_output,
    plan_parts,
    write_indices,
    write_manifest,
)
from covmerge.run.export.front_matter import read_front_matter
from covmerge.run.export.parents import Parents, read_parents

__all__ = [
    "Companions",
    "Parents",
    "bases_that_differ",
    "changed_and_left_out",
    "copy_companions",
    "files_of",
    "find_masks",
    "hash_companions",
    "is_weights",
    "load_expert",
    "open_output",
    "plan_parts",
    "read_front_matter",
    "read_parents",
    "write_adapter_config",
    "write_card",
    "write_config",
    "write_indices",
    "write_manifest",
    "write_rescalers",
]
