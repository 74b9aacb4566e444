"""Merges whose cache lies on a full disk, or that may not have the memory that they want.

    python -m tests.campaigns.machine --count 50 --seed 0

The cache (COVMERGE_CACHE) lies on a tmpfs that is small from the start, or is filled at a drawn step.
Memory is limited by RLIMIT_AS, by --max-memory or by a cgroup, whose limit the kernel enforces by
`kill -9`. Disks and cgroups take root, and without it these kinds are left out. What is refused or killed
is done again, on a disk with room and with memory, and must then be right.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import transformers.models.llama.modeling_llama  # noqa: F401  # imported here, and not in each process
from safetensors.torch import load_file, save_file

from tests.campaigns import servers
from tests.campaigns.buckets import NAME
from tests.campaigns.disturbed import At, Cgroup, Disk, Ended, limit_memory
from tests.campaigns.outcomes import (
    REFUSED,
    RIGHT,
    WRONG,
    Kind,
    Tensors,
    Verdict,
    average,
    covmerge,
    judge,
    models,
    recipe,
)
from tests.campaigns.outcomes import (
    main as campaign_of,
)
from tests.quantised.models import llama
from tests.remote.servers import KEYS

_ROOM = 300_000  # bytes: as much as any of these merges keeps


# The C library ends the process.
_NO_THREAD_DATA = "cannot allocate memory for thread-local data: ABORT"


@cache
def _cgroup() -> Cgroup:
    group = Cgroup(f"covmerge-campaign-{os.getpid()}")
    atexit.register(group.close)
    return group


@cache
def _disk() -> Disk:
    """The disk that caches lie on; what is not mounted is gone with this process."""
    return Disk(Path(mkdtemp(prefix="campaign-disk-")) / "disk")


def _emptied() -> Path:
    """The folder of the disk, with nothing in it."""
    disk = _disk()
    disk.widen()
    for path in disk.place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return disk.place


def _of_llamas(folder: Path, random: Random) -> tuple[Mapping[str, Path], Tensors]:
    """Llamas, whose structure is kept in the cache."""
    made = {name: folder / name for name in ("base", "a", "b")}
    for path in made.values():
        llama(random.randrange(1000)).save_pretrained(path)
    a, b = (load_file(made[name] / "model.safetensors") for name in "ab")
    return made, average(a, b)


def _of_files(folder: Path, random: Random, width: int = 64) -> tuple[Mapping[str, Path], Tensors]:
    made = models(random, width=width)
    sources = {name: folder / f"{name}.safetensors" for name in made}
    for name, path in sources.items():
        save_file(made[name], path)
    return sources, average(made["a"], made["b"])


def full(
    lay: Callable[[Path, Random], tuple[Mapping[str, object], Tensors]],
    stored: bool,
    folder: Path,
    random: Random,
) -> Verdict:
    """Merge with a cache on a disk that is or becomes full; the output lies on another, or in a bucket."""
    sources, right = lay(folder, random)
    place, out = _emptied(), folder / "out"
    environment = {"COVMERGE_CACHE": str(place / "cache")}
    bucket = servers._bucket() if stored else None
    target = str(out) if bucket is None else f"s3://{NAME}/out"
    if bucket is not None:
        environment |= {**KEYS, "AWS_ENDPOINT_URL": bucket.url}
        bucket.right()
        bucket.empty()
    steps: At | None = None
    if random.random() < 0.5:
        _disk().resize(random.choice((0, random.randrange(_ROOM))))
    else:
        steps = At(random.randint(1, 150), _disk().fill)
    arguments = ("merge", recipe(folder, **sources), target)

    def run(*more: str, at: At | None = None) -> Verdict:
        ended = covmerge(
            folder, *arguments, *more, environment=environment, before=servers.impatient, at=at
        )
        if bucket is not None:
            bucket_out = folder / f"copied{len(more)}"
            return judge(ended, servers._copied(bucket, bucket_out), right, (target, str(place)))
        return judge(ended, out, right, (str(place), *map(str, sources.values())))

    verdict = run(at=steps)
    _disk().widen()
    return _again(verdict, partial(run, "--resume"))


def _again(verdict: Verdict, run: Callable[[], Verdict]) -> Verdict:
    """See that what was refused is right when it is done again."""
    if verdict[0] != REFUSED:
        return verdict
    again = run()
    return verdict if again[0] == RIGHT else (WRONG, f"not done again: {again}\n{verdict[1]}")


def little_memory(by: str, folder: Path, random: Random) -> Verdict:
    """Merge with a limit on memory."""
    sources, right = _of_files(folder, random, width=512)
    arguments = ("merge", recipe(folder, **sources), folder / "out")
    names = ("memory",)
    if by == "RLIMIT_AS":
        limit = partial(limit_memory, random.randrange(96 * 2**20))
        ended = covmerge(folder, *arguments, before=limit)
    elif by == "a cgroup":
        group = _cgroup()
        group.limit(random.randrange(2**20, 64 * 2**20))
        ended = covmerge(folder, *arguments, before=group.enter)
    else:
        ended = covmerge(folder, *arguments, "--max-memory", random.randrange(1, 2**30))
    if ended.code == -signal.SIGKILL or _NO_THREAD_DATA in ended.said:
        # Who ended it asked no program. It may have cleaned up behind its output, which then must be right.
        code = int(not (folder / "out" / "covmerge.json").exists())
        ended = Ended(code, f"error: memory\n{ended.said}")
    verdict = judge(ended, folder / "out", right, names)
    run = partial(covmerge, folder, *arguments, "--resume")
    return _again(verdict, lambda: judge(run(), folder / "out", right, names))


KINDS: dict[str, Kind] = {
    **{f"memory: {by}": partial(little_memory, by) for by in ("RLIMIT_AS", "--max-memory")},
}
if os.geteuid() == 0:
    KINDS |= {
        "memory: a cgroup": partial(little_memory, "a cgroup"),
        "cache full: structures of models": partial(full, _of_llamas, False),
        "cache full: an output for a bucket": partial(full, _of_files, True),
    }

main = partial(campaign_of, __doc__, KINDS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
