"""A folder of a store in memory as a destination."""

from __future__ import annotations

from covmerge.files.stores.memory import MemoryStore
from covmerge.files.stores.store import WritableFile
from covmerge.files.stores.walk import remove_others, tree


class MemoryDestination:
    """A folder of files in memory that an output becomes; see `Destination`.

    Args:
        store: where it lies; its lock is among the threads that have this store.
        name: of the folder.

    Example:
        >>> store = MemoryStore()
        >>> out = MemoryDestination(store, "merged")
        >>> out.take()
        True
        >>> WritableFile(out.work, "covmerge.json").put(b"{}")
        >>> out.publish()
        >>> store.contents()
        {'merged/covmerge.json': b'{}'}
    """

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._partial = f".{name}.covmerge-partial"
        self._taken = False
        partial = store.inside(self._partial)
        self.output = store.inside(name)
        self.work = partial.inside("output")
        self.journal = WritableFile(partial, "journal.jsonl")

    def __str__(self) -> str:
        return str(self.output)

    @property
    def aside(self) -> str:
        return self._store.where(self._partial)

    def share(self) -> None:
        """See `Destination.share`: among the threads that have this store."""

    def is_made_here(self) -> bool:
        return True

    def occupant(self) -> object | None:
        return [(name, self.output.stamp(name)) for name in tree(self.output)] or None

    def take(self) -> bool:
        self._store.take(self._partial)
        self._taken = True
        return True

    def recover(self) -> bool:
        """See `Destination.recover`: it is published in one step."""
        return False

    def begun(self) -> bool:
        return self.journal.exists() and any(True for _ in tree(self.work))

    def begin(self) -> None:
        remove_others(self._store.inside(self._partial), ())

    def publish(self) -> None:
        self._store.move(f"{self._partial}/output", self._name)

    def release(self) -> None:
        if self._taken:
            self._store.release(self._partial)
            self._taken = False

    def discard(self) -> None:
        if self._taken:
            self.begin()
            self.release()
