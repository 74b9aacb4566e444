"""Nothing is silent: every tensor that does not fit has a rule or a named error."""

import json
import re
from itertools import pairwise

import pytest
import torch

import covmerge
from covmerge.base.memory import Memory
from covmerge.base.sizes import format_size
from covmerge.base.types import Role
from covmerge.errors import InputError, RecipeError, ResourceError, TensorError
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.operations import Copy, Merge
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.budget import plan_memory
from covmerge.run.engine.executor import held_together
from covmerge.run.engine.global_pass import global_pass_bytes
from covmerge.run.sources import open_checkpoints
from tests.advised import advice

CPU = torch.device("cpu")


def state(**changes):
    """A small encoder with embedding, two layers, norm, bias, kernel, buffer and output head."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed_tokens.weight": (12, 4),
        "layers.0.attn.q_proj.weight": (4, 4),
        "layers.0.attn.q_proj.bias": (4,),
        "layers.0.mlp.up_proj.weight": (8, 4),
        "layers.0.norm.weight": (4,),
        "patch_embed.proj.weight": (4, 3, 2, 2),
        "lm_head.weight": (12, 4),
    }
    drawn = {n: torch.randn(s, generator=generator) for n, s in tensors.items()}
    drawn["position_ids"] = torch.arange(6)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del drawn[name]
        else:
            drawn[name] = torch.randn(value, generator=generator)
    return drawn


def tuned(tensors, seed=1):
    """An expert of these."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else value
        for name, value in tensors.items()
    }


def plan_for(base, experts, **given):
    recipe = parse_recipe(
        {"base": "base", "experts": dict.fromkeys(experts, "expert"), **given}, origin="test"
    )
    with open_checkpoints(base, experts, {}) as checkpoints:
        return build_plans([recipe], checkpoints.base, checkpoints.experts)[0]


def rules_of(plan):
    return {tensor.name: tensor.rule for tensor in plan.tensors}


class TestRoles:
    def test_defaults_of_a_covariance_method(self):
        plan = plan_for(state(), {"a": state(), "b": state()}, method="ace")
        assert rules_of(plan) == {
            "embed_tokens.weight": "average (embeddings: auto)",
            "layers.0.attn.q_proj.weight": "ace",
            "layers.0.attn.q_proj.bias": "average (bias)",
            "layers.0.mlp.up_proj.weight": "ace",
            "layers.0.norm.weight": "average (norm)",
            "patch_embed.proj.weight": "average (convolutions: auto)",
            "lm_head.weight": "average (output_head: auto)",
            "position_ids": "base (torch.int64 is not merged)",
        }

    def test_an_elementwise_method_takes_every_parameter(self):
        plan = plan_for(state(), {"a": state()}, method="task_arithmetic")
        rules = rules_of(plan)
        assert all(
            rule.startswith("task_arithmetic")
            for name, rule in rules.items()
            if name != "position_ids"
        )

    @pytest.mark.parametrize("value", ["average", "method", "base"])
    def test_settings_by_kind(self, value):
        kinds = {"embeddings": value, "output_head": value, "convolutions": value}
        plan = plan_for(state(), {"a": state()}, method="ace", tensors=kinds)
        by_role = {tensor.info.role: tensor.operation for tensor in plan.tensors}
        for role in (Role.EMBEDDING, Role.OUTPUT, Role.CONV):
            action = by_role[role]
            if value == "base":
                assert action == Copy()
            else:
                assert isinstance(action, Merge)
                assert (action.layout is None) == (value == "average")

    def test_a_kernel_merged_by_the_method_is_unfolded(self):
        base, expert = state(), state()
        expert["patch_embed.proj.weight"] = base["patch_embed.proj.weight"] + 0.1 * torch.randn(
            4, 3, 2, 2, generator=torch.Generator().manual_seed(5)
        )
        merged = covmerge.merge(
            base, {"a": expert, "b": expert}, "actmat", tensors={"convolutions": "method"}
        ).tensors
        assert torch.allclose(
            merged["patch_embed.proj.weight"], expert["patch_embed.proj.weight"], atol=1e-5
        )

    def test_first_matching_rule_wins(self):
        plan = plan_for(
            state(),
            {"a": state()},
            rules=[
                {"match": "*.attn.*", "role": "linear", "use": "base"},
                {"match": "*.attn.*", "method": "task_arithmetic", "parameters": {"scale": 0.5}},
                {"role": "linear", "method": "actmat"},
            ],
        )
        rules = rules_of(plan)
        assert rules["layers.0.attn.q_proj.weight"] == "base (rule match *.attn.*, role linear)"
        assert rules["layers.0.attn.q_proj.bias"].startswith("task_arithmetic")
        assert rules["layers.0.mlp.up_proj.weight"] == "actmat (rule role linear)"

    def test_a_rule_for_nothing_is_noted(self):
        plan = plan_for(state(), {"a": state()}, rules=[{"match": "*.atn.*", "use": "base"}])
        assert "the rule for '*.atn.*' applies to no tensor: did you mean '*.attn.*'?" in plan.notes
        # Rules go by the base's names, not by those of an expert that has a prefix before them.
        held = {f"model.{name}": tensor for name, tensor in state().items()}
        plan = plan_for(state(), {"a": held}, rules=[{"match": "model.*attn.*", "use": "base"}])
        assert "the rule for 'model.*attn.*' applies to no tensor" in str(plan.notes)
        plan = plan_for(
            state(), {"a": state()}, rules=[{"match": "*.attn.*", "role": "norm", "use": "base"}]
        )
        assert any(note.endswith("the roles there are linear, bias") for note in plan.notes)

    def test_a_vector_cannot_be_merged_by_a_matrix_method(self):
        with pytest.raises(RecipeError, match=r"'layers.0.norm.weight' \[4\].*not a matrix"):
            plan_for(state(), {"a": state()}, rules=[{"role": "norm", "method": "ace"}])

    def test_nothing_to_merge(self):
        with pytest.raises(InputError, match="nothing to merge"):
            plan_for(state(), {"a": state()}, rules=[{"match": "*", "use": "base"}])


