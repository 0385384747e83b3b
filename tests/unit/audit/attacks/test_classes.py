"""What an update shows of the device's classes: what one looks like, and how many images of each there are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from audit.attacks import class_inference, label_distribution
from audit.attacks.attack import Effort
from audit.attacks.class_inference import recognised, trained_judges
from audit.evidence.case import Case, Extractor, Knowledge
from audit.evidence.networks import of_simulated_client
from audit.measures import Figure, Outcome, unit_pixels
from audit.techniques import class_shares
from audit.techniques.class_shares import HEADLINE, fitted, inferred
from audit.techniques.simulated_clients import ROUNDS, THIS_ROUND, Plan, simulated_clients
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError
from fedcg.wire.parts import Part, Report
from tests.support.audit import WHOLE_MODEL, carried_out, simulated_case
from tests.support.present import present


def attacked(case: Case, effort: Effort = Effort.QUICK) -> Outcome:
    return carried_out("class_inference", case, effort)


@pytest.mark.slow
def test_an_update_equal_to_the_aggregate_before_the_round_is_no_leak() -> None:
    case = simulated_case(**WHOLE_MODEL)
    silent = replace(case, view=replace(case.view, update=case.view.before.parts))
    for figure in attacked(silent).figures:
        assert figure.floor_is.startswith("the same attack on the aggregate before the round, with noise")
        assert present(figure.p) > 0.5


def test_the_chance_of_a_gain_counts_every_split_of_the_gans_and_asks_for_more_than_the_worth() -> None:
    # Of 4! / (2! 2!) = 6 splits, one is as large as (0.9, 0.8) over (0.2, 0.1).
    values, floors = np.array([0.9, 0.8]), np.array([0.2, 0.1])
    assert class_inference.chance_of_gain(values, floors, 0.1) == pytest.approx((1 / 6, 1 / 6))
    assert class_inference.chance_of_gain(floors, values, 0.0).p == 1.0
    # The demo's 99.4 % over 99.2 % in all of 8 and 8 GANs: less than the worth of 10 points.
    assert class_inference.chance_of_gain(np.full(8, 0.994), np.full(8, 0.992), 0.1).p == 1.0
    assert class_inference.chance_of_gain(np.full(8, 0.994), np.full(8, 0.8), 0.1).p == pytest.approx(1 / 12870)


def test_gans_that_share_one_updates_noise_are_one_draw() -> None:
    drawn, found = np.random.default_rng(5), []
    for _ in range(1000):
        noise, own = drawn.normal(scale=0.05, size=6), drawn.normal(scale=0.01, size=(2, 5))
        both = 0.4 + noise[0] + own[0], 0.3 + noise[1:] + own[1]
        found.append([class_inference.chance_of_gain(*both, 0.1, share_noise=one).p < 0.01 for one in (False, True)])
    alone, shared = np.mean(found, axis=0)
    assert shared < 0.02 < 0.1 < alone
    scores = {"surrogate": np.full(8, 0.95), "before the round, with noise (surrogate)": np.linspace(0, 0.8, 8)}
    scores |= {"positive control": np.ones(5), "the same attack on the untrained start": np.zeros(5)}
    (figure, _) = class_inference._scored(class_inference._RECOGNISED, scores, [Extractor.SURROGATE], [], 0)
    assert isinstance(figure, Figure)
    assert present(figure.p) > 0.05  # a permutation's: `least_p`
    assert figure.least_p == pytest.approx(1 / 12870)


def test_the_aggregate_with_noise_is_as_far_from_it_as_the_update() -> None:
    case = simulated_case(**WHOLE_MODEL)
    noised = class_inference.with_noise(case.view, torch.Generator().manual_seed(1))
    for part, weights in case.view.before.parts.items():
        for name, value in weights.items():
            sizes = [float((one.update[part][name] - value).norm()) for one in (case.view, noised)]
            assert sizes[1] == pytest.approx(sizes[0], rel=0.1 if value.numel() > 500 else 2)
    # Drawn part by part in the order of their names, so that a repetition in another process has the same noise.
    first = min(case.view.update)
    name, value = next(iter(case.view.before.parts[first].items()))
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    size = (case.view.update[first][name] - value).square().mean().sqrt()
    assert torch.equal(noised.update[first][name], value + size * noise)


@pytest.mark.slow
def test_the_control_fails_when_the_attack_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_inference, "descend", lambda optimiser, loss: None)
    assert [one.passed for one in attacked(simulated_case(**WHOLE_MODEL)).controls] == [False, False]


def test_judges_recognise_real_images_of_a_class_and_depend_on_their_own_images_alone() -> None:
    case = simulated_case(**WHOLE_MODEL)
    other = replace(case.view, update={}, before=replace(case.view.before, parts={}))
    unseen, found = case.truth.held_out, []
    for view in (case.view, other):
        judges = trained_judges(view, case.truth.train, 2, 10, case.streams, lambda: None)
        found.append(recognised(judges, unit_pixels(unseen.images), 3))
    mine = (unseen.labels == 3).numpy()
    assert found[0][mine].mean() > 0.7
    assert found[0][~mine].mean() < 0.1
    assert np.array_equal(found[0], found[1])


def test_the_attacker_has_no_image_of_the_class_that_the_device_trained_on_most() -> None:
    case = simulated_case(**WHOLE_MODEL)
    target = class_inference.target_class(case.truth)
    counts = case.truth.train.label_counts()
    assert counts[target] == max(counts)
    auxiliary = present(case.view.auxiliary)
    for most, known in ((50, 50), (10_000, int((auxiliary.labels != target).sum()) // 2)):
        view, kept = class_inference.without_class(case.view, target, most, torch.Generator().manual_seed(0))
        left = present(view.auxiliary)
        assert len(left) == known
        assert target not in left.labels
        assert target in kept.labels
        assert len(kept) + known == len(auxiliary)


def test_the_class_fake_is_one_logit_more_and_leaves_the_others_as_they_were() -> None:
    linear = nn.Linear(4, 3)
    linear.load_state_dict({"weight": torch.arange(12.0).reshape(3, 4) - 5, "bias": torch.arange(3.0)})
    classifier = nn.Sequential(nn.Flatten(), nn.Sequential(linear))
    inputs = torch.arange(8.0).reshape(2, 4)
    before = classifier(inputs).detach()
    after = class_inference.widened(classifier, 3)(inputs)
    assert torch.equal(after[:, :3], before)  # whole numbers: no sum is rounded
    assert torch.equal(after[:, 3], torch.zeros(2))


def test_class_ssim_is_the_mean_over_the_guesses_for_each_image() -> None:
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    # Each image is one of the two guesses: the mean of 1 and of the SSIM between the two, which is symmetric.
    first, second = class_inference.class_ssim(images, images)
    (between,) = class_inference.class_ssim(images[:1], images[1:])
    assert first == pytest.approx((1 + between) / 2)
    assert second == pytest.approx(first)
    assert isinstance(first, np.floating)


def skewed(method: str) -> Case:
    """A client that has few classes."""
    return simulated_case(method=method, partition="dirichlet:0.1", images_per_client=120, local_epochs=4)


def figure(outcome: Outcome, name: str, setting: str) -> Figure:
    return next(one for one in outcome.figures if one.name == name and setting in one.setting)


def relabelled(case: Case, shift: int) -> Case:
    """The same update beside a truth whose classes were exchanged: nothing of it can leak."""
    train, count = case.truth.train, case.view.spec.class_count
    labels = (train.labels + shift) % count
    return replace(case, truth=replace(case.truth, train=ImageSet(train.images, labels, train.classes)))


def test_counts_have_the_largest_remainders_and_sum_to_the_batch() -> None:
    # shares 0.5, 0.3, 0.2, and a negative one that counts as 0, of 4 rows: 2.0, 1.2, 0.8, 0 -> 2, 1, 0, 0 and one left for 0.8
    assert label_distribution.counts_of(torch.tensor([0.5, 0.3, 0.2, -0.1]), 4).tolist() == [2, 1, 1, 0]
    assert label_distribution.counts_of(torch.tensor([-1.0, -1.0]), 4).tolist() == [2, 2]


def test_the_last_biases_gradient_is_prediction_minus_share() -> None:
    # two rows, labels 0 and 0, p = (0.5, 0.5) for both: gradient of the bias = mean(p - y) = (-0.5, 0.5), so shares 0.5 - (-0.5) = 1, 0
    logits = torch.zeros(2, 2, requires_grad=True)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 0])).backward()
    bias = present(logits.grad).sum(0)
    assert bias.tolist() == [-0.5, 0.5]
    assert label_distribution.labels_by_bias(bias, torch.tensor([0.5, 0.5])).tolist() == [1, 0]


def test_ppidsg_eq_3_divides_the_row_sums_of_the_weight_gradient_by_the_sum_of_the_inputs() -> None:
    # inputs h = (1, 3) for both rows, S = 4, the same labels: gradient of W_cj = (p_c - n_c / N) h_j = -/+ 0.5 (1, 3); row sums -/+ 2
    inputs, labels = torch.tensor([[1.0, 3.0], [1.0, 3.0]]), torch.tensor([0, 0])
    weight = torch.zeros(2, 2, requires_grad=True)
    torch.nn.functional.cross_entropy(inputs @ weight.T, labels).backward()
    gradient = present(weight.grad)
    assert gradient.tolist() == [[-0.5, -1.5], [0.5, 1.5]]
    assert label_distribution.labels_by_weight(gradient, torch.tensor([0.5, 0.5]), inputs.mean(0)).tolist() == [1, 0]


def test_the_conditional_logit_finds_the_weights_that_made_the_shares() -> None:
    values = torch.randn(30, 5, 2, generator=torch.Generator().manual_seed(0))
    shares = (values @ torch.tensor([2.0, -1.0])).softmax(1)
    assert (fitted(values[:20], shares[:20])(values[20:]) - shares[20:]).abs().max() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcg", "fedsplit", "fedavg"])
def test_the_shares_of_a_skewed_client_leak_and_the_controls_succeed(method: str) -> None:
    outcome = carried_out("labels", skewed(method))
    shares = figure(outcome, "label_l1", HEADLINE)
    assert (outcome.figures[0].setting, outcome.figures[1]) == (f"whole update, {THIS_ROUND}", shares)
    # Two of three clients hold the classes that the third lacks: for FedCG's simulated clients they alone tell as much.
    assert (outcome.figures[0].gain.low > 0.1) == (method != "fedcg")
    assert shares.knowledge == (Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.OTHERS)
    assert shares.gain.low > 0.1
    assert present(shares.p) < 0.01
    assert all(0 < one.least_p <= present(one.p) for one in outcome.figures)
    assert shares.gain.value == pytest.approx(shares.floor - shares.value.value)
    of_batches = figure(outcome, "label_accuracy", "batches of 32, bias")
    assert of_batches.gain.low > 0
    assert (Knowledge.AUXILIARY in of_batches.knowledge) == (method == "fedavg")  # features need the extractor
    assert [one.passed for one in outcome.controls] == [True, True]
    assert any(note.startswith("Class shares, true and inferred: ") for note in outcome.notes)
    assert ("generator" in " ".join(one.setting for one in outcome.figures)) == (method == "fedcg")


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["none", "logits"])
def test_simulated_clients_read_the_shares_and_the_mechanism_through_several_rounds(balance: str) -> None:
    """Seeds 31 to 33 of two federations with Dirichlet labels; written down before they ran."""
    gains = []
    for seed in (31, 32, 33):
        case = simulated_case(balance=balance, partition="dirichlet:0.5", images_per_client=150, rounds=4, seed=seed)
        clients = present(
            simulated_clients(case.view, Plan.of(case.view, None, 16, 100_000), case.streams, lambda: None)
        )
        assert clients.privacy.balance == balance
        found, true = clients.inferred(), torch.tensor(case.truth.train.label_counts()) / len(case.truth.train)
        assert list(found) == [ROUNDS.format(3), THIS_ROUND]
        gains.append(float((true - 1 / len(true)).abs().sum() - (found[ROUNDS.format(3)][0] - true).abs().sum()))
        assert Plan.of(replace(case.view, auxiliary=None), None, 16, 100_000) is None
        assert Plan.of(case.view, None, 16, 100) is None
        assert len(present(Plan.of(case.view, None, 16, 250)).rounds) == 2  # of 6 clients, 18 steps a round
    assert min(gains) > 0, gains
    assert np.mean(gains) > 0.2, gains


def test_a_truth_that_the_update_does_not_come_from_gives_no_gain() -> None:
    case = skewed("fedcg")
    streams = case.streams.at("labels")
    guesses = inferred(case.view, streams, 4, 200, lambda: None)
    trivial = label_distribution.trivial_guesses(case.view, streams)
    gains = [next(label_distribution.update_figures(relabelled(case, by), guesses, trivial)).gain for by in (3, 5, 7)]
    assert all(gain.low <= 0 for gain in gains)
    assert min(gain.value for gain in gains) < 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_without_a_leak_the_probability_of_a_gain_is_not_small_too_often(seed: int) -> None:
    """The truth is drawn from the prior at four levels of skew; the update is another device's. Seeds were written down first."""
    case = simulated_case(method="fedsplit", partition="dirichlet:0.5", seed=seed)
    streams, drawn = case.streams.at("labels"), np.random.default_rng(seed)
    guesses = {name: one[0] for name, one in inferred(case.view, streams, 4, 200, lambda: None).items()}
    trivial, found = label_distribution.trivial_guesses(case.view, streams), []
    for concentration in (0.1, 0.5, 3.0, 100.0) * 5:
        true = drawn.multinomial(100, drawn.dirichlet([concentration] * 10)) / 100
        found.append([one.p for one in label_distribution.chances(guesses, trivial, true, 100, seed).values()])
    for level, most in ((0.01, 2), (0.1, 6), (0.5, 16)):  # of 20: more than this has a probability below 0.003
        assert (np.array(found) <= level).sum(0).max() <= most


