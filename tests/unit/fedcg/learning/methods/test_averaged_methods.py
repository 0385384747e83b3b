"""The averaging family against hand-worked numbers: who is averaged, what stays, penalties, FedDF's and FedGen's servers."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation.distillation import Bank, draw_bank
from fedcg.learning.errors import DataError, PrivacyError
from fedcg.learning.method import Aggregate, Update, Weights
from fedcg.learning.methods import feddf, fedgen, fedprox
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import ParameterValue
from fedcg.learning.training.classification import Penalty, with_downloaded_classifier
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import ARITHMETIC, FIRST, SECOND, Answer, Scale, drawn, on_labels
from tests.support.present import present

STILL = 1e-30  # a learning rate at which nothing moves, so that a student's start shows
SHARING = [name for name in method_names() if get_method(name).payload.up - {Part.STATISTICS}]


def shifted(parts: Mapping[Part, Weights], shift: float) -> dict[Part, Weights]:
    """Every floating-point tensor, parameter or running statistic, moved by a constant; counters set to it."""
    return {
        part: {
            name: tensor + shift if tensor.is_floating_point() else torch.full_like(tensor, int(shift))
            for name, tensor in weights.items()
        }
        for part, weights in parts.items()
    }


@pytest.mark.parametrize("name", SHARING)
def test_the_average_is_weighted_over_the_clients_that_are_present(name: str) -> None:
    # a (1 image) at start + 1, b (3 images) at start + 5; c, with 96 images, was invited and is absent:
    # start + (1 * 1 + 3 * 5) / 4 = start + 4. Counters, which nothing computes with, take the largest: 5.
    still: dict[str, ParameterValue] = {"weight_decay": 0.0}
    if "server_lr" in get_method(name).params_type.model_fields:
        still |= {"server_lr": STILL, "server_iterations": 1}
    spec, method = cases.quick_spec(name, **still), get_method(name)
    start = initial_parts(spec, b"cohort")
    up = {part: start[part] for part in method.payload.up}
    updates = {
        client: Update(client, shifted(up, shift), images, (images, 0, 0))
        for client, shift, images in (("a", 1.0, 1), ("b", 5.0, 3), ("c", 50.0, 96))
    }
    merge = cases.aggregator_of(spec)
    merge.add(updates["c"])
    merge.add(updates["b"])
    aggregate, _ = merge.finish(cases.loaders(updates, "a", "b"))
    for part in method.payload.up - {Part.STATISTICS} - method.payload.sealed:  # sums have tests of their own
        for key, tensor in aggregate.parts[part].items():
            # a student's BatchNorm sees the batches it distils on
            statistic = "running_" in key and "server_lr" in still
            if tensor.is_floating_point() and not statistic:
                assert torch.allclose(tensor, start[part][key] + 4.0, atol=1e-5), key
            elif not tensor.is_floating_point():
                assert tensor.item() in (5, 6), key


@pytest.mark.parametrize(
    ("name", "up", "kept"),
    [
        ("local", set(), {Part.EXTRACTOR, Part.CLASSIFIER}),
        ("fedavg", {Part.EXTRACTOR, Part.CLASSIFIER}, set()),
        ("fedprox", {Part.EXTRACTOR, Part.CLASSIFIER}, set()),
        ("feddf", {Part.EXTRACTOR, Part.CLASSIFIER}, set()),
        ("fedsplit", {Part.CLASSIFIER}, {Part.EXTRACTOR}),
        ("fedper", {Part.EXTRACTOR}, {Part.CLASSIFIER}),
        ("fedgen", {Part.CLASSIFIER}, {Part.EXTRACTOR}),
    ],
)
def test_a_client_trains_from_what_came_down_and_from_what_it_kept(name: str, up: set[Part], kept: set[Part]) -> None:
    spec, method = cases.quick_spec(name, lr=STILL, weight_decay=0.0), get_method(name)
    assert set(method.payload.up) == up
    assert set(method.payload.private) == kept
    assert set(method.payload.down) == (up | {Part.GENERATOR} if name == "fedgen" else up)
    initial = initial_parts(spec, b"cohort")
    own, came = shifted(initial, 0.01), shifted(initial, 0.02)
    state = method.init_client(spec, own)
    incoming = Aggregate({part: came[part] for part in method.payload.down})
    result = method.local_round(state, cases.bright_images(24, 0), incoming, cases.context(spec))
    for part, weights in result.private.parts.items():
        assert cases.same(weights, (own if part in kept else came)[part]), part


def test_the_proximal_term_is_half_mu_times_the_sum_of_squares_over_all_shared_parameters() -> None:
    # Six weights of the extractor move by 0.5 and two of the classifier by -1: 0.8 / 2 * (6 * 0.25 + 2 * 1) = 1.4
    extractor, classifier = nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)
    nets = {Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier}
    ctx = cases.context(cases.quick_spec("fedprox"))
    term = fedprox.proximal(nets, fedprox.FedproxParams(mu=0.8), ctx)
    penalty = on_labels(term, [0, 1], extractor=extractor, classifier=classifier)
    assert not present(term).of_rows
    nothing = torch.zeros(2, 2)
    assert penalty(slice(0, 2), nothing, nothing).item() == 0.0
    with torch.no_grad():
        extractor.weight.add_(0.5)
        classifier.weight.sub_(1.0)
    value = penalty(slice(0, 2), nothing, nothing)
    assert value.item() == pytest.approx(1.4)
    value.backward()  # mu * (w - w_global)
    for net, slope in ((extractor, 0.4), (classifier, -0.8)):
        assert torch.allclose(present(net.weight.grad), torch.tensor(slope))
    assert fedprox.proximal(nets, fedprox.FedproxParams(mu=0.0), ctx) is None


def test_the_auxiliary_loss_is_the_cross_entropy_through_the_downloaded_classifier_beside_other_penalties() -> None:
    # Logits are the features times the weight: of (1, 0) with weight 2, (2, 0), so class 0 has the loss log(1 + e^-2).
    classifier, ctx = Scale(2.0), replace(cases.context(cases.quick_spec("fedsplit")), round=2)
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    own = Penalty(lambda nets, features, logits: torch.tensor(0.6))
    term = with_downloaded_classifier(own, classifier, 0.5, ctx)
    penalty = on_labels(term, [0, 1], classifier=classifier)
    assert present(term).of_rows
    with torch.no_grad():
        classifier.weight.fill_(9.0)  # it is trained meanwhile
    value = penalty(slice(0, 2), features, features)
    assert value.item() == pytest.approx(0.6 + 0.5 * math.log(1 + math.exp(-2)))
    value.backward()
    assert present(features.grad).abs().sum() > 0
    assert classifier.weight.grad is None


def test_a_penalty_on_weights_beside_the_auxiliary_loss_can_not_be_had_with_dp_sgd() -> None:
    nets = {Part.EXTRACTOR: nn.Linear(3, 2), Part.CLASSIFIER: nn.Linear(2, 2)}
    private = PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0, clip=1.0))
    ctx = replace(cases.context(cases.quick_spec("fedprox")), round=2, privacy=private)
    own = fedprox.proximal(nets, fedprox.FedproxParams(mu=0.8), ctx)
    with pytest.raises(PrivacyError, match="aux"):
        with_downloaded_classifier(own, nets[Part.CLASSIFIER], 0.5, ctx)


@pytest.mark.parametrize("name", ["fedsplit", "fedavg", "fedcg"])
def test_the_auxiliary_loss_changes_a_round_from_the_second_on(name: str) -> None:
    data, results = cases.bright_images(24, 0), {}
    for aux in (0.0, 1.0):
        spec = cases.quick_spec(name, aux=aux)
        method = get_method(name)
        initial = initial_parts(spec, b"cohort")
        came = Aggregate({part: shifted(initial, 0.02)[part] for part in method.payload.down})
        for number in (1, 2):
            ctx = replace(cases.context(spec), round=number)
            results[aux, number] = method.local_round(method.init_client(spec, initial), data, came, ctx).private.parts
    extractors = {key: parts[Part.EXTRACTOR] for key, parts in results.items()}
    assert cases.same(extractors[0.0, 1], extractors[1.0, 1])
    assert not cases.same(extractors[0.0, 2], extractors[1.0, 2])


def test_momentum_is_of_the_classifier_alone_and_kept_with_the_round() -> None:
    spec = cases.quick_spec("fedavg", server_momentum=0.5)
    start, method = initial_parts(spec, b"cohort"), get_method("fedavg")
    state = method.init_server(spec, start)
    for number, shift in ((1, 2.0), (2, 3.0)):
        updates = {"a": Update("a", shifted(start, shift), 3)}
        _, state = method.aggregator(state, cases.context(spec, number), MemorySpill()).finish(cases.loaders(updates))
    for part, moved in ((Part.EXTRACTOR, 3.0), (Part.CLASSIFIER, 4.0)):  # 2 + (1 + 0.5 * 2)
        for name, tensor in state.aggregate.parts[part].items():
            assert torch.allclose(tensor, start[part][name] + moved, atol=1e-5), name


class Flat(nn.Module):
    """An extractor that looks at nothing: one feature, 0, per image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(images), 1)


