"""Private steps against a loop over single images, what they cover, what is refused, and what is spent."""

import importlib.util
import json
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from torch import nn

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import DataError, PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import Spent, after_round, check_dp_sgd, poisson_batches, private_steps
from fedcg.learning.mechanisms.protected_round import check_mechanisms, protected_round
from fedcg.learning.method import Aggregate, ClientState, LocalResult, Machine, RoundContext, TrainingParams
from fedcg.learning.methods import fedcg, fedgen, fedprox
from fedcg.learning.networks import build_part, load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import Penalty, dropped, train_classifier
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import GREY, bright_images, context, plan, plan_of, quick_spec, same_parts
from tests.support.learning.networks import GivenFeatures

PRIVATE = PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1.1}})


def private_spec(name: str, split: str = "lenet5_relu", **params: ParameterValue) -> FederationSpec:
    network = NetworkChoice(noise_dim=8, split=split, discriminator="mlp_plain")
    return complete_spec(plan_of(name, network, GREY, params))


def private_context(spec: FederationSpec, privacy: PrivacySettings = PRIVATE, root: bytes = b"device") -> RoundContext:
    return replace(context(spec, root=root), privacy=privacy)


def private_round(
    spec: FederationSpec, data: ImageSet, privacy: PrivacySettings = PRIVATE, root: bytes = b"device"
) -> LocalResult:
    method, initial = get_method(spec.method), initial_parts(spec, b"cohort")
    state, aggregate = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    return protected_round(method, state, data, aggregate, private_context(spec, privacy, root))


def penalty_for(name: str, nets: dict[Part, nn.Module], ctx: RoundContext) -> Penalty | None:
    if name == "fedcg":
        return fedcg.feature_penalty(nets[Part.GENERATOR], 0.7, ctx)
    if name == "fedgen":
        return fedgen.replay_penalty(nets, fedgen.FedgenParams(replay=0.5), ctx)
    if name == "fedprox":
        return fedprox.proximal(nets, fedprox.FedproxParams(mu=0.8), ctx)
    return None


@pytest.mark.parametrize("split", ["lenet5", "lenet5_relu"])
@pytest.mark.parametrize("name", ["fedavg", "fedcg", "fedgen", "fedprox"])
def test_two_images_step_as_a_loop_over_single_ones(name: str, split: str) -> None:
    """w - lr * (sum_i g_i * min(1, clip / |g_i|) / 2 + gradient of a penalty on weights); |g_i| over extractor and classifier."""
    clip, lr = 0.5, 0.3
    spec = private_spec(name, split, steps=1, batch_size=2, optimiser="sgd", lr=lr, weight_decay=0.0)
    data = bright_images(2, 3)
    without_noise = DpSgdSettings.model_construct(noise_multiplier=0.0, clip=clip, delta=1e-5, budget_epsilon=None)
    ctx = private_context(spec, PrivacySettings.model_construct(dp_sgd=without_noise))
    parts = initial_parts(spec, b"cohort")

    def fresh() -> dict[Part, nn.Module]:
        return {part: load_part(spec, part, parts[part]) for part in sorted(parts)}

    ours, theirs = fresh(), fresh()
    anchor = penalty_for(name, ours, ctx)
    weights = [weight for part in (Part.EXTRACTOR, Part.CLASSIFIER) for weight in theirs[part].parameters()]
    if name == "fedprox":  # away from where the penalty on weights is 0
        with torch.no_grad():
            for part in (Part.EXTRACTOR, Part.CLASSIFIER):
                for weight in [*ours[part].parameters(), *theirs[part].parameters()]:
                    weight.add_(0.01)
    params = TrainingParams(steps=1, batch_size=2, optimiser="sgd", lr=lr, weight_decay=0.0)
    train_classifier(ours[Part.EXTRACTOR], ours[Part.CLASSIFIER], data, params, ctx, anchor)
    noise = torch.randn(2, 8, generator=ctx.streams.generator("classify", "noise"))
    total = [torch.zeros_like(weight) for weight in weights]
    norms = []
    for row in range(2):
        image, label = normalise(data.images[row : row + 1], spec.image), data.labels[row : row + 1]
        features = theirs[Part.EXTRACTOR](image)
        loss = F.cross_entropy(theirs[Part.CLASSIFIER](features), label)
        if name in {"fedcg", "fedgen"}:
            made = theirs[Part.GENERATOR].eval()(noise[row : row + 1], label).detach()
            extra = (features - made).square().mean() * 0.7
            loss = loss + (extra if name == "fedcg" else 0.5 * F.cross_entropy(theirs[Part.CLASSIFIER](made), label))
        gradients = torch.autograd.grad(loss, weights)
        norms.append(float(torch.cat([one.flatten() for one in gradients]).norm()))
        for sum_, one in zip(total, gradients, strict=True):
            sum_ += one * min(1.0, clip / norms[-1]) / 2
    if name == "fedprox":
        total = [sum_ + 0.8 * 0.01 for sum_ in total]
    assert max(norms) > clip  # else nothing was clipped
    mine = [weight for part in (Part.EXTRACTOR, Part.CLASSIFIER) for weight in ours[part].parameters()]
    for own, weight, sum_ in zip(mine, weights, total, strict=True):
        assert torch.allclose(own, weight - lr * sum_, atol=2e-6)
        assert not hasattr(own, "grad_sample")  # nothing of Opacus is left


