"""What follows from the state of a session: the commands that are due now, and the state after them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_client.session.commands import (
    AnnounceSum,
    CheckSpec,
    ChooseModel,
    Command,
    Done,
    LoadUpdate,
    Note,
    ReleaseTrainer,
    Send,
    SendHello,
    StartTrainer,
    TrainRound,
    Want,
    Wanted,
    WeighRound,
)
from edge_client.session.state import (
    BROADCAST_PATIENCE_S,
    HELLO_EVERY_S,
    LEAVE_EVERY_S,
    MANIFEST_MAX_S,
    SILENCE_S,
    SUM_EVERY_S,
    Purpose,
    SessionState,
    Trainer,
)
from fedcg.wire.messages.schemas import Accept, Decline, DeclineReason, Leave, Manifest, RoundAttempt

Step = tuple[SessionState, tuple[Command, ...]]


def advance(state: SessionState, now: float) -> Step:
    """Give every command that is due.

    Args:
        state: what is known.
        now: monotonic seconds.

    Returns:
        The new state, and the commands to carry out in their order.
    """
    commands: tuple[Command, ...] = ()
    for step in _ADVANCES[state.purpose]:
        state, more = step(state, now)
        commands += more
    return state, commands


def _advance_hello(state: SessionState, now: float) -> Step:
    if not state.up or state.welcomed or now < state.hello_at:
        return state, ()
    return replace(state, hello_at=now + HELLO_EVERY_S), (SendHello(),)


def _advance_greeting(state: SessionState, now: float) -> Step:
    if not state.welcomed or state.done:
        return state, ()
    return replace(state, done=True), (Done(succeeded=True),)


def _advance_leave(state: SessionState, now: float) -> Step:
    if not state.welcomed or state.done or now < state.leave_at:
        return state, ()
    return replace(state, leave_at=now + LEAVE_EVERY_S), (Send(Leave(**state.addressed())),)


def _advance_trainer(state: SessionState, now: float) -> Step:
    reason = state.release_reason
    if reason and state.trainer is Trainer.IDLE and state.job is None:
        return replace(state, trainer=Trainer.GONE), (ReleaseTrainer(reason),)
    if state.trainer is not Trainer.GONE or now < state.trainer_at or reason:
        return state, ()
    return replace(state, trainer=Trainer.STARTING), (StartTrainer(),)


def _advance_round(state: SessionState, now: float) -> Step:
    offer, round_attempt = state.offer, state.offered
    if offer is None or round_attempt is None or not is_asked(state, round_attempt):
        return state, ()
    if state.obstacle is not None and state.job != round_attempt:  # a round under way is finished
        return decline(replace(state, obstructed=round_attempt), round_attempt, state.obstacle)
    if state.bound_spec not in (None, offer.spec.id):
        return decline(state, round_attempt, DeclineReason.SPEC_REFUSED)
    if state.verdict is None or state.verdict[0] != offer.spec.id:
        return state, (CheckSpec(offer.spec.id),) if offer.spec.id in state.stored else ()
    if state.verdict[1] is not None:
        return decline(state, round_attempt, state.verdict[1])
    commands: tuple[Command, ...] = ()
    if state.welcomed and state.accepted != round_attempt:
        state = replace(state, accepted=round_attempt)
        accept = Accept(**state.addressed(round_attempt), predicted_s=state.predicted_s)
        commands = (Send(accept), Note("accepted", round_attempt))
    is_free = state.trainer is Trainer.IDLE and state.job is None and state.delivery is None
    if not is_free or offer.aggregate.id not in state.stored:
        return state, commands
    if state.is_summed and state.sum_ready != round_attempt:
        state, more = _advance_sum(state, round_attempt, offer.spec.id, now)
    else:
        state = replace(state, trainer=Trainer.BUSY, job=round_attempt, job_spec=offer.spec.id)
        more = (TrainRound(round_attempt, offer.spec.id, offer.aggregate.id, state.share),)
    return state, commands + more


def _advance_sum(state: SessionState, round_attempt: RoundAttempt, spec: str, now: float) -> Step:
    """What comes before training where the update is masked: count the images, announce keys, wait for the others' ones."""
    if state.weighed is None or state.weighed[0] != round_attempt:
        state = replace(state, trainer=Trainer.BUSY, job=round_attempt, job_spec=spec, sum_at=now)
        return state, (WeighRound(round_attempt, spec),)
    if not state.welcomed or now < state.sum_at:
        return state, ()
    return replace(state, sum_at=now + SUM_EVERY_S), (AnnounceSum(round_attempt, spec, state.weighed[1]),)


