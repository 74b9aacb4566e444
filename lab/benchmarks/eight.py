"""A merge of three 8B-shaped models in bfloat16 by the default, from files to a verified folder.

    python -m benchmarks.eight DIR [--layers 32] [--max-memory 20GB] [--resume]

The inputs, 64 GB, are computed when they are read (`benchmarks.streamed`, which says what it needs), so
that the disk has to hold the output alone. That is 16 GB, under DIR, and is deleted when it is
verified. The forecast is made first, on the same inputs. `--layers` takes fewer blocks.

An interrupted run goes on with `--resume`; every run of the merge has a row of its own. The process
writes each minute what it has used, so that a killed one has its row too. Seconds by stage are those in
which any thread was at it, and are known of runs that ended. CPU seconds do not count the server of the
inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import covmerge
from benchmarks.measure import machine
from benchmarks.timeline import described

OUT = Path(__file__).parent / "results" / "eight.json"
EXPERTS = ("a", "b", "c")
A_MINUTE = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--max-memory", default="20GB")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--merge", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.merge:
        merge(folder, arguments.max_memory, resume=arguments.resume)
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "state.json"
    with served(folder / "in", arguments.layers):
        if arguments.resume:
            state = json.loads(kept.read_text())
        else:
            state = {"forecast": forecast(folder, arguments.max_memory), "runs": []}
        asked = ["--merge", "--max-memory", arguments.max_memory]
        asked += ["--resume"] if arguments.resume else []
        done = subprocess.run([sys.executable, "-m", "benchmarks.eight", str(folder), *asked])
        state["runs"].append(json.loads((folder / "used.json").read_text()))
        kept.write_text(json.dumps(state))
        if done.returncode:
            raise SystemExit(f"the merge ended with {done.returncode}: go on with --resume")
        started = time.perf_counter()
        checked = subprocess.run([*COMMAND, "verify", str(folder / "out")], check=False)
        state["verify"] = {"code": checked.returncode, "seconds": time.perf_counter() - started}
    shutil.rmtree(folder / "out")
    command = f"--layers {arguments.layers} --max-memory {arguments.max_memory}"
    about = {"command": f"python -m benchmarks.eight DIR {command}"}
    arguments.out.write_text(json.dumps(about | {"machine": machine()} | state, indent=1) + "\n")


COMMAND = (sys.executable, "-m", "covmerge")


@contextmanager
def served(inputs: Path, layers: int) -> Generator[None]:
    """Have the models in a folder for a while."""
    command = ["-m", "benchmarks.streamed", str(inputs), "--layers", str(layers)]
    server = subprocess.Popen([sys.executable, *command])
    try:
        while not (inputs / "base" / "config.json").is_file():
            if server.poll() is not None:
                raise SystemExit("the inputs are not served: see benchmarks.streamed")
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def forecast(folder: Path, max_memory: str) -> dict[str, Any]:
    """What `--dry-run` says."""
    command = [*COMMAND, "merge", "--base", str(folder / "in" / "base")]
    for name in EXPERTS:
        command += ["--expert", f"{name}={folder / 'in' / name}"]
    command += ["--max-memory", max_memory, "--dry-run", "--json"]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(said.stdout)["estimate"]


def merge(folder: Path, max_memory: str, *, resume: bool) -> None:
    """Merge in this process, and leave what it took in a file."""
    started = time.perf_counter()
    ended = threading.Event()

    def note(more: dict[str, Any] | None = None) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        read = Path("/proc/self/io").read_text("ascii").split()
        found = {
            "seconds": round(time.perf_counter() - started, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_bytes": used.ru_maxrss * 1024,
            "bytes_read": int(read[read.index("rchar:") + 1]),
            "load": os.getloadavg()[2],
            "ended": more is not None,
            **(more or {}),
        }
        (folder / "used.json").write_text(json.dumps(found))

    def keep_noting() -> None:
        while not ended.wait(A_MINUTE):
            note()

    note()
    threading.Thread(target=keep_noting, daemon=True).start()
    inputs = folder / "in"
    result = covmerge.merge(
        inputs / "base",
        {name: inputs / name for name in EXPERTS},
        out=folder / "out",
        max_memory=max_memory,
        resume=resume,
        progress=said,
    )
    ended.set()
    stages = described("auto", 0, result.timeline)
    written = sum(path.stat().st_size for path in (folder / "out").glob("*.safetensors"))
    note({"stages": stages["seconds"], "overlap": stages["overlap"], "bytes_written": written})


def said(done: int, total: int, name: str) -> None:
    print(f"{done / total:.3f} {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
