"""Global passes, comparisons, masks and statistics from files to files, beside dense computations."""

import json
import random
import shutil
import signal
import time
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError, CovmergeError, InputError, RecipeError, TensorError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.maths.linalg.random import Stream
from covmerge.maths.methods.emr import Masses, rescalers
from covmerge.methods import registry
from covmerge.plan.planning import build as plan_build
from covmerge.plan.statistics import StatisticsFile, collect
from tests.cli.runs import covmerge as cli
from tests.cli.runs import flags, save_plain, statistics_for, write_recipe
from tests.covering import by_day
from tests.e2e.models import build, fine_tuned, run, save_family
from tests.folders import contents
from tests.forked import printed
from tests.held import COMMAND_LINE, held, journaled, wait_until
from tests.interrupted import InterruptAfter
from tests.statistics.models import classifier, write_texts
from tests.statistics.models import save_family as save_with_tokenizers

# Those that see weights, of so many experts each: test_weights_methods.py.
DATA_FREE = [m.name for m in registry if m.data == "none" and m.sees == "updates"]
ELEMENTWISE = [m for m in DATA_FREE if registry.get(m).takes_any_shape]

UP, DOWN = "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight"
EMBED, NORM, CONV = "embed_tokens.weight", "layers.0.norm.weight", "conv.weight"
SHAPES = {
    UP: (23, 10),
    DOWN: (10, 23),
    EMBED: (41, 10),
    NORM: (10,),
    CONV: (4, 3, 3, 3),
    "scale": (),
    "no.rows": (0, 5),
    "no.columns": (5, 0),
}
SIZES = {"a": 0.02, "b": 0.1, "c": 0.05}


def make(dtype=torch.float32, shapes=SHAPES):
    """A base and three experts that moved unequally far."""
    generator = torch.Generator().manual_seed(0)
    base = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    experts = {
        expert: {
            n: (w.double() + size * torch.randn(w.shape, generator=generator)).to(dtype)
            for n, w in base.items()
        }
        for expert, size in SIZES.items()
    }
    return base, experts


def task_vectors(base, experts, names, *, dtype=torch.float32, missing="base"):
    """Δ_t by expert and name: zero where the expert has no such rows, or left out as `present`."""
    found = {}
    for expert, state in experts.items():
        found[expert] = {}
        for name in names:
            if name not in state and missing == "present":
                continue
            start, own = base[name].to(dtype), state.get(name, base[name]).to(dtype)
            both = tuple(slice(min(sizes)) for sizes in zip(start.shape, own.shape, strict=True))
            update = torch.zeros_like(start)
            update[both] = own[both] - start[both]
            found[expert][name] = update
    return found


def dropped(vectors, *, drop=0.5, seed=0):
    """DARE, with the engine's random numbers."""
    return {
        expert: {
            name: update.masked_fill(
                Stream(f"{name}\0{expert}").uniform(seed, tuple(update.shape)) < drop, 0.0
            )
            * (1.0 / (1.0 - drop))
            for name, update in updates.items()
        }
        for expert, updates in vectors.items()
    }


def dense_ties(vectors, *, density=0.2, weights=None, merge="mean"):
    """TIES with every vector in memory at once: the merged update by name, in float64."""
    kept, shares = {}, weights or {}
    for expert, updates in vectors.items():
        magnitudes = torch.cat([u.flatten() for u in updates.values()]).abs().sort().values
        rank = len(magnitudes) - int(density * len(magnitudes))
        threshold = magnitudes[rank - 1] if rank else 0.0
        kept[expert] = {n: (u * (u.abs() >= threshold)).double() for n, u in updates.items()}
    merged = {}
    for name in {name: None for updates in kept.values() for name in updates}:
        there = {e: updates[name] for e, updates in kept.items() if name in updates}
        sign = sum(shares.get(e, 1.0) * u for e, u in there.items()).sign()
        agreeing = {e: (u.sign() == sign) & (u != 0) for e, u in there.items()}
        total = sum(shares.get(e, 1.0) * u * agreeing[e] for e, u in there.items())
        share = sum(shares.get(e, 1.0) * agreeing[e].double() for e in there)
        merged[name] = total / torch.where(share > 0, share, 1.0) if merge == "mean" else total
    return merged


def assert_merged(tensors, base, expected, tolerance=1e-6):
    for name, update in expected.items():
        torch.testing.assert_close(
            tensors[name].double(), base[name].double() + update, rtol=0.0, atol=tolerance
        )


def weights_in(folder):
    return {
        n: w for file in sorted(folder.glob("*.safetensors")) for n, w in load_file(file).items()
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[1 << 20, 30], ids=lambda n: f"blocks of {n}")
def blocks(request, monkeypatch):
    monkeypatch.setattr(plan_build, "BLOCK_ELEMENTS", request.param)


