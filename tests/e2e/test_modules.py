"""Models of sentence-transformers, whose modules have weights in folders of their own: all are merged."""

import copy
import json
import shutil
import warnings
from importlib import import_module

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BertTokenizerFast

import covmerge
from covmerge.errors import CheckpointError, InputError, TensorError
from covmerge.files.checkpoints.open import open_checkpoint
from tests.adapters.models import llama
from tests.advised import advice
from tests.checkpoints.hub_server import connect, serve
from tests.cli.runs import covmerge as command
from tests.e2e.test_advice import adapter
from tests.folders import contents
from tests.forked import fork_workers
from tests.interrupted import InterruptAfter


class Late:
    """A module that is imported when it is used: every worker imports all tests, and one runs these."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest asks all that a module holds for marks of its own
            raise AttributeError(attribute)
        with warnings.catch_warnings():  # of deprecated names
            warnings.simplefilter("ignore")
            return getattr(import_module(self._name), attribute)


library = Late("sentence_transformers")
models = Late("sentence_transformers.models")
sparse = Late("sentence_transformers.sparse_encoder.models")
tokenizers = Late("sentence_transformers.sentence_transformer.modules.tokenizer")

LETTERS = list("abcdefgh")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS]))
    tokens = BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))
    tokens.save_pretrained(folder)
    config = BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def transformer(bert, **settings):
    return models.Transformer(str(bert), **settings)


def dense(bert):
    parts = [models.Dense(16, 24), models.Dense(24, 8), models.LayerNorm(8)]
    return [transformer(bert), models.Pooling(16), *parts]


def convolutions(bert):
    return [transformer(bert), models.CNN(16, 8, [1, 3]), models.Pooling(16)]


def recurrent(_):
    words = models.WordEmbeddings(tokenizers.WhitespaceTokenizer(LETTERS), torch.randn(8, 16))
    return [words, models.LSTM(16, 8), models.Pooling(16)]


def weighted_layers(bert):
    first = transformer(bert, config_kwargs={"output_hidden_states": True})
    return [first, models.WeightedLayerPooling(16, 2, layer_start=1), models.Pooling(16)]


def routed(bert):
    """A router alone: no weights in the model's own folder."""
    roads = {
        name: [transformer(bert), models.Pooling(16), models.Dense(16, 8)]
        for name in ("query", "document")
    }
    return [models.Router(roads, default_route="query")]


def routed_later(bert):
    roads = {name: [models.Dense(16, 8)] for name in ("query", "document")}
    router = models.Router(roads, default_route="query")
    return [transformer(bert), models.Pooling(16), router]


def in_a_folder(bert):
    """As releases before 2.0 saved every transformer."""
    first = transformer(bert)
    first.save_in_root = False
    return [first, models.Pooling(16), models.Dense(16, 8)]


