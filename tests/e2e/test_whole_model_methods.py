"""Methods that look beyond one tensor or one block of it, through the real engine."""

from collections import Counter
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import RecipeError, TensorError
from covmerge.maths.linalg.select import kth_magnitude
from covmerge.maths.methods.emr import Masses, rescalers
from covmerge.plan.planning import build, types
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.operations import Count
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from covmerge.run.engine import global_pass
from covmerge.run.engine.inputs import read_inputs
from covmerge.run.engine.progress import Silent
from covmerge.run.engine.selection import Selections
from covmerge.run.sources import open_checkpoints
from tests.advised import advice
from tests.cli.runs import save_plain, statistics_for
from tests.interrupted import InterruptAfter

SHAPES = {
    "layers.0.mlp.up_proj.weight": (24, 10),
    "layers.0.mlp.down_proj.weight": (10, 24),
    "layers.0.norm.weight": (10,),
    "embed_tokens.weight": (40, 10),
    "scale": (),
}


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    base = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    experts = {
        name: {n: w + size * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        for name, size in (("a", 0.01), ("b", 0.1), ("c", 0.03))
    }
    return base, experts


def updates_of(states):
    base, experts = states
    return {e: {n: w - base[n] for n, w in state.items()} for e, state in experts.items()}


@pytest.fixture(
    params=[(1 << 20, 1 << 17), (1 << 20, 30), (64, 1 << 17), (7, 7)],
    ids=lambda sizes: "blocks of {} by {}".format(*sizes),
)
def blocks(request, monkeypatch):
    """Row blocks, and parts of them, of several sizes: what is merged must not depend on them."""
    block, part = request.param
    monkeypatch.setattr(build, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(build, "_PART_ELEMENTS", part)
    return block


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_trims_over_the_whole_model(states, blocks, dtype):
    merged = covmerge.merge(*states, method="ties", dtype=dtype, out_dtype="float64").tensors
    base, updates = states[0], updates_of(states)
    signs, kept = {}, {}
    for expert, update in updates.items():
        update = {n: (states[1][expert][n].double() - base[n].double()) for n in update}
        flat = torch.cat([u.flatten() for u in update.values()])
        threshold = kth_magnitude(flat, len(flat) - int(0.2 * len(flat)))
        kept[expert] = {n: u * (u.abs() >= threshold) for n, u in update.items()}
    for name in base:
        stack = torch.stack([kept[e][name] for e in kept])
        signs = stack.sum(0).sign()
        agrees = (stack.sign() == signs) & (stack != 0)
        expected = (stack * agrees).sum(0) / agrees.sum(0).clamp_min(1)
        error = (merged[name] - base[name].double() - expected).abs().max()
        assert error <= (1e-6 if dtype == "float32" else 1e-12)


def test_ties_trims_by_the_update_not_by_the_tensor(states):
    """Expert b moved ten times as far as a; a global pass per expert keeps a fifth of each."""
    base, experts = states
    alone = covmerge.merge(base, {"b": experts["b"]}, method="ties").tensors
    changed = sum(int((alone[n] != base[n]).sum()) for n in base)
    total = sum(w.numel() for w in base.values())
    assert changed == int(0.2 * total) + 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["dare_task_arithmetic", "dare_ties", "della"])
def test_masks_depend_on_seed_and_names_alone(states, blocks, method):
    base, experts = states
    merged = covmerge.merge(base, experts, method=method, seed=3).tensors
    reordered = {name: experts[name] for name in ("c", "a", "b")}
    shuffled = covmerge.merge(
        dict(reversed(base.items())), reordered, method=method, seed=3, threads=1
    ).tensors
    other_seed = covmerge.merge(base, experts, method=method, seed=4).tensors
    for name in base:
        torch.testing.assert_close(shuffled[name], merged[name], rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(other_seed[name], merged[name]) for name in base)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", ["BLOCK_ELEMENTS", "_PART_ELEMENTS"])
@pytest.mark.parametrize(
    "method",
    ["average", "dare_task_arithmetic", "dare_ties", "della", "ties", "emr", "consensus"],
)
def test_blocks_change_nothing(states, monkeypatch, method, size):
    whole = covmerge.merge(*states, method=method)
    monkeypatch.setattr(build, size, 16)
    by_blocks = covmerge.merge(*states, method=method)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, by_blocks.tensors[name])
    for name, stats in whole.stats["tensors"].items():
        other = by_blocks.stats["tensors"][name]
        assert other["merged_norm"] == pytest.approx(stats["merged_norm"], rel=1e-6)
        assert other["update_norm"] == pytest.approx(stats["update_norm"], rel=1e-6)


