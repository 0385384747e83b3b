"""Event logs: append-only JSON lines, one object per event, for people, the demo and tests on THIS machine; never sent.

Every line has `t` (unix seconds) and `event`. The agent and its training process write `events.jsonl` in the private store. The
coordinator and its worker write `events.jsonl` in the coordinator's directory.

Agent:
  agent_started {pid, device, federation, cohort_secret}   link {up, down_s}   welcomed {epoch}   offer {round, attempt, rounds}
  invited / accepted / declined {round, attempt, rounds, reason, detail}   artifact_stored {artifact, bytes, what, round, seconds, resumed, received, repeated}
  trainer_started / trainer_died {pid, exit_code}          phase_started {phase, round, attempt, pid}
  progress {phase, step, steps, round, attempt, pid}       committed {round, attempt, pid, ...accuracies, update_bytes}
  paused {round, attempt, reason, detail}                  resumed {round, attempt, seconds} (of training)
  round_failed {round, attempt, reason, detail}            manifest {round, attempt}
  sending {round, attempt, artifact, bytes}
  receipt {round, attempt, artifact, outcome, reason, chunks_sent}   finalised {candidate, model_dir, ...accuracies and losses}
  refused {what, reason, detail, count}                    agent_stopped {pid, dropped, refused}
  plan {device, threads, batch_scale, reason}              gpu_failed {round, attempt, pid, detail}
  memory_short {share, detail}
  exported {round, ...}   export_failed {round, detail}    finalise_failed {detail}
  agent_error {detail}    link_problem {detail}            coordinator_key {serial, key}
  certificate_renewed {until}   renewal_failed {detail}
  carrier {way: up | down, works, detail}   images_skipped {count}   cohort {others: alone | same | different}
  agent_paused {until, reason}   agent_resumed {reason}    trainer_released {reason}
  approval_needed {spec, reason, detail}   approved / approval_revoked {spec}   program_allowed {program, sha256}
  audited {round, attempt, passed, detail, report, seconds}   defended {defence, count, detail, samples, seconds}
  revoked {detail}   defence_warning {detail}   method_warning {round, attempt, detail}   sum_keys {round, attempt, weight}   sum_off {round, attempt, reason}

Coordinator:
  started {epoch}   resumed {phase, round}   stopped   key_rotated {serial, key}   pruned {files, bytes}   link {up, down_s}   online {client}   offline {client, reason}   accepted / declined {client, round, attempt}
  attempt_opened {round, attempt, rounds, participants, aggregate}   attempt_resumed / attempt_failed   stalled {reason}
  deadline_moved {round, attempt, reason}   cohort_differs {client, unlike}   silenced {client, seconds, reason}
  silence_ended {client}   refused {what, reason, detail, count}
  update_stored {client, artifact, size, seconds, resumed, received, repeated}   update_refused {outcome, reason}
  worker_ready / worker_died {pid}   phase_started {phase, pid}   aggregate_step {phase, step, steps, loss, pid}   teacher_done
  device_enrolled {client, token, serial, replaced, reloaded}   enrolment_refused / renewal_refused {address, reason, client}
  enrolment_limited {address, refused}   certificate_renewed {client, serial, until}   device_revoked {client, reason, reloaded}
  carrier_refused {certificate, refused}   departed {client}   left {client}   token_created {token, client, until}   token_revoked {token}
  update_rejected {client, reason} (accepted, but can't be merged)   left_out {client, reason}   let_in {client}
  weight_capped {client, reported, given}   update_clipped {client, part, kept}
  update_odd {client, action, reason}   merge_eased {ease, reason}   artifact_store {reachable, reason}
  api_refused {refused, address, identity, route} (at intervals; changes are in the audit log)
  device_described {client, changed}
  model_pinned {round, label}
  federation_created   steered {status, reason}   policy_changed {changed, before, after, by}   barred / forgotten {clients}   device_disabled / device_enabled {client, reason}
  sum_opened {round, attempt, clients}   sum_off {round, attempt, reason}   sum_refused {round, attempt, client, reason}
  distilling {clients}   merging {clients} (those that passed the screening)   aggregate_stored {artifact, size}   finished {round, attempt, aggregate, reason}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcg.sentences import sentence_of

ROTATE_BYTES = 32 * 1024 * 1024
FIELDS = "event_fields"
"""The attribute of a log record that holds the fields of its event."""
EventValue = str | int | float | bool | None | list[str] | dict[str, int]
MAX_TEXT = 2000
_log = logging.getLogger(__name__)


def log_text(text: str, most: int = MAX_TEXT) -> str:
    """A text as one line of at most `most` printable characters; other characters become escapes.

    All log lines and all names that commands show pass this function, so foreign text can't start a line or control a terminal.
    """
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def log_event(event: Mapping[str, Any]) -> None:
    """Write the sentence of an event, if it has one, to the log of this process."""
    sentence = sentence_of(event)
    if sentence is not None:
        _log.log(sentence.level, "%s", sentence.text, extra={FIELDS: dict(event)})


@dataclass(frozen=True, eq=False)
class EventLog:
    """Appends events; several processes may write one file, since each line is a single O_APPEND write.

    Attributes:
        path: of the file.
        clock: unix time.
        allows: whether one more line of (event, client) is written; lines without a client always are.
        common: fields of every line.
        watch: called with every written event; by default it also writes to the log.
    """

    path: Path
    clock: Callable[[], float]
    allows: Callable[[str, str], bool] = lambda _event, _client: True
    common: Mapping[str, EventValue] = field(default_factory=dict)
    watch: Callable[[dict[str, EventValue]], None] = log_event

    def about(self, **fields: EventValue) -> EventLog:
        """The same log with these fields in every line."""
        return replace(self, common={**self.common, **fields})

    def unwatched(self) -> EventLog:
        """The same log without `watch`: its lines appear nowhere else."""
        return replace(self, watch=lambda event: None)

    def write(self, event: str, **fields: EventValue) -> bool:
        """Append one event; a full disk never stops the program.

        Returns:
            Whether a line was written.
        """
        client = fields.get("client")
        if isinstance(client, str) and not self.allows(event, client):
            return False
        written: dict[str, EventValue] = {"t": round(self.clock(), 3), "event": event, **self.common}
        written |= {name: _bounded(value) for name, value in fields.items()}
        self._append(json.dumps(written) + "\n")
        self.watch(written)
        return True

    def _append(self, line: str) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            os.write(descriptor, line.encode())
            is_full = os.fstat(descriptor).st_size > ROTATE_BYTES
        except OSError:
            return
        finally:
            os.close(descriptor)
        if is_full:
            self._rotate()

    def _rotate(self) -> None:
        """Keep one old file. Other processes that write this log open the new file with their next line."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > ROTATE_BYTES:  # otherwise another process was first
                self.path.replace(self.path.with_suffix(".old.jsonl"))


def read_events(path: Path) -> Iterator[dict[str, EventValue]]:
    """All complete events of a log, oldest first; lines torn by a full disk or a power cut are skipped."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(event_in, lines))


def follow_events(path: Path, every_s: float) -> Iterator[dict[str, EventValue]]:
    """All complete events of a log, then each new one, without end; after a rotation it continues with the new file."""
    while True:
        with path.open(encoding="utf-8", errors="replace") as lines:
            opened, begun, is_rotated = os.fstat(lines.fileno()).st_ino, "", False
            while True:
                begun += lines.readline()
                if begun.endswith("\n"):
                    yield from filter(None, [event_in(begun)])
                    begun = ""
                elif is_rotated:  # and everything written before the rotation is read
                    break
                else:
                    with contextlib.suppress(FileNotFoundError):
                        is_rotated = path.stat().st_ino != opened
                    time.sleep(every_s)


def _bounded(value: EventValue) -> EventValue:
    if isinstance(value, str):
        return log_text(value)
    return [log_text(each) for each in value] if isinstance(value, list) else value


def event_in(line: str) -> dict[str, EventValue] | None:
    """The event in a line of a log; None for a torn line."""
    try:
        event = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
