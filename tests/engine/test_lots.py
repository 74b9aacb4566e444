"""Neighbours of one shape in one batch, on CPU tensors: lots that the plan fixes, and the same results."""

import json
import shutil
import types
from math import isfinite

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError, TensorError
from covmerge.methods.registry import Method
from covmerge.plan.planning import build_plan
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import RunOptions, find_rank, lots, plan_memory
from covmerge.run.engine.lots import lots_of
from covmerge.run.sources import open_checkpoints
from tests.e2e.models import save_family
from tests.e2e.test_adapters import pytestmark as of_adapters
from tests.e2e.test_adapters import save_two_adapters
from tests.e2e.test_resume import PARTIAL, digests, interrupt_after

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
METHODS = ["ace", "actmat", "wudi", "iso_c"]


@pytest.fixture
def batches(monkeypatch):
    """Batches on the CPU, and of each how many layers it took of how many it was given."""
    seen = []
    at_once = Method.at_once

    def watched(self, groups, **parameters):
        found = at_once(self, groups, **parameters)
        seen.append((sum(merged is not None for merged in found), len(groups)))
        return found

    monkeypatch.setattr(lots, "_LOOPED", ())
    monkeypatch.setattr(Method, "at_once", watched)
    return seen


def models(layers=4, experts=3, dtype=torch.float32, unlike=()):
    """Models of two shapes of matrices, with a bias between them, and an embedding."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (40, 16)}
    for n in range(layers):
        shapes[f"model.layers.{n}.self_attn.q_proj.weight"] = (24, 24)
        shapes[f"model.layers.{n}.self_attn.q_proj.bias"] = (24,)
        shapes[f"model.layers.{n}.self_attn.v_proj.weight"] = (24, 24)
        shapes[f"model.layers.{n}.mlp.up_proj.weight"] = (48, 24)
    base = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    moved = {}
    for t in range(experts):
        moved[f"e{t}"] = {
            # The gate fires in every second layer.
            name: (
                w
                + 0.02
                * (5**t if ".1." in name or ".3." in name else 1)
                * torch.randn(w.shape, generator=draw)
            ).to(dtype)
            for name, w in base.items()
        }
    for expert, name, what in unlike:
        moved[expert][name] = what(base[name])
    return base, moved


def saved(folder, base, experts):
    """The same as files."""
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.safetensors" for name in experts}
    save_file(base, folder / "base.safetensors")
    for name, path in paths.items():
        save_file(experts[name], path)
    return folder / "base.safetensors", paths


def near(one, other, *, but=()):
    """Hold two documents of JSON to each other: numbers to rounding, all else as it is."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key not in but:
                near(one[key], other[key], but=but)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            near(a, b, but=but)
    elif isinstance(one, float) and isfinite(one):
        assert one == pytest.approx(other, rel=2e-3, abs=1e-9)
    else:
        assert one == other


def plan(base, experts, method="ace", **more):
    given = {"base": "base", "experts": {e: e for e in experts}, "method": method, **more}
    with open_checkpoints(base, experts, {}) as opened:
        return build_plan(parse_recipe(given), opened.base, opened.experts, {})


def names(made, found):
    return [[made.items[place].tensor.name for place in lot] for lot in found]


def test_lots_are_of_one_shape_and_operation(monkeypatch):
    made = plan(*models())
    assert lots_of(made, CPU) == ()
    found = names(made, lots_of(made, CUDA))
    assert [len(lot) for lot in found] == [8, 4]
    for lot in found:
        assert all(name.endswith(".weight") and "embed" not in name for name in lot)
    rules = [{"match": "*.1.*weight", "method": "ace", "parameters": {"eps": 1e-3}}]
    ruled = plan(*models(), rules=rules)
    assert [len(lot) for lot in lots_of(ruled, CUDA)] == [6, 3, 2]
    assert lots_of(plan(*models(), method="tsv_m"), CUDA) == ()  # it declares no batch
    assert lots_of(plan(*models(), after=["rescale"]), CUDA) == ()  # nor does what has steps
    # Whoever counts on files being read in about their order.
    monkeypatch.setattr(lots, "_NEAR", 6)
    assert max(lot[-1] - lot[0] for lot in lots_of(made, CUDA)) < 6


def test_large_matrices_go_by_themselves(monkeypatch):
    """On a GPU one keeps it busy: two of 768 × 3072 in a batch took up to 3.8 times as long."""
    made = plan(*models())
    monkeypatch.setattr(lots, "_LARGE", 24 * 24)
    assert [len(lot) for lot in lots_of(made, CUDA)] == [8]  # and not those of 48 × 24
    monkeypatch.setattr(lots, "_LARGE", 24 * 24 - 1)
    assert lots_of(made, CUDA) == ()


