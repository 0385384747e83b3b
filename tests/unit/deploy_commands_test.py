"""Every `fedcg` command line in the deployment files is one that the command understands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from fedcg.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"


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


def understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the command parses these words; `--help` at the end keeps it from running."""
    with pytest.raises(SystemExit) as end:
        app.main(args=[*words, "--help"], prog_name="fedcg")
    shown = capsys.readouterr()
    assert "not installed here" not in shown.out, shown.out
    return end.value.code in (0, None)


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), LINES, ids=[f"{where}: {' '.join(words)}" for where, words in LINES])
def test_the_command_line_is_understood(where: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert understood(words, capsys), f"{where}: fedcg {' '.join(words)}"


def test_the_deployment_files_hold_command_lines_of_both_sides() -> None:
    starts = {tuple(words[:2]) for _, words in LINES}
    assert {("agent", "run"), ("coordinator", "run"), ("broker", "run"), ("device", "add")} <= starts


def test_a_misspelt_command_or_option_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert understood(["audit", "observe", "--port", "1"], capsys)
    assert not understood(["audit", "observe", "--prt", "1"], capsys)
    assert not understood(["audit", "observ"], capsys)
