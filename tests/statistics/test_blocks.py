"""A model run block by block is the model, to the bit, in the memory of a block."""

import importlib
import json
import threading
from contextlib import closing, nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from covmerge.errors import InputError, ResourceError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Generated, StatisticsFile, collect, needed
from covmerge.plan.statistics.blocks import Blocks, in_lockstep
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import ObservedLayer, RunningModel, load_model
from covmerge.plan.statistics.needed import (
    memory_by_block,
    memory_needed,
    memory_of_batches,
)
from tests.advised import advice
from tests.e2e.models import TEXT, build
from tests.forked import run as forked
from tests.statistics.models import save, write_texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OTHERS = {
    "albert": lambda: transformers.AlbertModel(
        transformers.AlbertConfig(**TEXT, num_hidden_layers=3, intermediate_size=24)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **TEXT,
            num_hidden_layers=3,
            intermediate_size=24,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "pvt": lambda: transformers.PvtModel(
        transformers.PvtConfig(
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 2],
            sequence_reduction_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[4, 2],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
        )
    ),
    "swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4
        )
    ),
}
FAMILIES = ["bert", "clip", "gpt2", "gpt_oss", "llama", "mixtral", "t5", "vit", *OTHERS]


def batches_for(config):
    """Three, of different sizes, some with padding."""
    found = []
    for size, length in ((2, 5), (1, 9), (3, 4)):
        ids = torch.arange(size * length).reshape(size, length) % 50 + 3
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        side = 32 if config.model_type in ("pvt", "swin") else 16
        pixels = torch.linspace(-1, 1, size * 3 * side**2).reshape(size, 3, side, side)
        if config.model_type == "t5":
            batch |= {"decoder_input_ids": ids[:, :3], "decoder_attention_mask": mask[:, :3]}
        if config.model_type == "clip":
            batch |= {"pixel_values": pixels}
        if config.model_type in ("pvt", "vit", "swin"):
            batch = {"pixel_values": pixels}
        found.append(batch)
    return found


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    if request.param in OTHERS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            OTHERS[request.param]().save_pretrained(tmp_path / "model")
    else:
        build(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def by_block(checkpoint, batches):
    blocks = Blocks(checkpoint, "cpu")
    grams = GramCollector(blocks.model.layers())
    taken = [
        statistic.mean.clone()
        for layers in blocks.run(batches, grams.watching, lambda batch: None)
        for statistic in grams.take(layers)
    ]
    return blocks, taken


def in_whole(checkpoint, batches):
    model = load_model(checkpoint, "cpu", head=False)
    grams = GramCollector(model.layers())
    for batch in batches:
        with grams.watching(batch), torch.no_grad():
            model.run(batch)
    return grams


def test_what_layers_see_is_the_same_to_the_bit(saved):
    checkpoint = open_checkpoint(saved)
    batches = batches_for(transformers.AutoConfig.from_pretrained(saved))
    whole = {s.names: s.mean for s in in_whole(checkpoint, batches).statistics()}
    blocks = Blocks(checkpoint, "cpu")
    grams = GramCollector(blocks.model.layers())
    for layers in blocks.run(batches, grams.watching, lambda batch: None):
        for statistic in grams.take(layers):
            # Outside all blocks, layers with one input may have a sum each.
            (mean,) = (m for names, m in whole.items() if set(statistic.names) <= set(names))
            assert torch.equal(statistic.mean, mean)
    seen = {name for names in whole for name in names}
    assert seen == {layer.name for layer in blocks.model.layers() if grams.of(layer.name)}
    assert not running()


@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("t5", 2), ("gpt_oss", 1), ("bert", 2)])
def test_weights_of_blocks_are_there_one_block_at_a_time(name, count, tmp_path):
    build(name).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    read = []
    original = checkpoint.read
    checkpoint.read = lambda name, rows=None: read.append(name) or original(name, rows)
    blocks = Blocks(checkpoint, "cpu")
    assert blocks.count == count
    before = set(read)
    grams = GramCollector(blocks.model.layers())
    held = blocks.model.parameters()
    inside = [name for name in held if name not in before]
    assert inside and all(torch.isnan(held[name]).all() for name in inside)
    going = blocks.run(batches_for(blocks.model.whole.config), grams.watching, lambda batch: None)
    for _ in going:
        filled = [name for name in inside if not torch.isnan(held[name]).any()]
        assert not filled
    assert sorted(read) == sorted(set(read)), "a weight was read twice"
    assert not any(name.startswith("lm_head") for name in read)
    assert all(held[name].untyped_storage().nbytes() == 4 for name in inside)


def collected(checkpoint, out):
    return collect(checkpoint, Generated("random"), out, max_examples=3).path