class TestGlobalPasses:
    @pytest.mark.covering(1)
    @pytest.mark.parametrize("computed", ["float32", "float64"])
    @pytest.mark.parametrize(
        ("stored", "density"),
        [
            *((stored, 0.2) for stored in (torch.float64, torch.bfloat16, torch.half)),
            *((torch.float32, density) for density in (1.0, 0.999, 0.2, 1e-9)),
        ],
    )
    def test_dtypes_and_densities(self, stored, computed, density, blocks):
        base, experts = make(stored)
        arguments = {"density": density, "dtype": computed, "out_dtype": "float64"}
        weights = {"b": 3.0}
        vectors = task_vectors(base, experts, SHAPES, dtype=getattr(torch, computed))
        tolerance = 1e-6 if computed == "float32" else 1e-12
        for method, used in (("ties", vectors), ("dare_ties", dropped(vectors))):
            merged = covmerge.merge(base, experts, method, weights=weights, **arguments).tensors
            expected = dense_ties(used, density=density, weights=weights)
            assert_merged(merged, base, expected, tolerance)

    @pytest.mark.covering(2)
    @pytest.mark.parametrize("missing", ["base", "present"])
    @pytest.mark.parametrize("combine", ["mean", "sum"])
    def test_absent_tensors_rows_and_buffers(self, missing, combine, blocks):
        base, experts = make()
        buffers = {"position_ids": torch.arange(10)[None], "rotary_emb.inv_freq": torch.rand(5)}
        for state in (base, *experts.values()):
            state |= {name: buffer.clone() for name, buffer in buffers.items()}
        del experts["a"][UP], experts["b"][NORM]
        for state in experts.values():
            del state["scale"]  # nobody has it: copied, and no part of the global pass
            state["rotary_emb.inv_freq"] += 0.5  # averaged, and no part of the global pass either
            state["position_ids"] += 1
        experts["b"][EMBED] = experts["b"][EMBED][:33].clone()
        experts["c"][EMBED] = torch.cat([experts["c"][EMBED], torch.full((5, 10), 9.0)])
        merged = covmerge.merge(
            base,
            experts,
            "ties",
            merge=combine,
            tensors={"missing": missing, "vocabulary": "base"},
        ).tensors
        names = [name for name in SHAPES if name != "scale"]
        vectors = task_vectors(base, experts, names, missing=missing)
        assert_merged(merged, base, dense_ties(vectors, merge=combine))
        assert torch.equal(merged["scale"], base["scale"])
        assert torch.equal(merged["position_ids"], base["position_ids"])
        torch.testing.assert_close(
            merged["rotary_emb.inv_freq"], buffers["rotary_emb.inv_freq"] + 0.5
        )

    def test_rules_take_tensors_out_of_the_global_pass(self, blocks):
        base, experts = make()
        rules = [
            {"match": EMBED, "use": "base"},
            {"match": CONV, "method": "ties", "parameters": {"density": 0.5}},
            {"role": "norm", "method": "dare_ties"},
            {"match": DOWN, "use": "head"},
        ]
        result = covmerge.merge(base, experts, "ties", rules=rules)
        rest = [n for n in SHAPES if n not in (EMBED, CONV, NORM, DOWN)]
        assert_merged(result.tensors, base, dense_ties(task_vectors(base, experts, rest)))
        own = dense_ties(task_vectors(base, experts, [CONV]), density=0.5)
        assert_merged(result.tensors, base, own)
        norm = dense_ties(dropped(task_vectors(base, experts, [NORM])))
        assert_merged(result.tensors, base, norm)
        for name in (EMBED, DOWN):
            assert torch.equal(result.tensors[name], base[name])
        assert all(torch.equal(result.heads[e][DOWN], experts[e][DOWN]) for e in experts)

    @pytest.mark.parametrize("method", ["ties", "dare_ties"])
    def test_unchanged_and_single_experts(self, method):
        base, experts = make()
        unchanged = {name: weight.clone() for name, weight in base.items()}
        given = (
            {"z": unchanged},
            {"z": unchanged, "y": unchanged},
            {"a": experts["a"]},
            {"z": unchanged, "a": experts["a"]},
        )
        for some in given:
            vectors = task_vectors(base, some, SHAPES)
            used = dropped(vectors) if method == "dare_ties" else vectors
            merged = covmerge.merge(base, some, method, allow=["unchanged-expert"]).tensors
            assert_merged(merged, base, dense_ties(used))

    def test_shards_pickles_and_ties(self, tmp_path):
        """One model, stored in four ways: the global pass goes through the same entries."""
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=2,
            intermediate_size=24, num_key_value_heads=1, max_position_embeddings=32,
            tie_word_embeddings=True,
        )  # fmt: skip
        base = transformers.LlamaForCausalLM(config)
        models = {"base": base, "e1": fine_tuned(base, 1), "e2": fine_tuned(base, 2)}
        for name, model in models.items():
            model.save_pretrained(tmp_path / "whole" / name)
            model.save_pretrained(tmp_path / "shards" / name, max_shard_size="5KB")
            state = weights_in(tmp_path / "whole" / name)
            for kind in ("pickle", "twice"):
                (tmp_path / kind / name).mkdir(parents=True)
                shutil.copy(tmp_path / "whole" / name / "config.json", tmp_path / kind / name)
            torch.save(state, tmp_path / "pickle" / name / "pytorch_model.bin")
            twice = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
            save_file(twice, tmp_path / "twice" / name / "model.safetensors")
        states = {name: weights_in(tmp_path / "whole" / name) for name in models}
        start = states.pop("base")
        expected = dense_ties(task_vectors(start, states, start))
        assert "lm_head.weight" not in expected
        for kind in ("whole", "shards", "pickle", "twice"):
            folder, out = tmp_path / kind, tmp_path / f"out-{kind}"
            experts = {name: folder / name for name in states}
            covmerge.merge(folder / "base", experts, "ties", out=out)
            merged = weights_in(out)
            assert merged.keys() == start.keys()
            assert_merged(merged, start, expected)
            transformers.AutoModelForCausalLM.from_pretrained(out)

    def test_not_finite_is_found_in_the_global_pass(self, tmp_path):
        base, experts = make()
        experts["c"][UP][5, 1] = float("nan")
        with pytest.raises(TensorError, match=rf"'{UP}' of expert 'c'.*the first at \[5, 1\]"):
            covmerge.merge(base, experts, "ties", out=tmp_path / "out")
        assert names_in(tmp_path) == []
        covmerge.merge(base, experts, "ties", rules=[{"match": UP, "use": "base"}])


