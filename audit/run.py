"""Carries out an audit: reads the evidence, runs attacks in parallel processes, and writes report.json and report.html.

Each outcome is written as soon as its attack is done.
"""

import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from audit.attacks.attack import Attack, Effort, chosen_attacks, get_attack
from audit.choices import parse_gate
from audit.errors import CaptureError, TruthError
from audit.evidence import Case, RecordedUpdates, joined, own_view, read_secret, read_truth, read_updates, with_images
from audit.measures import Outcome
from audit.options import AuditOptions as AuditOptions
from audit.report import Finding, GateResult, findings_of, judge, subject_of, write_report
from fedcg.child_python import spawning
from fedcg.files import replace_durably
from fedcg.learning.data.image_folder import read_images
from fedcg.learning.image_set import ImageSet
from fedcg.learning.privacy import parse_mechanisms
from fedcg.learning.program import Program
from fedcg.learning.seeds import Streams
from fedcg.values import Value
from fedcg.worker_process import abandon, die_with_parent

LOOK_EVERY_S = 0.2
SEND_EVERY_S = 0.5
IDENTITY_FILE = "audit.json"
_REMEDY = "choose another --out, or --force"
_OUTCOME = TypeAdapter(Outcome)
_IDENTITY = TypeAdapter(dict[str, Any])

OnProgress = Callable[[str, int, int], None]
"""(attack, steps done, total steps)."""
OnDone = Callable[[Outcome], None]


