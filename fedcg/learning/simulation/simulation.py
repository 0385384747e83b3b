"""Simulates many clients and the server round by round, with the same functions as agents and coordinator.

The order of execution never changes results: each client has its own streams, and aggregation runs in client-id order.
`tasks` defines the pieces of a round and their runners.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import torch

from fedcg.learning import method as fl
from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.aggregation.sealed_means import server_half
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import Spent, after_round
from fedcg.learning.mechanisms.protected_round import check_mechanisms, neutral_parts
from fedcg.learning.networks.plans import initial_parts, shadow_spec
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.tasks import (
    LocalOutcome,
    LocalTask,
    MeasureTask,
    MemorySpill,
    RoundRecord,
    Runner,
    SerialRunner,
    TeacherTask,
    local_task,
    measure_task,
    teacher_task,
    vote_task,
)
from fedcg.learning.training.evaluation import evaluate, is_preferred
from fedcg.learning.training.stage import averaged_parts
from fedcg.values import Value
from fedcg.wire.parts import Part, Report


class Schedule(Value):
    """How long a simulation runs, and what it does in addition to training.

    Attributes:
        rounds: None: the spec's number.
        shadow: also train a local-only model of every client; not for the method `local`, which is local-only itself.
        evaluate_every: clients are evaluated each time this many rounds are done, and after the last.
        participation: share of the clients that participate in a round, in (0, 1].
        kept_updates: rounds whose updates are kept in `Simulation.sent`.
    """

    rounds: int | None = None
    shadow: bool = True
    evaluate_every: int = 1
    participation: float = 1.0
    kept_updates: frozenset[int] = frozenset()


class Sent(Value):
    """A client's update before coding: the shared parts and all report fields."""

    shared: fl.SharedResult
    report: Report


class Failure(Value):
    """A client that failed or warned in a round, or a server that failed to merge, with the reason."""

    round: int
    reason: str


class Simulation(Value):
    """The state of a simulation after some rounds; at its end, the result.

    Attributes:
        rounds: number of finished rounds.
        server: the server's state; `states` and `shadows` are those of the clients and their local-only models.
        curves: one record per client and evaluated round.
        failures: rounds in which a client could not train; `shadow_failures`: its local-only model; `server_failures`:
            the server's student.
        warnings: warnings for the owners, by client.
        aggregate_seconds: of each round.
        global_accuracy: (round, accuracy) of the average of all clients' models, for evaluated rounds.
        update_bytes: of each round, the mean over its coded updates; 0 without updates. Empty without a coding.
        spent: the privacy spent by each client's DP-SGD; empty without DP-SGD.
        sent: by client, the updates of the last round, if the schedule keeps them. Checkpoints do not include them.
    """

    rounds: int
    server: fl.ServerState
    states: Mapping[str, fl.ClientState]
    shadows: Mapping[str, fl.ClientState]
    curves: Mapping[str, tuple[RoundRecord, ...]]
    failures: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    shadow_failures: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    warnings: Mapping[str, tuple[Failure, ...]] = field(default_factory=dict)
    server_failures: tuple[Failure, ...] = ()
    aggregate_seconds: tuple[float, ...] = ()
    global_accuracy: tuple[tuple[int, float], ...] = ()
    update_bytes: tuple[int, ...] = ()
    spent: Mapping[str, Spent] = field(default_factory=dict)
    sent: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def aggregate(self) -> fl.Aggregate:
        """The last aggregate."""
        return self.server.aggregate

    def best(self, client: str) -> RoundRecord:
        """A client's record at its best validation round: by accuracy, then loss, the first of equals."""
        return _best(self.curves[client], lambda record: (record.validation, record.validation_loss))

    def best_local(self, client: str) -> RoundRecord:
        """A client's record at the best validation round of its local-only model; only if there is one."""
        return _best(self.curves[client], lambda record: (record.local_validation, record.local_validation_loss))


def _best(
    curve: Sequence[RoundRecord], figures: Callable[[RoundRecord], tuple[float | None, float | None]]
) -> RoundRecord:
    best = curve[0]
    for record in curve[1:]:
        if is_preferred(*figures(record), *figures(best)):
            best = record
    return best


def spent_after_round(
    party: Party, names: Sequence[str], spent: Mapping[str, Spent]
) -> tuple[Mapping[str, Spent], Mapping[str, str]]:
    """The privacy spent by every client after a round, and why some participants must not train.

    A round counts in full for every client that begins it, even if its training fails.

    Args:
        party: the clients and their mechanisms.
        names: participants of the round.
        spent: before the round; 0 for clients without an entry.
    """
    settings = party.privacy.dp_sgd
    if settings is None:
        return spent, {}
    method = get_method(party.spec.method)
    params = method.params_type.model_validate(party.spec.params)
    after, refusals = dict(spent), {}
    for name in names:
        if name in party.undefended:
            continue
        planned = after_round(spent.get(name, Spent()), settings, method, params, len(party.datasets[name].train))
        if planned.exceeds(settings):
            epsilon = planned.epsilon(settings.delta)
            refusals[name] = (
                f"the privacy budget is used up: another round would bring epsilon to {epsilon:.2f}, "
                f"above dp_sgd.budget_epsilon = {settings.budget_epsilon:g}"
            )
        else:
            after[name] = planned
    return after, refusals


