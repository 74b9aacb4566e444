"""Checkpoints: read lazily and by rows from wherever they are, written crash-safe to a destination.

To read, `open_checkpoint`; every kind of source then looks the same (`Checkpoint`). To write,
`plan_layout`, `ShardWriter` and `Journal` inside a `Staging`.
"""

from covmerge.files.checkpoints.base import CARD_NAME, Checkpoint, FactorHeader, fingerprint
from covmerge.files.checkpoints.content import Content, at_once
from covmerge.files.checkpoints.folder import FileCheckpoint
from covmerge.files.checkpoints.journal import COMPUTED, ORDER, PROCESSOR, THREADS, Entry, Journal
from covmerge.files.checkpoints.layout import plan_layout
from covmerge.files.checkpoints.masks import MASKS_FOLDER
from covmerge.files.checkpoints.open import open_checkpoint, open_store
from covmerge.files.checkpoints.staging import (
    OutputTakenError,
    Staging,
    check_not_input,
    destination_of,
    find_unfinished,
)
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.paths import safe_child

__all__ = [
    "CARD_NAME",
    "COMPUTED",
    "MASKS_FOLDER",
    "ORDER",
    "PROCESSOR",
    "THREADS",
    "Checkpoint",
    "Content",
    "Entry",
    "FactorHeader",
    "FileCheckpoint",
    "HubModel",
    "Journal",
    "OutputTakenError",
    "ShardWriter",
    "Staging",
    "at_once",
    "check_not_input",
    "destination_of",
    "find_unfinished",
    "fingerprint",
    "open_checkpoint",
    "open_store",
    "plan_layout",
    "safe_child",
]