# One method of each kind: with a global pass, with random numbers, with masks, with W₀, and of matrices.
KINDS = ["average", "ties", "della", "emr", "free", "ace", "iso_cts", "knots"]
COMPARED = {
    "bert": ("bert", DATA_FREE, {}, ()),
    "gpt2": ("gpt2", KINDS, {"conv1d": "stored"}, ()),
    "gpt2 split": ("gpt2", KINDS, {"fused": "split"}, ()),
    "mixtral": ("mixtral", KINDS, {"fused": "split"}, ()),
    "gpt_oss": ("gpt_oss", [*KINDS, "dare_task_arithmetic", "dare_ties"], {}, ()),
    "vit": ("vit", KINDS, {"convolutions": "method"}, ()),
    "llama": ("llama", KINDS, {"embeddings": "method", "output_head": "method"}, ()),
    "rules": (
        "bert",
        KINDS,
        {},
        (
            {"match": "*intermediate*", "role": "linear", "method": "ace"},
            {"match": "*query*", "method": "dare_ties", "parameters": {"seed": 9}},
            {"match": "*key*", "role": "linear", "method": "iso_c"},
            {"match": "*attention.output*", "use": "base"},
            {"role": "norm", "method": "della"},
        ),
    ),
    "stack rules": ("gpt_oss", KINDS, {}, ({"match": "*experts*", "method": "tsv_m"},)),
}


