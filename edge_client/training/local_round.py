"""One local round, from the stored state to the next commit. Runs in the training process and uses torch.

The result depends only on the stored state, the snapshot, the aggregate and the round's streams, so a repetition after a crash gives the same
bytes. Only the final commit changes the state.

Privacy accounting: the privacy that DP-SGD has spent in a federation, and whether another round is within the budget. Uses torch through Opacus.

A round is counted before its training starts, so the record is never behind what was published: an update is sent after its commit, which comes
after training. If the process is killed in between, nothing was published. The repetition of the same attempt draws the same noise and gives the
same update, so it is not counted again. A counted round stays counted, even if it diverges, is withheld, or its update is lost.
"""

import hashlib
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import torch

from devices.telemetry import read_telemetry
from edge_client.errors import RoundError, StoreError
from edge_client.firewall import Sealing, UpdateFacts, build_update
from edge_client.session.signals import TrainRound, WeighRound
from edge_client.store.generations import Generation, NewGeneration, StoredState
from edge_client.store.own_backbone import own_backbone
from edge_client.store.owner_record import Consent
from edge_client.store.private_store import NUMBERS_FILE, PRIVACY_FILE, PrivateStore
from edge_client.store.sum_keeper import SumMasks, masks_in
from edge_client.training.local_data import RoundData
from edge_client.training.sealed_parts import believed, numbered, opened_parts, sum_round
from edge_client.training.workplace import Measured, ProgressEvents, Workplace, measure, with_downloaded
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import Spent, after_round
from fedcg.learning.mechanisms.protected_round import check_mechanisms, downloaded_parts, protected_round
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    DivergedError,
    LocalResult,
    Method,
    Parts,
    RoundContext,
    check_finite,
)
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.networks.own_backbone import DeviceSpec, device_spec
from fedcg.learning.networks.plans import initial_parts, on_wire, shadow_spec, wire_layouts
from fedcg.learning.privacy import OFF, DpSgdSettings
from fedcg.learning.registry import get_method
from fedcg.learning.round_checkpoint import RoundCheckpoint
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.learning.training.batches import paced
from fedcg.learning.training.evaluation import generator_figures
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import Artifact, Base, codecs_for, unpack
from fedcg.wire.errors import IntegrityError
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import AuditFigure, ClassAccuracies, Part, PrivacySpent, Report, ReportField, is_delta

COVERED = "dp_sgd.covered"
"""Score of a generation: all committed rounds of this store were trained with DP-SGD."""


def begin_round(
    store: PrivateStore, method: Method, ctx: RoundContext, rows: int, scores: Mapping[str, float] | None
) -> PrivacySpent | None:
    """Count a round before its training.

    Args:
        store: keeps the record.
        method: of the federation.
        ctx: of the round.
        rows: number of training images.
        scores: of the generation that the round starts from; None for a device's first round.

    Returns:
        The privacy spent including this round; None without DP-SGD, or if earlier rounds were sent without it, because then no ε holds.

    Raises:
        PrivacyError: the method or its networks can't be trained with DP-SGD.
        RoundError: the budget is exhausted.
        StoreError: the record is missing or damaged.
    """
    settings = ctx.privacy.dp_sgd
    if settings is None:
        return None
    check_mechanisms(ctx.spec, method, ctx.privacy)
    kept = store.record(PRIVACY_FILE)
    if not kept and scores is not None and COVERED in scores:
        raise _unknown(store, "is missing")
    params = method.params_type.model_validate(ctx.spec.params)
    charge = [list(entry) for entry in after_round(Spent(), settings, method, params, rows).entries]
    about = {"round": ctx.round, "attempt": ctx.attempt, "charge": charge}
    spent = _spent(store, kept)
    if any(kept.get(name) != value for name, value in about.items()):
        spent = after_round(spent, settings, method, params, rows)
    _check_budget(spent, settings)
    is_covered = scores is None or COVERED in scores
    found = PrivacySpent(epsilon=spent.epsilon(settings.delta), delta=settings.delta, budget=settings.budget_epsilon)
    store.save_record(PRIVACY_FILE, {**about, "spent": spent.to_json(), "covered": is_covered, **found.model_dump()})
    return found if is_covered else None


def _spent(store: PrivateStore, kept: Mapping[str, object]) -> Spent:
    try:
        return Spent.from_json(str(kept["spent"])) if kept else Spent()
    except (PrivacyError, KeyError) as error:
        raise _unknown(store, "is damaged") from error


