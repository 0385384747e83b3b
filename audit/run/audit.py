"""One audit from its options to its report: reads the evidence, has the attacks carried out, writes report.json and report.html."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from audit.attacks.attack import Effort, chosen_attacks
from audit.choices import parse_gate
from audit.evidence import Case, Colluder, RecordedUpdates, own_view, read_secret, read_truth, read_updates
from audit.measures.figures import Outcome
from audit.report.findings import Finding, Verdict, finding_of, judge, report_of, subject_of
from audit.report.page import render
from audit.run.session import AuditFolder, carry_out
from fedcg.files import PRIVATE, replace_durably
from fedcg.learning.data.image_folder import read_images
from fedcg.learning.seeds import Streams

REPORT_FILE, PAGE_FILE = "report.json", "report.html"


@dataclass(frozen=True)
class AuditOptions:
    """What an audit is asked for; the options of `fedcg audit run`."""

    updates: Path
    data: Path
    out: Path
    private: Path | None = None
    held_out: Path | None = None
    auxiliary: Path | None = None
    federation: str | None = None
    client: str | None = None
    round: int | None = None
    attacks: tuple[str, ...] = ()
    effort: Effort = Effort.DEFAULT
    seed: int = 0
    processes: int = 2
    gate: str = ""
    force: bool = False
    cohort: Path | None = None

    def command(self) -> str:
        """The command that repeats the audit."""
        words = ["fedcg", "audit", "run"]
        for option in fields(self):
            value = getattr(self, option.name)
            if value == option.default or option.name in ("processes", "force"):
                continue
            text = ",".join(value) if isinstance(value, tuple) else getattr(value, "value", value)
            words += [f"--{option.name.replace('_', '-')}", str(text)]
        return shlex.join(words)


@dataclass(frozen=True)
class Audited:
    """The outcome of an audit: what stands in `report.json`, the verdicts of its gates, attacks that failed."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    failed: tuple[Outcome, ...]


def run_audit(options: AuditOptions, console: Console) -> Audited:
    """Carry out an audit and write its report; goes on where an interrupted one of the same options stopped.

    Raises:
        AuditError: an option, the evidence or the truth can't be used; nothing was attacked.
        DataError: images can't be read.
    """
    attacks, conditions = chosen_attacks(options.attacks), parse_gate(options.gate)
    recorded = read_updates(options.updates, options.federation)
    case = _case(options, recorded)
    folder = AuditFolder(options.out, _identity(options, case, recorded), force=options.force)
    with _bars(console, [attack.name for attack in attacks]) as (advance, finish):
        outcomes = carry_out(
            case, attacks, options.effort, options.processes, folder=folder, on_progress=advance, on_done=finish
        )
    findings = tuple(finding_of(attack, outcome) for attack, outcome in zip(attacks, outcomes, strict=True))
    verdicts = judge(conditions, outcomes)
    settings = {"effort": options.effort.value, "seed": options.seed}
    store = options.private if options.private is not None and options.private.is_dir() else None
    subject = subject_of(case, recorded.gaps, settings, options.command(), store)
    report = report_of(subject, findings, verdicts)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    replace_durably(options.out / REPORT_FILE, json.dumps(report, indent=1).encode(), PRIVATE)
    replace_durably(options.out / PAGE_FILE, render(subject, findings, verdicts, made).encode(), PRIVATE)
    failed = tuple(one for one in outcomes if one.skipped is not None and one.skipped.startswith("failed: "))
    return Audited(report, findings, verdicts, failed)


def _case(options: AuditOptions, recorded: RecordedUpdates) -> Case:
    spec = recorded.spec
    auxiliary = None
    if options.auxiliary is not None:
        auxiliary = read_images(options.auxiliary, spec.classes, spec.image).images
    view = own_view(recorded.view(options.client, options.round, auxiliary), options.private)
    if options.cohort is not None:
        view = replace(view, colluder=Colluder.of(view.spec, read_secret(options.cohort), view.after))
    truth = read_truth(view, options.data, options.private, options.held_out)
    return Case(view, truth, Streams(hashlib.sha256(f"fedcg audit seed {options.seed}".encode()).digest()))


def _identity(options: AuditOptions, case: Case, recorded: RecordedUpdates) -> dict[str, Any]:
    view, truth = case.view, case.truth
    return {
        "format": 1,
        "update": recorded.updates()[view.client, view.round],
        "effort": options.effort.value,
        "seed": options.seed,
        "images": [len(truth.train), len(truth.held_out), 0 if view.auxiliary is None else len(view.auxiliary)],
        "with_private": truth.after is not None,
        **({} if view.colluder is None else {"cohort": hashlib.sha256(view.colluder.secret).hexdigest()}),
    }


@contextmanager
def _bars(
    console: Console, names: Sequence[str]
) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[Outcome], None]]]:
    """A bar with its predicted end per attack on a terminal, else a line for each that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}

        def advance(name: str, done: int, total: int) -> None:
            if name in tasks:  # a last step may arrive after the outcome
                bars.update(tasks[name], completed=done, total=total)

        def finish(outcome: Outcome) -> None:
            bars.remove_task(tasks.pop(outcome.attack))
            console.print(
                f"{outcome.attack}: {outcome.skipped or f'done in {outcome.seconds} s'}", markup=False, soft_wrap=True
            )

        yield advance, finish