class TestCompare:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "case",
        [pytest.param(c, marks=pytest.mark.nightly if c == "bert" else ()) for c in COMPARED],
    )
    def test_every_model_is_that_of_its_own_merge(self, case, tmp_path, monkeypatch):
        name, methods, tensors, rules = COMPARED[case]
        if case in ("bert", "gpt_oss"):
            monkeypatch.setattr(plan_build, "BLOCK_ELEMENTS", 100)
        base, experts = save_family(name, tmp_path)
        how = {"tensors": tensors, "rules": rules, "threads": 1}
        compared = covmerge.compare(base, experts, methods, tmp_path / "all", **how)
        assert [row.method for row in compared.rows] == methods
        json.dumps(compared.as_json(), allow_nan=False)
        # By day every other one beside a merge by itself: the first of one case, the second of the next.
        step = by_day(2, 1)
        for method in methods[list(COMPARED).index(case) % step :: step]:
            ours, theirs = tmp_path / "all" / method, tmp_path / method
            covmerge.merge(base, experts, method, theirs, **how)
            assert contents(ours).keys() == contents(theirs).keys()
            assert_same(weights_in(ours), weights_in(theirs))
            assert covmerge.verify(ours).ok

    @pytest.mark.parametrize(
        "dtype", ["float32", pytest.param("float64", marks=pytest.mark.nightly)]
    )
    def test_any_choice_in_any_order(self, dtype, tmp_path):
        shapes = [(13, 13), (7, 29), (31, 5), (1, 9), (9, 1)]
        names = {f"layers.{n}.up_proj.weight": shape for n, shape in enumerate(shapes)}
        base, experts = make(shapes={**names, NORM: (9,)})
        choose = random.Random(0)
        how = {"dtype": dtype, "weights": {"a": 2.0}}
        alone = {m: covmerge.merge(base, experts, m, **how).tensors for m in DATA_FREE}
        for trial in range(8):
            chosen = choose.sample(DATA_FREE, choose.randint(1, 6))
            covmerge.compare(base, experts, chosen, tmp_path / str(trial), **how)
            for method in chosen:
                assert_same(weights_in(tmp_path / str(trial) / method), alone[method])

    @pytest.mark.parametrize("methods", [("average", "ties"), ("ties", "average")])
    def test_a_rule_and_a_compared_method_have_global_passes_of_their_own(self, methods, tmp_path):
        base, experts = make()
        rules = [{"match": EMBED, "method": "ties"}]
        covmerge.compare(base, experts, methods, tmp_path / "all", rules=rules)
        for method in methods:
            alone = covmerge.merge(base, experts, method, rules=rules).tensors
            assert_same(weights_in(tmp_path / "all" / method), alone)

    def test_little_memory_changes_nothing(self, tmp_path):
        base, experts = save_family("bert", tmp_path)
        methods = ["ties", "iso_c", "wudi", "ace"]
        free = covmerge.compare(base, experts, methods, tmp_path / "free")
        allowed = free.run["expected_peak_memory"] - 64 * 2**20
        tight = covmerge.compare(base, experts, methods, tmp_path / "tight", max_memory=allowed)
        assert tight.run["expected_peak_memory"] <= allowed
        for method in methods:
            assert_same(
                weights_in(tmp_path / "tight" / method), weights_in(tmp_path / "free" / method)
            )
        with pytest.raises(CovmergeError, match="max_memory"):
            covmerge.compare(base, experts, methods, tmp_path / "refused", max_memory="1MB")
        assert not (tmp_path / "refused").exists()

    def test_task_heads_are_kept_in_every_model(self, tmp_path):
        encoder = classifier(3).bert
        encoder.save_pretrained(tmp_path / "base")
        experts = {}
        for name, labels in (("topic", 3), ("tone", 2)):
            model = classifier(labels)
            model.bert.load_state_dict(fine_tuned(encoder, seed=labels).state_dict())
            model.save_pretrained(tmp_path / name)
            experts[name] = tmp_path / name
        methods = ["average", "ties", "ace", "emr"]
        covmerge.compare(tmp_path / "base", experts, methods, tmp_path / "out")
        for method in methods:
            heads = tmp_path / "out" / method / "heads"
            assert names_in(heads) == ["tone.safetensors", "topic.safetensors"]
            own = weights_in(tmp_path / "tone")
            head = load_file(heads / "tone.safetensors")
            assert set(head) == {"classifier.weight", "classifier.bias"}
            assert all(torch.equal(head[name], own[name]) for name in head)
            transformers.AutoModel.from_pretrained(tmp_path / "out" / method)
        alone = covmerge.merge(tmp_path / "base", experts, "ties").tensors
        assert_same(weights_in(tmp_path / "out" / "ties"), alone)

    def test_outputs_through_the_command_line(self, tmp_path):
        folder = save_plain(tmp_path)
        out = tmp_path / "out"
        first = cli("compare", *flags(folder), "--methods=ace,ties", "--out", out, "--json").json
        assert [row["folder"] for row in first["methods"]] == [str(out / "ace"), str(out / "ties")]
        assert cli("compare", *flags(folder), "--methods=ace", "--out", out, code=2)
        cli("compare", *flags(folder), "--methods=average", "--out", out, "--overwrite")
        assert names_in(out) == ["average", "covmerge.json"]
        cli("merge", *flags(folder), out, "--overwrite")
        assert names_in(out) == ["README.md", "covmerge.json", "model.safetensors"]
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        (foreign / "mine.txt").write_text("kept")
        before = names_in(tmp_path)
        refused = {
            "not known for an output of covmerge": (
                "--methods=ace",
                "--out",
                foreign,
                "--overwrite",
            ),
            "overlap": ("--methods=ace", "--out", folder / "a.safetensors" / "x"),
            "must stay within": ("--methods=ace,della", "--set=della.window=0.9", "--out", "new"),
            "no method 'tis'": ("--methods=ace,tis", "--out", "new"),
        }
        for message, options in refused.items():
            ran = cli("compare", *flags(folder), *options, code=2)
            assert message in ran.stderr
        assert names_in(tmp_path) == before
        assert (foreign / "mine.txt").read_text() == "kept"

    def test_recipe_with_statistics(self, tmp_path):
        folder = save_plain(tmp_path)
        statistics_for("regmean", folder)
        recipe = write_recipe(folder, "method: ties")
        text = recipe.read_text()
        for name in ("a", "b"):
            text = text.replace(
                f"{name}: ./{name}.safetensors",
                f"{name}: {{source: ./{name}.safetensors, statistics: ./{name}.covstats.safetensors}}",
            )
        recipe.write_text(text)
        ran = cli("compare", recipe, "--out", tmp_path / "out", "--json").json
        assert {"regmean", "lot", "ties"} <= {row["method"] for row in ran["methods"]}
        own = {method.name for method in registry if method.sees == "weights"}
        assert set(ran["left_out"]) == {"emr", "fisher", *own}
        for method in ("regmean", "lot"):
            cli("merge", recipe, tmp_path / method, "--method", method)
            assert_same(weights_in(tmp_path / "out" / method), weights_in(tmp_path / method))
        overlap = tmp_path / "a.covstats.safetensors"
        assert "overlap" in cli("compare", recipe, "--out", overlap, "--overwrite", code=2).stderr

    @pytest.mark.slow
    def test_ctrl_c_leaves_nothing(self, tmp_path):
        folder = save_plain(tmp_path, layers=24, width=512)
        before = names_in(tmp_path)
        arguments = ["compare", *flags(folder), "--methods=ties,iso_c,wudi,iso_cts"]
        arguments += ["--out", tmp_path / "out"]
        work = tmp_path / ".out.covmerge-partial" / "output"
        for stage, sign in (("survey", work), ("run", work / "iso_cts" / "model.safetensors")):
            with held(
                COMMAND_LINE,
                *arguments,
                before="layers.9.mlp.up_proj.weight",
                stage=stage,
            ) as process:
                wait_until(sign.exists, process)
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate()
            assert process.returncode == 130, errors
            assert "Traceback" not in errors
            assert names_in(tmp_path) == before


