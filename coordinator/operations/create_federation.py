"""Opens a federation: completes the operator's plan to a spec and makes the initial aggregate. A process of its own, with torch.

`make_artifacts` (torch-free) starts the process; `python -m coordinator.operations.create_federation` is the process: a request as JSON in, ids out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError, field_validator

from coordinator.broker.access_lists import publish_access
from coordinator.errors import PlanError
from coordinator.paths import Home
from coordinator.pki.signing_keys import links_for
from coordinator.rounds.records import AggregateRecord, FederationRecord, FederationStatus
from coordinator.storage.object_store import artifacts_of
from coordinator.storage.store import Store
from fedcg.child_python import module_command
from fedcg.config_file import listed, problems_of, read_toml
from fedcg.learning.registry import method_names
from fedcg.learning.spec import FederationPlan, FederationSpec, RoundPolicy
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.parts import Part
from fedcg.wire.sums.protocol import MIN_DEVICES

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

BAD_PLAN = 3


@dataclass(frozen=True)
class InitialArtifacts:
    """Artifact ids of a new federation, and the size of its initial aggregate."""

    spec: str
    aggregate: str
    aggregate_bytes: int
    server_state: str


class OperatorPlan(FederationPlan):
    """A plan whose method exists."""

    @field_validator("method")
    @classmethod
    def _method_is_known(cls, name: str) -> str:
        if name not in method_names():
            raise ValueError(f"there is no method {name!r}; there are {', '.join(method_names())}")
        return name


def example_plan() -> str:
    """A plan with comments, to start from."""
    return files("coordinator.operations").joinpath("plan.toml.template").read_text(encoding="utf-8")


def read_plan(path: Path) -> FederationPlan:
    """Read an operator's plan.

    Raises:
        PlanError: not TOML, or values that are wrong; names every one.
    """
    return read_toml(path, OperatorPlan, PlanError)


class _Request(BaseModel):
    plan: FederationPlan
    artifacts: Path | None = None
    public_data: Path | None = None
    public_images: int = 1
    start: tuple[str, str] | None = None


def check_plan(plan: FederationPlan) -> None:
    """Complete a plan, which is then known to be good, and write nothing.

    Raises:
        PlanError: the method or the networks refuse the plan.
    """
    _completed(_Request(plan=plan))


def too_few_for_sums(spec: FederationSpec, min_clients: int) -> str:
    """Why rounds of so few clients can't be had with what a method sends behind masks; empty where they can."""
    if not spec.summed or min_clients >= MIN_DEVICES:
        return ""
    names = ", ".join(part.value for part in spec.summed)
    return (
        f"method {spec.method} sends {names} behind masks, and a sum of fewer than {MIN_DEVICES} devices shows too much of each: "
        f"set min_clients = {MIN_DEVICES} or more"
    )


def make_artifacts(
    plan: FederationPlan,
    artifacts: Path,
    public_data: Path | None = None,
    public_images: int = 1,
    start: tuple[str, str] | None = None,
) -> InitialArtifacts:
    """Complete the plan and store spec, initial aggregate and initial server state.

    Args:
        plan: the operator's plan.
        artifacts: directory of the artifact store.
        public_data: unlabelled images; a method that needs some is refused without them.
        public_images: at most so many are read.
        start: the artifact ids of another federation's spec and aggregate whose weights are the initial ones.

    Raises:
        PlanError: the method or the networks refuse the plan.
    """
    request = _Request(
        plan=plan, artifacts=artifacts, public_data=public_data, public_images=public_images, start=start
    )
    return InitialArtifacts(**json.loads(_completed(request)))


def _completed(request: _Request) -> str:
    code, told = in_a_process(request.model_dump_json())
    if code != 0:
        errors = told.strip()
        reason = errors if code == BAD_PLAN else errors.rpartition("\n")[2] or "no reason given"
        raise PlanError(f"the plan can't be completed: {reason}")
    return told


def in_a_process(request: str) -> tuple[int, str]:
    """`answer` of a process of its own, because torch comes with it."""
    command = module_command("coordinator.operations.create_federation")
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr if done.returncode else done.stdout