class AuditFolder:
    """The folder of an audit: its case and the outcomes so far.

    Args:
        root: created if missing.
        identity: the inputs that determine the outcomes, as JSON values.
        force: discard the outcomes in the folder, also those of another audit.

    Raises:
        CaptureError: the folder holds the audit of another case.
    """

    def __init__(self, root: Path, identity: Mapping[str, Any], *, force: bool = False) -> None:
        self.root = root
        self._outcomes = root / "attacks"
        self._outcomes.mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)  # the report shows images of the device
        if force:
            for path in self._outcomes.glob("*.json"):
                path.unlink()
        elif (root / IDENTITY_FILE).exists() and self._identity() != dict(identity):
            raise CaptureError(f"{root} holds another audit, or one with other options: {_REMEDY}")
        replace_durably(root / IDENTITY_FILE, _IDENTITY.dump_json(dict(identity), indent=1))

    def _identity(self) -> dict[str, Any]:
        try:
            return _IDENTITY.validate_json((self.root / IDENTITY_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise CaptureError(f"{self.root / IDENTITY_FILE} can't be read: {error}; {_REMEDY}") from error

    def keep(self, outcome: Outcome) -> None:
        """Write an outcome atomically."""
        replace_durably(self._outcomes / f"{outcome.attack}.json", _OUTCOME.dump_json(outcome))

    def kept(self, attack: str) -> Outcome | None:
        """Return the outcome of an attack that was carried out earlier."""
        path = self._outcomes / f"{attack}.json"
        try:
            return _OUTCOME.validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


_worker: dict[str, Any] = {}


def _begin(parent: int, progress: Any) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    _worker["progress"] = progress


def _carry_out(attack: str, effort: Effort, case: bytes) -> Outcome:
    sent_at = -SEND_EVERY_S

    def send(done: int, total: int) -> None:
        nonlocal sent_at
        if done >= total or time.monotonic() - sent_at >= SEND_EVERY_S:
            sent_at = time.monotonic()
            _worker["progress"].put((attack, done, total))

    # The parent wrote these bytes; they never come from outside.
    return get_attack(attack).run(pickle.loads(case), effort, send)  # noqa: S301


def carry_out(
    case: Case,
    attacks: Sequence[Attack],
    effort: Effort,
    processes: int,
    *,
    folder: AuditFolder | None = None,
    on_progress: OnProgress = lambda _attack, _done, _total: None,
    on_done: OnDone = lambda _outcome: None,
) -> tuple[Outcome, ...]:
    """Run attacks and return their outcomes, in order; attacks with an outcome in the folder are not repeated.

    A failed attack, or one that is not done within the effort's time, yields an outcome with the reason, which is not
    kept in the folder. Ctrl-C ends the processes. Finished outcomes are kept.
    """
    found = {attack.name: folder.kept(attack.name) for attack in attacks} if folder is not None else {}
    outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
    todo = [attack.name for attack in attacks if attack.name not in outcomes]
    if todo:
        context = spawning()
        progress = context.Queue()
        # Not passed as an argument: starting a process blocks forever if it ends before it has read a large argument.
        jobs = dict.fromkeys(todo, (effort, pickle.dumps(case)))
        deadline = time.monotonic() + effort.limit_s
        pool = ProcessPoolExecutor(min(processes, len(todo)), context, _begin, (os.getpid(), progress))
        try:
            for outcome in _as_completed(pool, jobs, progress, on_progress, deadline):
                if folder is not None and not outcome.has_failed:
                    folder.keep(outcome)
                outcomes[outcome.attack] = outcome
                on_done(outcome)
        except BaseException:  # mainly Ctrl-C
            abandon(pool)
            raise
        if time.monotonic() > deadline:
            abandon(pool)
        pool.shutdown()
    return tuple(outcomes[attack.name] for attack in attacks)


def _as_completed(
    pool: ProcessPoolExecutor,
    jobs: Mapping[str, tuple[Effort, bytes]],
    progress: Any,
    on_progress: OnProgress,
    deadline: float,
) -> Iterator[Outcome]:
    """Yield the outcome of every attack, as they end."""
    waiting: dict[Future[Outcome], str] = {pool.submit(_carry_out, name, *job): name for name, job in jobs.items()}
    while waiting:
        done, _ = wait(waiting, LOOK_EVERY_S, FIRST_COMPLETED)
        while not progress.empty():
            on_progress(*progress.get())
        for future in done:
            name = waiting.pop(future)
            error = future.exception()
            yield future.result() if error is None else Outcome.failure(name, error)
        if waiting and time.monotonic() > deadline:
            for name in waiting.values():
                yield Outcome.failure(name, jobs[name][0].out_of_time())
            return


class Audited(Value):
    """The outcome of an audit: the content of `report.json`, its findings, and the verdicts of its gates."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    verdicts: tuple[GateResult, ...]


def run_audit(options: AuditOptions, console: Console) -> Audited:
    """Carry out an audit and write its report, or resume an interrupted one with the same options.

    Raises:
        AuditError: an option, the evidence or the truth can't be used; no attack was run.
        DataError: images can't be read.
    """
    names = [name.strip() for given in options.attacks or () for name in given.split(",") if name.strip()]
    started, attacks, conditions = time.monotonic(), chosen_attacks(names), parse_gate(options.gate)
    effort, processes = Effort(options.effort), options.processes or len(os.sched_getaffinity(0))
    recorded = read_updates(options.updates, options.federation)
    case = case_of(options, recorded)
    folder = AuditFolder(options.out, identity_of(options, case), force=options.force)
    with progress_bars(console, [attack.name for attack in attacks]) as (advance, finish):
        outcomes = carry_out(case, attacks, effort, processes, folder=folder, on_progress=advance, on_done=finish)
    findings = findings_of(attacks, outcomes)
    verdicts = judge(conditions, outcomes)
    settings = {"effort": options.effort, "seed": options.seed}
    store = options.private if options.private is not None and options.private.is_dir() else None
    resumed = sum(one.seconds for one in outcomes) / processes
    seconds = max(time.monotonic() - started, resumed)
    subject = subject_of(case, recorded.gaps, settings, options.command(), store, seconds)
    report = write_report(options.out, subject, findings, verdicts)
    return Audited(report, findings, verdicts)


def case_of(options: AuditOptions, recorded: RecordedUpdates) -> Case:
    """Return the case that the options name.

    Raises:
        TruthError: more than a tenth of the auxiliary images are the device's own, or of the held-out images its
            training images, or the truth does not fit.
    """
    spec = recorded.spec
    auxiliary = None
    if options.auxiliary is not None:
        auxiliary = read_images(options.auxiliary, spec.classes, spec.input).images
    secret = None if options.cohort is None else read_secret(options.cohort)
    view = own_view(recorded.view(options.client, options.round, auxiliary, secret), options.private, options.data)
    truth = read_truth(view, options.data, options.private, options.held_out)
    if options.held_out is not None:
        _check_apart(options.held_out, truth.held_out, truth.train, "which it trained on", "--held-out")
    if auxiliary is not None and options.auxiliary is not None:
        own = joined(truth.train, truth.held_out)
        _check_apart(options.auxiliary, auxiliary, own, "which no attacker has", "--auxiliary")
    view, privacy = replace(view, spec=with_images(view.spec)), parse_mechanisms(options.mechanism or ())
    is_private = options.private is not None and (options.private / "privacy.json").exists()
    truth = replace(truth, privacy=None if is_private and privacy.dp_sgd is None else privacy)
    return Case(view, truth, Streams(hashlib.sha256(f"fedcg audit seed {options.seed}".encode()).digest()))


def _check_apart(place: Path, given: ImageSet, own: ImageSet, why: str, option: str) -> None:
    known = {one.numpy().tobytes() for one in own.images}
    if (same := sum(one.numpy().tobytes() in known for one in given.images)) > len(given) / 10:
        raise TruthError(
            f"{place}: {same} of its {len(given)} images are the device's own, {why}: give other labelled images of the "
            f"same kind as {option}"
        )


def identity_of(options: AuditOptions, case: Case) -> dict[str, Any]:
    """Return what the outcomes of an audit depend on: contents by their sha256, versions and options."""
    view, program = case.view, Program.of_source(options.data)
    known = (view.spec.canonical(), view.artifact, view.update, view.before, view.others, view.report, view.history)
    return {
        "format": 3,
        "version": version("fedcg-edge"),
        "program": None if program is None else program.digest(),
        "effort": options.effort,
        "seed": options.seed,
        "contents": content_sha256((*known, view.auxiliary, view.colluder, case.truth)),
    }


def content_sha256(value: object) -> str:
    """Return the sha256 of a value's content: of tensors, dataclasses, mappings, sequences and plain values; the order of mappings does not count."""
    if isinstance(value, torch.Tensor):
        told = f"{value.dtype}{list(value.shape)}".encode() + value.contiguous().numpy().tobytes()
    elif is_dataclass(value):
        told = content_sha256({one.name: getattr(value, one.name) for one in fields(value)}).encode()
    elif isinstance(value, Mapping):
        told = "".join(sorted(f"{content_sha256(key)}{content_sha256(value[key])}" for key in value)).encode()
    elif isinstance(value, list | tuple):
        told = "".join(map(content_sha256, value)).encode()
    else:
        told = repr(value).encode()
    return hashlib.sha256(f"{type(value).__name__}\0".encode() + told).hexdigest()


@contextmanager
def progress_bars(console: Console, names: Sequence[str]) -> Iterator[tuple[OnProgress, OnDone]]:
    """Show a progress bar per attack on a terminal, else one line for each finished attack."""
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
