"""Notebooks of docs/ as pages: cells and the outputs that are kept in them. Nothing is run."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, beside the notebook itself."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb") and file.abs_src_path:
            notebook = json.loads(Path(file.abs_src_path).read_text("utf-8"))
            name = file.src_uri.removesuffix(".ipynb")
            pictures: dict[str, bytes] = {}
            text = page(notebook, Path(name).name, pictures)
            files.append(File.generated(config, f"{name}.md", content=text))
            for picture, content in pictures.items():
                place = f"{Path(name).parent.as_posix()}/{picture}"
                files.append(File.generated(config, place, content=content))
    return files


def page(notebook: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """Return a notebook as Markdown.

    Args:
        notebook: of nbformat 4.
        name: of its file.
        pictures: gets the pictures that it shows, by the name of their files.
    """
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(_output(output, name, pictures))
    parts.append(f"[The notebook itself]({name}.ipynb)")
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">\n{"".join(data["text/html"])}\n</div>'
    if "image/png" in data:
        picture = f"{name}-{len(pictures)}.png"
        pictures[picture] = b64decode("".join(data["image/png"]))
        return f"![what the cell above shows]({picture})"
    text = "".join(output.get("text", data.get("text/plain", ""))).strip("\n")
    return f"```text\n{text}\n```" if text else ""