class TestMissing:
    name = "layers.0.mlp.up_proj.weight"

    @property
    def experts(self):
        return {
            "a": tuned(state()),
            "b": tuned(state(layers__0__mlp__up_proj__weight=None), seed=2),
        }

    def test_error_names_expert_tensor_and_option(self):
        with pytest.raises(TensorError, match=rf"expert 'b'.*'{self.name}'.*missing\W+base"):
            plan_for(state(), self.experts)

    def test_base_counts_as_unchanged(self):
        base = state()
        merged = covmerge.merge(base, self.experts, "average", tensors={"missing": "base"}).tensors
        expected = (self.experts["a"][self.name] + base[self.name]) / 2
        assert torch.allclose(merged[self.name], expected)

    def test_present_leaves_the_expert_out(self):
        merged = covmerge.merge(
            state(), self.experts, "average", tensors={"missing": "present"}
        ).tensors
        assert torch.allclose(merged[self.name], self.experts["a"][self.name])

    def test_a_rule_that_takes_the_base_needs_no_expert(self):
        plan = plan_for(state(), self.experts, rules=[{"match": self.name, "use": "base"}])
        assert isinstance({t.name: t.operation for t in plan.tensors}[self.name], Copy)

    def test_missing_buffers_do_not_matter(self):
        plan_for(state(), {"a": state(position_ids=None)})


class TestExtra:
    def test_error_names_the_tensor(self):
        with pytest.raises(TensorError, match=r"expert 'a'.*'layers.1.mlp.up_proj.weight'"):
            plan_for(state(), {"a": state(layers__1__mlp__up_proj__weight=(8, 4))})

    def test_ignored_by_rule_and_noted(self):
        plan = plan_for(
            state(),
            {"a": state(layers__1__mlp__up_proj__weight=(8, 4))},
            tensors={"extra": "ignore"},
        )
        assert any("'a': 1 tensor left out" in note for note in plan.notes)

    def test_heads_are_kept_per_expert(self):
        experts = {
            "a": tuned(state(classifier__weight=(3, 4))),
            "b": tuned(state(classifier__weight=(2, 4)), seed=2),
        }
        result = covmerge.merge(state(), experts, "average")
        assert {e: dict(h)["classifier.weight"].shape for e, h in result.heads.items()} == {
            "a": (3, 4),
            "b": (2, 4),
        }
        assert "classifier.weight" not in result.tensors

    def test_a_head_of_another_shape_than_the_bases(self):
        base = state(classifier__weight=(2, 4), classifier__bias=(2,))
        experts = {
            "a": tuned(state(classifier__weight=(3, 4), classifier__bias=(3,))),
            "b": tuned(state(classifier__weight=(2, 4), classifier__bias=(2,)), seed=2),
        }
        result = covmerge.merge(base, experts, "average")
        assert torch.equal(result.tensors["classifier.weight"], base["classifier.weight"])
        assert set(result.heads["b"]) == {"classifier.weight", "classifier.bias"}

    def test_a_head_of_one_shape_everywhere_is_noted(self):
        same = state(classifier__weight=(2, 4))
        plan = plan_for(same, {"a": same, "b": same})
        said = advice("so it is merged; if it is a task head, keep one per expert by ")
        assert any(re.search(said, note) for note in plan.notes)
        kept = plan_for(same, {"a": same}, rules=[{"match": "classifier.*", "use": "head"}])
        assert set(kept.heads["a"]) == {"classifier.weight"}
        assert not any(re.search(said, note) for note in kept.notes)


