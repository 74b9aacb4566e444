"""The recipe: everything that determines a merge, as data.

The fields' descriptions are the reference of the format; `json_schema` passes them to editors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from torch import nn

from covmerge.base.errors import InputError, RecipeError, did_you_mean
from covmerge.base.findings import FAULTS, fault_name
from covmerge.base.identifiers import EXPERT_NAME, EXPERT_NAME_LENGTH, expert_name
from covmerge.base.settings import TAKEN, Hint
from covmerge.base.sizes import parse_size
from covmerge.base.text import shown
from covmerge.base.types import Role
from covmerge.files.checkpoints.base import LoraForm
from covmerge.files.quantised.writing.layouts import QUANTISED
from covmerge.files.stores.address import address_of
from covmerge.plan.recipe.parts import StrictModel, read_call
from covmerge.plan.recipe.sections import TEMPLATES, Mixture, Run, TokenizerRules, check_template
from covmerge.plan.recipe.varied import SEARCH_SCHEMA, VARIED_SCHEMA, check_varied, is_varied


def _source(source: str) -> str:
    if not source.isprintable() or source.strip() != source:
        try:
            address_of(source)
        except InputError as error:  # whose message contains no secret
            raise ValueError(str(error)) from None
        raise ValueError(f"{source!r} has spaces around it or control characters in it")
    return source


def _parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    # A recipe is recorded as JSON beside the merged model, and JSON has no NaN and no objects.
    _check_json(parameters, "")
    for name, value in parameters.items():
        try:
            check_varied(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return parameters


def _written(source: Any) -> Any:
    """Return a source as a recipe stores it: a path as text; a model in memory is refused."""
    if isinstance(source, nn.Module):
        raise ValueError(
            f"it is a {type(source).__name__} in memory, and a recipe names files: save it "
            "(`model.save_pretrained(FOLDER)`), and name that folder"
        )
    path = cast("os.PathLike[str]", source)
    return os.fspath(path) if isinstance(source, os.PathLike) else source


def _check_json(value: object, path: str) -> None:
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not text")
            _check_json(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("list[object]", value)):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {shown(value)}; numbers must be finite")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"{path} is of type {type(value).__name__}; use numbers, text or lists")


def _with_parameters(data: Any) -> Any:
    """Return a recipe's or rule's data with the parameters in its method's text moved to `parameters`."""
    given = cast("dict[str, Any]", data)
    if not isinstance(data, dict) or not isinstance(given.get("method"), str):
        return given
    stated: object = given.get("parameters") or {}
    if "(" not in given["method"] or not isinstance(stated, dict):
        return given
    name, parameters = _read_call(given["method"], cast("dict[str, Any]", stated))
    return {**given, "method": name, "parameters": parameters}


def _read_call(text: str, beside: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    try:
        return read_call(text, beside)
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except RecipeError as error:
        # Pydantic adds the key path only to a ValueError.
        raise ValueError(str(error)) from None


def _weights(form: dict[str, Any]) -> dict[str, Any]:
    _check_json(form, "")
    check_varied(form, _check_weight)
    return form


_MOST_LAYERS = 10_000  # of all slices together; each layer is stored separately


def subtract() -> str:
    """Return advice on how to subtract an expert."""
    method, each = "generalized_task_arithmetic", {"weight": [1.0, -1.0]}
    return (
        f"to subtract an expert pass {Hint('method', method)} and {Hint('parameters', each)}, a number for "
        "each expert in their order"
    )


def _check_weight(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        negative = isinstance(value, int | float) and value < 0
        hint = f"; {subtract()}" if negative else ""
        raise ValueError(
            f"the weight {shown(value)} is not a number of at least 0 (0: no part){hint}"
        )


def _layers(layers: tuple[int, int]) -> tuple[int, int]:
    if layers[0] >= layers[1]:
        raise ValueError(f"{list(layers)} has no layers; write [first, end), such as [0, 8]")
    return layers


def _step(entry: Any) -> Any:
    if isinstance(entry, str):
        return dict([_read_call(entry)])
    if not isinstance(entry, dict) or len(cast("dict[object, object]", entry)) != 1:
        found = cast("object", entry)
        raise ValueError(
            f"{shown(found)} is not a step: write its name, or {{name: {{parameters}}}}"
        )
    return cast("dict[object, object]", entry)


Source = Annotated[str, BeforeValidator(_written), Field(min_length=1), AfterValidator(_source)]
MethodName = Annotated[str, Field(min_length=1)]
Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]
# The tags are in brackets so that `explain` can remove them from the path.
Weight = Annotated[
    Annotated[float, Field(gt=0.0, strict=True, allow_inf_nan=False), Tag("[number]")]
    | Annotated[
        dict[str, Any],
        AfterValidator(_weights),
        WithJsonSchema(VARIED_SCHEMA),
        Tag("[varied]"),
    ],
    Discriminator(lambda value: "[varied]" if is_varied(value) else "[number]"),
]
StepEntry = Annotated[
    dict[Annotated[str, Field(min_length=1)], Parameters],
    BeforeValidator(_step),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 1,
                    "additionalProperties": {"type": "object"},
                },
            ]
        }
    ),
]
Steps = Annotated[tuple[StepEntry, ...], Field(max_length=20)]
ChatTemplate = Annotated[str, Field(min_length=1, max_length=1_000_000)]
Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "examples": ["5GB", "512MiB"]},
            ]
        }
    ),
]


