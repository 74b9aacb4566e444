"""The executor of a Ray cluster: several nodes, started on this machine, and one of them lost."""

import logging
import re
import socket
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError, ResourceError, TensorError
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.cluster import executor
from covmerge.run.engine.cluster.connection import cluster_address
from covmerge.run.engine.cluster.executor import _loads, needs_of
from covmerge.run.engine.executor import Task
from covmerge.run.engine.executors import run_options
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import NoOutput
from covmerge.run.sources import open_checkpoints
from tests.advised import advice
from tests.e2e.test_resume import save_plain
from tests.folders import contents
from tests.interrupted import InterruptAfter

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed: pip install 'covmerge[ray]'"
)
ray = pytest.importorskip("ray")
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
LARGE = {**NODE, "memory": 2**41}  # as it is told, for no machine has as much


@pytest.fixture(scope="module")
def cluster():
    """A head and a large node, each of one core."""
    with pytest.MonkeyPatch.context() as patch:
        # Else its workers wait for whatever runs beside these tests.
        patch.setenv("RAY_worker_niceness", "0")
        yield from _cluster()


def _cluster():
    found = _started(attempts=3)
    yield found
    found.shutdown()


def _started(attempts):
    """Ray gives a node half a minute to start, which is too little on a busy machine."""
    found = cluster_utils.Cluster()
    try:
        found.add_node(**NODE, include_dashboard=False)
        found.second = found.add_node(**LARGE)
    except Exception as error:
        found.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        return _started(attempts - 1)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=24, width=64)


# Ray's own processes and sockets end when they end.
quiet = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


class LoseANode:
    """Kills a node of the cluster when the first item is done."""

    def __init__(self, cluster, node):
        self.cluster, self.node, self.lost = cluster, node, False

    def start(self, total):
        pass

    def advance(self, what, size, *, resumed=False):
        if not self.lost:
            self.lost = True
            self.cluster.remove_node(self.node, allow_graceful=False)

    def finish(self):
        pass


