"""Texts that a language model writes itself, as examples for observing its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from covmerge.base.errors import InputError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.files.checkpoints.json_file import read_object, shorten
from covmerge.files.tensors.skeleton import in_short
from covmerge.plan.statistics.examples import Batch, Reading, longest_text, size_of

if TYPE_CHECKING:
    from covmerge.plan.statistics.model import RunningModel

Start = Literal["bos", "chat", "user", "base"]

_random: Any = torch.random  # its annotations are partial

# These starts continue a chat template.
TEMPLATED: tuple[Start, ...] = ("chat", "user")
# Each token costs a reading of all weights, for any number of texts: 32 texts at once take 0.4
# times as long as 4 times 8 texts.
WRITTEN_AT_ONCE = 32
BEGUN = 16  # number of tokens that a base writes for its experts to continue
_LEAST_TEMPERATURE = 1e-6  # dividing float32 by less may overflow
_ENDS = "eos_token_id"
_SAID = "What the user says stands here."


def writes(model: Any) -> bool:
    """Return whether a model of transformers writes texts; models with an encoder are excluded."""
    return model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)


@dataclass(frozen=True)
class Begun:
    """Beginnings of texts that another model wrote, for this model to continue."""

    by: str  # the name of the other model
    tokens: int  # most tokens that it wrote for each text
    texts: tuple[tuple[int, ...], ...]  # the tokens of each text, without a token that ends it
    rows: int  # number of rows of its embedding
    # The words of these tokens, as far as its tokenizer knows them.
    words: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Written:
    """Texts that a language model writes, from their start to their end.

    Attributes:
        start: what texts continue. `bos`: the token that begins texts; `chat`: its chat template
            with an empty message of the user, so that the model answers; `user`: the template up to
            the user's message, so that the model asks, and answers if its question ends; `base`:
            the base's beginnings.
        tokens: most tokens to add, and for `user` again as many for an answer; a text may end earlier.
        temperature: temperature of the sampling from the whole vocabulary.
        seed: seed of the sampling, which also depends on the size of batches.
        begun: the base's beginnings, if the start is `base`.
        shared: whether all experts get the same texts; they do not, as each writes its own.
    """

    shared: ClassVar[bool] = False

    start: Start = "bos"
    tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    begun: Begun | None = None

    def __post_init__(self) -> None:
        if self.start not in get_args(Start):
            raise InputError(
                f"a model cannot start from '{self.start}'."
                + did_you_mean(self.start, get_args(Start))
            )
        if self.tokens < 1:
            raise InputError(f"tokens is {self.tokens}: pass a positive number")
        if not 0.0 < self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}: pass a positive number")
        if self.temperature < _LEAST_TEMPERATURE:
            raise InputError(
                f"temperature is {self.temperature}: pass {_LEAST_TEMPERATURE} or more, where the "
                "likeliest token follows already"
            )

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        said: dict[str, str | int | float] = {
            "start": self.start,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "batch_size": reading.at_once,
        }
        if self.begun is not None:
            said |= {"begun_by": self.begun.by, "begun_tokens": self.begun.tokens}
        return said

    def notes(self, model: RunningModel, reading: Reading) -> list[str]:
        """Return a note on stated end tokens that the model does not have: texts never end with them."""
        ends, where = _stated_ends(model, model.tokenizer(reading))
        rows = _rows_of(model)
        beyond = [str(end) for end in ends if not 0 <= end < rows]
        if not beyond:
            return []
        return [
            f"{_ENDS} of {where} has {some(beyond)}, and the model {rows} tokens: no text ends there"
        ]

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches of texts."""
        from transformers import GenerationConfig

        whole, source, tokenizer = model.whole, model.checkpoint.source, model.tokenizer(reading)
        starts = self._starts(model, tokenizer, reading.wanted)
        longest = max(map(len, starts))
        limit = reading.max_length or longest_text(tokenizer, whole.config)
        room = self.tokens if limit is None else min(self.tokens, limit - longest)
        if room < 1:
            raise InputError(
                f"{source}: the start '{self.start}' has {longest} tokens and a text at most {limit}: "
                f"pass another {Hint('start')}, or a larger {Hint('max_length')}"
            )
        reply: list[int] | None = None
        if self.start == "user":
            _, said = _turn(tokenizer, source)
            reply = cast("list[int]", tokenizer(said, add_special_tokens=False)["input_ids"])
        _check_tokens(model, tokenizer, reply or ())
        ends = ends_of(model, tokenizer)
        pad = ends[0] if ends else 0  # masked, so any token is fine
        # Other generation settings of a checkpoint (penalties, forbidden words) are not used.
        whole.generation_config = GenerationConfig(
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=ends or None,
            pad_token_id=pad,
            use_cache=True,
        )
        for number, first in enumerate(range(0, reading.wanted, reading.at_once)):
            prompts = starts[first : first + reading.at_once]
            with _random.fork_rng([whole.device] if whole.device.type == "cuda" else []):
                _random.manual_seed(self.seed + number)
                texts = _continued(model, prompts, room)
                if reply is not None:
                    texts = self._answered(model, texts, reply, limit)
            ids, mask = padded(texts, pad)
            yield {"input_ids": ids, "attention_mask": mask}

    def _starts(self, model: RunningModel, tokenizer: Any, wanted: int) -> list[list[int]]:
        """Return the tokens that each text continues."""
        if self.start != "base":
            first = _start(tokenizer, model.checkpoint.source, self.start)
            _check_tokens(model, tokenizer, first)
            return [first] * wanted
        if self.begun is None or len(self.begun.texts) < wanted:
            raise InputError(
                "the start 'base' goes on from what the base began: collect with the base named"
            )
        _check_begun(self.begun, model, tokenizer)
        return [list(text) for text in self.begun.texts[:wanted]]

    def _answered(
        self, model: RunningModel, texts: list[list[int]], reply: list[int], limit: int | None
    ) -> list[list[int]]:
        """Let the model answer the questions that it has ended, if there is room."""
        ends: list[int] = model.whole.generation_config.eos_token_id or []
        questions = [text[:-1] + reply if text[-1] in ends else [] for text in texts]
        longest = max(map(len, questions))
        room = self.tokens if limit is None else min(self.tokens, limit - longest)
        if not longest or room < 1:
            return texts
        answers = iter(_continued(model, [question for question in questions if question], room))
        return [
            next(answers) if question else text
            for text, question in zip(texts, questions, strict=True)
        ]


