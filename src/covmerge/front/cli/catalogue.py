"""The full description of a method from its registration, as data and as Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from covmerge.base.text import as_written

if TYPE_CHECKING:
    from covmerge.maths.methods import Method
    from covmerge.maths.methods.registry import Laws
    from covmerge.maths.registry import Declared, Parameter
    from covmerge.maths.registry import Table as Registry
    from covmerge.maths.steps import Step

_DEPARTS = "Departs from the paper:"
_UNITS = {
    "element": "tensors of any shape, element by element",
    "row": "tensors of any shape, row by row",
    "tensor": "tensors of any shape, each as a whole",
    "matrix": "matrices (d_out, d_in) of linear layers",
}
_OTHERS = {"average": "other tensors are averaged", "base": "other tensors stay the base's"}
_DATA = {
    "none": "none",
    "gram": "Gram matrices of the layers' inputs",
    "fisher": "diagonal Fisher information",
}
_ADAPTERS = {
    "both": "exact on their factors",
    "outputs": "exact in a basis of their outputs",
    "inputs": "exact in a basis of their inputs",
    "none": "multiplied out",
}
# The costs are stated for the widest layer of ViT-B/16, eight experts, float32.
_D_OUT, _D_IN, _EXPERTS = 768, 3072, 8


def page(method: Method) -> dict[str, Any]:
    """Return the full description of a method, as plain JSON."""
    from covmerge.maths.methods import registry

    command, recipe = _examples(method)
    cost = method.cost(_D_OUT, _D_IN, _EXPERTS, 4)
    return {
        **_declared(method, registry),
        "tensors": _tensors(method),
        "takes_any_shape": method.takes_any_shape,
        "data": _DATA[method.data],
        "published_tuning": method.published_tuning,
        "seeded": method.seeded,
        "writes_masks": method.writes_masks,
        "cost": {
            "shape": [_D_OUT, _D_IN],
            "experts": _EXPERTS,
            "flops": cost.flops,
            "workspace": cost.workspace,
        },
        "parameters": [
            {
                **_said(parameter),
                "family_defaults": {
                    family: defaults[parameter.name]
                    for family, defaults in method.family_defaults.items()
                    if parameter.name in defaults
                },
            }
            for parameter in method.parameters
        ],
        "laws": {**_laws(method.laws), "replicas": method.laws.replicas_text},
        "looks_at_base": method.base_norm,
        "command": command,
        "recipe": recipe,
    }


def step_page(step: Step) -> dict[str, Any]:
    """Return the full description of a step, as plain JSON."""
    from covmerge.maths.steps import registry

    shown = next((p for p in step.parameters if p.default is not None), None)
    given = "" if shown is None else f": {{{shown.name}: {as_written(shown.default)}}}"
    return {
        **_declared(step, registry),
        "when": step.when,
        "tensors": _UNITS[step.unit],
        "adapters": _ADAPTERS[step.factored],
        "parameters": list(map(_said, step.parameters)),
        "laws": _laws(step.laws),
        "command": f"covmerge merge --base BASE --expert a=A --expert b=B --{step.when} {step.name} OUT",
        "recipe": f"{step.when}: [{step.name if shown is None else f'{{{step.name}{given}}}'}]",
    }


def _declared(declared: Method | Step, registry: Registry[Any]) -> dict[str, Any]:
    """Return the fields that the pages of a method and of a step share."""
    reference, origin = declared.reference, registry.origin(declared.name)
    return {
        "name": declared.name,
        "summary": declared.summary,
        "equation": declared.equation,
        "details": _details(declared),
        "reference": None if reference is None else asdict(reference),
        "departs": _departures(declared),
        "from": None if origin is None else str(origin),
    }


def _said(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "allowed": parameter.annotation,
        "default": parameter.default,
        "description": parameter.description,
    }


def law_texts(
    laws: Mapping[str, bool | None], *, looks_at_base: bool = False
) -> list[tuple[str, str]]:
    """Return a method's laws as text; `looks_at_base`: it depends on the norm of the base's weights."""
    with_base = ", where the base's weights are times s too" if looks_at_base else ""
    labels = {
        "order_invariant": ("order of experts", "changes nothing", "changes the result"),
        "scale_equivariant": (
            "updates times s",
            f"give the merged update times s{with_base}",
            "do not give the merged update times s: the absolute scale matters",
        ),
        "rotation_equivariant": (
            "rotations",
            "of all updates rotate the merged update",
            "of all updates change the result: the axes matter",
        ),
    }
    return [
        (label, "nothing is promised" if laws[law] is None else yes if laws[law] else no)
        for law, (label, yes, no) in labels.items()
    ]


_LAWS = ("order_invariant", "scale_equivariant", "rotation_equivariant")


def _laws(laws: Laws) -> dict[str, bool | None]:
    return {law: getattr(laws, law) for law in _LAWS}


def _tensors(method: Method) -> str:
    """Return which tensors a method merges, and what happens to the others."""
    defaults = {parameter.name: parameter.default for parameter in method.parameters}
    text = _UNITS[method.unit_for(defaults)]
    if method.global_pass is not None:
        text += ", after a pass over all of them"
    if method.sees == "weights":
        text += "; it sees the weights themselves, not updates"
    if method.experts_text:
        text += f"; of {method.experts_text}"
    return text if method.takes_any_shape else f"{text}; {_OTHERS[method.others]}"


def _details(method: Declared) -> list[str]:
    """Return the paragraphs of the kernel's docstring between its first line and its arguments."""
    paragraphs = (inspect.getdoc(method.kernel) or "").split("\n\n")[1:]
    sections = ("Args:", "Returns:", "Raises:", "Example:", _DEPARTS)
    ends = (n for n, text in enumerate(paragraphs) if text.startswith(sections))
    return paragraphs[: next(ends, len(paragraphs))]


