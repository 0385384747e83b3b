"""Events of the agent's state machine as a coordinator causes them, and states that tests start from."""

from edge_client.session.signals import Command, Ended, Event, Granted, Offered, Receipted, Send
from edge_client.session.state import SessionState
from edge_client.session.state_machine import step
from fedcg.wire.messages.schemas import ArtifactRef, Decline, DeclineReason, Finished, Need, Offer, Outcome, Receipt

DIRECT = {"federation": "shapes", "sender": "coordinator", "recipient": "site-1"}
BROADCAST = {**DIRECT, "recipient": "*"}
SPEC = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=500)
OTHER_SPEC = ArtifactRef(id="b" * 64, size=1000, chunk_bytes=500)


def aggregate(round_number: int) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number:064x}", size=5000, chunk_bytes=500)


def update(round_number: int, attempt: int = 1) -> ArtifactRef:
    return ArtifactRef(id=f"{round_number * 16 + attempt:064x}".replace("0", "f", 1), size=4000, chunk_bytes=500)


def offer(round_number: int, attempt: int = 1, *, spec: ArtifactRef = SPEC) -> Offered:
    at = {"epoch": 1, "round": round_number, "attempt": attempt}
    message = Offer(**BROADCAST, **at, spec=spec, aggregate=aggregate(round_number), rounds=3, deadline_at=0.0)
    return Offered(message, live=False)


def ended() -> Ended:
    return Ended(Finished(**BROADCAST, epoch=1, round=3, attempt=1, spec=SPEC, aggregate=aggregate(9)))


def receipt(artifact: str, outcome: Outcome = Outcome.ACCEPTED, reason: str = "") -> Receipted:
    return Receipted(Receipt(**DIRECT, artifact=artifact, outcome=outcome, reason=reason))


def need(artifact: str) -> Granted:
    return Granted(Need(**DIRECT, artifact=artifact, ranges=((0, 4),)))


def drive(state: SessionState, *events: Event, now: float = 0.0) -> tuple[SessionState, list[Command]]:
    """Feed events; returns the last state and all commands."""
    commands: list[Command] = []
    for event in events:
        state, given_now = step(state, event, now)
        commands += given_now
    return state, commands


def sent(commands: list[Command]) -> list[str]:
    return [command.message.kind for command in commands if isinstance(command, Send)]


def reasons(commands: list[Command]) -> list[DeclineReason]:
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [message.reason for message in messages if isinstance(message, Decline)]