def test_a_step_without_images_is_noise_of_sigma_times_clip_over_the_expected_rows() -> None:
    layer = nn.Linear(100, 200)
    before = layer.weight.detach().clone()
    settings = DpSgdSettings(noise_multiplier=1.5, clip=2.0)
    with private_steps([layer], torch.optim.SGD(layer.parameters(), lr=1.0), settings, 4.0, seed=1) as steps:
        steps.step(0)
    moved = (layer.weight - before).detach()
    assert float(moved.std()) == pytest.approx(1.5 * 2.0 / 4.0, rel=0.03)
    assert float(moved.mean()) == pytest.approx(0.0, abs=0.02)


def test_every_image_is_in_a_batch_with_the_same_probability_whatever_the_others() -> None:
    batches = list(poisson_batches(50, 0.1, 2000, torch.Generator().manual_seed(0)))
    sizes = torch.tensor([float(len(batch)) for batch in batches])
    # Binomial(50, 0.1): mean 5, variance 4.5; and 0.9^50 = 0.5 % of the batches are empty.
    assert float(sizes.mean()) == pytest.approx(5.0, abs=0.15)
    assert float(sizes.var()) == pytest.approx(4.5, rel=0.1)
    assert 2 <= int((sizes == 0).sum()) <= 25
    assert float((torch.bincount(torch.cat(batches), minlength=50) / 2000 - 0.1).abs().max()) < 0.03


def test_one_image_more_moves_extractor_and_classifier_by_at_most_its_clipped_share() -> None:
    # One step with all 8 images at lr 1, no noise to speak of: exchanging an image moves the weights by at most 2 * clip / 8.
    clip = 0.01
    privacy = PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1e-9, "clip": clip}})
    spec = private_spec("fedavg", steps=1, batch_size=8, optimiser="sgd", lr=1.0, weight_decay=0.0)
    data = bright_images(8, 0)
    other = ImageSet(data.images.clone(), data.labels.clone(), data.classes)
    other.images[0], other.labels[0] = 255 - other.images[0], 2
    one, two = (private_round(spec, some, privacy).shared.parts for some in (data, other))
    apart = torch.cat([(one[part][name] - two[part][name]).flatten() for part in one for name in one[part]])
    assert 0.0 < float(apart.norm()) <= 2 * clip / 8 * 1.001


