"""What errors about files of weights advise, done literally and followed to the right tensors."""

import json
import re

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BeftConfig,
    LoraConfig,
    PeftModel,
    PsoftConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from transformers import AutoModelForCausalLM

import covmerge
from covmerge.errors import CovmergeError, InputError
from covmerge.files.checkpoints.open import open_checkpoint
from tests.adapters.models import llama, make, save
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.cli.runs import words

NAME = "layers.0.fc.weight"
W = torch.diag(torch.arange(1.0, 9))
BASE = {NAME: W, "norm.weight": torch.ones(8)}
EXPERT = {NAME: W + 0.01, "norm.weight": torch.full((8,), 1.01)}


def check(source, right=None):
    found = covmerge.merge(BASE, {"a": source}, "average").tensors
    for name, tensor in (right or EXPERT).items():
        torch.testing.assert_close(found[name], tensor)


def refused(said, source, base=BASE):
    with pytest.raises(CovmergeError, match=said) as told:
        covmerge.merge(base, {"a": source}, "average")
    return str(told.value)


def raw(file, entries, data=b"\0" * 32):
    """A file of safetensors with any header."""
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


ENTRY = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
AGAIN = {
    "a pointer of Git LFS": (
        lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\n"),
        advice("is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"),
    ),
    "cut short": (
        lambda f: f.write_bytes(b"\x10"),
        advice("the download was probably cut short, fetch the file again"),
    ),
    "a header of any length": (
        lambda f: f.write_bytes(b"\xff" * 40),
        advice("is the most that safetensors allows: is it a safetensors file?"),
    ),
    "no header": (
        lambda f: raw(f, b"[]"),
        advice("has a header that does not begin with '{': is it a safetensors file?"),
    ),
    "metadata": (
        lambda f: raw(f, {"__metadata__": [], "w": ENTRY}),
        advice("that is not a mapping of strings to strings: save the file again"),
    ),
    "an entry": (
        lambda f: raw(f, {"w": ENTRY | {"more": 1}}),
        advice("not just dtype, shape and data_offsets: save the file again"),
    ),
    "offsets": (
        lambda f: raw(f, {"w": ENTRY | {"data_offsets": [32, 0]}}),
        advice("not a begin and an end: save the file again"),
    ),
    "bytes": (
        lambda f: raw(f, {"w": ENTRY | {"shape": [2, 3]}}),
        advice("and its data_offsets {} give {}: save the file again"),
    ),
    "shape": (
        lambda f: raw(f, {"w": ENTRY | {"shape": [-2, 4]}}),
        advice("non-negative 64-bit integers: save the file again"),
    ),
    "overflow": (
        lambda f: raw(f, {"w": ENTRY | {"shape": [2**40, 2**40]}}),
        advice("whose bytes overflow 64 bits: save the file again"),
    ),
    "a hole": (
        lambda f: raw(f, {"w": ENTRY | {"data_offsets": [32, 64]}}, b"\0" * 64),
        advice("was expected, and so {}: save the file again"),
    ),
    "truth values": (
        lambda f: raw(f, {"w": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}, b"\7"),
        advice("is BOOL and holds bytes other than 0 and 1: save the file again"),
    ),
    "a dtype": (
        lambda f: raw(f, {"w": ENTRY | {"dtype": "F128"}}),
        advice("and this version do not read: convert it to one of {}"),
    ),
    "half a byte": (
        lambda f: raw(f, {"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}),
        advice("whose rows are no whole bytes: save the file again"),
    ),
    "packed numbers": (
        lambda f: raw(f, {"w": {"dtype": "F6_E2M3", "shape": [64], "data_offsets": [0, 48]}}),
        advice("with which nothing can be computed: dequantise the checkpoint first"),
    ),
    "a long name": (
        lambda f: raw(f, {"w" * 5000: ENTRY}),
        advice("has a name of {} characters, and {} are read: rename it"),
    ),
    "no JSON": (lambda f: raw(f, b"{,"), advice("is not valid JSON ({}): fetch the file again")),
    "a key twice": (
        lambda f: raw(f, b'{"w": 1, "w": 2}'),
        advice("has the key {} twice, and nothing says which holds: remove one"),
    ),
}


@pytest.mark.parametrize(("damage", "said"), AGAIN.values(), ids=AGAIN)
def test_a_file_of_safetensors_that_is_saved_again(damage, said, tmp_path):
    file = tmp_path / "a.safetensors"
    damage(file)
    with pytest.raises(CovmergeError, match=said):
        open_checkpoint(file).read("w")
    save_file(EXPERT, file)
    check(file)


class Strange:
    """Something of a trainer's own."""


TORCH = {
    "a pointer": (
        lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\n"),
        advice("is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"),
    ),
    "cut short": (
        lambda f: f.write_bytes(f.read_bytes()[:300]),
        advice("fetch the file again, or save the state dict with safetensors.torch.save_file"),
    ),
    "no pickle": (
        lambda f: f.write_bytes(b"\x80\x02nothing"),
        advice("fetch the file again, or save the state dict with safetensors.torch.save_file"),
    ),
    "an object": (
        lambda f: torch.save({"model": Strange()}, f),
        advice(
            "load it where you trust it, and save its state dict with safetensors.torch.save_file"
        ),
    ),
    "a list": (
        lambda f: torch.save([torch.ones(2)], f),
        advice(
            "load it where you trust it, and save its state dict with safetensors.torch.save_file"
        ),
    ),
}


@pytest.mark.parametrize(("damage", "said"), TORCH.values(), ids=TORCH)
def test_a_file_of_torch_that_is_saved_as_safetensors(damage, said, tmp_path):
    file = tmp_path / "a.bin"
    torch.save(EXPERT, file)
    damage(file)
    refused(said, file)
    save_file(EXPERT, tmp_path / "a.safetensors")
    check(tmp_path / "a.safetensors")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_module_is_saved_as_its_state_dict(zipped, tmp_path):
    """Nothing of it is run: covmerge reads tensors alone."""
    module = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 8)})])}
    )
    base = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    torch.save(module, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    said = advice("save it by torch.save(module.state_dict(), FILE) where its code is")
    assert "torch.nn.modules.container.ModuleDict" in refused(said, tmp_path / "a.pt", base)
    module = torch.load(tmp_path / "a.pt", weights_only=False)
    torch.save(module.state_dict(), tmp_path / "a.pt")
    found = covmerge.merge(base, {"a": tmp_path / "a.pt"}, "average").tensors
    torch.testing.assert_close(found, dict(module.state_dict()))


def test_one_of_several_state_dicts_is_saved_by_itself(tmp_path):
    file = tmp_path / "a.bin"
    torch.save({"state_dict": EXPERT, "model": BASE}, file)
    refused(advice("holds several state dicts ({}): save the one to merge by itself"), file)
    torch.save(torch.load(file)["state_dict"], file)
    check(file)


# Which file is meant.


def folder(path, tensors=EXPERT, name="model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / name)
    return path


def test_no_weights_in_a_folder(tmp_path):
    said = advice("or one safetensors file): pass the folder that does, or a file")
    folder(tmp_path / "a" / "weights")
    refused(said, tmp_path / "a")
    check(tmp_path / "a" / "weights")
    check(tmp_path / "a" / "weights" / "model.safetensors")


def test_no_file_of_weights(tmp_path):
    file = folder(tmp_path / "a") / "readme.txt"
    file.write_text("no weights")
    refused(advice("is not a file of weights that covmerge reads ({}): pass {}"), file)
    check(tmp_path / "a" / "model.safetensors")


def test_several_files_without_an_index(tmp_path):
    split = [{NAME: EXPERT[NAME]}, {"norm.weight": EXPERT["norm.weight"]}]
    for number, tensors in enumerate(split):
        folder(tmp_path / "a", tensors, f"part{number}.safetensors")
    said = advice(
        "to say how they belong together: {}. Pass the one file to merge, or add the index"
    )
    refused(said, tmp_path / "a")
    weight_map = {name: f"part{n}.safetensors" for n, part in enumerate(split) for name in part}
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check(tmp_path / "a")
    index.unlink()
    save_file(EXPERT, tmp_path / "a" / "part0.safetensors")
    check(tmp_path / "a" / "part0.safetensors")


INDEX = {
    "a shard is beside it": (
        {"weight_map": {NAME: "model-00001-of-00002.safetensors"}},
        advice(
            "the index is of another version than the shards. Fetch it again, or remove what is not"
        ),
    ),
    "no map": ({"more": 1}, advice("from names of tensors to names of files: fetch it again")),
    "no file": (
        {"weight_map": {str(n): f"model-0000{n}-of-00002.safetensors" for n in (1, 2, 3)}},
        advice(
            "is missing or no regular file: the download was probably cut short, fetch it again"
        ),
    ),
    "another place": (
        {"weight_map": dict.fromkeys(BASE, "model-00001-of-00002.safetensors")},
        advice(
            "says that '{}' is in {}, and it is not: the files are of different versions, fetch them"
        ),
    ),
}


@pytest.mark.parametrize(("content", "said"), [*INDEX.values()], ids=[*INDEX])
def test_an_index_that_is_fetched_again(content, said, tmp_path):
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    folder(tmp_path / "a", {NAME: EXPERT[NAME]}, first)
    folder(tmp_path / "a", {"norm.weight": EXPERT["norm.weight"]}, second)
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    if said == INDEX["another place"][1]:
        (tmp_path / "a" / second).rename(tmp_path / "second")
    refused(said, tmp_path / "a")
    if (tmp_path / "second").exists():
        (tmp_path / "second").rename(tmp_path / "a" / second)
    index.write_text(json.dumps({"weight_map": {NAME: first, "norm.weight": second}}))
    check(tmp_path / "a")


def test_a_shard_that_the_index_does_not_place(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    folder(tmp_path / "a", EXPERT, names[0])
    folder(tmp_path / "a", {"norm.weight": EXPERT["norm.weight"], "x": W}, names[1])
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NAME: names[0], "norm.weight": names[1]}}))
    said = advice("does not place there: the files are of different versions, fetch them again")
    refused(said, tmp_path / "a")
    folder(tmp_path / "a", {"norm.weight": EXPERT["norm.weight"]}, names[1])
    check(tmp_path / "a")


