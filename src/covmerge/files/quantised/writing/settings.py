"""What config.json says of a quantised output, and of the modules in it that are plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

# Where each format's clients look for modules that are not packed.
_PLAIN = {
    "fp8": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "mxfp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
}

_OTHER_NAME = "ignored_layers"  # of modules_to_not_convert, which is not looked for beside it


def with_plain(settings: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a format with modules that are plain beside those that it names.

    Args:
        settings: a `quantization_config`.
        modules: names of modules.

    Example:
        >>> with_plain({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, ["a", "lm_head"])
        {'quant_method': 'fp8', 'modules_to_not_convert': ['lm_head', 'a']}
    """
    if not modules:
        return {**settings}
    method = str(settings.get("quant_method"))
    if method in ("gptq", "awq"):
        # GPTQModel's form, which vLLM reads of GPTQ too: `-:` and a regular expression of names. Of
        # AWQ GPTQModel reads no other; AutoAWQ, transformers and vLLM read the list below.
        given: object = settings.get("dynamic")
        known = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        plain: dict[str, Any] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in modules}
        settings = {**settings, "dynamic": {**plain, **known}}
    if method == "gptq":
        return dict(settings)
    key = _OTHER_NAME if _OTHER_NAME in settings else _PLAIN[method]
    given = settings.get(key)
    named = [str(n) for n in cast("list[object]", given)] if isinstance(given, list) else []
    return {**settings, key: list(dict.fromkeys((*named, *modules)))}
