"""A federation in one process: clients that fail or stay away, its measures, mechanisms of clients, and the commands that list methods."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from opacus.accountants import RDPAccountant

from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, ClientState, LocalResult, RoundContext
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.simulation import simulation
from fedcg.learning.simulation import tasks as simulation_tasks
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import Failure, Schedule, participants, simulate
from fedcg.learning.simulation.tasks import RoundRecord
from fedcg.learning.training.evaluation import consistency, evaluate, generator_spread
from fedcg.wire.parts import Part
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.learning import learning_cases as cases


def with_data(one: Party, **datasets: ClientData) -> Party:
    return replace(one, datasets={**one.datasets, **datasets})


@pytest.mark.parametrize("method", [pytest.param("fedcg", marks=pytest.mark.slow), "fedavg"])
def test_a_client_that_cannot_train_keeps_its_state_and_the_others_go_on_as_if_it_were_not_there(method: str) -> None:
    lame = with_data(cases.party_of(method), c=cases.client_data("c", train=1))
    done = simulate(lame, Schedule(rounds=2))
    without = simulate(cases.party_of(method, ("a", "b")), Schedule(rounds=2))
    assert cases.same_parts(done.aggregate.parts, without.aggregate.parts)
    start = get_method(method).init_client(lame.spec, initial_parts(lame.spec, lame.roots.cohort))
    assert cases.same_parts(done.states["c"].parts, start.parts)
    assert [failure.round for failure in done.failures["c"]] == [1, 2]
    assert "at least 2" in done.failures["c"][0].reason
    assert [record.loss for record in done.curves["c"]] == [None, None]
    assert done.server_failures == ()


def test_what_owners_would_be_told_is_kept_by_client_and_round(monkeypatch: pytest.MonkeyPatch) -> None:
    method = get_method("fedavg")

    def wary(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
        if ctx.round == 2:
            ctx.callbacks.warn("the aggregate looks odd")
        return method.local_round(state, data, aggregate, ctx)

    monkeypatch.setattr(simulation_tasks, "get_method", lambda _: replace(method, local_round=wary))
    done = simulate(cases.party_of("fedavg"), Schedule(rounds=2, shadow=False))
    assert done.warnings == dict.fromkeys(cases.NAMES, (Failure(2, "the aggregate looks odd"),))


def test_a_round_in_which_everybody_diverges_changes_nothing_and_the_run_goes_on() -> None:
    wild = cases.party_of("fedavg", optimiser="sgd", lr=1e18)
    done = simulate(wild, Schedule(rounds=2))
    first = get_method("fedavg").init_server(wild.spec, initial_parts(wild.spec, wild.roots.cohort))
    assert done.rounds == 2
    assert cases.same_parts(done.aggregate.parts, first.aggregate.parts)
    assert done.server_failures == (Failure(1, simulation.NONE_TRAINED), Failure(2, simulation.NONE_TRAINED))
    assert set(done.failures) == set(done.shadow_failures) == set(cases.NAMES)
    assert all(torch.isfinite(weights).all() for part in done.states["a"].parts.values() for weights in part.values())


def test_weights_that_are_no_numbers_after_the_last_step_count_as_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    method = get_method("local")

    def broken(*given: object) -> LocalResult:
        result = method.local_round(*given)  # type: ignore[arg-type]
        for weights in result.private.parts.values():
            next(iter(weights.values())).fill_(torch.nan)
        return result

    monkeypatch.setattr(simulation_tasks, "get_method", lambda _name: replace(method, local_round=broken))
    assert "not finite" in simulate(cases.party_of("local", ("a",)), Schedule(rounds=1)).failures["a"][0].reason


def test_a_share_of_the_clients_takes_part_and_the_others_keep_their_state() -> None:
    one, half = cases.party_of("fedavg"), Schedule(rounds=1, participation=0.5)
    chosen = [participants(one, half, number) for number in range(1, 9)]
    assert all(len(names) == 2 for names in chosen)  # half of three, rounded
    assert len(set(chosen)) > 1
    assert participants(one, Schedule(), 1) == cases.NAMES
    assert participants(one, Schedule(participation=0.01), 1) != ()
    done = simulate(one, half)
    (absent,) = set(cases.NAMES) - set(chosen[0])
    only = simulate(cases.party_of("fedavg", chosen[0]), Schedule(rounds=1))
    assert cases.same_parts(done.aggregate.parts, only.aggregate.parts)
    assert done.curves[absent][0].seconds is None
    start = initial_parts(one.spec, one.roots.cohort)
    assert cases.same_parts(done.states[absent].parts, {part: start[part] for part in done.states[absent].parts})


def test_clients_are_measured_as_often_as_asked_for_and_always_at_the_end() -> None:
    done = simulate(cases.party_of("fedavg"), Schedule(rounds=5, evaluate_every=2, shadow=False))
    assert [record.round for record in done.curves["a"]] == [2, 4, 5]
    assert [number for number, _ in done.global_accuracy] == [2, 4, 5]
    assert len(done.aggregate_seconds) == 5


def test_the_method_local_has_no_shadow_for_it_is_its_own() -> None:
    assert simulate(cases.party_of("local"), Schedule(rounds=1)).shadows == {}


@pytest.mark.parametrize("make", [lambda: private_party("fedcg"), lambda: cases.party_of("fedmd_cg")])
def test_going_on_from_any_round_ends_where_the_uninterrupted_simulation_ends(make: Callable[[], Party]) -> None:
    stages: list[simulation.Simulation] = []
    whole = simulate(make(), Schedule(rounds=3), on_round=stages.append)
    resumed = simulate(make(), Schedule(rounds=3), resume=stages[0])
    cases.assert_same_simulation(resumed, whole)
    assert resumed.spent == whole.spent


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
    one = with_data(
        cases.party_of("fedavg", ("a", "b")), a=cases.client_data("a", images[0]), b=cases.client_data("b", images[1])
    )
    common = cases.bright_images(6, 5)
    one = replace(one, common=ImageSet(common.images[:3], torch.tensor([1, 0, 1]), common.classes))
    stuck = {"a": biased(one, 0), "b": biased(one, 1)}
    method = get_method("fedavg")

    def standing(state: ClientState, data: ImageSet, *rest: object) -> LocalResult:
        result = method.local_round(state, data, *rest)  # type: ignore[arg-type]
        return replace(result, private=stuck["a" if len(data) == images[0] else "b"])

    monkeypatch.setattr(simulation_tasks, "get_method", lambda _name: replace(method, local_round=standing))
    ((number, accuracy),) = simulate(one, Schedule(rounds=1, shadow=False)).global_accuracy
    assert number == 1
    assert accuracy == pytest.approx(expected)


def record(number: int, validation: float | None, loss: float | None) -> RoundRecord:
    return RoundRecord(
        round=number, accuracy=0.5, validation=validation, validation_loss=loss, common=None, accuracy_after=None,
        local_accuracy=None, local_validation=validation, local_validation_loss=loss, local_common=None,
        consistency=None, spread=None,
    )  # fmt: skip


def test_the_best_round_has_the_best_validation_then_the_lowest_loss_then_comes_first() -> None:
    base = simulate(cases.party_of("local"), Schedule(rounds=1))

    def best(*records: RoundRecord) -> int:
        return replace(base, curves={"a": records}).best("a").round

    assert best(record(1, 0.5, 0.1), record(2, 0.6, 0.9)) == 2
    assert best(record(1, 0.6, 0.9), record(2, 0.6, 0.2), record(3, 0.6, 0.2)) == 2
    assert best(record(1, None, None), record(2, None, None)) == 2  # without validation images the newest counts


def run(name: str, order: tuple[str, ...] = cases.NAMES, *, shadow: bool = True) -> simulation.Simulation:
    return simulate(cases.party_of(name, order), Schedule(rounds=2, shadow=shadow))


def sealing(one: Party, *sealed: Part) -> Party:
    """The same federation with sealed parts, from the same start."""
    plan = cases.usual_plan(one.spec.method).model_copy(update={"params": one.spec.params, "sealed": sealed})
    return replace(one, spec=complete_spec(plan))


def test_a_federation_with_everything_sealed_has_the_mean_of_one_with_nothing_sealed() -> None:
    public = cases.party_of("fedavg", optimiser="sgd", lr=0.05)  # Adam's steps multiply last digits
    plain = replace(public, roots=replace(public.roots, cohort=spec_root(public.spec.seed)))
    wanted = simulate(plain, Schedule(rounds=2, shadow=False)).aggregate.parts
    for sealed in ((Part.EXTRACTOR,), (Part.EXTRACTOR, Part.CLASSIFIER)):
        found = simulate(sealing(plain, *sealed), Schedule(rounds=2, shadow=False)).aggregate.parts
        assert found.keys() == wanted.keys()
        for part, weights in wanted.items():
            assert max(float((found[part][name] - one).abs().max()) for name, one in weights.items()) < 1e-5
        assert not cases.same_parts(found, wanted), "it went through whole numbers"


def test_nine_tenths_of_the_images_count_for_two_fifths_of_a_sealed_mean_and_nine_tenths_in_the_clear() -> None:
    one = cases.party_of("fedavg")
    one = with_data(one, a=cases.client_data("a", train=18), b=cases.client_data("b", train=324))
    one = sealing(with_data(one, c=cases.client_data("c", train=18)), Part.EXTRACTOR)
    done = simulate(one, Schedule(rounds=1, shadow=False))
    for part, shares in ((Part.EXTRACTOR, (0.3, 0.4, 0.3)), (Part.CLASSIFIER, (0.05, 0.9, 0.05))):
        for name, mean in done.aggregate.parts[part].items():
            own = [share * done.states[client].parts[part][name] for client, share in zip("abc", shares, strict=True)]
            assert torch.allclose(mean, torch.stack(own).sum(0), atol=1e-5)


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg", "local"])
def test_the_order_of_clients_never_changes_a_federation(name: str) -> None:
    first, second = run(name), run(name, cases.NAMES[::-1], shadow=False)
    for client in cases.NAMES:
        assert cases.same_parts(first.states[client].parts, second.states[client].parts)
        assert [r.accuracy for r in first.curves[client]] == [r.accuracy for r in second.curves[client]]
    assert cases.same_parts(first.aggregate.parts, second.aggregate.parts)


def test_the_shadow_of_any_method_is_the_local_federation_of_the_same_seed() -> None:
    shadowed, alone = run("fedcg"), run("local", shadow=False)
    for client in cases.NAMES:
        assert [r.local_accuracy for r in shadowed.curves[client]] == [r.accuracy for r in alone.curves[client]]
        assert [r.local_validation for r in shadowed.curves[client]] == [r.validation for r in alone.curves[client]]


def test_a_trained_model_distinguishes_bright_from_dark_and_its_generator_makes_what_it_is_asked_for() -> None:
    spec = cases.quick_spec("fedmd_cg", epochs=20, lr=3e-3, generator_lr=3e-3)
    ctx = cases.context(spec, 1)
    parts = dict(cases.local_round_of(spec, cases.bright_images(48, 1), ctx=ctx).private.parts)
    outcome = evaluate(ctx.spec, parts, cases.bright_images(30, 2))
    assert outcome.accuracy > 0.9
    assert sum(outcome.correct_per_class) == round(outcome.accuracy * 30)
    assert outcome.images_per_class == (10, 10, 10)
    assert consistency(ctx.spec, parts[Part.CLASSIFIER], parts[Part.GENERATOR], ctx.streams, 100) > 0.9


def test_accuracy_and_loss_are_means_over_images() -> None:
    spec = cases.quick_spec("local")
    parts = initial_parts(spec, b"cohort")
    silent = {name: torch.zeros_like(tensor) for name, tensor in parts[Part.CLASSIFIER].items()}
    outcome = evaluate(spec, {**parts, Part.CLASSIFIER: silent}, cases.bright_images(9, 0))
    # all logits are 0: class 0 is answered always, 3 of 9 are right, the loss is ln 3
    assert outcome.accuracy == pytest.approx(1 / 3)
    assert outcome.loss == pytest.approx(1.098612, abs=1e-5)
    assert outcome.correct_per_class == (3, 0, 0)
    with pytest.raises(DataError, match="no images"):
        evaluate(spec, parts, cases.bright_images(0, 0))


def test_a_generators_spread_is_one_where_it_varies_as_the_extractor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcg.learning.training import evaluation

    spec = cases.quick_spec("fedcg")
    parts = initial_parts(spec, b"cohort")
    stream = torch.Generator().manual_seed(0)
    monkeypatch.setattr(evaluation, "extract_features", lambda *_: torch.randn(900, 4, generator=stream))
    monkeypatch.setattr(
        evaluation, "generate", lambda _, noise, labels: 0.5 * torch.randn(len(labels), 4, generator=stream)
    )
    data = ImageSet(torch.zeros(900, 1, 16, 16, dtype=torch.uint8), torch.arange(900) % 3, spec.classes)
    spread = generator_spread(spec, parts[Part.EXTRACTOR], parts[Part.GENERATOR], data, Streams(b"m"))
    assert spread == pytest.approx(0.5, abs=0.03)


def test_methods_are_listed_with_when_to_take_which() -> None:
    lines = succeeds("method", "list").splitlines()
    when = data_of(succeeds("method", "list", "--json"))
    assert when.keys() == set(method_names())
    assert all(when.values())
    assert [" ".join(line.split()) for line in lines[1:-2]] == [f"{name} {text}" for name, text in when.items()]


def test_a_method_shows_its_parameters_and_what_leaves_the_box() -> None:
    text = run_fedcg("method", "show", "fedmd_cg").stdout
    assert "stays on the device: extractor" in text
    assert "label counts" in text
    shown = data_of(run_fedcg("method", "show", "fedcg", "--json").stdout)
    assert shown["private"] == ["discriminator", "extractor"]
    assert shown["params"]["ramp_rounds"]["default"] == 50


def private_party(name: str = "fedavg", **dp_sgd: float) -> Party:
    privacy = PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1.0, **dp_sgd}})
    party = replace(cases.party_of(name), privacy=privacy)
    network = party.spec.network.model_copy(update={"discriminator": "mlp_plain"})
    return replace(party, spec=party.spec.model_copy(update={"network": network}))


def epsilon(steps: int, rate: float) -> float:
    accountant = RDPAccountant()
    accountant.history = [(1.0, rate, steps)]
    return float(accountant.get_epsilon(delta=1e-5))


def test_every_client_spends_by_its_own_images_and_all_stages() -> None:
    party = private_party()
    more = replace(party, datasets={**party.datasets, "b": cases.client_data("b", 40)})
    now = simulate(more, Schedule(rounds=2, shadow=False))
    # 24 images, 8 expected in a batch: rate 1/3, 3 steps an epoch, 2 epochs, 2 rounds; 40 images: 1/5 and 5 steps.
    assert now.spent["a"].epsilon(1e-5) == pytest.approx(epsilon(12, 8 / 24), rel=1e-9)
    assert now.spent["b"].epsilon(1e-5) == pytest.approx(epsilon(20, 8 / 40), rel=1e-9)
    assert simulate(cases.party_of("fedavg"), Schedule(rounds=1)).spent == {}


def test_a_client_whose_budget_ends_takes_no_part_any_more() -> None:
    party = private_party(budget_epsilon=1.001 * epsilon(12, 8 / 24))
    more = replace(party, datasets={**party.datasets, "b": cases.client_data("b", 80)})
    stood = list(simulation.simulated_rounds(more, Schedule(rounds=4, shadow=False)))
    now, after_two = stood[-1], stood[1]
    for name in ("a", "c"):
        assert [failure.round for failure in now.failures[name]] == [3, 4]
        assert "privacy budget is used up: another round would bring epsilon to" in now.failures[name][0].reason
        assert now.spent[name].epsilon(1e-5) == pytest.approx(epsilon(12, 8 / 24), rel=1e-9)
    assert "b" not in now.failures
    assert cases.same_parts(now.states["a"].parts, after_two.states["a"].parts)
    assert not cases.same_parts(now.states["b"].parts, after_two.states["b"].parts)


def test_shadows_are_the_same_with_and_without_mechanisms() -> None:
    plain = simulate(cases.party_of("fedavg"), Schedule(rounds=1))
    guarded = simulate(
        replace(cases.party_of("fedavg"), privacy=PrivacySettings(gradient_noise=0.1, balance="logits")),
        Schedule(rounds=1),
    )
    for name in cases.NAMES:
        assert cases.same_parts(plain.shadows[name].parts, guarded.shadows[name].parts)
        assert not cases.same_parts(plain.states[name].parts, guarded.states[name].parts)


def test_a_download_is_measured_as_the_client_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    party = cases.party_of("fedavg", ("a",), epochs=20, lr=0.01)
    silent = {name: 0.0 * one for name, one in initial_parts(party.spec, b"cohort")[Part.CLASSIFIER].items()}
    monkeypatch.setattr(simulation_tasks, "downloaded_parts", lambda *given: {Part.CLASSIFIER: silent})
    (record,) = simulate(party, Schedule(rounds=1)).curves["a"]
    assert record.accuracy_after == pytest.approx(1 / 3)  # class 0 is answered always
    assert record.accuracy != record.accuracy_after