def _departures(method: Declared) -> str:
    """Return the paragraph of the kernel's docstring on departures from the paper; "" if there is none."""
    paragraphs = (inspect.getdoc(method.kernel) or "").split("\n\n")
    paragraph = next((text for text in paragraphs if text.startswith(_DEPARTS)), "")
    return " ".join(paragraph.removeprefix(_DEPARTS).split())


def _examples(method: Method) -> tuple[str, str]:
    """Return an example command and recipe, with one parameter if a parameter has a default."""
    shown = next((p for p in method.parameters if p.default is not None), None)
    experts = "ab"[: method.experts[1] or 2]
    command = " ".join(
        ["covmerge merge --base BASE", *(f"--expert {e}={e.upper()}" for e in experts)]
    )
    if method.data != "none":
        command += " --stats a=A.covstats.safetensors --stats b=B.covstats.safetensors"
    command += f" --method {method.name}"
    recipe = f"method: {method.name}"
    if shown is not None:
        value = as_written(shown.default)
        command += f" --set {shown.name}={value}"
        recipe += f"\nparameters: {{{shown.name}: {value}}}"
    return f"{command} OUT", recipe


def markdown(
    methods: Iterable[Method], steps: Iterable[Step], absent: Iterable[tuple[str, str]]
) -> str:
    """Return the content of docs/methods.md."""
    pages = [page(method) for method in methods]
    around = [step_page(step) for step in steps]
    anchor = anchors([each["name"] for each in (*pages, *around)])
    looking = ", ".join(f"`{each['name']}`" for each in pages if each["looks_at_base"])
    lines = [
        "# Methods",
        "",
        "Generated from the code by `covmerge methods --markdown`; CI checks that it is current.",
        "",
        "Δ_t = W_t − W_0 `(d_out, d_in)` is the update of expert t, T the number of experts, w_t an",
        "expert's weight (1 is neutral). An equivariance is kept where the cell says yes: *order* of",
        "the experts changes nothing; *scale*: updates times s give the merged update times s (where",
        f"the length of the base's weights counts too, in {looking}: where these are times s);",
        "*rotation*: QΔ_tPᵀ gives Q(merged update)Pᵀ. Cost is by the method's own model, for one",
        f"{_D_OUT} × {_D_IN} matrix of {_EXPERTS} experts in float32: floating-point operations (a",
        "float64 one counts as two), and memory beside the updates and the result.",
        "",
        *_methods_table(pages, anchor),
        "",
        "Data: what the method needs to know of the experts' data. *none (tuned)*: nothing, but the",
        "published numbers chose a parameter on labelled data; its page says which.",
        "",
        "## Steps around a method",
        "",
        "A recipe names steps before its method (`before: [...]`) and after it (`after: [...]`), in",
        "order, each by its name or as `{name: {parameters}}`; a rule with a method of its own has steps",
        "of its own. They go where the method goes: what is averaged or kept by another rule is left",
        "alone. A step before a method makes other updates of the experts'; one after it makes another",
        "merged update of the method's, and is given the experts' updates as they came.",
        "",
        *_steps_table(around, anchor),
        "",
        "What a step needs the whole needs. An elementwise method with a step that works on whole",
        "tensors reads whole tensors, and takes the memory of them. Steps that need matrices are left out",
        "where an elementwise method merges what is none, such as norms and biases; the rule of each",
        "tensor, in `--dry-run` and `covmerge.json`, names the steps that it went through. A threshold",
        "over the whole model is one of the updates as the steps before the method made them. Adapters",
        "are merged on their factors only if method and steps are exact there; otherwise they are",
        "multiplied out, and a merge to an adapter needs a `rank`. Methods that write masks take no steps,",
        "and `fisher`, whose data lies as tensors are stored, none that need matrices.",
        "",
        "## Not here",
        "",
        *(f"- `{name}`: {why}" for name, why in absent),
    ]
    for each in pages:
        lines += ["", *_section(each)]
    for each in around:
        lines += ["", *_step_section(each)]
    return "\n".join(lines) + "\n"


