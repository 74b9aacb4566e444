"""All that a store holds, with its folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from covmerge.files.stores.store import Store, StoredFile, WritableStore, child


def tree(store: Store, inside: str = "") -> Iterator[str]:
    """Return all that a store holds, as sorted paths in it; links and empty folders as they are."""
    folders = set(store.folders())
    for name in sorted({*folders, *store.names()}):
        path = f"{inside}{name}"
        within = list(tree(store.inside(name), f"{path}/")) if name in folders else []
        yield from within or [path]


def file_at(store: Store, path: str) -> StoredFile:
    """Return the file at a path in a store; it need not exist.

    Raises:
        CheckpointError: a part of the path leads elsewhere, as `Store.check`.
    """
    *folders, name = path.split("/")
    for folder in folders:
        store.check(folder)
        store = store.inside(folder)
    return child(store, name)


def remove_others(store: WritableStore, keep: Collection[str], inside: str = "") -> list[str]:
    """Remove all that a store holds but some regular files; return what that was.

    Args:
        store: the store; folders left empty in it are removed without a word.
        keep: the files, as paths in it.
        inside: what all paths begin with.
    """
    removed: list[str] = []
    for folder in store.folders():
        inner = store.inside(folder)
        removed += remove_others(inner, keep, f"{inside}{folder}/")
        if store.exists(folder) and not (inner.names() or inner.folders()):
            store.remove(folder)
    for name in store.names():
        path = f"{inside}{name}"
        if path not in keep or not store.is_file(name, follow=False):
            store.remove(name)
            removed.append(path)
    return removed