class Expert(StrictModel):
    """One fine-tuned model of the base."""

    source: Source = Field(
        description="Path of a checkpoint (relative to the recipe file), its address (s3, gs, "
        "https) or org/name@revision."
    )
    weight: Weight = Field(
        default=1.0,
        description="Share of this expert in the merge, above 0; 1 is neutral. Among several experts it "
        "counts beside the others', and many methods divide by the sum. That of an expert alone is the "
        "share of its merged update: 0.5 gives the base and half of it. It may differ from tensor to "
        "tensor: `{by_depth: [...]}`, `{by_name: [...]}`; 0 there is no part in it. To subtract an expert, "
        "merge by `generalized_task_arithmetic(weight=[1, -1])`, a number for each in their order.",
    )
    statistics: Source | None = Field(
        default=None,
        description="Statistics file of this expert, written by `covmerge collect` (path relative "
        "to the recipe file); for methods that use data.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        written = _written(value)
        return {"source": written} if isinstance(written, str) else written


LayerRange = Annotated[
    tuple[Annotated[int, Field(ge=0, strict=True)], Annotated[int, Field(ge=1, strict=True)]],
    AfterValidator(_layers),
]


class Slice(StrictModel):
    """Layers of the output that are taken, or merged, from the same places of its sources."""

    experts: dict[str, LayerRange] = Field(
        min_length=1,
        description="The experts that take part, each with its layers: [first, end), as many of each.",
    )
    base: LayerRange | None = Field(
        default=None,
        description="The base's layers; by default those of the first expert of the slice.",
    )
    parameters: Parameters = Field(
        default_factory=dict[str, Any],
        description="Parameters of the method in this slice, over the recipe's. Depth counts its layers.",
    )

    @model_validator(mode="after")
    def _as_many_of_each(self) -> Slice:
        ranges = {**self.experts, **({} if self.base is None else {"base": self.base})}
        if len({end - first for first, end in ranges.values()}) > 1:
            counts = ", ".join(f"{name} {end - first}" for name, (first, end) in ranges.items())
            raise ValueError(f"its sources have different numbers of layers ({counts})")
        return self

    @property
    def length(self) -> int:
        """Number of layers of the output."""
        first, end = next(iter(self.experts.values()))
        return end - first

    def layers(self, expert: str | None) -> range:
        """Return the layers of an expert or of the base; if it has none here, the first expert's."""
        bounds = self.base if expert is None else self.experts.get(expert)
        return range(*(bounds or next(iter(self.experts.values()))))


class TensorRules(StrictModel):
    """What happens to tensors by kind, unless one of the `rules` says otherwise."""

    embeddings: Literal["auto", "average", "method", "base"] = Field(
        default="auto",
        description="Token, position and type embeddings. `auto` is `method` for methods that take "
        "tensors of any shape, and for the others what they do with tensors that are not matrices "
        "(mostly `average`): an embedding's input is one-hot, so the Gram matrix of its update says "
        "nothing about its input covariance. `base` keeps the base's rows.",
    )
    output_head: Literal["auto", "average", "method", "base"] = Field(
        default="auto",
        description="Output embedding of a language model. `auto` is as for embeddings: it mirrors "
        "the input embedding and is the largest matrix of most models. A tensor tied to the input "
        "embedding follows `embeddings`.",
    )
    convolutions: Literal["auto", "average", "method", "base"] = Field(
        default="auto",
        description="Convolution kernels. `auto` is as for embeddings, which is what the papers do "
        "with tensors that are not matrices; `method` merges the kernel unfolded to "
        "(c_out, c_in * window).",
    )
    fused: Literal["whole", "split"] = Field(
        default="whole",
        description="Fused projections. `whole` merges query, key and value as one matrix, as they "
        "share one input; `split` merges each by itself, as if they were stored apart.",
    )
    conv1d: Literal["oriented", "stored"] = Field(
        default="oriented",
        description="GPT-2's Conv1D weights, stored as (d_in, d_out). `oriented` transposes them "
        "to (d_out, d_in), so that a method sees the layer's input; `stored` takes them as they "
        "lie, which reproduces the authors' code.",
    )
    missing: Literal["error", "base", "present"] = Field(
        default="error",
        description="A tensor of the base that an expert lacks. `error` stops, because it mostly "
        "means a wrong expert; `base` counts that expert as unchanged; `present` merges over the "
        "experts that have the tensor.",
    )
    extra: Literal["error", "ignore"] = Field(
        default="error",
        description="A tensor in an expert's backbone that the base lacks. `error` stops; `ignore` "
        "leaves it out and reports it. Task heads outside the backbone are always kept per expert.",
    )
    vocabulary: Literal["error", "base"] = Field(
        default="error",
        description="Embeddings whose number of rows differs from the base's. `error` stops, "
        "because rows that do not mean the same token must not be merged; `base` merges the rows "
        "that the base has and reports the others.",
    )
    few_rows: Literal["error", "allow"] = Field(
        default="error",
        description="A layer whose measured Gram matrix comes from fewer inputs than it has "
        "dimensions. `error` stops, because the matrix is singular; `allow` merges all the same.",
    )


class Rule(StrictModel):
    """An exception for some tensors: a condition (`match`, `role` or both) and one effect."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["match"]}, {"required": ["role"]}],
            "oneOf": [{"required": ["method"]}, {"required": ["use"]}],
            "dependentRequired": {key: ["method"] for key in ("parameters", "before", "after")},
        }
    )

    match: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Pattern for the whole tensor name, such as '*.mlp.*': `*` is any text, `?` "
        "one character, `[..]` one of several. Case matters. Put it in quotes: YAML gives a "
        "leading `*` another meaning.",
    )
    role: Role | None = Field(default=None, description="What the tensor is in its model.")
    method: MethodName | None = Field(
        default=None, description="Merge with this method; `covmerge methods` lists the names."
    )
    parameters: Parameters = Field(
        default_factory=dict[str, Any],
        description="Parameters of this rule's method. Those of the recipe are not inherited.",
    )
    before: Steps = Field(
        default=(),
        description="Steps before this rule's method. Those of the recipe are not inherited.",
    )
    after: Steps = Field(
        default=(),
        description="Steps after this rule's method. Those of the recipe are not inherited.",
    )
    use: Literal["method", "average", "base", "head"] | None = Field(
        default=None,
        description="`method`: the recipe's method and parameters. `average`: the weighted mean of "
        "the experts. `base`: unchanged. `head`: kept per expert, as task heads are.",
    )

    @model_validator(mode="before")
    @classmethod
    def _called(cls, data: Any) -> Any:
        return _with_parameters(data)

    @model_validator(mode="after")
    def _one_condition_and_one_effect(self) -> Rule:
        if self.match is None and self.role is None:
            raise ValueError("the rule has no condition; add 'match' or 'role'")
        if self.method is None and self.use is None:
            raise ValueError("the rule has no effect; add 'method' or 'use'")
        if self.method is not None and self.use is not None:
            raise ValueError("the rule has two effects; remove 'method' or 'use'")
        if self.parameters and self.method is None:
            raise ValueError("'parameters' belong to a 'method', and the rule has none")
        if (self.before or self.after) and self.method is None:
            raise ValueError(
                "steps ('before', 'after') belong to a 'method', and the rule has none"
            )
        return self

    def applies_to(self, name: str, role: Role) -> bool:
        """Return whether a tensor of this name and role fulfils the rule's condition.

        Example:
            >>> Rule(match="*.mlp.*", use="base").applies_to("h.0.mlp.c_fc.weight", Role.CONV1D)
            True
        """
        matches = self.match is None or fnmatchcase(name, self.match)
        return matches and self.role in (None, role)


_SHARD_SIZE = 5_000_000_000
if TYPE_CHECKING:
    Quantise = str
else:
    Quantise = Literal[QUANTISED]


class Output(StrictModel):
    """The files of the merged model."""

    format: Literal["model", "adapter"] = Field(
        default="model",
        description="`model` writes merged weights. `adapter` writes one adapter of the base, for "
        "PEFT: of adapters exactly, of full models at a `rank`.",
    )
    names: LoraForm | None = Field(
        default=None,
        description="Whose names a merged adapter has (`format: adapter`): `peft` writes a folder that "
        "PEFT loads; `kohya` and `diffusers` one file of a part of a diffusion model, as their tools write "
        "it. By default those of the experts, where all of them are files of one form, else PEFT's.",
    )
    rank: int | None = Field(
        default=None,
        ge=1,
        description="Largest rank of a merged adapter (`format: adapter`); what the truncation loses "
        "is reported. By default it is exact, of the adapters' ranks together.",
    )
    whole: bool = Field(
        default=False,
        description="Whether an adapter (`format: adapter`) also holds, as they are, the tensors "
        "that full models changed and that have no factors: norms, biases, tied embeddings. What "
        "adapters trained whole is always kept.",
    )
    dtype: Literal["base", "float32", "float16", "bfloat16", "float64"] = Field(
        default="base",
        description="Stored dtype. `base` gives every tensor the dtype it has in the base; the "
        "rounding loss is reported.",
    )
    shard_size: Size = Field(
        default=_SHARD_SIZE,
        description="Largest size of one file, in bytes or as '5GB' or '512MiB'. A larger tensor "
        "gets a file of its own. An adapter is one file, and has none.",
    )
    quantise: Quantise = Field(
        default="none",
        description="Quantised format of the weights of linear layers, each rounded to the nearest "
        "number; the loss by layer is reported. `same` is the base's own, tensor by tensor; "
        "docs/quantised.md describes the others. Heads, embeddings, and what a quantised base has plain, "
        "stay plain. `gguf` and its types write the base's GGUF file with other weights.",
    )
    keep: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        default=(),
        max_length=1000,
        description="Patterns of tensor names that stay plain (`quantise`), such as '*.down_proj.*' or "
        "'model.layers.0.*': for layers that lose much.",
    )

    @model_validator(mode="after")
    def _of_an_adapter(self) -> Output:
        if self.names and self.format != "adapter":
            raise ValueError("'names' belongs to 'format: adapter', and the output is a model")
        of_adapters = (
            Hint("rank", self.rank) if self.rank else Hint("whole") if self.whole else None
        )
        if of_adapters is not None and self.format != "adapter":
            raise ValueError(
                f"{of_adapters} belongs to {Hint('form', 'adapter')}, and the output is a model"
            )
        if self.format == "adapter" and self.quantise != "none":
            raise ValueError(
                f"{Hint('quantise', self.quantise)} belongs to {Hint('form', 'model')}: adapters are "
                "stored plain"
            )
        if self.dtype == "float64" and self.quantise != "none":
            raise ValueError(
                f"{Hint('quantise', self.quantise)} needs a dtype that clients compute in, and "
                f"float64 is none: pass {Hint('out_dtype', 'float32')}"
            )
        if self.keep and self.quantise == "none":
            raise ValueError(
                f"{Hint('keep')} belongs to {Hint('quantise')}, and the output is plain"
            )
        if self.format == "adapter" and self.shard_size != _SHARD_SIZE:
            raise ValueError(
                f"{Hint('shard_size')} belongs to {Hint('form', 'model')}: an adapter is one file"
            )
        return self


def output_as(form: str | None) -> dict[str, str]:
    """Return the keys of `output` that one word stands for, as after `--as`.

    Raises:
        RecipeError: the word is unknown.

    Example:
        >>> output_as("adapter"), output_as("kohya")
        ({'format': 'adapter'}, {'format': 'adapter', 'names': 'kohya'})
    """
    if form is None:
        return {}
    names = get_args(LoraForm)
    if form not in (forms := ("model", "adapter", *names)):
        raise RecipeError(f"{Hint('form')}: {form!r}: it is one of {', '.join(forms)}")
    return {"format": "adapter", "names": form} if form in names else {"format": form}


def _short_expert_form(schema: dict[str, Any]) -> None:
    """Change the schema so that editors accept `name: source` beside `name: {source: ..., weight: ...}`."""
    schema["propertyNames"] = {"pattern": f"^{EXPERT_NAME}$", "maxLength": EXPERT_NAME_LENGTH}
    schema["additionalProperties"] = {
        "anyOf": [{"type": "string", "minLength": 1}, schema["additionalProperties"]]
    }


class Recipe(StrictModel):
    """A covmerge recipe: a base, its experts, a method, and what to do with which tensor."""

    base: Source | None = Field(
        description="The model that every expert was fine-tuned from: path of a checkpoint "
        "(relative to the recipe file), address or org/name@revision. `null` for methods that merge the "
        "models themselves and need none: config, tokenizer and names are then the first expert's."
    )
    experts: dict[Annotated[str, AfterValidator(expert_name)], Expert] = Field(
        min_length=1,
        json_schema_extra=_short_expert_form,
        description="The models to merge, in order: name to source, or name to source and weight. "
        "A name is made of letters, digits, '.', '_' and '-', and is used in file names.",
    )
    method: MethodName = Field(
        default="",
        description="Merge method; `covmerge methods` lists the names. Parameters may stand beside it: "
        f"`ties(density=0.3)`. Without one it is {TAKEN}.",
    )
    parameters: Parameters = Field(
        default_factory=dict[str, Any],
        description="Parameters of the method; `covmerge methods NAME` lists them. A value may differ from "
        "tensor to tensor: `{by_depth: [0.2, 0.6]}` lies between these numbers by the depth of the "
        "tensor's layer, the first for the first layer and whatever lies outside the layers; `{by_name: "
        "[{match: '*.mlp.*', value: 0.5}, {value: 1.0}]}` is that of the first pattern that matches its "
        "whole name (`match` may be a list of patterns), and the method's default where none does.",
    )
    before: Steps = Field(
        default=(),
        description="Steps before the method, in order: what becomes of the updates first. "
        "`NAME(KEY=VALUE)`, or {name: {parameters}}; `covmerge methods` lists them.",
    )
    after: Steps = Field(
        default=(),
        description="Steps after the method, in order: what becomes of the merged update.",
    )
    slices: tuple[Slice, ...] = Field(
        default=(),
        max_length=1000,
        description="The output's layers, slice after slice, where they are not those of its sources. "
        "What lies before the layers (embeddings) is of the first slice, what lies behind of the last.",
    )
    moe: Mixture | None = Field(
        default=None,
        description="The experts become one mixture of experts: each one's MLP is a routed expert, bit for "
        "bit; method and rules decide on all other tensors, such as attention.",
    )
    tokenizer: TokenizerRules | None = Field(
        default=None,
        description="The output's vocabulary, where the models have different ones: embeddings and heads "
        "are then merged token by token. By default all have the base's.",
    )
    chat_template: ChatTemplate | None = Field(
        default=None,
        description="The output's chat template: Jinja, which covmerge never runs; a format's name "
        f"({', '.join(f'`{name}`' for name in TEMPLATES)}); `base` or an expert's name: that model's; "
        "`auto`: what most of the models have. By default the tokenizer's.",
    )
    tensors: TensorRules = Field(
        default_factory=TensorRules, description="What happens to tensors by kind."
    )
    rules: tuple[Rule, ...] = Field(
        default=(),
        max_length=1000,
        description="Exceptions by tensor name or role; the first that applies decides.",
    )
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description="Dtype of the computation."
    )
    allow: Annotated[
        tuple[str, ...], AfterValidator(lambda names: tuple(map(fault_name, names)))
    ] = Field(
        default=(),
        json_schema_extra={"items": {"enum": list(FAULTS)}},
        description="Faults of the experts that would stop the merge before anything is written, "
        f"because its result is mostly worthless: {', '.join(f'`{n}` ({w})' for n, w in FAULTS.items())}. "
        "Those that are named here are warnings.",
    )
    output: Output = Field(default_factory=Output, description="How the merged model is written.")

    @model_validator(mode="before")
    @classmethod
    def _called(cls, data: Any) -> Any:
        return _with_parameters(data)

    @field_validator("experts")
    @classmethod
    def _distinct_files(cls, experts: Mapping[str, Expert]) -> Mapping[str, Expert]:
        lowered: dict[str, str] = {}
        for name in experts:
            # Many file systems treat Code.safetensors and code.safetensors as the same file.
            other = lowered.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} differ only in case; rename one of them")
        return experts

    @model_validator(mode="after")
    def _slices_of_its_experts(self) -> Recipe:
        for number, piece in enumerate(self.slices):
            for name in piece.experts:
                if name not in self.experts:
                    hint = did_you_mean(name, self.experts)
                    raise ValueError(
                        f"slices[{number}] names '{name}', and there is no such expert.{hint}"
                    )
            if piece.base is not None and self.base is None:
                raise ValueError(
                    f"slices[{number}] has layers of the base, and the recipe has no base"
                )
        layers = sum(piece.length for piece in self.slices)
        if layers > _MOST_LAYERS:
            raise ValueError(
                f"the slices have {layers} layers together, and no model has more than {_MOST_LAYERS}"
            )
        used = {name for piece in self.slices for name in piece.experts}
        unused = [name for name in self.experts if self.slices and name not in used]
        if unused:
            raise ValueError(
                f"the expert '{unused[0]}' is in no slice: remove it, or give it layers"
            )
        if self.slices and self.output.format == "adapter":
            raise ValueError(
                f"'slices' make a model of its own, and {Hint('form', 'adapter')} updates the base"
            )
        if self.base is None and self.output.format == "adapter":
            raise ValueError(f"{Hint('form', 'adapter')} updates a base, and the recipe has none")
        return self

    @model_validator(mode="after")
    def _mixture_of_its_experts(self) -> Recipe:
        if self.moe is None:
            return self
        self.moe.check(self.experts)
        if self.base is None:
            raise ValueError(
                "'moe' takes what is no expert's from the base, and the recipe has none"
            )
        if self.output.format == "adapter":
            raise ValueError(
                f"'moe' makes a model of its own, and {Hint('form', 'adapter')} updates the base"
            )
        for key in ("slices", "tokenizer"):
            if getattr(self, key):
                raise ValueError(f"'moe' and '{key}' do not go together: merge by '{key}' first")
        return self

    @model_validator(mode="after")
    def _text_of_its_experts(self) -> Recipe:
        if self.tokenizer is not None:
            self.tokenizer.check(self.experts, base=self.base is not None)
        if self.chat_template is not None:
            check_template(self.chat_template, self.experts, base=self.base is not None)
        for key in ("tokenizer", "chat_template"):
            if getattr(self, key) is not None and self.output.format == "adapter":
                setting = Hint("tokenizer") if key == "tokenizer" else f"'{key}'"
                raise ValueError(
                    f"{setting} makes a model of its own, and {Hint('form', 'adapter')} updates the base: "
                    "leave out one of them"
                )
        return self


class WithRun(BaseModel):
    """A recipe that has a `run` in place of its experts."""

    model_config = ConfigDict(extra="allow")

    run: Run = Field(
        description="In place of `experts`: the last checkpoints of one training run, averaged. Without a "
        "`method`, full models are merged by `linear`, which needs no `base`, and adapters by `average`."
    )


def _let_search(schema: dict[str, Any]) -> None:
    """Change the schema so that editors accept a value marked for a search."""
    keywords = {k: schema.pop(k) for k in ("type", "minLength", "anyOf", "oneOf") if k in schema}
    schema["anyOf"] = [keywords, SEARCH_SCHEMA]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe, with a description of every key."""
    recipe, with_run = Recipe.model_json_schema(), WithRun.model_json_schema()
    needed = recipe.pop("required")
    recipe["oneOf"] = [{"required": needed}, {"required": with_run["required"]}]
    recipe["not"] = {"required": ["experts", *with_run["required"]]}
    recipe["properties"] |= with_run["properties"]
    parts = recipe["$defs"]
    _let_search(recipe["properties"]["method"])
    _let_search(parts["Rule"]["properties"]["method"])
    _let_search(parts["Expert"]["properties"]["weight"])
    recipe["$defs"] |= with_run["$defs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        # A name and not an address, so that nothing is fetched.
        "$id": "urn:covmerge:recipe",
        **recipe,
    }
