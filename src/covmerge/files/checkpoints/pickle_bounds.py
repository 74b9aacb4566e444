"""Limits on the cost of pickle files, checked before any object in them is created."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Generator
from typing import IO, cast

from covmerge.base.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
MAX_WHOLE_BYTES = 4 * 2**30  # for formats without an index
SAVE_AGAIN = "load it where you trust it, and save its state dict with safetensors.torch.save_file"

_MAX_PICKLE_BYTES = 100_000_000
MAX_STEPS = 2_000_000  # a tensor takes 40 steps
_FIXED = 8  # bytes of the longest argument whose length is not stated in the file
# Python hashes a nested tuple that is a dict's key by recursion on the C stack, which a million
# levels overflow. A module of modules has some tens of levels.
_MAX_NESTING = 1000
_MARK = -1
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
# A call may return its arguments.
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"})
# These steps change the object below on the stack.
_CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_PUTS = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


def check_whole(size: int, where: str) -> None:
    """Raise if a file that can only be loaded whole is too large for that."""
    if size > MAX_WHOLE_BYTES:
        raise CheckpointError(
            f"{where} is {size} bytes in torch's format from before 1.6, which has to be loaded "
            f"whole, and the most that is loaded so is {MAX_WHOLE_BYTES}: {SAVE_AGAIN}"
        )


def check_archive(archive: zipfile.ZipFile, where: str) -> None:
    """Check what torch assumes about its own zip files, and limit the size of the pickle.

    Raises:
        CheckpointError: it is code, is compressed, or its description of the tensors is too long.
    """
    entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise CheckpointError(f"{where} is TorchScript, which is code: {SAVE_AGAIN}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{where} holds the compressed entry {entry.filename!r}, which torch would map as "
                f"if it were tensors: {SAVE_AGAIN}"
            )
        if entry.filename.endswith("/data.pkl") and entry.file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{where} describes its tensors in {entry.file_size} bytes, and the most that is "
                f"read is {_MAX_PICKLE_BYTES}: {SAVE_AGAIN}"
            )


def check_steps(pickled: IO[bytes], where: str, most: int = MAX_STEPS) -> None:
    """Count the steps of a pickle; each step may create or nest an object.

    Bytes that are no pickle are left to the loader to refuse.

    Raises:
        CheckpointError: there are too many steps, or tuples are nested too deeply.
    """
    nesting = _Nesting()
    for step, (opcode, argument) in enumerate(_opcodes(_Bounded(pickled, where)), start=1):
        if nesting.after(opcode, argument) > _MAX_NESTING:
            raise CheckpointError(
                f"{where} has more than {_MAX_NESTING} tuples, each inside the next, which is far more "
                f"than any model needs: {SAVE_AGAIN}"
            )
        if step > most:
            raise CheckpointError(
                f"{where} describes its tensors in more than {most} steps, which is far "
                f"more than any model needs: {SAVE_AGAIN}"
            )


class _Nesting:
    """The depth of nested tuples, for each object on a pickle's stack and in its memo."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[object, int] = {}

    def after(self, opcode: pickletools.OpcodeInfo, argument: object) -> int:
        """Execute one step, and return the depth of nested tuples in the top of the stack."""
        name, stack = opcode.name, self._stack
        top = stack[-1] if stack else 0
        if name in _PUTS:
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = top
        elif name in _GETS:
            stack.append(self._memo.get(argument, 0))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(top)
        else:
            deepest = self._take(opcode)
            if name in _TUPLES:
                stack.append(deepest + 1)
            elif name in _CALLS:
                stack.append(deepest)
            elif opcode.stack_after and name not in _CHANGES:
                stack.append(0)
        return stack[-1] if stack else 0

    def _take(self, opcode: pickletools.OpcodeInfo) -> int:
        """Remove a step's inputs from the stack, and return their greatest depth."""
        to_mark = pickletools.markobject in opcode.stack_before
        count = len(opcode.stack_before) - (opcode.name in _CHANGES)
        deepest = 0
        while self._stack and (to_mark or count > 0):
            one, count = self._stack.pop(), count - 1
            if to_mark and one == _MARK:
                break
            deepest = max(deepest, one)
        return deepest


class _Bounded:
    """A file whose pickle steps have no argument longer than the rest of the file.

    `pickletools` would otherwise allocate memory for a longer argument first.
    """

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file, self._where = file, where
        place = file.tell()
        self._size = file.seek(0, 2)
        file.seek(place)

    def read(self, count: int) -> bytes:
        """Read `count` bytes for `pickletools`."""
        left = self._size - self._file.tell()
        if count > max(left, _FIXED):  # `pickletools` itself finds shorter arguments cut short
            raise CheckpointError(
                f"{self._where} is cut short: a step of its pickle has {count} bytes, and {left} are "
                "left: fetch the file again"
            )
        return self._file.read(count)

    def readline(self) -> bytes:
        """Read one line."""
        return self._file.readline()

    def tell(self) -> int:
        """Return the position in the file."""
        return self._file.tell()


def _opcodes(pickled: _Bounded) -> Generator[tuple[pickletools.OpcodeInfo, object]]:
    try:
        for opcode, argument, _ in pickletools.genops(cast("IO[bytes]", pickled)):
            yield opcode, argument
    except (ValueError, MemoryError):
        return
