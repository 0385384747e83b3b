import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import OrderError
from fedcg.wire.messages.envelopes import BroadcastOrder, Session, session_id
from fedcg.wire.messages.schemas import Accept, ArtifactRef, CoordinatorStatus, Invite, Offer

REF = ArtifactRef(id="0" * 64, size=10, chunk_bytes=256)


def offer(epoch: int, round_number: int, attempt: int) -> Offer:
    return Offer(
        federation="f",
        sender="coordinator",
        recipient="*",
        epoch=epoch,
        round=round_number,
        attempt=attempt,
        spec=REF,
        aggregate=REF,
        rounds=9,
        deadline_at=0.0,
    )


def status(epoch: int, *, online: bool) -> CoordinatorStatus:
    return CoordinatorStatus(federation="f", sender="coordinator", recipient="*", epoch=epoch, online=online)


def accept() -> Accept:
    return Accept(federation="f", sender="a", recipient="coordinator")


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3)))
def test_admitted_broadcasts_never_go_back(positions: list[tuple[int, int, int]]) -> None:
    order = BroadcastOrder()
    admitted = [(0, 0, 0)]
    for position in positions:
        if position < admitted[-1]:
            with pytest.raises(OrderError):
                order.admit(offer(*position))
        else:
            order.admit(offer(*position))
            admitted.append(position)
    assert order.highest == admitted[-1] == max(admitted)


def test_the_order_survives_a_restart() -> None:
    order = BroadcastOrder(highest=(2, 1, 1))
    with pytest.raises(OrderError):
        order.admit(offer(1, 9, 9))
    with pytest.raises(OrderError):
        order.admit(offer(2, 1, 0))
    order.admit(offer(2, 1, 2))


def test_a_coordinators_will_is_admitted_in_the_middle_of_its_epoch_and_sets_nothing_back() -> None:
    order = BroadcastOrder()
    order.admit(status(3, online=True))
    order.admit(offer(3, 5, 1))
    order.admit(status(3, online=False))
    assert order.highest == (3, 5, 1)


def test_the_status_of_a_new_epoch_shuts_out_the_old_one() -> None:
    order = BroadcastOrder(highest=(3, 5, 1))
    order.admit(status(4, online=True))
    assert order.highest == (4, 0, 0)
    with pytest.raises(OrderError):
        order.admit(offer(3, 6, 1))
    with pytest.raises(OrderError):
        order.admit(status(3, online=False))


def test_a_session_id_takes_both_nonces_and_their_order() -> None:
    first, second = "0" * 32, "1" * 32
    assert len(session_id(first, second)) == 64
    assert len({session_id(first, second), session_id(second, first), session_id(first, first)}) == 3
    assert session_id(first, second) == session_id(first, second)


def test_what_one_side_stamps_the_other_admits_once_and_in_order() -> None:
    device, coordinator = Session("5" * 64), Session("5" * 64)
    first, second, third = (device.stamp(accept()) for _ in range(3))
    assert [message.counter for message in (first, second, third)] == [1, 2, 3]
    coordinator.admit(first)
    coordinator.admit(third)
    for late in (first, second, third):
        with pytest.raises(OrderError):
            coordinator.admit(late)


def test_the_two_directions_count_for_themselves() -> None:
    device, coordinator = Session("5" * 64), Session("5" * 64)
    coordinator.admit(device.stamp(accept()))
    device.admit(coordinator.stamp(Invite(federation="f", sender="coordinator", recipient="a")))
    assert (device.next_out, device.last_in) == (2, 1)


def test_a_message_of_another_session_or_of_none_is_refused_and_not_counted() -> None:
    session = Session("5" * 64)
    with pytest.raises(OrderError, match="another session"):
        session.admit(Session("6" * 64).stamp(accept()))
    with pytest.raises(OrderError):
        session.admit(accept())
    assert session.last_in == 0
