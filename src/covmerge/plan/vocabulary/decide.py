"""Decisions on the recipe's tokens: the rows of each source, and the output's tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import read_object
from covmerge.files.stores.paths import safe_child
from covmerge.files.tensors.names import find_name
from covmerge.plan.recipe.sections import BASE, UNION, TokenizerRules
from covmerge.plan.vocabulary.files import (
    MORE_TEMPLATES,
    TokenizerFiles,
    chosen_template,
    template_of,
)
from covmerge.plan.vocabulary.rows import (
    Retokenized,
    Source,
    Tables,
    Vocabulary,
    called,
    tables_of,
    vocabulary,
)
from covmerge.plan.vocabulary.tokens import (
    Added,
    Tokenizer,
    cut_apart,
    hashes_of,
    read_files,
    read_tokenizer,
)

# Tokenizers' marks for a space; an added token with such a mark is searched in the text itself.
_SPACES = ("\u0120", "\u2581")


@dataclass(frozen=True)
class Text:
    """The output's tokens and chat template."""

    vocabulary: Vocabulary | None = None
    tables: Mapping[str | None, Tables] = field(default_factory=dict[str | None, Tables])
    files: TokenizerFiles | None = None
    notes: tuple[str, ...] = ()

    def identity(self) -> dict[str, Json]:
        """Return facts that identify it, for the digest of a plan."""
        found: dict[str, Json] = {}
        if self.vocabulary is not None:
            found["vocabulary"] = self.vocabulary.as_json()
        if self.files is not None:
            found["tokenizer"] = {**self.files.hashes, "template": self.files.template}
        return found

    def check_masks(self, names: Collection[str]) -> None:
        """Raise if masks belong to tensors whose rows differ from the base's stored rows."""
        base = self.tables.get(None)
        if self.vocabulary is None or base is None or base.names.isdisjoint(names):
            return
        if not self.vocabulary.keeps_base(base.rows):
            raise InputError(
                "masks are laid over the base's own rows (covmerge.load_expert), and `tokenizer` gives it "
                "others: leave embeddings and head to the base by "
                f"{Hint('tensors', {'embeddings': 'base', 'output_head': 'base'})}, or take another method"
            )

    def views_of(self, sources: Mapping[str | None, Checkpoint]) -> dict[str | None, Checkpoint]:
        """Return views of the sources with this vocabulary; the base's key is None."""
        if self.vocabulary is None:
            return dict(sources)
        base = self.tables.get(None)
        for key, source in sources.items():
            if key not in self.tables and base is not None:
                _check_adapter(str(key), source, base, self.vocabulary)
        models = {key: sources[key] for key in self.tables}
        views = {key: Retokenized(key, models, self.tables, self.vocabulary) for key in models}
        return {key: views.get(key, source) for key, source in sources.items()}


def decide(
    rules: TokenizerRules | None, template: str | None, sources: Mapping[str | None, Checkpoint]
) -> Text:
    """Read the tokenizers of the sources, the base (None) and the experts, and decide on the output's."""
    if rules is None and template is None:
        return Text()
    # Adapters use the base's embeddings.
    models = [key for key, source in sources.items() if not source.is_adapter]
    folders = {key: sources[key].companions() for key in models}
    text = Text()
    if rules is not None:
        text = _vocabulary(rules, {key: sources[key] for key in models}, folders)
    if template is None:
        return text
    files = text.files or _as_it_is(models[0], folders[models[0]])
    chosen, whose = chosen_template(template, _of_all(sources, folders))
    note = f"chat template of {whose}" if chosen is not None else f"no chat template: {whose}"
    return replace(text, files=replace(files, template=chosen), notes=(*text.notes, note))


def _of_all(
    sources: Mapping[str | None, Checkpoint], folders: Mapping[str | None, Path | None]
) -> dict[str | None, Path | None]:
    """Return the folder with each source's chat template: the base's, for an adapter without one."""
    found: dict[str | None, Path | None] = {}
    for key, source in sources.items():
        own = folders[key] if key in folders else source.companions()
        found[key] = own if key in folders or template_of(own) else folders.get(None)
    return found