@pytest.mark.parametrize(
    ("spilled", "answer"),
    [
        # One answer to three images of FIRST and one of SECOND: KL(ensemble || student) is least at the arithmetic mean;
        # KL(student || ensemble) would settle at the normalised geometric one, (0.75, 0.125, 0.125).
        ({"a": (torch.tensor([FIRST, FIRST, SECOND, FIRST]).log(), 5)}, ARITHMETIC),
        # 1 and 3 images, logits (4, 0, 0) and (0, 4, 0): softmax (1, 3, 0) = (e, e^3, 1) / 23.8038 = (0.1142, 0.8438, 0.0420)
        (
            {"a": (torch.tensor([[4.0, 0.0, 0.0]] * 4), 1), "b": (torch.tensor([[0.0, 4.0, 0.0]] * 4), 3)},
            (0.1142, 0.8438, 0.0420),
        ),
    ],
    ids=["the direction of the divergence", "weights by images"],
)
def test_feddf_settles_where_the_divergence_from_the_weighted_ensemble_to_the_student_is_least(
    monkeypatch: pytest.MonkeyPatch, spilled: Mapping[str, tuple[torch.Tensor, int]], answer: tuple[float, ...]
) -> None:
    nets = {Part.EXTRACTOR: Flat(), Part.CLASSIFIER: nn.Linear(1, 3)}  # of which the bias alone is trained
    nn.init.zeros_(nets[Part.CLASSIFIER].get_parameter("bias"))
    monkeypatch.setattr(feddf, "load_part", lambda spec, part, weights, device: nets[part])
    spec = cases.quick_spec("feddf", server_iterations=600, server_lr=0.02, weight_decay=0.0)
    spill = MemorySpill()
    for client, (logits, _) in spilled.items():
        spill.put(client, {"logits": logits})
    ctx = replace(cases.context(spec), public=cases.bright_images(4, 0).images)
    empty: Mapping[Part, Weights] = {part: {"w": torch.zeros(1)} for part in nets}
    updates = {client: Update(client, empty, size) for client, (_, size) in spilled.items()}
    merge = feddf.aggregator(get_method("feddf").init_server(spec, initial_parts(spec, b"c")), ctx, spill)
    merge.finish(cases.loaders(updates))
    settled = nets[Part.CLASSIFIER](torch.zeros(1, 1)).softmax(1)[0].tolist()
    assert settled == pytest.approx(answer, abs=0.02)


