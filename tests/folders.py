"""What lies in a folder, for tests that compare whole outputs."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of all files, by path in the folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
