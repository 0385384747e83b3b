"""What generators give away: images that one has memorised, members and the scrambling that PPIDSG's shared one imitates."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from audit.attacks import generator_memory, image_generator
from audit.attacks.image_generator import estimated_scrambling, right_blocks
from audit.evidence.case import Case, Truth, View
from audit.evidence.device_data import joined
from audit.measures import Figure, Outcome, Values, unit_pixels
from audit.report import Result, findings_of
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import draw_keys, scrambling_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.methods.ppidsg import SCRAMBLING, scrambling_by
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import extract_features
from fedcg.wire.parts import Part
from tests.support.audit import TRANSLATING, WITH_GENERATOR, attack, carried_out, outcome_of, simulated_case
from tests.support.present import present


@pytest.mark.slow
def test_the_controls_attack_planted_generators_with_the_extractor_that_decides() -> None:
    controls = outcome_of("memorisation", **WITH_GENERATOR).controls
    assert [one.figure for one in controls] == ["memory_auc", "memory_worst", "inverter_psnr", "inverter_ssim"]
    assert ["extractor: surrogate" in one.title for one in controls] == [True, False, True, True]
    # After two rounds pictures decoded with a surrogate show nothing, even of a planted generator: their low figures prove nothing.
    assert [one.passed for one in controls] == [True, True, False, False]


def test_the_attackers_figures_stand_beside_those_with_the_true_extractor() -> None:
    outcome = outcome_of("memorisation", **WITH_GENERATOR)
    mine = [one for one in outcome.figures if one.setting == "extractor: surrogate"]
    true = [one for one in outcome.figures if one.setting == "extractor: true"]
    names = ["memory_auc", "memory_worst", "inverter_psnr", "inverter_ssim"]
    assert [one.name for one in mine] == [one.name for one in true] == names
    assert [one.ceiling for one in mine] == [one.value.value for one in true]
    assert all(one.ceiling is None for one in true)
    # Numbers of a training image that were sent stay sent: this figure counts also with an extractor that leaks later.
    assert [one.is_possible for one in true] == [False, True, False, False]
    assert true[1].samples == len(simulated_case(**WITH_GENERATOR).truth.train)
    assert all(one.p is not None for one in outcome.figures)
    assert (len(outcome.pictures), len(outcome.pictures[0].rows[0][1])) == (2, 10)


def memorising(case: Case, seed: int, share: float, error: float = 0.005) -> Outcome:
    """Attack a generator that repeats the true features of ten training images in a share of its samples."""
    stream, train = torch.Generator().manual_seed(seed), case.truth.train
    chosen = torch.randperm(len(train), generator=stream)[:10]
    extractor = load_part(case.view.spec, Part.EXTRACTOR, present(case.truth.after)[Part.EXTRACTOR])
    features = extract_features(extractor, train.images[chosen], case.view.spec).flatten(1)
    usual = generator_memory.samples_of

    def samples_of(view: View, weights: Weights, streams: Streams) -> generator_memory.Samples:
        draw = usual(view, weights, streams)

        def planted(label: int, count: int) -> torch.Tensor:
            mine = features[train.labels[chosen] == label]
            drawn, repeated = draw(label, count).clone(), int(share * count) if len(mine) else 0
            noise = torch.randn(repeated, drawn.shape[1], generator=stream)
            drawn[:repeated] = mine[torch.arange(repeated) % max(1, len(mine))] + error * noise
            return drawn

        return planted if weights is view.update[Part.GENERATOR] else draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_memory, "samples_of", samples_of)
        return carried_out("memorisation", case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_ten_memorised_images_of_many_are_found_and_none_without(seed: int) -> None:
    case = simulated_case(**WITH_GENERATOR)
    planted, plain = memorising(case, seed, 0.05), outcome_of("memorisation", **WITH_GENERATOR)
    result = findings_of([attack("memorisation")], [planted])[0]
    assert (result.result, present(result.headline).name) == (Result.LEAKED, "memory_worst")
    assert findings_of([attack("memorisation")], [plain])[0].result is not Result.LEAKED


def test_the_worst_image_is_that_of_an_exponential_tails_prediction() -> None:
    # Above u = 0 lie k = 8 of m = 16 others, by S = 36. A new one is above 36 with probability 9 / 17 * (1 + 36 / 36)^-8.
    scores = np.array([36.0, 0.0, *[0.0] * 8, *range(1, 9)])
    found, beyond = generator_memory.worst_figure("x", (), scores, 2), 9 / 17 / 2**8
    assert found.value.value == pytest.approx((36 - 36 / 16) / scores[2:].std(ddof=1))
    assert found.p == pytest.approx(1 - (1 - beyond) ** 2)
    assert found.gain.low < found.gain.value < found.gain.high
    # Of two new ones the median of the larger: P = 1 - 0.5^0.5.
    median = 36 * (((1 - 0.5**0.5) * 17 / 9) ** (-1 / 8) - 1)
    assert found.floor == pytest.approx((median - 36 / 16) / scores[2:].std(ddof=1))
    for few in (scores[:-1], np.append(np.nan, scores)):
        assert generator_memory.worst_figure("x", (), few, 2).p is None


def test_without_a_leak_the_worst_image_is_seldom_unlikely() -> None:
    """Draws of seeds 1 to 1,000; the tail's length was chosen on seeds from 100,000. Student's prediction: 12 % below 1 %."""
    labels, found = torch.zeros(140, dtype=torch.int64), []
    for seed in range(1, 1001):
        drawn = torch.randn(440, 8, generator=torch.Generator().manual_seed(seed)).split([140, 300])
        scores = generator_memory.exposure(drawn[0], labels, lambda *_, samples=drawn[1]: samples, 300)
        found.append(present(generator_memory.worst_figure("x", (), scores, 100).p))
    assert ((np.array(found)[:, None] < [0.01, 0.001]).sum(0) <= [15, 4]).all()


def test_a_rare_class_of_other_distances_is_no_leak() -> None:
    """One image in twenty is of a class whose scores are 6 higher; seeds 1 to 300."""
    found = []
    for seed in range(1, 301):
        drawn = np.random.default_rng(seed)
        labels, known_labels = (drawn.random(count) < 0.05 for count in (400, 500))
        scores, known = (drawn.exponential(size=len(some)) + 6 * some for some in (labels, known_labels))
        alike = generator_memory.standardised_by_class(scores, labels, known, known_labels)
        found.append(generator_memory.worst_figure("x", (), alike, 300))
    assert sum(present(one.p) < 0.01 for one in found) <= 9
    few = generator_memory.standardised_by_class(np.ones(1), np.ones(1), np.arange(4.0), np.array([0, 0, 0, 1]))
    assert few[0] == pytest.approx(-0.5)  # one known image of the class: median 1.5 and mean deviation 1 of all


def test_the_controls_fail_when_the_distances_and_the_decoder_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cdist", lambda some, others: torch.ones(len(some), len(others)))
    monkeypatch.setattr("audit.techniques.image_decoder.ImageGenerator", BlankDecoder)
    controls = carried_out("memorisation", simulated_case(**WITH_GENERATOR)).controls
    assert [one.passed for one in controls] == [False] * 4


class BlankDecoder(torch.nn.Module):
    """Pictures that show nothing."""

    def __init__(self, inputs: int, known: ImageSet, stream: torch.Generator) -> None:
        super().__init__()
        self.grey = torch.nn.Parameter(torch.full(known.images.shape[1:], 0.5))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.grey.expand(len(vectors), *self.grey.shape)


def test_without_auxiliary_images_the_device_still_learns_its_generators_distances() -> None:
    case = simulated_case(**WITH_GENERATOR)
    found = carried_out("memorisation", replace(case, view=replace(case.view, auxiliary=None)))
    assert [(one.name, one.setting) for one in found.figures] == [
        (name, "extractor: true") for name in ("memory_auc", "memory_worst")
    ]
    assert [one.passed for one in found.controls] == [True, True]


def test_matched_images_are_equally_many_of_each_class_from_both() -> None:
    def labelled(*labels: int) -> ImageSet:
        return ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.tensor(labels), ("a", "b", "c"))

    truth = Truth(labelled(0, 0, 0, 1, 2), labelled(0, 0, 1, 1))
    train, held_out = truth.matched(torch.Generator().manual_seed(0))
    assert train.labels.tolist() == held_out.labels.tolist() == [0, 0, 1]
    assert truth.matched(torch.Generator().manual_seed(0), 1)[0].labels.tolist() == [0, 1]


def test_exposure_by_hand() -> None:
    # One class, samples at 0 and 10, images at 1, 10 and 4: distances (1, 9), (10, 0) and (4, 6), means 5 and 5.
    images, labels = torch.tensor([[1.0], [10.0], [4.0]]), torch.zeros(3, dtype=torch.int64)
    found = generator_memory.exposure(images, labels, lambda label, count: torch.tensor([[0.0], [10.0]]), 2)
    assert found == pytest.approx([np.log(5 / 1), np.log(5 / 1e-6), np.log(5 / 4)], abs=1e-5)


def test_the_nearest_gain_by_hand_and_its_interval_by_chance() -> None:
    # Two pictures; trained on: columns 1 and 2. Nearest trained on 9 and 5, held out 4 and 6: means 7 and 5, gain 2.
    table: Values = np.array([[9.0, 1.0, 4.0, 3.0], [2.0, 5.0, 6.0, 1.0]])
    value, floor, gain, likely = generator_memory.nearest_gain([table], 0)
    assert (value.value, floor, gain.value) == (7.0, 5.0, 2.0)
    assert gain.low <= 0 < gain.high  # four images are too few to show anything
    # Swapping neither, the first, the second pair or both: gains of 2, -0.5, 0.5 and -2, each as likely.
    assert tuple(likely) == pytest.approx((1 / 4, 1 / 4), abs=0.01)
    clear: Values = np.tile(np.concatenate([np.full(20, 9.0), np.full(20, 1.0)]), (3, 1))
    *_, sure, likely = generator_memory.nearest_gain([clear] * 3, 0)
    assert sure.low > 0
    assert likely.p < 0.001


def named(outcome: Outcome, name: str) -> list[Figure]:
    return [one for one in outcome.figures if one.name == name]


@pytest.mark.slow
def test_members_are_told_by_how_far_the_round_moved_the_output() -> None:
    outcome = outcome_of("image_generator", **TRANSLATING)
    assert outcome.is_proven("mia_auc")
    assert [one.setting for one in named(outcome, "mia_auc")] == [
        "movement of its output",
        "movement of its output relative to the other clients'",
    ]
    assert all(one.gain.low > 0.05 for one in named(outcome, "mia_auc"))


@pytest.mark.slow
def test_shuffling_whose_images_moved_the_output_leaves_no_gain() -> None:
    case = simulated_case(**TRANSLATING)
    both = joined(case.truth.train, case.truth.held_out)
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(5))
    inside, outside = (both.rows(some) for some in order.chunk(2))
    found = carried_out("image_generator", replace(case, truth=replace(case.truth, train=inside, held_out=outside)))
    assert all(one.gain.low <= 0 for one in named(found, "mia_auc"))


@pytest.mark.slow
def test_the_key_is_tried_where_it_was_given_and_a_planted_generator_shows_it_whole() -> None:
    case, outcome = simulated_case(**TRANSLATING), outcome_of("image_generator", **TRANSLATING)
    (figure,) = named(outcome, "scrambled_blocks")
    assert figure.samples == 16
    assert outcome.is_proven("scrambled_blocks")
    known, true = case.view.auxiliary, scrambling_by(case.view.spec, case.truth.extras[SCRAMBLING])
    assert known is not None
    assert right_blocks(lambda images: unit_pixels(true.encrypt(images)), true, known, 4) == (16, 16)
    without = carried_out("image_generator", replace(case, truth=replace(case.truth, extras={})))
    assert not named(without, "scrambled_blocks")
    assert "its keys were not given" in without.notes[-1]


@pytest.mark.slow
def test_a_control_whose_client_learns_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = simulated_case(**TRANSLATING)
    assert image_generator.membership_control(case, case.streams).passed
    idle = replace(case.view, update={Part.IMAGE_GENERATOR: case.view.before.parts[Part.IMAGE_GENERATOR]})
    monkeypatch.setattr("audit.evidence.networks.of_simulated_client", lambda *some: idle)
    assert not image_generator.membership_control(case, case.streams).passed


STREAM = torch.Generator().manual_seed(3)


def photographs(channels: int) -> torch.Tensor:
    """Smooth images: neighbouring pixels are alike, as in photographs."""
    coarse = torch.rand(400, channels, 5, 5, generator=STREAM)
    return (torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear") * 255).byte()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("left_out", [None, "IS", "IA"])
def test_every_block_is_right_where_the_imitation_has_some_noise(channels: int, left_out: str | None) -> None:
    images, size = photographs(channels), (channels, 16, 16)
    steps = [step for step in EtcParams().order(channels) if step.value != left_out]
    true = scrambling_of(draw_keys(Streams(b"device"), size), size, steps)
    made = unit_pixels(true.encrypt(images))
    found = estimated_scrambling(unit_pixels(images), made + 0.05 * torch.randn(made.shape, generator=STREAM), 4)
    others = photographs(channels)
    assert torch.equal(found.encrypt(others), true.encrypt(others))


def test_a_generator_that_imitates_nothing_shows_no_more_than_chance() -> None:
    images, size = photographs(1), (1, 16, 16)
    true = scrambling_of(draw_keys(Streams(b"device"), size), size, EtcParams().order(1))
    found = estimated_scrambling(unit_pixels(images), torch.rand(images.shape, generator=STREAM), 4)
    assert (found.source == true.source).float().mean() < 0.2