def _unknown(store: PrivateStore, what: str) -> StoreError:
    return StoreError(
        f"{store.root / PRIVACY_FILE} {what}: the privacy spent by this device is unknown. Restore the file from a "
        "backup of the last round, or enrol the device again with a new store and add up both"
    )


def _check_budget(spent: Spent, settings: DpSgdSettings) -> None:
    if spent.exceeds(settings):
        raise RoundError(
            DeclineReason.WITHHELD,
            f"the privacy budget is exhausted: another round would bring epsilon to {spent.epsilon(settings.delta):.3g} at delta "
            f"{settings.delta:g}, above budget_epsilon = {settings.budget_epsilon:g}. Nothing was trained. Increase "
            "budget_epsilon under [privacy.dp_sgd], or leave the federation with `fedcg agent leave`",
        )


BEST_SLOTS = ("best", "best_shadow")
SHADOWED = "shadow.round"
"""Name of the score with the last round in which the local-only model was trained."""
SUMMED = "statistics.images"
"""Name of the score with the number of images in the stored statistics of an exact method."""


class _Start(Value):
    """The start of a round: the stored state, or the initial weights."""

    personal: ClientState
    shadow: ClientState | None
    best: Mapping[str, Parts]
    scores: Mapping[str, float]


def load_spec(work: Workplace, digest: str) -> tuple[FederationSpec, Method]:
    """Load a stored spec with this device's backbone, and its method, after checking them against the networks of this program.

    Raises:
        RoundError: the spec is not stored, or its layouts differ from the tensors of this program's networks.
    """
    spec = work.store.spec(digest)
    if spec is None:
        raise RoundError(DeclineReason.SPEC_REFUSED, f"spec {digest} is not in the store")
    method = get_method(spec.method)
    sealed = frozenset(spec.sealed)
    is_sound = method.payload.sealed <= sealed <= method.payload.sealed | method.payload.sealable
    if not is_sound or frozenset(spec.upload) != on_wire(method.payload.up, sealed):
        raise RoundError(DeclineReason.SPEC_REFUSED, f"the spec's upload list is not that of method {spec.method}")
    if spec.alternates != method.payload.alternates:
        raise RoundError(DeclineReason.SPEC_REFUSED, f"method {spec.method} has different rounds than the spec")
    if frozenset(spec.with_base) != (method.payload.with_base - sealed if is_delta(spec.codec) else frozenset()):
        raise RoundError(DeclineReason.SPEC_REFUSED, f"method {spec.method} codes different parts as differences")
    if wire_layouts(spec, method, sealed) != dict(spec.layouts):
        raise RoundError(DeclineReason.SPEC_REFUSED, "the spec's tensor layouts are not those of its networks")
    by_params = method.params_type.model_validate(spec.params).needs_cohort
    if (method.needs.cohort or sealed or by_params) and work.store.cohort_secret() is None:
        way = "`fedcg cohort create` on the first device, `fedcg cohort join` on the others"
        raise RoundError(DeclineReason.SPEC_REFUSED, f"method {spec.method} needs the cohort secret: {way}")
    own = device_spec(spec, own_backbone(work.config, work.store, spec))
    return own if work.program is None else work.program.bound(own), method


def decode_aggregate(store: PrivateStore, spec: FederationSpec, method: Method, artifact: str) -> Artifact:
    """The downloaded aggregate, decoded with the spec's layouts and codec.

    Raises:
        WireError: it is damaged, or not an aggregate of this federation and method.
    """
    parts = {part: spec.layouts[part] for part in sorted(on_wire(method.payload.down, frozenset(spec.sealed)))}
    decoded = unpack(store.artifacts.get(artifact), parts, codecs=codecs_for(parts, spec.aggregate_codec))
    header = decoded.header
    if (header.kind, header.federation, header.method) != ("aggregate", spec.federation, spec.method):
        raise IntegrityError(f"artifact {artifact} is a {header.kind} of {header.federation}/{header.method}")
    return decoded


def as_aggregate(work: Workplace, spec: FederationSpec, decoded: Artifact, last: int, *, has_state: bool) -> Aggregate:
    """A decoded aggregate in the form that a method needs, with its sealed parts opened.

    Parts whose sum this device can't open are missing. So are parts whose last sum failed, if the device has its own from that round
    (`has_state`): it continues from them. `last` is the previous round. The coordinator's number for it is not used.
    """
    unknown = spec.network.starts_on_devices if last == 0 else frozenset()
    clear = {part: decoded.parts[part] for part in decoded.parts.keys() - {Part.SEALED} - unknown}
    found = opened_parts(work, spec, decoded, last, has_state=has_state) if spec.sealed else {}
    return Aggregate(to_weights({**clear, **found}), decoded.header.label_distribution)


