"""Reading recipes from files or mappings, and writing them back as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from covmerge.base.errors import InputError, RecipeError, did_you_mean
from covmerge.base.identifiers import hub_id
from covmerge.base.settings import KEYS, Hint
from covmerge.files.stores.address import address_of, hub_address, local_path
from covmerge.files.stores.regular_file import open_regular, read_some
from covmerge.plan.recipe.explain import explain, key_path
from covmerge.plan.recipe.mergekit.compiling import Stage, compile_mergekit, in_order
from covmerge.plan.recipe.mergekit.models import Places
from covmerge.plan.recipe.mergekit.reading import ImportLog, is_mergekit
from covmerge.plan.recipe.schema import Recipe, WithRun, output_as
from covmerge.plan.recipe.sections import RUN, compile_run
from covmerge.plan.recipe.strict_yaml import KeyPath, Origin, parse_documents, parse_yaml
from covmerge.plan.recipe.varied import SEARCH

# The places of values marked for a search, and the places where marks are allowed.

FORMS = (
    "write [low, high], [low, high, log], or a list of choices of one kind: three numbers or more, or two "
    "texts or more"
)


def marks_in(data: object, origin: Origin) -> Iterator[tuple[KeyPath, object]]:
    """Yield the place of each marked value, and the values to choose from."""
    for place, value in _walk(data, ()):
        if not _may_be_marked(place):
            if len(value) == 1 and isinstance(value[SEARCH], list | tuple):
                raise RecipeError(
                    f"{origin.where(place)}: {key_path(place)} cannot be searched: weights, parameters "
                    "and methods can"
                )
        elif len(value) > 1:
            others = ", ".join(key for key in value if key != SEARCH)
            raise RecipeError(
                f"{origin.where(place)}: {key_path(place)}: `search` stands alone: remove {others}"
            )
        else:
            yield place, value[SEARCH]


def refuse_marks(data: object, origin: Origin) -> None:
    """Raise if a recipe has marked values, which only a search can choose."""
    for place, _ in marks_in(data, origin):
        raise RecipeError(
            f"{origin.where(place)}: {key_path(place)} is marked by `search`, and only `covmerge search` "
            "chooses such values: call it in place of this, or write one value"
        )


def _walk(data: object, place: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield every mapping with the key `search`; it is a mark if marks are allowed there."""
    if isinstance(data, Mapping):
        mapping = cast("Mapping[str, Any]", data)
        if SEARCH in mapping:
            yield place, mapping
        for key, value in mapping.items():
            yield from _walk(value, (*place, key))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(cast("Sequence[object]", data)):
            yield from _walk(value, (*place, number))


def _may_be_marked(place: KeyPath) -> bool:
    """Return whether a search may choose the value at a place, in covmerge's or mergekit's recipes."""
    if "match" in place or "filter" in place:
        return False
    match place:
        case ("method",) | ("merge_method",) | ("rules", _, "method"):
            return True
        case ("experts", _, "weight", *_):
            return True
        case ("before" | "after", _, _, _, *_) | ("rules", _, "before" | "after", _, _, _, *_):
            return True
        case _:
            return "parameters" in place[:-1]


_MAX_BYTES = 1 << 20


def load_recipe(path: str | Path, log: ImportLog | None = None) -> Recipe:
    """Read a recipe file in YAML or JSON, of covmerge or of mergekit.

    Relative paths start from the file's folder. In mergekit's recipes, they start from the working
    directory, or else from the file's folder.

    Args:
        path: the file.
        log: how strictly to read a recipe of mergekit's; it collects notes.

    Raises:
        CheckpointError: the checkpoints of a `run` are missing or incomplete.
        RecipeError: the file cannot be read, is not YAML, or is not a recipe; one line for each
            problem, with file, line, key and what is allowed.
    """
    return recipe_of(*read_yaml(path), Path(path).parent, log)


def recipe_of(
    data: Any, origin: Origin, folder: Path | None, log: ImportLog | None = None
) -> Recipe:
    """Return the recipe for the content of a file, as `load_recipe` does.

    Relative paths start from the folder; None: they are not changed.
    """
    if isinstance(data, dict) and is_mergekit(theirs := cast("dict[str, Any]", data)):
        ours = compile_mergekit(theirs, origin, log or ImportLog(), Places(folder))
        return _validate(ours, Origin(f"{origin.name}, as a recipe of covmerge"))
    if log is not None and log.lenient:
        raise RecipeError(
            f"{origin.name} is no recipe of mergekit's, and {Hint('lenient')} is about those: leave it out"
        )
    recipe = _validate(_without_run(data, origin, folder or Path(), log), origin)
    return recipe if folder is None else _beside(recipe, folder, origin)


