"""`covmerge push`: the real client of the Hub, and a Hub on this machine that keeps what arrives."""

import json
import re
import shutil
import sys

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import covmerge as library
from covmerge.files.checkpoints.open import open_checkpoint
from tests.advised import advice
from tests.checkpoints.hub_server import READER, WRITER, connect, serve
from tests.cli.runs import covmerge, flags, words
from tests.folders import contents

# The client's own, of the library that it speaks HTTP with.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes")


@pytest.fixture
def merged(models):
    out = models / "out"
    covmerge("merge", *flags(models), "--method=average", out)
    return out


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty Hub, and a user who may write."""
    (tmp_path / "nothing").mkdir()
    with serve(tmp_path / "nothing") as hub:
        hub.exists = False
        connect(monkeypatch, hub, tmp_path / "cache", WRITER)
        yield hub


def refused(*arguments, code=2):
    ran = covmerge("push", *arguments, code=code)
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    return words(ran.stderr)


def test_every_byte_arrives_in_one_commit(merged, hub):
    expected = contents(merged)
    assert expected.keys() == {"README.md", "covmerge.json", "model.safetensors"}
    (merged / ".cache").mkdir()
    (merged / ".cache" / "secret").write_text("not for others")
    (merged / ".README.md.unfinished").write_text("half a card")
    ran = covmerge("push", merged, "org/name")
    (commit,) = hub.commits
    assert commit.files == expected
    assert (commit.branch, hub.private) == ("main", False)
    assert commit.message == f"Merge by average (covmerge {library.__version__})"
    url = f"{hub.url}/org/name/commit/{1:040x}"
    assert ran.stdout == f"Pushed 3 files of {merged}:\n{url}\n"


def test_heads_and_results_are_pushed_too(models, hub):
    expert = load_file(models / "a.safetensors") | {"classifier.weight": torch.ones(3, 8)}
    save_file(expert, models / "a.safetensors")
    covmerge("merge", *flags(models), "--method=average", models / "out")
    (models / "out" / "evaluation.json").write_text("{}")
    done = library.push(models / "out", "org/name")
    (commit,) = hub.commits
    assert commit.files == contents(models / "out")
    assert set(done.files) == {*commit.files} >= {"heads/a.safetensors", "evaluation.json"}


def test_what_was_pushed_can_be_merged_over(merged, hub):
    library.push(merged, "org/name")
    checkpoint = open_checkpoint("org/name")
    checkpoint.materialize()
    own = load_file(merged / "model.safetensors")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in own.items())
    checkpoint.close()


def test_flags_and_json(merged, hub):
    given = ["--private", "--revision=try", "--message=A first try", "--json"]
    done = covmerge("push", merged, "org/name", *given).json
    (commit,) = hub.commits
    assert (commit.branch, commit.message, hub.private) == ("try", "A first try", True)
    assert done["url"].startswith(hub.url)
    assert done["repository"] == "org/name"
    assert done["files"] == ["README.md", "covmerge.json", "model.safetensors"]
    assert len(done["notes"]) == 3


def test_pushed_again_it_replaces_what_it_was(merged, hub):
    covmerge("push", merged, "org/name", "--private")
    (merged / "README.md").write_text("---\nlicense: mit\nbase_model: org/base\n---\n# Mine\n")
    covmerge("push", merged, "org/name", "--private")
    assert [commit.branch for commit in hub.commits] == ["main", "main"]
    assert hub.commits[1].files == contents(merged)


def test_what_others_would_see_is_said_before(merged, hub):
    told = words(covmerge("push", merged, "org/name").stderr)
    assert "note: README.md names no licence" in told
    said = advice(
        "{} names no model of the Hub that this one was made of (base_model: ...): add them"
    )
    assert re.search(said, told)
    said = advice("others will see them: merge by relative paths to keep them out")
    assert re.search(said, told)
    assert f"names folders of this machine, such as {merged.parent}/base.safetensors" in told
    (merged / "README.md").write_text("---\nlicense: mit\nbase_model: [org/base]\n---\n")
    manifest = json.loads((merged / "covmerge.json").read_text())
    for name in ("a", "b"):
        manifest["sources"][f"expert {name}"]["source"] = f"./{name}.safetensors"
    manifest["sources"]["base"]["source"] = "org/base@v1"
    (merged / "covmerge.json").write_text(json.dumps(manifest))
    assert "note:" not in covmerge("push", merged, "org/name").stderr
    (merged / "README.md").unlink()
    assert "README.md names no licence" in covmerge("push", merged, "org/name").stderr


def test_a_failed_check_sends_nothing(merged, hub):
    tensors = load_file(merged / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, merged / "model.safetensors")
    told = refused(merged, "org/name", code=1)
    assert "fails its verification. files: model.safetensors is not as it was written" in told
    assert "finite: layers.0.mlp.up_proj.weight" in told
    assert (hub.commits, hub.stored, hub.exists) == ([], {}, False)


def test_what_is_no_finished_output(merged, models, hub):
    assert "has no covmerge.json: it is not a finished output" in refused(models, "org/name")
    compared = models / "compared"
    covmerge("compare", *flags(models), "--methods=average,ties", "--out", compared)
    assert "verify one of its models" in refused(compared, "org/name")
    partial = models / ".out.covmerge-partial"
    (partial / "output").mkdir(parents=True)
    said = advice(
        "{} is not finished: a merge into it is under way, or waits in {}. Let it end, go on"
    )
    told = refused(merged, "org/name")
    assert re.search(said, told) and str(partial) in told
    assert "is not finished" in refused(partial / "output", "org/name")
    assert "is not finished" in refused(models / "out", "org/name")
    assert not hub.exists
    shutil.rmtree(partial)
    covmerge("push", merged, "org/name")


def test_links_are_not_followed(merged, models, hub):
    (merged / "notes.txt").symlink_to(models / "a.safetensors")
    said = advice("{} is neither a file nor a folder: put the file itself there")
    assert re.search(said, refused(merged, "org/name"))
    (merged / "notes.txt").unlink()
    (merged / "again").symlink_to(merged)
    assert "again is neither a file nor a folder" in refused(merged, "org/name")
    assert not hub.exists
    (merged / "again").unlink()
    (merged / "notes.txt").write_text("mine")
    covmerge("push", merged, "org/name")
    assert hub.files["notes.txt"] == b"mine"


@pytest.mark.parametrize("name", ["name", "org/name/more", "https://hub/org/name", "org/", "../x"])
def test_names_that_are_none(merged, hub, name):
    said = advice("{} is no name of a repository: write ORG/NAME")
    assert re.search(said, refused(merged, name))
    covmerge("push", merged, "org/name")


def test_a_name_that_the_hub_does_not_take(merged, hub):
    said = advice("{} refuses what is pushed to {} ({}): mend it and push again")
    assert re.search(said, refused(merged, "org/na--me"))
    covmerge("push", merged, "org/name")


def test_nobody_is_logged_in(merged, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    told = refused(merged, "org/name")
    said = advice(
        "{}: {} does not know you: log in with `hf auth login`, by a token that may write"
    )
    assert re.search(said, told) and f"org/name: {hub.url} does" in told
    hub.exists = True  # then it is found, and only the upload refused
    assert "log in with `hf auth login`" in refused(merged, "org/name")
    assert hub.commits == []
    monkeypatch.setenv("HF_TOKEN", WRITER)  # what that command keeps
    covmerge("push", merged, "org/name")


def test_who_may_not_write(merged, hub, monkeypatch):
    told = refused(merged, "other/name")
    assert "does not let you write to other/name" in told
    assert "no rights in the namespace other" in told
    said = advice("and correct the name, or log in with `hf auth login` by a token that may write")
    assert re.search(said, told) and "`hf auth whoami`" in told
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "does not let you write to org/name" in refused(merged, "org/name")
    hub.exists = True
    assert "does not let you write to org/name" in refused(merged, "org/name")
    assert hub.commits == []
    monkeypatch.setenv("HF_TOKEN", WRITER)
    covmerge("push", merged, "org/name")


def test_a_public_repository_is_not_private(merged, hub):
    hub.exists = True
    said = advice(
        "is public already: make it private in its settings, push to another name, or leave"
    )
    assert re.search(said, refused(merged, "org/name", "--private"))
    assert (hub.commits, hub.stored) == ([], {})
    hub.private = True
    covmerge("push", merged, "org/name", "--private")
    hub.private = False
    covmerge("push", merged, "org/name")


def test_weights_that_are_there_already(merged, hub):
    hub.exists = True
    hub.files["pytorch_model.bin"] = hub.files["training_args.json"] = b"of another model"
    told = refused(merged, "org/name")
    said = advice("and a new branch begins with them: delete them there, or push to another name")
    assert re.search(said, told) and "org/name holds other weights (pytorch_model.bin)" in told
    assert (hub.commits, hub.stored) == ([], {})
    assert re.search(said, refused(merged, "org/name", "--revision", "new"))
    del hub.files["pytorch_model.bin"]
    covmerge("push", merged, "org/name")


def test_metadata_that_the_hub_refuses(merged, hub):
    (merged / "README.md").write_text("---\nlicense: nonsense\n---\n")
    told = refused(merged, "org/name")
    assert '"license" must be one of the known ones' in told
    assert hub.commits == []
    (merged / "README.md").write_text("---\nlicense: [\n---\n")
    assert "README.md is no YAML" in refused(merged, "org/name")


def test_a_file_that_is_not_taken(merged, hub):
    hub.full = True
    told = refused(merged, "org/name")
    assert "does not let you write to org/name (HfHubHTTPError: 403" in told
    assert "over the quota" in told
    assert (hub.commits, hub.stored) == ([], {})


def test_a_hub_out_of_reach(merged, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = refused(merged, "org/name")
    assert "org/name could not be pushed to http://127.0.0.1:9, or its answer was lost" in told
    assert "check the connection" in told


def test_an_answer_that_is_lost_after_the_commit(merged, hub):
    def wrong():
        while True:  # what is asked after the commit was made
            yield "done, and cut" if hub.stored else ""

    hub.wrong = wrong()
    told = refused(merged, "org/name")
    assert len(hub.commits) == 1
    said = advice(
        "none of them; check the connection and push again, which replaces them by the same"
    )
    assert re.search(said, told)
    hub.wrong = iter(())
    covmerge("push", merged, "org/name")
    assert hub.files == contents(merged)


def test_without_the_client_the_extra_is_named(merged, hub, monkeypatch):
    said = advice("pushing takes the client of the Hugging Face Hub: pip install covmerge[hub]")
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "huggingface_hub", None)
        assert re.search(said, refused(merged, "org/name"))
    covmerge("push", merged, "org/name")
