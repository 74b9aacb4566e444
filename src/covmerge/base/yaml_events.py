"""YAML as its events, of which no value is made and no alias followed; below all folders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import yaml
from yaml.events import Event

_FAST = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def yaml_events(text: str, *, fast: bool = False) -> Iterator[Event]:
    """Parse a document, event by event.

    Args:
        text: of the document.
        fast: by libyaml, where it is there; its messages say less.

    Raises:
        yaml.YAMLError: it is no YAML. PyYAML lets ValueError and OverflowError pass, too (an escape
            beyond Unicode).
    """
    events = yaml.parse(text, Loader=_FAST if fast else yaml.SafeLoader)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Iterator[Event]", events)
