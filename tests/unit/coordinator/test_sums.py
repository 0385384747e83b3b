"""Sealed sums against real keepers of devices: exact whoever is lost, off where too few are left; a device that lies is left out."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.jobs import OpenedSum
from coordinator.messaging.publisher import Publisher
from coordinator.sums import WAIT_S, Phase, SealedSums, Sends, SumBoard, SumFailure, SumRecord
from edge_client.store.sum_keeper import Numbered
from fedcg.event_log import EventLog, read_events
from fedcg.learning.spec import FederationSpec
from fedcg.sentences import texts
from fedcg.wire.errors import SignatureError, SumError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.parts import TAGS, Part, TensorLayout
from fedcg.wire.sealed_numbers import Numbers, added
from fedcg.wire.sums import Members, SumRound, SumSecrets, keys_label, share_out, sign_survivors, threshold_of
from tests.support.coordinator.sum_cohort import AT, SIZE, Cohort
from tests.support.coordinator.toy_artifacts import tiny_spec
from tests.support.coordinator.world import MakeWorld, PlainWorker, RunningService, World
from tests.support.present import present

Answer = TypeVar("Answer")


def opened(cohort: Cohort, board: SumBoard, survivors: tuple[str, ...]) -> Numbers:
    sent = [cohort.masked(name) for name in survivors]
    published = added([*sent, board.correction(SIZE)])
    assert not np.array_equal(published, added([cohort.numbers[name] for name in survivors]))
    return cohort.opened(published, board.members.digest, survivors)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sum_is_exact_or_there_is_none_whoever_is_lost_at_whichever_step(data: st.DataObject) -> None:
    cohort = Cohort(data.draw(st.integers(4, 7), "devices"))
    deaf: set[str] = set()

    def restarted() -> SumBoard:
        """The board, or the one that a coordinator has after a restart."""
        return (
            SumBoard(AT, cohort.names, SumRecord.model_validate_json(board.record.model_dump_json()))
            if data.draw(st.booleans(), "restart")
            else board
        )

    def lose(what: str) -> None:
        deaf.update(data.draw(st.lists(st.sampled_from(cohort.names), max_size=2), what))

    board = SumBoard(AT, cohort.names)
    lose("before keys")
    sends = cohort.announce(board, deaf)
    lose("before shares")
    sends = cohort.answer(board, sends, deaf)
    board = restarted()
    if board.record.phase is Phase.NUMBERS:
        cohort.answer(board, sends, deaf)  # what was dealt arrives
        lose("before numbers")
        sends = board.close([name for name in cohort.names if name not in deaf], cohort.now)
    board = restarted()
    if board.record.phase is Phase.SIGNATURES:
        lose("before signatures")
        sends = cohort.answer(board, sends, deaf)
    board = restarted()
    if board.record.phase is Phase.OPENING:
        lose("before the opening")
        cohort.answer(board, sends, deaf)
    board = restarted()
    if board.record.phase is Phase.OPENED:
        survivors = board.record.survivors
        expected = added([cohort.numbers[name] for name in survivors])
        assert np.array_equal(opened(cohort, board, survivors), expected)
        assert len(survivors) >= max(4, threshold_of(len(board.record.peers)))
    else:
        assert board.record.phase is Phase.OFF
        assert board.record.reason
        assert deaf
        with pytest.raises(SumError):
            board.correction(SIZE)


def begun(count: int) -> tuple[Cohort, SumBoard, Sends]:
    """A sum to which all devices announced keys."""
    cohort = Cohort(count)
    board = SumBoard(AT, cohort.names)
    return cohort, board, cohort.announce(board, set())


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
    assert whole(cohort).record.phase is Phase.OPENED
    again = SumBoard(SumRound("shapes", 3, 2), cohort.names)
    assert cohort.announce(again, set(), again.at) == []
    again.close(cohort.names, cohort.now)
    assert (again.record.phase, again.record.reason) == (Phase.OFF, "the attempt was closed while waiting for keys")
    assert whole(cohort, SumRound("shapes", 4, 1)).record.phase is Phase.OPENED


def test_a_coordinator_that_goes_back_gets_no_second_sum_of_a_round_either() -> None:
    cohort = Cohort(4)
    keeper = partial(cohort.keeper, "box-00")
    assert whole(cohort, SumRound("shapes", 5, 1)).record.phase is Phase.OPENED
    assert keeper().announce(SumRound("shapes", 6, 1), 5) is not None  # then the coordinator is restored
    for number, attempt in ((5, 1), (5, 2), (4, 1)):
        assert keeper().announce(SumRound("shapes", number, attempt), 5) is None
    again = [keeper().announce(SumRound("shapes", number, 2), 5, vote=9) for number in (6, 7)]
    assert [one and one.vote for one in again] == [0, 9], "another attempt of a round gets the same vote"
    assert keeper().announce(SumRound("squares", 1, 1), 5) is not None


def test_every_step_repeats_byte_for_byte_after_a_power_cut() -> None:
    cohort, board, sends = begun(4)
    name = cohort.names[0]
    members = dict(sends)[name]
    assert isinstance(members, schemas.SumMembers)
    again = present(cohort.keeper(name).announce(AT, 5))
    assert again.model_copy(update={"key": None}) == members.announced[name]
    assert cohort.keeper(name).members(AT, members) == cohort.keeper(name).members(AT, members)
    sends = cohort.answer(board, sends, set())
    dealt = dict(sends)[name]
    assert isinstance(dealt, schemas.SumDealt)
    for one, step in sends:
        cohort.reply(one, step)
        cohort.reply(one, step)
    assert np.array_equal(cohort.masked(name), cohort.masked(name))
    assert not np.array_equal(cohort.masked(name), cohort.numbers[name])
    writes = len(cohort.disks[name].writes)
    cohort.keeper(name).dealt(AT, dealt)
    assert len(cohort.disks[name].writes) == writes


def test_a_coordinator_that_changes_its_mind_is_refused() -> None:
    cohort, board, sends = begun(5)
    name = cohort.names[0]
    members = dict(sends)[name]
    assert isinstance(members, schemas.SumMembers)
    sends = cohort.answer(board, sends, set())
    fewer = schemas.SumMembers(announced={one: members.announced[one] for one in cohort.names[:4]})
    with pytest.raises(SumError, match="different members of the sum than before"):
        cohort.keeper(name).members(AT, fewer)
    for one, step in sends:
        cohort.reply(one, step)
    dealt = dict(sends)[name]
    assert isinstance(dealt, schemas.SumDealt)
    with pytest.raises(SumError, match="different shares than before"):
        cohort.keeper(name).dealt(AT, schemas.SumDealt(sealed={one: dealt.sealed[one] for one in cohort.names[:4]}))
    cohort.keeper(name).survivors(AT, schemas.SumSurvivors(names=tuple(cohort.names)))
    with pytest.raises(SumError, match="asks for a second list of survivors"):
        cohort.keeper(name).survivors(AT, schemas.SumSurvivors(names=tuple(cohort.names[:4])))
    with pytest.raises(SumError, match="a different list of survivors than this device signed"):
        cohort.keeper(name).opening(AT, schemas.SumOpening(names=tuple(cohort.names[:4]), signatures={}))
    with pytest.raises(SumError, match="0 of 4 required devices have signed"):
        cohort.keeper(name).opening(AT, schemas.SumOpening(names=tuple(cohort.names), signatures={}))
    elsewhere = SumRound("shapes", 9, 1)
    assert cohort.masks(name, elsewhere) is None
    with pytest.raises(SumError, match="announced no keys for the sum of round 9, attempt 1"):
        cohort.keeper(name).survivors(elsewhere, schemas.SumSurvivors(names=tuple(cohort.names)))


def test_a_device_without_shares_takes_part_in_the_round_without_a_sum() -> None:
    cohort, board, sends = begun(6)
    sends = cohort.answer(board, sends, {"box-05"})
    assert dict(sends)["box-05"] == schemas.SumOff()
    assert board.record.peers == tuple(cohort.names[:5])


def test_a_device_is_in_no_sum_of_fewer_devices_than_its_owner_wants() -> None:
    cohort, board, sends = begun(6)
    cohort.least = 6
    dealt = dict(cohort.answer(board, sends, {"box-05"}))["box-00"]
    assert isinstance(dealt, schemas.SumDealt)
    with pytest.raises(SumError, match="5 devices are too few for a sum: 6 are needed here"):
        cohort.keeper("box-00").dealt(AT, dealt)
    cohort.least = 5
    cohort.keeper("box-00").dealt(AT, dealt)
    with pytest.raises(SumError, match="4 survivors are too few for a sum: 5 are needed here; policy"):
        cohort.keeper("box-00").survivors(AT, schemas.SumSurvivors(names=tuple(cohort.names[:4])))


def answered(step: Callable[[], Answer]) -> Answer | str:
    """What a device answers, or why it does not."""
    try:
        return step()
    except SumError as error:
        return str(error)


@dataclass
class View:
    """Who a coordinator names to these devices, and what a device that helps it deals out there."""

    announced: dict[str, schemas.SumKeys]
    devices: list[str]
    helper: SumSecrets | None = None


def revealed(cohort: Cohort, views: list[View], names: list[str]) -> dict[str, dict[str, bytes] | str]:
    """What each device gives away of one list, or why it does not; the coordinator hands on every share and signature that it has."""
    announced = {name: schemas.SumMembers(announced=view.announced) for view in views for name in view.devices}
    dealt = {name: cohort.keeper(name).members(AT, step).sealed for name, step in announced.items()}
    signatures, found, survivors = dict[str, bytes](), dict[str, dict[str, bytes] | str](), tuple(names)
    for view in views:
        there, helper = dict(dealt), view.helper
        if helper is not None:
            there[helper.device] = share_out(helper, Members(AT, view.announced))
        for name in set(view.devices) & set(names):
            cohort.keeper(name).dealt(AT, schemas.SumDealt(sealed={peer: there[peer][name] for peer in names}))
            signatures[name] = cohort.keeper(name).survivors(AT, schemas.SumSurvivors(names=survivors)).signature
    for view in views:
        both = dict(signatures)
        if view.helper is not None:
            of, key = Members(AT, view.announced), cohort.keys[view.helper.device]
            both[view.helper.device] = sign_survivors(of, names, names, key)
        for name in set(view.devices) & set(names):
            opening = schemas.SumOpening(names=survivors, signatures=both)
            answer = answered(partial(cohort.keeper(name).opening, AT, opening))
            found[name] = answer if isinstance(answer, str) else answer.shares
    return found


def test_of_a_split_view_of_the_members_neither_three_devices_nor_two_and_one_that_helps_open_anything() -> None:
    cohort = Cohort(6)
    keys = {name: cohort.announced(name) for name in cohort.names}
    five = {name: keys[name] for name in cohort.names[:5]}
    views = [View(five, cohort.names[:3]), View(keys, cohort.names[3:])]
    told = revealed(cohort, views, cohort.names[:5])
    assert set(told.values()) == {f"{n} of 4 required devices have signed the list of survivors" for n in (2, 3)}

    cohort, helping = Cohort(4), [SumSecrets.draw("box-03") for _ in range(2)]
    keys = {name: cohort.announced(name) for name in cohort.names[:3]}
    twice = [{**keys, "box-03": one.announce(AT, 5, cohort.keys["box-03"])} for one in helping]
    views = [View(twice[0], cohort.names[:2], helping[0]), View(twice[1], ["box-02"], helping[1])]
    told = revealed(cohort, views, cohort.names)
    assert set(told.values()) == {f"{n} of 4 required devices have signed the list of survivors" for n in (2, 3)}


def test_shares_that_were_dealt_in_one_view_of_the_members_open_in_no_other() -> None:
    cohort = Cohort(6)
    keys = {name: cohort.announced(name) for name in cohort.names}
    five = {name: keys[name] for name in cohort.names[:5]}
    told = revealed(cohort, [View(five, cohort.names[:4]), View(keys, cohort.names[4:])], cohort.names[:5])
    assert isinstance(told.pop("box-04"), str)
    for shares in told.values():
        assert isinstance(shares, dict)
        assert sorted(shares) == cohort.names[:4]
    cohort = Cohort(5)
    alone = revealed(cohort, [View({n: cohort.announced(n) for n in cohort.names}, cohort.names)], cohort.names)
    assert {name: sorted(shares) for name, shares in alone.items()} == dict.fromkeys(cohort.names, cohort.names)


@pytest.mark.parametrize(
    ("first", "second", "moved", "parts", "is_signed"),
    [
        ((0, 8), (0, 8), 0.0, "extractor", True),
        ((0, 8), (0, 7), 0.0, "extractor", False),
        ((0, 8), (0, 7), 0.0, "statistics", True),
        ((0, 8), (0, 7), 0.3, "extractor", False),
        ((0, 8), (0, 7), 0.8, "extractor", True),
        ((0, 7), (1, 8), 0.3, "extractor", False),
        ((0, 8), (0, 6), 0.3, "extractor", False),
        ((0, 8), (0, 6), 0.8, "extractor", True),
        ((0, 8), (0, 5), 0.3, "extractor", False),
    ],
)
def test_a_list_that_differs_from_an_earlier_one_is_signed_by_those_alone_whose_numbers_moved(
    first: tuple[int, int], second: tuple[int, int], moved: float, parts: str, *, is_signed: bool
) -> None:
    """Moved: as a share of the distance to the last mean; half of it is asked for."""
    cohort, stream = Cohort(8), np.random.default_rng(3)
    before, step, far = (stream.normal(size=500) for _ in range(3))
    now = before + moved * step / np.linalg.norm(step)
    later, last = replace(AT, round=4), cohort.names[slice(*second)]
    rounds = ((AT, first, before, "extractor"), (later, second, now, parts))
    for at, (start, end), numbers, of in rounds:
        own = Numbered.of(at, (of,), numbers, numbers + far / np.linalg.norm(far), seed=7)
        answers = asked_to_sign(cohort, cohort.names[start:end], own, at)
    earlier = set(cohort.names[slice(*first)])
    unlike = " and ".join(sorted(earlier ^ set(last)))
    for name in last:
        if is_signed or name not in earlier:
            assert isinstance(answers[name], schemas.SumSigned)
        else:
            assert f"only by {unlike}, and this device's numbers have hardly moved since" in str(answers[name])


@pytest.mark.parametrize(
    ("alone", "lists", "sits_out"),
    [
        ((7,), (range(8), range(7), range(8)), ""),  # it leaves, and comes back
        ((6, 7), (range(8), range(7), (*range(6), 7), range(6), range(8)), ""),
        ((7,), (range(8), range(1, 8)), "only by box-00"),
        ((7,), (range(8), range(7), range(6)), "only by box-06"),
        ((7,), (range(8), range(1, 7)), "only by box-00"),
        # 3 others: of the lists without each of the rest alone, and with all, their own sum would be an outcome.
        (
            (3, 4, 5, 6, 7),
            (range(8), range(7)),
            "would reveal the sum of box-00 and box-01 and box-02, fewer than 4 devices",
        ),
        (range(8), (range(8), range(7), range(2, 8)), ""),
    ],
)
def test_of_devices_that_stand_still_lists_may_differ_by_those_alone_whose_owners_consent(
    alone: Iterable[int], lists: Sequence[Iterable[int]], sits_out: str
) -> None:
    """So lists agree in all others: a combination of their sums is either of all the others together, or of consenting devices alone."""
    cohort = Cohort(8)
    cohort.alone = {cohort.names[number] for number in alone}
    for round_number, members in enumerate(lists, 1):
        at, names = replace(AT, round=round_number), [cohort.names[number] for number in members]
        own = Numbered(round=at.round, attempt=at.attempt, parts=("statistics",), sketch=(1.0,), to_mean=1.0, digest="")
        answers = asked_to_sign(cohort, names, own, at)
        for name in names:
            if sits_out and round_number == len(lists):
                assert sits_out in str(answers[name])
                assert "`fedcg cohort card --alone`" in str(answers[name])
            else:
                assert isinstance(answers[name], schemas.SumSigned)


def test_a_device_that_stands_still_sits_out_where_it_would_count_for_more_or_less_unless_its_owner_consents() -> None:
    """A device with most images is clipped by the others': what they add would show its numbers in the difference of two sums."""
    cohort = Cohort(6)
    cohort.alone = {"box-05"}
    for round_number, images in ((1, (20, 20, 20, 20, 100, 5)), (2, (20, 20, 20, 20, 100, 6))):
        at = replace(AT, round=round_number)
        cohort.weights = dict(zip(cohort.names, images, strict=True))
        own = Numbered(round=at.round, attempt=at.attempt, parts=("statistics",), sketch=(1.0,), to_mean=1.0, digest="")
        answers = asked_to_sign(cohort, cohort.names, own, at)
    assert "this device, which has most images, would count for more or less" in str(answers.pop("box-04"))
    assert all(isinstance(answer, schemas.SumSigned) for answer in answers.values())


