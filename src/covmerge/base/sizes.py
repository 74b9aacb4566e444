"""Numbers of bytes as people write them: "5GB", "512MiB", 1.5e9."""

from __future__ import annotations

import re
from fractions import Fraction

from covmerge.base.errors import RecipeError
from covmerge.base.text import shown

_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_UNITS["kB"] = _UNITS["KB"]
# Few digits and a short exponent, so that exact arithmetic on the number stays cheap.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)", re.ASCII)
_LARGEST = 2**63 - 1


def parse_size(size: str | int | float) -> int:
    """Return the number of bytes of a size; a bare number counts bytes.

    Units are decimal (kB, MB, GB, TB: powers of 1000, as disks and the Hugging Face Hub count)
    or binary (KiB, MiB, GiB, TiB: powers of 1024), and case matters: "Gb" would be bits.

    Raises:
        RecipeError: not a size, an unknown unit, zero, or not a whole number of bytes.

    Example:
        >>> parse_size("5GB"), parse_size("512MiB"), parse_size("1.5e9"), parse_size(1024)
        (5000000000, 536870912, 1500000000, 1024)
    """
    # bool is an int in Python, and `shard_size: true` is not one byte.
    match = None if isinstance(size, bool) else _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise RecipeError(f"{shown(size)} is not a size; write bytes, '5GB' or '512MiB'")
    number, unit = match[1], match[2] or "B"
    if unit not in _UNITS:
        raise RecipeError(
            f"{shown(size)} has the unknown unit {unit!r}; known: {', '.join(_UNITS)}"
        )
    count = Fraction(number) * _UNITS[unit]
    if count.denominator != 1 or not 0 < count <= _LARGEST:
        raise RecipeError(f"{shown(size)} is not a whole number of bytes from 1 to {_LARGEST}")
    return int(count)


def format_size(nbytes: int) -> str:
    """Return bytes with three significant digits and a decimal unit.

    Example:
        >>> format_size(5_000_000_000), format_size(999_999), format_size(42)
        ('5.00 GB', '1.00 MB', '42 B')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    units = ("kB", "MB", "GB", "TB")
    value, unit = nbytes / 1000, 0
    # From 999.5 on, rounding would print four digits.
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {units[unit]}"
