"""Byte ranges of the HTTPS carrier: what one side writes the other reads, and everything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError, TooLargeError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES, MAX_CHUNK_BYTES, ArtifactRef
from fedcg.wire.transfer.chunks import Span, parse_content_range, parse_range, span_of

REF = ArtifactRef(id="a" * 64, size=1000, chunk_bytes=300)
SIZES = st.integers(1, MAX_ARTIFACT_BYTES)


@given(SIZES, st.integers(256, MAX_CHUNK_BYTES), st.data())
def test_granted_chunks_come_back_from_both_headers(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    ref = ArtifactRef(id="a" * 64, size=size, chunk_bytes=chunk_bytes)
    first = data.draw(st.integers(0, ref.chunks - 1))
    count = data.draw(st.integers(1, min(40, ref.chunks - first)))
    span = span_of(ref, first, count)
    assert parse_range(span.range, size) == span
    assert parse_content_range(span.content_range) == span
    pieces = list(span.chunks(ref))
    assert [index for index, _ in pieces] == list(range(first, first + count))
    assert sum(length for _, length in pieces) == span.length


def test_the_last_chunk_is_as_long_as_what_is_left() -> None:
    assert list(span_of(REF, 2, 9).chunks(REF)) == [(2, 300), (3, 100)]
    assert span_of(REF, 2, 9).content_range == "bytes 600-999/1000"


@pytest.mark.parametrize(
    "span", [Span(0, 298, 1000), Span(1, 299, 1000), Span(0, 299, 1001), Span(0, 999, 1200), Span(300, 700, 1000)]
)
def test_a_span_of_anything_but_whole_chunks_is_refused(span: Span) -> None:
    with pytest.raises(MalformedError, match="no whole chunks"):
        span.chunks(REF)


def test_an_open_range_ends_with_the_artifact_and_one_behind_it_is_too_large() -> None:
    assert parse_range("bytes=990-", 1000) == Span(990, 999, 1000)
    assert parse_range("bytes=0-99999", 1000) == Span(0, 999, 1000)
    with pytest.raises(TooLargeError, match="1000 bytes"):
        parse_range("bytes=1000-", 1000)


def test_an_artifact_over_the_bound_is_refused_by_its_header() -> None:
    with pytest.raises(TooLargeError):
        parse_content_range(f"bytes 0-1/{MAX_ARTIFACT_BYTES + 1}")


NUMBERS = st.sampled_from(["", "0", "7", "10", "999", "1000", "0" * 12, "9" * 12, "9" * 40, "-1", "٣"])
HEADERS = st.builds(
    "bytes{}{}-{}{}{}".format, st.sampled_from("= "), NUMBERS, NUMBERS, st.sampled_from(["", "/"]), NUMBERS
)


@given(st.one_of(st.text(), HEADERS), SIZES)
def test_no_header_raises_anything_but_a_refusal_or_leaves_the_artifact(text: str, size: int) -> None:
    for header in ("Range", "Content-Range"):
        try:
            span = parse_range(text, size) if header == "Range" else parse_content_range(text)
        except MalformedError:
            continue
        assert 0 <= span.first <= span.last < span.size <= MAX_ARTIFACT_BYTES