def test_a_device_that_stands_still_sits_out_of_the_same_list_with_another_total_and_counts_for_something() -> None:
    """Numbers are rounded after they were multiplied by the share: sums of many shares tell of single numbers."""
    cohort = Cohort(4)
    for round_number, more in ((1, 0), (2, 1)):
        cohort.weights["box-00"] += more
        at = replace(AT, round=round_number)
        own = Numbered(round=at.round, attempt=1, parts=("statistics",), sketch=(1.0,), to_mean=1.0, digest="")
        answers = asked_to_sign(cohort, cohort.names, own, at)
    assert all("count for more or less" in str(answer) for answer in answers.values())
    few = Cohort(4)
    few.weights = dict(zip(few.names, (1, 1 << 20, 1 << 20, 1 << 20), strict=True))
    board = SumBoard(AT, few.names)
    dealt = few.answer(board, few.announce(board, set()), set())
    with pytest.raises(SumError, match="share of the sum would be less than"):
        few.reply(*dealt[0])


def test_devices_that_were_told_different_totals_open_no_sum() -> None:
    """Else one device's numbers alone would count: the others' round to 0."""
    cohort = Cohort(4)
    board = SumBoard(AT, cohort.names)
    (honest, step), *others = cohort.announce(board, set())
    sends = [(honest, step), *((name, one.model_copy(update={"total": 21})) for name, one in others)]
    for name, dealt in cohort.answer(board, sends, set()):
        cohort.reply(name, dealt)
    cohort.answer(board, cohort.answer(board, board.close(cohort.names, cohort.now), set()), set())
    with pytest.raises(SumError, match="shares of its masks arrived"):
        board.correction(SIZE)


