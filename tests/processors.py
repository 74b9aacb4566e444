"""The tests of numbers on other processors than this machine's: the same tests, other kernels.

    python -m tests.processors [PYTEST ARGUMENTS]

MKL asks who made the processor, and on AMD's ignores its own switches. So it is told that Intel did, by a
library of two functions; `cc` compiles it. Takes an hour on two cores, so CI does not run it.
ONLY=SSE4.2 runs the configurations with this in their names. With QEMU=qemu-x86_64 the last rows are whole
other processors, emulated; give them few tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

INTEL = "int mkl_serv_intel_cpu_true(void) {return 1;} int mkl_serv_intel_cpu(void) {return 1;}"
FOLDERS = (
    *("mergekit", "methods", "linalg", "covariance", "measures", "steps", "statistics"),
    *("quantised", "tensors", "verification"),
)
# By name: MKL's, oneDNN's, ATen's and OpenBLAS's instructions, and threads.
CONFIGURATIONS = {
    "this machine, 1 thread": "OMP_NUM_THREADS=1",
    "this machine, 3 threads": "OMP_NUM_THREADS=3",
    "SSE4.2, 1 thread": "MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 "
    "ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Nehalem OMP_NUM_THREADS=1 INTEL=1",
    "AVX2, 3 threads": "MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 "
    "ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell OMP_NUM_THREADS=3 INTEL=1",
    "AVX-512, 1 thread": "MKL_ENABLE_INSTRUCTIONS=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE "
    "ATEN_CPU_CAPABILITY=avx512 OPENBLAS_CORETYPE=SkylakeX OMP_NUM_THREADS=1 INTEL=1",
    "AVX-512 and AMX, 3 threads": "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX OMP_NUM_THREADS=3 INTEL=1",
    "MKL's compatible kernels": "MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1",
}
EMULATED = ("Nehalem", "Haswell", "EPYC")


def run(name: str, switches: str, before: list[str], tests: list[str], intel: Path) -> bool:
    """Run the tests in one configuration, and print its row."""
    own = dict(pair.split("=") for pair in switches.split())
    if own.pop("INTEL", ""):
        own["LD_PRELOAD"] = str(intel)
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **own}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    counts = {kind: count for count, kind in re.findall(r"(\d+) (\w+)", lines[-1] if lines else "")}
    found = f"{counts.get('passed', 0):>6} passed {counts.get('failed', 0):>4} failed"
    print(f"{name:28} {found}", flush=True)
    if done.returncode:
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(told) or f"{done.stdout}{done.stderr}", flush=True)
    return not done.returncode


def main() -> int:
    """Print a row for each configuration; 1 if a test failed in any."""
    tests = sys.argv[1:] or [f"tests/{folder}" for folder in FOLDERS]
    with TemporaryDirectory() as folder:
        source, intel = Path(folder) / "intel.c", Path(folder) / "intel.so"
        source.write_text(INTEL)
        compiler = shutil.which("cc")
        if compiler is None:
            sys.exit("a C compiler is needed, as `cc`: install gcc or clang")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", intel, source], check=True)
        only = os.environ.get("ONLY", "")
        chosen = {name: own for name, own in CONFIGURATIONS.items() if only in name}
        passed = [run(name, own, [], tests, intel) for name, own in chosen.items()]
        if qemu := os.environ.get("QEMU"):
            passed += [
                run(f"emulated {cpu}", "OMP_NUM_THREADS=1", [qemu, "-cpu", cpu], tests, intel)
                for cpu in EMULATED
            ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
