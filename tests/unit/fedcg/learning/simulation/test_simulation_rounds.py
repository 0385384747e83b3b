"""What a simulated round does with clients that fail or stay away, when it measures, and when it ends."""

from dataclasses import replace

import pytest
import torch

from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ClientState, LocalResult, Method
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.simulation import tasks as simulation_tasks
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import (
    NONE_MERGED,
    NONE_TRAINED,
    Failure,
    Schedule,
    Simulation,
    participants,
    simulate,
)
from fedcg.learning.simulation.tasks import LocalTask, RoundRecord, local_task
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import (
    NAMES,
    assert_same_simulation,
    bright_images,
    client_data,
    party_of,
    same_parts,
)


def with_data(one: Party, **datasets: ClientData) -> Party:
    return replace(one, datasets={**one.datasets, **datasets})


@pytest.mark.parametrize("method", [pytest.param("fedcg", marks=pytest.mark.slow), "fedavg"])
def test_a_client_that_cannot_train_keeps_its_state_and_the_others_go_on_as_if_it_were_not_there(method: str) -> None:
    lame = with_data(party_of(method), c=client_data("c", train=1))
    done = simulate(lame, Schedule(rounds=2))
    without = simulate(party_of(method, ("a", "b")), Schedule(rounds=2))
    assert same_parts(done.aggregate.parts, without.aggregate.parts)
    start = get_method(method).init_client(lame.spec, initial_parts(lame.spec, lame.roots.cohort))
    assert same_parts(done.states["c"].parts, start.parts)
    assert [failure.round for failure in done.failures["c"]] == [1, 2]
    assert "at least 2" in done.failures["c"][0].reason
    assert [record.loss for record in done.curves["c"]] == [None, None]
    assert done.server_failures == ()


def test_what_the_server_screens_out_is_not_merged_and_its_client_has_trained_all_the_same() -> None:
    one = party_of("fedavg", ("a", "b"))
    alone = simulate(party_of("fedavg", ("a",)), Schedule(rounds=1, shadow=False))
    plain = simulate(one, Schedule(rounds=1, shadow=False))
    first = Schedule(rounds=1, shadow=False, screen=lambda number, updates, base: {"a": updates["a"]})
    screened = simulate(one, first)
    assert same_parts(screened.aggregate.parts, alone.aggregate.parts)
    assert all(same_parts(screened.states[name].parts, plain.states[name].parts) for name in "ab")
    nobody = simulate(one, replace(first, screen=lambda number, updates, base: {}))
    assert [failure.reason for failure in nobody.server_failures] == [NONE_MERGED]


def test_what_owners_would_be_told_is_kept_by_client_and_round() -> None:
    wary = party_of("fedprobe", probes=4, align_steps=1, trust=1e-9)
    done = simulate(wary, Schedule(rounds=2, shadow=False))
    assert set(done.warnings) == set(NAMES)
    (warning,) = done.warnings["a"]
    assert warning.round == 2  # the first round has no mean to be believed yet
    assert "is not believed: it is" in warning.reason
    assert not simulate(party_of("fedprobe", probes=4, align_steps=1, trust=1e9), Schedule(rounds=2)).warnings


def test_a_round_in_which_everybody_diverges_changes_nothing_and_the_run_goes_on() -> None:
    wild = party_of("fedavg", optimiser="sgd", lr=1e18)
    done = simulate(wild, Schedule(rounds=2))
    first = get_method("fedavg").init_server(wild.spec, initial_parts(wild.spec, wild.roots.cohort))
    assert done.rounds == 2
    assert same_parts(done.aggregate.parts, first.aggregate.parts)
    assert done.server_failures == (Failure(1, NONE_TRAINED), Failure(2, NONE_TRAINED))
    assert set(done.failures) == set(done.shadow_failures) == set(NAMES)
    assert all(torch.isfinite(weights).all() for part in done.states["a"].parts.values() for weights in part.values())


def test_weights_that_are_no_numbers_after_the_last_step_count_as_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    method = get_method("local")

    def broken(*arguments: object) -> LocalResult:
        result = method.local_round(*arguments)  # type: ignore[arg-type]
        parts = {
            part: {name: tensor / 0.0 for name, tensor in some.items()} for part, some in result.private.parts.items()
        }
        return replace(result, private=ClientState(parts))

    def lookup(_name: str) -> Method:
        return replace(method, local_round=broken)

    one = party_of("local")
    start = method.init_client(one.spec, initial_parts(one.spec, b"cohort"))
    monkeypatch.setattr(simulation_tasks, "get_method", lookup)
    outcome = local_task(one, LocalTask("a", 1, start, None), method.init_server(one.spec, {}).aggregate)
    assert outcome.result is None
    assert outcome.failure is not None
    assert "not finite" in outcome.failure