def load_stages(
    path: str | Path, out: Path | None, log: ImportLog | None = None, folder: Path | None = None
) -> list[tuple[Path, Recipe]]:
    """Return the folders to write, in order, with their recipes, from a file of one or more documents.

    Several documents are mergekit's stages. Each named stage is written to a folder of that name, where
    other stages find it: in `folder`, or in `OUT.stages`. The stage without a name is written to `out`. If
    all are named, `out` or `folder` is the folder for all of them.

    Raises:
        RecipeError: as in `load_recipe`; or a name is invalid or used twice, stages need each
            other, several stages have no name, or the output is missing, or given although all
            stages are named.
    """
    documents = parse_documents(_text(Path(path)), str(path))
    if len(documents) == 1:
        if out is None or folder is not None:
            raise RecipeError(
                f"{path} has one recipe, and stages are of several: leave out {Hint('stages')}, and end "
                "the command with the output folder"
            )
        return [(out, recipe_of(*documents[0], Path(path).parent, log))]
    log = log or ImportLog()
    stages = in_order([Stage.of(data, origin, log) for data, origin in documents])
    inside, last = _folders(str(path), out, folder, named=stages[-1].name is not None)
    folders = {stage.name: str(inside / stage.name) for stage in stages if stage.name}
    if stages[-1].name is None:
        _check_apart(last, folders.values())
    places = Places(Path(path).parent, folders)
    return [
        (
            Path(folders[stage.name]) if stage.name else last,
            _validate(
                compile_mergekit(stage.part.data, stage.part.origin, log, places),
                Origin(f"{path}, {stage.name or 'the last stage'} as a recipe of covmerge"),
            ),
        )
        for stage in stages
    ]


def _folders(file: str, out: Path | None, folder: Path | None, *, named: bool) -> tuple[Path, Path]:
    """Return the folder for the named stages, and the output of the stage without a name."""
    if out is None:
        assert folder is not None
        if not named:
            raise RecipeError(
                f"{file} has a recipe without a name, which makes the output, and none is given: end the "
                "command with its folder"
            )
        return folder, folder
    if not named:
        return folder or out.with_name(f"{out.name}.stages"), out
    if folder is not None:
        raise RecipeError(
            f"all recipes of {file} have names, and become folders in {folder}: none is the output {out}. "
            "Leave it out, or the `name` of one"
        )
    return out, out


def _check_apart(last: Path, folders: Iterable[str]) -> None:
    """Raise if the output and a stage's folder contain each other, as one would replace the other."""
    out = last.resolve()
    for folder in folders:
        stage = Path(folder).resolve()
        if out == stage or out in stage.parents or stage in out.parents:
            raise RecipeError(
                f"the output {last} and the stage {folder} overlap: choose an output elsewhere, or another "
                f"folder by {Hint('stages')}"
            )


def import_recipe(path: str | Path, log: ImportLog) -> dict[str, Any]:
    """Return a mergekit recipe file as a recipe of covmerge, with paths from the working directory."""
    data, origin = read_yaml(path)
    if not isinstance(data, dict) or not is_mergekit(theirs := cast("dict[str, Any]", data)):
        raise RecipeError(f"{path} is no recipe of mergekit: it has no `merge_method`")
    ours = compile_mergekit(theirs, origin, log, Places(Path(path).parent))
    _validate(ours, Origin(f"{path}, as a recipe of covmerge"))
    return ours


