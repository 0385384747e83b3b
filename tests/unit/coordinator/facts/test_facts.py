"""What every view shows: where a federation stands and its problems, what left devices, and the metrics."""

import json
import statistics
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scipy import stats
from sqlalchemy import update

from coordinator.facts.audits import device_audits
from coordinator.facts.devices import DeviceFilter, device_facts, in_order, one_device
from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.metrics import METRICS, metrics_text
from coordinator.facts.models import model_versions, worth
from coordinator.facts.overview import search, summaries
from coordinator.facts.problems import open_problems, remedies
from coordinator.facts.sent import sent
from coordinator.rounds.records import DeviceState, FederationStatus, ParticipantState, UpdateRecord
from coordinator.storage import schema
from fedcg.sentences import texts
from fedcg.wire.messages.schemas import DeclineReason, DeviceCondition, Outcome, RoundAttempt
from fedcg.wire.parts import ReportField
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.world import MakeWorld, RunningService
from tests.support.page.pages import add_crowd
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("status", "is_open", "stands"),
    [
        (FederationStatus.PAUSED, False, ("paused", "cleaning", "")),
        (FederationStatus.PAUSED, True, ("collecting", "it pauses after this round: cleaning", "")),
        (FederationStatus.CREATED, False, ("waiting", "", "its start: `fedcg federation start tiny`")),
    ],
)
def test_where_a_federation_stands_that_no_coordinator_runs(
    make_world: MakeWorld, status: FederationStatus, is_open: bool, stands: tuple[str, str, str]
) -> None:
    world = make_world(rounds=9, clients=())
    if is_open:
        add_crowd(world.store, "tiny", 4, 2, time.time())
    world.store.set_status("tiny", status, "cleaning" if status is FederationStatus.PAUSED else "")
    found = current_round(world.known(), "tiny")
    assert (found.phase, found.reason, found.waits_for) == stands
    assert (found.round_s, found.ends_at) == (480.0 if is_open else None, None)


def test_failed_attempts_stall_it_which_is_a_problem_that_a_resume_ends(make_world: MakeWorld) -> None:
    world = make_world(clients=("a",), max_attempts=1)
    world.store.open_attempt("tiny", RoundAttempt(1, 1), "0" * 64, frozenset({"a"}), 1.0, 2.0)
    world.store.fail_attempt("tiny", RoundAttempt(1, 1), "no update came", 3.0)
    found = current_round(world.known(), "tiny")
    assert (found.status, found.phase, found.ends_at) == ("running", "stalled", None)
    (problem,) = (each for each in open_problems(world.known()) if each.subject == "tiny")
    assert (problem.kind, problem.is_severe) == ("stalled", True)
    assert "`fedcg federation resume tiny`" in problem.remedy


@pytest.mark.parametrize(("min_cohort", "lower"), [(1, "min_clients=N"), (2, "min_clients=N min_cohort=N")])
def test_too_few_devices_have_a_remedy_of_a_lower_bound(make_world: MakeWorld, min_cohort: int, lower: str) -> None:
    made = Federations(make_world(clients=("a", "b"), min_clients=2))
    made.operations.change_policy("tiny", {"min_cohort": min_cohort})
    with made.running():
        made.devices["tiny"][0].start()
        services = made.coordinator.services
        wait_until(lambda: "tiny" in services and len(services["tiny"].state.online) == 1, "one of two is online")
        known = made.world.known(services["tiny"])
        (problem,) = (each for each in open_problems(known) if each.kind == "too few devices")
        assert f"`fedcg federation set tiny {lower}`" in problem.remedy