def _as_it_is(key: str | None, folder: Path | None) -> TokenizerFiles:
    files = {} if folder is None else read_files(folder)
    if folder is None or not files:
        raise InputError(
            f"{called(key)} has no tokenizer that a chat template could belong to: leave out "
            "`chat_template`, or save the model with its tokenizer"
        )
    return TokenizerFiles(folder, hashes_of(files))


def _other_settings(taken: Sequence[Added], sources: Mapping[str | None, Source]) -> Iterator[str]:
    """Yield a note on added tokens that some model finds in texts by other settings than the output."""
    ours = {one.content: one for one in taken}
    theirs = [one for source in sources.values() for one in source.tokenizer.added.values()]
    differ = sorted({one.content for one in theirs if ours.get(one.content, one) != one})
    if differ:
        have = counted(len(differ), "added token has", "added tokens have")
        yield (
            f"{have} other settings in other models, such as `special` or `lstrip` "
            f"({some(differ, 3, quoted=True)}): the output has those of the first model with the token"
        )


def _vocabulary(
    rules: TokenizerRules,
    models: Mapping[str | None, Checkpoint],
    folders: Mapping[str | None, Path | None],
) -> Text:
    first = next(iter(models))
    owner = first if rules.source in (UNION, BASE) else rules.source
    if owner not in models:
        raise InputError(
            f"tokenizer.source: '{owner}' is an adapter, whose rows are the base's: name the base. For "
            f"tokens of its own {_folded(str(owner))}; then pass OUT in its place"
        )
    tables = {key: tables_of(checkpoint) for key, checkpoint in models.items()}
    loaded: dict[str, Tokenizer] = {}
    found = {key: read_tokenizer(folder, loaded) for key, folder in folders.items()}
    notes: list[str] = []
    sources: dict[str | None, Source] = {}
    for key, tokenizer in found.items():
        if tokenizer is None:
            tokenizer = _of_first(key, tables, first, found[first])
            notes.append(f"{called(key)} has no tokenizer, and is taken to have {called(first)}'s")
        sources[key] = Source(tokenizer, tables[key].rows)
    chosen = sources[owner].tokenizer
    more = list(_more(rules, chosen, sources))
    ids, extended = chosen.extended(more) if more else (chosen.ids, None)
    decided, row_notes = vocabulary(ids, max(chosen.end, max(ids.values()) + 1), rules, sources)
    if more:
        notes.append(
            f"{counted(len(more), 'token is', 'tokens are')} added to the tokenizer of "
            f"{called(owner)}, the first {more[0].content!r} as {ids[more[0].content]}"
        )
    pieces = [
        one.content for one in more if one.content not in rules.tokens and _is_piece(one, sources)
    ]
    if pieces:
        notes.append(
            f"{len(pieces)} of the added tokens are pieces of other models' words "
            f"({some(pieces, 3, quoted=True)}). A tokenizer looks for added tokens first, inside words "
            f"too, so that texts may be read otherwise than by {called(owner)}; `source: base`, or of one "
            "expert, leaves a model's reading as it is"
        )
    unseen = [piece for piece in pieces if piece.startswith(_SPACES)]
    if unseen:
        notes.append(
            f"{len(unseen)} of these pieces begin with a tokenizer's mark of a space "
            f"({some(unseen, 3, quoted=True)}), which no text has: they are never found, and their rows "
            "not used"
        )
    notes += _other_settings([*chosen.added.values(), *more], sources)
    notes += _cutting(owner, sources)
    folder = folders[owner]
    if folder is None or found[owner] is None:
        raise InputError(f"{called(owner)} has no tokenizer: name another `source` in `tokenizer`")
    of_another = owner != first
    generation = safe_child(folder, "generation_config.json") if of_another else None
    if of_another and (folder / MORE_TEMPLATES).is_dir():
        notes.append(f"not copied from {folder}: {MORE_TEMPLATES}/")
    files = TokenizerFiles(
        folder,
        chosen.hashes,
        rows=decided.rows,
        extended=extended,
        added={ids[one.content]: one for one in more},
        special=models[owner].config if of_another else None,
        generation=read_object(generation) if generation and generation.is_file() else None,
    )
    return Text(decided, tables, files, (*row_notes, *notes))