class TestTheSample:
    """The global pass's guess saves a pass, and decides nothing."""

    @pytest.fixture
    def passes(self, monkeypatch):
        """How often each whole item is read by the global passes."""
        read = Counter()

        def counted(items, sources):
            read[items[0].key] += isinstance(items[0].tensor.operation, Count)
            return read_inputs(items, sources)

        monkeypatch.setattr("covmerge.run.engine.threads.read_inputs", counted)
        return read

    @pytest.mark.parametrize(("dtype", "expected"), [("float32", 1), ("float64", 3)])
    def test_a_good_guess_saves_a_pass(self, states, monkeypatch, passes, dtype, expected):
        merged = covmerge.merge(*states, method="ties", dtype=dtype).tensors
        assert set(passes.values()) == {expected + 1}
        passes.clear()
        monkeypatch.setattr(types, "_LEAST_SAMPLED", 0)
        monkeypatch.setattr(types, "_SAMPLED", 1.0)  # of so few entries, all of them
        moved = Moved()
        sampled = covmerge.merge(*states, method="ties", dtype=dtype, progress=moved).tensors
        assert all(torch.equal(tensor, sampled[name]) for name, tensor in merged.items())
        assert set(passes.values()) == {2 * expected + 1}
        assert moved.total == moved.done

    @pytest.mark.parametrize(("off", "counted"), [(1.0, 1), (1.04, 2), (0.96, 2), (2.0, 4)])
    def test_a_guess_by_so_much_too_long(self, states, monkeypatch, passes, off, counted):
        """One that is off by little costs a pass, and no progress beyond what was announced."""
        merged = covmerge.merge(*states, method="ties").tensors
        passes.clear()
        monkeypatch.setattr(types, "_LEAST_SAMPLED", 0)
        monkeypatch.setattr(types, "_SAMPLED", 1.0)

        class Misled(Selections):
            def __init__(self, global_passes, dtype, guesses):
                wrong = [
                    {key: {e: value * off for e, value in own.items()} for key, own in plan.items()}
                    for plan in guesses
                ]
                super().__init__(global_passes, dtype, wrong)

        monkeypatch.setattr(global_pass, "Selections", Misled)
        moved = Moved()
        sampled = covmerge.merge(*states, method="ties", progress=moved).tensors
        assert all(torch.equal(tensor, sampled[name]) for name, tensor in merged.items())
        assert set(passes.values()) == {2 + counted}  # two of the sample, which is all of it here
        assert moved.total == moved.done

    def test_methods_that_see_matrices_have_none(self, states, monkeypatch):
        monkeypatch.setattr(types, "_LEAST_SAMPLED", 0)
        base = {n: w for n, w in states[0].items() if "mlp" in n}
        experts = {e: {n: state[n] for n in base} for e, state in states[1].items()}
        for method, sampled in (("ties", True), ("knots", False)):
            given = {"base": "b", "experts": {e: e for e in experts}, "method": method}
            with open_checkpoints(base, experts, {}) as opened:
                (plan,) = build_plans([parse_recipe(given)], opened.base, opened.experts, {})
            (global_pass,) = plan.global_passes
            assert bool(global_pass.sample) == sampled


