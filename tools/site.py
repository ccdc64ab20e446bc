"""Hooks of mkdocs (mkdocs.yml names this file): what the site has beside docs/.

README, CHANGELOG and CONTRIBUTING stand at the top of the checkout, where readers look for them, and mkdocs
takes pages from docs/ alone.  So they are added as pages, and links between the two places are rewritten.
Code is coloured by Pygments, whose style sheet is made here: the site asks no other host for anything.
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
#: parts of the checkout that pages name and the site has not
_ELSEWHERE = ("examples/", "benchmarks/", "tests/", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the checkout's top and the style sheet of code."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=from_top((ROOT / name).read_text())))
    for page, content in reference.pages().items():
        files.append(File.generated(config, page, content=content))
    style = HtmlFormatter(style="default").get_style_defs(".codehilite")
    files.append(File.generated(config, "code.css", content=style))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let ``../README.md`` lead to the page that it became."""
    for name, page in TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return _without_links_elsewhere(markdown)


def from_top(markdown: str) -> str:
    """A page of the checkout's top as it must read among those of docs/."""
    markdown = markdown.replace("](docs/", "](")
    for name, page in TOP.items():
        markdown = markdown.replace(f"]({name}", f"]({page}")
    return _without_links_elsewhere(markdown)


def _without_links_elsewhere(markdown: str) -> str:
    """Links to sources become their text, which says where the file is in a checkout."""
    elsewhere = "|".join(map(re.escape, _ELSEWHERE))
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)?(?:{elsewhere})[^)]*\)", r"`\1`", markdown)
