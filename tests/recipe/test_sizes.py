import pytest
from hypothesis import given
from hypothesis import strategies as st

from covmerge.base.sizes import format_size, parse_size
from covmerge.errors import RecipeError


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1),
        (1.5e9, 1_500_000_000),
        ("17", 17),
        ("1.5e9", 1_500_000_000),
        ("5GB", 5_000_000_000),
        ("5 GB", 5_000_000_000),
        (" 3kB ", 3000),
        ("3KB", 3000),
        ("0.1GB", 100_000_000),
        ("512MiB", 512 * 2**20),
        ("0.5KiB", 512),
        ("2TiB", 2**41),
    ],
)
def test_sizes_are_exact(size: str | int | float, nbytes: int) -> None:
    assert parse_size(size) == nbytes


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("5Gb", "unknown unit 'Gb'"),
        ("5G", "unknown unit 'G'"),
        ("5GIB", "unknown unit 'GIB'; known: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, kB"),
        ("", "not a size"),
        ("GB", "not a size"),
        ("-1GB", "not a size"),
        ("1_000", "not a size"),
        ("٣GB", "not a size"),
        ("1e999999999", "not a size"),
        ("9" * 10_000, "not a size"),
        (True, "true is not a size"),
        (None, "null is not a size"),
        (float("nan"), "NaN is not a size"),
        (float("inf"), "Infinity is not a size"),
        (0, "not a whole number of bytes from 1"),
        ("1.5B", "not a whole number of bytes"),
        ("1e90", "not a whole number of bytes"),
    ],
)
def test_what_is_not_a_size_is_named(size: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        parse_size(size)


@given(st.integers(1, 2**63 - 1))
def test_a_formatted_size_is_within_rounding_of_the_size(nbytes: int) -> None:
    assert parse_size(nbytes) == parse_size(str(nbytes)) == nbytes
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.0051)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (4 * 10**15, "4000 TB"),
    ],
)
def test_format_has_three_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
