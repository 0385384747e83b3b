"""`fedcg.audit`: runs the attacks of `fedcg audit run` in this process, on an update from a `fedcg.simulate` run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timezone
from functools import partial, reduce
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table

from audit.attacks.attack import Effort, carried_out, chosen_attacks
from audit.evidence import Case, Truth, joined, read_private, read_updates, with_images
from audit.measures import Outcome
from audit.report import Finding, findings_of, render, report_of, subject_of
from audit.run import progress_bars
from experiments.face import Run
from experiments.simulation.recorded_updates import truth_file
from fedcg.errors import BadInputError
from fedcg.files import replace_durably
from fedcg.learning.data.datasets import read_dataset
from fedcg.learning.errors import DataError
from fedcg.learning.seeds import Streams
from fedcg.values import Value


class Audit(Value):
    """The outcome of an audit. It contains samples of the client and is for the owner of the data.

    Attributes:
        client: the client whose update was attacked.
        report: the content of `report.json`, as from `fedcg audit run`.
    """

    client: str
    report: Mapping[str, Any] = field(repr=False)
    _findings: Sequence[Finding] = field(repr=False)
    _page: str = field(repr=False)

    def show(self) -> None:
        """Print one line for each attack: its result, or why it was not tried."""
        table = Table("attack", "result", title=self._title, box=box.SIMPLE_HEAD)
        for title, summary in self._lines:
            table.add_row(title, summary)
        Console().print(table, markup=False)

    def save(self, path: str | Path) -> Path:
        """Write the report as `.json`, or as `.html`, one page with figures and pictures.

        Raises:
            BadInputError: the name has another ending.
        """
        contents = {".json": lambda: json.dumps(self.report, indent=1), ".html": lambda: self._page}
        if (make := contents.get(Path(path).suffix)) is None:
            raise BadInputError(f"{path}: a report is written as .json or .html")
        replace_durably(Path(path), make())
        return Path(path)

    @property
    def _title(self) -> str:
        return f"audit of {self.client}, round {self.report['subject']['round']}"

    @property
    def _lines(self) -> list[tuple[str, str]]:
        return [(finding.attack.title, finding.summary()) for finding in self._findings]

    def _repr_html_(self) -> str:
        row = Markup("<tr><td>{}</td><td>{}</td></tr>")
        lines = Markup("").join(row.format(*line) for line in self._lines)
        return Markup("<table><caption>{}</caption>{}</table>").format(self._title, lines)


def audit(
    run: Run,
    client: str,
    *,
    attacks: Sequence[str] = (),
    effort: str = "default",
    round_number: int | None = None,
    auxiliary: Any = None,
    seed: int = 0,
) -> Audit:
    """Attack a client's update of a round, and report the gain over the best guess.

    Args:
        run: a run of `fedcg.simulate(..., keep_updates="all")`, which records the updates.
        client: the client's name.
        attacks: names from `fedcg audit attacks`; empty: all. Attacks that need images are reported as not tried on
            other inputs.
        effort: quick, default or thorough: at most 3 minutes, at most 20, or hours.
        round_number: None selects the last round in which the client trained.
        auxiliary: labelled samples of the same kind, as an attacker could have, in a form of `fedcg.Client.train`;
            None: the other clients' test samples.
        seed: seed of all random numbers.

    Raises:
        BadInputError: no such client or effort, or the run has no recording.
        AuditError: no such attack, or that round's update was not recorded.
        DataError: the auxiliary samples can't be used.
    """
    party, recording = run.party, run.recording
    if client not in party.datasets:
        raise BadInputError(f"client {client!r}: choose {', '.join(party.datasets)}")
    if effort not in {one.value for one in Effort}:
        raise BadInputError(f"effort {effort!r}: choose {', '.join(one.value for one in Effort)}")
    if not party.spec.classes:
        raise BadInputError("fedcg.audit attacks classification only, not a fedcg.Trainer")
    if not recording.exists():
        raise BadInputError(f'{run.folder}: no updates recorded: run fedcg.simulate(..., keep_updates="all") first')
    chosen, spec = chosen_attacks(attacks), with_images(party.spec)
    recorded = replace(read_updates(recording), spec=spec)  # this process has the network's code; a recording does not
    if auxiliary is None:
        known = reduce(joined, (data.test for name, data in party.datasets.items() if name != client))
    else:
        known = read_dataset(auxiliary, spec.classes, "auxiliary")
    data = party.datasets[client]
    if known.images.shape[1:] != data.train.images.shape[1:] or known.images.dtype != data.train.images.dtype:
        raise DataError("auxiliary: its samples differ in shape or type from those of the clients")
    view = recorded.view(client, round_number, known)
    private = read_private(view, truth_file(recording, client, view.round))
    truth = Truth(data.train, joined(data.val, data.test), *private, party.privacy)
    case = Case(view, truth, Streams(hashlib.sha256(f"fedcg audit seed {seed}".encode()).digest()))
    with progress_bars(Console(stderr=True), [attack.name for attack in chosen]) as (advance, finish):
        started, outcomes = time.monotonic(), list[Outcome]()
        for attack in chosen:
            deadline = started + Effort(effort).limit_s
            outcomes.append(carried_out(attack, case, Effort(effort), partial(advance, attack.name), deadline))
            finish(outcomes[-1])
    findings, seconds = findings_of(chosen, outcomes), time.monotonic() - started
    command = f"fedcg.audit(run, {client!r})"
    subject = subject_of(case, recorded.gaps, {"effort": effort, "seed": seed}, command, None, seconds)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Audit(client, report_of(subject, findings, ()), findings, render(subject, findings, (), made))