def test_a_lone_shard(tmp_path):
    folder(tmp_path / "a", {NAME: EXPERT[NAME]}, "model-00001-of-00002.safetensors")
    refused(advice("the index or shards are missing, fetch them again"), tmp_path / "a")
    test_an_index_that_is_fetched_again(*INDEX["no map"], tmp_path)


@pytest.mark.parametrize("how", ["typed", "last"])
def test_the_folder_of_a_training_run(how, tmp_path):
    save_file(BASE, tmp_path / "base.safetensors")
    for step in range(1, 7):
        tensors = {name: tensor + 0.01 * step for name, tensor in BASE.items()}
        folder(tmp_path / "run" / f"checkpoint-{step}", tensors)
    told = refused(
        advice(
            "and no model of its own: pass the last, {}/checkpoint-{}, or average the last with"
        ),
        tmp_path / "run",
    )
    if how == "typed":
        typed = re.search(r"`covmerge ([^`]*) OUT`", told)[1]
        command(*typed.split(), tmp_path / "out")
        found, moved = load_file(tmp_path / "out" / "model.safetensors"), 0.04  # the mean of 2 to 6
    else:
        last = re.search(r"pass the last, (\S+),", told)[1]
        found, moved = covmerge.merge(BASE, {"a": last}, "average").tensors, 0.06
    for name, tensor in BASE.items():
        torch.testing.assert_close(found[name], tensor + moved)