def test_lots_hang_on_the_plan_alone(monkeypatch):
    """Of the machine's memory nothing: a merge that is resumed on less must find the same lots."""
    made = plan(*models())
    found = lots_of(made, CUDA)
    for free in (2**30, 2**40):
        taken = types.SimpleNamespace(rss=2**20, available=free)
        monkeypatch.setattr("psutil.Process.memory_info", lambda self: taken)  # noqa: B023
        monkeypatch.setattr("psutil.virtual_memory", lambda: taken)  # noqa: B023
        assert lots_of(made, CUDA) == found


def test_lots_take_no_more_than_the_largest_item(monkeypatch):
    monkeypatch.setattr(lots, "_ROOM", 0)
    base, experts = models()
    made = plan(base, experts)
    most = max(item.workspace for item in made.items)
    for lot in lots_of(made, CUDA):
        assert len(lot) > 1
        assert sum(made.items[place].workspace for place in lot) <= most
    base = {f"layers.{n}.proj.weight": torch.randn(24, 24) for n in range(4)}
    alike = plan(base, {"a": base, "b": base})
    assert lots_of(alike, CUDA) == ()  # all are the largest
    monkeypatch.setattr(lots, "_ROOM", 2 * alike.items[0].workspace)
    assert lots_of(alike, CUDA) == ((0, 1), (2, 3))


def test_the_memory_plan_holds_a_lot():
    base, experts = models()
    made = plan(base, experts)
    found = lots_of(made, CUDA)
    without = plan_memory([made], None, device=CUDA, threads=1)
    held = plan_memory([made], None, device=CUDA, threads=1, lots=found)
    space = max(sum(made.items[place].workspace for place in lot) for lot in found)
    assert held.workspace == max(space, without.workspace) > without.workspace
    moved = max(
        sum(made.items[p].held_bytes + made.items[p].write_bytes for p in lot) for lot in found
    )
    assert held.in_flight >= moved and held.lots == found


def test_who_has_lots(batches):
    """Who does all of one plan: ranks claim items, and several plans run on each."""
    made = plan(*models())
    for workers in (1, 2):
        assert len(RunOptions(workers=workers).memory([made]).lots) == 2
    rank = find_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert RunOptions(rank=rank).memory([made]).lots == ()
    assert RunOptions().memory([made, made]).lots == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_in_batches_is_the_merge(method, threads, dtype, tmp_path, request):
    sources = saved(tmp_path / "models", *models(dtype=dtype))
    covmerge.merge(*sources, method, tmp_path / "loop", threads=threads)
    seen = request.getfixturevalue("batches")
    result = covmerge.merge(*sources, method, tmp_path / "batch", threads=threads)
    assert sorted(given for _, given in seen) == [4, 8]
    assert sum(taken for taken, _ in seen) >= 6  # in bfloat16 some are left to float64
    assert result.run["resumed_items"] == 0
    loop, batch = (load_file(tmp_path / own / "model.safetensors") for own in ("loop", "batch"))
    assert loop.keys() == batch.keys()
    start = load_file(sources[0])
    for name, tensor in loop.items():
        update = (tensor.double() - start[name].double()).norm()
        step = torch.finfo(dtype).eps * start[name].double().norm()
        assert (batch[name].double() - tensor.double()).norm() <= 2e-3 * update + step
    told = [json.loads((tmp_path / own / "covmerge.json").read_text()) for own in ("loop", "batch")]
    # Of hashes and of what is measured on the rounded weights rounding decides; all else is the same.
    near(*told, but=("files", "sha256", "rounding_loss"))


@pytest.mark.parametrize("items", [1, 4, 6, 9, 12, 15])
def test_resumed_lots_have_the_same_bytes(items, batches, tmp_path):
    base, experts = saved(tmp_path, *models())
    covmerge.merge(base, experts, "ace", out=tmp_path / "undisturbed", threads=1)
    whole = list(batches)
    batches.clear()
    interrupt_after(tmp_path, base, experts, items=items, method="ace")
    batches.clear()
    result = covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True)
    # A lot of which one item is missing is done again, with all that it had.
    assert all(own in whole for own in batches)
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")
    assert result.run["resumed_items"] <= items
    made = plan(*models())
    complete = [len(lot) for lot in lots_of(made, CPU)]
    assert sum(given for _, given in batches) in (0, *complete, sum(complete))


