"""README.md: the model card, for readers who did not make the merge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from covmerge.base.text import as_written, some
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import CARD_NAME
from covmerge.files.checkpoints.layout import HEADS_FOLDER, MASKS_FOLDER
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.mergekit import called
from covmerge.maths.methods.registry import Reference
from covmerge.maths.steps import StepUse
from covmerge.maths.steps.compose import steps_around
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.varied import shown_parameters
from covmerge.run.engine.entries import account_of_losses, rounding_said
from covmerge.run.export.adapter import how_to_load, library_of, pipeline_of
from covmerge.run.export.markdown import fenced, inline, row
from covmerge.run.export.parents import Parent, Parents, licence_notes, shared_licence

_MODEL_TYPE = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_STATISTICS = {"gram": "Gram matrices of their layers' inputs", "fisher": "Fisher information"}
_HASH = 12  # digits of a hash that identify a version


def write_card(
    store: LocalFolder,
    plan: Plan,
    parents: Parents,
    config: Mapping[str, Any] | None,
    manifest: Mapping[str, Json],
) -> str:
    """Write README.md into a finished output and return its name; the same merge gives the same bytes."""
    card = _Card(store, plan, parents, config or {}, manifest)
    content = f"---\n{_yaml(card.metadata())}---\n\n{card.text()}".encode()
    store.put(CARD_NAME, content)
    return CARD_NAME


@dataclass(frozen=True)
class _Card:
    """The arguments of `write_card`, and the parts of the card that are made from them."""

    output: Store
    plan: Plan
    parents: Parents
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def adapter(self) -> bool:
        return self.plan.recipe.output.format == "adapter"

    @property
    def library(self) -> str | None:
        return library_of(self.output, self.config, adapter=self.adapter)

    @property
    def base(self) -> Parent:
        """Return the base; without a base, the expert whose config and tokenizer the output has."""
        return next(iter(self.parents.by_key.values()))

    @property
    def methods(self) -> tuple[Method, ...]:
        """Return the recipe's method, then those of its rules."""
        recipe = self.plan.recipe
        names = (recipe.method, *(rule.method for rule in recipe.rules if rule.method))
        return tuple(map(registry.get, dict.fromkeys(names)))

    @property
    def called(self) -> str:
        """Return the common name of the recipe's method, such as "mergekit's ties"."""
        return called(self.plan.recipe.method, self.plan.recipe.parameters)

    @property
    def steps(self) -> tuple[StepUse, ...]:
        """Return the steps before and after the recipe's method."""
        recipe = self.plan.recipe
        before, after = steps_around(recipe.before, recipe.after)
        return (*before, *after)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that the Hub reads; only entries that are certain."""
        named = [parent.hub.name for parent in self.parents.by_key.values() if parent.hub]
        data: dict[str, Any] = {}
        if named:
            data |= {"base_model": list(dict.fromkeys(named)), "base_model_relation": "merge"}
        if self.library is not None:
            data["library_name"] = self.library
        licence = shared_licence(self.parents.licences)
        if licence is not None:
            names = list(licence.names)
            data["license"] = names if len(names) > 1 else names[0]
            if licence.title:
                data["license_name"] = licence.title
            if licence.link:
                data["license_link"] = licence.link
        pipeline = pipeline_of(self.config)
        if pipeline is not None:
            data["pipeline_tag"] = pipeline
        family = self.config.get("model_type")
        known = isinstance(family, str) and _MODEL_TYPE.fullmatch(family)
        method = self.plan.recipe.method
        return {**data, "tags": ["merge", "covmerge", method, *([family] if known else [])]}

    def text(self) -> str:
        """Return the text of the card below its metadata."""
        sections = {
            "What was merged": self._parents(),
            "Licence": self._licence(),
            "Method": self._method(),
            "Recipe": self._recipe(),
            "What became of the tensors": self._tensors(),
            "How to load it": self._loading(),
        }
        parts = ["\n".join(self._head())]
        parts += [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items()]
        return "\n\n".join(parts) + "\n"

    def _head(self) -> Iterator[str]:
        recipe = self.plan.recipe
        names = [inline(name) for name in recipe.experts]
        yield f"# Merge of {some(names)} by {inline(self.called)}"
        yield ""
        merged = f"{len(names)} fine-tuned models" if len(names) > 1 else "One fine-tuned model"
        of_base = "" if recipe.base is None else f" of {inline(self.base.title)}"
        yield (
            f"{merged}{of_base}, made into one "
            f"{'LoRA adapter' if self.adapter else 'model'} by covmerge {__version__} with the method "
            f"`{self.called}`. {self._data()}"
        )

    def _data(self) -> str:
        kinds = dict.fromkeys(_STATISTICS[m.data] for m in self.methods if m.data != "none")
        if not kinds:
            return "No data was used: the weights alone decide."
        files = [e.statistics for e in self.plan.recipe.experts.values() if e.statistics]
        return (
            f"It used the experts' data as {' and '.join(kinds)}, collected beforehand: "
            f"{', '.join(inline(Path(file).name) for file in files)}."
        )

    def _parents(self) -> Iterator[str]:
        yield row("", "source", "version", "weight", "licence")
        yield "|---|---|---|---|---|"
        without = [] if self.plan.recipe.base is None else [""]
        weights = [*without, *(_weight(e.weight) for e in self.plan.recipe.experts.values())]
        for (key, parent), weight in zip(self.parents.by_key.items(), weights, strict=True):
            source = inline(parent.title)
            if parent.hub is not None:
                source = (
                    f"[{source}](https://huggingface.co/{parent.hub.name}/tree/{parent.hub.commit})"
                )
            licence = "unknown" if parent.licence is None else inline(str(parent.licence))
            yield row(inline(key), source, self._version(key, parent), weight, licence)
        yield from ("", "`covmerge.json` has the hashes of all files.")

    def _version(self, key: str, parent: Parent) -> str:
        if parent.hub is not None:
            return f"`{parent.hub.commit[:_HASH]}`"
        content: Mapping[str, str] = self.manifest["sources"][key]["content"]
        name, digest = next(iter(content.items()))
        kind, _, value = digest.partition(":")  # a server may call a version anything
        short = value[:_HASH]
        return f"{kind} {f'`{short}`' if short.isalnum() else inline(short)} ({inline(name)})"

    def _licence(self) -> Iterator[str]:
        shared = shared_licence(self.parents.licences)
        if shared is not None:
            yield f"All of them are under {inline(str(shared))}, and so is what was made of them."
        notes = list(licence_notes(self.parents.licences))
        if shared is not None and notes:
            yield ""
        yield from (f"- {inline(note)}" for note in notes)

    def _method(self) -> Iterator[str]:
        recipe = self.plan.recipe
        if self.plan.chosen is not None:
            yield f"No method was named: `{recipe.method}`, as {self.plan.chosen}."
            yield ""
        for method in self.methods:
            name = self.called if method.name == recipe.method else method.name
            yield from (f"`{name}`: {method.summary}", "")
            yield from ([fenced(method.equation, "text"), ""] if method.equation else [])
        parameters = shown_parameters(recipe.method, recipe.parameters, self.plan.family)
        if parameters:
            yield from (f"Parameters of `{self.called}`: {_listed(parameters)}.", "")
        for use in self.steps:
            step = use.step
            yield from (f"`{step.name}`, {step.when} the method: {step.summary}", "")
            yield from ([fenced(step.equation, "text"), ""] if step.equation else [])
            if use.parameters:
                yield from (f"Parameters of `{step.name}`: {_listed(use.parameters)}.", "")
        for origin in self.plan.origins:
            said = f"`{origin.name}` is not covmerge's own {origin.kind}: {inline(str(origin))}."
            yield from (said, "")
        papers = [
            _citation(m.name, m.reference)
            for m in (*self.methods, *(use.step for use in self.steps))
            if m.reference
        ]
        if papers:
            yield fenced("\n".join(papers), "bibtex")

    def _recipe(self) -> Iterator[str]:
        yield fenced(_yaml(self._public_recipe()), "yaml")
        yield ""
        yield (
            "`covmerge merge recipe.yml OUT` carries it out where the sources are; `covmerge.json` has "
            "all settings."
        )

    def _public_recipe(self) -> dict[str, Any]:
        """Return the recipe without defaults and without paths of this machine."""
        recipe = self.plan.recipe
        given = recipe.model_dump(mode="json", exclude_defaults=True)
        for name, expert in given["experts"].items():
            expert["source"] = self.parents.by_key[f"expert {name}"].source
            if "statistics" in expert:
                expert["statistics"] = Path(expert["statistics"]).name
        # The three keys that every recipe has come first.
        base = None if recipe.base is None else self.base.source
        first = {"base": base, "experts": given["experts"], "method": recipe.method}
        return {**first, **{key: value for key, value in given.items() if key not in first}}

    def _tensors(self) -> Iterator[str]:
        totals = self.manifest["totals"]
        yield row("role", "rule", "tensors")
        yield "|---|---|---|"
        for entry in totals["by_rule"]:
            yield row(inline(entry["role"]), inline(entry["rule"]), str(entry["tensors"]))
        yield ""
        if self.adapter:
            yield (
                f"{totals['discarded_energy']:.2%} of the merged update's energy is lost to the rank of "
                f"the adapter, and {totals['left_out_energy']:.2%} lies in tensors that it leaves out."
            )
        if self.plan.recipe.base is not None:
            said = rounding_said(totals)
            yield f"{said[0].upper()}{said[1:]}."
        for _, said in account_of_losses(totals).rows:
            yield f"Quantised: {said}."
        yield "`covmerge.json` says what became of every tensor."

    def _loading(self) -> Iterator[str]:
        lines = how_to_load(self.output, self.library, self.config, self.base.hub)
        yield fenced("\n".join(lines), "python")
        if self.config.get("auto_map"):
            yield from (
                "",
                "It needs code of its base (`auto_map` in config.json), which is not here.",
            )
        heads: Mapping[str, list[str]] = self.manifest["heads"]
        if heads:
            yield ""
            yield "Task heads are not merged; each expert's own is beside the model:"
            yield ""
            for expert, names in heads.items():
                listed = ", ".join(map(inline, names[:4])) + (" ..." if len(names) > 4 else "")
                yield f"- `{HEADS_FOLDER}/{expert}.safetensors`: {listed}"
        if "rescalers" in self.manifest:
            yield ""
            yield (
                f"Each expert has masks of its own under `{MASKS_FOLDER}/`: "
                "`covmerge.load_expert(folder, expert, base)` returns the weights it runs with."
            )


def _weight(weight: float | Mapping[str, Any]) -> str:
    return inline(json.dumps(weight)) if isinstance(weight, Mapping) else f"{weight:g}"


def _listed(parameters: Mapping[str, object]) -> str:
    return ", ".join(f"`{k}` {inline(as_written(v))}" for k, v in parameters.items())


def _citation(name: str, paper: Reference) -> str:
    year = re.search(r"\d{4}", paper.venue)
    fields = {
        **({"author": " and ".join(paper.authors)} if paper.authors else {}),
        "title": paper.title,
        **({"year": year[0]} if year else {}),
        "note": f"{paper.venue}. {paper.equations}",
        "eprint": paper.arxiv,
        "archivePrefix": "arXiv",
        "url": f"https://arxiv.org/abs/{paper.arxiv}",
    }
    listed = "".join(f"  {key} = {{{value}}},\n" for key, value in fields.items())
    return f"@misc{{{name.replace('+', 'p')},\n{listed}}}"


def _yaml(data: Mapping[str, Any]) -> str:
    """Return YAML with the keys in their order and each text on one line."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=float("inf"))