def save(folder, build, bert, experts=("a", "b"), kind="SentenceTransformer"):
    """A base and experts of it; their states in float64."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = getattr(library, kind)(modules=build(bert), device="cpu")
    base.save(str(folder / "base"), create_model_card=False)
    states = {"base": base.state_dict()}
    for name in experts:
        model = copy.deepcopy(base)
        for parameter in model.parameters():
            parameter.data += 0.003 * torch.randn_like(parameter)
        model.save(str(folder / name), create_model_card=False)
        states[name] = model.state_dict()
    return base, {
        name: {n: t.double() for n, t in state.items() if t.is_floating_point()}
        for name, state in states.items()
    }


def sources(folder, experts=("a", "b")):
    return folder / "base", {name: folder / name for name in experts}


def loaded(folder):
    return library.SentenceTransformer(str(folder), device="cpu")


def assert_state(model, right):
    found = model.state_dict()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=0, atol=1e-6)


KINDS = [dense, convolutions, recurrent, weighted_layers, routed, routed_later, in_a_folder]


@pytest.mark.parametrize("build", KINDS)
def test_all_modules_are_merged_and_the_output_encodes(tmp_path, bert, build):
    base, states = save(tmp_path, build, bert)
    covmerge.merge(*sources(tmp_path), "average", tmp_path / "out")
    mean = {n: (t + states["b"][n]) / 2 for n, t in states["a"].items()}
    merged = loaded(tmp_path / "out")
    assert_state(merged, mean)
    base.load_state_dict({n: t.float() for n, t in mean.items()}, strict=False)
    torch.testing.assert_close(merged.encode("a b c"), base.encode("a b c"))
    assert covmerge.verify(tmp_path / "out").ok
    assert "SentenceTransformer(folder)" in (tmp_path / "out" / "README.md").read_text()


def splade(bert):
    """Words' weights of a table for queries, and a transformer's for documents."""
    document = [transformer(bert, transformer_task="fill-mask"), sparse.SpladePooling()]
    query = sparse.SparseStaticEmbedding(tokenizer=document[0].tokenizer, frozen=False)
    query.weight.data = torch.rand_like(query.weight)
    return [models.Router.for_query_document(query_modules=[query], document_modules=document)]


def autoencoder(bert):
    return [transformer(bert), models.Pooling(16), sparse.SparseAutoEncoder(16, hidden_dim=32, k=4)]


@pytest.mark.parametrize("build", [splade, autoencoder])
def test_all_modules_of_a_sparse_encoder_are_merged(tmp_path, bert, build):
    base, states = save(tmp_path, build, bert, kind="SparseEncoder")
    covmerge.merge(*sources(tmp_path), "average", tmp_path / "out")
    mean = {n: (t + states["b"][n]) / 2 for n, t in states["a"].items()}
    merged = library.SparseEncoder(str(tmp_path / "out"), device="cpu")
    assert_state(merged, mean)
    base.load_state_dict({n: t.float() for n, t in mean.items()}, strict=False)
    for found, right in (
        (merged.encode_query("a b"), base.encode_query("a b")),
        (merged.encode_document("a b c"), base.encode_document("a b c")),
    ):
        torch.testing.assert_close(found.to_dense(), right.to_dense())


def test_they_are_seen_wherever_tensors_are(tmp_path, bert, monkeypatch):
    """In memory, shards, 16 bit, verify --deep, inspect, a dry run, other processes."""
    fork_workers(monkeypatch)
    _, states = save(tmp_path, routed, bert)
    base, experts = sources(tmp_path)
    mean = covmerge.merge(base, experts, "average").tensors["query_2_Dense.linear.weight"]
    key = "0.sub_modules.query.2.linear.weight"
    right = (states["a"][key] + states["b"][key]) / 2
    torch.testing.assert_close(mean.double(), right, rtol=0, atol=1e-6)

    args = ("--base", base, *(w for n, e in experts.items() for w in ("--expert", f"{n}={e}")))
    args = (*args, "--method", "average", "--shard-size", "4KB", "--out-dtype", "bfloat16")
    plan = json.loads(command("merge", *args, "--dry-run", "--json", tmp_path / "out").stdout)
    assert plan["tensors"] == len(open_checkpoint(base).headers)
    command("merge", *args, "--workers", "2", tmp_path / "out")
    shards = {path.parent.name for path in (tmp_path / "out").glob("*/model-*.safetensors")}
    assert shards == {
        "query_0_Transformer",
        "document_0_Transformer",
    }  # the others are one file each
    config = json.loads((tmp_path / "out" / "query_0_Transformer" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    found = load_file(tmp_path / "out" / "query_2_Dense" / "model.safetensors")["linear.weight"]
    assert found.dtype is torch.bfloat16
    # sentence-transformers 6.2 reads modules of a router in float32, whatever their file has.
    merged = loaded(tmp_path / "out").to(torch.bfloat16)
    assert merged.encode("a b", task="query").shape == (8,)
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=0)
    deep = command("verify", tmp_path / "out", "--deep", "--tensors", "100").stdout
    assert "every check passed" in deep
    seen = json.loads(command("inspect", *args[:6], "--json").stdout)
    assert "2_Dense" in json.dumps(seen)


def test_what_is_changed_in_a_module_later_is_found(tmp_path, bert):
    save(tmp_path, dense, bert)
    base, experts = sources(tmp_path)
    covmerge.merge(base, experts, "average", tmp_path / "out")
    file = tmp_path / "out" / "2_Dense" / "model.safetensors"
    kept = file.read_bytes()
    save_file({n: 2 * t for n, t in load_file(file).items()}, file)
    report = covmerge.verify(tmp_path / "out")
    assert "2_Dense/model.safetensors is not as it was written" in report.checks[0].detail
    file.write_bytes(kept)
    shutil.copy(file, file.with_name("pytorch_model.bin"))
    assert "could be loaded in its place" in covmerge.verify(tmp_path / "out").checks[0].detail
    rules = [{"match": "2_Dense.*", "use": "base"}]
    covmerge.merge(base, experts, "average", tmp_path / "kept", rules=rules)
    assert load_file(base / "2_Dense" / "model.safetensors").keys() == load_file(file).keys()
    for name, tensor in load_file(tmp_path / "kept" / "2_Dense" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(base / "2_Dense" / "model.safetensors")[name])


def test_an_interrupted_merge_goes_on(tmp_path, bert):
    save(tmp_path, dense, bert)
    base, experts = sources(tmp_path)
    covmerge.merge(base, experts, "average", tmp_path / "right", threads=1)
    total = len(open_checkpoint(base).headers)
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(
            base,
            experts,
            "average",
            tmp_path / "out",
            threads=1,
            progress=InterruptAfter(total - 3),
        )
    result = covmerge.merge(base, experts, "average", tmp_path / "out", threads=1, resume=True)
    assert 0 < result.run["resumed_items"] < total
    assert contents(tmp_path / "out") == contents(tmp_path / "right")


def test_a_changed_module_is_another_source(tmp_path, bert):
    save(tmp_path, dense, bert)
    base, experts = sources(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(base, experts, "average", tmp_path / "out", progress=InterruptAfter(4))
    save_file(
        load_file(tmp_path / "a" / "2_Dense" / "model.safetensors"),
        tmp_path / "a" / "2_Dense" / "model.safetensors",
    )
    with pytest.raises(InputError, match="expert a changed"):
        covmerge.merge(base, experts, "average", tmp_path / "out", resume=True)


def test_adapters_over_such_a_base(tmp_path, bert, any_peft):
    """One of PEFT alone leaves the modules as they are; one of sentence-transformers has its own."""
    model, states = save(tmp_path, dense, bert, ())
    settings = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    torch.manual_seed(2)
    adapted = adapter(transformer(bert).auto_model, settings)
    adapted.load_state_dict(
        {f"base_model.model.{n[13:]}": t for n, t in model.state_dict().items() if n[:2] == "0."},
        strict=False,
    )
    adapted.save_pretrained(tmp_path / "a")
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    assert_state(
        loaded(tmp_path / "out"), {n: t for n, t in states["base"].items() if n[:2] != "0."}
    )
    found = loaded(tmp_path / "out")[0].auto_model
    folded = adapted.merge_and_unload().state_dict()
    assert_state(found, {n: t.double() for n, t in folded.items() if t.is_floating_point()})

    trained = loaded(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.add_adapter(settings)
    for name, parameter in trained.named_parameters():
        if name[:2] != "0.":
            parameter.data += 1
    trained.save(str(tmp_path / "b"), create_model_card=False)
    assert (tmp_path / "b" / "adapter_model.safetensors").exists()
    covmerge.merge(tmp_path / "base", {"b": tmp_path / "b"}, "average", tmp_path / "both")
    torch.testing.assert_close(
        loaded(tmp_path / "both").encode("a b c"), loaded(tmp_path / "b").encode("a b c")
    )
    with pytest.raises(
        InputError,
        match=advice("or leave the module to the base with {}"),
    ):
        covmerge.merge(
            tmp_path / "base",
            {"b": tmp_path / "b"},
            "average",
            tmp_path / "lora",
            form="adapter",
        )
    rules = [{"match": f"{n}_*", "use": "base"} for n in range(2, 5)]
    covmerge.merge(
        tmp_path / "base",
        {"b": tmp_path / "b"},
        "average",
        tmp_path / "lora",
        rules=rules,
        form="adapter",
    )
    with pytest.raises(
        TensorError,
        match=advice("pass the sentence-transformers folder that it was trained from as the base"),
    ):
        covmerge.merge(bert, {"b": tmp_path / "b"}, "average", tmp_path / "no")


def test_quantised_weights_are_the_transformers_alone(tmp_path, bert):
    _, states = save(tmp_path, dense, bert)
    covmerge.merge(*sources(tmp_path), "average", tmp_path / "out", quantise="fp8-channel")
    found = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    right = (states["a"]["2.linear.weight"] + states["b"]["2.linear.weight"]) / 2
    torch.testing.assert_close(found["linear.weight"].double(), right, rtol=0, atol=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not [n for n in config["quantization_config"]["ignore"] if "Dense" in n]


def test_an_expert_without_the_modules(tmp_path, bert):
    """A plain transformer: refused by name, and what is advised keeps the base's modules."""
    _, states = save(tmp_path, dense, bert, ())
    model = BertModel.from_pretrained(bert)
    model.pooler.dense.weight.data += 1
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(TensorError, match=r"2_Dense\.linear.*tensors={.missing.: .base.}"):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    out = tmp_path / "out"
    covmerge.merge(
        tmp_path / "base", {"a": tmp_path / "a"}, "average", out, tensors={"missing": "base"}
    )
    assert_state(loaded(out), {n: t for n, t in states["base"].items() if n[:2] != "0."})
    state = {n: t.double() for n, t in model.state_dict().items() if t.is_floating_point()}
    assert_state(loaded(out)[0].auto_model, state)


