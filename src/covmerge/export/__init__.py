"""What an output needs besides its weights: config, tokenizer, index, heads, manifest."""

from covmerge.export.companions import Companions, copy_companions
from covmerge.export.heads import write_heads
from covmerge.export.index import write_index
from covmerge.export.manifest import write_manifest

__all__ = ["Companions", "copy_companions", "write_heads", "write_index", "write_manifest"]