def test_a_teacher_of_feddf_answers_for_the_public_images_that_the_round_uses_normalised_and_in_eval_mode() -> None:
    spec, method = cases.quick_spec("feddf", server_iterations=1, server_batch=4), get_method("feddf")
    ctx, spill, start = cases.context(spec, root=b"coordinator"), MemorySpill(), initial_parts(spec, b"cohort")
    method.aggregator(method.init_server(spec, start), ctx, spill).add(Update("a", start, 3))
    used = feddf.public_order(10, 4, ctx.streams).unique()
    images = (present(ctx.public)[used].to(torch.float32) / 255.0 - 0.5) / 0.25
    extractor, classifier = (load_part(spec, part, start[part]).eval() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    assert len(used) == 4
    assert torch.allclose(spill.get("a")["logits"], classifier(extractor(images)).detach(), atol=1e-5)


def test_public_images_come_in_shuffled_epochs() -> None:
    order = feddf.public_order(5, 12, Streams(b"x"))
    assert sorted(order[:5].tolist()) == sorted(order[5:10].tolist()) == [0, 1, 2, 3, 4]
    assert len(order) == 12
    assert order[:5].tolist() != order[5:10].tolist()


def test_feddf_without_public_images_says_what_to_configure() -> None:
    spec = cases.quick_spec("feddf")
    for nothing in (None, torch.zeros(0, 1, 16, 16, dtype=torch.uint8)):
        with pytest.raises(DataError, match=r"aggregation\.public_data"):
            cases.aggregator_of(spec, replace(cases.context(spec), public=nothing))


def test_fedgens_generator_is_judged_by_the_weighted_sum_of_the_clients_logits_and_by_its_diversity() -> None:
    # Classifiers "times 1" with a quarter of the data and "times 5" with the rest: logits = (1/4 + 15/4) features = 4 features.
    # Features (ln 3 / 4, 0) and (0, 0), both of label 0: logits (ln 3, 0) cost ln 4/3, (0, 0) cost ln 2.
    # Diversity: |feature difference| = (ln 3 / 4 + 0) / 2, |noise difference| = 1: 1 / (ln 3 / 8 + 1e-5).
    jury = [(0.25, Scale(1.0)), (0.75, Scale(5.0))]
    generator = Answer((math.log(3.0) / 4.0, 0.0), (0.0, 0.0))
    noise, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    expected = (math.log(4.0 / 3.0) + math.log(2.0)) / 2.0
    assert fedgen.generator_objective(generator, jury, noise, labels, 0.0).item() == pytest.approx(expected)
    spread = 1.0 / (math.log(3.0) / 8.0 + 1e-5)
    loss = fedgen.generator_objective(generator, jury, noise, labels, 0.1)
    assert loss.item() == pytest.approx(expected + 0.1 * spread)
    loss.backward()
    assert present(generator.value.grad).abs().sum() > 0


def test_fedgens_generator_learns_what_the_clients_classifiers_recognise() -> None:
    spec = cases.quick_spec("fedgen", server_iterations=120, server_lr=0.01, diversity=0.0)
    start = initial_parts(spec, b"cohort")
    updates = {client: Update(client, {Part.CLASSIFIER: start[Part.CLASSIFIER]}, 4) for client in ("a", "b")}
    aggregate, server = cases.aggregator_of(spec).finish(cases.loaders(updates))
    noise, labels = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    classifier = load_part(spec, Part.CLASSIFIER, start[Part.CLASSIFIER]).eval()
    losses = []
    for weights in (start[Part.GENERATOR], aggregate.parts[Part.GENERATOR]):
        generator = load_part(spec, Part.GENERATOR, weights).eval()
        losses.append(nn.functional.cross_entropy(classifier(generator(noise, labels)), labels).item())
    assert losses[1] < 0.6 * losses[0]
    assert cases.same(server.aggregate.parts[Part.GENERATOR], aggregate.parts[Part.GENERATOR])
    for key, tensor in aggregate.parts[Part.CLASSIFIER].items():
        assert torch.allclose(tensor, start[Part.CLASSIFIER][key], atol=1e-6), key


@pytest.mark.parametrize(("counts", "asked"), [((2, 0, 2), {0, 2}), (None, {0, 1, 2})])
def test_fedgens_generator_is_not_asked_for_a_label_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...] | None, asked: set[int]
) -> None:
    banks: list[Bank] = []

    def noted(streams: Streams, rows: int, noise_dim: int, probabilities: torch.Tensor) -> Bank:
        banks.append(draw_bank(streams, rows, noise_dim, probabilities))
        return banks[-1]

    monkeypatch.setattr("fedcg.learning.aggregation.distillation.draw_bank", noted)
    spec = cases.quick_spec("fedgen", server_iterations=20)
    start = initial_parts(spec, b"cohort")
    updates = {
        "a": Update("a", {Part.CLASSIFIER: start[Part.CLASSIFIER]}, 4, (4, 0, 0)),
        "b": Update("b", {Part.CLASSIFIER: start[Part.CLASSIFIER]}, 4, counts),
    }
    cases.merged(cases.aggregator_of(spec), updates, ())
    assert set(banks[0].labels.tolist()) == asked


