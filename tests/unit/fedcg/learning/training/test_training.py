"""Crops and mirrors of training images, optimisers without torch's compiler, and the moving average of a client's networks."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcg.learning.networks import build_part
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.simulation import Schedule, simulate
from fedcg.learning.spec import ImageForm
from fedcg.learning.training import batches
from fedcg.learning.training.evaluation import evaluate
from fedcg.learning.training.optimisers import SGD, Adam
from fedcg.learning.training.stage import MovingAverage, averaged_parts
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.present import present

STREAMS = Streams(b"x")


def one_by_one(images: torch.Tensor, augmentation: batches.Augmentation) -> torch.Tensor:
    """What `apply` should give, pixel by pixel in plain Python."""
    crop = augmentation.spec.augment_crop
    result = torch.zeros_like(images)
    height, width = images.shape[2:]
    for number, (top, left, mirrored) in enumerate(augmentation.choices.tolist()):
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + top - crop, (width - 1 - x if mirrored else x) + left - crop
                if 0 <= from_y < height and 0 <= from_x < width:
                    result[number, :, y, x] = images[number, :, from_y, from_x]
    return result


def test_a_window_reaches_into_black_padding_and_is_mirrored_after_it_is_cut_out() -> None:
    spec = cases.quick_spec("local", augment_flip=True, augment_crop=1)
    images = torch.arange(1, 5, dtype=torch.uint8).view(1, 1, 2, 2).repeat(3, 1, 1, 1)
    # 1 2 and 3 4 with a black frame; (1, 1) is the image itself, (0, 2) lies one up and one to the right: 0 0 and 2 0.
    cropped = batches.Augmentation(spec, torch.tensor([[1, 1, 0], [0, 2, 0], [0, 2, 1]])).apply(images)
    assert cropped.dtype == torch.uint8
    assert cropped.squeeze(1).tolist() == [[[1, 2], [3, 4]], [[0, 0], [2, 0]], [[0, 0], [0, 2]]]


@pytest.mark.parametrize("flip", [False, True])
def test_a_block_of_images_is_augmented_as_one_image_after_the_other(*, flip: bool) -> None:
    wide = ImageForm(mode="RGB", height=16, width=20, mean=(0.5,) * 3, std=(0.25,) * 3)
    asked = {"augment_flip": flip, "augment_crop": 3}
    spec = complete_spec(cases.plan("local", image=wide).model_copy(update=asked))
    images = torch.randint(0, 256, (12, 3, 16, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augmentation = batches.Augmenter(spec, STREAMS).draw(12)
    done = augmentation.apply(images)
    assert torch.equal(done, one_by_one(images, augmentation))
    assert not torch.equal(done, images)
    assert torch.equal(augmentation[slice(4, 9)].apply(images[4:9]), done[4:9])


def test_every_window_is_as_likely_as_any_other() -> None:
    choices = batches.Augmenter(cases.quick_spec("local", augment_crop=2), STREAMS).draw(10_000).choices
    for offsets in choices[:, :2].unbind(1):  # 2,000 of each, with a standard deviation of 40
        counts = torch.bincount(offsets)
        assert len(counts) == 5
        assert float((counts - 2000).abs().max()) < 200
    assert len(choices[:, :2].unique(dim=0)) == 25
    assert not choices[:, 2].any()


def test_features_of_crops_are_computed_as_they_are_drawn_however_many_are_asked_for() -> None:
    data, spec = cases.bright_images(40, 1), cases.quick_spec("fedmd_cg", augment_flip=True, augment_crop=2)
    extractor = build_part(spec, Part.EXTRACTOR, torch.Generator().manual_seed(3))
    index = torch.tensor([5, 0, 5, 31])
    rows = one_by_one(data.images[index], batches.Augmenter(spec, STREAMS).draw(len(index)))
    expected = batches.extract_features(extractor, rows, spec)
    for draws in (4, 1000, None):
        features, labels = batches.FeatureSource(extractor, data, spec, draws).rows(
            index, batches.Augmenter(spec, STREAMS)
        )
        torch.testing.assert_close(features, expected)
        assert labels.tolist() == data.labels[index].tolist()


ROOT = Path(__file__).parents[5]
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adam": (lambda w: Adam(w, lr=0.1, weight_decay=0.01), lambda w: torch.optim.Adam(w, lr=0.1, weight_decay=0.01)),
    "fused adam": (lambda w: Adam(w, lr=0.1, fused=True), lambda w: torch.optim.Adam(w, lr=0.1, fused=True)),
    "sgd": (lambda w: SGD(w, lr=0.1, weight_decay=0.01), lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.01)),
    "momentum": (lambda w: SGD(w, lr=0.1, momentum=0.9), lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9)),
}

# Two clients train one round with every method, their updates are merged, and everybody is evaluated; with what a box's trainer and
# a coordinator's worker import beside.
TRAINS = """
import sys
import coordinator.aggregation.worker, coordinator.aggregation.server_state, edge_client.training.trainer_child
from fedcg.learning.registry import method_names
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import simulate
from fedcg.learning.simulation.simulation import Schedule
from tests.support.learning.learning_cases import bright_images, quick_spec, roots_from_seed
data = {name: ClientData(*(bright_images(12, seed) for seed in (1, 2, 3))) for name in "ab"}
names = set(method_names()) - {"analytic"}  # whose backbone is timm's, which imports it
for method, optimiser in [*((name, "adam") for name in sorted(names)), ("fedmd_cg", "sgd")]:
    spec, public = quick_spec(method, optimiser=optimiser, epochs=1), bright_images(10, 77).images
    simulate(Party(spec, data, roots_from_seed(0, tuple("ab")), public=public), Schedule(rounds=3 if method == "fedseal" else 1, shadow=False))
