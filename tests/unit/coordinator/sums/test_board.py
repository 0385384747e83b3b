"""The coordinator's side of a masked sum against real keepers of devices: exact whoever is lost, off where too few are left."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.sums import Phase, SumBoard
from fedcg.wire.errors import SumError
from fedcg.wire.messages.schemas import SumDealt, SumMembers, SumOff, SumOpening, SumSurvivors
from fedcg.wire.sums import Numbers, SumRound, added, threshold_of
from tests.support.coordinator.sum_cohort import AT, SIZE, Cohort


def opened(cohort: Cohort, board: SumBoard, survivors: tuple[str, ...]) -> Numbers:
    sent = [cohort.masked(name) for name in survivors]
    return added([*sent, board.correction(SIZE)])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sum_is_exact_or_there_is_none_whoever_is_lost_at_whichever_step(data: st.DataObject) -> None:
    cohort = Cohort(data.draw(st.integers(4, 7), "devices"))
    deaf: set[str] = set()

    def restarted() -> SumBoard:
        """The board, or the one that a coordinator has after a restart."""
        is_killed = data.draw(st.booleans(), "restart")
        return SumBoard(AT, cohort.names, board.content) if is_killed else board

    def lose(what: str) -> None:
        deaf.update(data.draw(st.lists(st.sampled_from(cohort.names), max_size=2), what))

    board = SumBoard(AT, cohort.names)
    lose("before keys")
    sends = cohort.announce(board, deaf)
    lose("before shares")
    sends = cohort.answer(board, sends, deaf)
    board = restarted()
    if board.phase is Phase.NUMBERS:
        cohort.answer(board, sends, deaf)  # what was dealt arrives
        lose("before numbers")
        sends = board.close([name for name in cohort.names if name not in deaf], cohort.now)
    board = restarted()
    if board.phase is Phase.SIGNATURES:
        lose("before signatures")
        sends = cohort.answer(board, sends, deaf)
    board = restarted()
    if board.phase is Phase.OPENING:
        lose("before the opening")
        cohort.answer(board, sends, deaf)
    board = restarted()
    if board.phase is Phase.OPENED:
        survivors = tuple(board.weights)
        expected = added([cohort.numbers[name] for name in survivors])
        assert np.array_equal(opened(cohort, board, survivors), expected)
        assert len(survivors) >= max(4, threshold_of(len(board.peers)))
    else:
        assert board.phase is Phase.OFF
        assert board.reason
        assert deaf
        with pytest.raises(SumError):
            board.correction(SIZE)


def whole(cohort: Cohort, at: SumRound = AT) -> SumBoard:
    """A sum that ends well."""
    board = SumBoard(at, cohort.names)
    sends = cohort.answer(board, cohort.announce(board, set(), at), set(), at)
    for name, step in sends:
        cohort.reply(name, step, at)
    sends = board.close(cohort.names, cohort.now)
    cohort.answer(board, cohort.answer(board, sends, set(), at), set(), at)
    return board


def test_a_device_is_in_one_sum_a_round_and_takes_part_again_in_the_next() -> None:
    cohort = Cohort(4)
    assert whole(cohort).phase is Phase.OPENED
    again = SumBoard(SumRound("shapes", 3, 2), cohort.names)
    assert cohort.announce(again, set(), again.at) == []
    again.close(cohort.names, cohort.now)
    assert (again.phase, again.reason) == (Phase.OFF, "the attempt was closed while it waited for keys")
    assert whole(cohort, SumRound("shapes", 4, 1)).phase is Phase.OPENED


def test_a_coordinator_that_goes_back_gets_no_second_sum_of_a_round_either() -> None:
    cohort = Cohort(4)
    keeper = partial(cohort.keeper, "box-00")
    assert whole(cohort, SumRound("shapes", 5, 1)).phase is Phase.OPENED
    assert (
        keeper().announce(SumRound("shapes", 6, 1), 5) is not None
    )  # and the coordinator is set up from a backup then
    for number, attempt in ((5, 1), (5, 2), (4, 1)):
        assert keeper().announce(SumRound("shapes", number, attempt), 5) is None
    assert keeper().announce(SumRound("shapes", 6, 2), 5) is not None
    assert keeper().announce(SumRound("squares", 1, 1), 5) is not None


def test_every_step_repeats_byte_for_byte_after_a_power_cut() -> None:
    cohort = Cohort(4)
    board = SumBoard(AT, cohort.names)
    sends = cohort.announce(board, set())
    name = cohort.names[0]
    members = dict(sends)[name]
    assert isinstance(members, SumMembers)
    assert cohort.keeper(name).announce(AT, 5) == members.announced[name]
    assert cohort.keeper(name).members(AT, members) == cohort.keeper(name).members(AT, members)
    sends = cohort.answer(board, sends, set())
    dealt = dict(sends)[name]
    assert isinstance(dealt, SumDealt)
    for one, step in sends:
        cohort.reply(one, step)
        cohort.reply(one, step)
    assert np.array_equal(cohort.masked(name), cohort.masked(name))
    assert not np.array_equal(cohort.masked(name), cohort.numbers[name])
    writes = len(cohort.disks[name].writes)
    cohort.keeper(name).dealt(AT, dealt)
    assert len(cohort.disks[name].writes) == writes


def test_a_coordinator_that_changes_its_mind_is_refused() -> None:
    cohort = Cohort(5)
    board = SumBoard(AT, cohort.names)
    sends = cohort.announce(board, set())
    name = cohort.names[0]
    members = dict(sends)[name]
    assert isinstance(members, SumMembers)
    sends = cohort.answer(board, sends, set())
    fewer = SumMembers(announced={one: members.announced[one] for one in cohort.names[:4]})
    with pytest.raises(SumError, match="names other members of the sum than before"):
        cohort.keeper(name).members(AT, fewer)
    for one, step in sends:
        cohort.reply(one, step)
    dealt = dict(sends)[name]
    assert isinstance(dealt, SumDealt)
    with pytest.raises(SumError, match="passes on other shares than before"):
        cohort.keeper(name).dealt(AT, SumDealt(sealed={one: dealt.sealed[one] for one in cohort.names[:4]}))
    cohort.keeper(name).survivors(AT, SumSurvivors(names=tuple(cohort.names)))
    with pytest.raises(SumError, match="asks for a second list of survivors"):
        cohort.keeper(name).survivors(AT, SumSurvivors(names=tuple(cohort.names[:4])))
    with pytest.raises(SumError, match="another list of survivors than this device signed"):
        cohort.keeper(name).opening(AT, SumOpening(names=tuple(cohort.names[:4]), signatures={}))
    with pytest.raises(SumError, match="0 of 4 devices that must have signed"):
        cohort.keeper(name).opening(AT, SumOpening(names=tuple(cohort.names), signatures={}))
    elsewhere = SumRound("shapes", 9, 1)
    assert cohort.masks(name, elsewhere) is None
    with pytest.raises(SumError, match="announced no keys for the sum of round 9, attempt 1"):
        cohort.keeper(name).survivors(elsewhere, SumSurvivors(names=tuple(cohort.names)))


def test_a_device_without_shares_takes_part_in_the_round_without_a_sum() -> None:
    cohort = Cohort(6)
    board = SumBoard(AT, cohort.names)
    sends = cohort.answer(board, cohort.announce(board, set()), {"box-05"})
    assert dict(sends)["box-05"] == SumOff()
    assert board.peers == tuple(cohort.names[:5])
