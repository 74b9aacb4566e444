"""Open the checkpoints of a merge, plan merges of them, and describe them to other processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from covmerge.base.errors import CheckpointError, InputError, TensorError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.adapters.adapted_base import AdaptedBase
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint, fingerprint, refuse_adapter
from covmerge.files.checkpoints.open import Source, open_checkpoint
from covmerge.files.checkpoints.unwrapped import unwrapped
from covmerge.files.quantised.view import dequantised, is_quantised
from covmerge.files.stores.store import stamp_of
from covmerge.files.tensors.shown import Donor, same_values
from covmerge.maths.methods import registry
from covmerge.plan.moe.view import mixed
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.models import Model, model_in_memory, on_part, over_base
from covmerge.plan.planning.operations import BASE, MERGED, expert_key
from covmerge.plan.planning.slices import stacked
from covmerge.plan.planning.ties import with_ties_undone
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Mixture, Recipe, Slice, TokenizerRules
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.vocabulary.decide import Text, decide
from covmerge.run.engine.executor import Opener
from covmerge.run.engine.hashing import Contents, Hashes
from covmerge.run.engine.inputs import Sources
from covmerge.run.experts import alike_by_place, check_tokenizers
from covmerge.run.export.companions import hash_companions
from covmerge.run.export.parents import Parents, read_parents


@dataclass(frozen=True)
class Views:
    """The views of a recipe's sources: layer slices, tokens, chat template, kind of output, MoE."""

    slices: Sequence[Slice] = ()
    tokenizer: TokenizerRules | None = None
    chat_template: str | None = None
    form: Literal["model", "adapter"] = "model"
    moe: Mixture | None = None
    text: Text | None = None


_BY_TOKEN = Hint("tokenizer", "union")


