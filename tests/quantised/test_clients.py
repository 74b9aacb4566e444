"""Quantised outputs in the clients they are for: loaded by the client itself, near their plain twin.

Those of the development environment always; GPTQModel and llama.cpp (PyPI's gptqmodel and xllamacpp)
where they are installed.
"""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import covmerge
from covmerge.files.quantised.view import open_plain
from tests.quantised.ggufs import save_llama
from tests.quantised.models import SIZES, llama
from tests.tolerance import relative_error

IDS = torch.tensor([[1, 5, 7, 9, 11, 2]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A base and experts of two layers, and a tokenizer, without which GPTQModel loads none."""
    folder = tmp_path_factory.mktemp("plain")
    for seed, name in enumerate(("base", "a", "b")):
        model = llama(seed, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
        model.save_pretrained(folder / name)
    words = {f"w{number}": number for number in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w2"
    ).save_pretrained(folder / "base")
    return folder


def merged(plain, form, **how):
    out = plain / form
    experts = {name: plain / name for name in "ab"}
    covmerge.merge(plain / "base", experts, "task_arithmetic", out, quantise=form, **how)
    return out


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def by_reader(folder, plain):
    """What a plain model makes of the weights that covmerge reads."""
    config = transformers.AutoConfig.from_pretrained(plain)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = open_plain(folder)
    model.load_state_dict({name: read.read(name).float() for name in read.headers})
    return logits(model)


def multiplies_exactly(client):
    """Whether its product of int8 is that of integers: oneDNN's saturates on AVX-512 without VNNI."""
    full = torch.full((128, 128), 127, dtype=torch.int8)
    return bool((client.functional.int8_linear_matmul(full, full) == 128 * 127**2).all())


@pytest.mark.filterwarnings("ignore")  # of the client: what a CPU is slower at
@pytest.mark.parametrize(("form", "room"), [("nf4", 0.01), ("int8", 0.03)])
def test_bitsandbytes(plain, form, room):
    """Its own unpacking gives the reader's weights; it computes in bfloat16, and rounds inputs for INT8."""
    client = pytest.importorskip("bitsandbytes")
    out = merged(plain, form)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, device_map="cpu", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    read, packed = open_plain(out), []
    for name, module in model.named_modules():
        if isinstance(module, client.nn.Linear4bit):
            state = module.weight.quant_state
            own = client.functional.dequantize_4bit(module.weight.data, state)
        elif isinstance(module, client.nn.Linear8bitLt):
            scales = module.weight.SCB
            own = client.functional.int8_vectorwise_dequant(module.weight.data, scales)
        else:
            continue
        packed.append(f"{name}.weight")
        assert torch.equal(own.to(torch.bfloat16), read.read(packed[-1])), name
    assert set(packed) == {name for name in read.headers if "_proj" in name}
    if form == "nf4" or multiplies_exactly(client):
        assert relative_error(logits(model), by_reader(out, plain / "base")) < room


@pytest.mark.filterwarnings("ignore")  # of the client and what it imports
@pytest.mark.parametrize("keep", [(), ("*.0.mlp.*",)], ids=["all", "some plain"])
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_gptqmodel(plain, form, keep, monkeypatch):
    """On a CPU, in bfloat16, by its kernel in torch: others are compiled, for minutes."""
    client = pytest.importorskip("gptqmodel")
    monkeypatch.setattr("torch.compile", lambda model, **how: model)
    out = merged(plain, form, keep=keep, overwrite=True)
    kernel = getattr(client.BACKEND, f"{form.upper()}_TORCH")
    loaded = client.GPTQModel.load(str(out), device="cpu", backend=kernel).model
    packed = [name for name, module in loaded.named_modules() if hasattr(module, "qweight")]
    assert len(packed) == (11 if keep else 14)
    assert relative_error(logits(loaded), by_reader(out, plain / "base")) < 0.02


def test_llama_cpp(tmp_path):
    """A merged GGUF file runs, and the next token is as likely as the plain twin has it."""
    client = pytest.importorskip("xllamacpp")
    models = [llama(seed) for seed in range(2)]
    save_llama(models[0], tmp_path / "base.gguf", "F32", tokenizer="llama")
    models[1].save_pretrained(tmp_path / "a")
    out = tmp_path / "out"
    covmerge.merge(tmp_path / "base.gguf", {"a": tmp_path / "a"}, "average", out, quantise="same")
    models[0].save_pretrained(tmp_path / "base")
    params = client.CommonParams()
    params.model.path = str(out / "model.gguf")
    params.n_ctx, params.no_extra_bufts, params.warmup = 32, True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    asked = {"prompt": IDS[0].tolist(), "n_predict": 2, "temperature": 0.0, "n_probs": 8}
    answer = client.Server(params).handle_completions({**asked, "ignore_eos": True})
    first, _ = answer["choices"][0]["logprobs"]["content"]
    expected = by_reader(out, tmp_path / "base")[0, -1].log_softmax(0)
    for told in first["top_logprobs"]:
        assert told["logprob"] == pytest.approx(float(expected[told["id"]]), abs=1e-3)