def test_a_pipeline_of_diffusers(tmp_path):
    for name, tensors in (("base", BASE), ("a", EXPERT)):
        folder(tmp_path / name / "unet", tensors, "diffusion_pytorch_model.safetensors")
        folder(tmp_path / name / "vae", {"v": W}, "diffusion_pytorch_model.safetensors")
        (tmp_path / name / "model_index.json").write_text("{}")
    with pytest.raises(InputError) as told:
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    said = advice("): merge what was trained, each model by itself, such as {}/{}")
    assert re.search(said, str(told.value))
    part = re.search(r"such as (\S+)$", str(told.value))[1]
    check(part.replace("/base/", "/a/"))


def test_adapters_in_folders_of_their_own(tmp_path):
    made = make(llama, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "a" / "one")
    save(llama(), LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "a" / "two")
    said = advice("in folders of their own: {}. Pass one of them, such as {}")
    told = refused(said, tmp_path / "a", made.base)
    one = re.search(r"such as (\S+)$", told)[1]
    found = covmerge.merge(made.base, {"a": one}, "average").tensors
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(found[name], made.merged[name])


@pytest.mark.parametrize("path", ["nowhere", "x" * 300])
def test_a_path_that_is_corrected(path, tmp_path):
    said = (
        f"{advice('. Correct the path; a model of the Hugging Face Hub is written org/name or')}|"
    )
    refused(said + advice("cannot be opened ({}): correct the path"), tmp_path / path)
    check(folder(tmp_path / "a"))


