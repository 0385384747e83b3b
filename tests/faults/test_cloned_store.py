"""A box and a copy of it, with the same identity and private store and images of its own: what came first counts, once, the
other one gets the receipt `conflict`, and both operators a message."""

import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.schemas import Manifest, RoundAttempt
from tests.support.coordinator.toy_artifacts import FEDERATION
from tests.support.coordinator.world import RunningService
from tests.support.hostile import Box, Federation, HostileBroker, Passing
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, devices=("a", "b"))
    yield made
    made.close()


def test_of_a_box_and_its_copy_the_first_update_counts_and_the_other_is_a_conflict(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    box, broker = federation.boxes["a"], federation.broker
    PrivateStore.open(box.root / "store", FEDERATION, "a").device_secret()
    shutil.copytree(box.root, box.root.with_name("copy"))
    copy = Box("a", box.root.with_name("copy"), box.key, images="its own")
    held: list[Passing] = []

    def holds_manifests(_broker: HostileBroker, passing: Passing) -> Iterable[Passing]:
        is_manifest = passing.identity == "a" and not passing.is_chunk and isinstance(passing.message, Manifest)
        held.extend([passing] if is_manifest else [])
        return [] if is_manifest else [passing]

    with RunningService(federation.world) as running, caplog.at_level(logging.WARNING):
        broker.behaviour = holds_manifests
        federation.boxes["b"].start(federation)
        box.start(federation)
        wait_until(lambda: bool(held), "the box has trained")
        broker.drop("a")
        broker.behaviour = lambda _broker, passing: [passing]
        copy.start(federation)
        wait_until(lambda: bool(copy.events("receipt")), "the copy delivers")
        copy.stop()
        assert running.service.conditions.doubled_at == {}
        broker.restore("a")
        wait_until(lambda: "a" in running.service.conditions.doubled_at, "both agents have reported under one identity")
        wait_until(federation.is_over, "the end")
    first, second = copy.events("receipt")[0], box.events("receipt")[0]
    assert (first["round"], first["outcome"]) == (1, "accepted")
    assert (second["round"], second["outcome"]) == (1, "conflict")
    assert first["artifact"] != second["artifact"]
    kept = federation.world.store.updates(FEDERATION, RoundAttempt(1, 1))
    assert [update.artifact for update in kept if update.client == "a"] == [first["artifact"]]
    (refused,) = federation.world.events("update_refused")
    assert (refused["client"], refused["outcome"]) == ("a", "conflict")
    for told in ("two devices seem to use its private store", "a copy of it, or of its private store, takes part too"):
        assert any(told in record.message for record in caplog.records), told
    federation.assert_completed()
