"""What no check foresaw costs the update under which it happened, and nothing else; a device that is gone is forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.messaging.cohort_marks import Cohorts
from coordinator.rounds.records import DeviceState
from coordinator.updates.upload_windows import Uploads
from coordinator.updates.validation import validate_update
from fedcg.wire.messages.messages import CohortVerdict, Outcome
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    spec = tiny_spec(rounds=2)
    made = World(tmp_path / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=("a", "b", "c"))
    yield made
    made.close()


def is_refused_alone(world: World, reason: str) -> None:
    """The first round has b and c, the second one everybody."""
    others = [world.devices["b"], world.devices["c"]]
    with RunningService(world) as running:
        for device in others:
            device.silent = True
            device.start()
        world.wait_event("attempt_opened")
        world.devices["a"].start()
        world.wait_event("online", 3)
        for device in others:
            device.silent = False
            device.act()
        world.wait_event("finished")
        assert running.service.refusals["unforeseen"] == 1
        assert running.service.refused_of("a") >= 1
        assert running.service.refused_of("b") == 0
    [rejected] = world.events("update_refused")
    assert (rejected["client"], rejected["round"], rejected["outcome"]) == ("a", 2, "rejected")
    assert reason in rejected["reason"]
    assert [receipt.outcome for receipt in world.devices["a"].receipts()] == [Outcome.REJECTED]
    stored = [(event["client"], event["round"]) for event in world.events("update_stored")]
    assert sorted(stored) == [("b", 1), ("b", 2), ("c", 1), ("c", 2)]
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


def test_the_cohort_of_those_that_stay_is_judged_without_a_device_that_is_gone() -> None:
    cohorts = Cohorts()
    cohorts.note("a", "1" * 32)
    cohorts.note("b", "1" * 32)
    assert cohorts.note("odd", "2" * 32) == ("a", "b")
    assert cohorts.verdict("a") is CohortVerdict.DIFFERENT
    cohorts.forget("odd")
    assert cohorts.verdict("a") is CohortVerdict.SAME
    cohorts.forget("b")
    assert cohorts.verdict("a") is CohortVerdict.ALONE


def test_a_revoked_device_no_longer_makes_the_others_cohort_differ(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.REFRESH_S", 0.05)
    world.devices["a"].silent = True  # the first attempt stays open
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("online", 3)
        cohorts = running.service._cohorts
        for device, mark in (("a", "2"), ("b", "1"), ("c", "1")):
            cohorts.note(device, mark * 32)
        assert cohorts.verdict("b") is CohortVerdict.DIFFERENT
        world.store.register.end_membership("a", DeviceState.REVOKED, "lost", 2.0)
        world.wait_event("departed")
        wait_until(lambda: cohorts.verdict("b") is CohortVerdict.SAME, "the revoked device is forgotten")