class Moved(Silent):
    """Adds up what a merge says of its advance."""

    def __init__(self):
        self.total = self.done = 0

    def start(self, total):
        self.total = total

    def advance(self, what, size, *, resumed=False):
        self.done += size


def test_two_global_passes_of_one_recipe_have_their_own_tensors(states):
    rules = [{"match": "embed*", "method": "ties", "parameters": {"density": 0.5}}]
    merged = covmerge.merge(*states, method="ties", rules=rules).tensors
    only = {n: w for n, w in states[0].items() if n.startswith("embed")}
    experts = {e: {n: s[n] for n in only} for e, s in states[1].items()}
    alone = covmerge.merge(only, experts, method="ties", density=0.5).tensors
    assert all(torch.equal(merged[n], alone[n]) for n in only)


class TestEmr:
    def test_every_expert_comes_back(self, states, tmp_path, blocks):
        base, experts = states
        out = tmp_path / "merged"
        result = covmerge.merge(base, experts, method="emr", out=out, dtype="float64")
        updates = updates_of(states)
        unified, sums = {}, []
        for name in base:
            stack = torch.stack([updates[e][name].double() for e in experts])
            sign = torch.where(stack.sum(0) > 0, 1.0, -1.0)
            unified[name] = sign * (stack * sign).clamp_min(0).amax(0)
            masks = (stack * sign > 0).double()
            sums.append(
                {
                    "size": base[name].numel(),
                    "expert_mass": [float(s) for s in stack.abs().flatten(1).sum(1)]
                    if stack.dim() > 1
                    else [float(abs(s)) for s in stack],
                    "kept_mass": [float((m * unified[name]).abs().sum()) for m in masks],
                }
            )
        factors = dict(zip(experts, rescalers([Masses(**each) for each in sums]), strict=True))
        assert result.stats["rescalers"] == pytest.approx(factors, rel=1e-6)
        for expert in experts:
            own = covmerge.load_expert(out, expert, base)
            for name in base:
                mask = updates[expert][name] * unified[name] > 0
                expected = base[name] + factors[expert] * mask * unified[name]
                torch.testing.assert_close(own[name].double(), expected, rtol=1e-5, atol=1e-6)

    def test_in_memory(self, states):
        result = covmerge.merge(*states, method="emr")
        assert set(result.masks) == {"a", "b", "c"}
        for expert, masks in result.masks.items():
            assert {n: m.shape for n, m in masks.items()} == {
                n: torch.Size(s) for n, s in SHAPES.items()
            }
            assert all(mask.dtype == torch.bool for mask in masks.values())
            assert result.stats["rescalers"][expert] > 0

    def test_unknown_expert_and_other_folders(self, states, tmp_path):
        covmerge.merge(*states, method="emr", out=tmp_path / "emr")
        with pytest.raises(covmerge.errors.InputError, match=r"no expert 'aa'. Did you mean 'a'"):
            covmerge.load_expert(tmp_path / "emr", "aa", states[0])
        covmerge.merge(*states, method="average", out=tmp_path / "average")
        with pytest.raises(covmerge.errors.InputError, match="no output of a method that writes"):
            covmerge.load_expert(tmp_path / "average", "a", states[0])

    def test_an_interrupted_merge_resumes_with_its_masks(self, states, tmp_path, monkeypatch):
        monkeypatch.setattr(build, "BLOCK_ELEMENTS", 32)
        covmerge.merge(*states, method="emr", out=tmp_path / "whole")

        out = tmp_path / "resumed"
        with pytest.raises(KeyboardInterrupt):
            covmerge.merge(*states, method="emr", out=out, progress=InterruptAfter(9))
        done = covmerge.merge(*states, method="emr", out=out, resume=True)
        assert done.run["resumed_items"] > 0
        for file in sorted((tmp_path / "whole").rglob("*")):
            if file.is_file():
                twin = out / file.relative_to(tmp_path / "whole")
                assert twin.read_bytes() == file.read_bytes(), file