def test_a_repository_of_the_hub_with_pickled_modules(tmp_path, bert, monkeypatch):
    save(tmp_path, dense, bert, ("a",))
    file = tmp_path / "base" / "2_Dense" / "model.safetensors"
    state = load_file(file)
    torch.save(state, file.with_name("pytorch_model.bin"))
    for kind in ("safetensors", "pickled"):
        if kind == "pickled":
            file.unlink()
        with serve(tmp_path / "base") as hub:
            connect(monkeypatch, hub, tmp_path / f"cache-{kind}")
            checkpoint = open_checkpoint("org/name")
            checkpoint.materialize()
            for name, tensor in state.items():
                assert torch.equal(checkpoint.read(f"2_Dense.{name}"), tensor)
            covmerge.merge("org/name", {"a": tmp_path / "a"}, "average", tmp_path / kind)
        assert_state(
            loaded(tmp_path / kind),
            {n: t.double() for n, t in loaded(tmp_path / "a").state_dict().items()},
        )


def plain(folder, modules, *files):
    """A folder of a model as small as can be."""
    folder.mkdir()
    save_file({"w.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({"linear.weight": torch.ones(2, 4)}, folder / file)
    return folder


def test_weights_of_a_module_that_are_not_read(tmp_path):
    """The advice: moved away, merged, and copied to the output."""
    modules = [{"path": ""}, {"path": "2_Own", "type": "own.Own"}]
    for name in ("base", "a"):
        plain(tmp_path / name, modules, "2_Own/weights.npz")
        (tmp_path / name / "2_Own" / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=advice(
            "If the base's is to be kept, move the file out of the folders, merge, and copy it"
        ),
    ):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    for name in ("base", "a"):
        (tmp_path / name / "2_Own" / "weights.npz").rename(tmp_path / f"{name}.npz")
    save_file({"w.weight": torch.ones(4, 4) + 0.01}, tmp_path / "a" / "model.safetensors")
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    shutil.copy(tmp_path / "base.npz", tmp_path / "out" / "2_Own" / "weights.npz")
    assert (tmp_path / "out" / "2_Own" / "config.json").exists()


def test_folders_that_are_no_modules_of_this_model(tmp_path):
    outside = plain(tmp_path / "outside", [])
    for number, path in enumerate(("../outside", str(outside), "a/../../outside")):
        folder = plain(tmp_path / str(number), [{"path": ""}, {"path": path}])
        with pytest.raises(CheckpointError, match=r"modules\.json names the file"):
            open_checkpoint(folder)
    linked = plain(tmp_path / "linked", [{"path": ""}, {"path": "2_Dense"}])
    (linked / "2_Dense").symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(linked)
    many = plain(tmp_path / "many", [{"path": str(n)} for n in range(300)])
    for number in range(300):
        (many / str(number)).mkdir()
        (many / str(number) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="more than 200 modules"):
        open_checkpoint(many)
    ring = plain(tmp_path / "ring", [{"path": "r"}])
    inner = ring
    for _ in range(6):
        inner = inner / "r"
        inner.mkdir()
        router = {"types": {"r": "Router"}, "structure": {}}
        (inner / "router_config.json").write_text(json.dumps(router))
    with pytest.raises(CheckpointError, match="a router in a router"):
        open_checkpoint(ring)
    lost = plain(tmp_path / "lost", [{"path": ""}, {"path": "2_Dense", "type": "models.Dense"}])
    with pytest.raises(CheckpointError, match=r"2_Dense is a Dense, and has neither"):
        open_checkpoint(lost)
    twice = plain(tmp_path / "twice", [{"path": "2_Dense"}], "2_Dense/model.safetensors")
    save_file({"2_Dense.linear.weight": torch.ones(2, 4)}, twice / "model.safetensors")
    said = advice("is to have that name: rename the folder of the module, in modules.json too")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(twice)
    (twice / "2_Dense").rename(twice / "3_Dense")
    (twice / "modules.json").write_text(json.dumps([{"path": "3_Dense"}]))
    assert open_checkpoint(twice).headers.keys() == {
        "2_Dense.linear.weight",
        "3_Dense.linear.weight",
    }


def test_ties_in_a_module_that_an_expert_undoes(tmp_path):
    """The advice: the module is merged by itself, and put into every source of a merge of the rest."""
    torch.manual_seed(0)
    module = "1_Transformer"
    modules = [{"path": ""}, {"path": module, "type": "models.Transformer"}]
    for name, moved in (("base", 0.0), ("a", 0.01)):
        folder = plain(tmp_path / name, modules)
        save_file({"w.weight": torch.ones(4, 4) + moved}, folder / "model.safetensors")
        llama(tie_word_embeddings=not moved).save_pretrained(folder / module)
        state = load_file(tmp_path / "base" / module / "model.safetensors")
        state = {n: t + moved * torch.randn_like(t) for n, t in state.items()}
        if moved:
            state["lm_head.weight"] = state["model.embed_tokens.weight"] + moved
        save_file(state, folder / module / "model.safetensors", {"format": "pt"})
    base, a = tmp_path / "base", tmp_path / "a"
    said = advice(
        "copy the result over the module's folder in copies of the base and of every expert"
    )
    with pytest.raises(InputError, match=said):
        covmerge.merge(base, {"a": a}, "average", tmp_path / "out")
    covmerge.merge(base / module, {"a": a / module}, "average", tmp_path / "merged")
    for name in ("base", "a"):
        shutil.copytree(tmp_path / name, tmp_path / "new" / name)
        shutil.copytree(tmp_path / "merged", tmp_path / "new" / name / module, dirs_exist_ok=True)
    new = tmp_path / "new"
    covmerge.merge(new / "base", {"a": new / "a"}, "average", tmp_path / "out")
    assert covmerge.verify(tmp_path / "out").ok
    for file in ("model.safetensors", f"{module}/model.safetensors"):
        found, right = load_file(tmp_path / "out" / file), load_file(a / file)
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor)
    config = json.loads((tmp_path / "out" / module / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
