"""FedAvg over a real broker: an extractor leaves only a box whose owner allowed it; another one declines with the reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.wire.artifacts.artifacts import read_header
from fedcg.wire.errors import WireError
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
WILLING, STRICT = "site-1", "site-2"
EVERYTHING_SHARED = ("classifier", "extractor")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two devices, of which one allows its extractor to leave, up to where the federation paused for want of the other."""
    stack = Stack(
        root=tmp_path_factory.mktemp("fedavg"),
        devices=(WILLING, STRICT),
        method="fedavg",
        params={"epochs": 1},
        rounds=1,
        allow_upload={WILLING: EVERYTHING_SHARED},
    )
    with stack.up(agents=True, observer=()):
        stack.wait_event("coordinator", lambda event: event["event"] == "declined", "the federation waits for an owner")
        yield stack


def senders(stack: Stack) -> dict[str, set[str]]:
    """Which parts each sender's artifacts hold that the coordinator has ever stored."""
    held: dict[str, set[str]] = {}
    for path in filter(Path.is_file, sorted((stack.home / "artifacts").iterdir())):
        try:
            header = read_header(path.read_bytes())
        except WireError:
            continue  # the spec, a server state
        held.setdefault(header.client, set()).update(key.partition("/")[0] for key in header.codecs)
    return held


def seen_on_the_wire(stack: Stack) -> set[str]:
    """Whose artifacts the observer saw cross."""
    path = Path(stack.root / "wire" / "wire.json")
    return {entry["sender"] for entry in json.loads(path.read_text())["artifacts"]} if path.exists() else set()


def test_a_device_that_does_not_allow_the_extractor_declines_with_the_reason_and_sends_nothing(stack: Stack) -> None:
    declined = [event for event in stack.events(STRICT) if event["event"] == "declined"]
    assert {event["reason"] for event in declined} == {"upload_not_allowed"}
    assert STRICT not in senders(stack)
    assert STRICT not in seen_on_the_wire(stack)
    assert not any(event["event"] in ("phase_started", "committed") for event in stack.events(STRICT))


def test_once_its_owner_allows_the_extractor_the_same_device_takes_part(stack: Stack) -> None:
    for name in ("coordinator", STRICT):
        stack.running[name].terminate()
        stack.running[name].wait(timeout=30)
    set_values(stack.config(STRICT), {("policy", "allow_upload"): list(EVERYTHING_SHARED)})
    stack.start_coordinator()
    stack.start_agent(STRICT)
    stack.wait_finished()
    assert senders(stack) == {sender: {"extractor", "classifier"} for sender in ("coordinator", WILLING, STRICT)}
    wait_for(lambda: {WILLING, STRICT} <= seen_on_the_wire(stack), "the observer has written both updates", 20)
