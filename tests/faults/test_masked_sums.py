"""fedprobe over a real broker: one device's numbers cross behind masks only, and their sum is exact, or absent, whoever is killed when."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.paths import Home
from coordinator.storage.store import Store
from edge_client.store.private_store import PrivateStore
from fedcg.files import checked_secret
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base, unpack
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

DEVICES = tuple(f"site-{number}" for number in range(1, 6))
# Enough steps of the fit, and none left out, for a kill to come within it.
PARAMS = {"epochs": 12, "probes": 4, "align_steps": 300, "align_until": 0.0}
SHARED = ("classifier", "statistics")


def made(root: Path, devices: tuple[str, ...] = DEVICES, *, without_roster: str = "", **wishes: Any) -> Stack:
    """Devices that know each other's message keys by their owners' files."""
    uploads = dict.fromkeys(devices, SHARED)
    stack = Stack(root=root, devices=devices, method="fedprobe", params=PARAMS, allow_upload=uploads, **wishes)
    stack.prepare()
    cards = [stack.command("cohort", "card", "--config", str(stack.config(device))) for device in devices]
    roster = root / "roster.txt"
    roster.write_text("".join(cards))
    for device in devices:
        if device != without_roster:
            stack.command("cohort", "roster", str(roster), "--config", str(stack.config(device)))
    return stack


def sum_events(stack: Stack, of: str = "coordinator") -> list[tuple[str, int]]:
    return [(event["event"], event["round"]) for event in stack.events(of) if event["event"].startswith("sum_")]


def of_round(stack: Stack, number: int) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """The statistics of a round's aggregate, and of each update."""
    artifacts = ArtifactStore(Home(stack.home).artifacts)
    with contextlib.closing(Store.of(Home(stack.home))) as store:
        spec = FederationSpec.parse(artifacts.get(store.federation("shapes").spec))
        before, aggregate = store.aggregate("shapes", number - 1), store.aggregate("shapes", number)
        assert before is not None
        assert aggregate is not None
        updates = store.updates("shapes", RoundAttempt(number, aggregate.attempt))
    layouts = {part: spec.layouts[part] for part in (Part.CLASSIFIER, Part.STATISTICS)}
    base = Base(before.artifact, unpack(artifacts.get(before.artifact), layouts).parts)
    told = {update.client: unpack(artifacts.get(update.artifact), layouts, base=base) for update in updates}
    merged = unpack(artifacts.get(aggregate.artifact), layouts)
    return dict(merged.parts[Part.STATISTICS]), {name: dict(one.parts[Part.STATISTICS]) for name, one in told.items()}


def private_numbers(stack: Stack, device: str) -> dict[str, Array]:
    """A device's numbers of its last round, as they never leave it."""
    stored = PrivateStore.open(stack.store(device), "shapes", device).generations.load()
    assert stored is not None
    return dict(stored.slots["personal"][Part.STATISTICS])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A finished federation that nobody disturbed."""
    stack = made(tmp_path_factory.mktemp("undisturbed"))
    with stack.up(agents=True):
        stack.wait_finished()
        yield stack


def test_the_sum_is_that_of_all_private_numbers_and_each_update_looks_like_chance(undisturbed: Stack) -> None:
    assert sum_events(undisturbed) == [("sum_opened", 1), ("sum_opened", 2)]
    opened, told = of_round(undisturbed, 2)
    private = {device: private_numbers(undisturbed, device) for device in DEVICES}
    assert np.array_equal(opened["outputs"], sum(numbers["outputs"] for numbers in private.values()))
    assert int(opened["weight"]) == sum(int(numbers["weight"]) for numbers in private.values()) > 0
    for device, numbers in private.items():
        assert numbers["outputs"].any()
        crossed = told[device]["outputs"]
        assert np.mean(crossed == numbers["outputs"]) < 0.01
        assert abs(float(np.mean(crossed)) / 2**31 - 1.0) < 0.1, "masks are uniform"
        assert int(told[device]["weight"]) == int(numbers["weight"])


def test_a_killed_agent_and_a_killed_coordinator_go_on_with_the_same_sum(tmp_path: Path, undisturbed: Stack) -> None:
    stack = made(tmp_path)
    with stack.up(agents=True):
        stack.wait_event("site-2", trains, "its training is under way")
        stack.kill("site-2")
        stack.start_agent("site-2")
        stack.wait_event("coordinator", lambda event: event["event"] == "update_stored", "an update is stored")
        stack.kill("coordinator")
        stack.start_coordinator()
        stack.wait_event("site-3", fits, "its fit to the mean of round 1 is under way")
        stack.kill("site-3")
        assert not [event for event in stack.events("site-3") if is_training(event, 2)], "the fit was over"
        stack.start_agent("site-3")
        stack.wait_finished()
        assert sum_events(stack) == [("sum_opened", 1), ("sum_opened", 2)]
        assert stack.final_aggregate() == undisturbed.final_aggregate()


def test_a_device_that_is_lost_after_its_masks_costs_the_others_nothing(tmp_path: Path) -> None:
    stack = made(tmp_path, min_clients=4, deadline_s=25.0, rounds=1)
    with stack.up(agents=True):
        stack.wait_event("site-5", trains, "its training is under way")
        stack.kill("site-5")
        wait_for(lambda: ("sum_opened", 1) in sum_events(stack), "the sum is opened")
        wait_for(lambda: any(event["event"] == "finished" for event in stack.events("coordinator")), "it is over")
    opened, _ = of_round(stack, 1)
    left = [private_numbers(stack, device)["outputs"] for device in DEVICES[:4]]
    assert np.array_equal(opened["outputs"], sum(left))


def test_a_device_without_the_roster_declines_and_one_with_another_cohort_secret_is_in_no_sum(tmp_path: Path) -> None:
    rest = ("site-2", "site-3", "site-4", "site-6")
    stack = made(tmp_path, (*DEVICES, "site-6"), without_roster="site-1", min_clients=4, rounds=1)
    (stack.store("site-5") / "secrets" / "cohort.key").write_bytes(checked_secret(b"d" * 32))
    with stack.up(agents=True):
        stack.wait_finished(deadline_s=90.0)
        declined = [event for event in stack.events("site-1") if event["event"] == "declined"]
        assert "fedcg cohort card" in declined[0]["detail"]
        barred = [event["clients"] for event in stack.events("coordinator") if event["event"] == "barred"]
        assert ["site-5: its cohort secret is not that of most devices"] in barred, "once most have come"
        assert sum_events(stack) == [("sum_opened", 1)]
        opened, told = of_round(stack, 1)
        assert sorted(told) == list(rest)
        left = [private_numbers(stack, device)["outputs"] for device in rest]
        assert np.array_equal(opened["outputs"], sum(left))


def trains(event: dict[str, Any]) -> bool:
    """Progress inside the classifier's training of round 1."""
    return is_training(event, 1)


def is_training(event: dict[str, Any], number: int) -> bool:
    """Progress inside the classifier's training of a round."""
    return bool(event["event"] == "progress" and event["phase"] == "classify" and event["round"] == number)


def fits(event: dict[str, Any]) -> bool:
    """Progress inside the fit to the mean outputs, before the training of round 2."""
    return bool(event["event"] == "progress" and event["phase"] == "align" and event["round"] == 2)