def read_yaml(path: str | Path) -> tuple[Any, Origin]:
    """Read a short YAML file of one document."""
    return parse_yaml(_text(Path(path)), str(path))


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = read_some(file, _MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: the recipe cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise RecipeError(f"{path}: larger than {_MAX_BYTES} bytes; a recipe is a short YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start})") from error


def parse_recipe(
    mapping: Mapping[str, Any], *, origin: str = "recipe", log: ImportLog | None = None
) -> Recipe:
    """Return the recipe that a mapping describes; sources are not changed.

    Args:
        mapping: the content of a recipe file, as from `dump_recipe`; or of one of mergekit's.
        origin: a name for messages, such as "command line".
        log: how strictly to read a recipe of mergekit's; it collects notes.

    Raises:
        CheckpointError: the checkpoints of a `run` are missing or incomplete.
        RecipeError: the mapping is no recipe; one line for each problem.

    Example:
        >>> recipe = parse_recipe({"base": "org/base", "experts": {"code": "org/code@v1"}})
        >>> recipe.method, recipe.experts["code"].weight
        ('', 1.0)
    """
    data = dict(mapping)
    if is_mergekit(data):
        data = compile_mergekit(data, Origin(origin), log or ImportLog())
    return _validate(_without_run(data, Origin(origin), Path(), log), Origin(origin))


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain JSON types with every default, always in the same order.

    Method, steps, slices, mixture, tokenizer and chat template are left out if they are empty, and
    so are empty fields of rules.
    """
    data = recipe.model_dump(mode="json")
    data["rules"] = [
        {key: value for key, value in rule.items() if value not in (None, {}, [])}
        for rule in data["rules"]
    ]
    optional = ("method", "before", "after", "slices", "moe", "tokenizer", "chat_template")
    return {key: value for key, value in data.items() if value or key not in optional}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between two recipes as returned by `dump_recipe`.

    The order of the experts counts: it affects the rounding of sums, and some methods depend on it.

    Example:
        >>> before = {"method": "ties", "experts": {"a": 1, "b": 2}}
        >>> differing(before, {"method": "ties", "experts": {"b": 2, "a": 1}})
        ['experts']
    """

    def said(recipe: Mapping[str, Any], key: str) -> object:
        value = recipe.get(key)
        return [*value.items()] if key == "experts" and value else value

    return [key for key in {**one, **other} if said(one, key) != said(other, key)]


def _without_run(data: Any, origin: Origin, beside: Path, log: ImportLog | None) -> Any:
    """Return a recipe with its run's checkpoints as experts; a recipe without a run is unchanged."""
    given = cast("dict[str, Any]", data)
    if not isinstance(data, dict) or RUN not in given:
        return given
    if "experts" in given:
        raise RecipeError(
            f"{origin.where((RUN,))}: 'run' and 'experts' both say what is merged: leave out one of them"
        )
    try:
        run = WithRun.model_validate(given).run
    except ValidationError as error:
        raise explain(error, origin) from None
    return compile_run(given, run, beside, (log or ImportLog()).notes)


def _validate(data: Any, origin: Origin) -> Recipe:
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise RecipeError(
            f"{origin.name}: {kind}; a recipe is a mapping with the keys "
            f"{', '.join(Recipe.model_fields)}"
        )
    refuse_marks(cast("dict[str, Any]", data), origin)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        # The RecipeError says everything, so pydantic's trace would only repeat it.
        raise explain(error, origin) from None


def _beside(recipe: Recipe, folder: Path, origin: Origin) -> Recipe:
    """Return the recipe with its relative paths starting from `folder`."""
    found: dict[str, Any] = {"experts": {}}
    if recipe.base is not None:
        found["base"] = _locate(recipe.base, folder, origin, ("base",))
    for name, expert in recipe.experts.items():
        moved = {"source": _locate(expert.source, folder, origin, ("experts", name))}
        if (file := expert.statistics) is not None:
            moved["statistics"] = _locate(file, folder, origin, ("experts", name, "statistics"))
        found["experts"][name] = expert.model_copy(update=moved)
    return recipe.model_copy(update=found)


def _locate(source: str, folder: Path, origin: Origin, key: KeyPath) -> str:
    # Statistics can only be read by path.
    of_model = key[-1] != "statistics"
    try:
        if of_model and hub_address(source) is not None:
            return source
        if of_model and (address := address_of(source)) is not None:
            return str(address)
        path = local_path(source)
    except InputError as error:
        raise RecipeError(f"{origin.where(key)}: {key_path(key)}: {error}") from None
    if source.startswith("~/"):
        path = path.expanduser()
    if path.is_absolute():
        return str(path)
    beside = folder / path
    if hub_id(source) and not _exists(beside):
        # Otherwise it would be read from the working directory, which the recipe does not know.
        if _exists(path):
            raise RecipeError(
                f"{origin.where(key)}: {key_path(key)}: {source!r} exists in the working directory "
                f"but not beside the recipe; write a path relative to {folder}, or add a revision "
                "(org/name@main) if the model on the Hub is meant"
            )
        return source
    # "./" marks a path, so that a missing file is not mistaken for a Hub id.
    return str(beside) if beside.is_absolute() or beside.parts[0] == ".." else f"./{beside}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


# Settings, named like Python arguments, that override a recipe.

# Settings that are added to the recipe's, and remove nothing.
_ADDED = ("parameters", "tensors")


def lay_over(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's data with settings, by their Python names, at the places that `KEYS` gives.

    A part of the data may be a mapping or one of the recipe's models. Other names are ignored.

    Raises:
        RecipeError: a setting names an unknown expert, or a form is unknown.
    """
    data = dict(recipe)
    for name, value in settings.items():
        match KEYS.get(name, "").split("."):
            case [""]:
                pass
            case ["experts", _, key]:
                data["experts"] = _of_experts(name, data["experts"], key, value)
            case [section, key]:
                given = output_as(value) if name == "form" else {key: value}
                data[section] = {**dict(data.get(section) or {}), **given}
            case ["allow"]:
                data[name] = list(dict.fromkeys((*data.get(name, ()), *value)))
            case [key]:
                data[key] = {**dict(data.get(key, {})), **value} if name in _ADDED else value
            case _:
                raise AssertionError(name)
    return data


def _of_experts(
    name: str, experts: Mapping[str, Any], key: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    found = dict(experts)
    for expert, value in given.items():
        if expert not in found:
            raise RecipeError(
                f"{Hint(name)} of '{expert}': there is no such expert."
                + did_you_mean(expert, found)
            )
        found[expert] = {**dict(found[expert]), key: value}
    return found