class TestMasks:
    @pytest.mark.covering(2)
    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("missing", ["base", "present"])
    def test_experts_come_back(self, stored, missing, tmp_path, blocks):
        base, experts = make(stored)
        del experts["a"][NORM]
        experts["b"][EMBED] = experts["b"][EMBED][:35].clone()
        result = covmerge.merge(
            base, experts, "emr", tmp_path / "out", weights={"a": 3.0}, out_dtype="float32",
            tensors={"missing": missing, "vocabulary": "base"},
        )  # fmt: skip
        vectors = task_vectors(base, experts, SHAPES, missing=missing)
        unified, masks, sums = {}, {e: {} for e in experts}, []
        for name in SHAPES:
            there = {e: v[name].double() for e, v in vectors.items() if name in v}
            votes = sum((3.0 if e == "a" else 1.0) * u for e, u in there.items())
            sign = torch.where(votes > 0, 1.0, -1.0)
            unified[name] = sign * torch.stack(
                [(u * sign).clamp_min(0) for u in there.values()]
            ).amax(0)
            for expert, update in there.items():
                masks[expert][name] = update * sign > 0
            sums.append(
                {
                    "size": base[name].numel(),
                    "expert_mass": [
                        float(there[e].abs().sum()) if e in there else 0.0 for e in experts
                    ],
                    "kept_mass": [
                        float((masks[e][name] * unified[name].abs()).sum()) if e in there else 0.0
                        for e in experts
                    ],
                }
            )
        factors = dict(zip(experts, rescalers([Masses(**each) for each in sums]), strict=True))
        assert result.stats["rescalers"] == pytest.approx(factors, rel=1e-6)
        for expert, masked in masks.items():
            own = covmerge.load_expert(tmp_path / "out", expert, base)
            expected = {n: factors[expert] * mask * unified[n] for n, mask in masked.items()}
            assert_merged(own, base, expected, tolerance=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "kills"), [("emr", (0, 7, 50)), ("dare_ties", (30,))], ids=["emr", "dare_ties"]
    )
    def test_kill_and_resume(self, method, kills, tmp_path):
        folder = save_plain(tmp_path, layers=60, width=64)
        journal = tmp_path / ".out.covmerge-partial" / "journal.jsonl"

        base = str(folder / "base.safetensors")
        experts = {name: str(folder / f"{name}.safetensors") for name in "ab"}
        options = {"threads": 1, "weights": {"a": 2.0}}
        covmerge.merge(base, experts, method, tmp_path / "undisturbed", **options)
        for target in kills:  # finished items at which the process is killed
            given = {**options, "resume": target > kills[0]}
            program = f"import covmerge; covmerge.merge({base!r}, {experts!r}, {method!r}, "
            program += f"{str(tmp_path / 'out')!r}, **{given!r})"
            with held(program, before="layers.9.mlp.up_proj.weight") as process:  # the last
                wait_until(partial(journaled, journal, target), process)
                process.kill()
                assert process.wait() == -signal.SIGKILL
            assert not (tmp_path / "out").exists()
        if method == "emr":  # a mask that was finished, and damaged since
            masks = journal.parent / "output" / "masks" / "a.safetensors"
            data = bytearray(masks.read_bytes())
            data[-10] ^= 1
            masks.write_bytes(bytes(data))
        covmerge.merge(base, experts, method, tmp_path / "out", **options, resume=True)
        assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")

    @pytest.fixture
    def merged(self, tmp_path):
        base, experts = make(shapes={n: s for n, s in SHAPES.items() if 0 not in s})
        covmerge.merge(base, experts, "emr", tmp_path / "out")
        return tmp_path / "out", base, experts

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("rescalers.json", b'{"a": "1"}', "has no rescaler of"),
            ("rescalers.json", b'{"a": 1, "a": 2}', "twice"),
            ("rescalers.json", b"\xff{}", "not valid JSON"),
            ("a.safetensors", b"\xff" * 64, "not the file that the merge wrote"),
            ("a.safetensors", None, "not the file that the merge wrote"),
        ],
    )
    def test_damaged_files(self, merged, file, content, message):
        out, base, _ = merged
        path = out / "masks" / file
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            covmerge.load_expert(out, "a", base)

    @pytest.mark.parametrize("damage", ["missing", "extra", "one row", "narrow", "wide", "dtype"])
    def test_masks_that_do_not_fit(self, merged, damage):
        out, base, _ = merged
        path = out / "masks" / "a.safetensors"
        masks = load_file(path)
        mask = masks.pop(UP)
        changed = {
            "missing": {},
            "extra": {UP: mask, "extra": torch.zeros(3, 3, dtype=torch.uint8)},
            "one row": {UP: mask[:1].clone()},
            "narrow": {UP: mask[:, :1].clone()},
            "wide": {UP: torch.zeros(23, 100, dtype=torch.uint8)},
            "dtype": {UP: mask.float()},
        }
        save_file({**masks, **changed[damage]}, path)
        with pytest.raises(InputError):
            covmerge.load_expert(out, "a", base)

    @pytest.mark.parametrize("wrong", ["values", "rows"])
    def test_another_base(self, merged, wrong):
        out, base, experts = merged
        other = {"values": experts["b"], "rows": {**base, UP: torch.randn(1, 10)}}
        with pytest.raises(InputError):
            covmerge.load_expert(out, "a", other[wrong])


