"""YAML as a stream of events: no values are built and no aliases are followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import yaml
from yaml.events import Event

_FAST = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def yaml_events(text: str, *, fast: bool = False) -> Iterator[Event]:
    """Parse a document into events, one by one; `fast` by libyaml if it is there, whose errors say less.

    Raises:
        yaml.YAMLError: the text is no YAML. PyYAML also raises ValueError and OverflowError (for an
            escape beyond Unicode).
    """
    events = yaml.parse(text, Loader=_FAST if fast else yaml.SafeLoader)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Iterator[Event]", events)
