"""Carries out the attacks on one case in processes side by side; an outcome is on disk as soon as its attack is done."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from audit.attacks.attack import Attack, Effort, get_attack
from audit.errors import CaptureError
from audit.evidence import Case
from audit.measures.figures import Outcome
from fedcg.files import replace_durably
from fedcg.worker_process import abandon, die_with_parent, spawning

LOOK_EVERY_S = 0.2
SEND_EVERY_S = 0.5
IDENTITY_FILE = "audit.json"
_OUTCOME = TypeAdapter(Outcome)
_IDENTITY = TypeAdapter(dict[str, Any])

OnProgress = Callable[[str, int, int], None]
"""(attack, steps done, steps in all)."""
OnDone = Callable[[Outcome], None]


class AuditFolder:
    """The folder of an audit: which case it is of, and the outcomes that are there.

    Args:
        root: made if it is not there.
        identity: what decides the outcomes, as JSON values.
        force: drop what is there of another audit, and outcomes.

    Raises:
        CaptureError: it holds the audit of another case.
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
            raise CaptureError(
                f"{root} holds an audit of something else, or with other options: choose another --out, or --force"
            )
        replace_durably(root / IDENTITY_FILE, _IDENTITY.dump_json(dict(identity), indent=1))

    def _identity(self) -> dict[str, Any]:
        try:
            return _IDENTITY.validate_json((self.root / IDENTITY_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise CaptureError(
                f"{self.root / IDENTITY_FILE} can't be read: {error}; choose another --out, or --force"
            ) from error

    def keep(self, outcome: Outcome) -> None:
        """Write an outcome, whole or not at all."""
        replace_durably(self._outcomes / f"{outcome.attack}.json", _OUTCOME.dump_json(outcome))

    def kept(self, attack: str) -> Outcome | None:
        """The outcome of an attack that was carried out before."""
        path = self._outcomes / f"{attack}.json"
        try:
            return _OUTCOME.validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


_worker: dict[str, Any] = {}


def _begin(parent: int, progress: Any) -> None:
    import torch

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

    # Written by the parent a moment ago: never bytes from outside.
    return timed(get_attack(attack), pickle.loads(case), effort, send)  # noqa: S301


def timed(attack: Attack, case: Case, effort: Effort, progress: Callable[[int, int], None]) -> Outcome:
    """An attack's outcome with its duration, or the reason why it was not tried."""
    started = time.perf_counter()
    lacking = attack.lacks(case)
    outcome = Outcome(attack.name, skipped=lacking) if lacking else attack.run(case, effort, progress)
    return replace(outcome, seconds=round(time.perf_counter() - started, 1))


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
    """The outcomes of some attacks, in their order; those that a folder holds are not done again.

    An attack that fails is an outcome with the reason, which is not kept. Ctrl-C ends the processes; what was done is kept.
    """
    found = {attack.name: folder.kept(attack.name) for attack in attacks} if folder is not None else {}
    outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
    todo = [attack.name for attack in attacks if attack.name not in outcomes]
    if todo:
        context = spawning()
        progress = context.Queue()
        # Not an argument of the processes' start, which waits for ever where a process ends before it has read a large one.
        jobs = dict.fromkeys(todo, (effort, pickle.dumps(case)))
        pool = ProcessPoolExecutor(min(processes, len(todo)), context, _begin, (os.getpid(), progress))
        try:
            for outcome, is_final in _as_completed(pool, jobs, progress, on_progress):
                if folder is not None and is_final:
                    folder.keep(outcome)
                outcomes[outcome.attack] = outcome
                on_done(outcome)
        except BaseException:  # Ctrl-C above all
            abandon(pool)
            raise
        pool.shutdown()
    return tuple(outcomes[attack.name] for attack in attacks)


def _as_completed(
    pool: ProcessPoolExecutor, jobs: Mapping[str, tuple[Effort, bytes]], progress: Any, on_progress: OnProgress
) -> Any:
    """(outcome, whether it is final) of every attack, as they end."""
    waiting: dict[Future[Outcome], str] = {pool.submit(_carry_out, name, *job): name for name, job in jobs.items()}
    while waiting:
        done, _ = wait(waiting, LOOK_EVERY_S, FIRST_COMPLETED)
        while not progress.empty():
            on_progress(*progress.get())
        for future in done:
            name = waiting.pop(future)
            error = future.exception()
            if error is None:
                yield future.result(), True
            else:
                yield Outcome(name, skipped=f"failed: {type(error).__name__}: {error}"), False