@pytest.mark.parametrize("stored", ["head", "both", "both, and they differ"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_and_a_head(stored, tied, tmp_path):
    model = build("gpt2")
    model.config.tie_word_embeddings = tied
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["transformer.wte.weight"].clone()
    weights["lm_head.weight"] = 2.0 * head if stored.endswith("differ") else head
    if stored == "head":
        del weights["transformer.wte.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    batches = batches_for(model.config)
    if stored == "head" and not tied:
        with pytest.raises(InputError, match=r"lacks 1 tensors .*wte"):
            Blocks(checkpoint, "cpu")
        return
    whole = [s.mean for s in in_whole(checkpoint, batches).statistics()]
    _, taken = by_block(checkpoint, batches)
    assert len(whole) == len(taken)
    assert all(torch.equal(one, other) for one, other in zip(whole, taken, strict=True))


def test_layers_with_one_input_that_are_taken_at_different_times():
    one, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)
    layers = [ObservedLayer("one.weight", one, 4), ObservedLayer("other.weight", other, 4)]
    grams = GramCollector(layers)
    inputs = torch.arange(8.0).reshape(2, 4)
    with grams.watching({}):
        one(inputs), other(inputs)
    means = [s.mean.clone() for layer in layers for s in grams.take([layer])]
    assert len(means) == 2 and torch.equal(means[0], means[1])
    torch.testing.assert_close(means[0], inputs.mT.double() @ inputs.double() / 2)


def test_a_model_that_changes_its_weights_is_run_as_a_whole(tmp_path, monkeypatch):
    model = save("llama", tmp_path / "model")
    wanted = load_file(collected(open_checkpoint(model), tmp_path / "a.covstats.safetensors"))
    original = transformers.LlamaModel.forward

    def change(self, *args, **options):
        for parameter in self.layers[0].parameters():
            parameter.data.mul_(1.0)  # which a placeholder does not allow
        return original(self, *args, **options)

    monkeypatch.setattr(transformers.LlamaModel, "forward", change)
    found = load_file(collected(open_checkpoint(model), tmp_path / "b.covstats.safetensors"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def running():
    return [t for t in threading.enumerate() if type(t).__name__ == "_Run"]


def test_what_a_block_raises_ends_all(tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    batches = batches_for(transformers.AutoConfig.from_pretrained(tmp_path))
    batches[1] = {"input_ids": batches[1]["input_ids"], "attention_mask": torch.ones(1, 3)}
    with pytest.raises(InputError, match=r"cannot run on these examples .*input_ids \[1, 9\]"):
        by_block(checkpoint, batches)
    assert not running()


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interruption_ends_all(after, tmp_path):
    build("llama").save_pretrained(tmp_path)
    blocks = Blocks(open_checkpoint(tmp_path), "cpu")
    grams = GramCollector(blocks.model.layers())
    forward = type(blocks.model.backbone.layers[0]).forward
    passed = []

    def stop(batch):
        passed.append(batch)
        if len(passed) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(blocks.run(batches_for(blocks.model.whole.config), grams.watching, stop))
    assert not running() and len(passed) == after + 1
    assert all(block.forward.__func__ is forward for block in blocks.model.backbone.layers)


def test_blocks_that_are_run_again_are_refused(tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path)
    original = RunningModel.run

    def twice(self, batch, **options):
        original(self, batch, **options)
        return original(self, batch, **options)

    monkeypatch.setattr(RunningModel, "run", twice)
    batches = batches_for(transformers.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(InputError, match="called again behind other blocks"):
        by_block(open_checkpoint(tmp_path), batches)
    assert not running()


def test_too_many_batches_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    batches = 334 * batches_for(transformers.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(InputError, match=advice("by side: pass a larger --batch-size")):
        by_block(open_checkpoint(tmp_path), batches)
    joined = {name: torch.cat([one[name] for one in batches[::3]]) for name in batches[0]}
    by_block(open_checkpoint(tmp_path), [joined])


def test_runs_that_skip_a_module_or_end_early_wait_for_nobody():
    one, other = torch.nn.Identity(), torch.nn.Identity()
    seen = []
    runs = [
        lambda: other(one(torch.zeros(1))),
        lambda: None,
        lambda: seen.append(other(torch.ones(1))),
        lambda: one(other(one(torch.ones(1)))),
    ]
    passed = in_lockstep(
        runs,
        [one, other],
        visiting=lambda module: nullcontext(),
        going_on=lambda run, module: nullcontext(),
    )
    assert list(passed) == [0, 1, 0] and seen == [torch.ones(1)]


def test_a_model_that_cannot_be_built_is_planned_as_a_whole():
    strange = open_checkpoint({"fc.weight": torch.zeros(4, 8)})
    assert memory_by_block(strange) == memory_needed(strange)


PEAK = """
import json, sys, threading, time
import psutil, torch, transformers
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Generated, collect
from covmerge.plan.statistics.needed import memory_by_block, memory_needed
torch.set_num_threads(2)
checkpoint = open_checkpoint(sys.argv[1])
needed = memory_by_block(checkpoint, 16), memory_needed(checkpoint)
process = psutil.Process()
start, peak, ended = process.memory_info().rss, [0], threading.Event()
def watch():
    while not ended.wait(0.002):
        peak[0] = max(peak[0], process.memory_info().rss)
watcher = threading.Thread(target=watch)
watcher.start()
collect(checkpoint, Generated("random"), sys.argv[2], max_examples=16)
ended.set()
watcher.join()
print(json.dumps([peak[0] - start, *needed]))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_block(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=8,
            max_position_embeddings=32,
        )
        model = transformers.LlamaForCausalLM(config).bfloat16()
    save(model, tmp_path / "model")
    done = forked(PEAK, tmp_path / "model", tmp_path / "x.covstats.safetensors")
    assert done.returncode == 0, done.stderr
    peak, by_block, whole = json.loads(done.stdout)
    assert peak <= by_block < whole / 2


def as_if_only_blocks_fit(monkeypatch, checkpoint):
    """Let a model not fit as a whole, and everything else."""
    whole = memory_needed(checkpoint)
    module = importlib.import_module("covmerge.plan.statistics.collect")
    monkeypatch.setattr(module, "fits", lambda size, limit: size < whole)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_data_goes_through_a_model_that_does_not_fit(family, tmp_path, monkeypatch):
    folder = save(build(family), tmp_path / "m")
    whole, parts = (tmp_path / f"{name}.covstats.safetensors" for name in ("whole", "parts"))
    data = write_texts(tmp_path / "a.txt", count=13)
    collect(folder, data, whole)
    with closing(open_checkpoint(folder)) as checkpoint:
        as_if_only_blocks_fit(monkeypatch, checkpoint)
    done = collect(folder, data, parts, batch_size=5)
    assert any("block by block" in note for note in done.notes)
    assert done.examples == 13
    with closing(StatisticsFile.open(whole)) as one, closing(StatisticsFile.open(parts)) as other:
        assert one.about.rows == other.about.rows
        assert other.about.generated is None
        for name in one.names("gram"):
            torch.testing.assert_close(one.read("gram", name), other.read("gram", name))

    given = [{"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3).long()}]
    assert collect(folder, iter(given), parts, overwrite=True).examples == 1
    with pytest.raises(InputError, match="there is no example"):
        collect(folder, [], parts, overwrite=True)


def test_what_takes_the_whole_model_is_refused_without_room(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "m")
    out = tmp_path / "x.covstats.safetensors"
    with closing(open_checkpoint(folder)) as checkpoint:
        limit = memory_needed(checkpoint) - 1
    monkeypatch.setattr(needed, "fits", lambda size, given: size <= limit)
    monkeypatch.setattr(
        importlib.import_module("covmerge.plan.statistics.collect"), "fits", needed.fits
    )
    data = write_texts(tmp_path / "a.txt")
    for examples, kinds in (
        (data, ["fisher"]),
        (data, ["gram", "fisher"]),
        (Generated(), ["gram"]),
    ):
        with pytest.raises(ResourceError, match="and its sums take up to"):
            collect(folder, examples, out, kinds=kinds)
    assert not out.exists()


def test_a_block_that_does_not_fit_is_named(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "m")
    monkeypatch.setattr(needed, "fits", lambda size, given: False)
    monkeypatch.setattr(
        importlib.import_module("covmerge.plan.statistics.collect"), "fits", needed.fits
    )
    with pytest.raises(ResourceError, match=r"a block of .*/m and its sums take up to .* GiB"):
        collect(folder, write_texts(tmp_path / "a.txt"), tmp_path / "x.covstats.safetensors")


def test_batches_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "m")
    out = tmp_path / "x.covstats.safetensors"
    with closing(open_checkpoint(folder)) as checkpoint:
        as_if_only_blocks_fit(monkeypatch, checkpoint)
        few = [{"input_ids": torch.full((4, 16), 3)}]
        limit = memory_of_batches(checkpoint, few)
        assert limit < memory_by_block(checkpoint)
    monkeypatch.setattr(needed, "fits", lambda size, given: size <= limit)
    monkeypatch.setattr(
        importlib.import_module("covmerge.plan.statistics.collect"), "memory_by_block", lambda *_: 0
    )
    assert collect(folder, few, out).examples == 4
    refused = "a block of .* 5 examples on their way take up to .* fewer max_examples"
    with pytest.raises(ResourceError, match=refused):
        collect(folder, [{"input_ids": torch.full((5, 16), 3)}], out, overwrite=True)
    assert collect(folder, few, out, overwrite=True).examples == 4