def collected(name, folder):
    """A family of real models with the statistics of each expert's own texts."""
    base, experts = save_with_tokenizers(build(name), folder)
    kinds = ("gram",) if name == "bert" else ("gram", "fisher")
    files = {}
    for number, (expert, path) in enumerate(experts.items()):
        texts = write_texts(folder / f"{expert}.txt", count=30, seed=number)
        files[expert] = folder / f"{expert}.covstats.safetensors"
        collect(path, texts, files[expert], kinds=kinds)
    return base, experts, files


def by_formula(method, updates, measured, parameters):
    """The papers' equations for one tensor, in float64."""
    if method == "fisher":
        shares = [m.double().clamp_min(parameters["floor"]) / total for m, total in measured]
        return sum(s * u for s, u in zip(shares, updates, strict=True)) / sum(shares)
    share = parameters["off_diagonal"]
    grams = [
        m.double() * share + torch.diag(m.double().diagonal()) * (1 - share) for m, _ in measured
    ]
    numerator = sum(u @ g for u, g in zip(updates, grams, strict=True))
    return numerator @ torch.linalg.inv(sum(grams))


class TestStatistics:
    @pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
    def test_from_texts_to_a_model(self, name, tmp_path):
        base, experts, files = collected(name, tmp_path)
        start = weights_in(base)
        opened = {expert: StatisticsFile.open(path) for expert, path in files.items()}
        if name != "gpt2":  # query, key and value; in Llama gate and up too
            assert len(opened["e1"].about.aliases) == {"bert": 4, "llama": 6}[name]
        methods = ["regmean", "lot"] if name == "bert" else ["regmean", "lot", "fisher"]
        for method in methods:
            out = tmp_path / method
            how = {"statistics": files, "tensors": {"few_rows": "allow"}}
            result = covmerge.merge(base, experts, method, out, **how)
            model = type(build(name)).from_pretrained(out).eval()
            assert torch.isfinite(run(model)).all()
            self._check(method, name, start, weights_in(out), experts, opened, result)
        compared = covmerge.compare(base, experts, methods, tmp_path / "all", **how)
        assert [row.method for row in compared.rows] == methods
        for method in methods:
            assert_same(weights_in(tmp_path / "all" / method), weights_in(tmp_path / method))

    @staticmethod
    def _check(method, name, start, merged, experts, opened, result):
        registered = registry.get(method)
        states = {expert: weights_in(path) for expert, path in experts.items()}
        measured = set(opened["e1"].names(registered.data))
        assert measured
        for tensor, entry in result.stats["tensors"].items():
            updates = [states[e][tensor].double() - start[tensor].double() for e in experts]
            if tensor not in measured:
                expected = sum(updates) / len(updates)
                assert entry["rule"].startswith("average")
            elif method == "lot":
                continue
            else:
                transposed = name == "gpt2" and method != "fisher"
                expected = by_formula(
                    method,
                    [u.T for u in updates] if transposed else updates,
                    [
                        (f.read(registered.data, tensor), f.total(registered.data))
                        for f in opened.values()
                    ],
                    registered.resolve({}),
                )
                expected = expected.T if transposed else expected
            actual = merged[tensor].double() - start[tensor].double()
            assert (actual - expected).norm() <= 2e-3 * expected.norm() + 1e-6, tensor

    def test_rules_dry_run_and_wrong_files(self, tmp_path):
        base, experts, files = collected("gpt2", tmp_path)
        how = {"statistics": files, "tensors": {"few_rows": "allow"}}
        first = StatisticsFile.open(files["e1"]).names("gram")[0]
        for rule, expected in (({"method": "ties"}, "ties"), ({"use": "base"}, "base")):
            rules = [{"match": first, **rule}]
            entries = covmerge.merge(base, experts, "regmean", rules=rules, **how).stats["tensors"]
            assert entries[first]["rule"].startswith(expected)
            assert sum(e["rule"] == "regmean" for e in entries.values()) == 7
        only = covmerge.merge(
            base, experts, "average", rules=[{"match": first, "method": "regmean"}], **how
        ).tensors
        both = covmerge.merge(base, experts, "regmean", **how).tensors
        assert torch.equal(only[first], both[first])
        named = [f"--expert={e}={p}" for e, p in experts.items()]
        named += [f"--stats={e}={p}" for e, p in files.items()]
        flags = ["--base", base, *named, "--method=regmean", "--tensors=few_rows=allow"]
        plan = cli("merge", *flags, "--dry-run", "--json").json
        assert any(rule["rule"] == "regmean" for rule in plan["by_rule"])
        assert "other weights than expert 'e1'" in str(
            self._refused(base, experts, {"e1": files["e2"], "e2": files["e1"]})
        )
        assert "(tensors: {conv1d: stored})" in str(
            self._refused(base, experts, files, conv1d="stored")
        )
        state = load_file(experts["e1"] / "model.safetensors")
        state[first].view(-1)[0] += 1.0  # trained on, after its statistics were collected
        save_file(state, experts["e1"] / "model.safetensors", metadata={"format": "pt"})
        assert "collect it again" in str(self._refused(base, experts, files))

    @staticmethod
    def _refused(base, experts, files, **tensors):
        with pytest.raises(InputError) as caught:
            covmerge.merge(
                base, experts, "regmean", statistics=files,
                tensors={"few_rows": "allow", **tensors},
            )  # fmt: skip
        return caught.value

    def test_resume_asks_for_the_same_statistics(self, tmp_path):
        folder = save_plain(tmp_path)
        files = statistics_for("regmean", folder)
        arguments = (
            folder / "base.safetensors",
            {e: folder / f"{e}.safetensors" for e in files},
            "regmean",
            tmp_path / "out",
        )
        with pytest.raises(KeyboardInterrupt):
            covmerge.merge(*arguments, statistics=files, progress=InterruptAfter(3))
        (tmp_path / "others").mkdir()
        others = statistics_for(
            "regmean", save_plain(tmp_path / "others"), experts=("b", "a")
        )  # other random inputs for a
        same = load_file(files["a"])
        assert not all(torch.equal(same[n], w) for n, w in load_file(others["a"]).items())
        with pytest.raises(InputError, match="overwrite"):
            covmerge.merge(*arguments, statistics=others, resume=True)
        assert (tmp_path / ".out.covmerge-partial" / "journal.jsonl").exists()
        done = covmerge.merge(*arguments, statistics=files, resume=True)
        assert done.run["resumed_items"] > 0

    def test_sources_that_are_fetched_after_planning(self, tmp_path, monkeypatch):
        folder = save_plain(tmp_path)
        files = statistics_for("regmean", folder)

        class Remote:
            """A checkpoint whose weights come with `materialize`."""

            def __init__(self, source):
                self._local, self._there = open_checkpoint(source), False

            def __getattr__(self, name):
                return getattr(self._local, name)

            def materialize(self):
                self._there = True

            def read(self, name, rows=None):
                if not self._there:
                    raise CheckpointError("not downloaded")
                return self._local.read(name, rows)

        monkeypatch.setattr("covmerge.run.sources.open_checkpoint", Remote)
        arguments = (
            folder / "base.safetensors",
            {e: folder / f"{e}.safetensors" for e in files},
        )
        covmerge.merge(*arguments, "ties")
        covmerge.merge(*arguments, "regmean", statistics=files)

    def test_a_rule_whose_statistics_are_of_another_kind(self, tmp_path):
        folder = save_plain(tmp_path)
        files = statistics_for("fisher", folder)
        experts = {e: folder / f"{e}.safetensors" for e in files}
        rules = [{"role": "linear", "method": "regmean"}]
        with pytest.raises(RecipeError, match="no Gram matrix, which method 'regmean' needs"):
            covmerge.merge(
                folder / "base.safetensors", experts, "fisher", statistics=files, rules=rules
            )


