"""The layers of a lot through their method: the first matrix of each in one batch, then the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from covmerge.plan.planning import Merge, WorkItem
from covmerge.run.engine.layer import Change, Context, Layer


def change_together(
    layers: Sequence[Layer], items: Sequence[WorkItem], merge: Merge, context: Context
) -> Iterator[Change]:
    """Run the method of a merge on every matrix; one change after another.

    What the batch leaves undone the kernel does, where it is that item's turn: so its guards, and its
    errors, are those of an item by itself.

    Args:
        layers: one for each item.
        items: of a lot.
        merge: their operation.
        context: with the thresholds of this plan alone.
    """
    method = merge.around(context.method(merge.method))
    (thresholds,) = context.thresholds
    groups = [
        layer.groups(item, merge, thresholds) for layer, item in zip(layers, items, strict=True)
    ]
    dense = [own for own in groups if own is not None]
    # Of each matrix in turn, so that no more of them are in work at once than there are items.
    batches = [
        iter(method.at_once(alike, **merge.parameters)) for alike in zip(*dense, strict=True)
    ]
    for layer, item, own in zip(layers, items, groups, strict=True):
        if own is None:  # adapters that are merged on their factors
            yield layer.change(item, merge, thresholds)
        else:
            yield layer.change_of(item, merge, own, [next(batch) for batch in batches])
