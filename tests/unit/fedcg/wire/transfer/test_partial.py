"""Half-received artifacts on disk: any order, loss, repetition, restart and damage end with the same bytes."""

import os
import random
import tempfile
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import CapacityError, IntegrityError, MalformedError
from fedcg.wire.messages.schemas import ArtifactRef
from fedcg.wire.transfer.chunks import Chunk, parse_chunk, read_frame
from fedcg.wire.transfer.partial_files import HEAD_BYTES, RECORD_BYTES, Partials
from fedcg.wire.transfer.windows import Window
from tests.support.present import present
from tests.support.wire.artifact_chunks import cut, frames_for, make_ref

DATA = random.Random(1).randbytes(256 * 9 + 17)
REF = make_ref(DATA, 256)
CHUNKS = [Chunk(REF.id, index, piece) for index, piece in enumerate(cut(DATA, 256))]
MANY = 1 << 40


def partials(root: Path, max_files: int = 4, max_bytes: int = MANY, now: float = 0.0) -> Partials:
    return Partials(root, max_files, max_bytes, clock=lambda: now)


def begun(root: Path, indices: Iterable[int]) -> None:
    """What a process leaves that was killed after these chunks."""
    receiver = partials(root).open(REF)
    for index in sorted(indices):
        receiver.feed(CHUNKS[index], 0.0)
    receiver.close()


def part(root: Path) -> Path:
    return root / f"{REF.id}.part"


def completed(root: Path, expected_missing: set[int]) -> None:
    """A later process asks for exactly these chunks and ends with the whole."""
    receiver = partials(root).open(REF, Window(chunks=4))
    asked: list[int] = []
    while not receiver.complete:
        need = present(receiver.next_need(0.0))
        for frame in frames_for(DATA, REF, need):
            asked.append(parse_chunk(frame).index)
            receiver.feed(parse_chunk(frame), 0.0)
    assert set(asked) == expected_missing
    assert len(asked) == len(set(asked))
    assert (receiver.resumed, receiver.fresh, receiver.repeated) == (10 - len(asked), len(asked), 0)
    assert receiver.finish().read_bytes() == DATA


def unharmed(whole: bytes) -> bytes:
    return whole


def altered(position: int) -> Callable[[bytes], bytes]:
    """The file with another bit at this place."""
    return lambda whole: whole[:position] + bytes((whole[position] ^ 1,)) + whole[position + 1 :]


ALL = set(range(10))
FOREIGN = random.Random(2).randbytes(500)
SECOND_RECORD = len(DATA) + HEAD_BYTES + RECORD_BYTES


@pytest.mark.parametrize(
    ("left", "harm", "missing"),
    [
        ({0, 1, 5, 9}, unharmed, ALL - {0, 1, 5, 9}),
        (ALL, unharmed, set()),
        ({0, 1, 5, 9}, altered(0), ALL - {1, 5, 9}),
        ({0, 1, 5, 9}, altered(255), ALL - {1, 5, 9}),
        ({0, 1, 5, 9}, altered(256), ALL - {0, 5, 9}),
        ({0, 1, 5, 9}, altered(len(DATA) - 1), ALL - {0, 1, 5}),
        ({0, 1, 5}, altered(SECOND_RECORD + 6), ALL - {0, 5}),
        ({0, 1, 5}, lambda whole: whole[: len(DATA)], ALL),  # no journal
        ({0, 1, 5}, lambda whole: whole[: len(DATA) + 20], ALL),  # the journal's head is torn
        ({0, 1, 5}, lambda whole: whole[: len(DATA)] + FOREIGN, ALL),  # of another transfer
        ({0, 1, 5}, lambda _whole: b"", ALL),
    ],
)
def test_the_next_process_asks_for_what_is_missing_or_harmed_and_for_no_other_chunk(
    tmp_path: Path, left: set[int], harm: Callable[[bytes], bytes], missing: set[int]
) -> None:
    begun(tmp_path, left)
    part(tmp_path).write_bytes(harm(part(tmp_path).read_bytes()))
    completed(tmp_path, missing)


