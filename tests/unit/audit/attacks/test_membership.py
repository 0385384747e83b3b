"""Membership attacks and the one-run lower bound on ε: formulas by hand, what an attacker is handed, and both on real updates."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from audit.attacks import membership
from audit.attacks.attack import Effort
from audit.attacks.canaries import ATTACK, best_bound, epsilon_bound, least_chance, make_canaries, p_value
from audit.attacks.membership import MemberScores, auc, aucs, chance_of_gain
from audit.evidence.case import Case, Extractor, Knowledge
from audit.evidence.device_data import joined
from audit.evidence.networks import WholeModel
from audit.measures import Figure, Outcome, Values
from audit.techniques import shadow_models
from audit.techniques.shadow_models import Target, log_ratio, ml_leaks, rmia, rmia_by_others, two_shadows
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Aggregate, ClientState, LocalResult, Method, RoundContext
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part, PrivacySpent, Report
from tests.support.audit import carried_out, simulated_case
from tests.support.present import present

SCORES = ("ML-Leaks", "PPIDSG's two shadow models", "RMIA by other clients", "RMIA")


def _images(labels: list[int]) -> ImageSet:
    return ImageSet(torch.zeros(len(labels), 1, 32, 32, dtype=torch.uint8), torch.tensor(labels), ("a", "b"))


def _target_with(monkeypatch: pytest.MonkeyPatch, known: dict[str, list[float]], population: ImageSet) -> Target:
    """A target whose models have the given confidences: keyed by model, then for the population by model + "z"."""
    models = {name: object.__new__(WholeModel) for name in ("victim", "first", "second")}
    names = {id(model): name for name, model in models.items()}

    def confidence(model: WholeModel, images: ImageSet) -> Values:
        return np.array(known[names[id(model)] + ("z" if images is population else "")])

    monkeypatch.setattr(shadow_models, "confidence", confidence)
    return Target(models["victim"], None, (models["first"], models["second"]), (), population)


def test_rmias_ratio_divides_by_the_offline_estimate_of_the_images_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images([0, 1])
    target = _target_with(monkeypatch, {"victim": [0.8, 0.2], "first": [0.3, 0.2], "second": [0.5, 0.2]}, _images([0]))
    # a = 0.3: Pr(x) = (1.3 · 0.4 + 0.7) / 2 = 0.61, and (1.3 · 0.2 + 0.7) / 2 = 0.48
    assert log_ratio(target, images, _streams()) == pytest.approx(np.log([0.8 / 0.61, 0.2 / 0.48]))


def test_rmias_score_is_the_share_of_the_population_less_likely_than_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    population = _images([0, 0, 0])
    confidences = {"victim": [0.9, 0.5], "victimz": [0.4, 0.6, 0.8]}
    target = _target_with(
        monkeypatch,
        {**confidences, "first": [0.5, 0.5], "second": [0.5, 0.5], "firstz": [0.5] * 3, "secondz": [0.5] * 3},
        population,
    )
    score = rmia(target, _images([0, 0]), _streams())
    assert (score * 4).astype(int).tolist() == [3, 1]  # likelier than all three, than one
    assert score[0] > score[1]


def _streams() -> Streams:
    return simulated_case(method="fedavg").streams


def test_the_mean_of_updates_takes_each_once_and_leaves_counters() -> None:
    first = {Part.CLASSIFIER: {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}}
    second = {Part.CLASSIFIER: {"w": torch.tensor([3.0, 6.0]), "n": torch.tensor(5)}}
    mean = shadow_models.mean_parts([first, second])[Part.CLASSIFIER]
    assert mean["w"].tolist() == [2.0, 4.0]
    assert int(mean["n"]) == 3
    assert shadow_models.mean_parts([]) == {}


def test_candidates_have_as_many_members_as_others_of_every_class() -> None:
    case = simulated_case(method="fedavg")
    images, members = membership.balanced_pairs(case.truth, 40, case.streams.generator("x"))
    assert len(images) == 80
    assert members.sum() == 40
    labels = images.labels.numpy()
    assert np.array_equal(np.bincount(labels[members], minlength=10), np.bincount(labels[~members], minlength=10))
    trained_on = {one.numpy().tobytes() for one in case.truth.train.images}
    assert [one.numpy().tobytes() in trained_on for one in images.images] == members.tolist()


def test_the_gain_is_over_the_larger_of_chance_and_the_blind_score() -> None:
    members = np.repeat([True, False], 50)
    drawn = np.random.default_rng(0)
    good, noise = members + 0.5 * drawn.normal(size=100), drawn.normal(size=100)
    alike = membership.auc_gain(good, good, members, 0)
    assert (alike.value, alike.low, alike.high) == (0.0, 0.0, 0.0)
    inverted = membership.auc_gain(good, -good, members, 0)
    assert inverted.value == pytest.approx(auc(good[members], good[~members]) - 0.5)
    assert inverted.low > 0.2
    assert membership.auc_gain(noise, noise + good, members, 0).value < 0


def test_the_chance_of_scores_of_nothing_is_uniform_and_that_of_members_small() -> None:
    labels, members = torch.arange(100) % 5, np.tile(np.repeat([True, False], 5), 10)
    drawn, none = np.random.default_rng(2), np.zeros(100)
    for of, least in ((aucs, 0.5), (functools.partial(membership.true_positive_rates, rate=0.1), 0.1)):
        found = [chance_of_gain(of, least, (drawn.normal(size=100), none), members, labels, at).p for at in range(60)]
        assert np.mean(np.array(found) < 0.2) < 0.4  # 12 of 60 expected
        assert chance_of_gain(of, least, (members + 0.3 * drawn.normal(size=100), none), members, labels, 0).p < 1e-3
    # What is as good without the update is no gain.
    shifted = members + 0.3 * drawn.normal(size=100)
    assert chance_of_gain(aucs, 0.5, (shifted, shifted), members, labels, 0).p > 0.4


def test_rates_are_given_only_where_enough_images_pass_and_each_figure_has_a_test() -> None:
    found = MemberScores("x", frozenset(), np.arange(300.0), np.zeros(300), None, "chance")
    members = np.arange(300) >= 150
    figures = list(membership.membership_figures(found, members, torch.zeros(300, dtype=torch.int64), 0))
    # At 5 % of 150 others seven may pass, at 1 % one: too few.
    assert [(one.name, one.setting) for one in figures] == [("mia_auc", "x"), ("mia_tpr", "x, at 5.0%")]
    assert [one.value.value for one in figures] == [1.0, 1.0]
    assert [one.p for one in figures] == [one.least_p for one in figures] == [pytest.approx(1 / 20_001)] * 2


@functools.lru_cache(maxsize=1)
def _overfitted() -> tuple[Target, ImageSet, ImageSet, Case]:
    """A target that learnt 40 images with random labels, in a form that takes a second."""
    case = simulated_case(method="fedavg")
    stream = case.streams.generator("labels")
    assert case.view.auxiliary is not None

    def relabelled(some: ImageSet) -> ImageSet:
        return replace(some, labels=torch.randint(10, (len(some),), generator=stream))

    members, others = (relabelled(some.rows(range(40))) for some in (case.truth.train, case.truth.held_out))
    fit, population = (relabelled(case.view.auxiliary.rows(some)) for some in (range(80), range(80, 290)))
    spec = case.view.spec.model_copy(update={"params": {**case.view.spec.params, "lr": 3e-3}})
    view = replace(case.view, spec=spec, others={})
    victim = shadow_models.train_shadows(view, joined(members, others), 1, 80, case.streams.at("victim"), _nothing)[0]
    shadows = shadow_models.train_shadows(view, fit, 2, 80, case.streams, _nothing)
    target = shadow_models.target_of(
        replace(view, update=victim.parts), Extractor.SENT, shadows, population, case.streams, _nothing
    )
    return target, victim.seen, victim.unseen, case


def _nothing() -> None:
    pass


def test_ppidsgs_attack_tells_the_victims_images_from_those_of_other_clients() -> None:
    target, seen, unseen, case = _overfitted()
    beside = replace(target, others=target.references[1])
    score = two_shadows(beside, seen, case.streams)
    assert np.array_equal(score, two_shadows(beside, seen, case.streams))
    assert auc(score, two_shadows(beside, unseen, case.streams)) > 0.8
    swapped = replace(target, victim=target.references[1], others=target.victim)
    assert auc(two_shadows(swapped, seen, case.streams), two_shadows(swapped, unseen, case.streams)) < 0.3


def test_other_clients_models_are_references_as_good_as_shadow_models() -> None:
    target, seen, unseen, case = _overfitted()
    target = replace(target, references=target.references[:1])
    beside = replace(target, others=target.references[0])
    by_others = rmia_by_others(beside, seen, case.streams)
    assert np.array_equal(by_others, rmia(target, seen, case.streams))
    assert auc(by_others, rmia_by_others(beside, unseen, case.streams)) > 0.8


def test_images_learnt_by_heart_are_found() -> None:
    target, seen, unseen, case = _overfitted()
    for score in (ml_leaks, rmia):
        assert auc(score(target, seen, case.streams), score(target, unseen, case.streams)) > 0.8


def _rmia(found: Outcome) -> Figure:
    return next(one for one in found.figures if one.setting == "RMIA, extractor: sent (whole model)")


@pytest.mark.slow
def test_a_whole_model_after_many_epochs_leaks_membership_and_a_shuffled_truth_does_not() -> None:
    case = simulated_case(method="fedavg", local_epochs=30)
    found = carried_out("membership", case)
    figure = _rmia(found)
    assert figure.gain.low > 0
    assert 0.5 <= figure.floor < figure.value.value
    assert figure.ceiling == figure.value.value
    assert Knowledge.START not in figure.knowledge
    assert all(control.passed for control in found.controls)
    mixed = joined(case.truth.train, case.truth.held_out)
    order = torch.randperm(len(mixed), generator=case.streams.generator("mix"))
    train, held_out = (mixed.rows(some) for some in order.tensor_split([len(case.truth.train)]))
    shuffled = Case(case.view, replace(case.truth, train=train, held_out=held_out), case.streams)
    assert _rmia(carried_out("membership", shuffled)).gain.low < 0


@pytest.mark.slow
def test_a_thorough_audit_tries_lira_and_it_finds_what_a_model_overfitted() -> None:
    case = simulated_case(method="fedavg", images_per_client=60, auxiliary=150, local_epochs=40)
    found = carried_out("membership", case, Effort.THOROUGH)
    figure = next(one for one in found.figures if one.setting == "LiRA, offline, extractor: sent (whole model)")
    assert figure.value.value > figure.floor  # 100 images are too few for an interval above it
    (control,) = (one for one in found.controls if one.title.startswith("LiRA, offline"))
    assert control.passed
    assert "Shadow and reference models: 16" in found.notes[0]


@pytest.mark.slow
def test_controls_fail_where_the_attack_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(model: WholeModel, images: ImageSet) -> Values:
        return np.full((len(images), len(images.classes)), 0.1)

    monkeypatch.setattr(shadow_models, "posteriors", constant)
    found = carried_out("membership", simulated_case(method="fedcg"))
    assert not any(control.passed for control in found.controls[: len(SCORES)])
    assert [one.figure for one in found.controls[len(SCORES) :]] == ["mia_auc", "mia_tpr"]  # the device's own extractor


@pytest.mark.parametrize(
    ("tried", "guesses", "right", "delta", "chance"),
    [
        (1, 1, 1, 0.0, 0.75),
        # 2 m δ · max_i Pr(1 - i <= B < 1) / i = 2 · 1 · 0.1 · Pr(B = 0) = 0.2 · 0.25
        (1, 1, 1, 0.1, 0.75 + 0.05),
        # Pr(B >= 2) = 9/16; i = 1: Pr(B = 1) = 6/16; i = 2: (Pr(B = 1) + Pr(B = 0)) / 2 = 7/32
        (5, 2, 2, 0.01, 9 / 16 + 2 * 5 * 0.01 * 6 / 16),
        (10, 10, 0, 1e-5, 1.0),
    ],
)
def test_right_guesses_have_the_p_value_worked_by_hand(
    tried: int, guesses: int, right: int, delta: float, chance: float
) -> None:
    assert p_value(tried, guesses, right, math.log(3), delta) == pytest.approx(chance)  # q = 3/4


def test_few_right_guesses_bound_nothing_and_ten_of_ten_bound_q_to_the_tenth_at_5_percent() -> None:
    assert epsilon_bound(1, 1, 1) == epsilon_bound(10, 10, 0) == epsilon_bound(10, 0, 0) == 0.0
    q = 0.05**0.1
    assert epsilon_bound(10, 10, 10, delta=0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


def test_randomised_response_exceeds_its_own_epsilon_in_less_than_five_percent_of_audits() -> None:
    drawn, epsilon = np.random.default_rng(7), 1.0
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    bound = {right: epsilon_bound(100, 100, right, 0.0) for right in range(50, 101)}
    bounds = [bound[int(right)] for right in drawn.binomial(100, q, size=400)]
    assert np.mean(np.array(bounds) > epsilon) < 0.07  # 5 % and two standard errors of 400 audits
    assert np.mean(bounds) > 0.5


def test_scores_that_know_the_coin_give_a_large_bound_and_scores_of_nothing_give_none() -> None:
    drawn = np.random.default_rng(1)
    included = drawn.random(200) < 0.5
    noise = drawn.normal(size=200)
    assert best_bound(included + 0.01 * noise, included) > 2.0
    assert best_bound(noise, included) == best_bound(-(included + 0.01 * noise), included) == 0.0


def test_canaries_follow_from_the_stream_and_have_the_form_of_the_images() -> None:
    case = simulated_case(method="fedavg")
    first, again = (make_canaries(case.view.spec, 20, case.streams.at("x")) for _ in range(2))
    image = case.view.spec.image
    assert first.images.shape == (20, image.channels, image.height, image.width)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert len({one.numpy().tobytes() for one in first.images}) == 20


def test_the_least_chance_is_the_best_p_value_times_the_number_of_guesses_tried() -> None:
    scores, included = np.arange(8.0), np.arange(8) >= 4
    # All 8 guesses right at ε = 0: 1 / 2^8, and the other numbers of guesses (4, 2, 0) are less sure; four were tried.
    assert least_chance(scores, included, 0.0, 0.0) == pytest.approx(4 / 2**8)
    assert least_chance(-scores, included, 0.0, 0.0) == 1.0
    # Under ε = ln 3 a guess is right with probability 3/4.
    assert least_chance(scores, included, math.log(3), 0.0) == pytest.approx(4 * 0.75**8)


DP_SGD = PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0, clip=1.0, delta=1e-5))


@pytest.mark.slow
def test_a_round_with_dp_sgd_is_repeated_with_it_and_compared_with_the_accountant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opacus")
    case = simulated_case(method="fedavg", privacy=DP_SGD, images_per_client=60, local_epochs=1)
    assert case.truth.privacy == DP_SGD
    seen = list[PrivacySettings]()

    def recorded(
        method: Method, state: ClientState, data: ImageSet, start: Aggregate, ctx: RoundContext
    ) -> LocalResult:
        seen.append(ctx.privacy)
        return protected_round(method, state, data, start, ctx)

    monkeypatch.setattr("audit.attacks.canaries.protected_round", recorded)
    (figure,) = _epsilon(case).figures
    assert seen == [DP_SGD]
    assert "accountant's ε" in figure.floor_is
    assert figure.value.value < figure.floor
    assert figure.p is not None
    assert figure.p > 0.05


@pytest.mark.parametrize("told", ["report", "store"])
def test_dp_sgd_of_unknown_settings_is_refused_with_a_remedy(told: str) -> None:
    case = simulated_case(method="fedavg")
    if told == "report":
        report = Report(epsilon=PrivacySpent(epsilon=1.0, delta=1e-5, budget=None))
        case = replace(case, view=replace(case.view, report=report))
    else:
        case = replace(case, truth=replace(case.truth, privacy=None))
    assert "give its settings with --mechanism" in present(ATTACK.lacks(case))


def _epsilon(case: Case) -> Outcome:
    return ATTACK.run(case, Effort.DEFAULT, lambda done, steps: None)
