"""Inputs that experts make themselves: which of them, and by what their covariances are weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from covmerge import Generated
from covmerge_lab.weighed import Weighed


@dataclass(frozen=True)
class Own:
    """One way of making inputs for experts.

    Attributes:
        how: what is written or drawn.
        weighed: what an input counts by: nothing; the expert's reaction to it by `itself`; that beside
            the reactions of the `others`; how sure its `head` is of the example that it belongs to.
        protocol: what a block sees: what the expert's own blocks before it make of an input, or by
            `regmean++`, where nothing is weighed, what the merged ones do.
    """

    how: Generated
    weighed: Weighed | None = None
    protocol: Literal["inputs", "regmean++"] = "inputs"


# The first of each is what the tables have.
WRITTEN: Mapping[str, Own] = {
    "text from the beginning": Own(Generated("bos")),
    "answers": Own(Generated("chat")),
    "questions and answers": Own(Generated("user")),
    "text from the beginning, beside the others": Own(Generated("bos"), "others"),
    "text that the base began": Own(Generated("base")),
    "text from the beginning, behind merged blocks": Own(Generated("bos"), protocol="regmean++"),
}
DRAWN: Mapping[str, Own] = {
    "drawn, weighed beside the others": Own(Generated(), "others"),
    "drawn, weighed by itself": Own(Generated(), "itself"),
    "drawn, weighed by its head": Own(Generated(), "head"),
    "drawn": Own(Generated()),
    "drawn, behind merged blocks": Own(Generated(), protocol="regmean++"),
}
