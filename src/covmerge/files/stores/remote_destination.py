"""A folder of a bucket as a destination: the work is done in a local folder, and sent when finished.

    <cache>/uploads/<hash of the address>/
        .merged.covmerge-partial/       the work, as for a local folder
        token                           marks uploads that were started here
        made                            which output was sent from here, if machines share the work

    s3://bucket/merged/
        .covmerge-upload.json           during the upload: its token and its files
        model-00001-of-00002.safetensors ...
        model.safetensors.index.json, config.json
        covmerge.json                   last

A file appears in the bucket once all of it is sent, and a folder without covmerge.json is no output.
Buckets have no locks. Locally, one process at a time works on an output; `.covmerge-upload.json` is only
created if there is none, which keeps a second machine from sending at the same time.

Machines that share the work (ranks, the nodes of a cluster) must see each other's files, so <cache> has
to be a folder that they share, which the user must set. One of them sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from covmerge.base.code import is_cache_named, user_cache
from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.files.stores.address import OBJECTS, Address
from covmerge.files.stores.destination import Destination
from covmerge.files.stores.disk import UNFINISHED, disk_errors, replace_file
from covmerge.files.stores.remote import RemoteStore, ask
from covmerge.files.stores.servers import ObjectServer
from covmerge.files.stores.store import Stamp, StoredFile, file_at, tree

_CLAIM = ".covmerge-upload.json"
_MANIFEST = "covmerge.json"
_MOST_OF_A_CLAIM = 2**24
_SEND = 6 * 3600.0  # seconds for one file


class RemoteDestination(Destination):
    """A folder of a bucket that an output becomes.

    It cannot replace everything in one step, so covmerge.json is written last: without it nothing counts as
    an output.

    Raises:
        InputError: no output can be written there, or the required packages are not installed.
    """

    def __init__(self, address: Address) -> None:
        if address.scheme not in OBJECTS or "/" not in address.path:
            raise InputError(
                f"no output is written to {address}: choose a folder of a bucket, such as "
                "s3://bucket/merged, or of this machine"
            )
        self._address = address
        self._place = _place(address)
        super().__init__(self._place / "merged")
        self._token = self._place / "token"
        self._made = self._place / "made"
        self._shared = False
        self._present = set[str]()  # files in the last listing
        self._server = ObjectServer(address.scheme, writing=True)

    def __str__(self) -> str:
        return str(self._address)

    @property
    def output(self) -> RemoteStore:
        """The store of the output; each call returns a new one, which asks the server again."""
        return RemoteStore(self._server, self._address.path)

    def share(self) -> None:
        """Check that all machines have the same place of work, which they have by COVMERGE_CACHE alone."""
        if not is_cache_named():
            raise InputError(
                f"{self} is made in a folder first, in which all that share the work write: set "
                "COVMERGE_CACHE to a folder that all machines see, the same on each"
            )
        self._shared = True

    def is_made_here(self) -> bool:
        with self._reached(), suppress(FileNotFoundError):
            return self._made.read_text() == self._sent()
        return False

    def occupant(self) -> object | None:
        """Return the stamps of its files; remains of an upload from here that broke off do not count."""
        with self._reached():
            if self._is_file():
                raise InputError(f"the output {self} exists and is no folder: choose another name")
            self._present = set[str]()
            if self._claim() is not None:
                return None
            found = _stamps(self.output)
        self._present = set(found)
        return found or None

    def take(self) -> bool:
        """Lock the destination on this machine."""
        taken = super().take()
        with suppress(OSError):  # such a file does no harm
            for left in self._place.glob(UNFINISHED):  # left by a process that was killed
                left.unlink(missing_ok=True)
        return taken

    def recover(self) -> bool:
        """Remove the remains of an upload that broke off; no old output is restored.

        An output that is replaced loses its covmerge.json before anything is sent. If covmerge.json is
        there, all of the output is.
        """
        with self._reached():
            claim = self._claim()
            if claim is not None:
                if not self.output.is_file(_MANIFEST):
                    self._remove(claim.files)
                self._remove([_CLAIM])
        return False

    def publish(self) -> None:
        """Send the weights first, then config and index, and covmerge.json last.

        Raises:
            InputError: another machine is sending there, or the server fails; the work is kept.
        """
        names = sorted(tree(self.work), key=_order)
        with self._reached():
            there = list(tree(self.output))
            self._refuse_new(there)
            self._make_claim([*names, *there])
            try:  # another machine may have made a claim meanwhile, sent, and removed it
                self._refuse_new(name for name in tree(self.output) if name != _CLAIM)
            except InputError:
                self._remove([_CLAIM])
                raise
            # Until covmerge.json is sent below, there is none, and so no output.
            self._remove(sorted(there, key=_order, reverse=True))
            for name in names[:-1]:
                self._send(name)
            self._check_sent(names[:-1])
            self._send(names[-1])
            if self._shared:
                replace_file(self._made, self._sent())
            else:
                self._made.unlink(missing_ok=True)
            self._remove([_CLAIM])

    def discard(self) -> None:
        taken = self._lock is not None
        super().discard()
        if taken:
            with suppress(OSError):  # another process works here now
                self._token.unlink(missing_ok=True)
                self._place.rmdir()

    def _unseen(self) -> str:
        """Return the end of a message: where machines share the work, it may not be visible here."""
        if not self._shared:
            return ""
        return (
            f"; if it shares this merge, its work is not seen in {self._place}: COVMERGE_CACHE has to be "
            "a folder that all machines see, the same on each"
        )

    def _sent(self) -> str:
        """Return a text that identifies the output that is there."""
        return str(self.output.stamp(_MANIFEST))

    def _is_file(self) -> bool:
        parent, _, name = self._address.path.rpartition("/")
        return RemoteStore(self._server, parent).is_file(name)

    def _claim(self) -> _Claim | None:
        """Return the claim of an upload from here that broke off; None: there is none.

        Raises:
            InputError: another machine is sending there, or its upload broke off.
        """
        file = StoredFile(self.output, _CLAIM)
        try:
            claim = _Claim.model_validate_json(file.read(_MOST_OF_A_CLAIM))
        except FileNotFoundError:
            return None
        except ValidationError:
            claim = None
        token = self._token.read_text() if self._token.exists() else None
        if claim is None or claim.upload != token:
            # The sender may have finished by now, and removed its token.
            if self._shared and not self.output.is_file(_CLAIM):
                return None
            raise InputError(
                f"{file} says that {self} is being written from another machine, or that an upload from "
                "there broke off: wait for it, or go on with it there "
                f"({Hint('resume')}){self._unseen()}. If "
                "nothing goes on, remove all that is in the folder"
            )
        return claim

    def _make_claim(self, files: Sequence[str]) -> None:
        with disk_errors(self._token):
            if not self._token.exists():
                replace_file(self._token, token_hex(16))
            claim = _Claim(upload=self._token.read_text(), files=list(dict.fromkeys(files)))
        path, content = self._at(_CLAIM), claim.model_dump_json().encode()
        try:
            ask(self._server, lambda: self._server.claim(path, content))
        except FileExistsError:
            # The claim is from an attempt whose answer was lost, or another machine's and refused here.
            self._claim()

    def _refuse_new(self, there: Iterable[str]) -> None:
        if new := sorted({*there} - self._present):
            raise InputError(
                f"{some(new)} appeared in {self}, and is not overwritten: move it away, and go on with "
                f"{Hint('resume')}"
            )

    def _send(self, name: str) -> None:
        folder = self.work.folder
        ask(self._server, lambda: self._server.send(folder / name, self._at(name)), _SEND)

    def _check_sent(self, names: Sequence[str]) -> None:
        """Check that the output consists of exactly the files that were sent."""
        sizes = {name: (self.work.folder / name).stat().st_size for name in names}
        found = {name: stamp[0] for name, stamp in _stamps(self.output).items() if name != _CLAIM}
        if found != sizes:
            wrong = sorted({name for name, _ in {*found.items()} ^ {*sizes.items()}})
            raise InputError(
                f"{self} does not hold what was sent ({some(wrong)}): does something else write there? "
                f"The work is kept: go on with {Hint('resume')}"
            )

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._at(name)
            ask(self._server, lambda path=path: self._server.remove(path))

    def _at(self, name: str) -> str:
        return self._server.inside(self._address.path, name)

    @contextmanager
    def _reached(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            said = str(error.strerror or error) or type(error).__name__
            then = "and run it again"
            if "docs/remote.md" not in said:  # a refusal says itself what to check
                said += (
                    ": check the address and the credentials in the environment (docs/remote.md)"
                )
            if self._lock is not None:
                then += f" with {Hint('resume')}, which goes on with finished work"
            raise InputError(f"{self} cannot be reached or written: {said}, {then}") from None


class _Claim(BaseModel):
    """The record of an upload while it lasts."""

    model_config = ConfigDict(strict=True, extra="forbid")

    upload: str
    files: list[Annotated[str, Field(pattern=r"^[^/\\\x00]+(/[^/\\\x00]+)*$")]]


def _stamps(store: RemoteStore) -> dict[str, Stamp]:
    return {name: file_at(store, name).open().stamp for name in tree(store)}


def _order(name: str) -> tuple[int, str]:
    """Return a key for the order: weights, files beside them, files that loaders need, covmerge.json."""
    if name == _MANIFEST:
        return 3, name
    if name == "config.json" or name.endswith(("index.json", "adapter_config.json")):
        return 2, name
    return int(not name.endswith(".safetensors")), name


def _place(address: Address) -> Path:
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:32]
    try:
        return user_cache() / "uploads" / digest
    except RuntimeError as error:
        raise InputError(
            f"{address} is made on this machine first, and there is no place for it: set COVMERGE_CACHE "
            f"to a folder ({error})"
        ) from error