def test_the_generator_learns_of_the_images_through_the_private_discriminator_alone() -> None:
    # With a clip of next to nothing the discriminator learns nothing of real rows: whatever they are, the generator is the same.
    def trained(features: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        spec = private_spec("fedcg")
        privacy = PrivacySettings.model_validate({"dp_sgd": {"noise_multiplier": 1e-3, "clip": clip}})
        generator, judge = (
            build_part(spec, part, torch.Generator().manual_seed(1)) for part in (Part.GENERATOR, Part.DISCRIMINATOR)
        )
        source = cast("FeatureSource", GivenFeatures(features, labels))
        params = fedcg.FedcgParams.model_validate({**spec.params, "epochs": 3})
        ctx = private_context(spec, privacy)
        run_stage(fedcg.adversarial(generator, judge, source, params, ctx), ctx)
        return torch.cat([weight.detach().flatten() for weight in generator.parameters()])

    shape = (24, 16, 1, 1)
    one = torch.zeros(shape), torch.zeros(24, dtype=torch.int64)
    two = torch.ones(shape), torch.full((24,), 2)
    assert torch.allclose(trained(*one, 1e-9), trained(*two, 1e-9), atol=1e-3)
    assert not torch.allclose(trained(*one, 10.0), trained(*two, 10.0), atol=1e-3)


@pytest.mark.parametrize("name", [name for name in method_names() if get_method(name).private_stages])
def test_a_private_round_repeats_bit_for_bit_and_leaves_the_global_random_state(name: str) -> None:
    spec, data = private_spec(name), bright_images(20, 1)
    torch.manual_seed(1)
    first = private_round(spec, data)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = private_round(spec, data)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_parts(first.private.parts, second.private.parts)
    assert first.report == second.report
    if Part.CLASSIFIER in first.shared.parts:  # another device has other noise
        assert not same_parts(first.shared.parts, private_round(spec, data, root=b"other").shared.parts)


def test_a_private_round_of_a_method_needs_an_image_and_no_more() -> None:
    spec = private_spec("fedavg")
    assert private_round(spec, bright_images(1, 0)).report.examples == 1
    with pytest.raises(DataError, match="no images"):
        private_round(spec, bright_images(1, 0).rows([]))


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (NetworkChoice(split="cnn_bn", discriminator="mlp_plain"), r"network\.split = cnn_bn: BatchNorm2d .*lenet5"),
        (
            NetworkChoice(discriminator="mlp"),
            r"network\.discriminator = mlp: SingularVectors .*mlp_plain or conv_plain",
        ),
        (NetworkChoice(discriminator="conv_published"), r"network\.discriminator = conv_published"),
    ],
)
def test_networks_without_a_gradient_for_each_image_are_refused(network: NetworkChoice, reason: str) -> None:
    spec = complete_spec(plan("fedcg", network))
    with pytest.raises(PrivacyError, match=reason):
        private_round(spec, bright_images(8, 0))
    if network.split != "cnn_bn":  # a method without a discriminator does not mind
        check_mechanisms(complete_spec(plan("fedavg", network)), get_method("fedavg"), PRIVATE)


def test_a_method_that_trains_another_network_on_images_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"dp_sgd can't cover fedmd_cg: .* fedavg, fedcg, .*local"):
        private_round(private_spec("fedmd_cg"), bright_images(8, 0))


def test_without_opacus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "opacus" else found(name))
    with pytest.raises(PrivacyError, match=r"pip install 'fedcg-edge\[privacy\]'"):
        check_dp_sgd(private_spec("fedavg"), get_method("fedavg"))


@pytest.mark.parametrize("name", ["fedcg", "fedmd_cg"])
def test_gradient_noise_and_dropout_change_every_stage_and_repeat(name: str) -> None:
    spec, data = quick_spec(name), bright_images(20, 1)
    plain = private_round(spec, data, PrivacySettings())
    for privacy in (PrivacySettings(gradient_noise=0.05), PrivacySettings(dropout=0.5)):
        first, second = private_round(spec, data, privacy), private_round(spec, data, privacy)
        assert same_parts(first.private.parts, second.private.parts)
        assert first.report.loss != plain.report.loss
        for part in first.private.parts:
            assert not same_parts({part: first.private.parts[part]}, {part: plain.private.parts[part]})