def asked_to_sign(cohort: Cohort, names: Sequence[str], own: Numbered, at: SumRound) -> dict[str, object]:
    """What these devices answer to a list of them, each with these numbers of its own."""
    board = SumBoard(at, cohort.names)
    for name, dealt in cohort.answer(board, cohort.announce(board, set(), at), set(), at):
        cohort.reply(name, dealt, at)
    cohort.numbered = dict.fromkeys(cohort.names, own)
    asked = board.close(names, cohort.now)
    return {name: answered(partial(cohort.reply, name, survivors, at)) for name, survivors in asked}


def test_every_member_sees_the_same_votes_and_a_weight_that_dominates_is_clipped_to_two_fifths() -> None:
    cohort = Cohort(4)
    cohort.weights = dict(zip(cohort.names, (1000, 50, 50, 50), strict=True))
    cohort.votes = dict(zip(cohort.names, (1, 0, 255, 2), strict=True))
    board = SumBoard(AT, cohort.names)
    sends = cohort.announce(board, set())
    members = board.record.members
    bent = members.announced["box-02"].model_copy(update={"vote": 0})
    lying = members.model_copy(update={"announced": {**members.announced, "box-02": bent}})
    with pytest.raises(SignatureError, match="box-02: its keys for a sealed sum are not signed by its key for sums"):
        cohort.keeper("box-00").members(AT, lying)
    for name, step in cohort.answer(board, sends, set()):
        cohort.reply(name, step)
    masks = [masks for name in cohort.names if (masks := cohort.masks(name)) is not None]
    assert [one.votes for one in masks] == [cohort.votes] * 4
    assert [one.share / sum(one.share for one in masks) for one in masks] == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_of_a_sum_in_groups_one_group_may_be_lost() -> None:
    cohort = Cohort(34)
    board = SumBoard(AT, cohort.names)
    for name, step in cohort.answer(board, cohort.announce(board, set()), set()):
        cohort.reply(name, step)
    lost, left = (one.record.peers for one in board.groups)
    assert sorted(lost + left) == cohort.names
    assert {len(lost), len(left)} == {17}
    asked = board.close([*lost[:9], *left], cohort.now)
    cohort.answer(board, cohort.answer(board, asked, set()), set())
    ((digest, names),) = board.named
    assert names == left
    total = added([board.correction(SIZE), *(cohort.masked(name) for name in left)])
    assert np.array_equal(cohort.opened(total, digest, left), added([cohort.numbers[name] for name in left]))