def test_a_share_of_the_clients_takes_part_and_the_others_keep_their_state() -> None:
    one, half = party_of("fedavg"), Schedule(rounds=1, participation=0.5)
    chosen = [participants(one, half, number) for number in range(1, 9)]
    assert all(len(names) == 2 for names in chosen)  # half of three, rounded
    assert len(set(chosen)) > 1
    assert participants(one, Schedule(), 1) == NAMES
    assert participants(one, Schedule(participation=0.01), 1) != ()
    done = simulate(one, half)
    (absent,) = set(NAMES) - set(chosen[0])
    only = simulate(party_of("fedavg", chosen[0]), Schedule(rounds=1))
    assert same_parts(done.aggregate.parts, only.aggregate.parts)
    assert done.curves[absent][0].seconds is None
    start = initial_parts(one.spec, one.roots.cohort)
    assert same_parts(done.states[absent].parts, {part: start[part] for part in done.states[absent].parts})


def test_clients_are_measured_as_often_as_asked_for_and_always_at_the_end() -> None:
    done = simulate(party_of("fedavg"), Schedule(rounds=5, evaluate_every=2, shadow=False))
    assert [record.round for record in done.curves["a"]] == [2, 4, 5]
    assert [number for number, _ in done.global_accuracy] == [2, 4, 5]
    assert len(done.aggregate_seconds) == 5


def test_a_simulation_ends_when_no_clients_validation_improves() -> None:
    done = simulate(party_of("fedavg", lr=1e-12), Schedule(rounds=9, early_stop=2, shadow=False))
    assert done.ended_early
    assert done.rounds == 3  # best in round 1, and two rounds without anything better
    assert not simulate(party_of("fedavg"), Schedule(rounds=2, shadow=False)).ended_early


def test_the_method_local_has_no_shadow_for_it_is_its_own() -> None:
    assert simulate(party_of("local"), Schedule(rounds=1)).shadows == {}


@pytest.mark.parametrize("method", [pytest.param("fedcg", marks=pytest.mark.slow), "fedmd_cg"])
def test_going_on_from_any_round_ends_where_the_uninterrupted_simulation_ends(method: str) -> None:
    stages: list[Simulation] = []
    whole = simulate(party_of(method), Schedule(rounds=3), on_round=stages.append)
    resumed = simulate(party_of(method), Schedule(rounds=3), resume=stages[0])
    assert_same_simulation(resumed, whole)


def biased(one: Party, label: int) -> ClientState:
    """A client whose classifier answers one class whatever it sees."""
    start = get_method("fedavg").init_client(one.spec, initial_parts(one.spec, b"cohort"))
    classifier = {name: torch.zeros_like(tensor) for name, tensor in start.parts[Part.CLASSIFIER].items()}
    (bias,) = (name for name, tensor in classifier.items() if tensor.shape == (3,))
    classifier[bias][label] = 1.0
    return ClientState({**start.parts, Part.CLASSIFIER: classifier})


@pytest.mark.parametrize(("images", "expected"), [((6, 18), 2 / 3), ((18, 6), 1 / 3)])
def test_the_global_model_is_the_average_of_all_clients_by_number_of_images(
    images: tuple[int, int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # biases e_0 and e_1, averaged by 6 and 18 images: 0.25 and 0.75, so that class 1 is answered always; 2 of 3 images have it
    one = with_data(party_of("fedavg", ("a", "b")), a=client_data("a", images[0]), b=client_data("b", images[1]))
    common = bright_images(6, 5)
    one = replace(one, common=ImageSet(common.images[:3], torch.tensor([1, 0, 1]), common.classes))
    stuck = {"a": biased(one, 0), "b": biased(one, 1)}
    method = get_method("fedavg")

    def standing(state: ClientState, data: ImageSet, *rest: object) -> LocalResult:
        result = method.local_round(state, data, *rest)  # type: ignore[arg-type]
        return replace(result, private=stuck["a" if len(data) == images[0] else "b"])

    monkeypatch.setattr(simulation_tasks, "get_method", lambda _name: replace(method, local_round=standing))
    done = simulate(one, Schedule(rounds=1, shadow=False))
    ((number, accuracy),) = done.global_accuracy
    assert number == 1
    assert accuracy == pytest.approx(expected)


def record(number: int, validation: float | None, loss: float | None) -> RoundRecord:
    return RoundRecord(
        round=number, accuracy=0.5, validation=validation, validation_loss=loss, common=None, accuracy_after=None,
        local_accuracy=None, local_validation=validation, local_validation_loss=loss, local_common=None,
        consistency=None, spread=None,
    )  # fmt: skip


def test_the_best_round_has_the_best_validation_then_the_lowest_loss_then_comes_first() -> None:
    base = simulate(party_of("local"), Schedule(rounds=1))

    def best(*records: RoundRecord) -> int:
        return replace(base, curves={"a": records}).best("a").round

    assert best(record(1, 0.5, 0.1), record(2, 0.6, 0.9)) == 2
    assert best(record(1, 0.6, 0.9), record(2, 0.6, 0.2), record(3, 0.6, 0.2)) == 2
    assert best(record(1, None, None), record(2, None, None)) == 2  # without validation images the newest counts
