"""Every type of adapter that PEFT writes, against what PEFT's model gives unmerged."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.waveft.constants import WAVELET_REDUCTIONS
from peft.tuners.waveft.wavelet import Wavelet
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.adapters.types import NOT_READ, TYPES, WITHOUT_WEIGHTS
from covmerge.files.adapters.types.page import markdown
from covmerge.run.sources import open_checkpoints
from tests.advised import advice


class Small(nn.Module):
    """One layer of each kind, none square but `same`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)
        self.first = nn.Linear(12, 8)
        self.second = nn.Linear(8, 12, bias=False)
        self.same = nn.Linear(8, 8)
        self.turned = Conv1D(16, 12)
        self.point = nn.Conv2d(4, 8, 1)
        self.window = nn.Conv2d(4, 6, (3, 3))
        self.line = nn.Conv1d(4, 6, 3)
        self.deep = nn.Conv2d(4, 4, 3, groups=4)
        self.pair = nn.Conv2d(4, 8, 3, groups=2)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        seen = self.table(tokens)
        image = torch.sin(torch.arange(4 * 5 * 5, dtype=seen.dtype)).view(1, 4, 5, 5)
        inner = self.first(seen)
        return (
            *(
                seen,
                inner,
                self.second(inner),
                self.same(inner),
                self.turned(seen),
                self.norm(seen),
            ),
            *(self.point(image), self.window(image), self.line(image[..., 0])),
            *(self.deep(image), self.pair(image)),
        )