def test_a_problem_names_the_operations_that_may_end_it_with_suggested_values_and_the_same_command(
    make_world: MakeWorld,
) -> None:
    store = (world := make_world(clients=("a", "b", "c"), max_attempts=1)).store
    first = RoundAttempt(1, 1)
    store.open_attempt("tiny", first, "0" * 64, frozenset("abc"), 1.0, 2.0)
    store.answer("tiny", first, "a", ParticipantState.DECLINED, "no_time", answered_at=1.5)
    store.answer("tiny", first, "b", ParticipantState.DECLINED, "no_data", answered_at=1.5)
    store.end_update(UpdateRecord("tiny", 1, 1, "c", "1" * 64, 1, Outcome.REJECTED, "it holds NaN", None, 1.0, 2.0))
    store.fail_attempt("tiny", first, "no update came before the deadline", 3.0)
    commands = {kind: [one.command for one in each.repairs] for kind, each in world.problems().items()}
    more_time = "fedcg federation set tiny deadline_s=1200"
    assert commands == {
        "stalled": ["fedcg federation resume tiny", more_time],
        "device not available": [more_time],
        "no data": [],
        "update rejected": ["fedcg device disable c"],
    }
    resume, more = world.problems()["stalled"].repairs
    assert (resume.operation, resume.target, resume.arguments) == ("resume", "tiny", {})
    assert (more.operation, more.arguments, more.effect) == (
        "set",
        {"deadline_s": 1200.0},
        texts().operations["set"][1],
    )
    store.fail_attempt("tiny", first, "all declined", 1.0)  # before its deadline
    assert [one.operation for one in world.problems()["stalled"].repairs] == ["resume"]


def test_a_device_that_failed_twice_is_a_problem_that_readmitting_it_ends(make_world: MakeWorld) -> None:
    made = Federations(make_world(clients=("a", "b"), min_clients=2, max_attempts=9))
    store = made.world.store
    for attempt in (1, 2):
        at = RoundAttempt(1, attempt)
        store.open_attempt("tiny", at, "0" * 64, frozenset("ab"), 1.0, 2.0)
        store.answer("tiny", at, "a", ParticipantState.DECLINED, "diverged", answered_at=1.5)
        store.fail_attempt("tiny", at, "too few", 3.0)
    store.disable("b", 1.0, "moved")
    made.operations.change_policy("tiny", {"min_cohort": 1})
    with made.running():

        def known() -> Known:
            return made.world.known(made.coordinator.services.get("tiny"))

        wait_until(lambda: any(each.kind == "left out" for each in open_problems(known())), "a is left out")
        made.devices["tiny"][0].start()
        wait_until(lambda: len(known().state("tiny").online) == 1, "one of two is online")
        found = {each.kind: each for each in open_problems(known())}
        assert [one.command for one in found["left out"].repairs] == ["fedcg device readmit a"]
        assert [one.operation for one in found["attempt failed"].repairs] == ["resume"]
        few = found["too few devices"]
        assert [one.command for one in few.repairs] == [
            "fedcg device enable b",
            "fedcg federation set tiny min_clients=1",
        ]
        assert "missing: b" in few.what
        made.operations.change_policy("tiny", {"min_cohort": 2})
        few = next(each for each in open_problems(known()) if each.kind == "too few devices")
        assert [one.command for one in few.repairs] == ["fedcg device enable b"], "a lower min_cohort exposes devices"
        made.operations.readmit("a")
        assert "left out" not in {each.kind for each in open_problems(known())}
        assert [event["client"] for event in made.world.events("let_in")] == ["a"]


def test_a_rejected_update_and_a_declined_round_are_problems_with_remedies_of_their_own(make_world: MakeWorld) -> None:
    store = (world := make_world(clients=("a", "b"))).store
    store.open_attempt("tiny", RoundAttempt(1, 1), "0" * 64, frozenset({"a", "b"}), 1.0, 2.0)
    store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.ACCEPTED, "")
    store.answer("tiny", RoundAttempt(1, 1), "b", ParticipantState.DECLINED, "no_data")
    store.end_update(UpdateRecord("tiny", 1, 1, "a", "1" * 64, 1, Outcome.REJECTED, "it holds NaN", None, 1.0, 2.0))
    found = {each.device: each for each in open_problems(world.known()) if each.device}
    assert (found["a"].kind, found["a"].what) == ("update rejected", "update rejected in round 1 of tiny: it holds NaN")
    assert "`fedcg device revoke`" in found["a"].remedy
    assert (found["b"].kind, found["b"].what) == ("no data", "declined round 1 of tiny: no data")
    store.answer("tiny", RoundAttempt(1, 1), "b", ParticipantState.DECLINED, "paused")
    for paused in (True, None):
        condition = DeviceCondition(findings=(), paused=paused)
        store.presence.keep_condition("tiny", "b", 3.0 + (not paused), condition.model_dump_json())
        is_open = any(each.kind == "paused by its owner" for each in open_problems(world.known()))
        assert is_open is bool(paused)


