"""The options of `fedcg audit run`; independent of torch."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedcg.text_output import command_line
from fedcg.values import Value


class AuditOptions(Value):
    """The options of `fedcg audit run`, with their help."""

    updates: Annotated[Path, typer.Option(help="an observer's folder, or a coordinator's home or artifacts")]
    data: Annotated[Path, typer.Option(help="the device's images, as its agent has them; the ground truth, never sent")]
    out: Annotated[Path, typer.Option(help="folder for report.html and report.json; an interrupted audit resumes")]
    private: Annotated[
        Path | None, typer.Option(help="the agent's store (or a simulation's file), for ceilings and single batches")
    ] = None
    held_out: Annotated[Path | None, typer.Option(help="more images of the device that it never trained on")] = None
    auxiliary: Annotated[Path | None, typer.Option(help="labelled images, as an attacker could have")] = None
    cohort: Annotated[
        Path | None,
        typer.Option(help="the cohort's secret (secrets/cohort.key of a store): assume that one other device colludes"),
    ] = None
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="a privacy mechanism, KEY=VALUE as in its agent.toml; repeat for more; for epsilon"),
    ] = None
    federation: Annotated[str | None, typer.Option(help="federation to audit, if there are several")] = None
    client: Annotated[str | None, typer.Option(help="client whose update to audit, if there are several")] = None
    round: Annotated[
        int | None, typer.Option(min=1, help="round to audit; default: the last in which the client trained")
    ] = None
    attacks: Annotated[
        list[str] | None,
        typer.Option(help="names, separated by commas, or repeat the option; default: all (`fedcg audit attacks`)"),
    ] = None
    effort: Annotated[
        Literal["quick", "default", "thorough"], typer.Option(help="at most 3 min, at most 20 min, hours")
    ] = "default"
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 0
    processes: Annotated[int | None, typer.Option(min=1, help="parallel attacks; default: one per CPU")] = None
    gate: Annotated[
        str,
        typer.Option(help="bounds, e.g. mia_auc<0.75 (take bounds from your own reports); exit code 8 if one fails"),
    ] = ""
    force: Annotated[bool, typer.Option("--force", help="discard the audit in the folder")] = False

    def command(self) -> str:
        """Return the command that repeats the audit."""
        of_result = (option for option in fields(self) if option.name not in ("processes", "force"))
        values = ((option.name, option.default, getattr(self, option.name)) for option in of_result)
        return command_line("audit", "run", **{name: value for name, default, value in values if value != default})
