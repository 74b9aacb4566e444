"""Every command of docs/scale.md, as it stands there.

What no machine of ours has is stood in for by a script of the same name: `srun` starts its tasks here,
`sbatch` runs its script, and `ray job submit` and `kubectl apply` run their entrypoint beside a cluster
that was started here.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import covmerge
from tests.e2e.test_resume import digests, save_plain

ROOT = Path(covmerge.__file__).parents[2]
COMMANDS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)

STANDING_IN = {
    "covmerge": f'exec {sys.executable} -m covmerge "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "sbatch": 'SLURM_NTASKS=2 MERGE_MEMORY=4GB exec bash "$@"',
    "srun": """
while [[ $1 == -* ]]; do
  if [ "$1" = -n ]; then SLURM_NTASKS=$2; shift; fi
  shift
done
export SLURM_NTASKS
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || failed=$?; done
exit ${failed:-0}""",
    "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "kubectl": f'exec $({sys.executable} "$(dirname "$0")/entrypoint.py" "$3")',
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A folder with the recipe, and the environment in which commands find what stands in."""
    folder = tmp_path_factory.mktemp("scale")
    base, experts = save_plain(folder, layers=12, width=64)
    named = {name: str(path) for name, path in experts.items()}
    recipe = {"base": str(base), "experts": named, "method": "ties"}
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe))
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / "programs"
    programs.mkdir()
    for name, script in STANDING_IN.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    (programs / "entrypoint.py").write_text(
        "import sys, yaml\n"
        "job = yaml.safe_load(open(sys.argv[1]))['spec']\n"
        f"print(job['entrypoint'].replace('/shared', {str(folder)!r}))\n"
    )
    covmerge.merge(base, experts, "ties", folder / "whole")
    return folder, {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def cluster():
    utils = pytest.importorskip(
        "ray.cluster_utils", reason="Ray is not installed: pip install 'covmerge[ray]'"
    )
    head = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = utils.Cluster(initialize_head=True, head_node_args=head)
    yield found.address
    found.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(machine, request, command):
    folder, environment = machine
    if "ray" in command:
        environment = {**environment, "RAY_ADDRESS": request.getfixturevalue("cluster")}
    shutil.rmtree(folder / "merged", ignore_errors=True)
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "--dry-run" in command or command.startswith("covmerge plan"):
        said = (
            "Nothing is written"
            if "--dry-run" not in command
            else "processes take seconds to start"
        )
        assert said in " ".join(done.stdout.split())
        assert not (folder / "merged").exists()
    else:
        assert digests(folder / "merged") == digests(folder / "whole")
    assert not list(folder.glob(".merged*"))


def test_the_page_has_all_of_them():
    assert len(COMMANDS) == 10
