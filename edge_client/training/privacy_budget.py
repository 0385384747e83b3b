"""What a device's DP-SGD has spent in a federation, and whether one more round may begin. Uses torch, by Opacus.

A round is counted before its training begins, so the record is never behind what was published: an update is sent after its commit,
which comes after the training. A process that is killed in between has published nothing of the round, and the repetition of the
same round attempt draws the same noise and comes to the same update, so it is not counted again. Once counted, a round
stays counted: where it diverges, is withheld, or its update is lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_client.errors import RoundError, StoreError
from edge_client.store.private_store import PRIVACY_FILE, PrivateStore
from fedcg.learning.errors import PrivacyError
from fedcg.learning.mechanisms.accountant import Spent, after_round
from fedcg.learning.mechanisms.protected_round import check_mechanisms
from fedcg.learning.method import Method, RoundContext
from fedcg.learning.privacy import DpSgdSettings
from fedcg.wire.messages.messages import DeclineReason
from fedcg.wire.parts import PrivacySpent

COVERED = "dp_sgd.covered"
"""Score of a generation: every round of this store that was committed was trained with DP-SGD."""


def begin_round(
    store: PrivateStore, method: Method, ctx: RoundContext, rows: int, scores: Mapping[str, float] | None
) -> PrivacySpent | None:
    """Count a round that is about to be trained.

    Args:
        store: keeps the record.
        method: of the federation.
        ctx: of the round.
        rows: training images.
        scores: of the generation that the round starts from; None for a device's first round.

    Returns:
        What is spent with this round; None without DP-SGD, or where earlier rounds were sent without it: then no ε holds.

    Raises:
        PrivacyError: the method or its networks can't be trained with DP-SGD.
        RoundError: the budget is used up.
        StoreError: the record is missing or damaged.
    """
    settings = ctx.privacy.dp_sgd
    if settings is None:
        return None
    check_mechanisms(ctx.spec, method, ctx.privacy)
    kept = store.privacy()
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
    store.save_privacy({**about, "spent": spent.to_json(), "covered": is_covered, **found.model_dump()})
    return found if is_covered else None


def _spent(store: PrivateStore, kept: Mapping[str, object]) -> Spent:
    try:
        return Spent.from_json(str(kept["spent"])) if kept else Spent()
    except (PrivacyError, KeyError) as error:
        raise _unknown(store, "is damaged") from error


def _unknown(store: PrivateStore, what: str) -> StoreError:
    return StoreError(
        f"{store.root / PRIVACY_FILE} {what}: the privacy that this device has spent is unknown. Restore the file from a "
        "backup of the last round, or enrol the device anew with a new store and count both together"
    )


def _check_budget(spent: Spent, settings: DpSgdSettings) -> None:
    if spent.exceeds(settings):
        raise RoundError(
            DeclineReason.WITHHELD,
            f"the privacy budget is used up: one more round would bring epsilon to {spent.epsilon(settings.delta):.3g} at delta "
            f"{settings.delta:g}, above budget_epsilon = {settings.budget_epsilon:g}. Nothing was trained; its owner raises "
            "budget_epsilon under [privacy.dp_sgd], or takes the device out with `fedcg agent leave`",
        )
