"""The command `fedcg`: what it mounts and how it ends; and all commands alike: output for scripts, exit codes, completion, mistyped names."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.facts.problems import remedies
from coordinator.paths import Home
from fedcg import cli
from fedcg.cli import app, main
from fedcg.errors import ALREADY_RUNNING, EXISTS, NOT_CONNECTED, NOT_FOUND, BadInputError
from fedcg.learning.spec import RoundPolicy
from fedcg.sentences import texts
from tests.support.commands import commands_of, data_of, run_fedcg
from tests.support.learning.export_models import picture
from tests.support.serving import install_versions

GROUP = typer.Typer(help="A group of things.")
Run = Callable[..., object]


@GROUP.command("one")
def _one() -> None:
    typer.echo("one done")


@GROUP.command("two")
def _two() -> None:
    typer.echo("two done")


def plain_command(word: str) -> None:
    """Say a word."""
    typer.echo(word)


def lacking_command() -> None:
    """Need what is not there."""
    import a_package_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def raising(error: BaseException) -> Callable[[], None]:
    """A command that ends in this way."""

    def command() -> None:
        raise error

    return command


COMMANDS: dict[str, Callable[..., object] | typer.Typer] = {
    "group": GROUP,
    "plain": plain_command,
    "lacking": lacking_command,
    "failing": raising(ValueError("the disk is full [bold]")),
    "refusing": raising(BadInputError("there is no such folder")),
    "steering": raising(BadInputError("a\x1b[31m\u202e.toml:\n  line 1")),
    "stopping": raising(typer.Exit(3)),
    "interrupted": raising(KeyboardInterrupt()),
}


class _Entry(EntryPoint):
    def load(self) -> object:
        if self.name == "absent":
            raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")
        return COMMANDS[self.name]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*arguments)`: what `fedcg` exits with where these commands are installed."""
    entries = [_Entry(name, "somewhere:command", "fedcg.commands") for name in (*COMMANDS, "absent")]
    monkeypatch.setattr(cli, "entry_points", lambda **_: entries)

    def run(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["fedcg", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (("group", "two"), 0, "two done"),
        (("plain", "hello"), 0, "hello"),
        (("stopping",), 3, ""),
        (("--version",), 0, "fedcg, version"),
    ],
)
def test_a_command_runs_and_its_exit_code_is_the_process_own(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, printed: str
) -> None:
    assert run(*arguments) == code
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nope",), 2, "Error"),
        (("plain",), 2, "Error"),
        (("group", "three"), 2, "Error"),
        (("plain", "x", "--wrong"), 2, "Error"),
        (("failing",), 1, "Error: the disk is full [bold]\n"),
        (("refusing",), 2, "Error: there is no such folder\n"),
        (("steering",), 2, "Error: a\\x1b[31m\\u202e.toml:\n  line 1\n"),  # an error can't steer the terminal
        (("interrupted",), 130, "Interrupted"),
        (("lacking",), 2, "`fedcg lacking` needs the Python package 'a_package_nobody_has'"),
        (("lacking",), 2, "pip install 'fedcg-edge[edge]'"),
        (("absent", "run", "--dir", "x"), 2, "`fedcg absent` needs the Python package 'sqlalchemy'"),
    ],
)
def test_what_goes_wrong_has_an_exit_code_and_goes_to_stderr_without_a_traceback(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    assert run(*arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == told if told.endswith("\n") else told in shown.err


def test_an_error_has_its_traceback_with_debug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fedcg", "--debug", "failing"])
    with pytest.raises(ValueError, match="the disk is full"):
        cli.main()


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_names_every_command_with_purpose(run: Run, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert run(option) == 0
    rows = [line.strip("│ ").split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    told = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert told["group"] == "A group of things."
    assert told["plain"] == "Say a word."
    assert told["absent"] == "(not installed here: sqlalchemy)"


def _options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in getattr(parameter, "opts", ())}


def test_every_command_that_a_remedy_names_exists_and_takes_what_it_is_given() -> None:
    known = texts()
    tables = (known.declined, remedies(), known.findings, known.lost_sums, known.health)
    operations = [f"`{command}`" for _, _, command in known.operations.values()]
    told = [*operations, *(str(values) for table in tables for values in table.values())]
    named = [found.split()[1:] for text in told for found in re.findall(r"`(fedcg [^`]+)`", text)]
    there = {name for name, _ in commands_of(app)}
    assert len(named) > 20
    for words in named:
        assert any(tuple(words[:length]) in there for length in (1, 2, 3)), words
        assert {word.partition("=")[0] for word in words if "=" in word} <= RoundPolicy.model_fields.keys(), words
    assert ["federation", "set", "{federation}", "deadline_s=SECONDS"] in named
    assert not any("of the federation's plan" in text for text in told), "a plan can't be changed"


def test_every_command_takes_json() -> None:
    assert [name for name, command in commands_of(app) if "--json" not in _options(command)] == []


def test_every_command_shows_an_example_of_itself_that_it_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCG_HOME", "/var/lib/fedcg")
    wrong: dict[tuple[str, ...], object] = {}
    for name, command in commands_of(app):
        found = re.findall(r"Example: fedcg (.+)", command.help or "")
        called = tuple(word for word in name if word != "IMAGE...")
        words = re.split(r" >>? ", found[0])[0] if len(found) == 1 else ""
        given = shlex.split(words)
        if tuple(given[: len(called)]) != called:
            wrong[name] = found or command.help
            continue
        try:
            command.make_context("fedcg", given[len(called) :])
        except Exception as error:  # noqa: BLE001 - a usage error of typer's own copy of click
            wrong[name] = error
    assert wrong == {}


@pytest.mark.parametrize("begin", ["simulate", pytest.param("", marks=pytest.mark.slow)], ids=["one", "every"])
def test_no_name_of_an_option_and_no_word_is_cut_in_the_help_of_any_command_at_80_columns(begin: str) -> None:
    cut, lost = {}, {}
    for name, command in commands_of(app):
        if not name[0].startswith(begin):
            continue
        words = [word for word in name if word != "IMAGE..."]
        shown = run_fedcg(*words, "--help", environment={"COLUMNS": "80"}).stdout
        if found := re.findall(r"\S*[^\s\"]…\S*", shown):
            cut[name] = found
        missing = [option for option in _options(command) if option.startswith("--") and option not in shown]
        if missing and name[-1] != "IMAGE...":
            lost[name] = missing
    assert (cut, lost) == ({}, {})


def test_an_environment_variable_stands_for_the_coordinator_s_directory_and_one_for_the_device_s_configuration(
    tmp_path: Path,
) -> None:
    home, nowhere = str(tmp_path / "home"), str(tmp_path / "agent.toml")
    assert run_fedcg("coordinator", "init", environment={"FEDCG_HOME": home}).exit_code == 0
    assert data_of(run_fedcg("federation", "list", "--json", environment={"FEDCG_HOME": home}).stdout) == []
    asked = run_fedcg("agent", "status", environment={"FEDCG_CONFIG": nowhere})
    assert (asked.exit_code, nowhere in asked.stderr.replace("\n", "")) == (NOT_FOUND, True)
    sent = run_fedcg("federation", "list", "--url", "http://127.0.0.1:1", environment={"FEDCG_HOME": home})
    assert (sent.exit_code, "FEDCG_API_TOKEN" in sent.stderr) == (NOT_CONNECTED, True)  # never the home's own token


def test_running_already_existing_and_missing_things_have_exit_codes_of_their_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    codes = [run_fedcg("coordinator", "init", "--dir", home).exit_code for _ in range(2)]
    with Home(home).locked():
        codes.append(run_fedcg("coordinator", "run", "--dir", home).exit_code)
    passphrase = ("--passphrase-file", home / "coordinator.toml")
    missing = (
        ("federation", "list", "--dir", tmp_path / "nowhere"),
        ("federation", "create", tmp_path / "plan.toml", "--dir", home),
        ("coordinator", "restore", tmp_path / "backup", "--dir", tmp_path / "new", *passphrase),
        ("agent", "run", "--config", tmp_path / "agent.toml"),
        ("cohort", "roster", tmp_path / "roster.txt"),
        ("model", "use", tmp_path / "nowhere", "0001"),
        ("method", "show", "nobody"),
        ("audit", "run", "--updates", tmp_path / "nowhere", "--data", home, "--out", tmp_path / "report"),
    )
    assert codes == [0, EXISTS, ALREADY_RUNNING]
    assert {words: run_fedcg(*words).exit_code for words in missing} == dict.fromkeys(missing, NOT_FOUND)
    assert "7 not found" in " ".join(run_fedcg("--help").stdout.split())


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """The script as `--show-completion bash` prints it, in a bash that knows `fedcg` as an installed program."""
    program = tmp_path / "fedcg"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedcg "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(fedcg --show-completion bash)"
        COMP_WORDS=(fedcg fed) COMP_CWORD=1; _fedcg_completion fedcg; echo "${COMPREPLY[*]}"
        COMP_WORDS=(fedcg federation '') COMP_CWORD=2; _fedcg_completion fedcg; echo "${COMPREPLY[*]}"
        COMP_WORDS=(fedcg federation resume --) COMP_CWORD=3; _fedcg_completion fedcg; echo "${COMPREPLY[*]}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    no_terminal = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    environment = {**os.environ, "PATH": path, **no_terminal}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    verbs = {name[1] for name, _ in commands_of(app) if name[0] == "federation"}
    assert offered == [{"federation"}, verbs, {"--dir", "--url", "--json", "--help"}], done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(("federaton", "show"), "federation"), (("federation", "creat"), "create"), (("infer", "srve"), "serve")],
)
def test_a_mistyped_command_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], meant: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedcg", *typed])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


def test_a_model_is_found_in_a_device_s_private_store_or_folder(tmp_path: Path) -> None:
    (box := tmp_path / "box").mkdir()
    install_versions(box / "store" / "models", 2)
    (box / "store" / "CURRENT").write_text("the store's own pointer, to its generations")
    picture(1).save(tmp_path / "image.png")
    for place in (box, box / "store", box / "store" / "models"):
        told = run_fedcg("infer", str(tmp_path / "image.png"), "--model", str(place), "--json")
        assert data_of(told.stdout)["model"] == str(box / "store" / "models" / "0002"), told.output
    back = run_fedcg("model", "rollback", str(box), "--json")
    assert data_of(back.stdout) == {"model": str(box / "store" / "models" / "0001")}
