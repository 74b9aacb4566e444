"""Models of different vocabularies merged token by token: what lies where, and what goes with a merge."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import closing
from zlib import crc32

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError, RecipeError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.front.api import plan_recipe, run_recipe
from covmerge.methods import registry
from covmerge.plan.recipe import dump_recipe, load_recipe, parse_recipe
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from covmerge.run.engine.options import RunOptions
from covmerge.run.inspection.job import InspectJob
from covmerge.run.recompute import recompute
from covmerge.run.sources import open_recipe
from tests.advised import advice
from tests.interrupted import InterruptAfter
from tests.mergekit.token_cases import LETTERS, TABLES, WORDS, Words, by_token, ids_of, save_model

UNION = {"source": "union"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for arch in ("llama", "gpt2"):
        for name, words in WORDS.items():
            save_model(folder / arch / name, arch, name, words)
    # What t2 is, in the base's order and without padding.
    words = Words([*WORDS["base"].order[:-1], "op"], WORDS["t2"].added[::-1])
    save_model(folder / "llama" / "t2-sorted", "llama", "t2", words)
    return folder


def recipe(models, experts=("t0", "t1", "t2"), arch="llama", base="base", **given):
    """Of experts by their folders' names, or as a recipe has them."""
    if not isinstance(experts, dict):
        experts = {name: str(models / arch / name) for name in experts}
    data = {"base": base and str(models / arch / base), "experts": experts, "method": "average"}
    return parse_recipe({**data, "tokenizer": UNION, **given})


def weights(path):
    return load_file(path / "model.safetensors")


HEADS = {"llama": "lm_head.weight", "gpt2": "transformer.wte.weight"}


@pytest.mark.parametrize("arch", HEADS)
def test_a_token_that_one_expert_has_is_that_experts(arch, models, tmp_path):
    out = tmp_path / "out"
    result = run_recipe(recipe(models, ("t0", "t1"), arch), out)
    assert any("vocabulary has 25 tokens" in note for note in result.notes)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size == 25
    encoded = tokenizer("<|im_start|>abk<|im_end|>", return_tensors="pt")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(encoded[0]) == ["<|im_start|>", "ab", "k", "<|im_end|>"]
    assert tokenizer.decode(encoded[0]).replace(" ", "") == "<|im_start|>abk<|im_end|>"
    theirs = weights(models / arch / "t1")[HEADS[arch]]
    row, own = ids_of(out)["<|im_start|>"], ids_of(models / arch / "t1")["<|im_start|>"]
    with torch.no_grad():
        hidden = model(encoded, output_hidden_states=True)
    last = hidden.hidden_states[-1][0, -1]
    torch.testing.assert_close(hidden.logits[0, -1, row], last @ theirs[own])


def test_rows_follow_their_tokens(models, tmp_path):
    """The mean of all experts, an expert that lacks a token counting as the base or as who has it."""
    run_recipe(recipe(models), tmp_path / "out")
    found, ids = weights(tmp_path / "out"), ids_of(tmp_path / "out")
    stored = {name: weights(models / "llama" / name) for name in WORDS}
    own = {name: ids_of(models / "llama" / name) for name in WORDS}
    for table in ("model.embed_tokens.weight", "lm_head.weight"):

        def row(model, token):
            return stored[model][table][own[model][token]]  # noqa: B023

        for token, number in ids.items():
            have = [name for name in WORDS if token in own[name]]
            given = row("base", token) if "base" in have else sum(row(m, token) for m in have)
            given = given if "base" in have else given / len(have)
            rows = [row(n, token) if n in have else given for n in WORDS if n != "base"]
            torch.testing.assert_close(found[table][number], sum(rows) / 3)