def test_a_sum_of_weights_tells_the_cohort_how_many_images_there_are_and_nobody_whose() -> None:
    cohort, at = Cohort(5), replace(AT, exchange="weights")
    cohort.weights = dict(zip(cohort.names, (1000, 50, 50, 50, 7), strict=True))
    cohort.votes["box-01"] = 3
    board = SumBoard(at, cohort.names)
    sends = cohort.announce(board, {"box-04"}, at)
    assert {keys.weight for keys in board.record.keys.values()} == {1}
    while board.phase is not Phase.OPENED:
        sends = cohort.answer(board, sends, set(), at)
    (opened,) = board.weights()
    for name in cohort.names[:4]:
        keeper = cohort.keeper(name, "weights")
        keeper.opened(at, opened)
        assert keeper.found(at) == (cohort.weights[name], 1150, cohort.votes[name])
    other = opened.model_copy(update={"numbers": bytes([opened.numbers[0] ^ 128]) + opened.numbers[1:]})
    halved = opened.model_copy(update={"groups": 2})
    for lie, why in ((other, "altered in transit"), (halved, "groups of a sum")):
        with pytest.raises(SumError, match=why):
            cohort.keeper("box-00", "weights").opened(at, lie)


HERE = schemas.RoundAttempt(3, 1)
LOW_ORDER = bytes(32)
"""A public key of X25519 that nobody can agree on a key with."""