def test_a_torn_last_record_costs_its_chunk_and_is_written_over(tmp_path: Path) -> None:
    begun(tmp_path, (0, 1, 5))
    os.truncate(part(tmp_path), len(DATA) + HEAD_BYTES + 3 * RECORD_BYTES - 1)
    begun(tmp_path, (2,))
    completed(tmp_path, ALL - {0, 1, 2})


def test_another_chunk_size_starts_again(tmp_path: Path) -> None:
    begun(tmp_path, (0, 1, 5))
    other = make_ref(DATA, 300)
    receiver = partials(tmp_path).open(other)
    assert receiver.resumed == 0
    for frame in frames_for(DATA, other):
        receiver.feed(parse_chunk(frame), 0.0)
    assert receiver.finish().read_bytes() == DATA


def test_chunks_that_do_not_add_up_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    receiver = partials(tmp_path).open(REF)
    for chunk in CHUNKS:
        receiver.feed(Chunk(chunk.artifact, chunk.index, bytes(len(chunk.data))), 0.0)
    with pytest.raises(IntegrityError):
        receiver.finish()
    receiver.close()
    completed(tmp_path, set(range(10)))


@pytest.mark.parametrize("damaged", [(0,), (4, 7), (9,), tuple(range(10))])
def test_chunks_damaged_on_their_way_cost_themselves_and_no_other(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    receiver = partials(tmp_path).open(REF, Window(chunks=16))
    for index, frame in enumerate(frames_for(DATA, REF)):
        altered = frame[:-1] + bytes((frame[-1] ^ 1,)) if index in damaged else frame
        receiver.feed(read_frame(altered), 0.0)
    with pytest.raises(IntegrityError, match=f"{len(damaged)} of 10 are fetched again"):
        receiver.finish()
    asked: set[int] = set()
    while not receiver.complete:
        need = present(receiver.next_need(0.0))
        for frame in frames_for(DATA, REF, need):
            receiver.feed(read_frame(frame), 0.0)
            asked.add(read_frame(frame).index)
    assert asked == set(damaged)
    assert receiver.finish().read_bytes() == DATA


def test_a_chunk_that_the_artifact_cannot_have_touches_no_file(tmp_path: Path) -> None:
    receiver = partials(tmp_path).open(REF)
    for index, size in ((10, 256), (0, 255), (0, 257), (9, 256), (9, 0)):
        with pytest.raises(MalformedError):
            receiver.feed(Chunk(REF.id, index, bytes(size)), 0.0)
    assert not receiver.feed(Chunk("f" * 64, 0, bytes(256)), 0.0)
    assert part(tmp_path).stat().st_size - len(DATA) == HEAD_BYTES


def test_the_part_file_takes_room_only_for_what_came(tmp_path: Path) -> None:
    huge = ArtifactRef(id="0" * 64, size=500_000_000, chunk_bytes=100_000)
    partials(tmp_path).open(huge).close()
    assert (tmp_path / f"{huge.id}.part").stat().st_blocks * 512 < 1_000_000


def named(number: int, size: int = 1000) -> ArtifactRef:
    return ArtifactRef(id=f"{number:064x}", size=size, chunk_bytes=256)


def test_the_oldest_transfers_that_nobody_works_on_give_way(tmp_path: Path) -> None:
    folder = partials(tmp_path, max_files=3)
    for number in range(3):
        folder.open(named(number)).close()
        os.utime(tmp_path / f"{number:064x}.part", (number, number))
    folder.release(named(1).id)
    folder.release(named(2).id)
    folder.open(named(3)).close()
    assert {path.stem for path in tmp_path.glob("*.part")} == {f"{number:064x}" for number in (0, 2, 3)}
    folder.open(named(4)).close()
    with pytest.raises(CapacityError, match="3 transfers"):
        folder.open(named(5))


def test_the_sum_of_the_announced_sizes_is_bounded(tmp_path: Path) -> None:
    folder = partials(tmp_path, max_bytes=2500)
    folder.open(named(0)).close()
    folder.open(named(1)).close()
    with pytest.raises(CapacityError):
        folder.open(named(2))
    folder.discard(named(0).id)
    folder.open(named(2)).close()
    with pytest.raises(CapacityError):
        folder.open(named(3, size=3000))


def test_transfers_of_different_owners_share_no_file(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    first, second = (folder.open(REF, owner=owner) for owner in ("a", "b"))
    first.feed(CHUNKS[0], 0.0)
    assert (first.fresh, second.fresh) == (1, 0)
    folder.discard(REF.id, "a")
    assert [path.name for path in tmp_path.glob("*.part")] == [f"b@{REF.id}.part"]
    for owner in ("../x", "A", "x@y"):
        with pytest.raises(MalformedError):
            folder.open(REF, owner=owner)


def test_what_expired_and_what_belongs_to_nothing_is_collected(tmp_path: Path) -> None:
    folder = partials(tmp_path, now=1e9)
    for number in range(3):
        folder.open(named(number)).close()
        for path in tmp_path.glob(f"{number:064x}.*"):
            os.utime(path, (1.0, 1.0) if number < 2 else (1e9 - 5, 1e9 - 5))
    folder.release(named(1).id)
    folder.release(named(2).id)
    (tmp_path / "stray").write_bytes(b"x")
    folder.collect()
    assert {path.stem for path in tmp_path.iterdir()} == {f"{number:064x}" for number in (0, 2)}
    Partials(tmp_path / "never made", 1, 1).collect()


def test_a_file_that_another_thread_takes_over_meanwhile_does_no_harm(tmp_path: Path) -> None:
    vanished = tmp_path / f"{7:064x}.part"
    vanished.symlink_to(tmp_path / "taken over")  # listed, and gone when it is looked at
    folder = partials(tmp_path)
    folder.open(REF).close()
    folder.collect()
    folder.open(named(1)).close()
    assert part(tmp_path).exists()


@given(
    size=st.integers(1, 30 * 256),
    window=st.integers(1, 20),
    loss=st.floats(0, 0.6),
    restarts=st.floats(0, 0.2),
    rng=st.randoms(use_true_random=False),
)
def test_any_order_loss_repetition_restart_and_damage_ends_with_the_same_bytes(
    size: int, window: int, loss: float, restarts: float, rng: random.Random
) -> None:
    data = rng.randbytes(size)
    ref = make_ref(data, 256)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        receiver = partials(root).open(ref, Window(chunks=window))
        now, under_way = 0.0, [frame for frame in frames_for(data, ref) if rng.random() < 0.3]
        held: set[int] = set()
        damages = 5
        for _ in range(20_000):
            if receiver.complete:
                break
            if rng.random() < restarts:
                receiver.close()
                lost = wreck(root / f"{ref.id}.part", ref, rng) if damages else None
                damages -= lost is not None and damages > 0
                receiver = partials(root).open(ref, Window(chunks=window))
                kept = held if lost is None else held - lost
                assert receiver.resumed >= len(kept)  # nothing that was whole is fetched again
                held = kept
            for frame in frames_for(data, ref, receiver.next_need(now) or ()):
                under_way += [frame] * rng.choice((1, 1, 2)) if rng.random() >= loss else []
            if under_way:
                chunk = parse_chunk(under_way.pop(rng.randrange(len(under_way))))
                receiver.feed(chunk, now)
                held.add(chunk.index)
            else:
                now += 0.7
        assert sha256(receiver.finish().read_bytes()).hexdigest() == ref.id


def wreck(file: Path, ref: ArtifactRef, rng: random.Random) -> set[int] | None:
    """Do to the file what a power cut may do; returns the chunks that may be gone, or None for an orderly restart."""
    everything = set(range(ref.chunks))
    kind = rng.choice(("none", "none", "zeroed", "torn", "short"))
    if kind == "zeroed":
        index = rng.randrange(ref.chunks)
        with file.open("r+b") as opened:
            opened.seek(index * ref.chunk_bytes)
            opened.write(bytes(min(ref.chunk_bytes, ref.size - index * ref.chunk_bytes)))
        return {index}
    if kind == "torn":
        os.truncate(file, max(0, file.stat().st_size - rng.randrange(2 * RECORD_BYTES)))
        return everything
    if kind == "short":
        os.truncate(file, rng.randrange(ref.size))
        return everything
    return None


def test_a_process_killed_after_the_journal_was_cut_off_needs_nothing_more(tmp_path: Path) -> None:
    begun(tmp_path, range(10))
    assert partials(tmp_path).open(REF).finish().read_bytes() == DATA
    completed(tmp_path, set())