# Training runs.


@pytest.fixture
def run(tmp_path):
    for step in (10, 20, 30):
        tensors = {name: tensor + 0.01 * step for name, tensor in BASE.items()}
        own = folder(tmp_path / "run" / f"checkpoint-{step}", tensors)
        (own / "trainer_state.json").write_text("{}")
    return tmp_path / "run"


def check_run(run, moved, *flags):
    command("merge", "--run", run, *flags, run.parent / "out")
    found = load_file(run.parent / "out" / "model.safetensors")
    torch.testing.assert_close(found[NAME], W + moved)


def told(said, *args):
    text = words(command("merge", *args, code=2).stderr)
    assert re.search(said, text), text
    return text


def test_more_checkpoints_than_there_are(run):
    said = advice(": ask for {} or fewer (--last), or save more of them (save_total_limit)")
    told(said, "--run", run, "--last", 4, run.parent / "out")
    check_run(run, 0.2, "--last", 3)


def test_a_window_of_tokens(run):
    said = advice("): give --tokens-per-step 4194304, or count checkpoints (--last)")
    told(said, "--run", run, "--tokens", "1M", run.parent / "out")
    check_run(run, 0.3, "--tokens", "10M", "--tokens-per-step", 1000000)
    command("merge", "--run", run, "--last", 1, run.parent / "counted")


def test_more_tokens_than_there_are(run):
    said = advice(": ask for fewer (--tokens), or save more of them (save_total_limit)")
    given = ("--run", run, "--tokens-per-step", 1)
    told(said, *given, "--tokens", 31, run.parent / "out")
    check_run(run, 0.2, "--tokens-per-step", 1, "--tokens", 30)


def test_a_step_says_nothing_without_a_window_of_tokens(run):
    said = advice("too, or leave it out")
    told(said, "--run", run, "--tokens-per-step", 1, run.parent / "out")
    check_run(run, 0.2, "--tokens-per-step", 1, "--tokens", 30)


def test_tokens_that_are_counted_anew(run):
    for step in (10, 20, 30):
        state = {"num_input_tokens_seen": 100 if step == 30 else 10 * step}
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    said = advice("they are of two runs, or count anew; count checkpoints (--last)")
    told(said, "--run", run, "--tokens", 100, run.parent / "out")
    check_run(run, 0.25, "--last", 2)


def test_flags_of_one_merge_beside_several_windows(run):
    said = advice("is asked for twice: name it once")
    told(said, "--run", run, "--last", "2,2", run.parent / "out")
    said = advice("several windows are asked for: leave it out, or merge one after the other")
    told(said, "--run", run, "--last", "1,2", "--resume", run.parent / "out")
    command("merge", "--run", run, "--last", "1,2", run.parent / "out")
    said = advice("give a whole number, or several with commas between them")
    told(said, "--run", run, "--last", "two", run.parent / "two")
    said = advice("'{}' is no number of tokens: write one such as 12000000000, or 12B")
    told(said, "--run", run, "--tokens", "two", run.parent / "two")
    said = advice("'tokens' and 'last' both say how many are taken: leave out one of them")
    told(said, "--run", run, "--tokens", 9, "--last", "1,2", run.parent / "two")
    command("merge", "--run", run, "--last", "1,2", run.parent / "two")


@pytest.mark.parametrize("wrong", ["", "nowhere"])
def test_the_folder_of_a_run(wrong, run):
    said = advice("pass the folder that the trainer wrote its checkpoints to (output_dir)")
    told(said, "--run", run / "checkpoint-10" / wrong, run.parent / "out")
    check_run(run, 0.2)


RUNS = {
    "an output": (
        lambda own: (own / "covmerge.json").write_text("{}"),
        advice("it is the output of a merge and no checkpoint of the run, move it elsewhere"),
    ),
    "killed": (
        lambda own: (own / "trainer_state.json").unlink(),
        advice("remove this folder, or move it elsewhere, and the last ones are those before it"),
    ),
}


@pytest.mark.parametrize(("damage", "said"), RUNS.values(), ids=RUNS)
def test_a_checkpoint_of_a_run_that_is_moved(damage, said, run):
    damage(run / "checkpoint-30")
    told(said, "--run", run, "--last", 2, run.parent / "out")
    (run / "checkpoint-30").rename(run.parent / "elsewhere")
    check_run(run, 0.15, "--last", 2)


