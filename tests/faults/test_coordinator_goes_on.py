"""The coordinator without a usable link: it stays up, logs the cause, and goes on when the broker is repaired."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rounds.engine import Phase
from fedcg.wire.transport import mqtt
from fedcg.wire.transport.mqtt import MqttTransport
from tests.support.broker.broker_packets import SUBSCRIBE, scripted_broker, suback
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.waiting import wait_until


def test_a_broker_with_too_small_packets_does_not_end_the_coordinator_which_connects_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt, "BACKOFF_FIRST_S", 0.01)
    with scripted_broker() as broker, closing(World(tmp_path, clients=())) as world:
        config = replace(broker.config(), keepalive_s=60)
        context = replace(world.service_context(), connect=lambda will: MqttTransport(config, will))
        monkeypatch.setattr(world, "service_context", lambda: context)
        with RunningService(world) as running:
            for _ in range(3):
                assert broker.welcome(properties=b"\x27" + (600).to_bytes(4, "big")).next() is None
            wait_until(lambda: "packets of at most 600 bytes" in caplog.text, "the cause is logged")
            peer = broker.welcome()
            peer.send(suback("5", int.from_bytes(peer.expect(SUBSCRIBE)[:2], "big"), b"\x01\x01\x01"))
            wait_until(lambda: running.service.is_connected, "it has a link")
            assert running.service.state.phase is Phase.WAITING
            broker.close()


@pytest.mark.slow
def test_time_without_a_broker_is_not_blamed_on_the_devices(tmp_path: Path) -> None:
    names = ("coordinator", "a", "b")
    with closing(World(tmp_path, tiny_spec(1), deadline_s=4.0)) as world:  # most of it is left when the link is back
        world.devices["b"].silent = True
        with RunningService(world) as running:
            world.start_devices()
            wait_until(lambda: len(running.service.state.accepted) == 2, "both have accepted")
            for name in names:
                world.broker.drop(name)
            wait_until(lambda: not running.service.is_connected, "the link is lost")
            deadline_at = running.service.state.deadline_at
            wait_until(lambda: time.time() > deadline_at + 0.5, "the deadline has passed")
            for name in names:
                world.broker.restore(name)
            world.devices["b"].silent = False
            wait_until(lambda: running.service.is_connected, "the link is back")

            def is_finished() -> bool:
                world.devices["b"].act()  # with its new session
                return bool(world.events("finished"))

            wait_until(is_finished, "the round completes")
        assert world.events("attempt_failed") == []
        assert "no link to the broker" in world.events("deadline_moved")[0]["reason"]
