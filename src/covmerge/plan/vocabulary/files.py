"""The tokenizer files of the output: a model's, perhaps with more tokens or another chat template."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.text import matches_any
from covmerge.files.checkpoints.base import check_unchanged
from covmerge.files.checkpoints.config_counts import with_vocabulary
from covmerge.files.checkpoints.json_file import MAX_JSON_BYTES, parse_object
from covmerge.files.stores.paths import safe_child
from covmerge.files.stores.regular_file import read_regular
from covmerge.plan.recipe.sections import AUTO, BASE
from covmerge.plan.vocabulary.tokens import TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES, Added

# Chat templates: a model's own, that of most models, or a format's. They are never rendered here.

TEMPLATE = "chat_template.jinja"
_IN_CONFIGS = ("tokenizer_config.json", "chat_template.json")
KEY = "chat_template"


def template_of(folder: Path | None) -> str | None:
    """Return the chat template of a model; of several templates, the one named `default`."""
    if folder is None:
        return None
    file = safe_child(folder, TEMPLATE)
    if file.is_file():
        try:
            text = read_regular(file, MAX_JSON_BYTES).decode("utf-8", errors="strict")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 ({error}): fetch it again") from error
        return text or None
    for name in _IN_CONFIGS:
        file = safe_child(folder, name)
        if file.is_file():
            given: Any = parse_object(read_regular(file, MAX_JSON_BYTES), str(file)).get(KEY)
            found = _default(given)
            if found:
                return found
    return None


def _default(given: object) -> str | None:
    """Return a template, or the one named `default` in a list of templates."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        for one in cast("list[object]", given):
            named = cast("dict[str, Any]", one) if isinstance(one, dict) else dict[str, Any]()
            if named.get("name") == "default" and isinstance(named.get("template"), str):
                return str(named["template"])
    return None


def chosen_template(
    wanted: str, folders: Mapping[str | None, Path | None]
) -> tuple[str | None, str]:
    """Return the chat template that a recipe asks for, and its origin.

    It asks by `auto`, `base`, an expert's name, a format's name, or a template.
    """
    if "{" in wanted:
        return wanted, "the recipe"
    if wanted == AUTO:
        found = [template.strip() for template in map(template_of, folders.values()) if template]
        if not found:
            return None, "none of the models has one"
        (template, count), *_ = Counter(found).most_common(1)
        return template, f"{count} of {len(folders)} models"
    key = None if wanted == BASE else wanted
    if key in folders:
        template = template_of(folders[key])
        if template is None:
            raise InputError(
                f"chat_template is that of '{wanted}', which has none: name another model, a format, or "
                "write the template"
            )
        return template, f"'{wanted}'"
    return FORMATS[wanted], f"the format {wanted}"


FORMATS = {
    "alpaca": """\
{% set told = messages | selectattr('role', 'equalto', 'system') | list %}
{{ (told | last).content | trim if told else '' }}

{% for message in messages if message.role in ('user', 'assistant', 'user_context') %}
{{ '### ' + {'user': 'Instruction', 'assistant': 'Response', 'user_context': 'Input'}[message.role] + ':' }}
{{ message.content | trim -}}
{{ '' if loop.last else '\\n\\n' }}
{%- endfor %}
{% if add_generation_prompt and messages[-1].role != 'assistant' %}
### Response:
{% endif %}
""",
    "chatml": """\
{% for message in messages %}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}
""",
    "exaone": """\
{% if messages[0].role != 'system' %}
{{ '[|system|][|endofturn|]\\n' -}}
{% endif %}
{% for message in messages %}
{% set end = '\\n' if message.role == 'user' else '[|endofturn|]\\n' %}
{{ '[|' ~ message.role ~ '|]' ~ message.content ~ end -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '[|assistant|]' -}}
{% endif %}
""",
    "llama3": """\
{{ bos_token -}}
{% for message in messages %}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
{{ message.content | trim ~ '<|eot_id|>' -}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{% endif %}
""",
    "mistral": """\
{% set told = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' %}
{{ bos_token -}}
{% for message in (messages[1:] if told else messages) %}
{% set expected = 'assistant' if loop.index0 % 2 else 'user' %}
{% if message.role != expected %}
{{ raise_exception('after a system message, user and assistant take turns: found ' ~ message.role) }}
{% elif message.role == 'user' %}
{{ ' [INST] ' ~ (told if loop.first else '') ~ message.content ~ ' [/INST]' -}}
{% else %}
{{ ' ' ~ message.content ~ eos_token -}}
{% endif %}
{% endfor %}
""",
}


_ADDED = "added_tokens_decoder"
MORE_TEMPLATES = "additional_chat_templates"
_TEMPLATES = ("chat_template*", MORE_TEMPLATES)
# Files that are kept when tokens are added; the tokens themselves are all in tokenizer.json.
_KEPT = (TOKENIZER_CONFIG, "special_tokens_map.json", *_TEMPLATES)
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of the output's tokenizer, and its settings in the configs."""

    folder: Path  # folder of the model whose tokenizer it is
    hashes: Mapping[str, str]  # hashes of the files there, from when they were read
    rows: int | None = None  # number of rows of the embeddings; None: as many as in the base
    extended: bytes | None = field(default=None, repr=False)  # tokenizer.json, if tokens were added
    # The added tokens, by number.
    added: Mapping[int, Added] = field(default_factory=dict[int, Added])
    # The chat template; None: the tokenizer's.
    template: str | None = field(default=None, repr=False)
    # Config of the model whose tokenizer it is, if that is not the base.
    special: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None  # that model's generation_config.json

    def write(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files with their content, each file once."""
        for path in sorted(self.folder.iterdir()):
            name = path.name
            if not path.is_file() or not is_tokenizer_file(name) or not self._keeps(name):
                continue
            content = read_regular(safe_child(self.folder, name), MAX_JSON_BYTES)
            check_unchanged(path, self.hashes.get(name), hashlib.sha256(content).hexdigest())
            yield name, self._config(content, str(path)) if name == TOKENIZER_CONFIG else content
        if self.extended is not None:
            yield TOKENIZER, self.extended
        if self.template is not None:
            yield TEMPLATE, self.template.encode()

    def replaces(self, name: str) -> bool:
        """Return whether a base's companion file, by its path, is not part of the output."""
        top = name.partition("/")[0]
        others = self.template is not None or self.special is not None
        return is_tokenizer_file(name) or (others and matches_any(top, _TEMPLATES))

    def configured(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json or generation_config.json with the settings of this tokenizer."""
        special = self.special
        if special is not None and name == _GENERATION and self.generation is not None:
            special = self.generation
        return dict(config) if self.rows is None else with_vocabulary(config, self.rows, special)

    def _keeps(self, name: str) -> bool:
        if self.template is not None and matches_any(name, _TEMPLATES):
            return False
        return self.extended is None or matches_any(name, _KEPT)

    def _config(self, content: bytes, where: str) -> bytes:
        """Return tokenizer_config.json; the bytes change only if its tokens or template would be wrong."""
        config = parse_object(content, where)
        changed = dict(config)
        if self.template is not None:
            changed.pop(KEY, None)
        if self.added and isinstance(changed.get(_ADDED), dict):
            changed[_ADDED] = {
                **changed[_ADDED],
                **{str(n): asdict(token) for n, token in self.added.items()},
            }
        if changed == config:
            return content
        return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file with this name, at the top of a folder, belongs to a tokenizer."""
    return matches_any(name, TOKENIZER_FILES)