def test_a_link_in_a_run_is_removed(run):
    (run / "checkpoint-40").symlink_to("checkpoint-30")
    said = advice("are one folder, which would be counted twice: remove the link")
    told(said, "--run", run, run.parent / "out")
    (run / "checkpoint-40").unlink()
    check_run(run, 0.2)


def test_an_output_among_the_checkpoints(run):
    said = advice("training run in {}: choose another name, or another folder")
    told(said, "--run", run, run / "checkpoint-40")
    command("merge", "--run", run, run / "merged")
    check_run(run, 0.2)


def test_shards_of_deepspeed_are_gathered(run):
    own = run / "checkpoint-30"
    (own / "model.safetensors").rename(run.parent / "gathered")
    (own / "global_step30").mkdir()
    said = advice(
        "no model ({}): gather them first (zero_to_fp32.py of the checkpoint, or accelerate"
    )
    told(said, "--run", run, run.parent / "out")
    torch.save(
        load_file(run.parent / "gathered"), own / "pytorch_model.bin"
    )  # what that script writes
    check_run(run, 0.2)


# torch.distributed.checkpoint.


def test_a_distributed_checkpoint_is_converted(tmp_path):
    torch.save({"model": dict(EXPERT)}, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(whole[:-40])
    said = advice(
        "convert it where it was saved, with torch.distributed.checkpoint.format_utils.dcp_to_t"
    )
    with pytest.raises(CovmergeError) as error:
        covmerge.merge(BASE, {"a": tmp_path / "dcp"}, "average")
    metadata.write_bytes(whole)
    assert re.search(said, str(error.value)) or "fetch" in str(error.value)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "converted.pt")
    torch.save(torch.load(tmp_path / "converted.pt")["model"], tmp_path / "b.pt")
    check(tmp_path / "converted.pt")


# Adapters.

Q = "model.layers.0.self_attn.q_proj"
STEM = f"base_model.model.{Q}"


@pytest.fixture
def lora(tmp_path):
    return make(llama, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "a")


def change(made, factors=None, **fields):
    """Change a saved adapter: its configuration, or its tensors by a function."""
    config = made.folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    if factors is not None:
        file = made.folder / "adapter_model.safetensors"
        tensors = load_file(file)
        factors(tensors)
        save_file(tensors, file)


def check_adapter(source, made):
    found = covmerge.merge(made.base, {"a": source}, "average").tensors
    for name, tensor in made.merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def half(name):
    def changed(tensors):
        tensors[name] = tensors[name][:1].contiguous()

    return changed


FETCHED = {
    "no factors": (
        lambda t: t.clear(),
        advice("holds no tensors: the file is incomplete, fetch it again"),
    ),
    "half of a pair": (
        lambda t: t.pop(f"{STEM}.lora_A.weight"),
        advice("and not the factor that belongs to it: the file is incomplete, fetch it again"),
    ),
    "other sizes": (
        lambda t: t.update({f"{STEM}.lora_B.weight": torch.ones(16, 3)}),
        advice("fetch it again, or save the adapter again from gathered weights"),
    ),
}


@pytest.mark.parametrize(("factors", "said"), FETCHED.values(), ids=FETCHED)
def test_an_adapter_that_is_fetched_again(factors, said, lora, tmp_path):
    (tmp_path / "whole").mkdir()
    for file in lora.folder.iterdir():
        (tmp_path / "whole" / file.name).write_bytes(file.read_bytes())
    change(lora, factors)
    refused(said, lora.folder, lora.base)
    check_adapter(tmp_path / "whole", lora)


def test_an_adapter_without_its_file(lora):
    file = lora.folder / "adapter_model.safetensors"
    kept = file.rename(lora.folder.parent / "kept")
    refused(
        advice("and neither {}: the download was probably cut short, fetch it again"), lora.folder
    )
    kept.rename(file)
    check_adapter(lora.folder, lora)


def test_an_adapter_of_whole_tensors_only(lora):
    def whole(tensors):
        tensors.clear()
        tensors[f"{STEM}.weight"] = torch.ones(16, 16)

    said = advice("it is no LoRA adapter. Pass a full model, or the adapter's own folder")
    kept = load_file(lora.folder / "adapter_model.safetensors")
    change(lora, whole)
    refused(said, lora.folder, lora.base)
    change(lora, lambda tensors: (tensors.clear(), tensors.update(kept)))
    check_adapter(lora.folder, lora)


