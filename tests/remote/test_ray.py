"""A Ray cluster between buckets: its nodes share the folder of the work, or the merge says otherwise."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import covmerge
from covmerge.errors import InputError
from tests.e2e.test_resume import save_plain
from tests.engine.test_cluster import NODE, cluster_utils, quiet, ray
from tests.remote.conftest import Bucket
from tests.remote.servers import KEYS, Server
from tests.remote.test_machines import files, in_bucket, models
from tests.remote.test_outputs import sent


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=24, width=64)


@pytest.fixture
def cluster(s3_server: Server) -> Iterator[Any]:
    """A head that does nothing itself, whose nodes have the credentials, as each needs them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_server.url}.items():
            patch.setenv(name, value)
        patch.setenv("RAY_worker_niceness", "0")
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        yield found
        found.shutdown()


@quiet
@pytest.mark.slow
@pytest.mark.nightly
def test_from_a_bucket_into_it(bucket: Bucket, cluster, plain, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COVMERGE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        cluster.add_node(**NODE)
    there, on = in_bucket(bucket, plain), {"executor": "ray", "address": cluster.address}
    for method in ("ace", "ties"):
        covmerge.merge(*plain, method, tmp_path / method, shard_size="100KB")
        covmerge.merge(
            *there, method, f"{bucket.url}/merged", shard_size="100KB", overwrite=True, **on
        )
        assert models(sent(bucket)) == models(files(tmp_path / method))


@quiet
@pytest.mark.slow
@pytest.mark.nightly
def test_a_node_that_does_not_see_the_work(
    bucket: Bucket, cluster, plain, tmp_path: Path, monkeypatch
) -> None:
    """Its own folder lies where the shared one should."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("a private mount needs Linux and unshare")
    cache = tmp_path / "cache"
    cache.mkdir()
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh"]
    if subprocess.run([*mount, cache, "true"], capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted")
    monkeypatch.setenv("COVMERGE_CACHE", str(cache))
    start = ["-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster.address}"]
    size = ["--num-cpus=1", f"--object-store-memory={NODE['object_store_memory']}"]
    node = subprocess.Popen(
        [*mount, cache, sys.executable, *start, *size],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        while ray.cluster_resources().get("CPU", 0) < 1:
            assert node.poll() is None
            time.sleep(0.1)
        with pytest.raises(
            InputError, match=rf"there is no {cache}.*output on a URL.*COVMERGE_CACHE"
        ):
            covmerge.merge(
                *plain, "ace", f"{bucket.url}/merged", executor="ray", address=cluster.address
            )
    finally:
        ray.shutdown()
        node.terminate()
        node.wait()
    assert sent(bucket) == {} and not list(cache.rglob("*.safetensors"))
