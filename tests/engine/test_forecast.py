"""What `covmerge plan --cluster` predicts, and what it must hold to."""

import json
from dataclasses import replace

import pytest

from covmerge.errors import InputError, ResourceError
from covmerge.maths.linalg.auto import eigh_cost
from covmerge.plan.planning import build_plan
from covmerge.plan.recipe import format_size, parse_recipe
from covmerge.run.engine import Hardware, forecast, parse_hardware
from covmerge.run.sources import open_checkpoints
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.test_resume import save_plain

HERE = Hardware(cores=2, disk=1e9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=4, width=64)


@pytest.fixture(scope="module")
def plans(plain):
    base, experts = plain
    with open_checkpoints(base, experts, {}) as opened:
        sizes = [[one.size for one in own] for own in opened.contents().values()]
        yield {
            method: (
                build_plan(parse_recipe(recipe(plain, method)), opened.base, opened.experts),
                sizes,
            )
            for method in ("average", "ties", "ace")
        }


def recipe(plain, method):
    base, experts = plain
    named = {name: str(path) for name, path in experts.items()}
    return {"base": str(base), "experts": named, "method": method}


def stages(predicted):
    return {stage.name: stage for stage in predicted.stages}


@pytest.mark.parametrize("method", ["average", "ties", "ace"])
def test_one_node_moves_what_its_plan_says_and_reads_the_output_once_more(plans, method):
    plan, sizes = plans[method]
    found = forecast(plan, HERE, sizes)
    assert sum(s.total_bytes for s in found.stages) == plan.read_bytes + 2 * plan.write_bytes
    assert sum(s.link_bytes["disk"] for s in found.stages) == plan.read_bytes + 2 * plan.write_bytes
    assert found.seconds == sum(stage.seconds for stage in found.stages)
    assert all(stage.seconds == max(stage.times.values()) for stage in found.stages)


