"""The tokenizer files of the output: those of a model, or with more tokens or another template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covmerge.base.errors import CheckpointError
from covmerge.base.text import matches_any
from covmerge.files.checkpoints.config_counts import with_vocabulary
from covmerge.files.checkpoints.json_file import MAX_JSON_BYTES, parse_object
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import read_regular
from covmerge.plan.vocabulary.chat import KEY, TEMPLATE
from covmerge.plan.vocabulary.tokens import TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES, Added

_ADDED = "added_tokens_decoder"
MORE_TEMPLATES = "additional_chat_templates"
_TEMPLATES = ("chat_template*", MORE_TEMPLATES)
# What a tokenizer with more tokens still has of the other; its tokens are all in tokenizer.json.
_KEPT = (TOKENIZER_CONFIG, "special_tokens_map.json", *_TEMPLATES)
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """What is written of a tokenizer, and what the configs say of it.

    Attributes:
        folder: of the model whose tokenizer it is.
        hashes: of the files there, as they were when they were read.
        rows: of the embeddings; None: as many as the base has.
        extended: tokenizer.json, if tokens were added.
        added: these, by number.
        template: the chat template; None: that of the tokenizer.
        special: the config of the model whose tokenizer it is, if that is not the base.
        generation: its generation_config.json.
    """

    folder: Path
    hashes: Mapping[str, str]
    rows: int | None = None
    extended: bytes | None = field(default=None, repr=False)
    added: Mapping[int, Added] = field(default_factory=dict[int, Added])
    template: str | None = field(default=None, repr=False)
    special: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None

    def write(self) -> Iterator[tuple[str, bytes]]:
        """The files with their content, none twice.

        Raises:
            CheckpointError: a file is not what it was.
        """
        for path in sorted(self.folder.iterdir()):
            name = path.name
            if not path.is_file() or not is_tokenizer_file(name) or not self._keeps(name):
                continue
            content = read_regular(safe_child(self.folder, name), MAX_JSON_BYTES)
            if self.hashes.get(name) != hashlib.sha256(content).hexdigest():
                raise CheckpointError(
                    f"{path} changed while it was in use: let whatever writes it finish, and start again"
                )
            yield name, self._config(content, str(path)) if name == TOKENIZER_CONFIG else content
        if self.extended is not None:
            yield TOKENIZER, self.extended
        if self.template is not None:
            yield TEMPLATE, self.template.encode()

    def replaces(self, name: str) -> bool:
        """Whether a companion file of the base, by its path in the folder, is not the output's."""
        top = name.partition("/")[0]
        others = self.template is not None or self.special is not None
        return is_tokenizer_file(name) or (others and matches_any(top, _TEMPLATES))

    def configured(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json or generation_config.json as this tokenizer wants it."""
        special = self.special
        if special is not None and name == _GENERATION and self.generation is not None:
            special = self.generation
        return dict(config) if self.rows is None else with_vocabulary(config, self.rows, special)

    def _keeps(self, name: str) -> bool:
        if self.template is not None and matches_any(name, _TEMPLATES):
            return False
        return self.extended is None or matches_any(name, _KEPT)

    def _config(self, content: bytes, where: str) -> bytes:
        """tokenizer_config.json: the same bytes, unless tokens or template would be wrong."""
        config = parse_object(content, where)
        changed = dict(config)
        if self.template is not None:
            changed.pop(KEY, None)
        if self.added and isinstance(changed.get(_ADDED), dict):
            changed[_ADDED] = {
                **changed[_ADDED],
                **{str(n): asdict(token) for n, token in self.added.items()},
            }
        return content if changed == config else _json(changed)


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name, at the top of a folder, belongs to a tokenizer."""
    return matches_any(name, TOKENIZER_FILES)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