def images_of_round(work: Workplace, command: WeighRound) -> tuple[int, int]:
    """Fix and count the training images of a round, which set the weight of its numbers in a sealed sum. Also returns this device's vote.

    Raises:
        RoundError, LearningError, DivergedError, WireError: as in `train_round`.
    """
    spec, method = load_spec(work, command.spec)
    attempt = command.round_attempt
    progress = ProgressEvents(work, attempt)
    progress("load", 0, 1)
    data = work.data.for_round(spec, attempt.round, progress)
    stored = work.store.generations.load()
    images = (0 if stored is None else _kept_images(work, spec, stored)) or len(data.train)
    if method.vote is None or stored is None:
        return images, 0
    base = decode_aggregate(work.store, spec, method, command.aggregate)
    seen, _ = work.seen(spec, data)
    ctx = replace(work.context(spec, attempt.round, attempt.attempt, progress), validation=seen.val)
    personal = ClientState(to_weights(stored.slots["personal"]), to_weights(stored.extras))
    aggregate = as_aggregate(work, spec, base, attempt.round - 1, has_state=True)
    return images, method.vote(personal, aggregate, seen.train, ctx)


def train_round(work: Workplace, command: TrainRound) -> Generation:
    """Train one round attempt and commit it.

    Raises:
        RoundError: it can't be trained here, or its update is withheld; only the record of spent privacy may have changed.
        FirewallError: the update may not leave this device; nothing was changed.
        CodecError: the spec's codec can't encode the update; nothing was changed.
        DivergedError: the training, or the defence's, diverged; nothing was changed.
        WireError: the aggregate can't be used.
        PrivacyError: this device's mechanisms don't work with this method.
        StoreError: the privacy spent by DP-SGD is unknown.
    """
    spec, method = load_spec(work, command.spec)
    stored = work.store.generations.load()
    if stored is not None and stored.generation.spec != spec.digest:
        raise RoundError(DeclineReason.SPEC_REFUSED, "the private state belongs to another spec")
    if stored is not None and command.round_attempt == stored.generation.round_attempt:
        return stored.generation  # already committed before a crash
    if spec.sealed and command.share < (least := work.config.policy.least_share):
        problem = (
            f"the coordinator asks for {command.share:g} of the local steps, but policy.least_share of this device is {least:g}: if "
            "numbers hardly change, the difference of two sums can reveal a single device"
        )
        raise RoundError(DeclineReason.NO_SUM, problem)
    started, attempt = work.clock(), command.round_attempt
    progress = ProgressEvents(work, attempt)
    progress("load", 0, 1)
    data = work.data.for_round(spec, attempt.round, progress)
    base = decode_aggregate(work.store, spec, method, command.aggregate)
    start = _start(work, spec, method, stored)
    seen, common = work.seen(spec, data)
    if spec.is_exact:
        start = _exact(work, spec, start, stored, data, attempt)
    at_pace = paced(spec, method, command.share, len(data.train))
    masks = _masks(work, spec, attempt)
    ctx = work.context(at_pace, attempt.round, attempt.attempt, progress)
    cohort = ctx.cohort if masks is None else replace(ctx.cohort, votes=masks.votes, changed=masks.changed)
    ctx = replace(ctx, validation=seen.val, cohort=cohort)
    spent = begin_round(work.store, method, ctx, len(data.train), None if stored is None else start.scores)
    ctx = replace(ctx, checkpoint=_checkpoint(work, command, data, spec, stored))
    aggregate = as_aggregate(work, spec, base, attempt.round - 1, has_state=stored is not None)
    if spec.sealed and method.vote is None:  # otherwise the cohort votes
        aggregate = believed(start.personal.parts, aggregate, ctx, work.events)
    result = protected_round(method, start.personal, seen.train, aggregate, ctx)
    check_finite(result.private.parts, "after the round")
    shadow = _train_shadow(work, start, seen, ctx, progress)
    done = _Outcome(data, seen, common, base, aggregate, result, shadow, start, ctx, started, spent, masks)
    kept = _commit(work, command, spec, done)
    work.store.checkpoint.delete()
    return kept


