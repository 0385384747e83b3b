"""The text that people read: short pages of short sentences, no phrase of a list; commands, options, fields and code that there are."""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib

from coordinator.facts import problems
from docs import build_reference
from fedcg.cli import app
from fedcg.sentences import texts
from tests.architecture.test_imports import ROOT
from tests.support.commands import commands_of

BANNED = re.compile(
    r"\b(so many(?! more)|of (its|their|his|our|one's) own|what (comes|came) back|something came back|nobody|tells|goes on|go on|"
    r"everybody('s)?|stands? in|(?<!there )(?-i:(is|are) none)|anew|whoever|in the place of|lets? it (be|run)|edge box(es)?|the box(es)?|a box)\b",
    re.IGNORECASE,
)
WORDS, LONGEST = 1500, 25
pages = cache(build_reference.pages)
there = cache(lambda: dict(commands_of(app)))
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


def words(text: str) -> int:
    """Words of a page with its code and tables: all between spaces that has a letter or a digit."""
    return sum(re.search(r"\w", word) is not None for word in text.split())


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*+]|\d+\.|\[\^\w+\]:) |^#.*$", prose(text), flags=re.MULTILINE)
    return [one for block in blocks for one in re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))]


def phrases(path: Path) -> list[str]:
    """Where a file has a phrase of the list, with its line: in Python only what is text for people."""
    text = path.read_text(encoding="utf-8")
    found = [(1, prose(text) if path.suffix == ".md" else re.sub(r"{[{%].*?[}%]}", "", text, flags=re.DOTALL))]
    if path.suffix == ".py":
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        found = [(node.lineno, node.value) for node in nodes if isinstance(node.value, str)]
    return [f"{path.relative_to(ROOT)}:{line}: {one[0]}" for line, part in found for one in BANNED.finditer(part)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert words(text) <= WORDS
    assert [one for one in sentences(text) if len(one.split()) > LONGEST] == []


def test_no_text_has_a_phrase_of_the_list() -> None:
    kinds = (".py", ".toml", ".html", ".template", ".sh")
    product = [path for name in PRODUCT for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    assert [found for path in [*TEXTS, *product] for found in phrases(path)] == []


def test_the_documentation_is_no_longer_than_its_readers_bear() -> None:
    assert sum(words(page.read_text(encoding="utf-8")) for page in PEOPLE) <= 45_000
    for folder, most in {"research": 15_000, "decisions": 5_000}.items():
        assert sum(words(page.read_text(encoding="utf-8")) for page in (DOCS / folder).glob("*.md")) <= most


def test_the_list_for_language_models_names_every_page_once() -> None:
    named = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "llms.txt").read_text("utf-8"))
    pages_there = [str(page.relative_to(DOCS)) for page in [*PEOPLE, *(DOCS / "reference").glob("*.md")]]
    assert sorted(named) == sorted({*pages_there, "research/index.md"} - {"index.md"})


def test_every_kind_of_problem_has_the_section_that_it_names() -> None:
    literal = re.findall(r"roblem\(\"([a-z ]+)\"", inspect.getsource(problems))
    kinds = [*literal, *(kind for kind, _ in [*problems.remedies().values(), *texts().ended.values()])]
    named = {problems.Problem(kind, "", "", "").docs for kind in kinds}
    headings = re.findall(r"^## (.+)$", pages()["problems.md"], re.MULTILINE)
    assert named <= {f"docs/reference/problems.md#{heading.replace(' ', '-')}" for heading in headings}
    assert len(named) > 20


def test_every_function_on_the_way_of_an_update_exists() -> None:
    steps = re.findall(r"`([\w/]+\.py): (\w+)`", (DOCS / "reference/protocol.md").read_text(encoding="utf-8"))
    assert len(steps) > 20
    assert [
        step
        for step in steps
        if not re.search(rf"^ *(async )?def {step[1]}\(", (ROOT / step[0]).read_text(), re.MULTILINE)
    ] == []


def test_the_reference_is_that_of_the_code() -> None:
    written = pages()
    differing = [name for name, text in written.items() if (DOCS / "reference" / name).read_text("utf-8") != text]
    assert differing == [], "run `make reference`"
    assert len(written) > 30


def commands(text: str) -> list[list[str]]:
    """Words of each command line in the code of a page, after `fedcg`, up to a pipe or a comment."""
    code = re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```|`([^`\n]+)`", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(
        r"(?:^|(?<!-u)[ (]|bin/)fedcg ([a-z][^\n|#>;)]*)",
        "\n".join(block or span for block, span in code).replace("\\\n", " "),
        re.MULTILINE,
    )
    return [re.sub(r"[\[\],'\"]", " ", line).split() for line in lines]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in commands(text):
        heads = (tuple(words[:length]) for length in (3, 2, 1))
        meant = next(
            filter(None, ([each for name, each in there().items() if name[: len(head)] == head] for head in heads))
        )
        options = {option for each in meant for one in each.params for option in (*one.opts, *one.secondary_opts)}
        named = {word.partition("=")[0].rstrip(".:") for word in words if re.match(r"--?[a-z]", word)}
        assert named <= options | {"--help", "--debug", "--json"}, words


def fields_of(table: Mapping[str, Any]) -> set[str]:
    """The names of all fields of a table, but of those that a method or a defence defines."""
    inner = [
        value for name, value in table.items() if isinstance(value, dict) and not name.endswith(("params", "examples"))
    ]
    return set(table).union(*map(fields_of, inner))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_is_python_and_its_settings_exist(page: Path) -> None:
    reference = "".join(pages()[f"{name}.md"] for name in ("agent", "coordinator", "plan"))
    known = set(re.findall(r"^(?:\| |## )`\[?([\w]+)", reference, re.MULTILINE))
    known |= {each for name in re.findall(r"^## `\[([\w.]+)", reference, re.MULTILINE) for each in name.split(".")}
    for language, indented in re.findall(
        r"^ *```(python|toml)\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        block = textwrap.dedent(indented)
        if language == "python":
            ast.parse(block)
        elif "[project" not in block:  # which is a package's
            assert fields_of(tomllib.loads(block)) <= known, block
