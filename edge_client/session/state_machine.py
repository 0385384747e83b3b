"""The agent's protocol as a pure state machine: `step(state, event, now) -> (state, commands)`.

No clock, no randomness, no I/O. An event first changes the state (`_CHANGES`, `_HANDLERS`). Then `_ADVANCES` return the
commands that follow from the state. Laws (property-tested over random event orders):
  * a committed round attempt is never started again;
  * nothing is started while an update waits for its receipt, so the outbox is never overwritten;
  * an outbox entry ends only with a receipt for exactly its artifact;
  * control messages other than hello are sent only in a session.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edge_client.session import signals
from edge_client.session.state import MANIFEST_FIRST_S, REVOKED_RETRY_S, SILENCE_S, Delivery, SessionState, TrainerState
from fedcg.wire.messages import schemas

HELLO_EVERY_S = 2.0
REFUSED_PUBLISH_S = 10.0  # until the next hello after the broker refused a message: it may refuse it again
REFUSED_HELLO_S = 60.0  # until the next hello after a refused one: a person has to update one side
MANIFEST_MAX_S = 30.0
GRANT_PATIENCE_S = 2.0  # after chunks were granted, until the manifest is repeated
BROADCAST_PATIENCE_S = 0.5  # a broadcast that pauses for this long has ended or lost chunks
SUM_EVERY_S = 4.0  # until unanswered keys for a sealed sum are announced again
TRAINER_DEATHS = 5  # in one job, before the agent gives up
TRAINER_BACKOFF_S = 0.5
TRAINER_BACKOFF_MAX_S = 30.0

Step = tuple[SessionState, tuple[signals.Command, ...]]


def _advance_hello(state: SessionState, now: float) -> Step:
    if not state.up or state.welcomed or now < state.hello_at:
        return state, ()
    return replace(state, hello_at=now + HELLO_EVERY_S), (signals.SendHello(),)


def _advance_trainer(state: SessionState, now: float) -> Step:
    reason = state.release_reason
    if reason and state.trainer is TrainerState.IDLE and state.job is None:
        return replace(state, trainer=TrainerState.GONE), (signals.ReleaseTrainer(reason),)
    if state.trainer is not TrainerState.GONE or now < state.trainer_at or reason:
        return state, ()
    return replace(state, trainer=TrainerState.STARTING), (signals.StartTrainer(),)


def _advance_round(state: SessionState, now: float) -> Step:
    offer, round_attempt = state.offer, state.offered
    if offer is None or round_attempt is None or not is_asked(state, round_attempt):
        return state, ()
    if state.obstacle is not None and state.job != round_attempt:  # the current round is finished
        return decline(replace(state, obstructed=round_attempt), round_attempt, state.obstacle)
    if state.bound_spec not in (None, offer.spec.id):
        return decline(state, round_attempt, schemas.DeclineReason.SPEC_REFUSED)
    if state.verdict is None or state.verdict[0] != offer.spec.id:
        return state, (signals.CheckSpec(offer.spec.id),) if offer.spec.id in state.stored else ()
    if state.verdict[1] is not None:
        return decline(state, round_attempt, state.verdict[1])
    commands: tuple[signals.Command, ...] = ()
    if state.welcomed and state.accepted != round_attempt:
        state = replace(state, accepted=round_attempt)
        accept = schemas.Accept(**state.addressed(round_attempt), predicted_s=state.predicted_s)
        commands = (signals.Send(accept), signals.Note("accepted", round_attempt))
    is_free = state.trainer is TrainerState.IDLE and state.job is None and state.delivery is None
    if not is_free or offer.aggregate.id not in state.stored:
        return state, commands
    if state.is_sealed and state.sum_ready != round_attempt:
        state, more = _advance_sum(state, round_attempt, offer, now)
    else:
        state = replace(state, trainer=TrainerState.BUSY, job=round_attempt, job_spec=offer.spec.id)
        more = (signals.TrainRound(round_attempt, offer.spec.id, offer.aggregate.id, state.share),)
    return state, commands + more


def _advance_sum(state: SessionState, round_attempt: schemas.RoundAttempt, offer: schemas.Offer, now: float) -> Step:
    """Prepare a round with sealed parts: count the images, announce keys, wait for the other devices' keys."""
    if state.weighed is None or state.weighed[0] != round_attempt:
        state = replace(state, trainer=TrainerState.BUSY, job=round_attempt, job_spec=offer.spec.id, sum_at=now)
        return state, (signals.WeighRound(round_attempt, offer.spec.id, offer.aggregate.id),)
    if not state.welcomed or now < state.sum_at:
        return state, ()
    return replace(state, sum_at=now + SUM_EVERY_S), (signals.AnnounceSum(round_attempt, *state.weighed[1:]),)