def behind_merged_blocks(expert, path):
    """Write a file of statistics as covmerge-lab collects them for RegMean++."""
    with closing(StatisticsFile.open(path)) as file:
        grams = {name: file.read("gram", name).double() for name in file.names("gram")}
    with closing(covmerge.open_checkpoint(expert)) as own:
        statistics = [Statistic((name,), 100 * gram, rows=100) for name, gram in grams.items()]
        contents = Contents(own, {"gram": statistics}, examples=100, protocol="regmean++")
        write_statistics({path: contents}, overwrite=True)


class TestData:
    @pytest.mark.parametrize("method", ["regmean", "lot", "fisher"])
    def test_statistics_reach_the_method(self, tmp_path, method):
        folder = save_plain(tmp_path, width=12)
        files = statistics_for(method, folder)
        experts = {e: folder / f"{e}.safetensors" for e in ("a", "b")}
        merged = covmerge.merge(
            folder / "base.safetensors", experts, method=method, statistics=files
        ).tensors
        base = load_file(folder / "base.safetensors")
        kind = covmerge.methods.get(method).data
        measured = {e: load_file(path) for e, path in files.items()}
        for name in base:
            updates = [load_file(path)[name] - base[name] for path in experts.values()]
            if f"{kind}/{name}" in measured["a"]:
                data = [measured[e][f"{kind}/{name}"] for e in experts]
                if kind == "fisher":
                    continue  # its norm is over all tensors
                expected = covmerge.merge_layer(updates, method, data=data)
            else:
                expected = covmerge.merge_layer(updates, "average")
            torch.testing.assert_close(merged[name] - base[name], expected, rtol=1e-4, atol=1e-6)

    def test_without_statistics(self, states):
        with pytest.raises(
            RecipeError, match=r"needs the statistics of expert 'a'.*covmerge collect"
        ):
            covmerge.merge(*states, method="regmean")
        with pytest.raises(RecipeError, match=r"no such expert. Did you mean 'a'"):
            covmerge.merge(*states, method="regmean", statistics={"aa": "x"})

    def test_another_kind_and_another_protocol(self, tmp_path):
        folder = save_plain(tmp_path)
        files = statistics_for("fisher", folder)
        arguments = (
            folder / "base.safetensors",
            {e: folder / f"{e}.safetensors" for e in ("a", "b")},
        )
        with pytest.raises(RecipeError, match=r"no Gram matrix.*--kind gram"):
            covmerge.merge(*arguments, method="regmean", statistics=files)
        files = statistics_for("regmean", folder)
        said = advice("by the protocol '{}', and {} by '{}': collect all of them in one way")
        behind_merged_blocks(arguments[1]["a"], files["a"])
        with pytest.raises(RecipeError, match=said):
            covmerge.merge(*arguments, method="regmean", statistics=files)
        behind_merged_blocks(arguments[1]["b"], files["b"])
        covmerge.merge(*arguments, method="regmean", statistics=files)

    def test_statistics_of_another_model(self, tmp_path):
        folder = save_plain(tmp_path)
        files = statistics_for("regmean", folder)
        experts = {e: folder / f"{e}.safetensors" for e in ("a", "b")}
        swapped = {"a": files["b"], "b": files["a"]}
        with pytest.raises(covmerge.errors.InputError, match="expert 'a'"):
            covmerge.merge(
                folder / "base.safetensors", experts, method="regmean", statistics=swapped
            )

    def test_too_few_rows(self, tmp_path):
        folder = save_plain(tmp_path, width=120)  # the files say 100 rows
        files = statistics_for("regmean", folder)
        experts = {e: folder / f"{e}.safetensors" for e in ("a", "b")}
        arguments = {"method": "regmean", "statistics": files}
        with pytest.raises(TensorError, match=r"100 layer inputs of 120 dimensions.*few_rows"):
            covmerge.merge(folder / "base.safetensors", experts, **arguments)
        merged = covmerge.merge(
            folder / "base.safetensors", experts, tensors={"few_rows": "allow"}, **arguments
        )
        assert all(torch.isfinite(w).all() for w in merged.tensors.values())