LINEAR = ["first", "second", "same"]
CONVOLUTIONS = ["point", "window", "line"]
GROUPED = ["deep", "pair"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LORA", {"use_dora": True, "target_modules": [*LINEAR, "table", *CONVOLUTIONS], "r": 2}),
    ("LORA", {"use_dora": True, "target_modules": ["turned"], "r": 2, "fan_in_fan_out": True}),
    (
        "LORA",
        {
            "use_dora": True,
            "target_modules": LINEAR,
            "rank_pattern": {"same": 3},
            "alpha_pattern": {"second": 5},
            "use_rslora": True,
            "modules_to_save": ["norm"],
        },
    ),
    ("LORA", {"target_modules": LINEAR, "trainable_token_indices": {"table": [7, 2]}}),
    ("LOHA", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 2, "alpha": 3}),
    ("LOHA", {"target_modules": CONVOLUTIONS, "r": 2, "use_effective_conv2d": True}),
    (
        "LOHA",
        {"target_modules": LINEAR, "rank_pattern": {"same": 3}, "alpha_pattern": {"first": 5}},
    ),
    ("LOHA", {"target_modules": GROUPED, "r": 2}),
    ("LOKR", {"target_modules": GROUPED, "r": 2}),
    ("LOKR", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 8, "alpha": 3}),
    ("LOKR", {"target_modules": [*LINEAR, *CONVOLUTIONS], "r": 1, "alpha": 3}),
    ("LOKR", {"target_modules": ["point", "window"], "r": 1, "use_effective_conv2d": True}),
    ("LOKR", {"target_modules": LINEAR, "r": 1, "decompose_both": True, "decompose_factor": 2}),
    (
        "IA3",
        {
            "target_modules": [*LINEAR, "point", "window"],
            "feedforward_modules": ["second", "point"],
        },
    ),
    ("IA3", {"target_modules": ["turned"], "feedforward_modules": [], "fan_in_fan_out": True}),
    ("IA3", {"target_modules": GROUPED, "feedforward_modules": ["deep"]}),
    ("LN_TUNING", {"target_modules": ["norm"]}),
    ("OFT", {"target_modules": LINEAR, "oft_block_size": 4, "r": 0}),
    ("OFT", {"target_modules": LINEAR, "r": 2, "oft_block_size": 0, "use_cayley_neumann": False}),
    (
        "OFT",
        {"target_modules": [*LINEAR, "point"], "r": 0, "oft_block_size": 4, "block_share": True},
    ),
    ("OFT", {"target_modules": LINEAR, "r": 2, "oft_block_size": 0, "coft": True, "eps": 0.3}),
    ("OFT", {"target_modules": LINEAR, "r": 2, "oft_block_size": 0, "num_cayley_neumann_terms": 3}),
    ("OFT", {"target_modules": ["table"], "r": 0, "oft_block_size": 4}),
    ("BOFT", {"target_modules": [*LINEAR, "point"], "boft_block_size": 4}),
    ("BOFT", {"target_modules": ["window"], "boft_block_num": 3, "boft_block_size": 0}),
    ("HRA", {"target_modules": [*LINEAR, "point", "window"], "r": 3}),
    ("HRA", {"target_modules": LINEAR, "r": 3, "apply_GS": True}),
    ("VERA", {"target_modules": LINEAR, "r": 3}),
    (
        "VERA",
        {"target_modules": LINEAR, "r": 3, "save_projection": False, "projection_prng_key": 5},
    ),
    ("VERA", {"target_modules": ["turned"], "r": 3, "fan_in_fan_out": True}),
    ("RANDLORA", {"target_modules": LINEAR, "r": 3, "randlora_alpha": 6}),
    (
        "FOURIERFT",
        {"target_modules": LINEAR, "n_frequency": 9, "random_loc_seed": 3, "scaling": 9.0},
    ),
    ("FOURIERFT", {"target_modules": ["turned"], "n_frequency": 9, "fan_in_fan_out": True}),
    ("C3A", {"target_modules": LINEAR, "block_size": 4}),
    ("SHIRA", {"target_modules": LINEAR, "r": 2}),
    ("VBLORA", {"target_modules": LINEAR, "num_vectors": 6, "vector_length": 4, "r": 2, "topk": 3}),
    (
        "VBLORA",
        {
            "target_modules": LINEAR,
            "num_vectors": 6,
            "vector_length": 4,
            "r": 2,
            "save_only_topk_weights": True,
        },
    ),
    ("MISS", {"target_modules": LINEAR, "r": 3}),
    ("MISS", {"target_modules": LINEAR, "r": 4, "init_weights": "bat"}),
    ("MISS", {"target_modules": LINEAR, "r": 4, "mini_r": 2, "init_weights": "mini"}),
    ("DELORA", {"target_modules": LINEAR, "r": 2}),
    ("GRALORA", {"target_modules": LINEAR, "r": 4, "gralora_k": 2}),
    ("GRALORA", {"target_modules": LINEAR, "r": 4, "gralora_k": 4, "hybrid_r": 2}),
    ("HIRA", {"target_modules": [*LINEAR, "table", "point", "window", "line"], "r": 2}),
    ("HIRA", {"target_modules": ["turned"], "r": 2, "fan_in_fan_out": True}),
    ("HIRA", {"target_modules": LINEAR, "r": 2, "rank_pattern": {"first": 3}}),
    ("ROAD", {"target_modules": LINEAR, "group_size": 4}),
    ("ROAD", {"target_modules": LINEAR, "group_size": 4, "variant": "road_2"}),
    ("ROAD", {"target_modules": LINEAR, "group_size": 4, "variant": "road_4"}),
    ("BEFT", {"target_modules": ["first", "same"]}),
    ("DEFT", {"target_modules": LINEAR, "r": 2}),
    ("DEFT", {"target_modules": LINEAR, "r": 3, "decomposition_method": "qr", "alpha": 5}),
    ("DEFT", {"target_modules": ["turned"], "r": 2, "para": True, "fan_in_fan_out": True}),
    ("FROD", {"target_modules": LINEAR, "sparse_rate": 0.1, "progressbar": False}),
    ("GLORA", {"target_modules": LINEAR, "r": 2}),
    ("GLORA", {"target_modules": LINEAR, "config_A_B": "vector", "config_D_E": "vector"}),
    ("GLORA", {"target_modules": LINEAR, "config_A_B": "constant", "config_C": "vector"}),
    ("GLORA", {"target_modules": LINEAR, "config_A_B": "none", "config_D_E": "none"}),
    ("OSF", {"target_modules": LINEAR, "effective_rank": 3}),
    ("OSF", {"target_modules": LINEAR, "rank_pattern": {"first": 0.5}}),
    ("PVERA", {"target_modules": LINEAR, "r": 3}),
    ("PVERA", {"target_modules": LINEAR, "r": 3, "save_projection": False}),
    ("RANDLORA", {"target_modules": LINEAR, "r": 3, "save_projection": False, "randlora_alpha": 6}),
    (
        "RANDLORA",
        {
            "target_modules": LINEAR,
            "r": 3,
            "randlora_alpha": 6,
            "save_projection": False,
            "sparse": True,
        },
    ),
    (
        "RANDLORA",
        {
            "target_modules": LINEAR,
            "r": 3,
            "randlora_alpha": 6,
            "save_projection": False,
            "very_sparse": True,
        },
    ),
    ("SUPERTUNING", {"target_modules": LINEAR, "sparsity": 0.8}),
    ("SUPERTUNING", {"target_modules": LINEAR, "sparsity": 0.8, "r": 2, "lora_alpha": 3}),
    ("TINYLORA", {"target_modules": [*LINEAR, "table"], "r": 2, "u": 6}),
    ("TINYLORA", {"target_modules": LINEAR, "r": 3, "u": 6, "weight_tying": 0.4}),
    ("TINYLORA", {"target_modules": LINEAR, "r": 3, "u": 6, "weight_tying": 1.0}),
    ("UNILORA", {"target_modules": LINEAR, "r": 2, "theta_d_length": 9, "save_indices": True}),
    ("WAVEFT", {"target_modules": LINEAR, "n_frequency": 30, "scaling": 2.0}),
    ("WAVEFT", {"target_modules": LINEAR, "n_frequency": 9, "use_idwt": False}),
    ("WAVEFT", {"target_modules": LINEAR, "n_frequency": 9, "proportional_parameters": True}),
    ("WAVEFT", {"target_modules": ["turned"], "n_frequency": 9, "fan_in_fan_out": True}),
    (
        "WAVEFT",
        {"target_modules": LINEAR, "n_frequency": 30, "scaling": 2.0, "wavelet_family": "db3"},
    ),
    (
        "WAVEFT",
        {"target_modules": LINEAR, "n_frequency": 30, "scaling": 2.0, "wavelet_family": "coif1"},
    ),
    ("LORA", {"target_modules": LINEAR, "r": 2, "velora_config": {"num_groups": 4}}),
    ("LORA", {"target_modules": LINEAR, "r": 2, "monteclora_config": {}}),
    ("LORA", {"target_modules": LINEAR, "r": 2, "init_lora_weights": "pissa"}),
    ("LORA", {"target_modules": LINEAR, "r": 2, "init_lora_weights": "pissa", "use_dora": True}),
    ("LORA", {"target_modules": LINEAR, "r": 2, "lora_alpha": 3, "init_lora_weights": "olora"}),
    ("LORA", {"target_modules": ["table", "first"], "r": 2, "init_lora_weights": "pissa"}),
    ("LORA", {"target_modules": ["table", "same"], "r": 2, "init_lora_weights": "olora"}),
    (
        "LORA",
        {
            **{"target_modules": ["table", "first"], "r": 2, "init_lora_weights": "pissa"},
            "use_dora": True,
        },
    ),
    ("LORA", {"target_modules": LINEAR, "r": 10, "lora_alpha": 5, "init_lora_weights": "pissa"}),
    (
        "LORA",
        {
            **{"target_modules": LINEAR, "r": 10, "lora_alpha": 5, "init_lora_weights": "olora"},
            "use_rslora": True,
        },
    ),
    ("LORA", {"target_modules": LINEAR, "r": 2, "kasa_config": {}}),
    (
        "LORA",
        {
            "target_modules": LINEAR,
            "r": 4,
            "use_bdlora": {
                **{"target_modules_bd_a": ["first"], "target_modules_bd_b": ["second"]},
                **{"nblocks": 2, "match_strict": False},
            },
        },
    ),
    ("TRAINABLE_TOKENS", {"target_modules": ["table"], "token_indices": [7, 2]}),
]
TOKENS = torch.arange(10)