def _checkpoint(
    work: Workplace, command: TrainRound, data: RoundData, spec: FederationSpec, stored: StoredState | None
) -> RoundCheckpoint | None:
    """The checkpoints of a round, with the one left by a killed process if everything that determines the result is unchanged."""
    every_s, at = work.config.training.checkpoint_s, command.round_attempt
    if not every_s:
        return None
    depends_on = (
        *(at.round, at.attempt, command.aggregate, spec.digest, data.snapshot.digest, data.snapshot.defended),
        None if stored is None else sorted(stored.generation.checksums.items()),
        *(work.config.privacy, work.config.training.shadow_every),
        *(work.place, work.threads, command.share),
        *(str(torch.__version__), version("fedcg-edge")),
    )
    mark = hashlib.sha256(repr(depends_on).encode()).digest()
    kept, problem = work.store.checkpoint.load(mark)
    about: dict[str, str | int] = {"what": "checkpoint", **vars(at)}
    if problem:
        work.events.write("refused", **about, detail=f"{problem}; the round starts from the beginning")

    def save(tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            work.store.checkpoint.save(mark, to_arrays({"": tensors})[""])
        except OSError as error:  # the round continues without a checkpoint
            work.events.write("refused", **about, detail=f"it can't be written: {error}")

    return RoundCheckpoint(save, to_weights({"": kept})[""], every_s, work.clock)


class _Outcome(Value):
    data: RoundData
    seen: RoundData
    common: ImageSet | None
    base: Artifact
    aggregate: Aggregate
    result: LocalResult
    shadow: ClientState | None
    start: _Start
    ctx: RoundContext
    started: float
    spent: PrivacySpent | None
    masks: SumMasks | None


def _masks(work: Workplace, spec: FederationSpec, at: RoundAttempt) -> SumMasks | None:
    """This device's masks in an attempt's sum; None if it is in no sum."""
    if not spec.sealed_in(at.round) or work.store.sum_gate.obstacle(at.round):
        return None
    parts = tuple(part.value for part in spec.sealed_in(at.round))
    return masks_in(work.store, work.config.device, sum_round(spec, at), parts)


def _start(work: Workplace, spec: FederationSpec, method: Method, stored: StoredState | None) -> _Start:
    slots = {} if stored is None else {name: to_weights(parts) for name, parts in stored.slots.items()}
    has_shadow = work.config.training.shadow_every > 0
    shadow = ClientState(slots["shadow"]) if has_shadow and "shadow" in slots else None
    if stored is None or (has_shadow and shadow is None):  # the first round, or the first with a local-only model
        initial = initial_parts(spec, work.store.cohort_secret() or spec_root(spec.seed))
        shadow = get_method("local").init_client(shadow_spec(spec), initial) if has_shadow else None
    if stored is None:
        return _Start(method.init_client(spec, initial), shadow, {}, {})
    best: dict[str, Parts] = {name: slots[name] for name in BEST_SLOTS if name in slots}
    personal = ClientState(slots["personal"], to_weights(stored.extras))
    return _Start(personal, shadow, best, stored.generation.scores)


def _kept_images(work: Workplace, spec: FederationSpec, stored: StoredState) -> int:
    """The number of images in the statistics that this device sends again; 0 if it recomputes them in each round.

    If the other devices' numbers don't change, the difference of two sums reveals one device's change in images. So recomputing needs its
    owner's consent.
    """
    is_kept = spec.is_exact and work.config.device not in work.store.roster().alone
    return int(stored.generation.scores.get(SUMMED, 0)) if is_kept else 0


def _exact(
    work: Workplace, spec: FederationSpec, start: _Start, stored: StoredState | None, data: RoundData, at: RoundAttempt
) -> _Start:
    """The start of an exact method's round: with the stored statistics, or with zeros if they are to be recomputed."""
    if stored is None or not _kept_images(work, spec, stored):
        none = {name: torch.zeros_like(one) for name, one in start.personal.parts[Part.STATISTICS].items()}
        parts = {**start.personal.parts, Part.STATISTICS: none}
        scores = {**start.scores, SUMMED: float(len(data.train))}
        return replace(start, personal=replace(start.personal, parts=parts), scores=scores)
    if data.snapshot.digest != stored.generation.snapshot:
        detail = (
            "images added or removed since this device's first sum are not used, because the difference of two sums would reveal them. If its owner "
            "agrees to that: `fedcg cohort card --alone`, then the new roster on every device"
        )
        work.events.write("method_warning", **vars(at), detail=detail)
    return start


def _train_shadow(
    work: Workplace, start: _Start, data: RoundData, ctx: RoundContext, progress: ProgressEvents
) -> ClientState | None:
    """The local-only model after the round. Unchanged if it is not due, or if its training diverged, which does not fail the round."""
    trained_at = start.scores.get(SHADOWED)
    waits = trained_at and ctx.round - trained_at < work.config.training.shadow_every
    if start.shadow is None or waits or not ctx.spec.trains_in(ctx.round):
        return start.shadow
    of_shadow = None if ctx.checkpoint is None else ctx.checkpoint.named("shadow")
    callbacks = replace(ctx.callbacks, progress=progress.named("shadow"))
    beside = replace(ctx, spec=shadow_spec(ctx.spec), callbacks=callbacks, privacy=OFF, checkpoint=of_shadow)
    try:
        trained = get_method("local").local_round(start.shadow, data.train, None, beside).private
        check_finite(trained.parts, "after the round")
    except DivergedError as error:
        work.events.write("refused", what="shadow", round=ctx.round, attempt=ctx.attempt, detail=str(error))
        return start.shadow
    return trained


def _commit(work: Workplace, command: TrainRound, spec: FederationSpec, done: _Outcome) -> Generation:
    personal, attempt = done.result.private.parts, command.round_attempt
    done.ctx.callbacks.progress("evaluate", 0, 1)
    own = measure(spec, personal, done.seen, done.common, work.place)
    alone = shadow_spec(spec)
    shadow = None if done.shadow is None else measure(alone, done.shadow.parts, done.seen, done.common, work.place)
    figures = generator_figures(spec, personal, done.seen.train, done.ctx.streams)
    report = _report(work, spec, done, own, shadow)
    update = _update(work, spec, done, report, Base(command.aggregate, done.base.parts))
    slots: dict[str, Parts] = {**done.start.best, "personal": personal}
    dropped = {COVERED} if done.shadow is not None else {COVERED, SHADOWED}
    scores = {name: value for name, value in done.start.scores.items() if name not in dropped}
    scores |= {} if done.spent is None else {COVERED: 1.0}
    scores |= {} if done.shadow is done.start.shadow else {SHADOWED: float(attempt.round)}
    trained = {"best": (personal_parts(spec, personal), own)}
    if done.shadow is not None and shadow is not None:
        slots["shadow"] = done.shadow.parts
        trained["best_shadow"] = (personal_parts(alone, done.shadow.parts), shadow)
    for slot, (parts, measured) in trained.items():
        if measured.beats(Measured.from_scores(scores, slot) if slot in slots else None):
            slots[slot] = parts
            scores |= {**measured.as_scores(slot), f"{slot}.round": float(attempt.round)}
    new = NewGeneration(
        round_attempt=attempt,
        spec=spec.digest,
        slots={name: to_arrays(parts) for name, parts in slots.items()},
        extras=to_arrays(done.result.private.extras),
        snapshot=done.data.snapshot,
        scores=scores,
        update=update,
        backbone=spec.backbone if isinstance(spec, DeviceSpec) else "",
    )
    generation = work.store.generations.commit(new)
    work.events.write(
        "committed",
        **vars(attempt),
        pid=os.getpid(),
        **{f"{name}_images": count for name, count in done.data.snapshot.counts().items()},
        accuracy_personal=own.test,
        accuracy_common_personal=own.common,
        accuracy_val=own.val,
        accuracy_local=None if shadow is None else shadow.test,
        accuracy_common_local=None if shadow is None else shadow.common,
        best_round=int(scores["best.round"]),
        loss=report.loss,
        **figures,
        update_bytes=len(update),
        seconds=round(work.clock() - done.started, 3),
        **({} if command.share == 1.0 else {"share": command.share}),
    )
    return generation


def _update(work: Workplace, spec: FederationSpec, done: _Outcome, report: Report, base: Base) -> bytes:
    """The update to store for sending, after it has passed the firewall and, if configured, the audit."""
    facts = UpdateFacts(
        device=work.config.device,
        round=done.ctx.round,
        attempt=done.ctx.attempt,
        versions={
            "torch": str(torch.__version__),
            "fedcg-edge": version("fedcg-edge"),
            **({} if work.program is None else {"program": work.program.digest}),
        },
        determinism=_determinism(work, done.ctx),
    )
    shared = to_arrays(done.result.shared.parts)
    sealing = None if done.masks is None else Sealing(done.masks.share, done.masks.mask)
    if sealing is not None:
        at = RoundAttempt(done.ctx.round, done.ctx.attempt)
        told, before = (
            numbered(work, spec, at, shared, done.aggregate, done.base).model_dump(),
            work.store.record(NUMBERS_FILE),
        )
        if (
            all(before.get(name) == told[name] for name in ("round", "attempt"))
            and before.get("digest") != told["digest"]
        ):
            raise RoundError(DeclineReason.NO_SUM, "other numbers of this attempt may have been sent with these masks")
        work.store.save_record(NUMBERS_FILE, told)
    policy = Consent(work.store.root).policy_for(work.config.policy, spec)
    update = build_update(shared, report, spec=spec, policy=policy, facts=facts, base=base, sealing=sealing)
    if not work.config.audit.is_on:
        return update
    gains = _audit(work, spec, done, update, base)
    if ReportField.AUDIT not in policy.allow_report:
        return update
    # The same tensors in the same coding, with the audit's figures added to the header.
    report = report.model_copy(update={"audit": gains})
    return build_update(shared, report, spec=spec, policy=policy, facts=facts, base=base, sealing=sealing)


def _audit(
    work: Workplace, spec: FederationSpec, done: _Outcome, update: bytes, base: Base
) -> dict[AuditFigure, float]:
    """Audit an update and return the figures. A failed gate ends the round before anything is stored."""
    from edge_client.training.release_audit import Release, audit_release  # from the extra `audit`

    before, after, labels = done.start.personal.parts, done.result.private.parts, done.base.header.label_distribution
    release = Release(spec, update, base, labels, done.data, before, after, done.ctx.streams)
    started = work.clock()
    judged = audit_release(work.config, release, done.ctx.callbacks.progress)
    about = {"round": done.ctx.round, "attempt": done.ctx.attempt, "seconds": round(work.clock() - started, 1)}
    work.events.write(
        "audited", **about, passed=not judged.failed, detail="; ".join(judged.not_run), report=str(judged.page)
    )
    judged.check()
    return judged.gains


def _report(work: Workplace, spec: FederationSpec, done: _Outcome, own: Measured, shadow: Measured | None) -> Report:
    """Everything that the device could report on the round. The firewall removes fields that the owner does not allow."""
    allowed, alone, downloaded = work.config.policy.allow_report, shadow or Measured(), Measured()
    if ReportField.DOWNLOADED in allowed:
        before = done.start.personal.parts
        fitted = downloaded_parts(before, done.aggregate, done.data.train, done.ctx)
        if (parts := with_downloaded(spec, before, fitted)) is not None:
            downloaded = measure(spec, parts, done.seen, None, work.place)
    told = (lambda exact: exact) if spec.has_public_counts else _coarse(done.ctx)

    def of_classes(accuracies: Sequence[float | None] | None) -> tuple[float | None, ...] | None:
        return None if accuracies is None else tuple(map(told, accuracies))

    by_class = ClassAccuracies(
        accuracy=of_classes(own.by_class),
        shadow=of_classes(alone.by_class) if ReportField.SHADOW in allowed else None,
        downloaded=of_classes(downloaded.by_class),
    )
    found = {
        "accuracy": told(own.test),
        "health": read_telemetry(work.store.root).condition,
        "shadow": told(alone.test),
        "downloaded": told(downloaded.test),
        "per_class": by_class,
        "epsilon": done.spent,
        "cost": work.cost(),
    }
    return done.result.report.model_copy(update=found)


_GRAIN = 0.05


def _coarse(ctx: RoundContext) -> Callable[[float | None], float | None]:
    """Rounds accuracies to multiples of 0.05, randomly up or down so that means stay unbiased, to hide the number of images.

    Exact accuracies are fractions of the number of test images. A few rounds of them would reveal that number.
    """
    stream = ctx.streams.generator("report")

    def told(accuracy: float | None) -> float | None:
        draw = float(torch.rand((), generator=stream, dtype=torch.float64))
        return None if accuracy is None else round(min(1.0, math.floor(accuracy / _GRAIN + draw) * _GRAIN), 2)

    return told


def _determinism(work: Workplace, ctx: RoundContext) -> dict[str, str]:
    cpu = "".join(letter for letter in (platform.processor() or platform.machine()) if " " <= letter <= "~")[:120]
    batch = str(ctx.spec.params.get("batch_size", ""))
    later = {} if ctx.machine.most_rows is None else {"most_rows": str(ctx.machine.most_rows)}
    return {"device": work.place, "threads": str(work.threads), "cpu": cpu, "batch_size": batch, **later}