@quiet
@pytest.mark.slow
def test_what_a_cluster_began_is_resumed_by_threads(cluster, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # as within `ray job submit`
    stop = InterruptAfter(5)
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(*plain, "ace", tmp_path / "out", executor="ray", progress=stop)
    done = covmerge.merge(*plain, "ace", tmp_path / "out", resume=True)
    assert done.run["resumed_items"] >= 5
    covmerge.merge(*plain, "ace", tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@quiet
@pytest.mark.slow
def test_the_device_is_that_of_the_node(cluster, plain, tmp_path):
    """The process that merges needs no GPU. What Ray calls one need not be there, and the node says so."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    on = {"executor": "ray", "address": cluster.address, "device": "cuda"}

    def automatic():
        on_cluster = {"executor": "ray", "address": cluster.address, "patience": 1.0}
        return run_options({"device": "auto", **on_cluster}).torch_device.type

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # of the process that merges
        assert automatic() == "cpu"
    with pytest.raises(
        ResourceError, match=r"device=\"cuda\", and no node .* has a GPU that Ray knows"
    ):
        covmerge.merge(*plain, "ace", tmp_path / "out", **on)
    node = cluster.add_node(**NODE, num_gpus=1)
    try:
        here = rf"node {re.escape(socket.gethostname())} \([0-9.]+\) of the cluster"
        with pytest.raises(InputError, match=f'{here}: device="cuda" cannot be used here: '):
            covmerge.merge(*plain, "ace", tmp_path / "out", **on)
        assert automatic() == "cuda" and not ray.is_initialized()
    finally:
        cluster.remove_node(node)
    assert list(tmp_path.iterdir()) == []


@quiet
@pytest.mark.slow
class TestWithinOneJob:
    """Merges of a process that is in the cluster; so the cluster's processes start once for all of them."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def joined(cls, cluster):
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()

    @pytest.mark.parametrize("method", [pytest.param("ace", marks=pytest.mark.nightly), "ties"])
    def test_the_same_bytes_as_threads(self, cluster, plain, tmp_path, method):
        """With an output of several files, which are verified by tasks."""
        given = (*plain, method)
        covmerge.merge(*given, tmp_path / "threads", shard_size="100KB")
        out = tmp_path / "ray"
        on = {"executor": "ray", "address": cluster.address}
        merged = covmerge.merge(*given, out, shard_size="100KB", **on)
        assert merged.verification.ok
        assert contents(out) == contents(tmp_path / "threads")
        assert len(list(out.glob("model-*.safetensors"))) > 2

    def test_who_was_in_the_cluster_before_stays_in_it(self, cluster, plain, tmp_path):
        """And an interrupted merge, whose tasks it would not end by leaving, has waited for them."""
        covmerge.merge(*plain, "ace", tmp_path / "whole")
        on = {"executor": "ray", "address": cluster.address}
        with pytest.raises(KeyboardInterrupt):
            covmerge.merge(*plain, "ace", tmp_path / "out", progress=InterruptAfter(5), **on)
        assert ray.is_initialized()
        covmerge.merge(*plain, "ace", tmp_path / "out", resume=True, **on)
        assert ray.is_initialized()
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_an_error_in_a_task_ends_the_merge(self, cluster, plain, tmp_path):
        base, experts = plain
        bad = load_file(experts["e1"])
        bad["layers.7.proj.weight"][2, 3] = float("nan")
        save_file(bad, tmp_path / "bad.safetensors")
        given = {**experts, "e1": tmp_path / "bad.safetensors"}
        out = tmp_path / "out"
        with pytest.raises(TensorError, match=r"layers\.7.*first at \[2, 3\]"):
            covmerge.merge(base, given, "average", out, executor="ray", address=cluster.address)
        with pytest.raises(ResourceError, match="no node of the cluster may give more than"):
            covmerge.merge(
                base,
                experts,
                "ace",
                out,
                executor="ray",
                address=cluster.address,
                max_memory="100MB",
            )
        said = advice("a merge in memory cannot be shared by machines: leave out --executor ray")
        with pytest.raises(InputError, match=said):
            covmerge.merge(base, experts, "ace", executor="ray", address=cluster.address)
        assert covmerge.merge(base, experts, "ace").tensors
        assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]

    def test_where_the_only_node_that_is_large_enough_is_lost_the_merge_says_so_and_waits(
        self, cluster, plain, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(executor, "PROCESS_HOLDS", 2**40)
        monkeypatch.setattr(executor, "_CHECKS_EVERY", 1.0)
        losing, later, said = LoseANode(cluster, cluster.second), [], []

        def a_new_node(message, *_):
            said.append(str(message))
            if not later:
                later.append(cluster.add_node(**LARGE))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", a_new_node)
            how = {"executor": "ray", "address": cluster.address, "progress": losing}
            covmerge.merge(*plain, "ace", tmp_path / "out", **how)
        (cluster.second,) = later
        assert losing.lost
        assert any(
            "no node of the cluster may give more" in each and "waits for" in each for each in said
        )
        covmerge.verify(tmp_path / "out")

    def test_a_node_that_is_lost(self, cluster, plain, tmp_path):
        covmerge.merge(*plain, "ties", tmp_path / "whole")
        losing = LoseANode(cluster, cluster.second)
        how = {"executor": "ray", "address": cluster.address, "progress": losing}
        covmerge.merge(*plain, "ties", tmp_path / "out", **how)
        assert losing.lost
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def batches(plain):
    base, experts = plain
    given = {"base": str(base), "experts": {n: str(p) for n, p in experts.items()}, "method": "ace"}
    with open_checkpoints(base, experts, {}) as opened:
        (plan,) = build_plans([parse_recipe(given)], opened.base, opened.experts)
    return [(index, (item,)) for index, item in enumerate(plan.items)]


def test_what_a_task_asks_of_its_node(batches, monkeypatch):
    monkeypatch.setattr(WorkItem, "is_narrow", lambda self, device: False)
    load = batches[:2]
    context = Context(torch.float32, torch.device("cpu"), ({},))
    on_cpu = Task(Sources({}), context, (NoOutput(),))
    on_gpu = replace(on_cpu, context=replace(context, device=torch.device("cuda")))
    small = {"CPU": 4.0, "memory": 2.0**34}
    large = {"CPU": 16.0, "memory": 2.0**36}
    with_gpu = {"CPU": 2.0, "memory": 2.0**32, "GPU": 1.0}
    nodes = [small, large, with_gpu]
    assert needs_of(load, on_cpu, 8, nodes, None).keys() == {"num_cpus", "memory"}
    assert needs_of(load, on_cpu, 8, nodes, None)["num_cpus"] == 8
    assert needs_of(load, on_cpu, 8, [small], None)["num_cpus"] == 4  # as many as there are
    # Beside a GPU the CPU has next to nothing to do.
    needed = needs_of(load, on_gpu, 8, nodes, None)
    assert (needed["num_cpus"], needed["num_gpus"]) == (1, 1)
    said = advice("a GPU that Ray knows of: start one with `--num-gpus`, or leave out --device")
    with pytest.raises(ResourceError, match=said):
        needs_of(load, on_gpu, 8, [small, large], None)
    for task, there in ((on_gpu, [small, with_gpu]), (on_cpu, [small, large])):
        assert needs_of(load, task, 8, there, None)
    # The memory must be that of a node with a GPU.
    little = {**with_gpu, "memory": needed["memory"] - 1.0}
    with pytest.raises(ResourceError, match="may give more than"):
        needs_of(load, on_gpu, 8, [large, little], None)
    said = advice("may give more than {} (--max-memory, and what Ray was started with)")
    with pytest.raises(ResourceError, match=said):
        needs_of(load, on_cpu, 8, nodes, needed["memory"] - 1)
    assert needs_of(load, on_cpu, 8, nodes, 2 * needed["memory"])


def test_a_node_whose_device_has_no_room_says_so(batches, monkeypatch):
    monkeypatch.setattr(executor, "usable_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**36))
    words = r"node .* of the cluster: 'layers\.0.* of the memory of cuda, and 0 B are free"
    with pytest.raises(ResourceError, match=words):
        executor._check_device(batches[:2], torch.device("cuda"))


def test_which_cluster(plain, tmp_path):
    assert cluster_address("auto", {}) == "auto"
    assert cluster_address(None, {"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    which = advice("which cluster? Give --address")
    for address, words in (
        (None, which),
        ("ray://head:10001", advice("Start it by `ray job submit`, or give HOST:PORT")),
    ):
        with pytest.raises(InputError, match=words):
            cluster_address(address, {})
    assert cluster_address("head:6379", {}) == "head:6379"
    with pytest.raises(InputError, match=r"address=\"127.0.0.1:1\": there is no Ray cluster \("):
        covmerge.merge(*plain, "ace", tmp_path / "out", executor="ray", address="127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []
    for given, words in (
        ({"address": "auto"}, "give executor=.ray. too"),
        (
            {"executor": "ray", "workers": 2},
            advice("--executor ray: the cluster says how many work; leave out --workers"),
        ),
        (
            {"executor": "ray", "address": "auto", "device": "cuda:1"},
            advice("a task of a cluster computes on the GPU that Ray gives it: give --device cuda"),
        ),
    ):
        with pytest.raises(InputError, match=words):
            covmerge.merge(*plain, "ace", tmp_path / "out", **given)
    assert run_options({"executor": "ray", "address": "auto"}).cluster == "auto"
    assert run_options({"executor": "ray", "address": "auto", "device": "cpu"}).torch_device


def test_each_core_has_several_lots_and_neighbours_stay_together(batches):
    for cores in (1, 2, 64):
        loads = _loads(batches, cores)
        assert [one for load in loads for one in load] == batches
        assert len(loads) >= min(len(batches), 8 * cores)