def test_a_lot_with_damaged_rows_is_done_again_as_a_whole(batches, tmp_path):
    base, experts = saved(tmp_path, *models())
    covmerge.merge(base, experts, "ace", out=tmp_path / "undisturbed", threads=1)
    finished = interrupt_after(tmp_path, base, experts, items=16, method="ace")
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    damaged = next(name for name in finished if "q_proj.weight" in name)
    data[begin + json.loads(data[8:begin])[damaged]["data_offsets"][0] + 10] ^= 0xFF
    shard.write_bytes(bytes(data))
    batches.clear()
    result = covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True)
    assert (8, 8) in batches
    # Of the eight not all need have been finished when it was interrupted.
    assert result.run["resumed_items"] < len(finished)
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


@pytest.mark.slow
def test_what_was_computed_otherwise_is_not_gone_on_with(batches, tmp_path, monkeypatch):
    """Item by item a matrix is rounded otherwise than in a batch: no output has some of each."""
    base, experts = saved(tmp_path, *models())
    interrupt_after(tmp_path, base, experts, items=6, method="ace")
    otherwise = "computed was 'on cpu, in batches' and is now 'on cpu'"
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match=otherwise):
        for name, value in alone.items():
            patch.setenv(name, value)
        covmerge.merge(base, experts, "ace", tmp_path / "out", resume=True, executor="ranks")
    covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True)
    shutil.rmtree(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lots, "_LOOPED", ("cpu",))
        interrupt_after(tmp_path, base, experts, items=6, method="ace")
    with pytest.raises(InputError, match="computed was 'on cpu' and is now 'on cpu, in batches'"):
        covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True)
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    covmerge.merge(base, experts, "ace", tmp_path / "out", resume=True, executor="ranks")


def test_members_that_a_batch_refuses_are_merged_and_told(batches):
    """An expert that changed nothing of one matrix: its note, and the kernel's result, beside a batch."""
    name = "model.layers.2.self_attn.q_proj.weight"
    base, experts = models(unlike=[("e1", name, torch.clone)])
    merged = covmerge.merge(base, experts, "ace", threads=1)
    assert sorted(batches) == [(4, 4), (7, 8)]
    (facts,) = merged.stats["tensors"][name]["matrices"]
    assert facts["unchanged"] == 1
    alone = covmerge.merge_layer([experts[e][name] - base[name] for e in experts], "ace")
    assert torch.equal(merged.tensors[name], base[name] + alone)


def test_an_error_names_the_tensor(batches):
    name = "model.layers.2.self_attn.v_proj.weight"

    def spoilt(weight):
        weight = weight.clone()
        weight[3, 4] = float("nan")
        return weight

    with pytest.raises(TensorError, match=rf"{name}.*first at \[3, 4\]"):
        covmerge.merge(*models(unlike=[("e1", name, spoilt)]), "ace", threads=1)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss", "vit"])
def test_matrices_of_every_form(family, batches, tmp_path):
    """Transposed, stacked and fused ones: of several in a tensor each place is a batch of its own."""
    sources = save_family(family, tmp_path)
    merged = covmerge.merge(*sources, "ace", threads=1)
    taken = sum(own for own, _ in batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lots, "_LOOPED", ("cpu",))
        loop = covmerge.merge(*sources, "ace", threads=1)
    assert taken >= 4
    for name, tensor in loop.tensors.items():
        off = (merged.tensors[name].double() - tensor.double()).norm()
        assert off <= 2e-3 * loop.stats["tensors"][name].get("merged_norm", 0.0) + 1e-5
    near(*(json.loads(json.dumps(own.stats)) for own in (loop, merged)), but=("rounding_loss",))


@of_adapters
def test_adapters_in_a_lot_are_merged_on_their_factors(batches, tmp_path):
    """What the plan counts on is shapes: a lot whose updates come by their factors goes item by item."""
    sources = save_two_adapters(tmp_path)
    merged = covmerge.merge(*sources, "ace", threads=1)
    assert batches == []  # none had two groups to run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lots, "_LOOPED", ("cpu",))
        loop = covmerge.merge(*sources, "ace", threads=1)
    for name, tensor in loop.tensors.items():
        assert torch.equal(merged.tensors[name], tensor)


def test_a_comparison_goes_without_lots(batches):
    base, experts = models()
    covmerge.compare(base, experts, ["ace", "actmat"])
    assert batches == []