def test_texts_that_are_cut_otherwise_are_told(models, tmp_path):
    """The output has one way of cutting, of tokenizers 0.23.3; another spelling of it is no other."""
    said = "the output cuts texts as the base does"
    assert not any(said in note for note in plan_recipe(recipe(models))[0].notes)
    changes = {
        "x": lambda t: t.update(normalizer={"type": "Lowercase"}),
        "y": lambda t: t["model"].update(merges=t["model"]["merges"][::-1]),
        "same": lambda t: t["model"].update(merges=[" ".join(m) for m in t["model"]["merges"]]),
    }
    for name, change in changes.items():
        shutil.copytree(models / "llama" / "t0", tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        content = json.loads(file.read_text("utf-8"))
        assert len(content["model"]["merges"]) > 1 and isinstance(
            content["model"]["merges"][0], list
        )
        change(content)
        file.write_text(json.dumps(content), "utf-8")
    experts = {name: str(tmp_path / name) for name in changes}
    notes = plan_recipe(recipe(models, experts))[0].notes
    (note,) = [note for note in notes if said in note]
    assert "'x' (normalizer)" in note and "'y' (merges)" in note and "same" not in note


def test_ids_are_those_of_the_base_then_in_the_order_of_the_experts(models, tmp_path):
    for experts, added in (
        (("t1", "t2"), ["<|im_start|>", "<|im_end|>", "op", "<tool>"]),
        (("t2", "t1"), ["op", "<tool>", "<|im_end|>", "<|im_start|>"]),
    ):
        out = tmp_path / "-".join(experts)
        run_recipe(recipe(models, experts), out)
        ids = ids_of(out)
        assert sorted(ids, key=ids.get) == [*WORDS["base"].order, *added]
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2


MERGE = """\
import sys
from pathlib import Path
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import load_recipe

if __name__ == "__main__":
    run_recipe(load_recipe(sys.argv[1]), Path(sys.argv[2]))
"""


def test_ids_are_the_same_in_every_process(models, tmp_path):
    """Sets of texts have another order under another seed of their hashes: here, and in another process."""
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(dump_recipe(recipe(models))))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    subprocess.run(
        [sys.executable, "-c", MERGE, file, tmp_path / "other"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
    )
    run_recipe(load_recipe(file), tmp_path / "here")
    assert ids_of(tmp_path / "here") == ids_of(tmp_path / "other")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


# Random numbers go by the place of a row, so that another order of an expert's rows draws others.
DRAWN = ("dare_task_arithmetic", "dare_ties", "della")
ALONE = [method.name for method in registry if method.experts[1] == 1]


def given(models, method, names, folder):
    """Experts under the names `t1`, `t2`, with the statistics that a method needs."""
    found = {}
    for name in names:
        key, model = name.partition("-")[0], models / "llama" / name
        found[key] = {"source": str(model)}
        if method.data != "none":
            file = folder / f"{name}.covstats.safetensors"
            write_statistics({file: contents(method, model)}, overwrite=True)
            found[key]["statistics"] = str(file)
    return found


def contents(method, model):
    """Random statistics of all tensors, or of some layers: the same for each model."""
    with closing(open_checkpoint(model)) as checkpoint:
        kept = []
        for name, header in checkpoint.headers.items():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            if method.data == "fisher":
                # Fisher information is normed over all tensors, and t2 has more rows in its tables.
                found = torch.rand(header.shape, generator=generator) * (name not in TABLES)
                kept.append(Statistic((name,), found, rows=99))
            elif name.endswith("up_proj.weight"):
                inputs = torch.randn(99, header.shape[1], generator=generator)
                kept.append(Statistic((name,), inputs.T @ inputs, rows=99))
        return Contents(checkpoint, {method.data: kept}, examples=99)


def _each(methods):
    """All of them; by day the first of each kind, as rows are gathered alike for the methods of one."""
    rows, seen = [], set()
    for method in methods:
        drawn = method.name in DRAWN
        kind = (method.sees, method.data, method.experts, drawn, method.takes_any_shape)
        rows.append(pytest.param(method.name, marks=pytest.mark.nightly if kind in seen else ()))
        seen.add(kind)
    return rows


@pytest.mark.parametrize("name", _each(method for method in registry if method.name != "emr"))
def test_the_order_of_an_experts_vocabulary_does_not_matter(name, models, tmp_path):
    method = registry.get(name)
    for own in ("t2", "t2-sorted"):
        experts = given(models, method, (own,) if name in ALONE else ("t1", own), tmp_path)
        tables = {"embeddings": "average", "output_head": "average"}
        more = {"tensors": tables} if method.data == "fisher" else {}
        run_recipe(recipe(models, method=name, experts=experts, **more), tmp_path / own)
    one, other = weights(tmp_path / "t2"), weights(tmp_path / "t2-sorted")
    ids, others = ids_of(tmp_path / "t2"), ids_of(tmp_path / "t2-sorted")
    assert ids.keys() == others.keys()
    order, turned = [ids[t] for t in sorted(ids)], [others[t] for t in sorted(ids)]
    for tensor in one:
        if "embed_tokens" not in tensor and "lm_head" not in tensor:
            torch.testing.assert_close(one[tensor], other[tensor])
        elif name in DRAWN:
            assert one[tensor].shape == other[tensor].shape == (len(ids), 8)
        else:
            torch.testing.assert_close(one[tensor][order], other[tensor][turned])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("emr", "masks are laid over"),
        ("fisher", advice("by --tensors embeddings=average --tensors output_head=average")),
    ],
)
def test_methods_that_do_not_go_with_other_tokens_say_so(name, said, models, tmp_path):
    experts = given(models, registry.get(name), ("t1", "t2"), tmp_path)
    with pytest.raises(InputError, match=said):
        run_recipe(recipe(models, method=name, experts=experts), tmp_path / "out")
    if name == "fisher":
        tables = {"embeddings": "average", "output_head": "average"}
        run_recipe(recipe(models, method=name, experts=experts, tensors=tables), tmp_path / "out")
        assert covmerge.verify(tmp_path / "out").ok