@pytest.mark.parametrize("how", ["correct", "save"])
def test_a_rank_that_the_configuration_lacks(how, lora):
    change(lora, r=4)
    said = advice("correct r or rank_pattern in adapter_config.json, or save the adapter again")
    refused(said, lora.folder, lora.base)
    change(lora, r=2)
    check_adapter(lora.folder, lora)


def test_ranks_that_peft_loses_in_a_combined_adapter(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in "qv"})
    base = {name: own.clone() for name, own in model.state_dict().items()}
    config = LoraConfig(
        r=2, lora_alpha=6, target_modules=["q", "v"], rank_pattern={"q": 4}, init_lora_weights=False
    )
    made = get_peft_model(model, config, adapter_name="one")
    made.add_weighted_adapter(["one"], [1.0], "sum", combination_type="cat")
    made.save_pretrained(tmp_path, selected_adapters=["sum"])
    said = advice("alpha_pattern with the same ranks too")
    with pytest.raises(InputError, match=said):
        covmerge.merge(base, {"a": tmp_path / "sum"}, "linear")
    path = tmp_path / "sum" / "adapter_config.json"
    ranks = {"q": 4, "v": 2}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "rank_pattern": ranks, "alpha_pattern": ranks})
    )
    found = covmerge.merge(base, {"a": tmp_path / "sum"}, "linear").tensors
    for name in "qv":
        right = base[f"{name}.weight"] + model[name].get_delta_weight("one")
        torch.testing.assert_close(found[f"{name}.weight"], right)


def test_factors_that_the_targets_lack(lora):
    change(lora, target_modules=["k_proj"])
    said = advice(
        "so that PEFT would not use them: the files are of different versions, fetch them again"
    )
    refused(said, lora.folder, lora.base)
    change(lora, target_modules=["q_proj"])
    check_adapter(lora.folder, lora)


BOTH = {
    "a factor": (
        lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(2, 16)}),
        f"{Q}.lora_A.weight",
        advice("has both '{}' and '{}': remove one"),
    ),
    "a tensor": (
        lambda t: t.update(
            {f"{STEM}.base_layer.bias": torch.zeros(16), f"{STEM}.bias": torch.zeros(16)}
        ),
        f"{STEM}.base_layer.bias",
        advice("has both '{}' and '{}' for '{}': remove one"),
    ),
}


@pytest.mark.parametrize(("factors", "one", "said"), BOTH.values(), ids=BOTH)
def test_a_tensor_under_two_names(factors, one, said, lora):
    change(lora, factors)
    refused(said, lora.folder, lora.base)
    change(lora, lambda tensors: [tensors.pop(n) for n in (one, f"{STEM}.bias") if n in tensors])
    check_adapter(lora.folder, lora)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_of_another_kind_is_merged_by_peft(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    save(base, PsoftConfig(r=2, target_modules=["q_proj"], init_weights=False), tmp_path / "a")
    said = advice(
        "merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge"
    )
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(plain, tmp_path / "a").merge_and_unload().save_pretrained(
        tmp_path / "m"
    )
    found = covmerge.merge(tmp_path / "base", {"a": tmp_path / "m"}, "average").tensors
    right = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_base_that_random_numbers_changed(tmp_path):
    """PEFT draws them anew wherever it loads the adapter, so that its merge is another model."""

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_1")
    base = llama()
    right = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "first")
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 if "lora_" in name else 0.0
    model.save_pretrained(tmp_path / "a")
    said = advice(
        "only the trained model in memory has both. Save it again from there: merged "
        "(model.merge_and_unload()), or as plain LoRA (save_pretrained with "
        "path_initial_model_for_weight_conversion)"
    )
    refused(said, tmp_path / "a", right)
    first = str(tmp_path / "first")
    model.save_pretrained(tmp_path / "b", path_initial_model_for_weight_conversion=first)
    merged = model.merge_and_unload().state_dict()
    for source in (tmp_path / "b", merged):
        found = covmerge.merge(right, {"a": source}, "average").tensors
        torch.testing.assert_close(found, merged)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["swapped", "scaled"])
