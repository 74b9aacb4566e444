"""Every command of docs/scale.md, as it stands there.

What no machine of ours has is stood in for by a script of the same name: `srun` starts its tasks here,
`sbatch` runs its script, and `kubectl apply` runs the job's entrypoint beside a Ray cluster that was
started here. `ray job submit` is the real one, to that cluster's head; its port and the shared folder are
put in the place of the page's.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import covmerge
from tests.e2e.test_resume import save_plain
from tests.folders import contents
from tests.forked import run
from tests.held import COMMAND_LINE

ROOT = Path(covmerge.__file__).parents[2]
COMMANDS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)

_PATIENCE = 600  # seconds, on a machine that others use too

# A dry run measures the machine, for a second.
LITTLE = """
from covmerge.front.cli import machine
machine._PRODUCT_SIDE, machine._EIGEN_SIDE, machine._SECONDS = 64, 32, 0.0
"""

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
    "ray": f'exec {sys.executable} -m ray.scripts.scripts "$@"',
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
def cluster(machine):
    """A head that takes jobs, on whatever ports are free."""
    utils = pytest.importorskip(
        "ray.cluster_utils", reason="Ray is not installed: pip install 'covmerge[ray]'"
    )
    head = {
        "num_cpus": 2,
        "object_store_memory": 80 * 2**20,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 0,
    }
    _, environment = machine
    with pytest.MonkeyPatch.context() as patch:
        # The command of a job is looked for where its head was started.
        patch.setenv("PATH", environment["PATH"])
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = utils.Cluster(initialize_head=True, head_node_args=head)
    yield found
    found.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "command",
    # The script of `sbatch` runs `srun`.
    [
        pytest.param(c, marks=pytest.mark.nightly if "ray" in c or c.startswith("srun") else ())
        for c in COMMANDS
    ],
)
def test_commands(machine, request, command):
    folder, environment = machine
    if command.startswith("ray job submit"):
        dashboard = request.getfixturevalue("cluster").head_node.webui_url
        command = command.replace("127.0.0.1:8265", dashboard).replace("/shared", str(folder))
    elif "ray" in command:
        environment = {**environment, "RAY_ADDRESS": request.getfixturevalue("cluster").address}
    shutil.rmtree(folder / "merged", ignore_errors=True)
    program, *words = shlex.split(command)
    if program == "covmerge" and "ray" not in words:  # which needs no script that stands in
        done = run(LITTLE + COMMAND_LINE, *words, cwd=folder, environment=environment)
    else:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    if command.startswith("ray job submit"):
        assert re.search(r"Job '\w+' succeeded", done.stdout), done.stdout
    if "--dry-run" in command:
        assert "processes take seconds to start" in " ".join(done.stdout.split())
        assert not (folder / "merged").exists()
    else:
        assert contents(folder / "merged") == contents(folder / "whole")
    assert not list(folder.glob(".merged*"))


def test_the_page_has_all_of_them():
    assert len(COMMANDS) == 9