def _cutting(owner: str | None, sources: Mapping[str | None, Source]) -> Iterator[str]:
    """Yield a note on sources whose texts were split into tokens differently in training."""
    chosen = sources[owner].tokenizer
    apart = {key: cut_apart(chosen, one.tokenizer) for key, one in sources.items()}
    named = [f"{called(key)} ({some(parts, 3)})" for key, parts in apart.items() if parts]
    if named:
        yield (
            f"the output cuts texts as {called(owner)} does; trained on texts that were cut otherwise: "
            + some(named, 3)
        )


def _of_first(
    key: str | None,
    tables: Mapping[str | None, Tables],
    first: str | None,
    tokenizer: Tokenizer | None,
) -> Tokenizer:
    """Return the first tokenizer for a model without one, whose number of rows must be the same."""
    if tables[key].rows != tables[first].rows:
        raise InputError(
            f"{called(key)} has no tokenizer, and {tables[key].rows} rows in its embedding where "
            f"{called(first)} has {tables[first].rows}: save the model with its tokenizer, or leave out "
            "`tokenizer` and merge the rows of the base by "
            f"{Hint('tensors', {'vocabulary': 'base'})}"
        )
    if tokenizer is None:
        raise InputError(
            f"{called(key)} has no tokenizer: save the model with its tokenizer, or leave out `tokenizer`"
        )
    return tokenizer


def _more(
    rules: TokenizerRules, tokenizer: Tokenizer, sources: Mapping[str | None, Source]
) -> Iterator[Added]:
    """Yield the tokens that the output's tokenizer lacks, in the order in which they are added."""
    known = set(tokenizer.ids)
    wanted: list[str] = []
    if rules.source == UNION:
        for source in sources.values():
            ids = source.tokenizer.ids
            wanted += sorted((t for t in ids if source.row(t) >= 0), key=ids.__getitem__)
    for token in dict.fromkeys((*wanted, *rules.tokens)):
        if token not in known:
            yield _as_added(token, sources)


def _is_piece(token: Added, sources: Mapping[str | None, Source]) -> bool:
    """Return whether no tokenizer had the token added, so that it is part of a trained vocabulary."""
    tokenizers = (source.tokenizer for source in sources.values())
    return not any(one.ids.get(token.content, -1) in one.added for one in tokenizers)


def _as_added(token: str, sources: Mapping[str | None, Source]) -> Added:
    """Return a token as the first model that added it has it, or else found anywhere in texts."""
    for source in sources.values():
        added = source.tokenizer.added.get(source.tokenizer.ids.get(token, -1))
        if added is not None:
            return added
    return Added(token)


def _check_adapter(name: str, adapter: Checkpoint, base: Tables, decided: Vocabulary) -> None:
    prefixes = [base.prefix] if base.prefix else []
    held = {*adapter.low_rank, *adapter.headers}
    touched = [n for n in sorted(base.names) if find_name(n, prefixes, held) is not None]
    if touched and not decided.keeps_base(base.rows):
        raise InputError(
            f"expert '{name}' ({adapter.source}) is an adapter that updates '{touched[0]}', whose rows are "
            f"other tokens in the output: {_folded(name)}"
        )


def _folded(name: str) -> str:
    return (
        f"fold it into its base first (`covmerge merge --base BASE --expert {name}=ADAPTER OUT`), and copy "
        "its tokenizer's files into OUT if it has some"
    )
