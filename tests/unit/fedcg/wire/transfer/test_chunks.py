"""How an artifact is cut: chunk frames, byte ranges of the HTTPS carrier, and the windows in which chunks are asked for."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError, TooLargeError, TransportError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, MAX_CHUNK_BYTES, ArtifactRef
from fedcg.wire.transfer import chunks
from fedcg.wire.transfer.chunks import Chunk, Span, parse_chunk
from fedcg.wire.transfer.windows import MAX_RANGES, ChunkRecord, Window
from tests.support.edge.receivers import Receiver
from tests.support.wire.artifact_chunks import cut, frames_for, make_ref

DATA = random.Random(1).randbytes(256 * 9 + 17)
REF = make_ref(DATA, 256)
CHUNKS = [Chunk(REF.id, index, piece) for index, piece in enumerate(cut(DATA, 256))]


def test_a_frame_of_the_largest_chunk_is_at_most_120_kb() -> None:
    assert chunks.chunk_bytes_for(2_000_000) + chunks.FRAME_OVERHEAD_BYTES == 120 * 1024
    assert len(chunks.chunk_frame(REF.id, 0, bytes(chunks.chunk_bytes_for(2_000_000)))) == 120 * 1024
    assert chunks.chunk_bytes_for(100_000) == 100_000 - chunks.FRAME_OVERHEAD_BYTES
    assert chunks.chunk_bytes_for(2_000_000, configured=50_000) == 50_000 - chunks.FRAME_OVERHEAD_BYTES


def test_a_link_that_takes_no_chunk_is_refused_with_what_to_do() -> None:
    with pytest.raises(TransportError, match="maximum packet"):
        chunks.chunk_bytes_for(300)


@given(st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=400))
def test_a_frame_parses_back(index: int, data: bytes) -> None:
    assert parse_chunk(chunks.chunk_frame(REF.id, index, data)) == Chunk(REF.id, index, data)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_changed_byte_of_a_frame_goes_unnoticed(position: int, change: int) -> None:
    frame = bytearray(chunks.chunk_frame(REF.id, 3, DATA[:256]))
    frame[position % len(frame)] ^= change
    with pytest.raises(MalformedError):
        parse_chunk(bytes(frame))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    for read in (parse_chunk, chunks.read_frame):
        with pytest.raises(MalformedError):
            read(data)
    with pytest.raises(MalformedError):
        parse_chunk(b"FCGC" + data)


def test_grants_stay_within_the_window_and_wait_until_half_of_it_is_free() -> None:
    receiver = Receiver(REF, Window(chunks=4))
    assert receiver.next_need(0.0) == ((0, 4),)
    assert receiver.next_need(0.0) is None
    receiver.feed(CHUNKS[0], 0.1)
    assert receiver.next_need(0.1) is None
    receiver.feed(CHUNKS[1], 0.1)
    assert receiver.next_need(0.1) == ((4, 2),)


def test_the_window_counts_bytes_too_but_always_lets_one_chunk_through() -> None:
    assert Receiver(REF, Window(chunks=16, bytes=700)).next_need(0.0) == ((0, 2),)
    assert Receiver(REF, Window(chunks=16, bytes=10)).next_need(0.0) == ((0, 1),)


def most_under_way(ref: ArtifactRef, seconds_per_turn: float) -> int:
    """The largest window that a receiver opens while all it asked for comes after so many seconds."""
    grants, now, most = ChunkRecord(ref, Window()), 0.0, 0
    while (need := grants.next_need(now)) is not None:
        most = max(most, grants.under_way)
        now += seconds_per_turn
        for first, count in need:
            for index in range(first, first + count):
                grants.received(index, now)
    assert grants.complete
    return most


def test_the_default_window_opens_to_16_chunks_and_1_900_000_bytes_on_a_fast_link() -> None:
    assert most_under_way(ArtifactRef(id="0" * 64, size=100 * 122_832, chunk_bytes=122_832), 0.01) == 15
    assert most_under_way(ArtifactRef(id="0" * 64, size=100 * 1000, chunk_bytes=1000), 0.01) == 16


def test_a_shared_bound_limits_what_is_granted() -> None:
    grants = ChunkRecord(ArtifactRef(id="0" * 64, size=100 * 1000, chunk_bytes=1000), Window())
    assert grants.next_need(0.0, room=0) is None
    assert grants.next_need(0.0, room=2) == ((0, 2),)


def test_one_request_never_has_more_ranges_than_a_message_takes() -> None:
    grants = ChunkRecord(ArtifactRef(id="0" * 64, size=2000 * 256, chunk_bytes=256), None)
    grants.restore(range(0, 2000, 2))
    need = grants.next_need(0.0)
    assert need is not None
    assert len(need) == MAX_RANGES
    assert need[0] == (1, 1)


def test_what_was_granted_and_did_not_come_is_granted_again_after_a_stall() -> None:
    receiver = Receiver(REF, Window(chunks=4), stall_s=2.0)
    assert receiver.next_need(0.0) == ((0, 4),)
    receiver.feed(CHUNKS[1], 1.0)
    assert receiver.next_need(2.9) is None
    assert receiver.next_need(3.0) == ((0, 1), (2, 1))  # and half as much at once


@pytest.mark.parametrize("seconds_per_chunk", [0.01, 1.0, 4.0, 8.0])
def test_a_slow_link_is_not_flooded_with_chunks_that_are_still_on_their_way(seconds_per_chunk: float) -> None:
    data = bytes(range(256)) * 64
    receiver = Receiver(make_ref(data, 256), Window(chunks=16), stall_s=2.0)
    frames = list(frames_for(data, receiver.ref))
    queued: list[int] = []
    sent, now = 0, 0.0
    while not receiver.complete:
        for first, count in receiver.next_need(now) or ():
            queued += range(first, first + count)
        now += 0.25
        while queued and (sent + 1) * seconds_per_chunk <= now:  # first in, first out, like every queue on the way
            receiver.feed(parse_chunk(frames[queued.pop(0)]), now)
            sent += 1
        assert now < 10_000
    assert sent + len(queued) <= 2 * receiver.ref.chunks


def test_a_broadcast_needs_no_grant_and_only_its_gaps_are_asked_for() -> None:
    receiver = Receiver(REF)
    for chunk in CHUNKS:
        if chunk.index not in (0, 4, 5, 9):
            assert receiver.feed(chunk, 0.0)
    assert receiver.progress == (6, 10)
    assert receiver.next_need(0.0) == ((0, 1), (4, 2), (9, 1))


RANGED = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=300)
SIZES = st.integers(1, MAX_ARTIFACT_BYTES)


@given(SIZES, st.integers(256, MAX_CHUNK_BYTES), st.data())
def test_granted_chunks_come_back_from_both_headers(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    ref = ArtifactRef(id="a" * 64, size=size, chunk_bytes=chunk_bytes)
    first = data.draw(st.integers(0, ref.chunks - 1))
    count = data.draw(st.integers(1, min(40, ref.chunks - first)))
    span = chunks.span_of(ref, first, count)
    assert chunks.parse_range(span.range, size) == span
    assert chunks.parse_content_range(span.content_range) == span
    pieces = list(span.chunks(ref))
    assert [index for index, _ in pieces] == list(range(first, first + count))
    assert sum(length for _, length in pieces) == span.length


def test_the_last_chunk_is_as_long_as_what_is_left() -> None:
    assert list(chunks.span_of(RANGED, 2, 9).chunks(RANGED)) == [(2, 300), (3, 100)]
    assert chunks.span_of(RANGED, 2, 9).content_range == "bytes 600-999/1000"


@pytest.mark.parametrize(
    "span", [Span(0, 298, 1000), Span(1, 299, 1000), Span(0, 299, 1001), Span(0, 999, 1200), Span(300, 700, 1000)]
)
def test_a_span_of_anything_but_whole_chunks_is_refused(span: Span) -> None:
    with pytest.raises(MalformedError, match="does not match whole chunks"):
        span.chunks(RANGED)


def test_an_open_range_ends_with_the_artifact_and_one_behind_it_is_too_large() -> None:
    assert chunks.parse_range("bytes=990-", 1000) == Span(990, 999, 1000)
    assert chunks.parse_range("bytes=0-99999", 1000) == Span(0, 999, 1000)
    with pytest.raises(TooLargeError, match="1000 bytes"):
        chunks.parse_range("bytes=1000-", 1000)


def test_an_artifact_over_the_bound_is_refused_by_its_header() -> None:
    with pytest.raises(TooLargeError):
        chunks.parse_content_range(f"bytes 0-1/{MAX_ARTIFACT_BYTES + 1}")


NUMBERS = st.sampled_from(["", "0", "7", "10", "999", "1000", "0" * 12, "9" * 12, "9" * 40, "-1", "٣"])
HEADERS = st.builds(
    "bytes{}{}-{}{}{}".format, st.sampled_from("= "), NUMBERS, NUMBERS, st.sampled_from(["", "/"]), NUMBERS
)


@given(st.one_of(st.text(), HEADERS), SIZES)
def test_no_header_raises_anything_but_a_refusal_or_leaves_the_artifact(text: str, size: int) -> None:
    for header in ("Range", "Content-Range"):
        try:
            span = chunks.parse_range(text, size) if header == "Range" else chunks.parse_content_range(text)
        except MalformedError:
            continue
        assert 0 <= span.first <= span.last < span.size <= MAX_ARTIFACT_BYTES
