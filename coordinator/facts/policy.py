"""Facts about the policy of a federation: its changes, and a plan with the same policy and spec."""

import itertools
import json
import re

from coordinator.facts.known import Known
from coordinator.storage.event_store import EventFilter
from fedcg.learning.spec import FederationPlan
from fedcg.values import Value

LAST_CHANGES = 50


class PolicyChange(Value):
    """A change of a field of the policy.

    Attributes:
        at: unix time.
        by: name of the API token, empty if unknown.
    """

    at: float
    by: str
    field: str
    before: bool | int | float | str | None
    after: bool | int | float | str | None


def policy_changes(known: Known, federation: str) -> list[PolicyChange]:
    """The last changes of a federation's policy, newest first, as far back as the database has events.

    Raises:
        NotFoundError: there is no such federation.
    """
    wanted = EventFilter(event="policy_changed", federation=known.federation(federation).id)
    return [
        PolicyChange(each["t"], each["by"], field, json.loads(before), json.loads(after))
        for each in known.store.events.last(wanted, LAST_CHANGES)
        for field, before, after in zip(each["changed"], each["before"], each["after"], strict=True)
    ]


def plan_like(known: Known, federation: str) -> FederationPlan:
    """A plan for another federation like this one: its spec and present policy, under the next free name.

    Raises:
        NotFoundError: no federation has this id.
    """
    record, taken = known.federation(federation), {each.id for each in known.store.federations()}
    stem, spec = re.sub(r"-\d+$", "", federation)[:55], known.spec(record).model_dump(exclude_none=True)
    free = next(name for number in itertools.count(2) if (name := f"{stem}-{number}") not in taken)
    same = {name: spec[name] for name in FederationPlan.model_fields.keys() & spec.keys()}
    return FederationPlan.model_validate({**same, **record.policy.model_dump(), "federation": free})