@pytest.mark.parametrize(
    ("privacy", "graphs"),
    [(PRIVATE, False), (PrivacySettings(gradient_noise=0.1), False), (PrivacySettings(update_clip=1.0), True)],
)
def test_steps_with_own_noise_run_without_graphs(privacy: PrivacySettings, graphs: bool) -> None:
    seen: list[Machine] = []
    spec, method = private_spec("fedavg"), get_method("fedavg")

    def spy(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
        seen.append(ctx.machine)
        return method.local_round(state, data, aggregate, replace(ctx, machine=Machine()))

    initial, ctx = initial_parts(spec, b"cohort"), private_context(spec, privacy)
    state, aggregate = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    protected_round(replace(method, local_round=spy), state, bright_images(8, 0), aggregate, ctx)
    assert [one.graphs for one in seen] == [graphs]


def test_dropout_hides_a_share_of_the_features_from_the_classifier() -> None:
    features = torch.ones(100, 100)
    kept = dropped(features, 0.3)
    assert float((kept == 0).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(kept.max()) == pytest.approx(1 / 0.7)
    assert dropped(features, 0.0) is features


SETTINGS = DpSgdSettings(noise_multiplier=1.1)


def test_epsilon_is_the_figure_that_opacus_counts_step_by_step() -> None:
    theirs = RDPAccountant()
    for _ in range(40):
        theirs.step(noise_multiplier=1.1, sample_rate=0.05)
    for _ in range(20):
        theirs.step(noise_multiplier=0.8, sample_rate=0.1)
    other = DpSgdSettings(noise_multiplier=0.8)
    spent = Spent().with_round(SETTINGS, 0.05, 30).with_round(other, 0.1, 20).with_round(SETTINGS, 0.05, 10)
    assert spent.entries == ((1.1, 0.05, 40), (0.8, 0.1, 20))
    assert spent.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=1e-12)
    assert spent.epsilon(1e-5) > spent.epsilon(1e-3) > 0.0
    assert Spent().epsilon(1e-5) == 0.0


def test_a_round_counts_the_steps_of_every_stage() -> None:
    # 20 images in batches of 8 expected: rate 0.4, ceil(20 / 8) = 3 steps an epoch, 2 epochs; FedCG trains its discriminator as long.
    params = TrainingParams(epochs=2, batch_size=8)
    spent = after_round(Spent(), SETTINGS, get_method("fedavg"), params, 20)
    assert spent.entries == ((1.1, 0.4, 6),)
    assert after_round(spent, SETTINGS, get_method("fedcg"), params, 20).entries == ((1.1, 0.4, 18),)
    few = after_round(Spent(), SETTINGS, get_method("fedavg"), params.model_copy(update={"steps": 5}), 3)
    assert few.entries == ((1.1, 1.0, 5),)
    assert after_round(Spent(), SETTINGS, get_method("fedavg"), params, 0) == Spent()


def test_a_budget_is_exceeded_by_what_would_be_spent() -> None:
    spent = Spent().with_round(SETTINGS, 0.1, 100)
    epsilon = spent.epsilon(SETTINGS.delta)
    assert not spent.exceeds(SETTINGS)
    assert not spent.exceeds(SETTINGS.model_copy(update={"budget_epsilon": epsilon}))
    assert spent.exceeds(SETTINGS.model_copy(update={"budget_epsilon": 0.999 * epsilon}))


entries = st.lists(st.tuples(st.floats(0.01, 100), st.floats(1e-6, 1.0), st.integers(1, 10**6)), max_size=5)


@given(entries)
def test_what_is_spent_is_read_back_as_it_was_written(some: list[tuple[float, float, int]]) -> None:
    spent = Spent(tuple(some))
    assert Spent.from_json(spent.to_json()) == spent


ONE = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 1}
WRONG: list[dict[str, float]] = [{"sample_rate": 1.5}, {"noise_multiplier": 0.0}, {"steps": -1}, {"x": 0}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "spent": []}',
        '{"format": 1}',
        *(json.dumps({"format": 1, "spent": [{**ONE, **change}]}) for change in WRONG),
    ],
)
def test_what_is_no_record_of_spending_is_never_read_as_nothing_spent(text: str) -> None:
    with pytest.raises(PrivacyError, match="not a record of spent privacy"):
        Spent.from_json(text)