def sealing_spec() -> FederationSpec:
    weights = TensorLayout(name="weight", dtype="float32", shape=(SIZE - 1 - TAGS,))
    spec = tiny_spec(2)
    changes = {"sealed": (Part.EXTRACTOR,), "layouts": {**spec.layouts, Part.EXTRACTOR: (weights,)}}
    return spec.model_copy(update=changes)


class Attempt:
    """The coordinator's sealed sums of an attempt, and devices that answer what they are sent; some of them otherwise than they should."""

    def __init__(self, world: World, count: int = 5, exchange: schemas.SumExchange = "parts") -> None:
        of_all = {"upload": (Part.SEALED,)}  # then counts are sealed, by a sum of weights
        self.spec = sealing_spec().model_copy(update=of_all if exchange == "weights" else {})
        self.cohort = Cohort(count)
        self.at = SumRound(self.spec.federation, HERE.round, HERE.attempt, exchange)
        self.store, self.log = world.store, world.root / "sums.jsonl"
        self.sent: Sends = []
        self.last: dict[str, schemas.ToDevice] = {}
        self.merged: list[OpenedSum] = []
        self.now = 0.0
        self.lies: dict[str, Any] = {}
        about = {"federation": self.spec.federation, "round": HERE.round, "attempt": HERE.attempt}
        self.header = {**about, "recipient": schemas.COORDINATOR, "epoch": 1, "session": "0" * 64, "counter": 1}
        self.sums = self.started()

    def started(self) -> SealedSums:
        """A coordinator's, as after a start."""
        events, devices = EventLog(self.log, time.time), set(self.cohort.names)
        sums = SealedSums(self.spec, self.store, cast(Publisher, self), events, lambda: self.now, devices.__contains__)
        sums.begin(HERE, self.cohort.names)
        return sums

    def sum_step(
        self, device: str, at: schemas.RoundAttempt, exchange: schemas.SumExchange, step: schemas.ToDevice
    ) -> None:
        """The publisher's."""
        assert (at, exchange) == (HERE, self.at.exchange)
        self.sent.append((device, step))
        self.last[device] = step

    def answer(self, device: str, step: schemas.FromDevice) -> None:
        lie = self.lies.get(step.step)
        told = lie(step) if lie is not None and device == "box-00" else step
        if told is not None:
            self.sums.receive(device, schemas.SumUp(**self.header, sender=device, exchange=self.at.exchange, body=told))

    def announce(self) -> None:
        for name in self.cohort.names:
            keys = present(self.cohort.keys_of(name, self.at))
            self.answer(name, keys)

    def answer_all(self) -> None:
        """Devices answer until nothing is sent any more."""
        while self.sent:
            sent, self.sent = self.sent, []
            for device, step in sent:
                if (reply := self.cohort.reply(device, step, self.at)) is not None:
                    self.answer(device, reply)

    def wait(self, seconds: float) -> None:
        """Time goes on, and those who have not answered are late."""
        self.sums.tick(self.cohort.names)
        self.now += seconds
        self.sums.tick(self.cohort.names)

    def run(self) -> OpenedSum:
        """The whole attempt."""
        self.announce()
        self.answer_all()
        self.sums.open(self.cohort.names, self.merged.append)
        self.answer_all()
        for _ in range(2):
            self.wait(WAIT_S)
            self.answer_all()
        (opened,) = self.merged
        return opened

    def exact(self, opened: OpenedSum) -> bool:
        """Whether the correction gives the sum of the clients' numbers."""
        ((digest, names),) = opened.groups
        sent = added([self.cohort.masked(name, self.at) for name in names])
        published = sent + np.frombuffer(opened.correction, "<u4").astype(np.uint32)
        wanted = added([self.cohort.numbers[name] for name in names])
        return np.array_equal(self.cohort.opened(published, digest, names, self.at), wanted)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.log) if event["event"] == name]