@dataclass(frozen=True)
class OpenCheckpoints:
    """The open checkpoints of a recipe, and the statistics files that it names.

    Attributes:
        text: tokens and chat template of the output, if they are not the base's.
        adapters: the experts that are adapters, by name.
        adapted: whether adapters are merged to an adapter, so that the base's weights are not needed
            (`AdaptedBase`).
    """

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    statistics: Mapping[str, StatisticsFile]
    views: Views
    text: Text
    adapters: Mapping[str, AdapterCheckpoint]
    adapted: bool = False

    def all(self) -> Iterator[tuple[str, Checkpoint]]:
        """Yield the base, if there is one, then the experts, each with its key in reports."""
        if self.base.is_source:
            yield BASE, self.base
        for name, checkpoint in self.experts.items():
            yield expert_key(name), checkpoint

    def plan(self, recipe: Recipe) -> tuple[Plan, OpenCheckpoints]:
        """Plan one merge of these checkpoints; see `plans`."""
        (plan,), checkpoints = self.plans([recipe])
        return plan, checkpoints

    def plans(
        self, recipes: Sequence[Recipe], *, whole: bool = False
    ) -> tuple[list[Plan], OpenCheckpoints]:
        """Plan merges of these checkpoints, and return the plans and the checkpoints that they read.

        A merge of adapters into an adapter needs no weights of the base. The base may then be stored
        quantised, and its weights are neither fetched nor hashed.
        """
        adapted = recipes[0].output.format == "adapter" and len(self.adapters) == len(self.experts)
        base = AdaptedBase(self.base, self.experts.values()) if adapted else self.base
        notes = (*self._on_tokens, *alike_by_place(self.experts))
        plans = [
            replace(plan, notes=(*self.text.notes, *plan.notes, *notes))
            for plan in build_plans(recipes, base, self.experts, self.statistics, whole=whole)
        ]
        for plan in plans:
            self.text.check_masks(plan.masked)
        if adapted:
            base.decides = any(tensor.base is not None for plan in plans for tensor in plan.tensors)
        return plans, replace(self, base=base, adapted=adapted)

    @cached_property
    def _on_tokens(self) -> tuple[str, ...]:
        """Notes on experts whose tokens differ from the base's but whose rows are merged by number."""
        by_token = self.text.vocabulary is not None
        folders = {n: e.folder for n, e in self.experts.items() if not by_token or e.is_adapter}
        folded = (
            "Fold it into its base first, copy its tokenizer's files into that folder, and merge the "
            f"folder by token: {_BY_TOKEN}"
        )
        whole = f"{_BY_TOKEN} merges token by token"
        return tuple(
            f"expert '{found.expert}': {found.text}. "
            + (folded if found.expert in self.adapters else whole)
            for found in check_tokenizers(self.base.folder, folders, self.adapters)
        )

    def materialize(self, *, leads: bool = True) -> None:
        """Fetch the files that planning did not need, and check statistics files by reading them once.

        `leads` is False where another process of the merge checks the statistics.

        Raises:
            InputError: the tensors of a statistics file have another hash than it states.
        """
        for _, checkpoint in self.all():
            checkpoint.materialize()
        for file in self.statistics.values() if leads else ():
            file.check_content()

    def paths(self) -> list[Path]:
        """Return the paths of all sources, to check that no output overwrites them.

        The path of a source that is not a local file does not exist.
        """
        files = [file.path for file in self.statistics.values()]
        return [*(Path(c.source).expanduser() for _, c in self.all()), *files]

    @cached_property
    def parents(self) -> Parents:
        """The merged models and their licences, for the model card; cards of repositories are fetched."""
        return read_parents(self.all())

    @cached_property
    def companions(self) -> Mapping[str, str]:
        """Hashes of the base's companion files, taken at the first access of this property."""
        return hash_companions(self.base.folder)

    @property
    def _statistics(self) -> dict[str, Json]:
        return {f"statistics {name}": file.identity() for name, file in self.statistics.items()}

    def identity(self) -> dict[str, Json]:
        """Return facts that identify the sources, for the digest of a plan."""
        return {
            **{key: checkpoint.identity() for key, checkpoint in self.all()},
            **self._statistics,
            **{
                f"stamp of statistics {name}": stamp_of(file.path.stat())
                for name, file in self.statistics.items()
            },
            "companions": dict(self.companions),
            **self.text.identity(),
        }

    def check_resumable(self) -> None:
        """Check that every source shows whether it changed since an earlier run.

        Raises:
            InputError: a server gives no versions of its files.
        """
        for key, source, names in self._without_versions():
            raise InputError(
                f"the server of {key} ({source}) does not say whether {some(names)} changed since the "
                f"merge was begun: start over with {Hint('overwrite')}"
            )

    def _without_versions(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield each source, by key and place, of which a server gives no versions, with these files."""
        for key, checkpoint in self.all():
            files = cast("dict[str, dict[str, int]]", checkpoint.identity().get("files", {}))
            names = [name for name, said in files.items() if said.get("version") == 0]
            if names:
                yield key, checkpoint.source, names

    def sources(self, merged: Checkpoint | None = None) -> Sources:
        """Return the sources for the engine, with the merged model if one is inspected."""
        found = {BASE: self.base, **dict(self.all())}
        return Sources(found if merged is None else {**found, MERGED: merged}, self.statistics)

    def contents(self) -> Contents:
        """Return the contents to hash, by source."""
        return {key: checkpoint.contents() for key, checkpoint in self.all()}

    def recorded(self, hashes: Hashes) -> dict[str, Json]:
        """Return the record of the sources for covmerge.json: where each was read from, and its hashes."""
        found: dict[str, Json] = {
            key: {"source": checkpoint.source, "content": hashes[key]}
            for key, checkpoint in self.all()
        }
        for name, file in self.statistics.items():
            found[f"statistics {name}"] = {"source": str(file.path), "content": file.identity()}
        return found

    def changed(self, recorded: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Return the keys of sources whose contents differ from those in a manifest."""
        now = {**{key: fingerprint(one) for key, one in self.all()}, **self._statistics}
        return (key for key in now if recorded.get(key, {}).get("content") != now[key])

    def opener(self, plans: Sequence[Plan]) -> Opener:
        """Return a function that opens the same sources in a worker process.

        Raises:
            InputError: a source is a state dict, or a method is a function, that other processes lack.
        """
        for origin in (origin for plan in plans for origin in plan.origins):
            if origin.is_typed or (origin.kind == "method" and registry.is_passed(origin.name)):
                raise InputError(
                    f"the {origin.kind} '{origin.name}' is a function of this process, which others do not "
                    "have: register it in a file that the program imports, or leave out "
                    f"{Hint('workers')}"
                )
        held = [key for key, checkpoint in self.all() if checkpoint.identity()["kind"] == "memory"]
        if held:
            raise InputError(
                f"{held[0]} is a state dict, which other processes do not have: save it to a file, or "
                f"leave out {Hint('workers')}"
            )
        self.check_versions()
        places = {key: _place(checkpoint) for key, checkpoint in self.all()}
        files = {name: str(file.path) for name, file in self.statistics.items()}
        # Only the process that writes the folder needs the tokenizer's files.
        text = replace(self.text, files=None)
        described = Description(places, files, self.adapted, replace(self.views, text=text), {})
        with described.open() as again:
            return replace(described, identity=again.identity())

    def check_versions(self) -> None:
        """Raise if a source is on a server that lets no other process see whether the source changes."""
        for key, source, names in self._without_versions():
            raise InputError(
                f"{key}: {source}: the server tells neither ETag nor Last-Modified of {names[0]}, so that "
                "several processes cannot see whether it changes: download it and pass its folder, or "
                f"leave out {Hint('workers')} and {Hint('executor')}"
            )

    def check_ties(self, plan: Plan) -> None:
        """Check that tied tensors that are stored twice are equal. A base that is not read is skipped.

        Raises:
            TensorError: two tied tensors differ, so the config is wrong. The output has only one of them,
                and without the other it would be a different model.
        """
        ties = [(expert, plan.tied[name]) for name, expert in self.experts.items()]
        of_base = [(self.base, plan.tied[None])] if self.base.decides else []
        for checkpoint, tied in (*of_base, *ties):
            for name, target in tied.items():
                if not same_values(checkpoint, name, target):
                    raise TensorError(
                        f"config.json of {checkpoint.source} ties '{name}' to '{target}', but both are "
                        "stored and differ. If they are meant to differ, set "
                        '"tie_word_embeddings": false in its config.json.'
                    )


@contextmanager
def open_checkpoints(
    base: Source | None,
    experts: Mapping[str, Source],
    statistics: Mapping[str, str | Path],
    views: Views = Views(),
) -> Generator[OpenCheckpoints]:
    """Open base, experts and statistics files, and close all of them at the end."""
    if views.slices and statistics:
        raise InputError(
            "statistics go by the names of whole models, and the recipe has slices: leave out one of them"
        )
    with ExitStack() as stack:

        def opened(source: Source) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            return checkpoint

        def plain_base(stored: Checkpoint) -> Checkpoint:
            try:
                return dequantised(stored)
            except CheckpointError:
                if not (adapters and is_quantised(stored)):
                    raise
                return stored  # a merge of adapters into an adapter may not need the base's weights

        def measured(path: str | Path) -> StatisticsFile:
            file = StatisticsFile.open(path)
            stack.callback(file.close)
            return file

        stored = None if base is None else opened(base)
        if stored is not None:
            refuse_adapter(stored, "the base is a whole model")
        given = {name: opened(source) for name, source in experts.items()}
        adapters = {n: m for n, m in given.items() if isinstance(m, AdapterCheckpoint)}
        if adapters and base is None:
            raise InputError(
                f"expert '{next(iter(adapters))}' is an adapter, and the recipe has no base that it is "
                "of: give one"
            )
        sources: dict[str | None, Checkpoint] = (
            {} if stored is None else {None: unwrapped(plain_base(stored))}
        )
        plain = sources.get(None)
        if plain is not None and views.form == "adapter":
            plain = sources[None] = model_in_memory(plain, adapters.values())
        if adapters and plain is not None:
            whole = Model.of(plain)
            adapters = {n: on_part(adapter, whole) for n, adapter in adapters.items()}
            given |= adapters
        sources |= {name: unwrapped(dequantised(model), plain) for name, model in given.items()}
        sources = with_ties_undone(sources, views.form)
        sources = dict(mixed(views.moe, sources, list(given)))
        text = views.text or decide(views.tokenizer, views.chat_template, sources)
        seen = text.views_of(sources)
        start = None if base is None else stacked(views.slices, None, seen.pop(None))
        models = {str(name): stacked(views.slices, name, model) for name, model in seen.items()}
        if adapters:
            assert start is not None
            model = Model.of(start)
            adapters = {n: over_base(adapter, model) for n, adapter in adapters.items()}
            models |= adapters
        yield OpenCheckpoints(
            Donor(models) if start is None else start,
            models,
            {name: measured(path) for name, path in statistics.items()},
            views,
            text,
            adapters,
        )


@contextmanager
def open_recipe(
    recipe: Recipe, base: Source | None = None, experts: Mapping[str, Source] | None = None
) -> Generator[OpenCheckpoints]:
    """Open the sources of a recipe; base or experts are given where it has only labels for them."""
    named = {name: expert.source for name, expert in recipe.experts.items()}
    views = Views(
        recipe.slices, recipe.tokenizer, recipe.chat_template, recipe.output.format, recipe.moe
    )
    with open_checkpoints(
        recipe.base if base is None else base,
        named if experts is None else experts,
        statistics_of(recipe),
        views,
    ) as opened:
        yield opened


def statistics_of(recipe: Recipe) -> dict[str, str]:
    """Return the statistics files that a recipe names, by expert."""
    named = {name: expert.statistics for name, expert in recipe.experts.items()}
    return {name: file for name, file in named.items() if file is not None}


@dataclass(frozen=True)
class Description:
    """A description of sources, from which another process can open them; see `OpenCheckpoints`."""

    places: Mapping[str, str]  # path, address or Hub name of each checkpoint, by key
    statistics: Mapping[str, str]
    adapted: bool
    views: Views
    identity: Mapping[str, Json]  # facts that identify the sources, to see whether one changed

    @contextmanager
    def __call__(self) -> Generator[Sources]:
        """Open the sources; raise if one changed after the description was made."""
        with self.open() as opened:
            if opened.identity() != self.identity:
                raise CheckpointError(
                    "a source changed while it was in use: let whatever writes it finish, and start "
                    "again"
                )
            yield opened.sources()

    @contextmanager
    def open(self) -> Generator[OpenCheckpoints]:
        """Open the sources without a check whether they changed."""
        prefix = expert_key("")
        experts = {k.removeprefix(prefix): place for k, place in self.places.items() if k != BASE}
        base = self.places.get(BASE)
        with open_checkpoints(base, experts, self.statistics, self.views) as opened:
            base = opened.base
            start = AdaptedBase(base, opened.experts.values()) if self.adapted else base
            yield replace(opened, base=start, adapted=self.adapted)


def _place(checkpoint: Checkpoint) -> str:
    """Return the path or address of a checkpoint, or its name on the Hub if it was not fetched."""
    kind = checkpoint.identity()["kind"]
    if kind == "remote" or (kind == "hub" and checkpoint.folder is None):
        return checkpoint.source
    if kind == "hub":
        return str(checkpoint.folder)
    return str(Path(checkpoint.source).expanduser().absolute())
