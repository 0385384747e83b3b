"""Sending what was granted: in bounded memory, fair, never twice while it waits, paced when it is a broadcast."""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedcg.wire.errors import TransportError
from fedcg.wire.transfer.chunk_sender import HIGH_WATER_BYTES, MAX_GRANTED, ChunkFile, ChunkSender, file_ref
from fedcg.wire.transfer.chunks import parse_chunk
from fedcg.wire.transport.transport import Backlog
from tests.support.waiting import wait_until
from tests.support.wire.artifact_chunks import cut, make_ref

DATA = random.Random(3).randbytes(100 * 50_000 + 3)


@dataclass
class Sent:
    topic: str
    index: int
    size: int
    qos: int
    is_under_way: bool = True


@dataclass
class SlowLink:
    """A transport whose backlog leaves only when the test says so."""

    is_up: bool = True
    sent: list[Sent] = field(default_factory=list)
    most_bytes: int = 0
    lock: Any = field(default_factory=threading.Lock)

    @property
    def backlog(self) -> Backlog:
        with self.lock:
            waiting = [message.size for message in self.sent if message.is_under_way]
        return Backlog(len(waiting), sum(waiting))

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Sent:
        if not self.is_up:
            raise TransportError("no link")
        message = Sent(topic, parse_chunk(payload).index, len(payload), qos, is_under_way=qos > 0)
        with self.lock:
            self.sent.append(message)
        self.most_bytes = max(self.most_bytes, self.backlog.bytes)
        return message

    def drain(self) -> None:
        with self.lock:
            for message in self.sent:
                message.is_under_way = False

    def indices(self, topic: str) -> list[int]:
        with self.lock:
            return [message.index for message in self.sent if message.topic == topic]


@pytest.fixture
def source(tmp_path: Path) -> ChunkFile:
    path = tmp_path / "artifact"
    path.write_bytes(DATA)
    return ChunkFile(path, file_ref(path, 50_000))


@pytest.fixture
def link() -> SlowLink:
    return SlowLink()


@pytest.fixture
def sender(link: SlowLink) -> Iterator[ChunkSender]:
    made = ChunkSender(link, "sending")  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


def test_a_file_is_announced_as_its_bytes_are(source: ChunkFile) -> None:
    assert source.ref == make_ref(DATA, 50_000)
    pieces = cut(DATA, 50_000)
    for index in (0, 57, 100, 57):
        chunk = parse_chunk(source.frame(index))
        assert (chunk.artifact, chunk.index, chunk.data) == (source.ref.id, index, pieces[index])


def test_no_more_is_read_than_the_link_takes(sender: ChunkSender, link: SlowLink, source: ChunkFile) -> None:
    sender.serve("t", source, ((0, 101),))
    wait_until(lambda: link.backlog.bytes >= HIGH_WATER_BYTES, "the link is full")
    threading.Event().wait(0.05)
    assert link.most_bytes < HIGH_WATER_BYTES + 60_000
    while len(link.sent) < 101:
        link.drain()
        threading.Event().wait(0.002)
    assert link.indices("t") == list(range(101))
    assert link.most_bytes < HIGH_WATER_BYTES + 60_000
    assert sender.sent[source.ref.id] == 101


def test_a_chunk_that_still_waits_is_not_sent_twice_and_a_lost_one_is(
    sender: ChunkSender, link: SlowLink, source: ChunkFile
) -> None:
    sender.serve("t", source, ((0, 3),))
    wait_until(lambda: len(link.sent) == 3, "three are sent")
    sender.serve("t", source, ((0, 5), (1, 2)))
    wait_until(lambda: len(link.sent) == 5, "two more are sent")
    link.drain()
    sender.serve("t", source, ((1, 1),))
    wait_until(lambda: len(link.sent) == 6, "the lost one is sent again")
    assert link.indices("t") == [0, 1, 2, 3, 4, 1]


def test_receivers_take_turns_and_greed_is_bounded(sender: ChunkSender, link: SlowLink, source: ChunkFile) -> None:
    sender.serve("greedy", source, ((0, 1 << 20),) * 256)
    sender.serve("modest", source, ((100, 5), (200, 1)))
    while len(link.sent) < 102:
        link.drain()
        threading.Event().wait(0.002)
    assert [message.topic for message in link.sent].index("modest") < 60
    assert link.indices("modest") == [100]
    assert len(link.indices("greedy")) == 101
    assert MAX_GRANTED < 1 << 20


def test_what_has_left_is_not_kept_however_many_receivers_there_are(
    sender: ChunkSender, link: SlowLink, source: ChunkFile
) -> None:
    for receiver in range(10):
        sender.serve(f"device-{receiver}", source, ((0, 101),))
    while len(link.sent) < 1010:
        link.drain()
        threading.Event().wait(0.002)
    assert len(sender._under_way) < 150


def test_without_a_link_nothing_is_kept(sender: ChunkSender, link: SlowLink, source: ChunkFile) -> None:
    link.is_up = False
    sender.serve("t", source, ((0, 50),))
    wait_until(lambda: not sender.is_busy, "it is forgotten")
    link.is_up = True
    sender.serve("t", source, ((7, 1),))
    wait_until(lambda: link.indices("t") == [7], "only what is asked for now")


def test_a_file_that_is_gone_or_cut_ends_its_sending_and_no_other(
    sender: ChunkSender, link: SlowLink, source: ChunkFile, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA[:1000])
    spare = ChunkFile(other, file_ref(other, 256))
    source.path.write_bytes(DATA[:60_000])
    sender.serve("t", source, ((0, 3),))
    sender.serve("t", spare, ((0, 4),))
    wait_until(lambda: len(link.sent) == 5, "what can be read is sent")
    assert sorted(link.indices("t")) == [0, 0, 1, 2, 3]


def test_a_broadcast_leaves_once_in_order_at_most_once(sender: ChunkSender, link: SlowLink, source: ChunkFile) -> None:
    sender.broadcast("all", source, lambda: True, 1e9)
    sender.serve("t", source, ((3, 1),))
    wait_until(lambda: len(link.sent) == 102, "all chunks and the asked-for one")
    assert link.indices("all") == list(range(101))
    assert {message.qos for message in link.sent if message.topic == "all"} == {0}


def test_a_broadcast_keeps_its_pace_and_ends_when_it_is_not_current(link: SlowLink, source: ChunkFile) -> None:
    now, current, asked = [0.0], [True], list[bool]()

    def is_current() -> bool:
        asked.append(current[0])
        return current[0]

    sender = ChunkSender(link, "sending", clock=lambda: now[0])  # type: ignore[arg-type]
    sender.start()
    sender.broadcast("all", source, is_current, 800_000.0)
    wait_until(lambda: len(link.sent) == 16, "the first burst")
    sender.serve("t", source, ((0, 1),))
    wait_until(lambda: link.indices("t") == [0], "others are served meanwhile")
    assert len(link.indices("all")) == 16
    now[0] = 16 * 50_048 / 800_000.0 + 0.001
    wait_until(lambda: len(link.indices("all")) == 32, "the second burst")
    current[0] = False
    now[0] = 1e6
    wait_until(lambda: False in asked, "it is over")
    assert len(link.indices("all")) == 32
    sender.close()
