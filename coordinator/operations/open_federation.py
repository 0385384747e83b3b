"""Opens a federation: registers what its plan was completed to."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from coordinator.errors import PlanError
from coordinator.operations.create_federation import Complete, make_artifacts
from coordinator.paths import Home
from coordinator.pki.signing_keys import links_for
from coordinator.rounds.records import AggregateRecord, FederationRecord, FederationStatus
from coordinator.storage.object_store import artifacts_of
from coordinator.storage.store import Store
from fedcg.errors import EXISTS
from fedcg.learning.spec import FederationPlan, RoundPolicy


def open_federation(
    home: Home,
    store: Store,
    plan: FederationPlan,
    *,
    start: bool = True,
    continued_from: str | None = None,
    complete: Complete | None = None,
    registering: AbstractContextManager[None] | None = None,
) -> FederationRecord:
    """Complete a plan to a spec, make the initial aggregate, and register both.

    The broker's lists are as before: `publish_access` is for whoever knows that one runs.

    Args:
        home: the coordinator's directory.
        store: its database.
        plan: the operator's plan.
        start: else it is only created, and `Steering.start` starts it.
        continued_from: a federation whose last aggregate has the initial weights.
        complete: the process that completes the plan, where one was started before.
        registering: `changing_members`, which is held for the registration alone; None where the caller holds it.

    Raises:
        PlanError: there is a federation of that name, or the method or the networks refuse the plan.
        StoreError: there is no federation `continued_from`.
    """
    _check_new(store, plan)
    config, first = home.config(), None
    if continued_from is not None:
        first = (store.federation(continued_from).spec, store.aggregates(continued_from)[-1].artifact)
        for artifact in first:
            artifacts_of(home).local(artifact)  # the process that makes the new artifacts reads the directory
    public = home.public_data(config)
    made = make_artifacts(plan, home.artifacts, public, config.aggregation.public_images, first, complete)
    artifacts = artifacts_of(home)
    for artifact in (made.spec, made.aggregate, made.server_state):
        artifacts.keep(artifact)
    now = time.time()
    record = FederationRecord(
        id=plan.federation,
        method=plan.method,
        spec=made.spec,
        policy=RoundPolicy(**plan.model_dump(include=set(RoundPolicy.model_fields))),
        created_at=now,
        status=FederationStatus.RUNNING if start else FederationStatus.CREATED,
        continued_from=continued_from,
    )
    initial = AggregateRecord(plan.federation, 0, 0, made.aggregate, made.aggregate_bytes, made.server_state, now)
    with registering or nullcontext():
        _check_new(store, plan)
        store.add_federation(record, initial, links_for(home, store, record.id), now)
    return record


def _check_new(store: Store, plan: FederationPlan) -> None:
    if plan.federation in [record.id for record in store.federations()]:
        raise PlanError(f"there is a federation {plan.federation!r} already; choose another name", exit_code=EXISTS)