def test_two_classes_are_too_few_for_a_test_of_their_shares() -> None:
    true, alike = np.array([0.8, 0.2]), {"every class alike": torch.tensor([0.5, 0.5])}
    found = label_distribution.chances({"exact": torch.from_numpy(true)}, alike, true, 100, 0)["exact"]
    assert found.p == found.least > 0.1


def test_the_federations_uneven_shares_in_the_aggregate_before_the_round_are_no_leak() -> None:
    case = simulated_case(method="fedsplit")
    streams, before = case.streams.at("labels"), case.view.before.parts[Part.CLASSIFIER]
    parts = {Part.CLASSIFIER: {**before, "5.bias": before["5.bias"] + torch.linspace(0, 2, 10)}}
    view = replace(case.view, before=replace(case.view.before, parts=parts), update=parts, others={})
    counts = label_distribution.counts_of(class_shares.by_readout(view, parts, streams), len(case.truth.train)).long()
    train = replace(case.truth.train, labels=torch.arange(10).repeat_interleave(counts))
    guesses, trivial = inferred(view, streams, 4, 200, lambda: None), label_distribution.trivial_guesses(view, streams)
    uneven = replace(case, view=view, truth=replace(case.truth, train=train))
    assert all(present(one.p) > 0.5 for one in label_distribution.update_figures(uneven, guesses, trivial))