@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", HEADS)
@pytest.mark.parametrize("others", [(), ("t0",), ("t1",)])
def test_an_expert_that_only_added_tokens(others, arch, models, tmp_path):
    only = tmp_path / "only"
    save_model(only, arch, "base", WORDS["t1"])
    experts = {"only": only, **{name: models / arch / name for name in others}}
    given = recipe(models, {name: str(path) for name, path in experts.items()}, arch)
    result = run_recipe(given, tmp_path / "out")
    if others != ("t1",):  # which has rows for the same tokens: the base has the mean
        assert any("only rows of its tokens are its own" in text for text in result.warnings)
    assert covmerge.verify(tmp_path / "out").ok
    with open_recipe(given) as checkpoints:
        found = InspectJob(recipe=given, options=RunOptions()).run(checkpoints)
    assert not found.faults
    ids = ids_of(only)
    stored = [weights(path) for path in experts.values()]
    for one in stored[1:]:  # t0 has no rows for the two tokens, which are the last
        for name in HEADS[arch], "model.embed_tokens.weight":
            if name in one:
                one[name] = torch.cat([one[name], stored[0][name][len(one[name]) :]])
    expected = torch.stack([by_token(one, ids)[0] for one in stored]).mean(0)
    torch.testing.assert_close(by_token(weights(tmp_path / "out"), ids)[0], expected)


@pytest.mark.parametrize("experts", [("t2",), ("t2", "t2-again")])
def test_one_expert_and_equal_ones_are_that_expert(experts, models, tmp_path):
    paths = {name: str(models / "llama" / name.partition("-")[0]) for name in experts}
    given = {"base": str(models / "llama" / "base"), "experts": paths, "tokenizer": UNION}
    run_recipe(parse_recipe({**given, "method": "average"}), tmp_path / "out")
    found, ids = weights(tmp_path / "out"), ids_of(tmp_path / "out")
    expert, own = weights(models / "llama" / "t2"), ids_of(models / "llama" / "t2")
    base = weights(models / "llama" / "base")
    for name, tensor in found.items():
        if "embed_tokens" not in name and "lm_head" not in name:
            torch.testing.assert_close(tensor, expert[name])
            continue
        torch.testing.assert_close(
            tensor[[ids[t] for t in own]], expert[name][[own[t] for t in own]]
        )
        torch.testing.assert_close(tensor[ids["gh"]], base[name][ids["gh"]])


def test_rows_by_rules(models, tmp_path):
    tokens = {
        "<|im_start|>": "zero",
        "<|im_end|>": {"of": "t2", "token": "<tool>", "force": True},
        "ab": {"of": "base", "id": 4, "force": True},
        "<new>": {"of": "t1", "token": "a"},
    }
    rules = {"source": "base", "tokens": tokens, "pad_to_multiple_of": 16}
    run_recipe(recipe(models, ("t1", "t2"), tokenizer=rules), tmp_path / "out")
    ids, found = ids_of(tmp_path / "out"), weights(tmp_path / "out")["lm_head.weight"]
    own = {n: weights(models / "llama" / n)["lm_head.weight"] for n in WORDS}
    row = {n: ids_of(models / "llama" / n) for n in WORDS}
    assert list(found.shape) == [32, 8]
    torch.testing.assert_close(found[ids["<|im_start|>"]], own["t1"][row["t1"]["<|im_start|>"]] / 2)
    torch.testing.assert_close(found[ids["<|im_end|>"]], own["t2"][row["t2"]["<tool>"]])
    torch.testing.assert_close(found[ids["ab"]], own["base"][4])
    torch.testing.assert_close(found[ids["<new>"]], own["t1"][row["t1"]["a"]])
    torch.testing.assert_close(found[27:], found[:26].mean(0).expand(5, 8), rtol=1, atol=1)
    assert (found[26:] == found[26]).all()


