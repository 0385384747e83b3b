"""Every `fedcg` command line in the deployment files is one that the command understands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML
from typer.core import TyperCommand, TyperGroup

from fedcg.cli import app

# typer exports only some of its errors; all errors of usage share this base.
USAGE_ERROR = typer.BadParameter.__mro__[1]
DEPLOY = Path(__file__).parents[3] / "deploy"


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Where a command line is written, and its words after `fedcg`."""
    for unit in sorted(DEPLOY.glob("systemd/*.service")):
        for line in re.findall(r"^ExecStart=\S+/fedcg (.+)$", unit.read_text(), re.MULTILINE):
            yield unit.name, shlex.split(line)
    for dockerfile in sorted(DEPLOY.glob("docker/*.Dockerfile")):
        text = dockerfile.read_text()
        if 'ENTRYPOINT ["fedcg"]' in text:
            yield dockerfile.name, json.loads(re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)[0])
    for name, service in YAML(typ="safe").load(DEPLOY / "compose" / "compose.yaml")["services"].items():
        if "command" in service:
            yield f"compose {name}", service["command"]
    readme = (DEPLOY / "README.md").read_text()
    for line in re.findall(r"^(?:fedcg|docker compose run --rm --no-deps coordinator) (.+)$", readme, re.MULTILINE):
        yield "README.md", shlex.split(line)
    for line in re.findall(r"`fedcg ([a-z][^`]+)`", readme):
        yield "README.md", shlex.split(line)


def parse(words: list[str]) -> None:
    """Find the command and let it parse and check its options and arguments; it is not run."""
    command: TyperGroup | TyperCommand = app
    assert isinstance(app, TyperGroup)
    context = app.make_context("fedcg", list(words))
    rest = list(words)
    while isinstance(command, TyperGroup):
        name = rest.pop(0)
        found = command.get_command(context, name)
        assert isinstance(found, (TyperGroup, TyperCommand)), f"no command {name!r} in: fedcg {' '.join(words)}"
        assert not (found.help or "").startswith("(not installed here"), found.help
        context = found.make_context(name, list(rest), parent=context)
        command = found


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), LINES, ids=[f"{where}: {' '.join(words)}" for where, words in LINES])
def test_the_command_line_is_understood(where: str, words: list[str]) -> None:
    parse(words)


def test_the_deployment_files_hold_command_lines_of_both_sides() -> None:
    starts = {tuple(words[:2]) for _, words in LINES}
    assert {("agent", "run"), ("coordinator", "run"), ("broker", "run"), ("device", "add")} <= starts


@pytest.mark.parametrize(
    "words",
    [
        "agent run --confg agent.toml",
        "agent run agent.toml",
        "device add --dir home --out bundles",
        "coordinator run",
        "coordinator rnu --dir home",
    ],
)
def test_a_misspelt_command_or_option_and_a_missing_argument_are_noticed(words: str) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR)):
        parse(words.split())