def test_an_adapter_that_its_configuration_does_not_scale(how, tmp_path):
    """peft 0.21.2: hotswap_adapter and set_scale leave peft_config as it was, and saving goes by it."""
    llama().save_pretrained(tmp_path / "base")

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    for name, alpha in (("first", 2), ("second", 16)):
        config = LoraConfig(
            r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False
        )
        get_peft_model(base(), config).save_pretrained(tmp_path / name)
    model = PeftModel.from_pretrained(base(), tmp_path / "first")
    given = (base().state_dict(), {"a": tmp_path / "first"}, "average")
    factor = 1.0
    assert covmerge.merge(given[0], {"a": model}, given[2]).tensors
    if how == "swapped":
        hotswap_adapter(model, str(tmp_path / "second"), "default")
        given = (base().state_dict(), {"a": tmp_path / "second"}, "average")
    else:
        factor = 0.25
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.set_scale("default", factor)
    said = advice(
        "pass the folder of the adapter, with a weight where it is to count for more or less"
    )
    refused(said, model, given[0])
    found = covmerge.merge(*given, weights={"a": factor}).tensors
    right = model.merge_and_unload().state_dict()
    torch.testing.assert_close(found, {name: right[name] for name in found})


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_parameter_of_pissa(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    fields = {"target_modules": [], "target_parameters": ["q_proj.weight"]}
    config = LoraConfig(r=2, init_lora_weights="pissa", **fields)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    made = make(lambda: base, config, tmp_path / "a")
    said = advice(
        "merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge"
    )
    refused(
        r"target_parameters = .*PiSSA\) is read of layers alone: " + said, made.folder, made.base
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(loaded, made.folder).merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    found = covmerge.merge(tmp_path / "base", {"a": tmp_path / "merged"}, "average").tensors
    torch.testing.assert_close(found, {name: made.merged[name] for name in found})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*(has no bias|shape)")
@pytest.mark.parametrize("kind", ["LORA", "BEFT"])
def test_a_bias_of_layers_without(kind, tmp_path):
    torch.manual_seed(0)
    base, targets = llama(), {"target_modules": ["q_proj"]}
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, lora_bias=True, **targets)
    config = lora if kind == "LORA" else BeftConfig(**targets)
    model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "a")
    said = advice(
        "Give the base biases of zeros, if its kind of model may have them: save it again with "
        "transformers after the switch in its config is on (attention_bias of Llama)."
    )
    refused(said, tmp_path / "a", tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_bias": True}))
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "zeros")
    covmerge.merge(tmp_path / "zeros", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, model(tokens).logits)


def test_prompts_are_no_weights(lora):
    change(lora, peft_type="PREFIX_TUNING")
    said = advice(
        "does not come down to weights of its base ({}): it cannot be merged, train LoRA instead"
    )
    refused(said, lora.folder, lora.base)
    change(lora, peft_type="LORA")
    check_adapter(lora.folder, lora)


def test_an_adalora_without_its_scales(tmp_path):
    config = AdaLoraConfig(init_r=2, target_r=2, target_modules=["q_proj"], total_step=10)
    made = make(llama, config, tmp_path / "a")
    file = made.folder / "adapter_model.safetensors"
    kept = load_file(file)
    change(made, lambda t: [t.pop(name) for name in list(t) if name.endswith("lora_E")])
    said = advice("and no lora_E beside it: the file is incomplete, fetch it again")
    refused(said, made.folder, made.base)
    save_file(kept, file)
    check_adapter(made.folder, made)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_in_memory_with_an_adapter(lora):
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    said = advice(
        "as the expert, and the base's folder as the base; or the model with the adapter folded in "
        "(model.merge_and_unload())"
    )
    torch.save(adapted.state_dict(), lora.folder.parent / "wrapped.bin")
    inner = adapted.base_model.model.state_dict()
    for source in (
        adapted.get_base_model(),
        adapted.state_dict(),
        inner,
        lora.folder.parent / "wrapped.bin",
    ):
        refused(said, source, lora.base)
    check_adapter(lora.folder, lora)
    folded = adapted.merge_and_unload().state_dict()
    with pytest.raises(CovmergeError, match="not-a-fine-tune"):  # at random; it is read
        covmerge.merge({name: lora.base[name] for name in folded}, {"a": folded}, "average")


# Places.


def test_a_link_out_of_the_folder(tmp_path):
    folder(tmp_path / "real")
    (tmp_path / "a").mkdir()
    link = tmp_path / "a" / "model.safetensors"
    link.symlink_to(tmp_path / "real" / "model.safetensors")
    said = advice("is not followed: put the file itself there, or pass the folder that holds it")
    refused(said, tmp_path / "a")
    check(tmp_path / "real")
    link.unlink()
    link.write_bytes((tmp_path / "real" / "model.safetensors").read_bytes())
    check(tmp_path / "a")


