"""The text that people read: pages of bounded length, short sentences, the words of the glossary, no phrase of the list."""

import ast
import re
from pathlib import Path

import pytest

from docs.build_reference import pages
from tests.architecture.test_imports import ROOT

BANNED = re.compile(
    r"\b(so many(?! more)|of (its|their|his|our|one's) own|what (comes|came) back|something came back|nobody|tells|goes on|go on|"
    r"everybody('s)?|stands? in|is none|are none|anew|whoever|in the place of|lets? it (be|run)|edge box(es)?|the box(es)?|a box)\b",
    re.IGNORECASE,
)
WORDS, LONGEST = 1500, 25
DOCS = ROOT / "docs"
PEOPLE = sorted(
    page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in ("decisions", "reference", "research")
)
TEXTS = [*PEOPLE, ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy/README.md"]
PRODUCT = ("fedcg", "edge_client", "coordinator", "export", "devices", "audit", "experiments", "examples", "deploy")


def prose(text: str) -> str:
    """A page without code, tables' rows, addresses of links and what `` `code` `` says."""
    text = re.sub(r"^ *```.*?^ *```|^ *\|.*?$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "code", text))


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*+]|\d+\.|\[\^\w+\]:) |^#.*$", prose(text), flags=re.MULTILINE)
    return [one for block in blocks for one in re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))]


def phrases(path: Path) -> list[str]:
    """Where a file has a phrase of the list, with its line: in Python only what is text for people."""
    text = path.read_text(encoding="utf-8")
    found = [(1, prose(text) if path.suffix == ".md" else text)]
    if path.suffix == ".py":
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        found = [(node.lineno, node.value) for node in nodes if isinstance(node.value, str)]
    return [f"{path.relative_to(ROOT)}:{line}: {one[0]}" for line, part in found for one in BANNED.finditer(part)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    assert [one for one in sentences(text) if len(one.split()) > LONGEST] == []


def test_no_text_has_a_phrase_of_the_list() -> None:
    kinds = (".py", ".toml", ".html", ".template", ".sh")
    product = [path for name in PRODUCT for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    assert [found for path in [*TEXTS, *product] for found in phrases(path)] == []


def test_the_documentation_is_no_longer_than_its_readers_bear() -> None:
    research = sum(len(page.read_text(encoding="utf-8").split()) for page in (DOCS / "research").glob("*.md"))
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PEOPLE) <= 45_000
    assert research <= 15_000


def test_the_reference_is_that_of_the_code() -> None:
    written = pages()
    differing = [name for name, text in written.items() if (DOCS / "reference" / name).read_text("utf-8") != text]
    assert differing == [], "run `make reference`"
    assert len(written) > 30