def begun_by(
    base: RunningModel,
    temperature: float,
    seed: int,
    reading: Reading,
    advance: Callable[[int], None],
) -> Begun:
    """Return the beginnings of texts that a base writes, for its experts to continue.

    So experts are observed on texts like the base's, and not only on texts that they would begin
    themselves.
    """
    source = base.checkpoint.source
    if not writes(base.whole):
        raise InputError(
            f"{source} is no language model that writes: leave out {Hint('start', 'base')}"
        )
    tokenizer = base.tokenizer(reading)
    limit = reading.max_length or longest_text(tokenizer, base.whole.config)
    # At most half of a short text, so that there is room to continue.
    tokens = BEGUN if limit is None else max(1, min(BEGUN, limit // 2 - 1))
    ends = ends_of(base, tokenizer)
    texts: list[tuple[int, ...]] = []
    for batch in Written("bos", tokens, temperature, seed).batches(base, reading):
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            unpadded: Any = ids[mask.bool()]
            text = cast("list[int]", unpadded.tolist())
            # The first token is the start, which may also be a token that ends texts.
            over = len(text) > 1 and text[-1] in ends
            texts.append(tuple(text[:-1] if over else text))
        advance(size_of(batch))
    known, written = _words_of(tokenizer), sorted({token for text in texts for token in text})
    words = tuple((token, known[token]) for token in written if token in known)
    return Begun(source, tokens, tuple(texts), _rows_of(base), words)


def _continued(model: RunningModel, prompts: list[list[int]], room: int) -> list[list[int]]:
    """Return each prompt with the model's continuation, up to the token that ends it."""
    from transformers import LogitsProcessorList

    source, how = model.checkpoint.source, model.whole.generation_config
    ids, mask = (each.to(model.device) for each in padded(prompts, how.pad_token_id, left=True))

    def checked(_: Tensor, logits: Tensor) -> Tensor:
        # The maximum of a row with NaN is NaN. A token that the model never writes may have -inf.
        if not bool(logits.amax(-1).isfinite().all()):
            raise InputError(
                f"{source} writes nothing, because what it gives for a next token is not finite: its "
                "weights hold NaN or are too large, correct them"
            )
        return logits

    checks: Any = LogitsProcessorList([checked])
    try:
        with torch.no_grad():
            written: Any = model.whole.generate(
                ids, attention_mask=mask, max_new_tokens=room, logits_processor=checks
            )
    except (InputError, MemoryError):
        raise
    except Exception as error:  # transformers' code can fail in any way with an untrusted model
        if "memory" in str(error):  # the advice on memory is added elsewhere
            raise
        raise InputError(
            f"{source} cannot write ({in_short(error)}): pass a file of examples"
        ) from error
    added: list[list[int]] = written[:, ids.shape[1] :].tolist()
    ends: list[int] = how.eos_token_id or []
    over = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in added]
    return [p + row[:end] for p, row, end in zip(prompts, added, over, strict=True)]


def padded(texts: list[list[int]], pad: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return token ids and mask `(batch, longest)`."""
    longest = max(map(len, texts))
    missing = [longest - len(text) for text in texts]
    ids = [[pad] * n + t if left else t + [pad] * n for t, n in zip(texts, missing, strict=True)]
    mask = [
        [0] * n + [1] * len(t) if left else [1] * len(t) + [0] * n
        for t, n in zip(texts, missing, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def check_template(tokenizer: Any, source: str, start: Start) -> None:
    """Raise if the start needs a chat template that the tokenizer does not have."""
    problem = _lacks_template(tokenizer)
    if problem:
        other = "a file of examples" if _first(tokenizer) is None else f"{Hint('start', 'bos')}"
        raise InputError(
            f"{source}: its tokenizer has {problem}, which {Hint('start', start)} goes on from: pass "
            f"{other}, or with {Hint('tokenizer')} the folder of one that has it"
        )


def _lacks_template(tokenizer: Any) -> str:
    """Return what is missing in a chat template, or an empty text if there is a template."""
    # The classes of mistral-common have no such attribute, and fill in their templates themselves.
    found: Any = getattr(tokenizer, "chat_template", "")
    if found is None:
        return "no chat template (neither chat_template.jinja nor one in tokenizer_config.json)"
    if isinstance(found, dict) and "default" not in found:
        names = some(sorted(map(str, cast("dict[object, object]", found))), 3, quoted=True)
        return "no chat template called 'default'" + (f" (but {names})" if found else "")
    return ""


def _first(tokenizer: Any) -> int | None:
    """Return the token that begins a text, or else the token between texts, as in GPT-2."""
    first = tokenizer.bos_token_id
    return tokenizer.eos_token_id if first is None else first


def _start(tokenizer: Any, source: str, start: Start) -> list[int]:
    if start == "bos":
        first = _first(tokenizer)
        if first is None:
            other = "" if _lacks_template(tokenizer) else f"{Hint('start', 'chat')}, or "
            raise InputError(
                f"the tokenizer of {source} has no token that a text begins with: pass {other}a file of "
                "examples"
            )
        return [first]
    check_template(tokenizer, source, start)
    if start == "chat":
        text = _filled(tokenizer, source, "", prompting=True)
    else:
        text = _turn(tokenizer, source)[0]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"the chat template of {source} is empty: pass {Hint('start', 'bos')}")
    return ids


def _turn(tokenizer: Any, source: str) -> tuple[str, str]:
    """Return the texts that the chat template puts before and after the user's message."""
    before, turn, _ = _filled(tokenizer, source, _SAID, prompting=False).partition(_SAID)
    if not turn:
        raise InputError(
            f"the chat template of {source} leaves out what the user says: pass {Hint('start', 'bos')}"
        )
    return before, _filled(tokenizer, source, _SAID, prompting=True).partition(_SAID)[2]


def _filled(tokenizer: Any, source: str, said: str, *, prompting: bool) -> str:
    """Return the chat template with a user's message, and with an answer's beginning if `prompting`."""
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=prompting
        )
    except Exception as error:  # an untrusted template can do anything
        raise InputError(
            f"the tokenizer of {source} has no chat template that works ({in_short(error)}): pass "
            f"{Hint('start', 'bos')}"
        ) from error


def ends_of(model: RunningModel, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text, without those that the model does not have."""
    rows = _rows_of(model)
    return [end for end in _stated_ends(model, tokenizer)[0] if 0 <= end < rows]


def _stated_ends(model: RunningModel, tokenizer: Any) -> tuple[list[int], str]:
    """Return the end tokens that the checkpoint states, or else the tokenizer, and where they stand."""
    folder = Path(model.checkpoint.folder or "")
    file = folder / "generation_config.json"
    if file.is_file():
        given: Any = read_object(file).get(_ENDS)
    else:
        file, given = folder / "config.json", model.whole.generation_config.eos_token_id
    where = str(file)
    if given is None:
        where, given = f"the tokenizer of {folder}", tokenizer.eos_token_id
    if given is None:
        return [], where
    said = shorten(given)
    ends = cast("list[object]", given) if isinstance(given, list) else [given]
    if not all(type(end) is int for end in ends):  # a truth value is an int in Python
        raise InputError(
            f"{_ENDS} of {where} is {said}, and a token is a whole number from 0 to {_rows_of(model) - 1}: "
            "correct it, because texts end there"
        )
    return cast("list[int]", ends), where


def _rows_of(model: RunningModel) -> int:
    return model.whole.get_input_embeddings().num_embeddings


def _words_of(tokenizer: Any) -> dict[int, str]:
    found: dict[str, int] = tokenizer.get_vocab()
    return {number: word for word, number in found.items()}


def _check_tokens(model: RunningModel, tokenizer: Any, tokens: Iterable[int]) -> None:
    """Raise if a tokenizer returns tokens that the model has no row for."""
    rows, beyond = _rows_of(model), max(tokens, default=0)
    if beyond >= rows:
        word = _words_of(tokenizer).get(beyond, "")
        raise InputError(
            f"{model.checkpoint.source} has an embedding of {rows} rows, and what its texts go on from has "
            f"the token {beyond} ({shorten(word)}) of its tokenizer: correct the tokenizer, or pass the "
            f"folder of another with {Hint('tokenizer')}"
        )


def _check_begun(begun: Begun, model: RunningModel, tokenizer: Any) -> None:
    """Raise if a base's beginnings have tokens that the model does not have or that differ in it."""
    rows, source = _rows_of(model), model.checkpoint.source
    otherwise = f"leave out {Hint('start', 'base')}, or name the base that the expert was made of"
    beyond = max(max(text) for text in begun.texts)
    if beyond >= rows:
        raise InputError(
            f"{begun.by}, whose embedding has {begun.rows} rows, began a text with the token {beyond}, and "
            f"that of {source} has {rows} rows: {otherwise}"
        )
    known = _words_of(tokenizer)
    for number, word in begun.words:
        if known.get(number) != word:
            other = shorten(known[number]) if number in known else "none"
            raise InputError(
                f"the token {number} is {shorten(word)} to {begun.by}, and {other} to {source}, which "
                f"cannot go on from it: {otherwise}"
            )