class TestCompare:
    METHODS = ("average", "ties", "dare_ties", "actmat", "ace", "iso_c", "iso_cts", "wudi", "della")

    @pytest.mark.parametrize("threads", [1])
    def test_each_model_is_that_of_its_own_merge(self, states, tmp_path, threads, blocks):
        base, experts = states
        save_file(base, tmp_path / "base.safetensors")
        paths = {}
        for name, state in experts.items():
            paths[name] = tmp_path / f"{name}.safetensors"
            save_file(state, paths[name])
        together = tmp_path / "together"
        compared = covmerge.compare(
            tmp_path / "base.safetensors",
            paths,
            self.METHODS,
            together,
            parameters={"ace": {"eps": 1e-3}},
            threads=threads,
        )
        for row in compared.rows:
            parameters = {"eps": 1e-3} if row.method == "ace" else {}
            alone = tmp_path / row.method
            covmerge.merge(
                tmp_path / "base.safetensors",
                paths,
                method=row.method,
                out=alone,
                threads=threads,
                **parameters,
            )
            ours = load_file(together / row.method / "model.safetensors")
            theirs = load_file(alone / "model.safetensors")
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), row.method
            assert covmerge.verify(together / row.method).ok

    def test_the_table(self, states):
        compared = covmerge.compare(*states, ["average", "task_arithmetic"])
        updates = updates_of(states)
        flat = {e: torch.cat([u.flatten() for u in updates[e].values()]) for e in updates}
        mean = sum(flat.values()) / 3
        average, arithmetic = compared.rows
        assert average.norm == pytest.approx(float(mean.norm()), rel=1e-5)
        assert arithmetic.norm == pytest.approx(float(0.9 * mean.norm()), rel=1e-5)
        for expert, update in flat.items():
            cosine = torch.nn.functional.cosine_similarity(mean, update, dim=0)
            assert average.cosines[expert] == pytest.approx(float(cosine), abs=1e-5)
            assert compared.update_norms[expert] == pytest.approx(float(update.norm()), rel=1e-5)
        assert compared.path is None
        assert arithmetic.parameters == {"scale": 0.3}

    def test_all_runs_what_can_run_and_says_what_cannot(self, states):
        compared = covmerge.compare(*states)
        ran = {row.method for row in compared.rows}
        assert {"average", "ace", "actmat", "ties", "tsv_m", "wudi"} <= ran
        assert ran | set(compared.left_out) == set(covmerge.methods.names())
        assert "statistics" in compared.left_out["regmean"]
        assert "per expert" in compared.left_out["emr"]
        assert all(row.stable_rank > 0 for row in compared.rows)

    def test_reads_each_tensor_once(self, states, monkeypatch):
        from covmerge.files.checkpoints.memory import MemoryCheckpoint

        reads = []
        original = MemoryCheckpoint.read

        def counted(self, name, rows=None):
            reads.append(name)
            return original(self, name, rows)

        monkeypatch.setattr(MemoryCheckpoint, "read", counted)
        covmerge.compare(*states, ["average", "actmat", "ace", "iso_c"])
        assert len(reads) == len(SHAPES) * 4  # base and three experts

    def test_wrong_requests(self, states):
        with pytest.raises(RecipeError, match="Did you mean 'actmat'"):
            covmerge.compare(*states, ["actmatt"])
        with pytest.raises(RecipeError, match="named twice"):
            covmerge.compare(*states, ["ace", "ace"])
        with pytest.raises(RecipeError, match="which is not compared"):
            covmerge.compare(*states, ["ace"], parameters={"ties": {"density": 0.1}})

    def test_nothing_is_left_of_a_failed_comparison(self, states, tmp_path):
        states[1]["b"]["scale"].fill_(float("nan"))
        with pytest.raises(TensorError, match="'scale' of expert 'b'"):
            covmerge.compare(*states, ["average", "ace"], tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