def test_every_metric_has_its_labels_and_its_figure_is_that_of_the_database(make_world: MakeWorld) -> None:
    world = make_world(rounds=9, clients=())
    add_crowd(world.store, "tiny", 20, 2, time.time())
    text = metrics_text(world.known()).decode()
    with_service = {"fedcg_messages_refused"}  # counted by running services alone
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels}
        assert family.samples or family.name in with_service, family.name
    found["fedcg_messages_refused_total"] = {"federation", "reason"}
    assert found == {name: set(labels) for name, (_, labels) in METRICS.items()}
    assert 'state="collecting"' not in text, "the third round is open, and its attempt is counted when it is over"
    for line in (
        'fedcg_devices{standing="offline"} 20.0',
        'fedcg_problems_open{kind="no data"} 2.0',
        'fedcg_round{federation="tiny"} 3.0',
        'fedcg_round_seconds{federation="tiny"} 480.0',
        'fedcg_updates_total{federation="tiny",outcome="accepted"} 40.0',
        'fedcg_attempts_total{federation="tiny",state="closed"} 2.0',
        'fedcg_negative_transfer{federation="tiny"} 0.1',
    ):
        assert line in text, line


def test_neither_updates_to_the_open_round_nor_devices_that_are_gone_count_in_the_worth(make_world: MakeWorld) -> None:
    store = (world := make_world(rounds=9, clients=())).store
    add_crowd(store, "tiny", 20, 2, time.time())
    before = worth(world.known(), "tiny").mean, model_versions(world.known(), "tiny")[0].accuracy
    told = '{"accuracy": 0.1, "shadow": 0.1}'
    store.end_update(UpdateRecord("tiny", 3, 1, "line-0000", "1" * 64, 1, Outcome.ACCEPTED, "", told, 1.0, time.time()))
    after = worth(world.known(), "tiny").mean, model_versions(world.known(), "tiny")[0].accuracy
    assert after == before
    assert [number for number, *_ in after[0]] == [1, 2]
    losing = [each for each in worth(world.known(), "tiny").clients if (each.gain or 0) < 0]
    assert [each.client for each in losing] == ["line-0005", "line-0013"]
    for each, ended in zip(losing, (DeviceState.REVOKED, DeviceState.LEFT), strict=True):
        store.register.end_membership(each.client, ended, "", 1.0)
    found = worth(world.known(), "tiny")
    assert (found.compared, found.negative, found.rate, found.worst) == (18, 0, 0.0, None)
    assert not {each.client for each in losing} & {each.client for each in found.clients}
    assert 'fedcg_negative_transfer{federation="tiny"} 0.0' in metrics_text(world.known()).decode()


def test_a_clients_gain_has_the_interval_of_its_last_rounds_and_its_costs(make_world: MakeWorld) -> None:
    store = (world := make_world(rounds=20, clients=())).store
    add_crowd(store, "tiny", 8, 12, time.time())
    shadows, table = [0.9, 0.1, *(0.30 + 0.013 * (number % 4) for number in range(10))], schema.updates
    with store._engine.begin() as connection:
        for number, shadow in enumerate(shadows, 1):
            told = json.dumps({"accuracy": 0.5, "shadow": shadow, "cost": {"seconds": 2.0, "joules": None}})
            own = update(table).where(table.c.client == "line-0000", table.c.round == number)
            connection.execute(own.values(report=told, size=1000))
    found = {each.client: each for each in worth(world.known(), "tiny").clients}
    recent = [0.5 - shadow for shadow in shadows[2:]]
    low, high = stats.t.interval(0.95, 9, statistics.fmean(recent), stats.sem(recent))
    b = found["line-0000"]
    assert (b.mean, b.low, b.high) == pytest.approx((statistics.fmean(recent), low, high), abs=1e-4)
    assert (b.rounds, b.verdict, b.size, b.seconds, b.joules) == (10, "gains", 12_000, 24.0, None)
    loser, unspent = found["line-0005"], found["line-0001"]
    assert (loser.verdict, unspent.verdict, unspent.seconds) == ("loses", "gains", None)
    assert loser.high == pytest.approx(-0.03)


