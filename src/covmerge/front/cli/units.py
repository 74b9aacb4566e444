"""Seconds and operations as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Return a duration with the precision that matters at its size.

    Example:
        >>> [format_seconds(s) for s in (0.042, 7.25, 59.99, 3599.8, 7500)]
        ['0.04 s', '7.2 s', '1 min 00 s', '1 h 00 min', '2 h 05 min']
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_flops(flops: float) -> str:
    """Return floating-point operations with a decimal unit.

    Example:
        >>> format_flops(1500), format_flops(3.14159e12)
        ('1.5 kFLOP', '3.14 TFLOP')
    """
    prefixes = iter(("k", "M", "G", "T", "P"))
    prefix = ""
    while flops >= 999.5 and (larger := next(prefixes, "")):
        flops, prefix = flops / 1000, larger
    return f"{flops:.3g} {prefix}FLOP"