def _advance_end(state: SessionState, now: float) -> Step:
    finished = state.finished
    if finished is None or state.done:
        return state, ()
    if state.finalised == finished.aggregate.id:
        if state.delivery is not None:
            return state, ()
        return replace(state, done=True), (Done(state.succeeded),)
    at_hand = {finished.spec.id, finished.aggregate.id} <= state.stored
    if not at_hand or state.trainer is not Trainer.IDLE or state.job is not None:
        return state, ()
    state = replace(state, trainer=Trainer.BUSY, job=finished.aggregate.id)
    return state, (ChooseModel(finished.spec.id, finished.aggregate.id),)


def _advance_delivery(state: SessionState, now: float) -> Step:
    delivery = state.delivery
    if delivery is None:
        return state, ()
    delay_s = min(delivery.delay_s * 2.0, MANIFEST_MAX_S)
    later = replace(delivery, manifest_at=now + delivery.delay_s, delay_s=delay_s)
    if delivery.update is None and now >= delivery.manifest_at:
        return replace(state, delivery=later), (LoadUpdate(),)
    if delivery.update is None or not state.welcomed:
        return state, ()
    if delivery.silent_since is not None and now >= delivery.silent_since + SILENCE_S:
        waiting = replace(delivery, silent_since=None)
        state = replace(state, welcomed=False, hello_at=now + HELLO_EVERY_S, delivery=waiting)
        return state, (SendHello(),)
    if now < delivery.manifest_at:
        return state, ()
    silent_since = now if delivery.silent_since is None else delivery.silent_since
    state = replace(state, delivery=replace(later, silent_since=silent_since))
    message = Manifest(**state.addressed(delivery.round_attempt), artifact=delivery.update)
    return state, (Send(message), Note("manifest", delivery.round_attempt))


def _advance_wanted(state: SessionState, now: float) -> Step:
    wanted = tuple(download for download in _downloads(state) if download.ref.id not in state.stored)
    if wanted == state.wanted:
        return state, ()
    return replace(state, wanted=wanted), (Want(wanted),)


_ADVANCES: dict[Purpose, tuple[Callable[[SessionState, float], Step], ...]] = {
    Purpose.TRAIN: (
        _advance_hello,
        _advance_trainer,
        _advance_round,
        _advance_end,
        _advance_delivery,
        _advance_wanted,
    ),
    Purpose.GREET: (_advance_hello, _advance_greeting),
    Purpose.LEAVE: (_advance_hello, _advance_leave),
}


def _downloads(state: SessionState) -> tuple[Wanted, ...]:
    patience = BROADCAST_PATIENCE_S if state.live else 0.0
    if state.finished is not None:
        if state.finalised == state.finished.aggregate.id:
            return ()
        return (Wanted("spec", state.finished.spec, 0.0), Wanted("aggregate", state.finished.aggregate, 0.0))
    round_attempt = state.offered
    if state.offer is None or round_attempt is None:
        return ()
    asked = is_asked(state, round_attempt)
    spec = Wanted("spec", state.offer.spec, 0.0 if asked else None)
    return (spec, Wanted("aggregate", state.offer.aggregate, patience if asked else None))


def is_asked(state: SessionState, round_attempt: RoundAttempt) -> bool:
    """Whether this device should train this attempt: invited, not trained yet, not refused."""
    is_refused = state.declined is not None and state.declined[0] == round_attempt
    is_behind = state.trained is not None and round_attempt <= state.trained
    return state.invited == round_attempt and not is_refused and not is_behind


def decline(state: SessionState, round_attempt: RoundAttempt, reason: DeclineReason) -> Step:
    """Decline a round attempt, now and whenever its invite is repeated."""
    state = replace(state, declined=(round_attempt, reason))
    commands: tuple[Command, ...] = (Note("declined", round_attempt, reason.value),)
    if state.welcomed:
        commands = (Send(Decline(**state.addressed(round_attempt), reason=reason)), *commands)
    return state, commands
