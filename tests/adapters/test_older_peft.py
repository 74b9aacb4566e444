"""Adapters that older PEFTs saved mean what those computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import covmerge
from covmerge.errors import CheckpointError
from tests.adapters.test_types import Small, config_of, merged, trained
from tests.advised import advice

WEIGHT = "first.weight"
_linalg: Any = torch.linalg  # torch carries no types for it


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def older(
    folder: Path,
    fields: Mapping[str, Any],
    without: tuple[str, ...] = (),
    name: Callable[[str], str] = str,
    **tensors: Tensor,
) -> dict[str, Tensor]:
    """Make a saved adapter what an older PEFT wrote; its tensors in float64, by their ends."""
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    own = {**json.loads(config.read_text()), **fields}
    config.write_text(json.dumps({n: value for n, value in own.items() if n not in without}))
    stored = {**load_file(file), **{f"base_model.model.first.{n}": t for n, t in tensors.items()}}
    save_file({name(n): tensor for n, tensor in stored.items()}, file)
    return {n.rpartition("first.")[2]: tensor.double() for n, tensor in stored.items()}


def notes(base: nn.Module, folder: Path) -> str:
    return " ".join(covmerge.merge(base.state_dict(), {"a": folder}, "linear").notes)


def check(base: nn.Module, folder: Path, expected: Tensor) -> None:
    found = merged(base, folder, dtype="float64")[WEIGHT].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_lokr_before_0_14_has_no_alpha(base: nn.Module, tmp_path: Path) -> None:
    trained(base, config_of("LOKR", target_modules=["first"], r=1, alpha=3), tmp_path)
    own = older(tmp_path, {}, without=("rank_dropout_scale", "peft_version"))
    update = torch.kron(own["lokr_w1"], own["lokr_w2_a"] @ own["lokr_w2_b"])
    check(base, tmp_path, base.state_dict()[WEIGHT].double() + update)
    assert "has no rank_dropout_scale: a PEFT saved it that before 0.14" in notes(base, tmp_path)


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_the_series_of_oft_before_0_18(base: nn.Module, tmp_path: Path, terms: int) -> None:
    fields = {"num_cayley_neumann_terms": terms, "oft_block_size": 4}
    trained(base, config_of("OFT", target_modules=["first"], r=0, **fields), tmp_path)
    own = older(tmp_path, {}, without=("peft_version",))
    skew = torch.zeros(3, 4, 4, dtype=torch.float64)
    rows, columns = torch.triu_indices(4, 4, 1)
    skew[:, rows, columns] = own["oft_R.weight"]
    skew -= skew.mT.clone()
    powers = (_linalg.matrix_power(skew, n) for n in range(1, terms))
    turned = torch.block_diag(*(torch.eye(4) + 2 * sum(powers)))
    check(base, tmp_path, base.state_dict()[WEIGHT].double() @ turned.T)


@pytest.mark.parametrize("shared", [False, True])
def test_oft_of_0_14(base: nn.Module, tmp_path: Path, shared: bool) -> None:
    trained(base, config_of("LN_TUNING", target_modules=["norm"]), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    save_file({}, tmp_path / "adapter_model.safetensors")
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randn(1 if shared else 3, 4, 4, generator=draw)
    factor = torch.rand(8, 1, generator=draw)
    fields = {"peft_type": "OFT", "target_modules": ["first"], "block_share": shared, "r": 3}
    older(tmp_path, fields, oft_r=blocks, oft_s=factor)
    skew = (0.5 * (blocks - blocks.mT)).double().expand(3, -1, -1)
    one = torch.eye(4, dtype=torch.float64)
    turned = torch.block_diag(*_linalg.solve(one + skew, one - skew, left=False))
    check(base, tmp_path, base.state_dict()[WEIGHT].double() @ turned.T * factor.double())
    older(tmp_path, {"coft": True})
    said = advice("has OFT as only older PEFTs compute it: merge it into its base with peft {}")
    with pytest.raises(CheckpointError, match=said) as told:
        merged(base, tmp_path)
    assert "peft 0.14.0" in str(told.value)


def test_the_permutation_that_boft_stored_until_0_12(base: nn.Module, tmp_path: Path) -> None:
    trained(base, config_of("BOFT", target_modules=["first"], boft_block_size=4), tmp_path)
    expected = merged(base, tmp_path, dtype="float64")[WEIGHT].double()
    older(tmp_path, {}, boft_P=torch.eye(12)[None])
    check(base, tmp_path, expected)


@pytest.mark.parametrize("init", [True, "bat"])
def test_bone_is_miss(base: nn.Module, tmp_path: Path, init: object) -> None:
    fields = {"target_modules": ["first"], "r": 4, "init_weights": init}
    trained(base, config_of("MISS", **fields), tmp_path)
    expected = merged(base, tmp_path, dtype="float64")[WEIGHT].double()
    named = {"peft_type": "BONE"}
    older(tmp_path, named, ("mini_r",), name=lambda own: own.replace("miss_", "bone_"))
    check(base, tmp_path, expected)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"bias": "lora_only"}, "stores no bias: PEFT 0.8 to 0.20 did not save them"),
        ({"lora_bias": True}, "stores no lora_B.bias: as PEFT does, these were taken as zero"),
    ],
)
def test_biases_that_were_not_saved_are_told(
    base: nn.Module, tmp_path: Path, field: dict[str, object], said: str
) -> None:
    trained(base, config_of("LORA", target_modules=["first"], r=2, **field), tmp_path)
    assert said not in notes(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({name: t for name, t in stored.items() if not name.endswith("bias")}, file)
    assert said in notes(base, tmp_path)