class TestInputsAndOutputs:
    @pytest.mark.parametrize("method", DATA_FREE)
    def test_the_same_bytes_twice(self, method, tmp_path):
        folder = save_plain(tmp_path, layers=3, width=33)
        experts = {e: folder / f"{e}.safetensors" for e in ("a", "b")}
        for out in ("first", "second"):
            covmerge.merge(folder / "base.safetensors", experts, method, tmp_path / out, threads=1)
        assert contents(tmp_path / "first") == contents(tmp_path / "second")

    @pytest.mark.parametrize("method", ELEMENTWISE)
    def test_blocks_and_threads_change_nothing(self, method, monkeypatch):
        base, experts = make(shapes={UP: (53, 129), EMBED: (97, 37), NORM: (103,)})
        weights = {"a": 1.7, "b": 0.3}
        first = covmerge.merge(base, experts, method, weights=weights, threads=1).tensors
        for block, threads in ((1 << 20, 3), (5003, 1), (64, 1)):
            monkeypatch.setattr(plan_build, "BLOCK_ELEMENTS", block)
            other = covmerge.merge(base, experts, method, weights=weights, threads=threads).tensors
            assert_same(first, other)

    def test_tied_expert_of_an_untied_base(self, tmp_path):
        def llama(tied):
            config = build("llama").config
            config.tie_word_embeddings = tied
            return transformers.LlamaForCausalLM(config)

        base, tied = llama(False), llama(True)
        base.save_pretrained(tmp_path / "base")
        state = {k: w + 0.01 for k, w in base.state_dict().items() if k != "lm_head.weight"}
        tied.load_state_dict(state, strict=False)
        tied.tie_weights()
        tied.save_pretrained(tmp_path / "tied")
        try:
            merged = covmerge.merge(tmp_path / "base", {"t": tmp_path / "tied"}, "average").tensors
        except InputError:
            return  # refusing it is right too
        torch.testing.assert_close(merged["lm_head.weight"], state["model.embed_tokens.weight"])

    def test_a_result_beyond_the_output_dtype(self):
        base, experts = make(torch.half)
        with pytest.raises(CovmergeError):
            covmerge.merge(base, experts, "task_arithmetic", scale=1e6)


