"""Random, mutated, oversize and deliberately odd bytes at every entry of the coordinator and the agent: never an exception,
each refusal counted once, and no memory taken for what is refused."""

import json
import random
import string
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coordinator.messaging.incoming import MessageChecks, Sessions
from edge_client.link.artifact_transfer import Downloads
from edge_client.link.coordinator_link import CoordinatorLink, CoordinatorTrust, Handshake
from edge_client.session.signals import Wanted
from edge_client.store.private_store import PrivateStore
from fedcg.wire.errors import IntegrityError, WireError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import DOMAIN, MAGIC, SigningKey, seal
from fedcg.wire.messages.schemas import COORDINATOR, EVERYONE, AnyMessage
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunks import Chunk, chunk_frame
from fedcg.wire.transfer.partial_files import Partials
from fedcg.wire.transport.transport import Delivery
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.coordinator.published import Published, receiver_of
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import RunningService, World
from tests.support.edge.world import DEVICE, FEDERATION, aggregate_of, toy_parts, toy_spec
from tests.support.edge.world import World as AgentWorld
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import frames_for, make_ref
from tests.support.wire.golden_files import messages

TOPICS = Topics(FEDERATION)
KEY, STRANGER, COORDINATORS = (SigningKey.generate() for _ in range(3))
NONCE = "0" * 32
DATA = random.Random(5).randbytes(3000)
REF = make_ref(DATA, 1000)
UP = {"federation": FEDERATION, "sender": DEVICE, "recipient": COORDINATOR}
FROM_DEVICE, FROM_COORDINATOR = (
    tuple(one for one in messages() if (one.sender == COORDINATOR) is is_down) for is_down in (False, True)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
LIMITED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def signed(payload: bytes, key: SigningKey) -> bytes:
    """An authentic envelope around whatever it is."""
    return MAGIC + key.sign(DOMAIN + payload) + payload


@st.composite
def envelopes(draw: st.DrawFn, messages: tuple[AnyMessage, ...], key: SigningKey) -> bytes:
    """Random bytes; a sealed message with bytes changed, cut or added; or one that its true sender made wrong before signing."""
    way = draw(st.sampled_from(["random", "mutated", "odd", "garbage", "stranger"]))
    message = draw(st.sampled_from(messages))
    if way == "random":
        return draw(st.binary(max_size=300))
    if way == "garbage":
        return signed(draw(st.binary(max_size=300)), key)
    if way == "stranger":
        return seal(message, STRANGER)
    if way == "odd":
        fields = json.loads(schemas.encode(message))
        name = draw(st.sampled_from([*fields, "more"]))
        return signed(json.dumps(fields | {name: draw(json_values)}).encode(), key)
    sealed = bytearray(seal(message, key))
    for _ in range(draw(st.integers(1, 4))):
        sealed[draw(st.integers(0, len(sealed) - 1))] = draw(st.integers(0, 255))
    return bytes(sealed[: draw(st.integers(0, len(sealed)))]) + draw(st.binary(max_size=20))


topics = st.text(string.ascii_lowercase + "/+#-", max_size=30) | st.sampled_from(
    [
        TOPICS.offer,
        TOPICS.coordinator,
        TOPICS.aggregate,
        *(spell(DEVICE) for spell in (TOPICS.up_control, TOPICS.up_chunk, TOPICS.status)),
        *(spell(DEVICE) for spell in (TOPICS.down_control, TOPICS.down_chunk)),
    ]
)


# no chunk of REF has one of them
lengths = st.binary(min_size=1, max_size=999) | st.binary(min_size=1001, max_size=1001)


@st.composite
def chunk_frames(draw: st.DrawFn) -> bytes:
    """Random bytes; frames that were damaged; or sound ones of places, lengths and artifacts that are not there."""
    way = draw(st.sampled_from(["random", "mutated", "odd"]))
    if way == "random":
        return draw(st.binary(max_size=200))
    if way == "mutated":
        frame = bytearray(draw(st.sampled_from(list(frames_for(DATA, REF)))))
        frame[draw(st.integers(0, len(frame) - 1))] ^= draw(st.integers(1, 255))
        return bytes(frame[: draw(st.integers(0, len(frame)))])
    return chunk_frame(draw(st.sampled_from([REF.id, "0" * 64])), draw(st.integers(0, 2**32 - 1)), draw(lengths))


class CoordinatorsDoor:
    """Where deliveries come in: messages, and chunks of one update that was announced."""

    def __init__(self, root: Path) -> None:
        sessions = Sessions()
        sessions.greet(DEVICE, NONCE)
        world = World(root / "home", clients=(DEVICE, "b"))
        world.store.open_attempt(
            "tiny", schemas.RoundAttempt(1, 1), world.base_id, frozenset(world.clients), 0.0, 600.0
        )
        self.published = Published()
        self.receiver = receiver_of(world, self.published, lambda event: None)
        self.refusals = self.receiver.refusals
        self.checks = MessageChecks(TOPICS, sessions, self.refusals)
        self.checks.learn_keys([(DEVICE, KEY.public.hex)])
        self.receiver._announced(DEVICE, schemas.Manifest(**UP, artifact=REF, round=1, attempt=1))

    @property
    def count(self) -> int:
        """Refusals, without those of a whole that does not fit: the other side notices that later."""
        return sum(count for reason, count in self.refusals.counts.items() if reason != "damaged")


class AgentsDoor:
    """The same of a device, with one download under way."""

    def __init__(self, root: Path) -> None:
        self.downloads = Downloads(Partials(root / "partial", 4, 1 << 20))
        self.downloads.want((Wanted("aggregate", REF, None),), 0.0)
        handshake = Handshake(FEDERATION, DEVICE, "x")
        memory = CoordinatorTrust(
            PrivateStore.open(root / "store", FEDERATION, DEVICE), FEDERATION, COORDINATORS.public
        )
        transport = MemoryTransport(MemoryBroker(), DEVICE)
        self.link = CoordinatorLink(FEDERATION, DEVICE, KEY, transport, memory, handshake)

    def refusal(self, delivery: Delivery) -> WireError | None:
        """Why a delivery is refused; None when it is taken."""
        try:
            self.take(delivery)
        except WireError as error:
            return error
        return None

    def take(self, delivery: Delivery) -> None:
        """As the agent's loop does."""
        meaning = self.link.open(delivery)
        if isinstance(meaning, Chunk):
            self.downloads.feed(meaning, 0.0)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> tuple[CoordinatorsDoor, AgentsDoor]:
    return CoordinatorsDoor(tmp_path_factory.mktemp("coordinator")), AgentsDoor(tmp_path_factory.mktemp("agent"))


Doors = tuple[CoordinatorsDoor, AgentsDoor]


@LIMITED
@given(topic=topics, payload=envelopes(FROM_DEVICE, KEY))
@example(topic=TOPICS.up_control(DEVICE), payload=signed(b"[" * 16_000, KEY))
@example(topic=TOPICS.up_control(DEVICE), payload=signed(b'{"kind":' * 2_000, KEY))
@example(topic=TOPICS.up_control(DEVICE), payload=signed(b'{"v":1' + b"0" * 9_000 + b"}", KEY))
def test_the_coordinator_takes_or_refuses_each_message_and_counts_each_refusal_once(
    doors: Doors, topic: str, payload: bytes
) -> None:
    door = doors[0]
    before = door.count
    taken = door.checks.open(Delivery(topic, payload, retained=False))
    assert door.count == before + (taken is None)


@LIMITED
@given(topic=topics, payload=envelopes(FROM_COORDINATOR, COORDINATORS), retained=st.booleans())
@example(topic=TOPICS.offer, payload=signed(b"[" * 16_000, COORDINATORS), retained=True)
def test_an_agent_takes_or_refuses_each_message_with_an_error_of_the_wire(
    doors: Doors, topic: str, payload: bytes, retained: bool
) -> None:
    refused = doors[1].refusal(Delivery(topic, payload, retained))
    assert refused is None or refused.reason != "wire", "every refusal has a reason of its own"


@LIMITED
@given(frame=chunk_frames())
def test_no_frame_breaks_a_transfer_on_either_side(doors: Doors, frame: bytes) -> None:
    coordinator, agent = doors
    before = coordinator.count
    coordinator.receiver._feed(DEVICE, frame)
    refused = agent.refusal(Delivery(TOPICS.aggregate, frame, retained=False))
    assert coordinator.count == before + (refused is not None)
    assert refused is None or refused.reason in ("malformed", "too_large")


def test_after_all_of_that_both_transfers_complete(doors: Doors) -> None:
    """With the second try at the latest: a frame may have been a chunk in its place with other bytes, which the whole shows."""
    coordinator, agent = doors
    downloaded = None
    for frame in [*frames_for(DATA, REF)] * 2:
        coordinator.receiver._feed(DEVICE, frame)
        if downloaded is None:
            agent.refusal(Delivery(TOPICS.aggregate, frame, retained=False))
            with suppress(IntegrityError):
                downloaded = agent.downloads.completed(0.0)
    assert coordinator.published.receipts == [(REF.id, schemas.Outcome.REJECTED)]  # it is complete, and no update
    assert downloaded is not None
    assert downloaded.file.read_bytes() == DATA


@pytest.mark.parametrize("size", [17 * 1024, 8_000_000])
def test_what_is_too_large_takes_no_memory(doors: Doors, size: int) -> None:
    coordinator, agent = doors
    envelope, chunk = MAGIC + bytes(size), chunk_frame(REF.id, 0, bytes(max(size, 130_000)))

    def refuse() -> None:
        before = coordinator.refusals.counts.get("too_large", 0)
        coordinator.checks.open(Delivery(TOPICS.up_control(DEVICE), envelope, retained=False))
        coordinator.receiver._feed(DEVICE, chunk)
        assert coordinator.refusals.counts["too_large"] == before + 2
        for topic, payload in ((TOPICS.offer, envelope), (TOPICS.aggregate, chunk)):
            with pytest.raises(WireError, match="over the bound"):
                agent.take(Delivery(topic, payload, retained=False))

    refuse()  # what is made once, is made
    tracemalloc.start()
    try:
        refuse()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def odd_ref(rng: random.Random) -> schemas.ArtifactRef:
    size = rng.choice([1, 255, 300_000, schemas.MAX_ARTIFACT_BYTES])
    return schemas.ArtifactRef(id=rng.randbytes(32).hex(), size=size, chunk_bytes=rng.choice([256, 1000, 120 * 1024]))


def odd_number(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, 7, 2**31, 2**53])


