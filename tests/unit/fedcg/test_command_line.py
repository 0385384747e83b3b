"""The command `fedcg`: what it mounts, how it ends, and what it says of what is not installed."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
import typer

from fedcg import cli
from fedcg.errors import BadInputError

GROUP = typer.Typer(help="A group of things.")


@GROUP.command("one")
def _one() -> None:
    typer.echo("one done")


@GROUP.command("two")
def _two() -> None:
    typer.echo("two done")


def plain_command(word: str) -> None:
    """Say a word."""
    typer.echo(word)


def failing_command() -> None:
    """Fail."""
    raise ValueError("the disk is full [bold]")


def steering_command() -> None:
    raise BadInputError("a\x1b[31m\u202e.toml:\n  line 1")


def refusing_command() -> None:
    """Refuse its input."""
    raise BadInputError("there is no such folder")


def stopping_command() -> None:
    """Stop with a code of its own."""
    raise typer.Exit(3)


def interrupted_command() -> None:
    """Be interrupted."""
    raise KeyboardInterrupt


def lacking_command() -> None:
    """Need what is not there."""
    import a_package_nobody_has  # type: ignore[import-not-found]  # noqa: F401


class _Entry(EntryPoint):
    def load(self) -> object:
        targets: dict[str, Callable[..., object] | typer.Typer] = {
            "group": GROUP,
            "plain": plain_command,
            "failing": failing_command,
            "refusing": refusing_command,
            "steering": steering_command,
            "stopping": stopping_command,
            "interrupted": interrupted_command,
            "lacking": lacking_command,
        }
        if self.name == "absent":
            raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")
        return targets[self.name]


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("group", "plain", "failing", "refusing", "steering", "stopping", "interrupted", "lacking", "absent")
    entries = [_Entry(name, "somewhere:command", "fedcg.commands") for name in names]
    monkeypatch.setattr(cli, "entry_points", lambda **_: entries)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["fedcg", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    printed: str,
) -> None:
    assert _run(monkeypatch, *arguments) == code
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("nope",), ("plain",), ("group", "three"), ("plain", "x", "--wrong")])
def test_bad_usage_ends_with_2_and_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Error" in shown.err


def test_an_error_is_one_line_on_stderr_and_a_traceback_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "failing") == 1
    assert capsys.readouterr().err == "Error: the disk is full [bold]\n"
    assert _run(monkeypatch, "refusing") == 2
    assert capsys.readouterr().err == "Error: there is no such folder\n"
    monkeypatch.setattr(sys, "argv", ["fedcg", "--debug", "failing"])
    with pytest.raises(ValueError, match="the disk is full"):
        cli.main()


def test_an_error_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "steering") == 2
    assert capsys.readouterr().err == "Error: a\\x1b[31m\\u202e.toml:\n  line 1\n"


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "interrupted") == 130
    assert "Interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "package"), [(("absent", "run", "--dir", "x"), "sqlalchemy"), (("lacking",), "a_package_nobody_has")]
)
def test_a_command_whose_packages_are_not_installed_says_which_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], package: str
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert f"`fedcg {arguments[0]}` needs the Python package '{package}'" in told
    assert "pip install 'fedcg-edge[edge]'" in told


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_names_every_command_with_its_purpose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert _run(monkeypatch, option) == 0
    rows = [line.strip("│ ").split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    told = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert told["group"] == "A group of things."
    assert told["plain"] == "Say a word."
    assert told["absent"] == "(not installed here: sqlalchemy)"
