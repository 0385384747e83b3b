"""Follows the event logs (JSON lines) of agents and coordinator, and turns them into figures and problems."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedcg.event_log import event_in

Event = Mapping[str, object]


class Follower:
    """Reads the lines added to a file of JSON lines since the last call; an incomplete last line is read later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> Iterator[Event]:
        """Return the events added since the last call, oldest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        yield from filter(None, map(event_in, whole.decode(errors="replace").splitlines(keepends=True)))


def number(event: Event, name: str) -> float | None:
    """Return a number in an event, or None if it is missing."""
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole(event: Event, name: str) -> int:
    """Return an integer in an event; 0 if it is missing."""
    return int(number(event, name) or 0)


@dataclass
class AgentHistory:
    """The history of one agent, from its event log.

    Attributes:
        curve: the last `committed` event per round, with its accuracies.
        finalised: the `finalised` event, or None until it is logged.
        problems: one line for each problem.
    """

    id: str
    curve: dict[int, Event] = field(default_factory=dict)
    finalised: Event | None = None
    problems: list[str] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            name = event.get("event")
            if name == "committed":
                self.curve[whole(event, "round")] = {**event, "generator_spread": event.get("spread")}
            elif name == "receipt" and event.get("outcome") not in ("accepted", "duplicate"):
                self.problems.append(f"round {event.get('round')}: {event.get('outcome')} {event.get('reason') or ''}")
            elif name == "finalised":
                self.finalised = event
            elif name in ("round_failed", "declined", "trainer_died", "finalise_failed"):
                self.problems.append(" ".join(f"{key}={value}" for key, value in event.items() if key != "t"))


@dataclass
class CoordinatorHistory:
    """The history of the coordinator, from its event log.

    Attributes:
        is_open: whether the first round was opened.
        stored: the rounds whose aggregate was stored.
        stalled: why the federation stalled, or None.
    """

    is_open: bool = False
    stored: list[int] = field(default_factory=list)
    stalled: str | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Add events, oldest first."""
        for event in events:
            name = event.get("event")
            if name == "attempt_opened":
                self.is_open = True
            elif name == "aggregate_stored":
                self.stored.append(whole(event, "round"))
            elif name == "stalled":
                self.stalled = str(event.get("reason"))