@pytest.mark.parametrize(("balance", "least"), [("none", True), ("logits", False)])
def test_labels_leak_unless_the_classifier_is_sent_without_the_prior(balance: str, least: bool) -> None:
    case = simulated_case(
        method="fedsplit", partition="dirichlet:0.3", images_per_client=200, local_epochs=4, balance=balance
    )
    found = inferred(case.view, case.streams.at("labels"), 4, 400, lambda: None)
    true = torch.tensor(case.truth.train.label_counts()) / len(case.truth.train)
    distance = {name: float((one[0] - true).abs().sum()) for name, one in found.items()}
    assert (distance["responses"] < distance["adjusted"]) == least
    assert set(distance) >= {"bias", "bias, standardised"}


def test_reported_label_counts_are_a_leak_and_the_others_updates_alone_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Plan, "of", lambda *_: None)  # no simulated clients
    case = skewed("fedcg")
    counts = tuple(case.truth.train.label_counts())
    told = replace(case.view, report=case.view.report.model_copy(update={"label_counts": counts}))
    outcome = carried_out("labels", replace(case, view=told))
    exact = next(one for one in outcome.figures if one.setting == "whole update, label counts as reported")
    assert exact.value.value == pytest.approx(0, abs=1e-5)
    assert present(exact.p) < 0.01
    silent = replace(
        case.view, update={part: case.view.before.parts[part] for part in case.view.update}, report=Report()
    )
    quiet = carried_out("labels", replace(case, view=silent))
    assert all(one.gain.value <= 1e-6 for one in quiet.figures if one.setting.endswith("together"))


