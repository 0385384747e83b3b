"""A device's sealed parts in a round: opening the received means, checking their quality, and describing its own numbers. Uses torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.store.sum_keeper import Numbered
from edge_client.training.workplace import Workplace
from fedcg.event_log import EventLog
from fedcg.learning.aggregation.sealed_means import range_of
from fedcg.learning.method import Aggregate, Parts, RoundContext
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.learning.training.evaluation import loss_to_choose_by
from fedcg.wire.artifacts.artifacts import Artifact
from fedcg.wire.artifacts.payload import Array, PartArrays
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import RoundAttempt, SealedSum
from fedcg.wire.parts import Part
from fedcg.wire.sealed_numbers import Numbers, bounded
from fedcg.wire.sums import SumRound, opened_means

_NOTHING, _SOMETHING = 0.98, 0.9
"""Fractions of the loss of guessing by label frequencies. Above the first, a model is useless; below the second, it is useful."""


def sum_round(spec: FederationSpec, at: RoundAttempt) -> SumRound:
    """The sum of a round attempt's sealed parts."""
    return SumRound(spec.federation, at.round, at.attempt)


def opened_parts(
    work: Workplace, spec: FederationSpec, decoded: Artifact, last: int, *, has_state: bool
) -> dict[Part, dict[str, Array]]:
    """The means in an aggregate's sealed sums. Older sums are only used if no training depends on their age."""
    header, found = decoded.header, dict[Part, dict[str, Array]]()
    sealed = cast("dict[str, Numbers]", decoded.parts[Part.SEALED])
    for parts in sorted({one.parts for one in header.sums}):
        groups = [one for one in header.sums if one.parts == parts]
        one, near = groups[0], (last, last - 1)
        due = max((number for number in near if spec.sealed_in(number) == parts), default=0)
        secrets = work.store.secrets_of_sum(one.round)
        if not secrets or (has_state and one.round < due and not spec.is_exact):
            continue
        try:
            found |= _opened_by(secrets, sealed, groups, spec)
        except WireError as error:
            about: dict[str, str | int] = {"what": "sum", "round": one.round, "attempt": one.attempt}
            work.events.write("refused", **about, detail=f"{error}. This device continues from its own")
    return found


def _opened_by(
    secrets: Sequence[bytes], sealed: Mapping[str, Numbers], groups: Sequence[SealedSum], spec: FederationSpec
) -> dict[Part, dict[str, Array]]:
    """The means in the sums of one exchange, with the first secret that opens them."""
    first, *others = secrets
    try:
        return opened_means(sealed, groups, spec.federation, first, spec.layouts, range_of(spec))
    except WireError:
        if not others:
            raise
    return _opened_by(others, sealed, groups, spec)


def believed(own: Parts, aggregate: Aggregate, ctx: RoundContext, events: EventLog) -> Aggregate:
    """The aggregate, without its sealed means if they are useless on this device's validation images but its own model is not.

    Sealed numbers can't be inspected, so a device of the cohort could make a mean useless. This check limits the damage to a lost round.
    """
    sealed, validation = aggregate.parts.keys() & frozenset(ctx.spec.sealed), ctx.validation
    mine = personal_parts(ctx.spec, own)
    if validation is None or not len(validation) or not sealed & mine.keys():
        return aggregate
    counts = torch.bincount(validation.labels.cpu().long(), minlength=len(ctx.spec.classes)).double()
    shares = counts[counts > 0] / counts.sum()
    guess = -float((shares * shares.log()).sum())

    def loss(parts: Parts) -> float:
        return loss_to_choose_by(ctx.spec, parts, validation, ctx.device)

    downloaded = {part: aggregate.parts.get(part, mine[part]) for part in mine}
    if loss(downloaded) < _NOTHING * guess or loss(mine) > _SOMETHING * guess:
        return aggregate
    why = "the sealed mean is useless on this device's validation images, so the device continues from its own parts"
    events.write("refused", what="sum", round=ctx.round, attempt=ctx.attempt, detail=why)
    return replace(aggregate, parts={part: one for part, one in aggregate.parts.items() if part not in sealed})


def numbered(
    work: Workplace, spec: FederationSpec, at: RoundAttempt, shared: PartArrays, aggregate: Aggregate, base: Artifact
) -> Numbered:
    """The description of this device's numbers that decides whether they may be in a sum similar to an earlier one."""

    def flat(parts: Mapping[Part, Mapping[str, Array]], part: Part) -> NDArray[np.float64]:
        tensors = bounded(spec.layouts[part], range_of(spec))
        scaled = [parts[part][one.name].reshape(-1) / max(abs(one.low or 0.0), abs(one.high or 0.0)) for one in tensors]
        return np.concatenate(scaled).astype(np.float64)

    sealed = spec.sealed_in(at.round)
    before: Mapping[Part, Mapping[str, Array]] = to_arrays(aggregate.parts)
    if not all(part in before for part in sealed):  # the last sum failed: use the mean before it
        before = opened_parts(work, spec, base, at.round - 1, has_state=False)
    if not all(part in before for part in sealed):  # before the first mean: use the common initial weights
        before = to_arrays(initial_parts(spec, work.store.cohort_secret() or b"", frozenset(sealed)))
    known = {part: before[part] for part in sealed}
    numbers, mean = (np.concatenate([flat(parts, part) for part in sealed]) for parts in (shared, known))
    seed = Streams(work.store.device_secret()).at(spec.federation).seed("sketch")
    names = tuple(part.value for part in sealed)
    return Numbered.of(sum_round(spec, at), names, numbers, mean, seed)