@pytest.mark.parametrize("method", ["average", "ties", "ace"])
def test_sources_are_hashed_by_all_and_the_one_that_leads_reads_back_what_others_wrote(
    plans, method
):
    plan, sizes = plans[method]
    merging = stages(forecast(plan, replace(HERE, nodes=4), sizes))["merge"]
    moved = sum(item.read_bytes + item.write_bytes for item in plan.items)
    read_back = plan.write_bytes - plan.write_bytes // 4
    assert merging.total_bytes == moved + sum(map(sum, sizes)) + read_back
    assert merging.link_bytes["disk"] == max(read_back, merging.total_bytes // 4)


def test_a_file_is_hashed_by_one_core_and_the_files_by_all(plans):
    plan, _ = plans["ace"]

    def seconds(sizes, **changed):
        machines = replace(HERE, hash=1e3, **changed)
        return stages(forecast(plan, machines, sizes))["merge"].times["hashing the sources"]

    two = [[1000, 3000], [2000]]
    assert seconds(two) == 4  # a thread for each source
    assert seconds(two, cores=1) == 6
    assert seconds(two, nodes=4) == 3  # the largest file
    assert seconds([[1000] * 6, [2000]], nodes=4, cores=1) == 2
    assert seconds([], nodes=4) == 0


@pytest.mark.parametrize("method", ["average", "ties", "ace"])
def test_more_of_anything_is_never_slower(plans, method):
    plan, sizes = plans[method]

    def seconds(**changed):
        return forecast(plan, replace(HERE, nodes=4, storage=3e9, **changed), sizes).seconds

    usual = seconds()
    for better in ({"disk": 2e9}, {"flops": 1e15}, {"stream": 1e12}, {"hash": 1e10}):
        assert seconds(**better) <= usual
    assert seconds(nic=1e8) > usual
    assert seconds(nic=1e12) == usual


def test_what_is_waited_for_is_named(plans):
    plan, sizes = plans["ace"]

    def bottleneck(**rates):
        return forecast(plan, replace(HERE, nodes=2, **rates), sizes).bottleneck

    assert bottleneck(disk=10.0) == "disk"
    assert bottleneck(disk=100.0, nic=10.0) == "nic"
    assert bottleneck(storage=10.0) == "storage"
    assert bottleneck(flops=10.0, eigen=1e12) == "products"
    assert bottleneck(eigen=10.0) == "eigenproblems"
    assert bottleneck(stream=10.0) == "sums"
    assert bottleneck() == "processes"  # they start


def test_bytes_of_each_link_that_there_is(plans):
    """A node's disk and network carry its own, one behind the other; the storage what all ask for."""
    plan, sizes = plans["ties"]

    def carried(**links):
        return [
            (s.total_bytes, dict(s.link_bytes))
            for s in forecast(plan, replace(HERE, nodes=2, **links), sizes).stages
        ]

    near = carried()
    assert near[0] == (0, {"disk": 0})
    assert all(0 < own["disk"] <= total for total, own in near[1:])
    assert carried(nic=1e9, storage=1e9) == [
        (total, {**own, "nic": own["disk"], "storage": total}) for total, own in near
    ]


def test_eigenproblems_have_a_rate_of_their_own(plans):
    plan, sizes = plans["ace"]
    item = plan.peak_item
    side = min(item.shape)
    assert item.eigen_flops == eigh_cost(side).flops < item.flops

    def computing(**rates):
        machines = replace(HERE, stream=1e30, **rates)
        return stages(forecast(plan, machines, sizes))["merge"].times["compute"]

    kinds = stages(forecast(plan, replace(HERE, nodes=2), sizes))["merge"]
    assert list(kinds.computing) == ["products", "eigenproblems", "sums"]
    assert sum(kinds.computing.values()) == kinds.times["compute"]
    eigen = sum(item.eigen_flops for item in plan.items)
    products = sum(item.flops for item in plan.items) - eigen
    assert computing(flops=1e6, eigen=1e5) == pytest.approx(products / 1e6 + eigen / 1e5)
    assert computing(flops=1e6) == pytest.approx(products / 1e6 + eigen / 8e5)
    # What adds up entry by entry has none.
    assert not any(item.eigen_flops for item in plans["average"][0].items)


def test_what_a_process_takes_to_start_is_added(plans):
    plan, sizes = plans["ties"]
    slow, none = (forecast(plan, replace(HERE, start=start), sizes) for start in (30.0, 0.0))
    assert slow.seconds == pytest.approx(none.seconds + 30.0)
    assert stages(slow)["start"].seconds == 30.0


def test_a_node_that_is_too_small_is_refused(plans):
    plan, sizes = plans["ace"]
    with pytest.raises(
        ResourceError, match=r"8 processes of a node, .* of its 1.00 GB: fewer GPUs"
    ):
        forecast(plan, replace(HERE, gpus=8, memory=10**9), sizes)


def test_machines_as_they_are_written():
    given = (
        "nodes=16, gpus=8,nic=25GB/s,disk=7GB/s,memory=2TB,flops=60TFLOPS,eigen=2T,stream=1TB/s,hash=2GB/s,"
        "start=2.5s"
    )
    assert parse_hardware(given) == Hardware(
        nodes=16,
        gpus=8,
        nic=25e9,
        disk=7e9,
        memory=2 * 10**12,
        flops=6e13,
        eigen=2e12,
        stream=1e12,
        hash=2e9,
        start=2.5,
    )


@pytest.mark.parametrize(
    "given, said",
    [
        ("node=16", "is none of nodes=.*hash=, start=. Did you mean 'nodes'"),
        ("nodes", "is none of nodes="),
        ("nodes=0", "a whole number from 1"),
        ("nodes=1.5", "a whole number"),
        ("nodes=2,nodes=3", "nodes= twice"),
        ("nic=25", "with their unit, such as 25GB/s"),
        ("", "is none of nodes="),
        ("nodes=2,,", "is none of nodes="),
        ("nic=25Gb/s", "unknown unit 'Gb'"),
        ("disk=0GB/s", "not a whole number of bytes"),
        ("flops=fast", "operations a second"),
        ("flops=0", "operations a second"),
        ("flops=1..2T", "1..2T"),
        ("memory=", "not a size"),
        ("start=2.5", "write seconds, such as 2.5s"),
        ("start=-1s", "write seconds"),
    ],
)
def test_what_is_no_description_is_named(given, said):
    with pytest.raises(InputError, match=said):
        parse_hardware(given)


def test_the_command(plain, tmp_path):
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(recipe(plain, "ties")))
    before = sorted(tmp_path.iterdir())
    cluster = "nodes=16,gpus=8,nic=25GB/s,disk=7GB/s"
    told = command("plan", file, "--cluster", cluster, "--json")
    shown = words(command("plan", file, "--cluster", cluster).stdout)
    found = json.loads(told.stdout)["cluster"]
    assert [stage["stage"] for stage in found["stages"]] == [
        "start",
        "look over",
        "merge",
        "verify",
    ]
    assert found["nodes"] == 16 and found["workers"] == 8
    assert f"bottleneck {found['bottleneck']}" in shown
    assert "stage time disk nic all nodes waits for" in shown
    assert "links disk and nic of the busiest node bottleneck" in shown
    for stage in found["stages"]:
        over = stage["link_bytes"]
        assert list(over) == ["disk", "nic"]
        moved = [format_size(size) for size in (*over.values(), stage["total_bytes"])]
        assert " ".join([*moved, stage["bound"]]) in shown
    shared = words(command("plan", file, "--cluster", f"{cluster},storage=40GB/s").stdout)
    assert "stage time disk nic storage all nodes waits for" in shared
    assert "disk and nic of the busiest node, storage of all together" in shared
    assert "nic 25.0 GB/s, storage 40.0 GB/s" in shared
    assert "16 nodes, 8 processes each. Nothing is written." in shown
    here = words(command("plan", file).stdout)
    assert "a rough estimate from a short test" in here
    assert sorted(tmp_path.iterdir()) == before