def _make(request: _Request) -> InitialArtifacts | None:
    """The artifacts; none where the plan is only checked."""
    import torch

    from coordinator.aggregation.server_state import check_parts, encode_extras, pack_aggregate
    from fedcg.learning.data.public_images import read_public
    from fedcg.learning.networks.initial_weights import complete_spec, initial_parts
    from fedcg.learning.registry import get_method
    from fedcg.learning.seeds import spec_root

    torch.set_num_threads(1)
    spec, public_data = complete_spec(request.plan), request.public_data
    method = get_method(spec.method)
    if problem := too_few_for_sums(spec, request.plan.min_clients):
        raise PlanError(problem)
    if request.artifacts is None:
        return None
    store = ArtifactStore(request.artifacts)
    if method.needs_public:
        if public_data is None:
            raise PlanError(
                f"method {spec.method} distils on unlabelled public images: name a folder or an .npz file as "
                "aggregation.public_data in coordinator.toml"
            )
        read_public(public_data, spec.image, request.public_images)
    # Without the private parts: a backbone's weights need not be on this machine.
    parts = initial_parts(spec, spec_root(spec.seed), method.shared_up | method.shared_down)
    if request.start is not None:
        parts |= _last_weights(spec, store, *request.start)
    state = method.init_server(spec, parts)
    check_parts(state.aggregate.parts, spec, method)
    packed = pack_aggregate(spec, state.aggregate, round_number=0, attempt=0, base=None, device="cpu")
    return InitialArtifacts(
        spec=store.put(spec.canonical()),
        aggregate=store.put(packed),
        aggregate_bytes=len(packed),
        server_state=store.put(encode_extras(state)),
    )


def _last_weights(spec: FederationSpec, store: ArtifactStore, other: str, aggregate: str) -> dict[Part, Weights]:
    """The weights in another federation's aggregate, where this federation's networks have the same tensors."""
    from coordinator.aggregation.server_state import unpack_aggregate
    from fedcg.learning.registry import get_method

    known = FederationSpec.parse(store.get(other))
    for part in known.upload:
        if spec.layouts.get(part) != known.layouts[part]:
            raise PlanError(
                f"the {part.value} of {known.federation} has other tensors than that of the plan; continue with the same "
                "classes, image form and networks"
            )
    return dict(unpack_aggregate(store.get(aggregate), known, get_method(known.method)).parts)


def open_federation(
    home: Home, store: Store, plan: FederationPlan, *, start: bool = True, continued_from: str | None = None
) -> FederationRecord:
    """Complete a plan to a spec, make the initial aggregate, and register both. Call it with `changing_members` held.

    Args:
        home: the coordinator's directory.
        store: its database.
        plan: the operator's plan.
        start: else it is only created, and `Steering.start` starts it.
        continued_from: a federation whose last aggregate has the initial weights.

    Raises:
        PlanError: there is a federation of that name, or the method or the networks refuse the plan.
        StoreError: there is no federation `continued_from`.
    """
    if plan.federation in [record.id for record in store.federations()]:
        raise PlanError(f"there is a federation {plan.federation!r} already; choose another name")
    config, first = home.config(), None
    if continued_from is not None:
        first = (store.federation(continued_from).spec, store.aggregates(continued_from)[-1].artifact)
        for artifact in first:
            artifacts_of(home).local(artifact)  # the process that makes the new artifacts reads the directory
    made = make_artifacts(plan, home.artifacts, home.public_data(config), config.aggregation.public_images, first)
    artifacts = artifacts_of(home)
    for artifact in (made.spec, made.aggregate, made.server_state):
        artifacts.keep(artifact)
    now = time.time()
    record = FederationRecord(
        id=plan.federation,
        method=plan.method,
        spec=made.spec,
        rounds=plan.rounds,
        min_clients=plan.min_clients,
        max_attempts=plan.max_attempts,
        deadline_s=plan.deadline_s,
        first_attempt=1,
        created_at=now,
        status=FederationStatus.RUNNING if start else FederationStatus.CREATED,
        policy=plan.model_dump_json(include=set(RoundPolicy.model_fields)),
        continued_from=continued_from,
    )
    initial = AggregateRecord(plan.federation, 0, 0, made.aggregate, made.aggregate_bytes, made.server_state, now)
    store.add_federation(record, initial, links_for(home, store, record.id), now)
    publish_access(home)
    return record


def answer(given: str) -> tuple[int, str]:
    """The ids that a plan gets, as JSON, with 0; or why there are none, with the exit code."""
    from fedcg.learning.errors import LearningError

    request = _Request.model_validate_json(given)
    try:
        made = _make(request)
    except ValidationError as error:
        from fedcg.learning.registry import get_method

        params = get_method(request.plan.method).params_type
        return BAD_PLAN, listed("[params]", problems_of(params, error))
    except (ValueError, LearningError, PlanError) as error:
        return BAD_PLAN, str(error)
    return 0, json.dumps(made and asdict(made))


def main() -> int:
    """The process: a plan on standard input, the ids on standard output, or the reason on standard error."""
    code, text = answer(sys.stdin.read())
    (sys.stderr if code else sys.stdout).write(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
