"""Several federations in one coordinator, and what an operator does with them while they run."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coordinator.errors import NotFoundError, SteeringError
from coordinator.rounds.engine import Phase
from coordinator.rounds.records import AttemptState, FederationStatus
from fedcg.wire.messages.schemas import DeclineReason, Finished, Invite, Need, Offer, Outcome
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Federations]:
    spec = tiny_spec()
    world = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=("a", "b", "c"), min_clients=2)
    yield Federations(world, "second")
    world.store.close()


def phase(made: Federations, federation: str) -> Phase:
    return made.coordinator.services[federation].state.phase


def start(made: Federations, federation: str) -> None:
    for device in made.devices[federation]:
        device.start()


def until_over(made: Federations, federation: str) -> None:
    wait_until(lambda: phase(made, federation) is Phase.FINISHED, f"{federation} is over")
    final = made.world.store.aggregates(federation)[-1].artifact
    for device in made.devices[federation]:
        wait_until(partial(device.artifacts.__contains__, final), f"{device.name} has the end of {federation}")


def test_two_federations_of_the_same_devices_run_side_by_side(made: Federations) -> None:
    with made.running():
        for federation in ("tiny", "second"):
            start(made, federation)
        for federation in ("tiny", "second"):
            until_over(made, federation)
    for federation in ("tiny", "second"):
        assert [record.state for record in made.world.store.attempts(federation)] == [AttemptState.CLOSED] * 2
    stored = made.world.events("aggregate_stored")
    assert sorted((event["federation"], event["round"]) for event in stored) == [
        ("second", 1),
        ("second", 2),
        ("tiny", 1),
        ("tiny", 2),
    ]


def test_an_update_survives_attempts_that_end_elsewhere(made: Federations, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other, _ = made.devices["second"]
    slow.silent = other.silent = True
    granted: list[Need] = []
    take = slow.in_session
    with made.running():
        slow.start()
        other.start()
        wait_until(lambda: bool(slow.of(Invite)), "it is invited")
        base = made.world.store.aggregates("second")[0].artifact
        wait_until(partial(slow.artifacts.__contains__, base), "it has the base")
        monkeypatch.setattr(
            slow, "in_session", lambda message: granted.append(message) if isinstance(message, Need) else take(message)
        )
        data = slow.make_update(1, 1, base)
        manifest = slow.send_update(1, 1, data)
        wait_until(lambda: bool(granted), "chunks are granted")
        first, *rest = frames_for(data, manifest.artifact)
        assert rest
        slow.transport.publish(slow.topics.up_chunk("a"), first)
        parts = made.world.root / "artifacts" / ".partial"
        wait_until(lambda: bool(list(parts.rglob("a@*.part"))), "a part of it is stored")
        start(made, "tiny")
        until_over(made, "tiny")
        monkeypatch.setattr(slow, "in_session", take)  # its repeated manifest is answered with what is missing
        wait_until(lambda: bool(slow.receipts()), "the whole update is answered")
        assert slow.receipts()[0].outcome is Outcome.ACCEPTED


def test_a_paused_federation_stays_paused_over_a_restart_until_it_is_resumed(made: Federations) -> None:
    made.operations.pause("tiny", "maintenance")
    with made.running():
        start(made, "tiny")
        wait_until(lambda: len(made.coordinator.services["tiny"].state.online) == 3, "all are online")
        assert (phase(made, "tiny"), made.coordinator.services["tiny"].state.reason) == (Phase.PAUSED, "maintenance")
        made.operations.resume("tiny")
        until_over(made, "tiny")


def test_a_federation_that_ran_out_of_attempts_is_resumed_while_the_coordinator_runs(made: Federations) -> None:
    made.operations.change_policy("tiny", {"max_attempts": 1})
    for device in made.devices["tiny"]:
        device.decline = DeclineReason.NO_DATA
    with made.running():
        start(made, "tiny")
        wait_until(lambda: phase(made, "tiny") is Phase.STALLED, "no attempt is left")
        made.operations.disable("c")
        assert phase(made, "tiny") is Phase.STALLED
        for device in made.devices["tiny"]:
            device.decline = None
        made.operations.resume("tiny")
        until_over(made, "tiny")


def test_stop_ends_the_devices_with_the_last_aggregate_and_extend_goes_on_from_it(made: Federations) -> None:
    devices = made.devices["tiny"]
    with made.running():
        start(made, "tiny")
        made.world.wait_event("aggregate_stored")
        devices[0].silent = devices[1].silent = devices[2].silent = True
        made.operations.stop("tiny", "enough")
        closed = len(made.world.store.aggregates("tiny")) - 1
        wait_until(lambda: all(device.of(Finished) for device in devices), "all have the end")
        final = made.world.store.aggregates("tiny")[-1].artifact
        assert {device.of(Finished)[-1].aggregate.id for device in devices} == {final}
        with pytest.raises(SteeringError, match=r"was stopped \(enough\).*extend"):
            made.operations.resume("tiny")
        for device in devices:
            device.silent = False
        record = made.operations.extend("tiny", 3)
        assert record.policy.rounds == closed + 3
        wait_until(lambda: len(made.world.store.aggregates("tiny")) == closed + 4, "three more rounds")
        until_over(made, "tiny")


def test_a_federation_that_is_over_goes_on_with_more_rounds_under_a_new_epoch(made: Federations) -> None:
    with made.running():
        start(made, "tiny")
        until_over(made, "tiny")
        epoch = made.coordinator.services["tiny"].epoch
        made.operations.extend("tiny", 1)
        wait_until(lambda: len(made.world.store.aggregates("tiny")) == 4, "the third round")
        until_over(made, "tiny")
        assert made.coordinator.services["tiny"].epoch > epoch
        offers = [(offer.round, offer.attempt) for offer in made.devices["tiny"][0].of(Offer)]
        assert offers == sorted(offers)


def test_a_disabled_device_is_not_invited_and_an_enabled_one_is_again(made: Federations) -> None:
    made.operations.disable("c", "dust on the lens")
    made.operations.disable("c", "another reason")
    with made.running():
        start(made, "tiny")
        made.world.wait_event("aggregate_stored")
        assert made.coordinator.services["tiny"].state.barred == {"c": "disabled by an operator: dust on the lens"}
        made.operations.enable("c")
        wait_until(lambda: not made.coordinator.services["tiny"].state.barred, "nobody is barred")
        made.operations.extend("tiny", 1)
        made.world.wait_event("aggregate_stored", 3)
    opened = made.world.events("attempt_opened")
    assert opened[0]["participants"] == ["a", "b"]
    assert opened[-1]["participants"] == ["a", "b", "c"]


def test_a_created_federation_starts_when_it_is_started(made: Federations) -> None:
    store = made.world.store
    store.set_status("second", FederationStatus.CREATED, "")
    with made.running():
        assert set(made.coordinator.services) == {"tiny"}
        with pytest.raises(SteeringError, match="was not started yet; `fedcg federation start second`"):
            made.operations.pause("second")
        made.operations.start("second")
        start(made, "second")
        until_over(made, "second")
        made.operations.start("second")  # again: it is left as it is
        assert made.world.store.federation("second").status is FederationStatus.RUNNING
        made.operations.archive("second")
        with pytest.raises(SteeringError, match="was started already; it is archived"):
            made.operations.start("second")


def test_accuracy_that_rises_no_more_ends_a_federation(made: Federations) -> None:
    made.operations.change_policy("tiny", {"rounds": 9, "stop_patience": 2})
    with made.running():
        start(made, "tiny")
        until_over(made, "tiny")
    record = made.world.store.federation("tiny")
    assert record.status.value == "stopped"
    assert "of 3 clients have not risen by more than 0.1 points in 2 rounds" in record.status_reason
    assert len(made.world.store.aggregates("tiny")) == 1 + 3


def test_rounds_that_are_under_way_cannot_be_taken_back(made: Federations) -> None:
    with made.running():
        start(made, "tiny")
        until_over(made, "tiny")
        with pytest.raises(SteeringError, match="rounds = 1: tiny is in round 2 already; stop it"):
            made.operations.change_policy("tiny", {"rounds": 1})
        with pytest.raises(SteeringError) as refused:  # beside what is wrong by itself
            made.operations.change_policy("tiny", {"rounds": 1, "min_clients": 0, "late": "never"})
        for part in ("tiny: 3 problems", "min_clients: must be", "late: must be", "rounds = 1: tiny is in round 2"):
            assert part in str(refused.value)


def test_what_does_not_exist_is_named_with_what_does(made: Federations) -> None:
    with pytest.raises(NotFoundError, match="no federation 'third'; there are: tiny, second"):
        made.operations.stop("third")
    with pytest.raises(NotFoundError, match="no device 'z'"):
        made.operations.disable("z")


def test_what_another_federation_needs_is_not_pruned(made: Federations) -> None:
    made.world.keep_rounds = 1
    made.operations.change_policy("tiny", {"rounds": 4})
    made.operations.pause("second")
    with made.running():
        start(made, "tiny")
        until_over(made, "tiny")
        assert made.world.events("pruned")
        made.operations.resume("second")  # its server state is equal to the first one of the other
        start(made, "second")
        until_over(made, "second")