def odd_ranges(rng: random.Random) -> tuple[tuple[int, int], ...]:
    return tuple((odd_number(rng), rng.choice([1, 9, 1 << 20])) for _ in range(rng.choice([1, 3, 256])))


def test_a_device_that_says_odd_things_in_its_session_does_not_stop_the_coordinator(tmp_path: Path) -> None:
    """Every message is signed, in order, and of the schema; only what it says makes no sense."""
    world = World(tmp_path, tiny_spec(rounds=1), clients=("a", "b", "evil"))
    evil, rng = world.devices["evil"], random.Random(3)
    honest = [world.devices[name] for name in ("a", "b")]
    for device in (*honest, evil):
        device.silent = True
    asks: tuple[Callable[[dict[str, Any]], AnyMessage], ...] = (
        lambda where: schemas.Manifest(**where, artifact=odd_ref(rng)),
        lambda where: schemas.Need(**where, artifact=rng.choice([world.base_id, "0" * 64]), ranges=odd_ranges(rng)),
    )
    with closing(world), RunningService(world) as running:
        for device in honest:
            device.start()
        world.wait_event("attempt_opened")
        evil.start()
        wait_until(lambda: evil.session is not None, "a session")
        for _ in range(150):
            with evil.lock:
                evil.tell(rng.choice(asks)(evil.addressed(odd_number(rng), odd_number(rng))))
        for device in honest:
            device.silent = False
            device.act()
        world.wait_event("finished")
        assert running.service.refusals["dropped"] == 0
    assert {event["client"] for event in world.events("update_stored")} == {"a", "b"}
    assert {event["client"] for event in world.events("update_refused")} == {"evil"}


