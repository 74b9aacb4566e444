"""Inputs that are drawn for models that write nothing: tokens by rank, dead leaves."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Generated, StatisticsFile, collect
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.model import load_model
from tests.e2e.models import build
from tests.statistics.models import classifier, save

OUT = "a.covstats.safetensors"
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
ORDINARY = [f"w{number}" for number in range(50)]
VOCABULARY = [*SPECIAL, "[unused0]", "[unused1]", "a", "##b", *ORDINARY, "<0x0A>"]


@pytest.fixture
def encoder(tmp_path):
    folder = save(classifier(), tmp_path / "m")
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=16,
    ).save_pretrained(folder)
    return folder


def batches(folder, how=Generated(), **reading):  # noqa: B008
    model = load_model(open_checkpoint(folder), "cpu", head=False)
    found, total = model.batches(how, Reading(**reading))
    batches = list(found)
    assert sum(len(next(iter(batch.values()))) for batch in batches) == total
    return batches


def test_tokens_are_drawn_by_rank_between_the_special_ones(encoder):
    found = batches(encoder, max_examples=3000, batch_size=512)
    for batch in found:
        assert (batch["input_ids"][:, 0] == 1).all() and (batch["input_ids"][:, -1] == 2).all()
        assert batch["attention_mask"].all()
    lengths = {}
    for batch in found:
        length = batch["input_ids"].shape[1] - 2
        lengths[length] = lengths.get(length, 0) + len(batch["input_ids"])
    assert lengths == {3: 1000, 9: 1000, 14: 1000}  # 16 of the tokenizer, two of them special
    drawn = torch.cat([batch["input_ids"][:, 1:-1].flatten() for batch in found])
    counts = torch.bincount(drawn, minlength=len(VOCABULARY))
    first = len(VOCABULARY) - 1 - len(ORDINARY)
    # Characters are ranked last: they are an alphabet, in no order of frequency.
    ranked = torch.cat([counts[first:-1], counts[first - 2 : first]])
    assert ranked.sum() == len(drawn)
    odds = 1 / (torch.arange(len(ranked)) + 20)
    expected = odds / odds.sum() * len(drawn)
    assert ((ranked - expected).abs() < 5 * expected.sqrt()).all()


def test_how_many_and_how_long(encoder):
    assert [len(batch["input_ids"]) for batch in batches(encoder, max_examples=2)] == [1, 1]
    assert sum(len(batch["input_ids"]) for batch in batches(encoder)) == 256
    found = batches(encoder, max_examples=3, max_length=4)
    assert [tuple(batch["input_ids"].shape) for batch in found] == 3 * [(1, 4)]
    with pytest.raises(InputError, match="leaves no room in 2 tokens"):
        batches(encoder, max_length=2)


def test_the_seed_decides_and_the_size_of_batches_does_not(encoder, tmp_path):
    for folder in (encoder, save_vit(tmp_path / "vit")):
        drawn = [
            [
                row.tolist()
                for batch in batches(folder, Generated(seed=seed), max_examples=9, batch_size=size)
                for row in next(iter(batch.values()))
            ]
            for seed, size in ((0, 2), (0, 9), (1, 2))
        ]
        assert drawn[0] == drawn[1] != drawn[2]


def save_vit(folder, preprocessing=None, **config):
    model = build("vit")
    model.config.update(config)
    model.save_pretrained(folder)
    if preprocessing is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder


def test_leaves_have_edges_and_a_natural_spectrum(tmp_path):
    (found,) = batches(save_vit(tmp_path / "m"), max_examples=256, batch_size=256)
    pixels = found["pixel_values"]
    assert pixels.shape == (256, 3, 16, 16)
    assert pixels.min() == pytest.approx(-1, abs=0.01) and pixels.max() == pytest.approx(
        1, abs=0.01
    )
    amplitude = torch.fft.rfft2(pixels).abs().square().mean((0, 1)).sqrt()
    # Twice the frequency, half the amplitude, but for what a picture of sixteen pixels cuts off.
    for near, far in ((1, 2), (2, 4), (3, 6)):
        assert 1.4 < amplitude[near, 0] / amplitude[far, 0] < 2.2, (near, far)
        assert 1.4 < amplitude[0, near] / amplitude[0, far] < 2.2, (near, far)
    # Neighbours mostly have one colour: noise of this spectrum hardly ever does.
    assert 0.4 < float((pixels.diff(dim=-1) == 0).all(1).float().mean()) < 0.95


@pytest.mark.parametrize(
    ("preprocessing", "low", "high"),
    [
        ({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.2, 0.1]}, [-1, -2, -3], [1, 3, 7]),
        ({"image_mean": 0.5, "image_std": 0.25, "do_normalize": False}, [0] * 3, [1] * 3),
        ({"do_rescale": False, "image_mean": [55.0], "image_std": [100.0]}, [-0.55] * 3, [2] * 3),
    ],
)
def test_leaves_are_in_the_range_of_the_preprocessing(preprocessing, low, high, tmp_path):
    plain = torch.cat([b["pixel_values"] for b in batches(save_vit(tmp_path / "m"))])
    folder = save_vit(tmp_path / "n", preprocessing)
    found = torch.cat([b["pixel_values"] for b in batches(folder)])
    low, high = (torch.tensor(each)[:, None, None] for each in (low, high))
    torch.testing.assert_close(found, low + (high - low) * (plain + 1) / 2)


@pytest.mark.parametrize(
    ("preprocessing", "says"),
    [
        ({"image_std": [1.0, 0.0, 1.0]}, "preprocessor_config.json: image_std is .* not positive"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is .* 3 numbers are needed"),
        ({"image_mean": "light"}, "image_mean is light, and 3 numbers"),
    ],
)
def test_preprocessing_that_is_malformed(preprocessing, says, tmp_path):
    with pytest.raises(InputError, match=says):
        batches(save_vit(tmp_path / "m", preprocessing))


def test_how_large_pictures_are(tmp_path):
    folder = save_vit(tmp_path / "m")
    model = load_model(open_checkpoint(folder), "cpu", head=False)
    model.whole.config.image_size = 2**14
    with pytest.raises(InputError, match="3 × 16384 × 16384 values, more than any model does"):
        list(model.batches(Generated(), Reading())[0])
    model.whole.config.image_size = (8, 24)
    assert next(model.batches(Generated(), Reading())[0])["pixel_values"].shape[2:] == (8, 24)
    with pytest.raises(InputError, match="leave out tokenizer and max_length"):
        batches(folder, max_length=5)


def test_a_config_that_does_not_say_how_large(tmp_path):
    transformers.ResNetModel(
        transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"
        )
    ).save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="does not say how large its pictures are"):
        batches(tmp_path / "m")


def test_they_are_recorded_and_run(encoder, tmp_path):
    kinds = {
        "tokens": (
            encoder,
            {"kind": "tokens, p = 1 / (rank + 20)", "lengths": "3, 9, 18", "seed": 4},
        ),
        "leaves": (save_vit(tmp_path / "vit"), {"kind": "dead leaves", "seed": 4}),
    }
    for name, (folder, recorded) in kinds.items():
        done = collect(folder, Generated(seed=4), tmp_path / f"{name}{OUT}", max_examples=6)
        assert done.examples == 6
        assert "all experts are shown these inputs" in done.notes[-1]
        assert StatisticsFile.open(done.path).about.generated == recorded


def test_a_head_is_not_needed(tmp_path):
    """A model that writes nothing need not have what it would answer with."""
    folder = save(build("bert"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    assert collect(folder, Generated(), tmp_path / OUT, max_examples=3).examples == 3


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(InputError, match="T5ForConditionalGeneration, for which covmerge makes no"):
        collect(save(build("t5"), tmp_path / "t5"), Generated(), tmp_path / OUT)
    with pytest.raises(InputError, match="no language model that writes: leave out tokens"):
        collect(save_vit(tmp_path / "vit"), Generated(tokens=3), tmp_path / OUT)
    with pytest.raises(InputError, match="pair_column is for a file of examples"):
        collect(tmp_path / "vit", Generated(), tmp_path / OUT, pair_column="b")
    with pytest.raises(InputError, match="what is generated has no labels"):
        collect(tmp_path / "vit", Generated(), tmp_path / OUT, labels="data")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_language_model_is_shown_drawn_tokens_if_asked(tmp_path, encoder):
    build("llama").save_pretrained(tmp_path / "llama")
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "llama")
    out = tmp_path / OUT
    collect(tmp_path / "llama", Generated("random"), out, max_examples=9, max_length=12)
    about = StatisticsFile.open(out).about
    assert about.examples == 9 and about.generated is not None
    assert about.generated["lengths"] == "8, 24, 64"  # as far as there is room
    assert str(about.generated["kind"]).startswith("tokens")
    assert any("C_t of all experts are equal" in note for note in about.notes)
    assert about.rows["gram/model.layers.0.mlp.down_proj.weight"] == 3 * (8 + 2) + 6 * 12


def test_what_is_said_of_shared_inputs_is_of_grams(tmp_path, encoder):
    """C_t are no Fisher information."""
    head = save(classifier(), tmp_path / "head")
    for how in (Generated(), Generated("random")):
        done = collect(head, how, tmp_path / OUT, kinds=["fisher"], max_examples=3, overwrite=True)
        assert not any("shown these inputs" in note for note in done.notes)
    for kinds in (["gram"], ["gram", "fisher"]):
        done = collect(
            head, Generated("random"), tmp_path / OUT, kinds=kinds, max_examples=3, overwrite=True
        )
        (said,) = (note for note in done.notes if "shown these inputs" in note)
        assert "all models" in said


def test_an_encoder_is_shown_the_same_when_asked(encoder):
    drawn, random = (
        batches(encoder, how, max_examples=6) for how in (Generated(), Generated("random"))
    )
    for one, other in zip(drawn, random, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_random_inputs_are_not_written():
    with pytest.raises(InputError, match="random inputs are not written: leave out tokens"):
        Generated("random", tokens=5)