def clients(opened: OpenedSum) -> list[str]:
    return [name for _, names in opened.groups for name in names]


@pytest.fixture
def attempt(make_world: MakeWorld) -> Attempt:
    return Attempt(make_world())


def bad_keys(attempt: Attempt, signing: SigningKey, **changes: bytes | None) -> schemas.SumKeys:
    """Keys of box-00, with changes, signed by `signing`."""
    told = {"key": attempt.cohort.keys["box-00"].public.raw, **changes}
    unsigned = SumSecrets.draw("box-00").announce(attempt.at, 5, signing).model_copy(update=told)
    return unsigned.model_copy(update={"signature": signing.sign(keys_label(attempt.at, "box-00", unsigned))})


@pytest.mark.parametrize(
    ("by", "changes", "said"),
    [
        (None, {"mask": LOW_ORDER}, "box-00: a public key for a sealed sum is not a valid X25519 key"),
        (None, {"cipher": LOW_ORDER}, "box-00: a public key for a sealed sum is not a valid X25519 key"),
        (None, {"key": None}, "box-00: it announced keys for a sum without its signing key"),
        (SigningKey.generate(), {}, "box-00: its keys for a sealed sum are not signed by its key for sums"),
    ],
)
def test_a_device_with_bad_keys_is_left_out_of_the_sum(
    attempt: Attempt, by: SigningKey | None, changes: dict[str, bytes | None], said: str
) -> None:
    attempt.lies["keys"] = lambda keys: bad_keys(attempt, by or attempt.cohort.keys["box-00"], **changes)
    opened = attempt.run()
    assert clients(opened) == attempt.cohort.names[1:]
    assert attempt.exact(opened)
    (refused,) = attempt.events("sum_refused")
    assert (refused["client"], refused["reason"]) == ("box-00", said)
    assert attempt.sums.failure is None