class TestShapes:
    def test_vocabulary_of_another_size(self):
        experts = {"a": tuned(state(embed_tokens__weight=(16, 4), lm_head__weight=(16, 4)))}
        with pytest.raises(TensorError, match=r"12 rows in the base and 16.*vocabulary\W+base"):
            plan_for(state(), experts)
        base = state()
        result = covmerge.merge(base, experts, "average", tensors={"vocabulary": "base"})
        expected = experts["a"]["embed_tokens.weight"][:12]
        assert torch.allclose(result.tensors["embed_tokens.weight"], expected)
        assert any("has 16 rows, the base 12" in note for note in result.notes)

    def test_rows_that_an_expert_lacks_count_as_unchanged(self):
        base, expert = state(), tuned(state(embed_tokens__weight=(10, 4)))
        merged = covmerge.merge(
            base, {"a": expert}, "average", tensors={"vocabulary": "base"}
        ).tensors["embed_tokens.weight"]
        assert torch.allclose(merged[:10], expert["embed_tokens.weight"])
        assert torch.equal(merged[10:], base["embed_tokens.weight"][10:])

    def test_another_shape_is_no_fine_tune(self):
        with pytest.raises(
            TensorError, match=r"'layers.0.mlp.up_proj.weight' is \[8, 4\].*\[6, 4\].*expert 'a'"
        ):
            plan_for(state(), {"a": state(layers__0__mlp__up_proj__weight=(6, 4))})

    def test_integers_are_not_merged_with_floats(self):
        expert = state()
        expert["layers.0.norm.weight"] = torch.ones(4, dtype=torch.int8)
        with pytest.raises(TensorError, match=r"float32 in the base and torch.int8 in expert 'a'"):
            plan_for(state(), {"a": expert})

    def test_other_float_dtypes_are_noted(self):
        expert = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state().items()}
        plan = plan_for(state(), {"a": expert})
        assert any("'a' stores bfloat16" in note for note in plan.notes)


class TestWork:
    def test_items_cover_every_row_once(self):
        base = {"embed_tokens.weight": torch.zeros(3_000_000, 4), "fc.weight": torch.zeros(6, 4)}
        expert = {name: tensor + 1 for name, tensor in base.items()}
        plan = plan_for(base, {"a": expert})
        spans = {}
        for item in plan.items:
            spans.setdefault(item.tensor.name, []).append((item.rows.start, item.rows.stop))
        assert len(spans["embed_tokens.weight"]) > 1
        for name, ranges in spans.items():
            assert ranges[0][0] == 0
            assert ranges[-1][1] == base[name].shape[0]
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
        merged = covmerge.merge(base, {"a": expert}, "average").tensors
        assert torch.equal(merged["embed_tokens.weight"], expert["embed_tokens.weight"])

    def test_scalars_and_empty_tensors(self):
        base = {"fc.weight": torch.eye(2), "scale": torch.tensor(1.0), "none": torch.zeros(0, 3)}
        expert = {
            "fc.weight": torch.eye(2) * 2,
            "scale": torch.tensor(3.0),
            "none": torch.zeros(0, 3),
        }
        merged = covmerge.merge(base, {"a": expert}, "average").tensors
        assert merged["scale"] == 3.0
        assert merged["none"].shape == (0, 3)

    def test_memory_is_refused_before_any_work(self):
        plan = plan_for(state(), {"a": state()})
        with pytest.raises(
            ResourceError, match=r"needs .* \(max_memory\) \(a number.*largest tensor"
        ):
            plan_memory([plan], 10**6, device=CPU)

    @pytest.mark.parametrize("held", [0, 3 * 10**9])
    def test_what_is_free_is_said_without_what_the_process_has(self, monkeypatch, held):
        """Old: "1.1 GiB of this machine's memory are free", of which a gigabyte was the process's own."""
        monkeypatch.setattr("covmerge.base.memory.free_memory", lambda _: Memory(free))
        plan = plan_for(state(), {"a": state()})
        largest = max(held_together([own]) + own.write_bytes for own in plan.items)
        workspace = max(own.workspace for own in plan.items)
        free = largest + workspace // 2
        with pytest.raises(ResourceError) as told:
            plan_memory([plan], None, device=CPU, held=held)
        needed = workspace + largest
        output = f"{format_size(held)} for the output, " if held else ""
        assert str(told.value).startswith(
            f"the merge needs {format_size(needed + held)} beside what the process has, and "
            f"{format_size(free)} of this machine's memory are free: {output}{format_size(needed)} for "
            f"the largest tensor, '{plan.peak_item.tensor.name}'. Free more{'.' if held else ', or merge'}"
        )

    def test_memory_follows_the_parameters(self):
        """Old: `tsv_m` without loss was planned as with it."""
        base = {"layers.0.mlp.up_proj.weight": torch.zeros(64, 64)}
        experts = {name: tuned(base, seed) for seed, name in enumerate("abcdefgh")}
        plain, lossless = (
            plan_for(base, experts, method="tsv_m", parameters={"lossless": lossless}).items
            for lossless in (False, True)
        )
        assert lossless[0].workspace > 2 * plain[0].workspace

    def test_less_memory_means_less_in_flight(self):
        plan = plan_for(state(), {"a": state()})
        free = plan_memory([plan], None, device=CPU)
        tight = plan_memory([plan], free.peak - 2**20, device=CPU)
        assert tight.in_flight < free.in_flight
        assert (
            tight.peak <= free.peak - 2**20 + 2**22
        )  # the process itself may have grown meanwhile

    def test_summary_is_plain_json(self):
        summary = plan_for(state(), {"a": state(classifier__weight=(3, 4))}).summary()
        json.dumps(summary, allow_nan=False)
        assert summary["tensors"] == 8

    def test_digest_follows_what_decides_the_bytes(self):
        experts = {"a": state(), "b": state()}
        plan = plan_for(state(), experts, method="ace")
        assert plan.digest({"base": 1}) == plan_for(state(), experts, method="ace").digest(
            {"base": 1}
        )
        assert plan.digest({"base": 1}) != plan.digest({"base": 2})
        other = plan_for(state(), experts, method="ace", parameters={"eps": 0.1})
        assert plan.digest({"base": 1}) != other.digest({"base": 1})