MEASURE = """
import json, sys, torch, covmerge
torch.set_num_threads(1)
options = json.loads(sys.argv[1])
run = covmerge.compare if "methods" in options else covmerge.merge
done = run(options.pop("base"), options.pop("experts"), threads=1, **options)
print(json.dumps(dict(done.run)))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A base, two experts of 90 MB each, and statistics of the experts' layers."""
    folder = tmp_path_factory.mktemp("memory")
    shapes = {UP: (1024, 1024), EMBED: (20_000, 1024)}
    for number, name in enumerate(("base", "a", "b")):
        generator = torch.Generator().manual_seed(number)
        size = 0.02 if number else 0.1
        tensors = {n: torch.randn(s, generator=generator).mul_(size) for n, s in shapes.items()}
        save_file(tensors, folder / f"{name}.safetensors")
    files = statistics_for("regmean", folder)
    yield folder, {e: str(path) for e, path in files.items()}
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        *("ties", "iso_cts", "regmean", "eight"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("dare_ties", "della", "emr", "tsv_m", "cart", "wudi")
        ),
    ],
)
def test_measured_memory_stays_below_the_expected(method, large, tmp_path):
    folder, files = large
    eight = ["average", "ties", "dare_ties", "della", "iso_c", "tsv_m", "actmat", "regmean"]
    options = {"methods": eight} if method == "eight" else {"method": method}
    options |= {
        "base": str(folder / "base.safetensors"),
        "experts": {e: str(folder / f"{e}.safetensors") for e in files},
        "out": str(tmp_path / "out"),
        "tensors": {"few_rows": "allow"},
        "allow": ["not-a-fine-tune"],
    }
    if method in ("regmean", "eight"):
        options["statistics"] = files
    report = json.loads(printed(MEASURE, json.dumps(options)))
    assert report["peak_memory"] <= report["expected_peak_memory"]