def test_a_class_whose_bias_rises_alone_is_named() -> None:
    case = simulated_case(method="fedsplit")
    before = case.view.before.parts[Part.CLASSIFIER]
    moved = torch.tensor([0.01, -0.01, 0.01, -0.02, 0.01, 0.08, 0.0, -0.01, 0.02, 0.01])
    view = replace(case.view, update={Part.CLASSIFIER: {**before, "5.bias": before["5.bias"] + moved}})
    (note,) = label_distribution.absent_classes(view)
    assert f"rose for {case.view.spec.classes[5]} far more" in note
    assert not list(label_distribution.absent_classes(replace(view, update={Part.CLASSIFIER: before})))


def test_the_bias_readings_are_softmax_of_the_change() -> None:
    case = simulated_case(method="fedsplit")
    before = case.view.before.parts[Part.CLASSIFIER]
    moved = torch.zeros(10).index_fill(0, torch.tensor([3]), 2.0)
    found = class_shares.by_bias(case.view, [{**before, "5.bias": before["5.bias"] + moved}])
    torch.testing.assert_close(found["bias"][0], moved.softmax(0))
    # mean 0.2, deviation 2 / 10^0.5: (2 - 0.2) / 0.632 = 2.846 and -0.2 / 0.632 = -0.316
    assert found["bias, standardised"][0, 3] == pytest.approx(
        np.exp(2.846) / (np.exp(2.846) + 9 * np.exp(-0.316)), abs=1e-3
    )


