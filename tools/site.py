"""Hooks of mkdocs, named in mkdocs.yml: pages of the site that are not in docs/.

README, CHANGELOG and CONTRIBUTING are at the top of the checkout, but mkdocs reads docs/ only. So they are
added as pages, and links between the two places are rewritten. The style sheet for Pygments is generated, so
that the site loads nothing from other hosts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter
from tools import reference

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: parts of the checkout that pages mention and that are not on the site
_ELSEWHERE = ("examples/", "benchmarks/", "tests/", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the top-level pages, the API reference, and the style sheet for code."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=from_top((ROOT / name).read_text())))
    for page, content in reference.pages().items():
        files.append(File.generated(config, page, content=content))
    style = HtmlFormatter(style="default").get_style_defs(".codehilite")
    files.append(File.generated(config, "code.css", content=style))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links such as ``../README.md`` to the pages of the site."""
    for name, page in TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return _without_links_elsewhere(markdown)


def from_top(markdown: str) -> str:
    """Rewrite a top-level page as a page of docs/."""
    markdown = markdown.replace("](docs/", "](")
    for name, page in TOP.items():
        markdown = markdown.replace(f"]({name}", f"]({page}")
    return _without_links_elsewhere(markdown)


def _without_links_elsewhere(markdown: str) -> str:
    """Replace links to sources by their text as code, which names the file in a checkout."""
    elsewhere = "|".join(map(re.escape, _ELSEWHERE))
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)?(?:{elsewhere})[^)]*\)", r"`\1`", markdown)