def test_a_withheld_update_is_listed_beside_those_with_figures(make_world: MakeWorld) -> None:
    store = (world := make_world(rounds=9, clients=())).store
    add_crowd(store, "tiny", 4, 3, time.time())
    assert device_audits(world.known(), "tiny") == []
    sent, answers = schema.updates.c, schema.participants.c
    told, reason = json.dumps({"audit": {"mia_auc": 0.02}}, separators=(",", ":")), DeclineReason.WITHHELD.value
    with store._engine.begin() as connection:
        connection.execute(
            update(schema.updates).where(sent.client == "line-0001", sent.round == 2).values(report=told)
        )
        for client in ("line-0001", "line-0002"):
            withheld = update(schema.participants).where(answers.client == client, answers.round == 3)
            connection.execute(withheld.values(state="declined", reason=reason))
    first, second = device_audits(world.known(), "tiny")
    assert [(each.round, each.outcome) for each in first.rounds] == [(2, "sent"), (3, "withheld")]
    assert first.last is not None
    assert (first.last.round, [gain for _, gain in first.last.gains]) == (2, [0.02])
    assert (second.device, [each.outcome for each in second.rounds], second.last) == ("line-0002", ["withheld"], None)


def test_rounds_after_one_that_is_late_count_from_now(make_world: MakeWorld) -> None:
    world, now = make_world(rounds=9, clients=()), time.time()
    add_crowd(world.store, "tiny", 4, 2, now)
    with RunningService(world) as running:
        known = replace(world.known(running.service), now=now + 86_400.0)
        assert current_round(known, "tiny").ends_at == known.now + 6 * 480.0  # rounds 4 to 9


def test_a_public_backbone_is_stated_with_what_is_private_beside_it(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    network = world.spec.network.model_copy(
        update={"split": "resnet18+project:16", "weights": "ab" * 32, "freeze": "all-but:layer4"}
    )
    facts = sent(world.known(spec=world.spec.model_copy(update={"network": network})), "tiny")
    assert facts.start == (
        "backbone public (sha256 abababababab, frozen before layer4), projection from the cohort secret, or the public spec seed on a "
        "device without one"
    )
    assert facts.open_start == []


def test_a_report_field_is_stated_with_who_decides_that_it_leaves(make_world: MakeWorld) -> None:
    world = make_world(rounds=1, clients=())
    counts = ReportField.LABEL_COUNTS
    spec = world.spec.model_copy(update={"report": (*world.spec.report, counts), "optional_report": (counts,)})
    when = {field: why for field, (_, why) in sent(world.known(spec=spec), "tiny").fields.items()}
    assert when["examples"] == "always: the method needs it. A device declines rounds if its owner does not allow it"
    assert when["label_counts"] == "if the owner allows it; the method then uses it"
    optional = {when[name] for name in ("accuracy", "health", "shadow", "telemetry")}
    assert optional == {"if the owner allows it"}
    assert sent(world.known(), "tiny").fields["label_counts"][1] == "never: the method does not use it"
    needed = spec.model_copy(update={"optional_report": ()})
    assert sent(world.known(spec=needed), "tiny").fields["label_counts"][1] == when["examples"]


@pytest.mark.parametrize("reason", DeclineReason)
def test_a_person_reads_what_to_do_about_a_reason(reason: DeclineReason) -> None:
    assert texts().declined[reason.value]
    assert all(remedies()[reason.value])


@pytest.fixture
def fleet(make_world: MakeWorld) -> Known:
    """Twelve devices with two closed rounds; three have an older agent, and one update names its machine."""
    world = make_world(rounds=9, clients=())
    add_crowd(world.store, "tiny", 12, 2, time.time())
    with world.store._engine.begin() as connection:
        agents = {"line-0001": "0.9.0", "line-0002": "0.10.0", "line-0003": "fake-99"}
        for device, agent in agents.items():
            connection.execute(update(schema.devices).where(schema.devices.c.id == device).values(agent=agent))
        facts = update(schema.updates).where(schema.updates.c.client == "line-0002").values(facts=MACHINE)
        connection.execute(facts)
    world.store.add_device("line-20", "0" * 64, 1.0)
    world.store.add_device("line-3", "0" * 64, 1.0)
    world.store.register.describe("line-20", ["north"], {"site": "hall 2"})
    world.store.register.describe("line-3", ["north", "pilot"], {"site": "hall 10", "note": "new camera"})
    return world.known()


MACHINE = '{"cpu": "ARM A78", "device": "cuda", "threads": "6"}'


def test_a_device_has_its_machine_and_images_and_is_behind_a_later_version_number_alone(fleet: Known) -> None:
    found = {each.id: each for each in device_facts(fleet)}
    assert [*list(found)[3:6], list(found)[-1]] == ["line-0003", "line-3", "line-0004", "line-20"], "by value"
    assert (found["line-0002"].hardware, found["line-0002"].images) == ("ARM A78 cuda", 102)
    assert (found["line-3"].hardware, found["line-3"].images, found["line-3"].federations) == (None, None, [])
    current = {name for name, each in found.items() if not each.is_behind}
    assert current == {"line-0002", "line-0003", "line-3", "line-20"}, "the others have 0.1.0 or 0.9.0"
    assert one_device(fleet, "line-0001").is_behind, "0.9 is before 0.10"
    in_sites = [each.id for each in in_order(list(found.values()), "site", descending=True)]
    assert in_sites[:2] == ["line-3", "line-20"], "hall 10 is after hall 2"


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (DeviceFilter(label="north"), ["line-3", "line-20"]),
        (DeviceFilter(label="nor"), []),
        (DeviceFilter(label="north", site="hall 2"), ["line-20"]),
        (DeviceFilter(version="0.10.0", federation="tiny"), ["line-0002"]),
        (DeviceFilter("New CAMERA "), ["line-3"]),
        (DeviceFilter("arm a78", state="offline"), ["line-0002"]),
        (DeviceFilter("arm a78", state="online"), []),
    ],
)
def test_a_filter_shows_the_devices_that_match_all_of_its_fields(
    fleet: Known, wanted: DeviceFilter, ids: list[str]
) -> None:
    assert [each.id for each in wanted.of(device_facts(fleet))] == ids


