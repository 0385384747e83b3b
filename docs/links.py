"""A hook of MkDocs: adds CONTRIBUTING.md and SECURITY.md to the site, and names files outside it instead of linking to them."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OF_ROOT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security-policy.md"}
"""Pages of the repository's root, and their names in the site."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in OF_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point each link to a page of the site, and print the path of every other file."""
    source = next(
        (name for name, target in OF_ROOT.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}"
    )

    def shown(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if path.startswith("docs/") or path in OF_ROOT:
            target = OF_ROOT.get(path, path.removeprefix("docs/"))
            return f"[{link[1]}]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri))}{link[3] or ''})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source}: there is no {path}")
        return f"{link[1]} (`{path}`)" if link[1].strip("`") != posixpath.basename(path) else f"`{path}`"

    return LINK.sub(shown, markdown)