NONE_TRAINED = "no client of this round could train"


def simulate(
    party: Party,
    schedule: Schedule = Schedule(),
    *,
    runner: Runner | None = None,
    resume: Simulation | None = None,
    on_round: Callable[[Simulation], None] | None = None,
) -> Simulation:
    """Run a federation.

    Args:
        party: spec, data and secrets.
        schedule: how long it runs, and what it does in addition to training.
        runner: runs the tasks; None: this process. The caller closes it.
        resume: the state of an interrupted run of the same party and schedule; None: from the start.
        on_round: called after every round with the state of the simulation.

    Raises:
        PrivacyError: a mechanism that the method or its networks do not support.
    """
    now = resume
    for now in simulated_rounds(party, schedule, runner=runner, resume=resume):
        if on_round is not None:
            on_round(now)
    return beginning(party, schedule) if now is None else now


def simulated_rounds(
    party: Party, schedule: Schedule = Schedule(), *, runner: Runner | None = None, resume: Simulation | None = None
) -> Iterator[Simulation]:
    """The state after each remaining round; arguments as for `simulate`."""
    check_mechanisms(party.spec, get_method(party.spec.method), party.privacy)
    runner = runner or SerialRunner()
    runner.start(party)
    total = schedule.rounds or party.spec.rounds
    now = resume or beginning(party, schedule)
    while now.rounds < total:
        now = _after_round(party, schedule, runner, now, last=now.rounds + 1 == total)
        yield now


def participants(party: Party, schedule: Schedule, number: int) -> tuple[str, ...]:
    """The participants of a round, sorted: a share of the clients, at least one, drawn from the coordinator's stream."""
    names = sorted(party.datasets)
    count = max(1, round(schedule.participation * len(names)))
    if count >= len(names):
        return tuple(names)
    order = torch.randperm(len(names), generator=party.server_context(number).streams.generator("participants"))
    return tuple(sorted(names[int(index)] for index in order[:count]))


def update_of(client: str, result: fl.LocalResult) -> fl.Update:
    """The update that the server would decode from a local round.

    Raises:
        ValueError: the report lacks the number of examples.
    """
    if result.report.examples is None:
        raise ValueError(f"{client}: the report lacks the number of examples")
    return fl.Update(client, result.shared.parts, result.report.examples, result.report.label_counts)


def beginning(party: Party, schedule: Schedule) -> Simulation:
    """The state before the first round."""
    spec = party.spec
    method, alone = get_method(spec.method), get_method("local")
    initial = initial_parts(spec, party.roots.cohort)
    names = sorted(party.datasets)
    starts = {
        name: initial_parts(party.spec_of(name), party.roots.starts.get(name, party.roots.cohort))
        for name in party.roots.starts.keys() | party.own.keys()
    }
    shadowed = names if schedule.shadow and method.name != alone.name else []
    return Simulation(
        rounds=0,
        server=_decoded(party, method.init_server(spec, initial)),
        states={name: method.init_client(party.spec_of(name), starts.get(name, initial)) for name in names},
        shadows={
            name: alone.init_client(shadow_spec(party.spec_of(name)), starts.get(name, initial)) for name in shadowed
        },
        curves=dict.fromkeys(names, ()),
    )