def test_a_signature_over_another_list_counts_for_nothing(attempt: Attempt) -> None:
    attempt.lies["signed"] = lambda step: schemas.SumSigned(signature=bytes(64))
    opened = attempt.run()
    assert len(clients(opened)) == 5
    assert attempt.exact(opened)
    (refused,) = attempt.events("sum_refused")
    assert refused["reason"] == "box-00: its signature does not match the list of survivors"


@pytest.mark.parametrize(("count", "opens"), [(5, True), (4, False)])
def test_a_device_that_refuses_is_named_with_its_reason_and_not_waited_for(
    make_world: MakeWorld, count: int, opens: bool
) -> None:
    attempt = Attempt(make_world(), count)
    attempt.lies["signed"] = lambda _: schemas.SumRefused(why=schemas.SumObstacle.LEAST_SUM)
    attempt.announce()
    attempt.answer_all()
    attempt.sums.open(attempt.cohort.names, attempt.merged.append)
    attempt.answer_all()
    (opened,) = attempt.merged
    assert bool(opened.groups) is opens
    assert attempt.sums.refused == {"box-00": schemas.SumObstacle.LEAST_SUM}
    assert [(event["client"], event["reason"]) for event in attempt.events("sum_refused")] == [("box-00", "least_sum")]
    assert (attempt.sums.failure is None) is opens
    assert texts().sum_obstacles.keys() == {one.value for one in schemas.SumObstacle} - {"shown"}, "a remedy for each"