def test_all_ranks_verify(plans):
    """Files of the output as they are claimed; an adapter is one rank's."""
    plan, sizes = plans["ace"]
    plan = replace(plan, recipe=with_output(plan.recipe, shard_size=plan.write_bytes // 8 + 1))

    def verifying(plan=plan, **changed):
        *_, last = forecast(plan, replace(HERE, **changed), sizes).stages
        return last

    one, four = verifying(), verifying(nodes=4)
    assert one.link_bytes["disk"] == one.total_bytes == four.total_bytes == plan.write_bytes
    assert four.link_bytes["disk"] <= plan.write_bytes // 4 + 8
    cores = verifying(cores=1).times["hashing the output"]
    assert cores == pytest.approx(plan.write_bytes / HERE.hash)
    assert verifying(cores=8).times["hashing the output"] == pytest.approx(cores / 2)
    assert verifying(cores=1, nodes=4).times["hashing the output"] == pytest.approx(
        cores / 4, rel=0.01
    )
    assert verifying(nodes=100, cores=1).times["hashing the output"] == pytest.approx(
        cores / 8, rel=0.01
    )
    adapter = replace(plan, recipe=with_output(plan.recipe, format="adapter"))
    assert verifying(adapter, nodes=4).link_bytes["disk"] == plan.write_bytes


def test_an_output_in_a_bucket_is_sent_by_one_node(plans, plain, tmp_path):
    """Made and verified in a folder first: over the links of a node once more than one that stays there."""
    plan, sizes = plans["ace"]
    machines = replace(HERE, nodes=4, nic=1e6)
    stays, sent = (forecast(plan, machines, sizes, sent=own) for own in (False, True))
    *before, last = sent.stages
    assert tuple(before) == stays.stages
    assert (last.name, last.bound) == ("send", "nic")
    assert last.link_bytes == dict.fromkeys(("disk", "nic"), plan.write_bytes)
    assert last.total_bytes == plan.write_bytes
    assert last.seconds == plan.write_bytes / 1e6
    file = tmp_path / "recipe.yml"
    file.write_text(json.dumps(recipe(plain, "ace")))
    given = ["--cluster=nodes=4,nic=1MB/s", "--json"]
    named = {
        out: [s["stage"] for s in command("plan", file, *out, *given).json["cluster"]["stages"]]
        for out in ((), (str(tmp_path / "out"),), ("s3://models/merged",))
    }
    *others, bucket = named.values()
    assert others == [["start", "merge", "verify"]] * 2
    assert bucket == [*others[0], "send"]


def with_output(recipe, **changed):
    return recipe.model_copy(update={"output": recipe.output.model_copy(update=changed)})
