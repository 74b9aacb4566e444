"""A command of covmerge: an option that takes one value is given once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand, TyperOption

from covmerge.base.errors import InputError


class Command(TyperCommand):
    """A command that refuses an option of one value where it stands twice; click would take the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse options that stand twice, then go on.

        Raises:
            InputError: one does.
        """
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option, count in Counter(order).items():
            if (
                isinstance(option, TyperOption)
                and not (option.multiple or option.is_flag)
                and count > 1
            ):
                raise InputError(
                    f"{option.opts[0]} stands {count} times, and takes one value: leave out the others"
                )
        return super().parse_args(ctx, args)
