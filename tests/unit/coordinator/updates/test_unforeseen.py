"""An error that no check foresaw costs the update under which it happened, and nothing else."""

import logging
from typing import Any

import pytest

from coordinator.config import RoundSettings
from coordinator.updates.upload_windows import Uploads
from coordinator.updates.validation import validate_update
from fedcg.wire.messages.schemas import Outcome
from tests.support.coordinator.world import MakeWorld, RunningService, World


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    all_first = RoundSettings(gather_s=600.0, retry_s=0.0)  # the round opens when all three are online
    return make_world(rounds=1, clients=("a", "b", "c"), pacing=all_first)


def is_refused_alone(world: World, reason: str) -> None:
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("finished")
        assert running.service.refusals["unforeseen"] == 1
        assert running.service.refused_of("a") >= 1
        assert running.service.refused_of("b") == 0
    [rejected] = world.events("update_refused")
    assert (rejected["client"], rejected["round"], rejected["outcome"]) == ("a", 1, "rejected")
    assert reason in rejected["reason"]
    assert [receipt.outcome for receipt in world.devices["a"].receipts()] == [Outcome.REJECTED]
    assert sorted(event["client"] for event in world.events("update_stored")) == ["b", "c"]
    assert not world.events("attempt_failed")


@pytest.mark.parametrize("error", [RuntimeError("nobody thought of it"), MemoryError("too many numbers")])
def test_an_update_whose_check_fails_in_an_unforeseen_way_is_rejected_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def breaks_on_a(data: bytes, spec: Any, expected: Any, base: Any = None) -> Any:
        if expected.client == "a":
            raise error
        return validate_update(data, spec, expected, base)

    monkeypatch.setattr("coordinator.updates.update_checks.validate_update", breaks_on_a)
    with caplog.at_level(logging.ERROR):
        is_refused_alone(world, type(error).__name__)
    [first, *_] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "a" in first.getMessage().split()
    assert first.exc_info is not None  # with the traceback


def test_a_chunk_that_fails_in_an_unforeseen_way_ends_its_update_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Uploads.feed

    def breaks_on_a(self: Uploads, device: str, chunk: Any, now: float) -> Any:
        if device == "a":
            raise RuntimeError("nobody thought of it")
        return feed(self, device, chunk, now)

    monkeypatch.setattr(Uploads, "feed", breaks_on_a)
    is_refused_alone(world, "RuntimeError")