def test_the_floor_is_the_better_of_equal_shares_and_the_federations_mean() -> None:
    case = skewed("fedsplit")
    true = torch.tensor(case.truth.train.label_counts()) / len(case.truth.train)
    count = case.view.spec.class_count
    uniform, other = torch.full((count,), 1 / count), true * 0.9 + 0.1 / count
    guesses = {HEADLINE: true.unsqueeze(0)}
    (alone,) = label_distribution.update_figures(case, guesses, {"every class alike": uniform})
    (both,) = label_distribution.update_figures(case, guesses, {"every class alike": uniform, "mean": other})
    assert alone.floor_is == "every class alike"
    assert alone.floor == pytest.approx(float((true - uniform).abs().sum()), abs=1e-5)
    assert both.floor_is == "mean"
    assert both.floor == pytest.approx(alone.floor / 10, abs=1e-5)


def test_the_single_class_control_fails_with_a_broken_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    case = skewed("fedsplit")
    assert label_distribution.single_class_control(case).passed
    monkeypatch.setattr(label_distribution, "labels_by_bias", lambda bias, predicted: predicted)
    assert not label_distribution.single_class_control(case).passed


@pytest.mark.parametrize("method", [pytest.param("fedcg", marks=pytest.mark.slow), "fedsplit"])
def test_the_two_class_control_fails_with_broken_readings(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = skewed(method)
    assert label_distribution.headline_control(case, Effort.QUICK, lambda: None).passed
    flat = torch.full((10,), 0.1)
    monkeypatch.setattr(class_shares, "by_readout", lambda view, parts, streams: flat)
    monkeypatch.setattr(class_shares, "by_responses", lambda *_, **__: lambda sent: (flat.expand(len(sent), 10), 0.0))
    assert not label_distribution.headline_control(case, Effort.QUICK, lambda: None).passed


def test_a_control_whose_client_diverges_proves_nothing_and_ends_no_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object) -> None:
        raise DivergedError("the generator: mean loss 10005")

    monkeypatch.setattr("audit.attacks.label_distribution.followed", diverge)
    outcome = carried_out("labels", skewed("fedcg"))
    assert outcome.figures
    assert not outcome.is_proven("label_l1")
    assert "diverged" in outcome.controls[-1].title


def test_a_simulated_client_sends_what_the_method_sends_and_its_own_generator() -> None:
    case = skewed("fedcg")
    some = case.truth.train.rows(torch.arange(20))
    planted = of_simulated_client(case.view, some, case.streams.at("planted"), epochs=1)
    assert (planted.update.keys(), planted.report.examples) == (case.view.update.keys(), 20)
    for part in planted.update:
        for others in (case.view.before.parts, case.view.update):
            assert any(not torch.equal(weights, others[part][key]) for key, weights in planted.update[part].items())


def test_an_update_alone_is_enough_and_what_was_not_tried_is_noted() -> None:
    case = skewed("fedcg")
    alone = replace(case, view=replace(case.view, others={}), truth=replace(case.truth, before=None, after=None))
    outcome = carried_out("labels", alone)
    assert {one.name for one in outcome.figures} == {"label_l1"}
    assert any("Single batches were not tried" in note and "--private" in note for note in outcome.notes)