def _advance_end(state: SessionState, now: float) -> Step:
    finished = state.finished
    if finished is None or state.done:
        return state, ()
    if state.finalised == finished.aggregate.id:
        if state.delivery is not None:
            return state, ()
        return replace(state, done=True), (signals.Done(state.succeeded),)
    at_hand = {finished.spec.id, finished.aggregate.id} <= state.stored
    if not at_hand or state.trainer is not TrainerState.IDLE or state.job is not None:
        return state, ()
    state = replace(state, trainer=TrainerState.BUSY, job=finished.aggregate.id)
    return state, (signals.ChooseModel(finished.spec.id, finished.aggregate.id),)


def _advance_delivery(state: SessionState, now: float) -> Step:
    delivery = state.delivery
    if delivery is None:
        return state, ()
    delay_s = min(delivery.delay_s * 2.0, MANIFEST_MAX_S)
    later = replace(delivery, manifest_at=now + delivery.delay_s, delay_s=delay_s)
    if delivery.update is None and now >= delivery.manifest_at:
        return replace(state, delivery=later), (signals.LoadUpdate(),)
    if delivery.update is None or not state.welcomed:
        return state, ()
    if delivery.silent_since is not None and now >= delivery.silent_since + SILENCE_S:
        waiting = replace(delivery, silent_since=None)
        state = replace(state, welcomed=False, hello_at=now + HELLO_EVERY_S, delivery=waiting)
        return state, (signals.SendHello(),)
    if now < delivery.manifest_at:
        return state, ()
    silent_since = now if delivery.silent_since is None else delivery.silent_since
    state = replace(state, delivery=replace(later, silent_since=silent_since))
    message = schemas.Manifest(**state.addressed(delivery.round_attempt), artifact=delivery.update)
    return state, (signals.Send(message), signals.Note("manifest", delivery.round_attempt))


def _advance_wanted(state: SessionState, now: float) -> Step:
    wanted = tuple(download for download in _downloads(state) if download.ref.id not in state.stored)
    if wanted == state.wanted:
        return state, ()
    return replace(state, wanted=wanted), (signals.Want(wanted),)


_ADVANCES = (_advance_hello, _advance_trainer, _advance_round, _advance_end, _advance_delivery, _advance_wanted)


def _downloads(state: SessionState) -> tuple[signals.Wanted, ...]:
    patience = BROADCAST_PATIENCE_S if state.live else 0.0
    if state.finished is not None:
        if state.finalised == state.finished.aggregate.id:
            return ()
        return (
            signals.Wanted("spec", state.finished.spec, 0.0),
            signals.Wanted("aggregate", state.finished.aggregate, 0.0),
        )
    round_attempt = state.offered
    if state.offer is None or round_attempt is None:
        return ()
    asked = is_asked(state, round_attempt)
    spec = signals.Wanted("spec", state.offer.spec, 0.0 if asked else None)
    return (spec, signals.Wanted("aggregate", state.offer.aggregate, patience if asked else None))


def is_asked(state: SessionState, round_attempt: schemas.RoundAttempt) -> bool:
    """Whether this device should train this attempt: invited, not yet trained, not declined."""
    is_refused = state.declined is not None and state.declined[0] == round_attempt
    is_behind = state.trained is not None and round_attempt <= state.trained
    return state.invited == round_attempt and not is_refused and not is_behind


def decline(state: SessionState, round_attempt: schemas.RoundAttempt, reason: schemas.DeclineReason) -> Step:
    """Decline a round attempt, now and when its invite is repeated."""
    state = replace(state, declined=(round_attempt, reason))
    commands: tuple[signals.Command, ...] = (signals.Note("declined", round_attempt, reason.value),)
    if state.welcomed:
        commands = (signals.Send(schemas.Decline(**state.addressed(round_attempt), reason=reason)), *commands)
    return state, commands


def step(state: SessionState, event: signals.Input, now: float) -> Step:
    """Apply an event.

    Args:
        state: before the event.
        event: the event.
        now: monotonic seconds.

    Returns:
        The new state, and the commands to execute in order.
    """
    commands: tuple[signals.Command, ...] = ()
    if change := _CHANGES.get(type(event)):
        state = change(state, event, now)
    else:
        state, commands = _HANDLERS[type(event)](state, event, now)
    for advance in _ADVANCES:
        state, more = advance(state, now)
        commands += more
    return state, commands


# ------------------------------------------------------------------ events change the state


def _sending(state: SessionState, event: signals.Sending, now: float) -> Step:
    delivery = state.delivery
    if delivery is None or not state.welcomed:
        return state, ()
    quiet_until = max(delivery.manifest_at, now + GRANT_PATIENCE_S)
    return replace(state, delivery=replace(delivery, manifest_at=quiet_until, silent_since=None)), ()