def test_a_device_that_gives_wrong_shares_does_not_keep_the_sum_closed(attempt: Attempt) -> None:
    attempt.lies["revealed"] = lambda step: schemas.SumRevealed(shares=dict.fromkeys(step.shares, bytes(16)))
    assert attempt.exact(attempt.run())


def test_a_device_that_deals_out_rubbish_costs_the_sum_and_is_named(attempt: Attempt) -> None:
    attempt.lies["shares"] = lambda step: schemas.SumShares(sealed=dict.fromkeys(step.sealed, bytes(48)))
    assert attempt.run() == OpenedSum()
    reason = "box-00: 0 of 4 shares of its masks arrived"
    assert attempt.sums.failure == SumFailure(3, reason, None)
    assert [event["reason"] for event in attempt.events("sum_off")] == [reason]


@pytest.mark.parametrize("answered", [0, 4])
def test_a_coordinator_that_restarts_while_it_opens_a_sum_opens_the_same(attempt: Attempt, answered: int) -> None:
    attempt.announce()
    attempt.answer_all()
    attempt.sums.open(attempt.cohort.names, attempt.merged.append)
    for device, step in attempt.sent[:answered]:
        attempt.answer(device, cast(schemas.SumSigned, attempt.cohort.reply(device, step, attempt.at)))
    attempt.sent = []
    attempt.sums = attempt.started()
    attempt.sums.open(attempt.cohort.names, attempt.merged.append)
    attempt.wait(5.0)
    attempt.answer_all()
    assert attempt.exact(attempt.merged[0])
    assert len(clients(attempt.merged[0])) == 5


def test_a_device_that_is_lost_in_the_sum_of_weights_is_in_none_of_parts_where_its_share_would_be_one_too_many(
    make_world: MakeWorld,
) -> None:
    attempt = Attempt(make_world(), exchange="weights")
    attempt.lies["numbers"] = lambda step: None
    attempt.announce()
    for _ in range(3):
        attempt.answer_all()
        attempt.wait(WAIT_S)
    assert attempt.last["box-00"] == schemas.SumOff()
    found = {name: attempt.cohort.keeper(name, "weights").found(attempt.at) for name in attempt.cohort.names}
    assert found == {"box-00": None, **dict.fromkeys(attempt.cohort.names[1:], (5, 20, 0))}
    (opened,) = [step for step in [attempt.last["box-01"]] if isinstance(step, schemas.SumOpened)]
    with pytest.raises(SumError, match="a sum of weights lacks this device's"):
        attempt.cohort.keeper("box-00", "weights").opened(attempt.at, opened)


class LosesTheSum(PlainWorker):
    """Merges an aggregate without the sum that was opened for it."""

    result: ClassVar[Mapping[str, Any]] = {"sum_lost": "the sum has clients: b"}


def test_a_sum_that_is_in_no_aggregate_is_a_problem_too(make_world: MakeWorld) -> None:
    world = make_world(1, make_worker=LosesTheSum)
    with RunningService(world) as running:
        world.start_devices()
        world.wait_event("finished")
        problem = world.problems(running.service)["no sealed sum"]
    assert problem.what == "round 1 continued without the sum over its devices: the sum has clients: b"
    assert problem.remedy.startswith("After one round, nothing")
    assert [event["reason"] for event in world.events("sum_off")] == ["the sum has clients: b"]