class TestValuesThatDiffer:
    """Parameters and weights by depth and by name are settled tensor by tensor."""

    def layers(self):
        generator = torch.Generator().manual_seed(0)
        names = [
            "wte.weight",
            *(f"h.{i}.{kind}.weight" for i in range(3) for kind in ("attn", "mlp")),
        ]
        return {name: torch.randn(4, 4, generator=generator) for name in [*names, "ln_f.weight"]}

    def planned(self, weight=1.0, **given):
        base = self.layers()
        experts = {
            name: {"source": "x", "weight": own} for name, own in (("a", weight), ("b", 1.0))
        }
        recipe = parse_recipe({"base": "base", "experts": experts, **given}, origin="test")
        with open_checkpoints(base, {"a": tuned(base), "b": tuned(base, 2)}, {}) as checkpoints:
            return build_plans([recipe], checkpoints.base, checkpoints.experts)[0]

    def merges(self, weight=1.0, **given):
        return {tensor.name: tensor for tensor in self.planned(weight, **given).tensors}

    def test_a_parameter_by_depth(self):
        by_depth = {"by_depth": [0.2, 0.6, 0.4]}
        tensors = self.merges(method="task_arithmetic", parameters={"scale": by_depth})
        scales = {name: tensor.operation.parameters["scale"] for name, tensor in tensors.items()}
        assert scales == {
            "wte.weight": 0.2,
            **{f"h.0.{kind}.weight": 0.2 for kind in ("attn", "mlp")},
            **{f"h.1.{kind}.weight": 0.6 for kind in ("attn", "mlp")},
            **{f"h.2.{kind}.weight": 0.4 for kind in ("attn", "mlp")},
            "ln_f.weight": 0.2,
        }

    def test_where_no_pattern_matches_it_is_the_default(self):
        by_name = {"by_name": [{"match": "*.mlp.*", "value": {"by_depth": [1, 0]}}]}
        tensors = self.merges(method="task_arithmetic", parameters={"scale": by_name})
        assert tensors["h.1.mlp.weight"].operation.parameters["scale"] == 0.5
        assert tensors["h.1.attn.weight"].operation.parameters["scale"] == 0.3

    def test_a_weight_by_depth_and_none_where_it_is_0(self):
        tensors = self.merges(method="average", weight={"by_depth": [0, 1]})
        assert list(tensors["h.0.mlp.weight"].operands) == ["b"]
        assert tensors["h.1.mlp.weight"].operands["a"].weight == 0.5
        assert tensors["h.2.mlp.weight"].operands["a"].weight == 1.0

    def test_patterns_of_no_tensor_are_noted(self):
        weight = {"by_name": [{"match": "*.mpl.*", "value": 0}, {"match": "*.mlp.*", "value": 1}]}
        scale = {"by_name": [{"match": "x*", "value": 1}]}
        plan = self.planned(weight, method="task_arithmetic", parameters={"scale": scale})
        notes = [note for note in plan.notes if "matches no tensor" in note]
        assert notes == [
            "`experts.a.weight` has the pattern '*.mpl.*', which matches no tensor: did you mean "
            "'*.mlp.*'?",
            "`parameters.scale` has the pattern 'x*', which matches no tensor: they are called "
            "'wte.weight', 'h.0.attn.weight' and 6 more",
        ]

    def test_where_all_weights_are_0_the_base_stays(self):
        base = self.layers()
        weight = {"by_name": [{"match": "*.mlp.*", "value": 0}]}
        plan = plan_for(base, {"a": tuned(base)}, method="average")
        recipe = plan.recipe.model_copy(
            update={
                "experts": {"a": plan.recipe.experts["a"].model_copy(update={"weight": weight})}
            }
        )
        with open_checkpoints(base, {"a": tuned(base)}, {}) as checkpoints:
            rules = rules_of(build_plans([recipe], checkpoints.base, checkpoints.experts)[0])
        assert rules["h.0.mlp.weight"] == "base (all weights are 0)"
        assert rules["h.0.attn.weight"] == "average"

    def test_every_value_is_checked_before_any_tensor(self):
        with pytest.raises(RecipeError, match="density"):
            self.merges(
                method="ties", parameters={"trim": "tensor", "density": {"by_depth": [0.5, 2]}}
            )

    def test_an_unknown_parameter_is_named_as_ever(self):
        with pytest.raises(RecipeError, match=r"no parameter 'scal'.*scale"):
            self.merges(method="task_arithmetic", parameters={"scal": {"by_depth": [0, 1]}})

    def test_not_where_the_whole_model_is_ranked_together(self):
        density = {"by_depth": [0.5, 0.2]}
        with pytest.raises(
            RecipeError, match=r"'density' differs from tensor to tensor.*trim: tensor"
        ):
            self.merges(method="ties", parameters={"density": density})
        tensors = self.merges(method="ties", parameters={"trim": "tensor", "density": density})
        assert tensors["h.2.mlp.weight"].operation.parameters["density"] == 0.2

    def test_a_merge_by_depth_is_that_of_each_value_alone(self, tmp_path):
        base = self.layers()
        experts = {"a": tuned(base), "b": tuned(base, 2)}
        scale = {"by_depth": [0.0, 1.0]}
        merged = covmerge.merge(base, experts, "task_arithmetic", tmp_path / "out", scale=scale)
        assert covmerge.verify(tmp_path / "out").ok
        with open_checkpoints(tmp_path / "out", experts, {}) as out:
            for layer, value in enumerate((0.0, 0.5, 1.0)):
                name = f"h.{layer}.mlp.weight"
                alone = covmerge.merge(base, experts, "task_arithmetic", scale=value).tensors[name]
                assert torch.equal(out.base.read(name), alone)
        assert merged.recipe.parameters["scale"] == scale


