"""The model card: what the Hub reads of it, what people do, and what strangers' strings cannot do to it."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.local import LocalFolder
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.recipe.strict_yaml import parse_yaml
from covmerge.run.export.adapter import library_of, pipeline_of
from covmerge.run.export.markdown import read_front_matter
from covmerge.run.export.parents import Licence, licence_notes, read_licence, shared_licence
from tests.checkpoints.hub_server import COMMIT, connect, serve
from tests.cli.runs import save_plain as save_files
from tests.cli.runs import statistics_for
from tests.e2e.models import build, save_family
from tests.e2e.test_adapters import save_adapter
from tests.forked import printed

UP = "layers.0.mlp.up_proj.weight"


def save(folder: Path, seed: int, card: str | None = None) -> Path:
    """A model of one matrix, without a config."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weight = 10.0 * torch.eye(8) + torch.randn(8, 8, generator=generator)
    save_file({UP: weight}, folder / "model.safetensors")
    if card is not None:
        (folder / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    return folder


def snapshot(cache: Path, name: str, commit: str = COMMIT) -> Path:
    """Where the cache of the Hub's client holds a commit."""
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def merge(folder: Path, base: Path, experts, method="average", **options):
    """Merge, and return the card with what the result says."""
    result = covmerge.merge(base, experts, method, folder / "out", **options)
    return ModelCard.load(folder / "out" / "README.md"), result


def merge_licensed(folder: Path, base: str | None, **experts: str | None):
    """The same of models with these cards."""
    saved = {name: save(folder / name, n, card) for n, (name, card) in enumerate(experts.items())}
    return merge(folder, save(folder / "base", 9, base), saved)


def section(card: ModelCard, title: str) -> str:
    found = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", card.text, re.DOTALL | re.MULTILINE)
    return found[1]


def fence(text: str) -> str:
    """The first block of code."""
    return re.search(r"^(`{3,})\w*\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)[2]


def cells(line: str) -> list[str]:
    """The cells of a row, as Markdown splits it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


class TestWhatTheHubReads:
    def test_parents_in_its_cache(self, tmp_path):
        base, experts = save_family("llama", tmp_path, experts=2)
        places = {
            "org/base": snapshot(tmp_path / "hub", "org/base"),
            "org/my-code": snapshot(tmp_path / "hub", "org/my-code", "f" * 40),
        }
        for (name, place), folder in zip(places.items(), (base, experts["e1"]), strict=True):
            place.parent.mkdir(parents=True)
            folder.rename(place)
            (place / "README.md").write_text(f"---\ntitle: {name}\nlicense: Apache-2.0\n---\n")
        (experts["e2"] / "README.md").write_text("---\r\nlicense: apache-2.0\r\n---\r\n")
        given = {"e1": places["org/my-code"], "e2": experts["e2"]}
        card, result = merge(tmp_path, places["org/base"], given, "ace", weights={"e2": 0.5})
        assert card.data.to_dict() == {
            "base_model": ["org/base", "org/my-code"],
            "base_model_relation": "merge",
            "library_name": "transformers",
            "license": "apache-2.0",
            "pipeline_tag": "text-generation",
            "tags": ["merge", "covmerge", "ace", "llama"],
        }
        assert not any("licence" in note for note in result.notes)
        assert str(tmp_path) not in card.content

        header, _, *rows = section(card, "What was merged").split("\n\n")[0].splitlines()
        assert cells(header) == ["", "source", "version", "weight", "licence"]
        link = f"[org/base](https://huggingface.co/org/base/tree/{COMMIT})"
        assert cells(rows[0]) == ["base", link, f"`{COMMIT[:12]}`", "", "apache-2.0"]
        assert cells(rows[1])[2:4] == ["`ffffffffffff`", "1"]
        own = json.loads((tmp_path / "out" / "covmerge.json").read_text())["sources"]["expert e2"]
        digest = own["content"]["model.safetensors"].removeprefix("sha256:")
        assert cells(rows[2]) == [
            *("expert e2", "expert2", f"sha256 `{digest[:12]}` (model.safetensors)"),
            *("0.5", "apache-2.0"),
        ]
        assert section(card, "Licence").startswith("All of them are under apache-2.0")
        assert "W̄ = W₀ +" in section(card, "Method")
        assert "url = {https://arxiv.org/abs/2603.02945}" in section(card, "Method")
        assert "LlamaForCausalLM.from_pretrained(folder)" in section(card, "How to load it")
        assert "No data was used" in card.text

        data, _ = parse_yaml(fence(section(card, "Recipe")), "the card")
        recipe = parse_recipe(data)
        assert (recipe.base, recipe.method) == (f"org/base@{COMMIT}", "ace")
        assert recipe.experts["e1"].source == f"org/my-code@{'f' * 40}"
        assert (recipe.experts["e2"].source, recipe.experts["e2"].weight) == ("expert2", 0.5)

    def test_a_repository(self, tmp_path, monkeypatch):
        upload = save(tmp_path / "upload", 0, "license: mit")
        with serve(upload) as hub:
            connect(monkeypatch, hub, tmp_path / "cache")
            expert = save(tmp_path / "expert", 1, "license: mit")
            card, _ = merge(tmp_path, "org/name@v1", {"e": expert})
            assert hub.sent["README.md"] == len((upload / "README.md").read_bytes())
        assert (card.data.base_model, card.data.license) == (["org/name"], "mit")
        assert f"base: org/name@{COMMIT}" in section(card, "Recipe")

    def test_a_card_that_the_hub_does_not_give_is_a_note(self, tmp_path, monkeypatch):
        with serve(save(tmp_path / "upload", 0, "license: mit")) as hub:
            connect(monkeypatch, hub, tmp_path / "cache")
            hub.listed["README.md"] = 10**9
            card, result = merge(tmp_path, "org/name", {"e": save(tmp_path / "e", 1)})
            assert "README.md" not in hub.sent
        assert card.data.license is None
        assert any("licence of base could not be read: org/name: README" in n for n in result.notes)

    @pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
    def test_an_adapter(self, tmp_path, monkeypatch):
        """Nothing of its base is fetched but what the plan needs, and the card."""
        model = build("llama")
        model.save_pretrained(tmp_path / "base")
        (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
        adapters = {}
        for number in (1, 2):
            save_adapter(model, tmp_path / f"a{number}", seed=number, targets=["q_proj"])
            adapters[f"a{number}"] = tmp_path / f"a{number}" / "adapter"
            (adapters[f"a{number}"] / "README.md").write_text("---\nlicense: mit\n---\n")
        with serve(tmp_path / "base") as hub:
            connect(monkeypatch, hub, tmp_path / "cache")
            card, _ = merge(tmp_path, "org/name", adapters, form="adapter")
            assert set(hub.sent) == {"README.md", "config.json", "model.safetensors"}
        assert card.data.library_name == "peft"
        assert (card.data.base_model, card.data.license) == (["org/name"], "mit")
        assert card.data.tags == ["merge", "covmerge", "average", "llama"]
        assert "made into one LoRA adapter" in card.text
        loading = section(card, "How to load it")
        assert f'from_pretrained("org/name", revision="{COMMIT}")' in loading
        assert "PeftModel.from_pretrained(base, folder)" in loading
        assert "is lost to the rank of the adapter" in section(card, "What became of the tensors")

    def test_nothing_is_known(self, tmp_path):
        card, result = merge_licensed(tmp_path, None, e=None)
        assert card.data.to_dict() == {"tags": ["merge", "covmerge", "average"]}
        assert "licences are unknown (base, expert e): the model card claims none" in card.text
        assert not any("licence" in note for note in result.notes)
        assert json.loads((tmp_path / "out" / "covmerge.json").read_text())["notes"] == [
            *result.notes
        ]

    def test_tensors_in_memory(self, tmp_path):
        card, _ = merge(tmp_path, {"w": torch.zeros(2, 2)}, [{"w": torch.eye(2)}])
        assert card.data.base_model is None
        assert "base: <1 tensor in memory>" in section(card, "Recipe")

    @pytest.mark.parametrize(
        ("files", "config", "expected"),
        [
            ([], {"architectures": ["BertModel"]}, "transformers"),
            (["modules.json"], {"architectures": ["BertModel"]}, "sentence-transformers"),
            (["open_clip_config.json"], {}, "open_clip"),
            ([], {"architectures": []}, None),
            ([], {"architectures": ["import os; #"]}, None),
            ([], {"architectures": "BertModel"}, None),
        ],
    )
    def test_the_library_where_it_is_certain(self, tmp_path, files, config, expected):
        for name in files:
            (tmp_path / name).write_text("{}")
        assert library_of(LocalFolder(tmp_path), config, adapter=False) == expected

    def test_the_pipeline_where_it_is_certain(self):
        causal = {"architectures": ["LlamaForCausalLM"]}
        assert pipeline_of(causal) == "text-generation"
        assert pipeline_of({**causal, "vision_config": {"depth": 2}}) is None
        assert pipeline_of({"architectures": ["BertForSequenceClassification"]}) is None


class TestLicences:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("license: MIT", Licence(("mit",))),
            ("license: [mit, apache-2.0]", Licence(("mit", "apache-2.0"))),
            ("license:\n- mit\ntags:\n- license", Licence(("mit",))),
            ("tags: {license: mit}", None),
            ("license: {name: mit}", None),
            ("license: unknown", None),
            ("license:", None),
            ("license: a licence of my own", None),
            ("language: en", None),
            ("- license: mit", None),
            ("license: mit\nlicense: apache-2.0", Licence(("apache-2.0",))),
            ("a: &a mit\nlicense: *a", None),
            (
                "license: other\nlicense_name: my-terms\nlicense_link: https://example.org/x",
                Licence(("other",), "my-terms", "https://example.org/x"),
            ),
            (
                "license: other\nlicense_name: my-terms\nlicense_link: LICENSE",
                Licence(("other",), "my-terms", "https://huggingface.co/org/name/blob/abc/LICENSE"),
            ),
            (
                'license: other\nlicense_name: "a\\n---\\nb"\nlicense_link: javascript:alert(1) x',
                Licence(("other",), "a --- b"),
            ),
        ],
    )
    def test_what_a_card_says(self, tmp_path, text, expected):
        card = save(tmp_path / "model", 0, text) / "README.md"
        assert read_licence(card, HubModel("org/name", "abc")) == expected

    def test_a_card_without_metadata(self, tmp_path):
        card = tmp_path / "README.md"
        for text in ("# license: mit\n", "", "---\nlicense: mit\n", "\ufeff\n---\n---\n"):
            card.write_text(text)
            assert read_licence(card, None) is None

    def test_what_cannot_be_read_is_a_note(self, tmp_path):
        """No card stops a merge, nor takes its time or its memory."""
        growing = ["a0: &a0 [x, x, x, x]"]
        growing += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
        bad = {
            "broken": b"---\nlicense: [\n---\n",
            "binary": b"---\nlicense: \x00\xff\n---\n",
            "long": b"---\n" + b"x: 1\n" * 300_000 + b"license: mit\n---\n",
            "growing": ("---\n" + "\n".join(growing) + "\nlicense: mit\n---\n").encode(),
            "deep": b"---\nlicense: mit\nx: " + b"[" * 2000 + b"]" * 2000 + b"\n---\n",
        }
        experts = {name: save(tmp_path / name, n) for n, name in enumerate(bad)}
        for name, content in bad.items():
            (experts[name] / "README.md").write_bytes(content)
        experts["pipe"] = save(tmp_path / "pipe", 7)
        os.mkfifo(experts["pipe"] / "README.md")
        experts["link"] = save(tmp_path / "link", 8)
        (tmp_path / "elsewhere.md").write_text("---\nlicense: mit\n---\n")
        (experts["link"] / "README.md").symlink_to(tmp_path / "elsewhere.md")
        card, result = merge(tmp_path, save(tmp_path / "base", 9, "license: mit"), experts)
        unread = {
            name
            for name in experts
            if any(n.startswith(f"the licence of expert {name} could not") for n in result.notes)
        }
        assert unread >= {"broken", "binary", "long", "link"}
        assert unread <= {"broken", "binary", "long", "link", "deep"}
        assert card.data.license is None
        rows = dict(
            map(lambda r: (cells(r)[0], cells(r)[4]), re.findall(r"^\| [be].*", card.text, re.M))
        )
        assert (rows["expert growing"], rows["expert pipe"]) == ("mit", "unknown")
        assert str(tmp_path) not in card.content

    def test_all_alike(self, tmp_path):
        terms = "license: other\nlicense_name: my-terms\nlicense_link: https://example.org/{}"
        card, result = merge_licensed(tmp_path, terms.format(1), a=terms.format(2))
        assert (card.data.license, card.data.license_name) == ("other", "my-terms")
        assert card.data.license_link == "https://example.org/1"
        assert not any("licence" in note for note in result.notes)

    @pytest.mark.parametrize(
        ("base", "expert"),
        [
            ("license: mit", "license: apache-2.0"),
            ("license: mit", None),
            ("license: other", "license: other"),
            (
                "license: other\nlicense_name: my-terms",
                "license: other\nlicense_name: your-terms",
            ),
            ("license: mit", "license: [mit, apache-2.0]"),
        ],
    )
    def test_no_licence_is_claimed_where_they_differ(self, tmp_path, base, expert):
        card, result = merge_licensed(tmp_path, base, e=expert)
        assert not {"license", "license_name", "license_link"} & card.data.to_dict().keys()
        (note,) = [note for note in result.notes if "the parents' licences are" in note]
        assert "(base" in note and "expert e)" in note
        assert "the model card claims none" in section(card, "Licence")

    @pytest.mark.parametrize(
        ("licences", "expected"),
        [
            (
                {"base": "apache-2.0", "expert a": "cc-by-nc-4.0", "expert b": "apache-2.0"},
                "cc-by-nc-4.0 (expert a) forbids commercial use, unlike apache-2.0 (base, expert b)",
            ),
            (
                {"base": "llama3.1", "expert a": "mit"},
                "llama3.1 (base) has terms of its own for what is derived, unlike mit (expert a)",
            ),
            (
                {"base": "mit", "expert a": "gpl-3.0"},
                "gpl-3.0 (expert a) asks for the same licence on what is derived, unlike mit (base)",
            ),
            (
                {"base": "cc-by-nd-4.0", "expert a": "cc-by-nd-4.0"},
                "cc-by-nd-4.0 (base, expert a) forbids passing on what is derived: ask before",
            ),
        ],
    )
    def test_what_one_binds_the_others_to(self, licences, expected):
        notes = licence_notes({key: Licence((name,)) for key, name in licences.items()})
        assert any(note.startswith(expected) for note in notes)

    def test_what_goes_together_needs_no_note(self):
        for names in (("mit", "mit"), ("llama3.1", "llama3.1"), ("gpl-3.0", "gpl-3.0")):
            licences = {f"expert {n}": Licence((name,)) for n, name in enumerate(names)}
            assert shared_licence(licences) == Licence((names[0],))
            assert list(licence_notes(licences)) == []

    def test_a_terms_name_tells_too(self):
        research = Licence(("other",), "Qwen-Research")
        notes = list(licence_notes({"base": research, "expert a": Licence(("mit",))}))
        assert any("other (Qwen-Research) (base) forbids commercial use" in note for note in notes)


HOSTILE = [
    "a | b | c",
    "a\n---\nlicense: mit\n---\n# b",
    "<script>alert(1)</script>",
    "``` `` ` ~~~",
    "[a](javascript:alert) ![b](x) *c* __d__ $e$",
    "<!-- results of `covmerge evaluate`: begin -->",
    "a\x1b[2J\u202eb\x85c",
    "---",
    "{a: 1}, [b] & *c !d '\"",
]


class TestHostileStrings:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_names_of_folders(self, tmp_path, name):
        # A recipe refuses line breaks in a source, but a link may lead to a folder of any name.
        folder = save(tmp_path / name.replace("/", "-"), 1)
        (tmp_path / "link").symlink_to(folder)
        card, _ = merge(tmp_path, save(tmp_path / "base", 0), {"e": tmp_path / "link"})
        self.check(card)
        recipe, _ = parse_yaml(fence(section(card, "Recipe")), "the card")
        assert "\n" not in recipe["experts"]["e"]["source"]
        assert "|" not in name or "\\|" in card.text

    @pytest.mark.parametrize("name", HOSTILE)
    def test_names_of_licences(self, tmp_path, name):
        quoted = json.dumps(name)
        text = f"license: other\nlicense_name: {quoted}\nlicense_link: {quoted}"
        card, _ = merge_licensed(tmp_path, text, e=text)
        assert set(card.data.to_dict()) == {"license", "license_name", "tags"}
        assert card.data.license == "other"
        self.check(card)
        assert read_licence(tmp_path / "out" / "README.md", None) is not None

    @pytest.mark.parametrize("pattern", ["*|*", "```*", "<b>*", "*\\*", "*`*"])
    def test_rules(self, tmp_path, pattern):
        rules = [{"match": pattern, "use": "base"}, {"match": "*", "use": "average"}]
        base, expert = save(tmp_path / "base", 0), save(tmp_path / "e", 1)
        for n, folder in enumerate((base, expert)):
            weights = {UP: torch.full((8, 8), float(n)), "x|```<b>\\`y": torch.ones(2, 2)}
            save_file(weights, folder / "model.safetensors")
        card, _ = merge(tmp_path, base, {"e": expert}, rules=rules)
        self.check(card)
        recipe, _ = parse_yaml(fence(section(card, "Recipe")), "the card")
        assert recipe["rules"][0]["match"] == pattern

    def check(self, card: ModelCard) -> None:
        """The card's own structure is all that it has."""
        prose = re.sub(r"^(`{3,}).*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"^#+ (.*)", prose, re.M)[1:] == [
            *("What was merged", "Licence", "Method", "Recipe"),
            *("What became of the tensors", "How to load it"),
        ]
        assert "<" not in prose
        assert "---" not in prose.splitlines()
        assert all(c.isprintable() or c == "\n" for c in card.content)
        for table, width in (("What was merged", 5), ("What became of the tensors", 3)):
            rows = [line for line in section(card, table).splitlines() if line.startswith("|")]
            assert {len(cells(line)) for line in rows} == {width}
            assert len(rows) >= 3
        for live in re.findall(r"(?<!\\)\]\(([^)]*)", prose):
            assert live.startswith("https://huggingface.co/")


class TestWhatItTells:
    def test_the_same_bytes_twice(self, tmp_path):
        base, experts = save(tmp_path / "base", 0, "license: mit"), {"e": save(tmp_path / "e", 1)}
        for out in ("first", "second"):
            covmerge.merge(base, experts, "ace", tmp_path / out)
        first, second = ((tmp_path / out / "README.md").read_bytes() for out in ("first", "second"))
        assert first == second
        covmerge.compare(base, experts, ["ace", "average"], tmp_path / "study")
        assert (tmp_path / "study" / "ace" / "README.md").read_bytes() == first

    def test_statistics_are_said(self, tmp_path):
        folder = save_files(tmp_path)
        files = statistics_for("regmean", folder)
        experts = {name: folder / f"{name}.safetensors" for name in files}
        base = folder / "base.safetensors"
        card, _ = merge(tmp_path, base, experts, "regmean", statistics=files)
        used = "It used the experts' data as Gram matrices of their layers' inputs, collected beforehand"
        assert used in card.text
        assert "a.covstats.safetensors, b.covstats.safetensors" in card.text
        assert "No data was used" not in card.text
        recipe, _ = parse_yaml(fence(section(card, "Recipe")), "the card")
        assert recipe["experts"]["a"]["statistics"] == "a.covstats.safetensors"
        assert str(tmp_path) not in card.content

    def test_a_file_in_the_cache_is_of_its_repository(self, tmp_path):
        place = snapshot(tmp_path / "hub", "org/name")
        save(place, 0, "license: mit")
        blob = place.parent.parent / "blobs" / "0123"
        blob.parent.mkdir()
        (place / "model.safetensors").rename(blob)
        (place / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
        expert = save(tmp_path / "e", 1, "license: mit")
        card, _ = merge(tmp_path, place / "model.safetensors", {"e": expert})
        assert (card.data.base_model, card.data.license) == (["org/name"], "mit")
        checkpoint = open_checkpoint(place / "model.safetensors")
        assert checkpoint.hub == HubModel("org/name", COMMIT)
        checkpoint.close()

    def test_an_extracted_adapter_names_its_base_by_its_repository(self, tmp_path):
        base = save(snapshot(tmp_path / "hub", "org/name"), 0)
        covmerge.extract(base, save(tmp_path / "e", 1), tmp_path / "out", rank=2)
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", COMMIT)
        card = ModelCard.load(tmp_path / "out" / "README.md")
        assert "One fine-tuned model of org/name, made into one LoRA adapter" in card.text

    @pytest.mark.parametrize(
        "place",
        ["models--org--name/snapshots/main", "models--a--b--c/snapshots/" + "a" * 40, "x/y"],
    )
    def test_what_only_looks_like_the_cache_is_no_repository(self, tmp_path, place):
        checkpoint = open_checkpoint(save(tmp_path / place, 0))
        assert checkpoint.hub is None
        checkpoint.close()

    def test_heads_masks_and_methods_of_rules(self, tmp_path):
        base, expert = save(tmp_path / "base", 0), save(tmp_path / "e", 1)
        head = {UP: 11.0 * torch.eye(8), "classifier.weight": torch.ones(2, 8)}
        save_file(head, expert / "model.safetensors")
        rules = [{"match": "*up_proj*", "method": "ties"}]
        card, _ = merge(tmp_path, base, {"e": expert}, "emr", rules=rules)
        loading = section(card, "How to load it")
        assert "- `heads/e.safetensors`: classifier.weight" in loading
        assert "load_file(file)" in loading
        method = section(card, "Method")
        assert "@misc{emr," in method and "@misc{ties," in method
        assert "  author = {Prateek Yadav and Derek Tam and " in method
        assert "  author = {Chenyu Huang and " in method and method.count("author = ") == 2
        covmerge.merge(base, {"e": save(tmp_path / "f", 2)}, "emr", tmp_path / "masked")
        assert "`covmerge.load_expert(folder, expert, base)`" in (
            tmp_path / "masked" / "README.md"
        ).read_text("utf-8")

    def test_what_it_says_can_be_run(self, tmp_path):
        card, _ = merge_licensed(tmp_path, None, e=None)
        code = fence(section(card, "How to load it")) + "\nprint(sorted(weights))"
        assert printed(code, cwd=tmp_path / "out") == f"['{UP}']\n"

    def test_the_client_of_the_hub_is_not_needed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        base, expert = save(tmp_path / "base", 0, "license: mit"), save(tmp_path / "e", 1)
        covmerge.merge(base, {"e": expert}, "average", tmp_path / "out")
        _, metadata, _ = (tmp_path / "out" / "README.md").read_text("utf-8").split("---\n", 2)
        assert yaml.safe_load(metadata) == {"tags": ["merge", "covmerge", "average"]}


def test_metadata_is_read_no_further_than_it_may_be(tmp_path):
    card = tmp_path / "README.md"
    card.write_bytes(b"---\nlicense: mit\n---\n" + b"x" * (2 << 20))
    assert read_front_matter(card, ["license"]) == {"license": ("mit",)}
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_front_matter(tmp_path / "other.md", ["license"])


@pytest.mark.parametrize("nested", ["{", "a: [a, ", "{a: ", "? "])
def test_a_card_of_brackets_is_refused_at_once(tmp_path: Path, nested: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(f"---\n{nested * 100_000}\n---\n")
    before = time.process_time()
    # PyYAML 6.0.4 has a limit of its own for brackets.
    with pytest.raises(
        CheckpointError, match=r"nested more than 64 levels deep|maximum nesting depth"
    ):
        read_front_matter(card, ("license",))
    assert time.process_time() - before < 10