def config_of(kind: str, **fields: object) -> PeftConfig:
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**fields)


def trained(base: nn.Module, config: PeftConfig, folder: Path) -> tuple[Tensor, ...]:
    """Train an adapter (at random), save it, and return what PEFT's model gives unmerged in float64."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), config)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "vblora_logits" not in name:
                change = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.data += change
        model.save_pretrained(str(folder))
        # Saving keeps some numbers in float16, and loading is what a user does.
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).double().eval()
        return again(TOKENS)


def outputs(state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    model = Small().double()
    model.load_state_dict({name: value.double() for name, value in state.items()})
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_updates_are_computed_in_float32_or_better(
    dtype: torch.dtype, base: nn.Module, tmp_path: Path
) -> None:
    trained(base, config_of("LORA", use_dora=True, target_modules=LINEAR, r=2), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    stored = {name: value.to(dtype) for name, value in base.state_dict().items()}
    again = Small().double()
    again.load_state_dict({name: value.double() for name, value in stored.items()})
    model = peft.PeftModel.from_pretrained(again, str(tmp_path)).double()
    with torch.no_grad():
        expected = model(TOKENS)
    options = {"dtype": "float64"} if dtype == torch.float64 else {"out_dtype": "float32"}
    found = covmerge.merge(stored, {"a": tmp_path}, "linear", **options).tensors
    for one, other in zip(outputs(found), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frod_rounds_as_peft_does_over_a_base_in_half_precision(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """PEFT rounds U, which it computes of the base, to the base's dtype."""
    torch.manual_seed(0)
    base = Small().to(dtype)
    config = config_of("FROD", target_modules=LINEAR, sparse_rate=0.1, progressbar=False)
    expected = trained(base, config, tmp_path)
    found = outputs(merged(base, tmp_path, out_dtype="float32"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_a_merge_of_several_types_is_the_mean_of_their_models(
    base: nn.Module, tmp_path: Path
) -> None:
    fields = [("LORA", {"use_dora": True, "r": 2}), ("HRA", {"r": 2}), ("VERA", {"r": 2})]
    experts: dict[str, Path] = {}
    for kind, own in fields:
        experts[kind] = tmp_path / kind
        trained(base, config_of(kind, target_modules=LINEAR, **own), experts[kind])
    alone = [merged(base, folder) for folder in experts.values()]
    together = covmerge.merge(base.state_dict(), experts, "average").tensors
    for name, value in together.items():
        expected = torch.stack([own[name] for own in alone]).mean(dim=0)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_the_run_says_that_the_updates_are_of_this_base(base: nn.Module, tmp_path: Path) -> None:
    trained(base, config_of("LORA", use_dora=True, target_modules=LINEAR, r=2), tmp_path)
    with open_checkpoints(base.state_dict(), {"a": str(tmp_path)}, {}) as opened:
        notes = opened.experts["a"].notes
    assert any("3 of its layers become depends on the base's weights" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "fields", "cuts"),
    [
        ("FOURIERFT", {"n_frequency": 9}, {"fourierft_spectrum": 0}),
        ("MISS", {"r": 3}, {"miss_block": 0}),
        ("MISS", {"r": 4, "init_weights": "bat"}, {"miss_block": 0}),
        ("LOHA", {"r": 2}, {"hada_w1_a": 0}),
        ("HRA", {"r": 4}, {"hra_u": 1}),
        ("C3A", {"block_size": 4}, {"c3a_kernel": 2}),
        ("DELORA", {"r": 2}, {"delora_A": 0, "delora_B": 1}),
        ("HIRA", {"r": 2}, {"hira_A": 0, "hira_B": 1}),
    ],
)
def test_tensors_that_lost_numbers_are_refused(
    kind: str, fields: dict[str, Any], cuts: dict[str, int], base: nn.Module, tmp_path: Path
) -> None:
    """Fewer numbers make another update, of shapes that fit each other and the base."""
    trained(base, config_of(kind, target_modules=LINEAR, **fields), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for end, axis in cuts.items():
        (name,) = (name for name in tensors if name.endswith(f"first.{end}"))
        tensors[name] = tensors[name].narrow(axis, 0, tensors[name].shape[axis] - 1).contiguous()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"first'? .*(is of shape|do not divide)"):
        merged(base, tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_a_lora_of_a_grouped_convolution_is_refused(
    dora: bool, base: nn.Module, tmp_path: Path
) -> None:
    config = config_of("LORA", target_modules=["pair", "first"], r=4, use_dora=dora)
    trained(base, config, tmp_path)
    with pytest.raises(CheckpointError, match=r"pair.* with groups, whose update is no kernel"):
        merged(base, tmp_path)


def test_a_missing_tensor_is_named(base: nn.Module, tmp_path: Path) -> None:
    trained(base, config_of("LOHA", target_modules=LINEAR, r=2), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("hada_w1_b"))
    save_file({own: value for own, value in tensors.items() if own != name}, file)
    said = advice("has {} and no '{}' beside it: the file is incomplete, fetch it again")
    with pytest.raises(CheckpointError, match=said):
        merged(base, tmp_path)
    save_file(tensors, file)
    merged(base, tmp_path)


def test_every_type_of_peft_is_read_or_refused_with_a_reason() -> None:
    lora = {"LORA", "ADALORA"}
    tables = [lora, TYPES.keys(), NOT_READ.keys(), WITHOUT_WEIGHTS.keys()]
    assert {kind.value for kind in PeftType} == set[str]().union(*tables)
    assert sum(map(len, tables)) == len(PeftType)
    assert {kind for kind, _ in CASES} == TYPES.keys() | {"LORA"}


def test_the_page_of_the_docs_is_current() -> None:
    file = Path(__file__).parent.parent.parent / "docs" / "adapter-types.md"
    assert file.read_text() == markdown(), (
        "run: python -m covmerge.files.adapters.types.page > docs/adapter-types.md"
    )


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def merged(base: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    """One adapter, merged over its base by the public function."""
    return dict(covmerge.merge(base.state_dict(), {"a": str(folder)}, "linear", **options).tensors)


def filters_of_peft() -> Any:
    """PEFT has the filters of PyWavelets, which is not among the project's packages."""
    return SimpleNamespace(Wavelet=Wavelet, wavelist=lambda kind: [*WAVELET_REDUCTIONS])


@pytest.mark.filterwarnings("ignore:Specified to not save")
@pytest.mark.parametrize(
    "kind, fields", CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_base_is_what_peft_computes_unmerged(
    kind: str,
    fields: dict[str, Any],
    base: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pywt", filters_of_peft())
    expected = trained(base, config_of(kind, **fields), tmp_path)
    before = outputs(base.state_dict())
    folded = merged(base, tmp_path)
    found = outputs(folded)
    assert any(not torch.allclose(one, other) for one, other in zip(before, expected, strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    check_rows(base, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))
    pair = (peft.get_peft_model_state_dict(held), held.peft_config["default"])
    for source in (held, pair):
        again = covmerge.merge(base.state_dict(), {"a": source}, "linear").tensors
        # VB-LoRA's files have weights, and its modules the logits that they are made of.
        off = {"rtol": 1e-6, "atol": 1e-7} if kind == "VBLORA" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(dict(again), folded, **off)


def check_rows(base: nn.Module, folder: Path) -> None:
    """Check that rows of a tensor are those of the whole."""
    with open_checkpoints(base.state_dict(), {"a": str(folder)}, {}) as opened:
        adapter = opened.experts["a"]
        for name, header in adapter.headers.items():
            whole = adapter.read(name)
            assert whole.shape == header.shape and whole.dtype == header.dtype
            parts = [adapter.read(name, rows) for rows in (range(3), range(3, header.shape[0]))]
            torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)


# Files by themselves, as LyCORIS 4.1.3 writes them; the formulas are those of its modules.
ALPHA = {"fc.alpha": torch.tensor(3.0)}
WEIGHT = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"fc.{name.replace('__', '.')}": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def product(t: Mapping[str, Tensor]) -> Tensor:
    """The update of each kind of file, in float64."""
    own = {name.removeprefix("fc."): value.double() for name, value in t.items()}
    g = own.__getitem__
    if "lora_mid.weight" in own:
        up, down = g("lora_up.weight").flatten(1), g("lora_down.weight").flatten(1)
        return 1.5 * torch.einsum("ijkl,oi,jp->opkl", g("lora_mid.weight"), up, down)
    if "hada_t1" in own:
        one, two = (
            torch.einsum("ijkl,io,jp->opkl", g(f"hada_t{n}"), g(f"hada_w{n}_a"), g(f"hada_w{n}_b"))
            for n in "12"
        )
        return 1.5 * one * two
    if "hada_w1_a" in own:
        one, two = (g(f"hada_w{n}_a") @ g(f"hada_w{n}_b") for n in "12")
        return (1.5 * one * two).view(6, 4, 3, 3)
    if "lokr_w2" in own:  # nothing is a product: alpha says nothing
        return torch.kron(g("lokr_w1")[:, :, None, None], g("lokr_w2"))
    if "lokr_w1" in own:
        second = (g("lokr_w2_a") @ g("lokr_w2_b")).view(3, 2, 3, 3)
        return 1.5 * torch.kron(g("lokr_w1")[:, :, None, None], second)
    if "diff" in own:
        return g("diff")
    return 1.5 * (g("lora_up.weight").flatten(1) @ g("lora_down.weight").flatten(1)).view(
        6, 4, 3, 3
    )


LORA_FILE = {"lora_up__weight": (6, 2, 1, 1), "lora_down__weight": (2, 4, 3, 3)}
FILES: list[dict[str, tuple[int, ...]]] = [
    {
        "lora_up__weight": (6, 2, 1, 1),
        "lora_down__weight": (2, 4, 1, 1),
        "lora_mid__weight": (2, 2, 3, 3),
    },
    {"hada_w1_a": (6, 2), "hada_w1_b": (2, 36), "hada_w2_a": (6, 2), "hada_w2_b": (2, 36)},
    {
        **{"hada_w1_a": (2, 6), "hada_w1_b": (2, 4), "hada_t1": (2, 2, 3, 3)},
        **{"hada_w2_a": (2, 6), "hada_w2_b": (2, 4), "hada_t2": (2, 2, 3, 3)},
    },
    {"lokr_w1": (2, 2), "lokr_w2": (3, 2, 3, 3)},
    {"lokr_w1": (2, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 18)},
    {"diff": (6, 4, 3, 3)},
    {**LORA_FILE, "dora_scale": (6, 1, 1, 1)},
    {**LORA_FILE, "dora_scale": (1, 4, 1, 1)},
    {"lokr_w1": (2, 2), "lokr_w2": (3, 2, 3, 3), "dora_scale": (6, 1, 1, 1)},
    {"lora_up__weight": (6, 2), "lora_down__weight": (2, 4, 3, 3)},  # of DyLoRA
]


@pytest.mark.parametrize("shapes", FILES, ids=lambda own: "-".join(own))
def test_files_of_lycoris(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    tensors = drawn(**shapes)
    if "dora_scale" in shapes:  # training begins at the base's lengths
        tensors["fc.dora_scale"] = 7 + 0.5 * tensors["fc.dora_scale"]
    alpha = {} if "diff" in shapes else ALPHA
    bias = {"fc.diff_b": torch.arange(6.0)}
    save_file({**tensors, **alpha, **bias}, tmp_path / "a.safetensors")
    base = {"fc.weight": WEIGHT.float(), "fc.bias": torch.ones(6)}
    expected = base["fc.weight"].double() + product(tensors)
    if "dora_scale" in shapes:
        rows = shapes["dora_scale"][0] > 1
        lengths = expected.pow(2).sum(dim=(1, 2, 3) if rows else (0, 2, 3), keepdim=True).sqrt()
        expected = expected * (tensors["fc.dora_scale"].double() / lengths)
    found = covmerge.merge(base, {"a": tmp_path / "a.safetensors"}, "linear").tensors
    torch.testing.assert_close(found["fc.weight"].double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found["fc.bias"], torch.arange(6.0) + 1)


@pytest.mark.parametrize("means", [False, True], ids=["", "of 2.2.0"])
@pytest.mark.parametrize("inputs", [4, 1])
def test_magnitudes_of_inputs(*, means: bool, inputs: int, tmp_path: Path) -> None:
    """LyCORIS 2.2.0 had means of columns in place of lengths; a depthwise kernel has one column."""
    tensors = drawn(lora_up__weight=(6, 2, 1), lora_down__weight=(2, inputs, 3)) | ALPHA
    weight = WEIGHT[:, :inputs, 0] + 0.5
    size = partial(torch.mean if means else torch.linalg.vector_norm, dim=(0, 2), keepdim=True)
    tensors["fc.dora_scale"] = (1.1 * size(weight)).float()
    save_file(tensors, tmp_path / "a.safetensors")
    up, down = (tensors[f"fc.lora_{name}.weight"].double().flatten(1) for name in ("up", "down"))
    made = weight + 1.5 * (up @ down).view_as(weight)
    expected = made * (tensors["fc.dora_scale"].double() / size(made))
    found = covmerge.merge(
        {"fc.weight": weight}, {"a": tmp_path / "a.safetensors"}, "linear"
    ).tensors
    torch.testing.assert_close(found["fc.weight"], expected, rtol=2e-6, atol=2e-6)


def cayley(blocks: Tensor, limit: float = 0.0) -> Tensor:
    skew = blocks - blocks.mT
    norm = skew.norm() + 1e-8
    skew = skew * limit / norm if 0 < limit < norm else skew
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return (eye + skew) @ torch.linalg.inv(eye - skew)


def rotated(t: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """The weight of each kind of file that turns or scales it, in float64, as LyCORIS computes it."""
    g = {name.removeprefix("fc."): value.double() for name, value in t.items()}
    if "on_input" in g:
        axis = 1 if g["on_input"] else 0
        shape = [-1 if own == axis else 1 for own in range(4)]
        return weight * (1 + g["weight"].view(shape))
    if "a1.weight" in g:
        a1, a2, b1, b2 = (g[f"{name}.weight"] for name in ("a1", "a2", "b1", "b2"))
        scale = 1.5
        if len(b1) == 2:  # LyCORIS 1 and 2
            a1, a2, b1, b2, scale = a2, a1, b2, b1, 1.5**2
        inner = torch.einsum("oihw,ij->ojhw", weight, (a1.flatten(1) @ a2.flatten(1)))
        return weight + scale * (inner + (b1.flatten(1) @ b2.flatten(1)).view_as(weight))
    rows = weight.flatten(1)
    if "oft_diag" in g:
        return (torch.block_diag(*g["oft_diag"]).T @ rows).view_as(weight)
    blocks = g["oft_blocks"]
    if blocks.dim() == 3:
        turned = torch.block_diag(*cayley(blocks, 6 * float(g["alpha"]))).T @ rows
        return (turned * g["rescale"].view(-1, 1)).view_as(weight)
    for step, own in enumerate(cayley(blocks)):
        stride = 2**step * own.shape[-1] // 2
        order = torch.arange(len(rows)).view(-1, 2, stride).mT.flatten()
        rows = torch.block_diag(*own) @ rows[order]
        rows = rows[order.argsort()]
    return rows.view_as(weight)


ALL_FOUR = {
    name: (4, 2, 1, 1) if name == "a1__weight" else (2, 4, 1, 1)
    for name in ("a1__weight", "a2__weight")
}
ALL_FOUR |= {"b1__weight": (6, 2, 1, 1), "b2__weight": (2, 4, 3, 3)}
OLDER = {f"{n[0]}{3 - int(n[1])}__weight": shape for n, shape in ALL_FOUR.items()}
ROTATED: list[tuple[dict[str, tuple[int, ...]], dict[str, Tensor]]] = [
    ({"oft_blocks": (2, 3, 3), "rescale": (6, 1, 1, 1)}, {"alpha": torch.tensor(0.0)}),
    ({"oft_blocks": (3, 2, 2), "rescale": (6, 1, 1, 1)}, {"alpha": torch.tensor(0.1)}),
    ({"oft_blocks": (2, 6, 2, 2)}, {"alpha": torch.tensor(0.0)}),
    ({"weight": (1, 4, 1, 1)}, {"on_input": torch.tensor(1)}),
    ({"weight": (1, 6, 1, 1)}, {"on_input": torch.tensor(0)}),
    (ALL_FOUR, {"alpha": torch.tensor(3.0)}),
    (OLDER, {"alpha": torch.tensor(3.0)}),
    ({"oft_diag": (2, 3, 3)}, {}),
]


@pytest.mark.parametrize("shapes, more", ROTATED, ids=lambda own: "-".join(own))
def test_files_that_turn_or_scale_the_weight(
    shapes: dict[str, tuple[int, ...]], more: dict[str, Tensor], tmp_path: Path
) -> None:
    """They were refused, or taken for a file of another kind."""
    tensors = drawn(**shapes) | {f"fc.{name}": value for name, value in more.items()}
    save_file({f"lycoris_{n}": value for n, value in tensors.items()}, tmp_path / "a.safetensors")
    weight = torch.cat([WEIGHT, WEIGHT.flip(1)]) if (2, 6, 2, 2) in shapes.values() else WEIGHT
    base = {"fc.weight": weight, "fc.bias": torch.ones(len(weight))}
    found = covmerge.merge(base, {"a": tmp_path / "a.safetensors"}, "linear").tensors
    torch.testing.assert_close(found["fc.weight"], rotated(tensors, weight), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found["fc.bias"], torch.ones(len(weight)))
