"""Programs in processes of their own, in which nothing of covmerge was imported before.

All of them need torch, whose import takes seconds: one process does it, and forks for each of them.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

_ONE_BY_ONE = """
import json, os, sys
import torch

for program in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(program, {"__name__": "__main__"})
        break
    _, status = os.wait()
    assert status == 0, program
"""


def printed(programs: Sequence[str]) -> str:
    """What the programs print, one after another; each must end well."""
    command = [sys.executable, "-c", _ONE_BY_ONE, json.dumps(programs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