def test_fedgens_clients_replay_classes_that_they_lack_when_labels_are_drawn_from_all() -> None:
    # Of 400 rows, all of label 1, about a third each become 0, 1 and 2.
    spec = cases.quick_spec("fedgen")
    nets = {Part.GENERATOR: Answer(0.0, math.log(3.0)), Part.CLASSIFIER: Scale(1.0)}
    uniform = fedgen.replay_penalty(nets, fedgen.FedgenParams(replay_labels="uniform"), cases.context(spec))
    _, labels = drawn(uniform, [1] * 400)
    assert all(torch.bincount(labels, minlength=spec.class_count) > 400 / spec.class_count * 0.7)
    _, kept = drawn(fedgen.replay_penalty(nets, fedgen.FedgenParams(), cases.context(spec)), [1] * 400)
    assert kept.tolist() == [1] * 400


def test_fedgens_clients_learn_from_generated_features_of_their_own_labels() -> None:
    # The generator answers (0, ln 3): a classifier "times 1" gives label 1 a probability of 3/4 and label 0 of 1/4.
    params, ctx = fedgen.FedgenParams(replay=0.5), cases.context(cases.quick_spec("fedgen"))
    classifier = Scale(1.0)
    generator = Answer(0.0, math.log(3.0))
    nets = {Part.GENERATOR: generator, Part.CLASSIFIER: classifier}
    penalty = on_labels(fedgen.replay_penalty(nets, params, ctx), [1, 0], classifier=classifier)
    nothing = torch.zeros(1, 2)
    of_label_1 = penalty(slice(0, 1), nothing, nothing)
    assert of_label_1.item() == pytest.approx(0.5 * math.log(4.0 / 3.0))
    assert penalty(slice(1, 2), nothing, nothing).item() == pytest.approx(0.5 * math.log(4.0))
    of_label_1.backward()
    assert classifier.weight.grad is not None
    assert generator.value.grad is None
    assert fedgen.replay_penalty(nets, params.model_copy(update={"replay": 0.0}), ctx) is None
