"""SIGKILL agents, coordinator and broker in mid-transfer, over MQTT and HTTPS: the round completes, nothing counts twice, and
what had arrived is not sent again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.wire.messages.schemas import COORDINATOR, Carrier
from fedcg.wire.transfer.chunks import FRAME_OVERHEAD_BYTES
from tests.conftest import StartMosquitto
from tests.support.broker.throttle import Weather
from tests.support.wire.transfer_parties import SOME, MakeWorld, chunks_of, worlds

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(200)]
PERSISTENCE = ("persistence true", "autosave_interval 1")


WINDOWS = {Carrier.MQTT: 17, Carrier.HTTPS: 64}  # chunks that were under way when something died: lost or repeated
BOTH_CARRIERS = pytest.mark.parametrize("make_world", [Carrier.MQTT, Carrier.HTTPS], indirect=True)


@pytest.fixture
def make_world(request: pytest.FixtureRequest, tmp_path: Path, mosquitto: StartMosquitto) -> Iterator[MakeWorld]:
    with worlds(tmp_path, mosquitto, getattr(request, "param", Carrier.MQTT)) as make:
        yield make


@BOTH_CARRIERS
def test_an_agent_killed_in_mid_upload_sends_only_the_rest(make_world: MakeWorld) -> None:
    world = make_world()
    parties = world.parties
    there = parties.await_chunks(lambda: parties.uploaded("a"), SOME, "the upload is under way")
    parties.kill("a")
    there = max(there, parties.uploaded("a"))
    parties.start("a")
    came = world.finish()
    assert came["received"] == chunks_of(came) > there
    assert parties.event("a", "receipt")["chunks_sent"] <= chunks_of(came) - there  # by the second process
    assert len(parties.events("a", "agent_started")) == 2


@BOTH_CARRIERS
def test_a_coordinator_killed_in_mid_upload_asks_only_for_the_rest(make_world: MakeWorld) -> None:
    world = make_world()
    parties = world.parties
    there = parties.await_chunks(lambda: parties.uploaded("a"), SOME, "the upload is under way")
    parties.kill(COORDINATOR)
    parties.start(COORDINATOR)
    came = world.finish()
    assert came["resumed"] >= there
    assert came["resumed"] + came["received"] == chunks_of(came)
    window = WINDOWS[world.carrier]
    assert came["repeated"] <= window
    assert parties.event("a", "receipt")["chunks_sent"] <= chunks_of(came) + window


@BOTH_CARRIERS
@pytest.mark.parametrize("victim", ["a", COORDINATOR])
def test_whoever_is_killed_in_mid_download_only_the_rest_is_carried(make_world: MakeWorld, victim: str) -> None:
    world = make_world()
    parties = world.parties
    there = parties.await_chunks(lambda: parties.downloaded("a"), SOME, "the download is under way")
    parties.kill(victim)
    parties.start(victim)
    world.finish()
    came = world.download()
    assert came["resumed"] >= there if victim == "a" else came["resumed"] == 0
    assert came["resumed"] + came["received"] == chunks_of(came)


@BOTH_CARRIERS
def test_a_transfer_completes_over_a_slow_and_unreliable_link(make_world: MakeWorld) -> None:
    weather = Weather(
        bytes_per_s=8_000, delay_s=0.5, jitter_s=0.2, stalls=0.02, stall_s=(0.2, 3.0), reset_after=(24_000,)
    )
    world = make_world(weather, size=24_000, chunk_bytes=2048, keepalive_s=30)
    came = world.finish()
    assert came["received"] + came["resumed"] == -(-came["size"] // (2048 - FRAME_OVERHEAD_BYTES))
    assert world.link.resets == 1


@pytest.mark.parametrize(
    ("extra", "way"),
    [((), "up"), (PERSISTENCE, "up"), ((), "down"), (PERSISTENCE, "down")],
)
def test_a_broker_killed_in_mid_transfer_loses_nothing_that_had_arrived(
    make_world: MakeWorld, extra: tuple[str, ...], way: str
) -> None:
    world = make_world(extra=extra)
    parties = world.parties
    count = (lambda: parties.uploaded("a")) if way == "up" else (lambda: parties.downloaded("a"))
    parties.await_chunks(count, SOME, f"the transfer {way} is under way")
    world.broker.stop()  # SIGKILL
    world.broker.start()
    came = world.finish()
    assert (came["resumed"], came["received"]) == (0, chunks_of(came))
    assert parties.event("a", "receipt")["chunks_sent"] <= chunks_of(came) + 20  # what was in flight, once more


def test_a_link_that_goes_dead_for_longer_than_the_keepalive_is_found_again(make_world: MakeWorld) -> None:
    world = make_world()
    parties = world.parties
    parties.await_chunks(lambda: parties.uploaded("a"), SOME, "the upload is under way")
    world.link.hold()
    parties.event(COORDINATOR, "offline", "the will arrives", 1.5 * parties.plan.keepalive_s + 20.0)
    world.link.release()
    came = world.finish()
    assert came["received"] == chunks_of(came)
    assert parties.event("a", "receipt")["chunks_sent"] <= chunks_of(came) + 20