def test_verification_resume_and_dry_run(models, tmp_path):
    rules = {"source": "union", "pad_to_multiple_of": 8}
    given = recipe(models, method="ties", tokenizer=rules)
    plan, _ = plan_recipe(given)
    assert {t.name: t.output.shape for t in plan.tensors}["lm_head.weight"] == (32, 8)
    run_recipe(given, tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(given, tmp_path / "out", RunOptions(progress=InterruptAfter(100)))
    resumed = run_recipe(given, tmp_path / "out", RunOptions(resume=True))
    assert resumed.run["resumed_items"] > 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        first = (tmp_path / "undisturbed" / name).read_bytes()
        assert first == (tmp_path / "out" / name).read_bytes()
    checks = covmerge.verify(tmp_path / "out")
    assert checks.ok
    copied = next(check for check in checks.checks if check.name == "copied")
    assert copied.made
    assert "2 have rows of other tokens or experts" in copied.detail
    deep = recompute(tmp_path / "out", tensors=99)
    assert deep.ok, deep.detail


def test_another_process_sees_the_same_rows(models):
    with open_recipe(recipe(models)) as opened:
        described = pickle.loads(pickle.dumps(opened.opener([])))
        with described() as again:
            for key, own in opened.all():
                for name in ("model.embed_tokens.weight", "model.norm.weight"):
                    assert torch.equal(again.checkpoints[key].read(name), own.read(name))


def test_another_tokenizer_is_another_merge(models, tmp_path):
    for name in ("base", "t1"):
        save_model(tmp_path / "llama" / name, "llama", name, WORDS[name])
    given = recipe(tmp_path, ("t1",))
    with pytest.raises(KeyboardInterrupt):
        run_recipe(given, tmp_path / "out", RunOptions(progress=InterruptAfter(6)))
    run_recipe(given, tmp_path / "whole")
    file = tmp_path / "llama" / "t1" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|im_begin|>"))
    with pytest.raises(InputError, match="another"):
        run_recipe(given, tmp_path / "out", RunOptions(resume=True))
    said = advice(
        "not what they were when they were merged: put them back, or verify without --deep"
    )
    with pytest.raises(InputError, match=said):
        recompute(tmp_path / "whole")
    assert covmerge.verify(tmp_path / "whole").ok
    file.write_text(file.read_text().replace("<|im_begin|>", "<|im_start|>"))
    assert recompute(tmp_path / "whole").ok


def test_an_expert_without_a_tokenizer_of_as_many_rows_has_the_bases(models, tmp_path):
    for name in ("base", "t0", "t1"):
        save_model(tmp_path / "llama" / name, "llama", name, WORDS[name])
        if name != "base":
            (tmp_path / "llama" / name / "tokenizer.json").unlink()
    result = run_recipe(recipe(tmp_path, ("t0",)), None)
    assert "expert 't0' has no tokenizer, and is taken to have the base's" in result.notes
    with pytest.raises(InputError, match=r"expert 't1' has no tokenizer, and 25 rows in its embed"):
        run_recipe(recipe(tmp_path, ("t1",)), None)


def test_tokens_beyond_an_embedding_have_no_row_in_it(models, tmp_path):
    words = WORDS["t1"]
    save_model(tmp_path / "llama" / "t1", "llama", "t1", words)
    expert = tmp_path / "llama" / "t1"
    short = {name: own[:24] if len(own) == 25 else own for name, own in weights(expert).items()}
    save_file(short, expert / "model.safetensors", {"format": "pt"})
    config = expert / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 25', '"vocab_size": 24'))
    save_model(tmp_path / "llama" / "base", "llama", "base", WORDS["base"])
    given = recipe(tmp_path, ("t1",), tokenizer={"source": "t1"})
    result = run_recipe(given, tmp_path / "out")
    assert any("1 token is of no model, with rows of 0: '<|im_end|>'" in n for n in result.notes)
    assert not weights(tmp_path / "out")["lm_head.weight"][24].any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "t9"}, 'tokenizer="t9": there is no such expert'),
        (
            {"source": "union", "tokens": {"x": "t9"}},
            r"tokenizer.tokens\['x'\] is 't9': there is no such expert",
        ),
        (
            {"source": "union", "tokens": {"x": {"of": "t1", "id": 1, "token": "a"}}},
            "remove one of",
        ),
        ({"source": "union", "tokens": {"x": {"off": "t1"}}}, "unknown key 'off'"),
        (
            {"source": "union", "tokens": {"x": 3}},
            "it must be an expert's name, base, zero or a map",
        ),
        ({"source": "union", "pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
        ({"sauce": "union"}, "unknown key 'sauce' in tokenizer. Did you mean 'source'"),
    ],
)
def test_recipes_that_are_refused(given, said, models):
    with pytest.raises(RecipeError, match=said):
        recipe(models, tokenizer=given)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"x": "t1"}, "is of 't1', whose embedding has no row for the token 'x'"),
        ({"x": {"of": "t1", "id": 25}}, "is row 25 of 't1', which has 25 rows"),
    ],
)
def test_rows_that_no_model_has_are_refused(tokens, said, models):
    with pytest.raises(InputError, match=said):
        plan_recipe(recipe(models, tokenizer={"source": "union", "tokens": tokens}))


