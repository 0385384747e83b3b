"""What the DP-SGD of simulated clients has spent, and who has no budget left for a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedcg.learning.mechanisms.accountant import Spent, after_round
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party


def spent_after_round(
    party: Party, names: Sequence[str], spent: Mapping[str, Spent]
) -> tuple[Mapping[str, Spent], Mapping[str, str]]:
    """What every client has spent after a round, and why some of its participants must not train.

    A round counts in full for everybody who begins it, also where its training then fails.

    Args:
        party: who they are, and their mechanisms.
        names: participants of the round.
        spent: before it; clients without an entry have spent nothing.
    """
    settings = party.privacy.dp_sgd
    if settings is None:
        return spent, {}
    method = get_method(party.spec.method)
    params = method.params_type.model_validate(party.spec.params)
    after, refusals = dict(spent), {}
    for name in names:
        planned = after_round(spent.get(name, Spent()), settings, method, params, len(party.datasets[name].train))
        if planned.exceeds(settings):
            epsilon = planned.epsilon(settings.delta)
            refusals[name] = (
                f"the privacy budget is used up: a round more would bring epsilon to {epsilon:.2f}, "
                f"above dp_sgd.budget_epsilon = {settings.budget_epsilon:g}"
            )
        else:
            after[name] = planned
    return after, refusals
