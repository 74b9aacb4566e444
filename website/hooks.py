"""What the site has beside docs/: pages of other folders, and a reference made of the code.

A page keeps the links that it has in the repository. Those that lead out of docs/ are turned to where the
other page stands on the site; a link to what is not on the site is left as it is, and fails a strict build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = (
    *("SECURITY.md", "lab/README.md", "lab/docs/*.md", "lab/docs/images/*.svg"),
    *(f"lab/benchmarks/results/{names}" for names in ("**/*.md", "**/*.png", "*.json")),
)
# What a browser fetches by itself; links that a reader follows are no such thing.
_ELSEWHERE = r"""["']?(?:https?:)?//[^"')\s>]*"""
FOREIGN = {
    ".html": re.compile(
        rf"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc={_ELSEWHERE}"
        rf"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\shref={_ELSEWHERE}"""
    ),
    ".css": re.compile(rf"(?:@import\s*|url\(\s*){_ELSEWHERE}"),
    ".svg": re.compile(rf"url\({_ELSEWHERE}|<image\b[^>]*href={_ELSEWHERE}"),
}
RECIPE = "reference/recipe.md"
_KEYS = "The keys, one by one, are on the site, and in what `covmerge schema` prints."
INLINE, FLAG = re.compile(r"<code>[^<]*</code>"), re.compile(r"--[a-z][a-z-]*")
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures of other folders, and the generated ones."""
    for path in sorted({path for pattern in BESIDE for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Turn links between docs/ and other folders to the pages of the site; add the recipe's keys."""
    here = page.file.src_uri
    folder = PurePosixPath(_in_repository(here, files)).parent

    def turned(link: re.Match[str]) -> str:
        opening, target, anchor, closing = link.groups()
        if ":" in target:
            return link[0]
        # Of two equal headings GitHub calls the second -1, and Markdown's table of contents _1.
        anchor = re.sub(r"-(\d)$", r"_\1", anchor or "")
        if target:
            place = _on_site(normpath(f"{folder}/{target}"))
            target = relpath(place, PurePosixPath(here).parent.as_posix())
        return f"{opening}{target}{anchor}{closing}"

    text = LINK.sub(turned, markdown)
    return text.replace(_KEYS, recipe()) if here == RECIPE else text


def on_page_content(html: str, **_: Any) -> str:
    """Keep flags on one line: a browser would break behind their hyphens."""

    def kept(code: re.Match[str]) -> str:
        return FLAG.sub(r'<span class="flag">\g<0></span>', code[0])

    return INLINE.sub(kept, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would load anything from elsewhere."""
    for path in sorted(Path(config.site_dir).rglob("*.*")):
        pattern = FOREIGN.get(path.suffix)
        found = pattern.search(path.read_text("utf-8")) if pattern else None
        if found:
            raise PluginError(f"{path} would load {found[0]!r} from elsewhere")


def _in_repository(name: str, files: Files) -> str:
    file = files.get_file_from_path(name)
    source = file.abs_src_path if file is not None else None
    return Path(source).relative_to(ROOT).as_posix() if source else f"docs/{name}"


def _on_site(name: str) -> str:
    return "index.md" if name == "README.md" else name.removeprefix("docs/")


def command_line() -> str:
    """Return the page of all commands, as typer documents them."""
    import typer
    import typer.core
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from covmerge.front.cli import app

    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    context = typer.Context(command, info_name="covmerge")
    text = get_docs_for_click(obj=command, ctx=context, name="covmerge")
    lines: list[str] = []
    for line in text.splitlines():
        # typer cuts what a command is for; its own section has all of it.
        listed = re.fullmatch(r"\* `([a-z-]+)`: .*", line)
        listed_command = command.get_command(context, listed[1]) if listed else None
        if listed and listed_command:
            purpose = listed_command.get_short_help_str(limit=500)
            line = f"* [`{listed[1]}`](#covmerge-{listed[1]}): {purpose}"
        # A command that a help text shows stands alone in its paragraph.
        example = re.fullmatch(r"covmerge [a-z].*", line)
        lines.append(f"```sh\n{line}\n```" if example else line)
    body = "\n".join(lines).replace("```console", "```text").replace("# `covmerge`", INTRODUCTION)
    return body + "\n"


INTRODUCTION = """# Command line

All commands, as `covmerge COMMAND --help` prints them. `bench`, `convert`, `evaluate`, `reproduce`
and `study` come with `pip install covmerge-lab`.
"""


def recipe() -> str:
    """Return the sections of the recipe's keys, by its JSON Schema."""
    schema = json.loads((ROOT / "src/covmerge/plan/recipe/schema.json").read_text("utf-8"))
    parts = _keys("recipe", schema)
    for name, part in schema["$defs"].items():
        if "properties" in part:
            parts += _keys(name, part)
        else:
            parts += [f"## {name}", "", part["description"].split("\n")[0], "", _kind(part), ""]
    return "\n".join(parts) + "\n"


def _keys(name: str, part: dict[str, Any]) -> list[str]:
    """Return a section with a table of the keys of one object."""
    title = "The keys of a recipe" if name == "recipe" else name
    needed = part.get("required", [])
    lines = [f"## {title}", "", part.get("description", "").split("\n")[0], ""]
    lines += ["| key | what it may be | |", "|---|---|---|"]
    for key, value in part["properties"].items():
        what = value.get("description", "").replace("|", "\\|").replace("\n", " ")
        must = " (required)" if key in needed else ""
        lines.append(f"| `{key}`{must} | {_kind(value)} | {what} |")
    return [*lines, ""]


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    several = value.get("anyOf") or value.get("oneOf")
    if several:
        return " or ".join(dict.fromkeys(_kind(one) for one in several))
    kind = value.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(value.get('items', {}))}"
    return {"object": "mapping", "null": "nothing"}.get(kind, str(kind))