def _coordinator_seen(state: SessionState, event: signals.CoordinatorSeen, now: float) -> Step:
    if not event.online or event.epoch <= state.epoch:
        return state, ()
    # A sent hello is repeated if unanswered. A hello delayed after a refusal was meant for the earlier coordinator process.
    is_under_way = not state.welcomed and now < state.hello_at <= now + HELLO_EVERY_S
    return replace(state, epoch=event.epoch, welcomed=False, hello_at=state.hello_at if is_under_way else now), ()


def _welcomed(state: SessionState, event: signals.Welcomed, now: float) -> Step:
    if not state.up:  # it was queued when the link broke; the next link sends a new hello
        return state, ()
    delivery = state.delivery
    if delivery is not None:
        delivery = replace(delivery, manifest_at=now, delay_s=MANIFEST_FIRST_S, silent_since=None)
    epoch = max(state.epoch, event.epoch)
    return replace(state, welcomed=True, epoch=epoch, accepted=None, delivery=delivery), ()


def _offered(state: SessionState, event: signals.Offered, now: float) -> Step:
    live = event.live or (state.live and state.offer is not None and state.offer.aggregate == event.offer.aggregate)
    epoch = max(state.epoch, event.offer.epoch)
    if state.committed is not None and event.offer.at < state.committed and event.offer.epoch > state.committed_epoch:
        state = replace(state, superseded=state.committed)  # offers never return to an earlier round within an epoch
    return replace(state, offer=event.offer, finished=None, done=False, live=live, epoch=epoch), ()


def _ended(state: SessionState, finished: schemas.Finished, now: float) -> Step:
    epoch = max(state.epoch, finished.epoch)
    return replace(state, finished=finished, offer=None, live=False, epoch=epoch), ()


def _invited(state: SessionState, event: signals.Invited, now: float) -> Step:
    round_attempt = event.round_attempt
    state = replace(state, invited=round_attempt, accepted=None, share=event.share, predicted_s=event.predicted_s)
    if state.obstructed == round_attempt and state.obstacle != (state.declined or (None, None))[1]:
        state = replace(state, declined=None, obstructed=None)
    if state.declined is not None and state.declined[0] == round_attempt:
        state, commands = decline(state, round_attempt, state.declined[1])
        return state, tuple(command for command in commands if isinstance(command, signals.Send))  # noted once
    if state.trained is None or round_attempt > state.trained:
        return state, ()
    if state.delivery is not None and state.delivery.round_attempt == round_attempt:
        return replace(state, delivery=replace(state.delivery, manifest_at=now)), ()
    # Already trained and receipted, or an earlier attempt: there is nothing to deliver.
    return decline(state, round_attempt, schemas.DeclineReason.NOT_ELIGIBLE)


def _granted(state: SessionState, need: schemas.Need, now: float) -> Step:
    delivery = state.delivery
    if delivery is None or delivery.update is None or delivery.update.id != need.artifact:
        return state, ()
    answered = replace(delivery, manifest_at=now + GRANT_PATIENCE_S, delay_s=MANIFEST_FIRST_S, silent_since=None)
    return replace(state, delivery=answered), (signals.SendChunks(delivery.update, need.ranges),)


def _receipted(state: SessionState, receipt: schemas.Receipt, now: float) -> Step:
    delivery = state.delivery
    if delivery is None or delivery.update is None or delivery.update.id != receipt.artifact:
        return state, (signals.RecordReason(receipt.artifact, receipt.reason),) if receipt.reason else ()
    record = signals.RecordDelivery(delivery.round_attempt, receipt.artifact, receipt.outcome, receipt.reason)
    return replace(state, delivery=None), (record,)


def _session_lost(state: SessionState, event: signals.SessionLost, now: float) -> Step:
    hello_at = now + (REFUSED_PUBLISH_S if event.refused else 0.0)
    return replace(state, welcomed=False, hello_at=hello_at) if state.welcomed else state, ()


def _trainer_ready(state: SessionState, event: signals.TrainerReady, now: float) -> Step:
    return replace(state, trainer=TrainerState.IDLE) if state.trainer is TrainerState.STARTING else state, ()


def _trainer_died(state: SessionState, event: signals.TrainerDied, now: float) -> Step:
    job, deaths = state.job, state.deaths + 1
    # The first restart is immediate. A process that keeps dying is restarted with increasing pauses.
    pause = 0.0 if deaths == 1 else min(TRAINER_BACKOFF_S * 2.0 ** (deaths - 2), TRAINER_BACKOFF_MAX_S)
    state = replace(state, trainer=TrainerState.GONE, trainer_at=now + pause, job=None, deaths=deaths)
    if deaths < TRAINER_DEATHS:
        return state, ()
    state = replace(state, deaths=0)
    if isinstance(job, str):
        return replace(state, finalised=job, succeeded=False), ()
    return _give_up(state, job, schemas.DeclineReason.TRAINING_FAILED)


