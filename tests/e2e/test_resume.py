"""`kill -9` at any moment, then resume: the same bytes as an undisturbed run."""

import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CovmergeError, InputError, TensorError
from tests.advised import advice
from tests.e2e.models import save_family
from tests.folders import contents
from tests.held import held, journaled, wait_until
from tests.interrupted import InterruptAfter

PARTIAL = ".out.covmerge-partial"


def save_plain(folder, layers=40, width=256, experts=3):
    """Checkpoints with many matrices and no config."""
    generator = torch.Generator().manual_seed(0)
    base = {
        f"layers.{n}.proj.weight": torch.randn(width, width, generator=generator)
        for n in range(layers)
    }
    save_file(base, folder / "base.safetensors")
    paths = {}
    for t in range(experts):
        expert = {
            n: w + 0.01 * 4**t * torch.randn(w.shape, generator=generator) for n, w in base.items()
        }
        paths[f"e{t}"] = folder / f"e{t}.safetensors"
        save_file(expert, paths[f"e{t}"])
    return folder / "base.safetensors", paths


def merging(base, experts, out, **options):
    sources = {name: str(path) for name, path in experts.items()}
    return (
        f"import covmerge; covmerge.merge({str(base)!r}, {sources!r}, out={str(out)!r}, "
        f"threads=1, **{options!r})"
    )


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bytes(tmp_path):
    base, experts = save_plain(tmp_path, width=64)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed", threads=1)

    journal = tmp_path / PARTIAL / "journal.jsonl"
    for target in (5, 15, 30):  # finished items at which the process is killed
        program = merging(base, experts, tmp_path / "out", resume=target > 5)
        with held(program, before="layers.9.proj.weight") as process:  # the last of the plan
            wait_until(partial(journaled, journal, target), process)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        assert journal.exists()

    # Whatever the kill left in a shard beyond the journal, even garbage, is written again.
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    lines = journal.read_text().splitlines()
    with shard.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    assert len(lines) < 41
    covmerge.merge(base, experts, out=tmp_path / "out", threads=1, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert not (tmp_path / PARTIAL).exists()


def test_damaged_finished_rows_are_computed_again(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    finished = interrupt_after(tmp_path, base, experts, items=3)
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[place_of(finished[0], data) + 10] ^= 0xFF
    shard.write_bytes(bytes(data))
    result = covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert result.run["resumed_items"] == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def place_of(name, data):
    """Where the bytes of a tensor begin in those of a safetensors file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return begin + json.loads(data[8:begin])[name]["data_offsets"][0]


def interrupt_after(tmp_path, base, experts, items, **options):
    """Interrupt a merge, as by Ctrl-C, once some items are written; they are returned.

    Which they are is not promised: small items are computed side by side.
    """
    interrupt = InterruptAfter(items)
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(base, experts, out=tmp_path / "out", progress=interrupt, **options)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / PARTIAL).exists()
    return interrupt.finished


def test_unfinished_work_needs_a_decision(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2, method="ace")
    with pytest.raises(InputError, match="resume=True to go on, overwrite=True to start again"):
        covmerge.merge(base, experts, "ace", out=tmp_path / "out")
    with pytest.raises(
        InputError, match=r"parameters\.eps was not set and is now 0\.5\..*overwrite"
    ):
        covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True, eps=0.5)
    assert (tmp_path / PARTIAL / "journal.jsonl").exists()  # another recipe destroys nothing
    covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True)


def test_large_matrices_are_gone_on_with_by_as_many_threads(tmp_path, monkeypatch):
    """Their sums are rounded by it, and the output had some of each."""
    monkeypatch.setattr("covmerge.plan.planning.work._NARROW_ELEMENTS", 60)
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2, method="ace", threads=1)
    with pytest.raises(InputError, match=r"threads was 1 and is now 2\. Take these back"):
        covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True, threads=2)
    covmerge.merge(base, experts, "ace", out=tmp_path / "out", resume=True, threads=1)
    covmerge.merge(base, experts, "ace", out=tmp_path / "at-once", threads=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "at-once")


@pytest.mark.parametrize(("method", "narrow"), [("ace", 2**20), ("average", 60)])
def test_what_does_not_hang_on_threads_is_gone_on_with(tmp_path, monkeypatch, method, narrow):
    monkeypatch.setattr("covmerge.plan.planning.work._NARROW_ELEMENTS", narrow)
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2, method=method, threads=1)
    covmerge.merge(base, experts, method, out=tmp_path / "out", resume=True, threads=2)


def test_changed_sources_are_not_resumed(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    path = experts["e1"]
    path.write_bytes(path.read_bytes())
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match="overwrite"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


def test_another_order_of_experts_is_not_resumed(tmp_path):
    """Sums are rounded by it, and the output had some of each."""
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    other = dict(reversed(experts.items()))
    said = r'order of experts was \["e0", "e1", "e2"\] and is now \["e2", "e1", "e0"\]\. Take these back'
    with pytest.raises(InputError, match=said):
        covmerge.merge(base, other, out=tmp_path / "out", resume=True)
    assert covmerge.merge(base, experts, out=tmp_path / "out", resume=True).run["resumed_items"]


def test_other_code_is_not_resumed(tmp_path, monkeypatch):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    for module in ("front.job", "plan.planning.types"):
        monkeypatch.setattr(f"covmerge.{module}.own_version", lambda: "0.1.0, code 1f2e")
    with pytest.raises(
        InputError, match=r"covmerge was '0\.1\.0, code \w{12}' and is now '0\.1\.0, c"
    ):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


@pytest.fixture
def products():
    """Take back what a test says of float32 products, by torch's old way and its new one."""
    before, own = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul
    yield
    if hasattr(own, "fp32_precision"):
        own.fp32_precision = "none"
    torch.set_float32_matmul_precision(before)


def lowered():
    torch.set_float32_matmul_precision("medium")
    return "medium"


def lowered_by_backend():
    """Old: a RuntimeError of torch's, which then does not tell by the other way."""
    if not hasattr(torch.backends.mkldnn.matmul, "fp32_precision"):
        pytest.skip("torch from 2.9 on has it")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    return "bf16"


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("lower", [lowered, lowered_by_backend])
def test_products_of_less_precision_are_not_resumed(tmp_path, lower):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    now = lower()
    with pytest.raises(InputError, match=f"is now 'on cpu, float32 products in {now} precision'"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


def test_another_processor_goes_on_and_says_so(tmp_path, monkeypatch):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2)
    monkeypatch.setattr("covmerge.run.engine.options.processor_of", lambda device: "Z80")
    done = covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert done.run["resumed_items"] == 2
    assert any("another processor" in note and "this one is Z80" in note for note in done.notes)


@pytest.mark.parametrize("name", ["output/model.safetensors", "journal.jsonl"])
def test_nothing_is_written_through_a_hard_link(tmp_path, name):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    interrupt_after(tmp_path, base, experts, items=2)
    planted, outside = tmp_path / PARTIAL / name, tmp_path / "outside"
    planted.rename(outside)
    before = outside.read_bytes()
    os.link(outside, planted)
    if name == "journal.jsonl":  # what is finished is not known without it
        with pytest.raises(InputError, match=r"is a hard link.*start over with overwrite=True"):
            covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
        done = covmerge.merge(base, experts, out=tmp_path / "out", overwrite=True)
    else:
        done = covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
        assert "merged anew, as a link lay there: model.safetensors" in done.notes
    assert outside.read_bytes() == before and outside.stat().st_nlink == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_the_same_recipe_gives_the_same_bytes(tmp_path):
    base, experts = save_family("gpt2", tmp_path)
    for out in ("a", "b"):
        covmerge.merge(base, experts, out=tmp_path / out, shard_size="20KB")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    json.loads((tmp_path / "a" / "covmerge.json").read_text())


def test_an_error_halfway_leaves_nothing_behind(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    broken = load_file(experts["e2"])
    broken["layers.2.proj.weight"][3, 5] = float("nan")
    save_file(broken, experts["e2"])
    with pytest.raises(TensorError, match=r"'layers.2.proj.weight' of expert 'e2'.*at \[3, 5\]"):
        covmerge.merge(base, experts, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "base.safetensors", "e0.safetensors", "e1.safetensors", "e2.safetensors",
    ]  # fmt: skip


def save_with_companions(folder):
    """The checkpoints of `save_plain`, the base as a folder with a tokenizer and a config."""
    base, experts = save_plain(folder, layers=4, width=32)
    (folder / "base").mkdir()
    base.rename(folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text('{"hidden_size": 32}')
    (folder / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder / "base", experts


@pytest.mark.parametrize("changed", ["base/model.safetensors", "e1.safetensors"])
def test_a_source_that_kept_its_size_and_time_is_not_resumed(tmp_path, changed):
    base, experts = save_with_companions(tmp_path)
    interrupt_after(tmp_path, base, experts, items=2)
    path = tmp_path / changed
    before = path.stat()
    tensors = load_file(path)
    tensors["layers.3.proj.weight"] += 1
    save_file(tensors, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(
        InputError, match=r"another merge: (base|expert \w+) changed\..*overwrite=True"
    ):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_companion_files_that_changed_are_not_resumed(tmp_path, name):
    base, experts = save_with_companions(tmp_path)
    interrupt_after(tmp_path, base, experts, items=2)
    path = base / name
    before = path.stat()
    path.write_text(path.read_text().replace("1", "2").replace("32", "33"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match=r"changed\..*overwrite=True"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    (base / "merges.txt").write_text("a b")
    with pytest.raises(InputError, match=r"changed\..*overwrite=True"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)


class Meanwhile:
    """Does something when the first tensor of a merge is done."""

    def __init__(self, do):
        self.do = do

    def start(self, total):
        pass

    def advance(self, what, size, *, resumed=False):
        if self.do is not None:
            self.do()
            self.do = None

    def finish(self):
        pass


def test_companion_files_are_those_of_the_plan(tmp_path):
    base, experts = save_with_companions(tmp_path)
    expected = (base / "tokenizer.json").read_bytes()

    def change():
        (base / "tokenizer.json").write_text('{"version": "2.0"}')
        (base / "merges.txt").write_text("laid in while the merge runs")

    covmerge.merge(base, experts, out=tmp_path / "out", progress=Meanwhile(change))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == expected
    assert not (tmp_path / "out" / "merges.txt").exists()


STRANGE = ("pytorch_model.bin", "heads/stranger.safetensors", ".hidden", "adapter_config.json")


def lay_in(folder, elsewhere):
    """Put into unfinished work what the merge does not write, and links where it will write."""
    (folder / "heads").mkdir(exist_ok=True)
    for name in STRANGE:
        (folder / name).write_text("stranger")
    (folder / "a folder" / "empty").mkdir(parents=True)
    os.mkfifo(folder / "a pipe")
    for name in ("a link", "README.md", "covmerge.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(elsewhere)


@pytest.mark.parametrize("when", ["while it runs", "before it is resumed"])
def test_what_is_laid_into_unfinished_work_does_not_survive(tmp_path, when):
    base, experts = save_with_companions(tmp_path)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("precious")
    folder = tmp_path / PARTIAL / "output"

    def lay():
        lay_in(folder, precious / "thesis.tex")
        (folder / "a linked folder").symlink_to(precious)

    if when == "while it runs":
        (folder, options) = (folder, {"progress": Meanwhile(lay)})
    else:
        interrupt_after(tmp_path, base, experts, items=2)
        lay()
        options = {"resume": True}
    result = covmerge.merge(base, experts, out=tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "covmerge.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    (note,) = [note for note in result.notes if "had not written" in note]
    assert note.endswith(
        ": .hidden, a link, a linked folder, a pipe, adapter_config.json, heads/stranger.safetensors, "
        "pytorch_model.bin"
    )
    assert [p.name for p in precious.iterdir()] == ["thesis.tex"]
    assert (precious / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("lay", ["folder", "link", "pipe"])
def test_something_else_in_the_place_of_a_shard(tmp_path, lay):
    base, experts = save_with_companions(tmp_path)
    covmerge.merge(base, experts, out=tmp_path / "undisturbed")
    interrupt_after(tmp_path, base, experts, items=2)
    shard = tmp_path / PARTIAL / "output" / "model.safetensors"
    shard.rename(tmp_path / "moved")
    if lay == "folder":
        (shard / "inside").mkdir(parents=True)
        (shard / "inside" / "file").write_text("x")
    elif lay == "link":
        shard.symlink_to(tmp_path / "moved")
    else:
        os.mkfifo(shard)
    moved = (tmp_path / "moved").read_bytes()
    covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert (tmp_path / "moved").read_bytes() == moved


@pytest.mark.parametrize(
    "error", [torch.linalg.LinAlgError, MemoryError, OSError, ZeroDivisionError]
)
@pytest.mark.parametrize("kind", ["merge", "compare", "adapter"])
def test_after_an_unforeseen_error_nothing_is_left(tmp_path, error, kind):
    base, experts = save_with_companions(tmp_path)
    there = sorted(p.name for p in tmp_path.iterdir())

    def fail():
        raise error("unforeseen")

    options = {"out": tmp_path / "out", "progress": Meanwhile(fail)}
    with pytest.raises(error, match="unforeseen"):
        if kind == "compare":
            covmerge.compare(base, experts, ["average", "ties"], **options)
        elif kind == "adapter":
            covmerge.extract(base, experts["e0"], rank=2, **options)
        else:
            covmerge.merge(base, experts, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == there


def test_a_damaged_journal_is_named_and_kept(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=3)
    journal = tmp_path / PARTIAL / "journal.jsonl"
    content = journal.read_text()
    journal.write_text(re.sub(r'"merged":[^,]+', '"merged":1e300', content, count=1))
    with pytest.raises(InputError, match=r"line 2 of the journal .*checksum.*overwrite=True"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    journal.unlink()
    journal.symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"cannot read the journal .*overwrite=True"):
        covmerge.merge(base, experts, out=tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()
    covmerge.merge(base, experts, out=tmp_path / "out", overwrite=True)


def test_a_strangers_folder_is_not_overwritten(tmp_path):
    base, experts = save_plain(tmp_path, layers=2, width=32)
    out = tmp_path / "out"
    covmerge.merge(base, experts, out=out)
    covmerge.merge(base, experts, out=out, overwrite=True)
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"did not write.*thesis\.tex"):
        covmerge.merge(base, experts, out=out, overwrite=True)
    study = tmp_path / "study"
    covmerge.compare(base, experts, ["average", "ties"], study)
    covmerge.compare(base, experts, ["average"], study, overwrite=True)
    (study / "average" / "thesis.tex").write_text("precious")
    (study / "notes").mkdir()
    with pytest.raises(InputError, match=r"did not write.*: notes, average/thesis\.tex"):
        covmerge.merge(base, experts, out=study, overwrite=True)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "covmerge.json").write_text("{}")
    (stranger / "thesis.tex").write_text("precious")
    for command in (covmerge.merge, covmerge.compare):
        with pytest.raises(InputError, match="not known for an output of covmerge"):
            command(base, experts, out=stranger, overwrite=True)
    assert (stranger / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("name", ["x" * 240, "a\0b"])
def test_a_name_that_no_output_can_have(tmp_path, name):
    base, experts = save_plain(tmp_path, layers=1, width=32)
    with pytest.raises(InputError, match="cannot be the name of an output"):
        covmerge.merge(base, experts, out=tmp_path / name)
    with pytest.raises(InputError, match="cannot be the name of an output"):
        covmerge.compare(base, experts, ["average"], tmp_path / name)
    with pytest.raises(InputError, match="cannot be the name of an output"):
        covmerge.extract(base, experts["e0"], tmp_path / name, 2)
    with pytest.raises(InputError):
        covmerge.merge(tmp_path / name, experts, out=tmp_path / "out")


def shard(folder):
    return folder / "output" / "model.safetensors"


def rewritten(folder, change):
    journal = folder / "journal.jsonl"
    journal.write_bytes(change(journal.read_bytes()))


def shortened(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-8])


def linked(folder):
    (folder / "journal.jsonl").unlink()
    (folder / "journal.jsonl").symlink_to("/dev/zero")


UNFINISHED = {
    "a line": (
        lambda folder: rewritten(folder, lambda text: text.replace(b'"tensor"', b'"tensro"', 1)),
        advice("line {} of the journal {} is damaged ({}); start over with --overwrite"),
    ),
    "a link": (linked, advice("cannot read the journal {}: {}; start over with --overwrite")),
    "another format": (
        lambda folder: rewritten(
            folder, lambda text: re.sub(rb'"format": ?\d+', b'"format":1', text, count=1)
        ),
        advice("with the version that began the merge, or start over with --overwrite"),
    ),
    "another size": (
        shortened,
        advice("cannot resume into {}: {}; start over with --overwrite"),
    ),
}


@pytest.mark.parametrize(("damage", "said"), UNFINISHED.values(), ids=UNFINISHED)
def test_unfinished_work_as_it_is_advised(damage, said, tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    interrupt_after(tmp_path, base, experts, items=2, method="ace")
    damage(tmp_path / PARTIAL)
    merge = partial(covmerge.merge, base, experts, "ace", out=tmp_path / "out")
    with pytest.raises(CovmergeError, match=said):
        merge(resume=True)
    merge(overwrite=True)
    covmerge.merge(base, experts, "ace", out=tmp_path / "at-once")
    assert contents(tmp_path / "out") == contents(tmp_path / "at-once")


def test_a_merge_that_something_is_known_of_needs_a_decision(tmp_path):
    base, experts = save_plain(tmp_path, layers=4, width=32)
    merge = partial(covmerge.merge, base, experts, "ace", out=tmp_path / "out")
    for more in ({"resume": True}, {"overwrite": True}):
        interrupt_after(tmp_path, base, experts, items=2, method="ace")
        said = advice("an unfinished merge into {} lies in {}: pass --resume to go on, --overwrite")
        with pytest.raises(InputError, match=said):
            merge()
        said = advice(
            "is of another merge: {}. Take these back to go on, or start over with --overwrite"
        )
        with pytest.raises(InputError, match=said):
            merge(resume=True, eps=0.5)
        merge(**more)
        shutil.rmtree(tmp_path / "out")