def test_blocks_of_a_tensor_cost_what_their_rows_do_and_are_counted_as_one_tensor():
    rows, width = 2600, 1024
    tensors = {"w": torch.zeros(rows, width), "v": torch.zeros(rows, width)}
    plan = plan_for(tensors, {"a": tensors, "b": tensors}, method="ties")
    blocks = [item for item in plan.items if item.tensor.name == "w"]
    assert [len(item.rows) for item in blocks] == [1024, 1024, 552]
    assert [item.rows.start for item in blocks] == [0, 1024, 2048]
    first, second, last = blocks
    assert (first.flops, first.workspace) == (second.flops, second.workspace)
    assert last.flops < first.flops
    assert sum(item.read_bytes for item in blocks) == 3 * 4 * rows * width
    assert sum(item.write_bytes for item in blocks) == 4 * rows * width
    (global_pass,) = plan.global_passes
    assert [item.rows for item in global_pass.items] == [item.rows for item in plan.items]
    assert len({id(item.tensor) for item in global_pass.items}) == 2
    passes = zip(
        global_pass.passes("float32"), (global_pass.sample, global_pass.items), strict=True
    )
    read = sum(times * item.read_bytes for times, items in passes for item in items)
    assert global_pass_bytes([plan]) == read == plan.read_bytes - 2 * 3 * 4 * rows * width
    assert global_pass_bytes([plan, plan]) == read
