"""Follows the event logs (JSON lines) of agents and coordinator, and turns them into states, times and figures."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Event = Mapping[str, object]


class Follower:
    """Reads the lines that were added to a file of JSON lines since the last time; a torn last line waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[Event]:
        """The events added since the last call, oldest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def number(event: Event, name: str) -> float | None:
    """A number in an event, or None when it is not there."""
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole(event: Event, name: str) -> int:
    """A whole number in an event; 0 when it is not there."""
    return int(number(event, name) or 0)


@dataclass
class AgentHistory:
    """The history of one agent, from its event log.

    Attributes:
        committed, received: end of the local round and its receipt (unix seconds), by round; a later attempt overwrites an earlier one.
        verified: when each artifact was here, complete and checked, by its sha256.
        curve: the last `committed` event per round, with its accuracies.
        finalised: the `finalised` event, once there is one.
    """

    id: str
    state: str = "starting"
    round: int = 0
    step: int = 0
    steps: int = 0
    committed: dict[int, float] = field(default_factory=dict)
    received: dict[int, float] = field(default_factory=dict)
    verified: dict[str, float] = field(default_factory=dict)
    curve: dict[int, Event] = field(default_factory=dict)
    finalised: Event | None = None
    problems: list[str] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            name, at = event.get("event"), number(event, "t")
            if name in _STATES:
                self.state = _STATES[str(name)]
            if name in ("accepted", "phase_started", "progress", "committed"):
                self.round = whole(event, "round")
            if name == "artifact_stored" and at is not None:
                self.verified.setdefault(str(event.get("artifact")), at)
            elif name in ("phase_started", "progress"):
                self.state, self.step, self.steps = str(event.get("phase")), whole(event, "step"), whole(event, "steps")
            elif name == "committed" and at is not None:
                self.committed[self.round] = at
                self.curve[self.round] = {**event, "generator_spread": event.get("spread")}
            elif name == "receipt" and at is not None:
                self.received[whole(event, "round")] = at
                if event.get("outcome") not in ("accepted", "duplicate"):
                    self.problems.append(
                        f"round {event.get('round')}: {event.get('outcome')} {event.get('reason') or ''}"
                    )
            elif name == "finalised":
                self.finalised = event
            elif name in ("round_failed", "declined", "trainer_died", "finalise_failed"):
                self.problems.append(" ".join(f"{key}={value}" for key, value in event.items() if key != "t"))


_STATES = {
    "agent_started": "connecting",
    "welcomed": "waiting",
    "accepted": "accepted",
    "declined": "declined",
    "committed": "sending",
    "receipt": "waiting",
    "finalised": "done",
    "agent_stopped": "done",
}


@dataclass
class CoordinatorHistory:
    """The history of the coordinator, from its event log.

    Attributes:
        opened: when each round opened (unix seconds), and from which aggregate, by round; a later attempt overwrites an earlier one.
        stored: when each round's aggregate was stored, and which one, by round.
        stalled: why the federation stalled, when it did.
    """

    round: int = 0
    state: str = "starting"
    step: int = 0
    steps: int = 0
    opened: dict[int, tuple[float, str]] = field(default_factory=dict)
    stored: dict[int, tuple[float, str]] = field(default_factory=dict)
    stalled: str | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            name, at = event.get("event"), number(event, "t")
            if "round" in event:
                self.round = whole(event, "round")
            if name == "aggregate_step":
                self.state = str(event.get("phase"))
                self.step, self.steps = whole(event, "step"), whole(event, "steps")
            elif name == "attempt_opened" and at is not None:
                self.state, self.step, self.steps = "collecting", 0, 0
                self.opened[self.round] = at, str(event.get("aggregate"))
            elif name == "aggregate_stored" and at is not None:
                self.state, self.step, self.steps = "stored", 0, 0
                self.stored[self.round] = at, str(event.get("artifact"))
            elif name == "stalled":
                self.stalled = str(event.get("reason"))
            elif name in ("distilling", "finished"):
                self.state = str(name)