def _give_up(state: SessionState, job: schemas.RoundAttempt | None, reason: schemas.DeclineReason) -> Step:
    """Decline the attempt in training; without one, the open attempt that this device has accepted but not yet trained."""
    offered = state.offered
    if job is None and offered is not None and offered == state.accepted and is_asked(state, offered):
        job = offered
    return (state, ()) if job is None else decline(state, job, reason)


def _consent_changed(state: SessionState, event: signals.ConsentChanged, now: float) -> Step:
    delivery = None if event.is_withheld else state.delivery
    declined = None if state.declined is not None and state.declined[1].needs_owner else state.declined
    return replace(state, verdict=None, delivery=delivery, declined=declined), ()


def _round_committed(state: SessionState, event: signals.RoundCommitted, now: float) -> Step:
    if state.trained is not None and event.round_attempt <= state.trained:
        return state, ()
    delivery = Delivery(event.round_attempt, event.update, manifest_at=now)
    spec = event.spec or state.job_spec
    state = replace(_idle(state), committed=event.round_attempt, committed_epoch=state.epoch)
    return replace(state, bound_spec=spec, delivery=delivery), ()


def _outbox_found(state: SessionState, event: signals.OutboxFound, now: float) -> Step:
    if state.delivery is not None and state.delivery.update is not None:
        if event.update is None:
            return state, (signals.LoadUpdate(),)
        if state.delivery.update == event.update:
            return state, ()
    return replace(state, delivery=Delivery(event.round_attempt, event.update, manifest_at=now)), ()


_CHANGES: dict[type[Any], Callable[[SessionState, Any, float], SessionState]] = {
    signals.Tick: lambda state, _event, _now: state,
    signals.Left: lambda state, _event, _now: state,
    signals.LinkChanged: lambda state, event, now: replace(
        state, up=event.up, welcomed=False, hello_at=now, live=False
    ),
    signals.HelloRefused: lambda state, _event, now: replace(state, hello_at=now + REFUSED_HELLO_S),
    signals.ObstacleChanged: lambda state, event, _now: replace(state, obstacle=event.reason),
    signals.TrainingAbandoned: lambda state, _event, now: replace(
        state, trainer=TrainerState.GONE, trainer_at=now, job=None, deaths=0
    ),
    signals.Revoked: lambda state, _event, now: replace(state, welcomed=False, hello_at=now + REVOKED_RETRY_S),
    signals.ArtifactStored: lambda state, event, _now: replace(state, stored=state.stored | {event.artifact}),
    signals.ArtifactLost: lambda state, event, _now: replace(_idle(state), stored=state.stored - {event.artifact}),
    signals.SpecChecked: lambda state, event, _now: replace(
        state, verdict=(event.digest, event.refusal), is_sealed=event.is_sealed
    ),
    signals.Weighed: lambda state, event, _now: replace(
        _idle(state), weighed=(event.round_attempt, event.images, event.vote)
    ),
    signals.SumReady: lambda state, event, _now: replace(state, sum_ready=event.round_attempt),
    signals.Chosen: lambda state, event, _now: replace(
        _idle(state), finalised=event.aggregate, succeeded=event.succeeded
    ),
}
"""Events without direct commands: functions that return the new state."""
_HANDLERS: dict[type[Any], Callable[[SessionState, Any, float], Step]] = {
    signals.Sending: _sending,
    signals.CoordinatorSeen: _coordinator_seen,
    signals.Welcomed: _welcomed,
    signals.ConsentChanged: _consent_changed,
    signals.Stopping: lambda state, _event, _now: _give_up(state, None, schemas.DeclineReason.INTERRUPTED),
    signals.Offered: _offered,
    schemas.Finished: _ended,
    signals.Invited: _invited,
    schemas.Need: _granted,
    schemas.Receipt: _receipted,
    signals.SessionLost: _session_lost,
    signals.SumStepped: lambda state, event, _now: (state, (event,)),
    signals.TrainerReady: _trainer_ready,
    signals.TrainerDied: _trainer_died,
    signals.RoundCommitted: _round_committed,
    signals.OutboxFound: _outbox_found,
    signals.RoundFailed: lambda state, event, _now: decline(_idle(state), event.round_attempt, event.reason),
}


def _idle(state: SessionState) -> SessionState:
    is_running = state.trainer is TrainerState.BUSY
    return replace(state, trainer=TrainerState.IDLE if is_running else state.trainer, job=None, deaths=0)
