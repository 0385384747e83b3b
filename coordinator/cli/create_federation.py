"""Opens a federation: completes the operator's plan to a spec and makes the initial aggregate. A process of its own, with torch.

`make_artifacts` (torch-free) starts the process; `python -m coordinator.cli.create_federation ARTIFACTS [PUBLIC MOST]` is the process: plan as JSON in, ids out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError, field_validator

from coordinator.errors import PlanError
from fedcg.config_file import listed, problems_of, read_toml
from fedcg.learning.registry import method_names
from fedcg.learning.spec import FederationPlan
from fedcg.wire.artifacts.artifact_store import ArtifactStore

BAD_PLAN = 3


@dataclass(frozen=True)
class InitialArtifacts:
    """Artifact ids of a new federation, and the size of its initial aggregate."""

    spec: str
    aggregate: str
    aggregate_bytes: int
    server_state: str


class _OperatorPlan(FederationPlan):
    @field_validator("method")
    @classmethod
    def _method_is_known(cls, name: str) -> str:
        if name not in method_names():
            raise ValueError(f"there is no method {name!r}; there are {', '.join(method_names())}")
        return name


def example_plan() -> str:
    """A plan with comments, to start from."""
    return files("coordinator.cli").joinpath("plan.toml.template").read_text(encoding="utf-8")


def read_plan(path: Path) -> FederationPlan:
    """Read an operator's plan.

    Raises:
        PlanError: not TOML, or values that are wrong; names every one.
    """
    return read_toml(path, _OperatorPlan, PlanError)


def make_artifacts(
    plan: FederationPlan, artifacts: Path, public_data: Path | None = None, public_images: int = 1
) -> InitialArtifacts:
    """Complete the plan and store spec, initial aggregate and initial server state.

    Args:
        plan: the operator's plan.
        artifacts: directory of the artifact store.
        public_data: unlabelled images; a method that needs some is refused without them.
        public_images: at most so many are read.

    Raises:
        PlanError: the method or the networks refuse the plan.
    """
    public = [] if public_data is None else [str(public_data), str(public_images)]
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.cli.create_federation", str(artifacts), *public],
        input=plan.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = done.stderr.strip()
        reason = errors if done.returncode == BAD_PLAN else errors.rpartition("\n")[2] or "no reason given"
        raise PlanError(f"the plan can't be completed: {reason}")
    return InitialArtifacts(**json.loads(done.stdout))


def _make(plan: FederationPlan, store: ArtifactStore, public_data: Path | None, most: int) -> InitialArtifacts:
    import torch

    from coordinator.aggregation.server_state import check_parts, encode_extras, pack_aggregate
    from fedcg.learning.data.public_images import read_public
    from fedcg.learning.networks.initial_weights import complete_spec, initial_parts
    from fedcg.learning.registry import get_method
    from fedcg.learning.seeds import spec_root

    torch.set_num_threads(1)
    spec = complete_spec(plan)
    method = get_method(spec.method)
    if method.needs_public:
        if public_data is None:
            raise PlanError(
                f"method {spec.method} distils on unlabelled public images: name a folder or an .npz file as "
                "aggregation.public_data in coordinator.toml"
            )
        read_public(public_data, spec.image, most)
    state = method.init_server(spec, initial_parts(spec, spec_root(spec.seed)))
    check_parts(state.aggregate.parts, spec, method)
    packed = pack_aggregate(spec, state.aggregate, round_number=0, attempt=0, base=None, device="cpu")
    return InitialArtifacts(
        spec=store.put(spec.canonical()),
        aggregate=store.put(packed),
        aggregate_bytes=len(packed),
        server_state=store.put(encode_extras(state)),
    )


def main() -> int:
    """The process: a plan on standard input, the ids on standard output."""
    from fedcg.learning.errors import LearningError

    artifacts, *public = sys.argv[1:]
    plan = FederationPlan.model_validate_json(sys.stdin.read())
    try:
        data, most = (Path(public[0]), int(public[1])) if public else (None, 0)
        made = _make(plan, ArtifactStore(Path(artifacts)), data, most)
    except ValidationError as error:
        from fedcg.learning.registry import get_method

        params = get_method(plan.method).params_type
        sys.stderr.write(listed("[params]", problems_of(params, error)))
        return BAD_PLAN
    except (ValueError, LearningError, PlanError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_PLAN
    sys.stdout.write(json.dumps(asdict(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
