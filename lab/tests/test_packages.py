import io
import json
import tarfile
import zipfile

import pytest

from covmerge.errors import InputError
from covmerge_lab import packages
from covmerge_lab.packages import Package, fetch, fetch_together


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A program that stands where a registry's client does, and notes each call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    archive = tmp_path / "archive.tgz"
    with tarfile.open(archive, "w:gz") as tarball:
        member = tarfile.TarInfo("package/data.txt")
        member.size = 4
        tarball.addfile(member, io.BytesIO(b"real"))
    calls = tmp_path / "calls"
    program = folder / "npm"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncp {archive} . \n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def test_a_package_is_fetched_once(tmp_path, client):
    package = Package("npm", "data", "1.2.3", "package")
    for _ in range(2):
        assert (fetch(package, tmp_path / "cache") / "data.txt").read_text() == "real"
    assert client.read_text() == "pack --silent data@1.2.3\n"


def test_debian_packages_are_fetched_by_one_call(tmp_path, client, monkeypatch):
    program = tmp_path / "bin" / "apt-get"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {client}\nshift 2\n'
        "for name; do echo $name > ${name}_1.0_all.deb; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(packages, "_unpack", lambda deb, out: deb.rename(out / "data.txt"))
    wanted = [Package("debian", name, None) for name in ("b", "c", "a")]
    fetch(wanted[1], tmp_path / "cache")
    for _ in range(2):
        folders = fetch_together(wanted, tmp_path / "cache")
        assert [(folder / "data.txt").read_text() for folder in folders] == ["b\n", "c\n", "a\n"]
    assert client.read_text() == "download --quiet c\ndownload --quiet b a\n"


def test_a_client_that_fails_leaves_nothing(tmp_path, client):
    program = tmp_path / "bin" / "npm"
    program.write_text("#!/bin/sh\necho 'E404 no such package' >&2\nexit 1\n")
    with pytest.raises(InputError, match=r"npm:gone@1.*E404 no such package.*registry"):
        fetch(Package("npm", "gone", "1"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*gone*"))


def test_a_missing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"debian:data is fetched by `apt-get`.*install it"):
        fetch(Package("debian", "data", None), tmp_path / "cache")


def test_an_archive_cannot_leave_its_folder(tmp_path):
    archive = tmp_path / "bad.tgz"
    with tarfile.open(archive, "w:gz") as tarball:
        tarball.addfile(tarfile.TarInfo("../../outside"))
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    with pytest.raises(InputError, match=r"outside', which leads out"):
        packages._unpack(archive, out)
    wheel = tmp_path / "bad.whl"
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr("../../outside", json.dumps({}))
    packages._unpack(wheel, out)  # zipfile strips what leads out
    assert not (tmp_path / "outside").exists()