print(*sorted({"torch._dynamo", "sympy"} & sys.modules.keys()))
"""


def trained(make: Make) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Weights after five steps, the rate halved after two, and the optimiser replaced by its saved state after three."""
    stream = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=stream).requires_grad_() for shape in ((4, 3), (7,))]
    optimiser = make(weights)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=2, gamma=0.5)
    for step in range(5):
        if step == 3:
            saved, optimiser = optimiser.state_dict(), make(weights)
            optimiser.load_state_dict(saved)
        optimiser.zero_grad()
        (weights[0].pow(3).sum() + weights[1].sin().sum()).backward()
        optimiser.step()
        if step < 3:
            schedule.step()
    return weights, optimiser


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimiser_without_the_compiler_takes_torchs_own_steps_bit_for_bit(name: str) -> None:
    (ours, mine), (theirs, torchs) = (trained(make) for make in PAIRS[name])
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not any(weight.grad_fn for weight in ours)
    assert mine.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] == 0.05


@pytest.mark.slow
def test_a_process_that_trains_and_merges_never_imports_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("decay", "expected"),
    # The first step keeps 2/11 of 0 and takes 9/11 of 1; the second keeps 3/12 of that, or the decay where it is less, and takes the rest of 2.
    [(0.998, 0.25 * 9 / 11 + 0.75 * 2), (0.2, 0.2 * 9 / 11 + 0.8 * 2)],
)
def test_the_average_keeps_more_of_itself_from_step_to_step_up_to_the_decay(decay: float, expected: float) -> None:
    net = nn.BatchNorm1d(1)
    nn.init.zeros_(net.weight)
    average = MovingAverage({Part.CLASSIFIER: net}, decay)
    for value in (1.0, 2.0):
        nn.init.constant_(net.weight, value)
        net.get_buffer("running_mean").fill_(10 * value)
        average()
    parts = present(averaged_parts(average.extras()))
    assert parts[Part.CLASSIFIER]["weight"].item() == pytest.approx(expected)
    assert parts[Part.CLASSIFIER]["running_mean"].item() == 20.0  # a buffer is as it is
    assert net.weight.item() == 2.0


@pytest.mark.parametrize("name", [name for name in method_names() if name != "analytic"])  # which trains nothing
def test_a_round_with_an_average_sends_and_keeps_the_same_and_has_the_averaged_model_beside_it(name: str) -> None:
    spec = cases.quick_spec(name)
    data = cases.bright_images(24, 0, form=spec.image)
    plain, averaged = (cases.local_round_of(cases.quick_spec(name, ema=ema), data) for ema in (0.0, 0.9))
    assert cases.same_parts(plain.shared.parts, averaged.shared.parts)
    assert cases.same_parts(plain.private.parts, averaged.private.parts)
    assert averaged_parts(plain.private.extras) is None
    found = present(averaged_parts(averaged.private.extras))
    assert found.keys() == get_method(name).personal.parts
    assert not any(cases.same(weights, averaged.private.parts[part]) for part, weights in found.items())
    assert evaluate(spec, found, data).images == 24


def test_a_simulation_measures_the_average_where_there_is_one() -> None:
    party = cases.party_of("fedsplit", cases.NAMES)
    with_average = replace(party, spec=party.spec.model_copy(update={"params": {**party.spec.params, "ema": 0.9}}))
    plain, averaged = (simulate(one, Schedule(rounds=1)).curves["a"][0] for one in (party, with_average))
    assert plain.accuracy_ema is None
    assert averaged.accuracy_ema is not None
    assert averaged.accuracy == plain.accuracy