def test_masks_over_other_rows_than_the_bases_are_refused(models, tmp_path):
    with pytest.raises(
        InputError,
        match=advice("by --tensors embeddings=base --tensors output_head=base, or take another"),
    ):
        plan_recipe(recipe(models, method="emr"))
    kept = {"embeddings": "base", "output_head": "base"}
    run_recipe(recipe(models, method="emr", tensors=kept), tmp_path / "out")
    state = covmerge.load_expert(tmp_path / "out", "t1", models / "llama" / "base")
    assert state["lm_head.weight"].shape == (27, 8)


def test_words_that_mean_something_else_name_no_expert(models):
    with pytest.raises(RecipeError, match="an expert is called 'base', which means something else"):
        recipe(models, ("base", "t1"), base="t0")
    with pytest.raises(RecipeError, match="'tokenizer' names the base, and the recipe has none"):
        recipe(models, base=None, tokenizer={"source": "base"})
    said = advice(
        "{} makes a model of its own, and --as adapter updates the base: leave out one of them"
    )
    with pytest.raises(RecipeError, match=said):
        recipe(models, output={"format": "adapter", "rank": 2})


def test_reads_are_no_larger_than_what_is_asked(models):
    """Rows in another order are gathered; nothing reads a table to find a few rows of it."""
    with open_recipe(recipe(models)) as opened:
        view = opened.experts["t2"]
        stored = view._stored
        asked = []
        plain = stored.read
        stored.read = lambda name, rows=None: (asked.append(rows), plain(name, rows))[1]
        rows = view.read("lm_head.weight", range(3, 6))
        assert [len(own) for own in asked] == [3]
        ids = ids_of(models / "llama" / "t2")
        wanted = plain("lm_head.weight")[[ids[LETTERS[i]] for i in range(3)]]
        assert torch.equal(rows, wanted)


def test_the_same_vocabulary_is_read_as_it_is_stored(models, tmp_path):
    """Without differences the result is what it is without the key, to the bit."""
    plain = run_recipe(recipe(models, ("t0",), tokenizer=None), tmp_path / "plain")
    run_recipe(recipe(models, ("t0",)), tmp_path / "union")
    assert plain.path is not None
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        first, other = (tmp_path / own / name for own in ("plain", "union"))
        assert first.read_bytes() == other.read_bytes(), name


def test_several_numbers_of_an_end_follow_the_tokenizer(models, tmp_path):
    run_recipe(recipe(models, tokenizer={"source": "t1"}), tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        told = json.loads((tmp_path / "out" / name).read_text())
        assert told["eos_token_id"] == [2, 24]
        assert told["bos_token_id"] == 1
    run_recipe(recipe(models, tokenizer={"source": "t2"}), tmp_path / "other")
    told = json.loads((tmp_path / "other" / "generation_config.json").read_text())
    assert told == {"bos_token_id": 1, "eos_token_id": 0, "top_k": 5}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        theirs = (models / "llama" / "t2" / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() == theirs