def test_a_summary_has_the_means_of_closed_rounds_and_the_problems_of_this_federation_alone(fleet: Known) -> None:
    (found,) = summaries(fleet)
    assert (found.now.federation, found.now.round, found.now.clients) == ("tiny", 3, [])
    assert found.accuracy == worth(fleet, "tiny").mean
    assert [number for number, *_ in found.accuracy] == [1, 2]
    of_devices = [each for each in open_problems(fleet) if each.subject.endswith(" in tiny")]
    assert found.problems == len(of_devices) == 1
    fleet.store.set_status("tiny", FederationStatus.ARCHIVED, "")
    assert (summaries(fleet), [each.now.status for each in summaries(fleet, archived=True)]) == ([], ["archived"])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("TIN", [("federation", "tiny")]),
        ("pilot", [("device", "line-3")]),
        ("line-0004", [("device", "line-0004"), ("exported model", "line-0004, version 0003")]),
        ("round 1", [("model", "tiny, round 1")]),
        ("version 1", []),
        ("no such", []),
    ],
)
def test_a_search_finds_federations_devices_rounds_and_exported_models(
    fleet: Known, text: str, names: list[tuple[str, str]]
) -> None:
    assert [(each.kind, each.name) for each in search(fleet, text)] == names


def test_a_model_is_found_by_the_start_of_its_sha256_and_what_is_found_is_bounded(fleet: Known) -> None:
    artifact = fleet.store.aggregates("tiny")[0].artifact
    assert [each.path for each in search(fleet, artifact[:8])] == [f"/f/tiny/models#v-{number}" for number in range(3)]
    assert search(fleet, artifact[:3]) == []
    fleet.store.add_device("x", "0" * 64, 1.0)
    for number in range(60):
        fleet.store.add_device(f"y-{number}", "0" * 64, 1.0)
    assert len(search(replace(fleet), "y-")) == 50
    assert len([each for each in search(fleet, "version 3") if each.kind == "exported model"]) == 12