def _after_round(party: Party, schedule: Schedule, runner: Runner, now: Simulation, *, last: bool) -> Simulation:
    number = now.rounds + 1
    invited = participants(party, schedule, number)
    spent, refusals = spent_after_round(party, invited, now.spent)
    tasks = [
        LocalTask(name, number, now.states[name], now.shadows.get(name)) for name in invited if name not in refusals
    ]
    if get_method(party.spec.method).vote is not None:
        votes = dict(runner.answers(vote_task, tasks, now.aggregate))
        tasks = [replace(task, votes=votes) for task in tasks]
    sent: dict[str, Sent] = {}
    keep = sent if number in schedule.kept_updates else None
    outcomes, sizes = _coded(party, runner.answers(local_task, tasks, now.aggregate), now.aggregate, keep)
    results = {name: outcomes[name].result for name in sorted(outcomes)}
    present = {name: result for name, result in results.items() if result is not None}
    started = time.perf_counter()
    server, server_failure = _aggregate(party, runner, number, now.server, present)
    seconds = time.perf_counter() - started
    shadows = {name: outcome.shadow for name, outcome in outcomes.items() if outcome.shadow is not None}
    mean_size = () if party.coding is None else (sum(sizes) // max(1, len(sizes)),)
    after = replace(
        now,
        rounds=number,
        server=server,
        states={**now.states, **{name: result.private for name, result in present.items()}},
        shadows={**now.shadows, **shadows},
        spent=spent,
        failures=_noted(
            now.failures, {**refusals, **{name: outcome.failure for name, outcome in outcomes.items()}}, number
        ),
        shadow_failures=_noted(
            now.shadow_failures, {name: outcome.shadow_failure for name, outcome in outcomes.items()}, number
        ),
        warnings=_noted(now.warnings, {name: outcome.warning for name, outcome in outcomes.items()}, number),
        server_failures=now.server_failures + (() if server_failure is None else (Failure(number, server_failure),)),
        aggregate_seconds=(*now.aggregate_seconds, seconds),
        update_bytes=(*now.update_bytes, *mean_size),
        sent=dict(sorted(sent.items())),
    )
    if last or number % schedule.evaluate_every == 0:
        after = _measured(party, runner, after, outcomes)
    return after


def _decoded(party: Party, server: fl.ServerState) -> fl.ServerState:
    """The server's state with the aggregate as decoded from the wire, from which both sides continue."""
    if party.coding is None:
        return server
    parts, _ = party.coding.aggregate(server.aggregate.parts)
    return replace(server, aggregate=replace(server.aggregate, parts=parts))


def _coded(
    party: Party, outcomes: Iterable[LocalOutcome], base: fl.Aggregate, sent: dict[str, Sent] | None
) -> tuple[dict[str, LocalOutcome], list[int]]:
    """Outcomes by client, with shared parts as decoded by the server, and the bytes of each update.

    A client whose update can't be coded has failed its round. `sent` receives the other clients' updates.
    """
    coded, sizes = {}, []
    for outcome in outcomes:
        client, result = outcome.client, outcome.result
        if party.coding is not None and result is not None:
            try:
                parts, size = party.coding.update(client, result.shared.parts, base.parts)
                sizes.append(size)
                outcome = replace(outcome, result=replace(result, shared=fl.SharedResult(parts)))
            except fl.DivergedError as error:
                outcome = replace(outcome, result=None, failure=str(error))
        if sent is not None and result is not None and outcome.result is not None:
            sent[client] = Sent(result.shared, result.report)
        coded[client] = outcome
    return coded, sizes


def _noted(
    failures: Mapping[str, tuple[Failure, ...]], reasons: Mapping[str, str | None], number: int
) -> Mapping[str, tuple[Failure, ...]]:
    new = {name: Failure(number, reason) for name, reason in sorted(reasons.items()) if reason is not None}
    return {**failures, **{name: (*failures.get(name, ()), failure) for name, failure in new.items()}}


def _aggregate(
    party: Party, runner: Runner, number: int, server: fl.ServerState, results: Mapping[str, fl.LocalResult]
) -> tuple[fl.ServerState, str | None]:
    """The server's state after a round, and the reason if it did not change."""
    if not results:
        return server, NONE_TRAINED
    updates = {name: update_of(name, result) for name, result in results.items()}
    spill = MemorySpill()
    try:
        tasks = [TeacherTask(number, update) for update in updates.values()]
        for client, rows in runner.answers(teacher_task, tasks, server):
            spill.put(client, rows)
        merge = server_half(get_method(party.spec.method), server, party.server_context(number), spill)
        return _decoded(party, merge.finish({name: partial(updates.__getitem__, name) for name in updates})[1]), None
    except fl.DivergedError as error:
        return server, str(error)


def _measured(party: Party, runner: Runner, now: Simulation, outcomes: Mapping[str, LocalOutcome]) -> Simulation:
    tasks = [
        MeasureTask(
            name,
            now.rounds,
            state.parts,
            now.shadows[name].parts if name in now.shadows else None,
            averaged_parts(state.extras),
        )
        for name, state in now.states.items()
    ]
    found = dict(runner.answers(measure_task, tasks, now.aggregate))
    curves = dict(now.curves)
    for name, record in found.items():
        outcome = outcomes.get(name)
        if outcome is not None and outcome.result is not None:
            record = replace(record, loss=outcome.result.report.loss, seconds=outcome.seconds)
        curves[name] = (*curves[name], record)
    if party.own:  # different backbones have no average
        return replace(now, curves=curves)
    average = now.rounds, _global_accuracy(party, now.states, now.rounds)
    return replace(now, curves=curves, global_accuracy=(*now.global_accuracy, average))


def _global_accuracy(party: Party, states: Mapping[str, fl.ClientState], number: int) -> float:
    """FedMD-CG's global test accuracy: of the average of the clients' whole models including extractors, weighted by number of images.

    Measured on the common test set. Without one, or if clients have their own input layers, on all clients' test images
    together.
    """
    names = sorted(states)
    weights = {name: float(len(party.datasets[name].train)) for name in names}
    models = {
        name: neutral_parts(states[name].parts, party.datasets[name].train, party.client_context(name, number))
        for name in names
    }
    average: dict[Part, fl.Weights] = {
        part: weighted_average((weights[name], models[name][part]) for name in names if weights[name] > 0)
        for part in sorted(get_method(party.spec.method).personal.parts)
    }
    is_alike = all(party.datasets[name].input_layer is None for name in names)
    images = party.common if is_alike and party.common is not None and len(party.common) else _together(party, names)
    return evaluate(party.spec, average, images, party.device).accuracy


def _together(party: Party, names: Sequence[str]) -> ImageSet:
    tests = [party.datasets[name].test for name in names]
    return ImageSet(
        torch.cat([test.images for test in tests]), torch.cat([test.labels for test in tests]), tests[0].classes
    )