def test_an_index_with_the_path_of_a_shard(tmp_path):
    folder(tmp_path / "a", EXPERT, "model-00001-of-00001.safetensors")
    index = tmp_path / "a" / "model.safetensors.index.json"
    for name, said in (
        (
            "../a/model-00001-of-00001.safetensors",
            advice("inside the folder are read, correct the name"),
        ),
        ("model-00001-of-00001.safetensors", None),
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(EXPERT, name)}))
        check(tmp_path / "a") if said is None else refused(said, tmp_path / "a")


@pytest.mark.parametrize("how", ["moved", "another"])
def test_an_output_with_files_of_others(how, tmp_path):
    save_file(BASE, tmp_path / "base.safetensors")
    save_file(EXPERT, tmp_path / "a.safetensors")
    given = ["--base", tmp_path / "base.safetensors", "--expert", f"a={tmp_path / 'a.safetensors'}"]
    out = tmp_path / "out"
    command("merge", *given, out)
    thesis = out / "thesis.tex"
    thesis.write_text("mine")
    said = advice("so it is not deleted: {}{}. Move these away, or choose another name")
    told(said, *given, out, "--overwrite")
    if how == "moved":
        thesis.rename(tmp_path / "thesis.tex")
    command("merge", *given, out if how == "moved" else tmp_path / "other", "--overwrite")


@pytest.mark.parametrize("how", ["removed", "another"])
def test_an_output_that_is_no_output(how, tmp_path):
    save_file(BASE, tmp_path / "base.safetensors")
    save_file(EXPERT, tmp_path / "a.safetensors")
    given = ["--base", tmp_path / "base.safetensors", "--expert", f"a={tmp_path / 'a.safetensors'}"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    said = advice("so it is not deleted ({}): remove it yourself, or choose another name")
    told(said, *given, out, "--overwrite")
    if how == "removed":
        (out / "thesis.tex").unlink()
        out.rmdir()
    command("merge", *given, out if how == "removed" else tmp_path / "other", "--overwrite")


def test_a_manifest_that_is_damaged(tmp_path):
    save_file(BASE, tmp_path / "base.safetensors")
    save_file(EXPERT, tmp_path / "a.safetensors")
    given = ["--base", tmp_path / "base.safetensors", "--expert", f"a={tmp_path / 'a.safetensors'}"]
    out = tmp_path / "out"
    command("merge", *given, out)
    manifest = out / "covmerge.json"
    whole = manifest.read_text()
    manifest.write_text("[]")
    said = advice("{}: {}; merge again, or take the file from where the output came from")
    text = words(command("verify", out, code=2).stderr)
    assert re.search(said, text) or "an object is needed" in text
    manifest.write_text(whole)
    command("verify", out)
    command("merge", *given, tmp_path / "again")
    command("verify", tmp_path / "again")


JSONS = {
    "deep": (
        b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
        advice("levels deep, which no such file needs to be: is it the right file?"),
    ),
    "a list": (b"[1]", advice("holds a JSON {}, an object is needed: is it the right file?")),
    "half a pair": (
        rb'{"a": "\ud800"}',
        advice("holds half of a surrogate pair in {}, which is not valid Unicode: correct it"),
    ),
}


@pytest.mark.parametrize(("content", "said"), JSONS.values(), ids=JSONS)
def test_a_config_that_is_another_file(content, said, tmp_path):
    config = folder(tmp_path / "a") / "config.json"
    config.write_bytes(content)
    refused(said, tmp_path / "a")
    config.write_text("{}")
    check(tmp_path / "a")


PATTERNS = {
    "no pattern": (
        {"rank_pattern": {"(": 2}},
        advice("{}: {} in {} is no regular expression ({}): correct it"),
    ),
    "a long one": (
        {"rank_pattern": {"x" * 3000: 2}},
        advice("a pattern of more than {} characters, {}: write several, or a shorter one"),
    ),
    "many": (
        {"rank_pattern": {f"x{n}.*": 2 for n in range(20_000)}},
        advice("{} has {} patterns in {}, and {} are read: write one for many modules"),
    ),
}


@pytest.mark.parametrize(("fields", "said"), PATTERNS.values(), ids=PATTERNS)
def test_patterns_of_an_adapter(fields, said, lora):
    change(lora, **fields)
    refused(said, lora.folder, lora.base)
    change(lora, rank_pattern={"q_proj": 2})
    check_adapter(lora.folder, lora)