def _methods_table(pages: Iterable[dict[str, Any]], anchor: Mapping[str, str]) -> Iterator[str]:
    yield "| method | data | order | scale | rotation | cost | tensors | defaults | paper |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for each in pages:
        paper = each["reference"]
        tuned = " (tuned)" if each["published_tuning"] else ""
        cells = [
            f"[`{each['name']}`](#{anchor[each['name']]})",
            each["data"] + tuned,
            *(_yes_or_no(each["laws"][law]) for law in _LAWS),
            _cost(each),
            each["tensors"],
            _defaults(each),
            "" if paper is None else f"[{paper['venue']}](https://arxiv.org/abs/{paper['arxiv']})",
        ]
        yield f"| {' | '.join(cells)} |"


def _steps_table(pages: Iterable[dict[str, Any]], anchor: Mapping[str, str]) -> Iterator[str]:
    yield "| step | when | order | scale | rotation | works on | adapters | defaults |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in pages:
        cells = [
            f"[`{each['name']}`](#{anchor[each['name']]})",
            each["when"],
            *map(_yes_or_no, each["laws"].values()),
            each["tensors"],
            each["adapters"],
            _defaults(each),
        ]
        yield f"| {' | '.join(cells)} |"


def _yes_or_no(holds: bool | None) -> str:
    return "not said" if holds is None else "yes" if holds else "no"


def _heading(each: dict[str, Any]) -> Iterator[str]:
    yield f"## {each['name']}"
    yield ""
    yield each["summary"]
    yield ""
    if each["equation"]:
        yield f"    {each['equation']}"
        yield ""
    for paragraph in each["details"]:
        # A paragraph that begins with a formula is indented, because Markdown would join its lines.
        formula = " = " in paragraph.split("\n", 1)[0]
        yield from ([f"    {line}" for line in paragraph.splitlines()] if formula else [paragraph])
        yield ""
    reference = each["reference"]
    if reference is not None:
        yield (
            f"- Paper: {reference['title']}. {reference['venue']}, "
            f"[arXiv:{reference['arxiv']}](https://arxiv.org/abs/{reference['arxiv']}), "
            f"{reference['equations']}."
        )
    if each["departs"]:
        yield f"- Departs from it: {each['departs']}"
    if each["from"] is not None:
        yield f"- From {each['from']}."


def _ending(each: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the parameter table and of the example command."""
    if each["parameters"]:
        yield ""
        yield "| parameter | allowed | default | meaning |"
        yield "|---|---|---|---|"
        for parameter in each["parameters"]:
            name, *cells = parameter_row(parameter)
            escaped = [cell.replace("|", "\\|") for cell in (f"`{name}`", *cells)]
            yield f"| {' | '.join(escaped)} |"
    yield from ("", "```sh", each["command"], "```")


def _step_section(each: dict[str, Any]) -> Iterator[str]:
    yield from _heading(each)
    yield f"- A step {each['when']} a method; works on {each['tensors']}."
    yield f"- Adapters: {each['adapters']}."
    yield from _ending(each)


def _section(each: dict[str, Any]) -> Iterator[str]:
    laws = each["laws"]
    yield from _heading(each)
    if each["published_tuning"]:
        yield f"- Tuned in the published numbers: {each['published_tuning']}."
    yield f"- Merges {each['tensors']}."
    yield f"- Data: {each['data']}."
    yield f"- Equal experts give {laws['replicas']}."
    if each["seeded"]:
        yield "- Random: the same for one seed, tensor name and expert, in any order, by any blocks."
    if each["writes_masks"]:
        yield "- Writes a mask per expert and its factor under `masks/`; `covmerge.load_expert` reads them."
    yield f"- Cost of one {_D_OUT} × {_D_IN} matrix of {_EXPERTS} experts: {_cost(each)}."
    yield from _ending(each)


def parameter_row(parameter: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return a parameter's row of a page: its name, allowed values, default and meaning."""
    families = parameter.get("family_defaults", {}).items()
    special = ", ".join(f"{family}: {as_written(value)}" for family, value in families)
    return (
        parameter["name"],
        parameter["allowed"],
        as_written(parameter["default"]),
        parameter["description"] + (f" ({special})" if special else ""),
    )


def _defaults(each: dict[str, Any]) -> str:
    given = (p for p in each["parameters"] if p["default"] is not None)
    return ", ".join(f"{p['name']} {as_written(p['default'])}" for p in given) or "–"


def _cost(each: dict[str, Any]) -> str:
    cost = each["cost"]
    return f"{cost['flops'] / 1e9:.3g} GFLOP, {cost['workspace'] / 1e6:.3g} MB"


def anchors(names: Iterable[str]) -> dict[str, str]:
    """Return the anchors that GitHub gives to headings: without signs, and numbered if they repeat.

    Example:
        >>> anchors(["a", "a++"])
        {'a': 'a', 'a++': 'a-1'}
    """
    found: dict[str, str] = {}
    for name in names:
        plain = "".join(c for c in name if c.isalnum() or c in "_-")
        times = sum(found[other].partition("-")[0] == plain for other in found)
        found[name] = f"{plain}-{times}" if times else plain
    return found