def test_a_coordinator_that_says_odd_things_does_not_stop_the_agent(tmp_path: Path) -> None:
    world = AgentWorld(tmp_path)
    coordinator, rng = world.coordinator, random.Random(4)
    coordinator.come_online()
    world.start_agent()
    try:
        coordinator.wait(schemas.Hello)
        wait_until(lambda: bool(world.events("welcomed")), "a session")
        for round_number in range(1, 60):
            where = coordinator.address(DEVICE, round_number, odd_number(rng))
            broadcast = coordinator.address(EVERYONE, round_number, 1)
            coordinator.tell(schemas.Need(**where, artifact=rng.randbytes(32).hex(), ranges=odd_ranges(rng)))
            coordinator.tell(schemas.Receipt(**where, artifact=rng.randbytes(32).hex(), outcome="late"))
            coordinator.tell(schemas.Invite(**where))
            refs = {"spec": odd_ref(rng), "aggregate": odd_ref(rng)}
            odd: AnyMessage = schemas.Offer(**broadcast, **refs, rounds=odd_number(rng), deadline_at=0.0)
            if rng.random() < 0.3:
                odd = schemas.Finished(**broadcast, **refs)
            coordinator.publish(coordinator.topics.offer, odd)
        wait_until(lambda: len(world.events("invited")) == 59, "all of it was heard")
        coordinator.offer(world.spec, aggregate_of(toy_parts(1), toy_spec(), 0), 90)
        coordinator.invite(90)
        assert coordinator.wait(schemas.Manifest).round == 90
        assert world.events("agent_error") == []
        assert world.events("receipt") == []
    finally:
        world.close()
