"""The agent's protocol as a pure state machine: `step(state, event, now) -> (state, commands)`.

No clock, no randomness, no I/O. An event first changes the state (`_HANDLERS`), then `due_commands.advance` gives the
commands that now follow from the state. Laws (property-tested over random event orders):
  * a round attempt that was committed is never started again;
  * nothing is started while an update waits for its receipt, so an outbox is never overwritten;
  * only a receipt for exactly that artifact ends an outbox entry;
  * control messages other than hello are sent only inside a session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edge_client.session import events
from edge_client.session.commands import AnswerSum, Done, LoadUpdate, RecordDelivery, RecordReason, Send, SendChunks
from edge_client.session.due_commands import Step, advance, decline, is_asked
from edge_client.session.state import (
    GRANT_PATIENCE_S,
    HELLO_EVERY_S,
    MANIFEST_FIRST_S,
    REFUSED_HELLO_S,
    REFUSED_PUBLISH_S,
    REVOKED_RETRY_S,
    TRAINER_BACKOFF_MAX_S,
    TRAINER_BACKOFF_S,
    TRAINER_DEATHS,
    Delivery,
    Purpose,
    SessionState,
    Trainer,
)
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt


def step(state: SessionState, event: events.Event, now: float) -> Step:
    """The state and the commands after an event.

    Args:
        state: before the event.
        event: what happened.
        now: monotonic seconds.

    Returns:
        The new state, and the commands to carry out in their order.
    """
    handler: Callable[[SessionState, Any, float], Step] = _HANDLERS[type(event)]
    state, commands = handler(state, event, now)
    state, more = advance(state, now)
    return state, commands + more


# ------------------------------------------------------------------ events change the state


def _ticked(state: SessionState, event: events.Tick, now: float) -> Step:
    return state, ()


def _sending(state: SessionState, event: events.Sending, now: float) -> Step:
    delivery = state.delivery
    if delivery is None or not state.welcomed:
        return state, ()
    quiet_until = max(delivery.manifest_at, now + GRANT_PATIENCE_S)
    return replace(state, delivery=replace(delivery, manifest_at=quiet_until, silent_since=None)), ()


def _link_changed(state: SessionState, event: events.LinkChanged, now: float) -> Step:
    return replace(state, up=event.up, welcomed=False, hello_at=now, live=False), ()


def _coordinator_seen(state: SessionState, event: events.CoordinatorSeen, now: float) -> Step:
    if not event.online or event.epoch <= state.epoch:
        return state, ()
    # A hello is on its way, and repeated when it is not answered; one that waits after a refused message is for the coordinator before.
    is_asked = not state.welcomed and now < state.hello_at <= now + HELLO_EVERY_S
    return replace(state, epoch=event.epoch, welcomed=False, hello_at=state.hello_at if is_asked else now), ()


def _welcomed(state: SessionState, event: events.Welcomed, now: float) -> Step:
    if not state.up:  # it was still queued when the link broke; a hello is sent again on the next link
        return state, ()
    delivery = state.delivery
    if delivery is not None:
        delivery = replace(delivery, manifest_at=now, delay_s=MANIFEST_FIRST_S, silent_since=None)
    epoch = max(state.epoch, event.epoch)
    return replace(state, welcomed=True, epoch=epoch, accepted=None, delivery=delivery), ()


def _hello_refused(state: SessionState, event: events.HelloRefused, now: float) -> Step:
    return replace(state, hello_at=now + REFUSED_HELLO_S), ()


def _revoked(state: SessionState, event: events.Revoked, now: float) -> Step:
    return replace(state, welcomed=False, hello_at=now + REVOKED_RETRY_S), ()


def _left(state: SessionState, event: events.Left, now: float) -> Step:
    return (replace(state, done=True), (Done(succeeded=True),)) if state.purpose is Purpose.LEAVE else (state, ())


def _offered(state: SessionState, event: events.Offered, now: float) -> Step:
    live = event.live or (state.live and state.offer is not None and state.offer.aggregate == event.offer.aggregate)
    epoch = max(state.epoch, event.offer.epoch)
    if state.committed is not None and event.offer.at < state.committed and event.offer.epoch > state.committed_epoch:
        state = replace(state, superseded=state.committed)  # within an epoch no offer goes back
    return replace(state, offer=event.offer, finished=None, done=False, live=live, epoch=epoch), ()


def _ended(state: SessionState, event: events.Ended, now: float) -> Step:
    epoch = max(state.epoch, event.finished.epoch)
    return replace(state, finished=event.finished, offer=None, live=False, epoch=epoch), ()


def _invited(state: SessionState, event: events.Invited, now: float) -> Step:
    round_attempt = event.round_attempt
    state = replace(state, invited=round_attempt, accepted=None, share=event.share, predicted_s=event.predicted_s)
    if state.obstructed == round_attempt and state.obstacle != (state.declined or (None, None))[1]:
        state = replace(state, declined=None, obstructed=None)
    if state.declined is not None and state.declined[0] == round_attempt:
        state, commands = decline(state, round_attempt, state.declined[1])
        return state, tuple(command for command in commands if isinstance(command, Send))  # noted once
    if state.trained is None or round_attempt > state.trained:
        return state, ()
    if state.delivery is not None and state.delivery.round_attempt == round_attempt:
        return replace(state, delivery=replace(state.delivery, manifest_at=now)), ()
    # Trained and receipted already, or an earlier attempt: there is nothing left to deliver for it.
    return decline(state, round_attempt, DeclineReason.NOT_ELIGIBLE)


def _granted(state: SessionState, event: events.Granted, now: float) -> Step:
    delivery = state.delivery
    if delivery is None or delivery.update is None or delivery.update.id != event.need.artifact:
        return state, ()
    answered = replace(delivery, manifest_at=now + GRANT_PATIENCE_S, delay_s=MANIFEST_FIRST_S, silent_since=None)
    return replace(state, delivery=answered), (SendChunks(delivery.update, event.need.ranges),)


def _receipted(state: SessionState, event: events.Receipted, now: float) -> Step:
    delivery, receipt = state.delivery, event.receipt
    if delivery is None or delivery.update is None or delivery.update.id != receipt.artifact:
        return state, (RecordReason(receipt.artifact, receipt.reason),) if receipt.reason else ()
    record = RecordDelivery(delivery.round_attempt, receipt.artifact, receipt.outcome, receipt.reason)
    return replace(state, delivery=None), (record,)


def _artifact_stored(state: SessionState, event: events.ArtifactStored, now: float) -> Step:
    return replace(state, stored=state.stored | {event.artifact}), ()


def _artifact_lost(state: SessionState, event: events.ArtifactLost, now: float) -> Step:
    return replace(_idle(state), stored=state.stored - {event.artifact}), ()


def _session_lost(state: SessionState, event: events.SessionLost, now: float) -> Step:
    hello_at = now + (REFUSED_PUBLISH_S if event.refused else 0.0)
    return replace(state, welcomed=False, hello_at=hello_at) if state.welcomed else state, ()


def _spec_checked(state: SessionState, event: events.SpecChecked, now: float) -> Step:
    return replace(state, verdict=(event.digest, event.refusal), is_summed=event.is_summed), ()


def _weighed(state: SessionState, event: events.Weighed, now: float) -> Step:
    return replace(_idle(state), weighed=(event.round_attempt, event.images)), ()


def _sum_stepped(state: SessionState, event: events.SumStepped, now: float) -> Step:
    return state, (AnswerSum(event.round_attempt, event.step),)


def _sum_ready(state: SessionState, event: events.SumReady, now: float) -> Step:
    return replace(state, sum_ready=event.round_attempt), ()


def _trainer_ready(state: SessionState, event: events.TrainerReady, now: float) -> Step:
    return replace(state, trainer=Trainer.IDLE) if state.trainer is Trainer.STARTING else state, ()


def _trainer_died(state: SessionState, event: events.TrainerDied, now: float) -> Step:
    job, deaths = state.job, state.deaths + 1
    # The first restart is at once; a process that keeps dying is restarted after longer and longer pauses.
    pause = 0.0 if deaths == 1 else min(TRAINER_BACKOFF_S * 2.0 ** (deaths - 2), TRAINER_BACKOFF_MAX_S)
    state = replace(state, trainer=Trainer.GONE, trainer_at=now + pause, job=None, deaths=deaths)
    if deaths < TRAINER_DEATHS:
        return state, ()
    state = replace(state, deaths=0)
    if isinstance(job, str):
        return replace(state, finalised=job, succeeded=False), ()
    promised = job or _promised(state)  # it may have died before it took the job
    return (state, ()) if promised is None else decline(state, promised, DeclineReason.TRAINING_FAILED)


def _promised(state: SessionState) -> RoundAttempt | None:
    """The open round attempt that this device has accepted, and has not trained yet."""
    offered = state.offered
    return offered if offered is not None and offered == state.accepted and is_asked(state, offered) else None


def _obstacle_changed(state: SessionState, event: events.ObstacleChanged, now: float) -> Step:
    return replace(state, obstacle=event.reason), ()


def _training_abandoned(state: SessionState, event: events.TrainingAbandoned, now: float) -> Step:
    return replace(state, trainer=Trainer.GONE, trainer_at=now, job=None, deaths=0), ()


def _consent_changed(state: SessionState, event: events.ConsentChanged, now: float) -> Step:
    delivery = None if event.is_withheld else state.delivery
    declined = None if state.declined is not None and state.declined[1].needs_owner else state.declined
    return replace(state, verdict=None, delivery=delivery, declined=declined), ()


def _stopping(state: SessionState, event: events.Stopping, now: float) -> Step:
    promised = _promised(state)
    return (state, ()) if promised is None else decline(state, promised, DeclineReason.INTERRUPTED)


def _round_committed(state: SessionState, event: events.RoundCommitted, now: float) -> Step:
    if state.trained is not None and event.round_attempt <= state.trained:
        return state, ()
    delivery = Delivery(event.round_attempt, event.update, manifest_at=now)
    spec = event.spec or state.job_spec
    state = replace(_idle(state), committed=event.round_attempt, committed_epoch=state.epoch)
    return replace(state, bound_spec=spec, delivery=delivery), ()


def _outbox_found(state: SessionState, event: events.OutboxFound, now: float) -> Step:
    if state.delivery is not None and state.delivery.update is not None:
        if event.update is None:
            return state, (LoadUpdate(),)
        if state.delivery.update == event.update:
            return state, ()
    return replace(state, delivery=Delivery(event.round_attempt, event.update, manifest_at=now)), ()


def _round_failed(state: SessionState, event: events.RoundFailed, now: float) -> Step:
    return decline(_idle(state), event.round_attempt, event.reason)


def _finalised(state: SessionState, event: events.Chosen, now: float) -> Step:
    return replace(_idle(state), finalised=event.aggregate, succeeded=event.succeeded), ()


_HANDLERS: dict[type[Any], Callable[[SessionState, Any, float], Step]] = {
    events.Tick: _ticked,
    events.Sending: _sending,
    events.LinkChanged: _link_changed,
    events.CoordinatorSeen: _coordinator_seen,
    events.Welcomed: _welcomed,
    events.HelloRefused: _hello_refused,
    events.ObstacleChanged: _obstacle_changed,
    events.TrainingAbandoned: _training_abandoned,
    events.ConsentChanged: _consent_changed,
    events.Stopping: _stopping,
    events.Left: _left,
    events.Revoked: _revoked,
    events.Offered: _offered,
    events.Ended: _ended,
    events.Invited: _invited,
    events.Granted: _granted,
    events.Receipted: _receipted,
    events.ArtifactStored: _artifact_stored,
    events.ArtifactLost: _artifact_lost,
    events.SessionLost: _session_lost,
    events.SpecChecked: _spec_checked,
    events.Weighed: _weighed,
    events.SumStepped: _sum_stepped,
    events.SumReady: _sum_ready,
    events.TrainerReady: _trainer_ready,
    events.TrainerDied: _trainer_died,
    events.RoundCommitted: _round_committed,
    events.OutboxFound: _outbox_found,
    events.RoundFailed: _round_failed,
    events.Chosen: _finalised,
}


def _idle(state: SessionState) -> SessionState:
    is_running = state.trainer is Trainer.BUSY
    return replace(state, trainer=Trainer.IDLE if is_running else state.trainer, job=None, deaths=0)
