"""An adapter as the output: the merge of the updates alone.

names   by which names the adapter knows the layers
tasks   which tensors the adapter updates, which it holds whole, and which have no place in it
merge   the work: one tensor after another, into a verified folder
"""

from covmerge.adapters.merge import merge_to_adapter

__all__ = ["merge_to_adapter"]
