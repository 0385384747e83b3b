"""What methods send in the part statistics, by hand: class prototypes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedcg.learning.aggregation.prototypes import HELD, PROTOTYPES, filled, merged_prototypes, prototypes_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Aggregate, Update
from fedcg.learning.methods.fedproto import NearestPrototype, towards
from fedcg.learning.networks import feature_shape, load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.artifacts.payload import beyond
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import on_labels


class Brightness(nn.Module):
    """One feature: the mean of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3)).view(-1, 1)


def prototypes_from(client: str, rows: list[float], held: list[int], counts: tuple[int, ...] | None) -> Update:
    statistics = {HELD: torch.tensor(held), PROTOTYPES: torch.tensor(rows).view(-1, 1)}
    return Update(client, {Part.STATISTICS: statistics}, 10, counts)


def merged(*updates: Update) -> dict[str, list[float]]:
    found = {one.client: one for one in updates}
    merge = merged_prototypes({name: partial(found.__getitem__, name) for name in found})
    return {name: tensor.flatten().tolist() for name, tensor in merge.items()}


def test_a_prototype_is_the_mean_feature_of_a_class_and_one_without_images_is_not_held() -> None:
    images = torch.tensor([0, 255, 255]).to(torch.uint8).view(3, 1, 1, 1).expand(3, 1, 16, 16)
    data = ImageSet(images, torch.tensor([0, 0, 2]), ("dark", "grey", "light"))
    found = prototypes_of(Brightness(), data, cases.quick_spec("fedproto"))
    # (0 - 0.5) / 0.25 = -2 and (1 - 0.5) / 0.25 = 2
    assert found[PROTOTYPES].flatten().tolist() == [0.0, 0.0, 2.0]
    assert found[HELD].tolist() == [1, 0, 1]


def test_prototypes_are_averaged_over_those_who_have_the_class_by_images_where_all_report_them() -> None:
    a, b = prototypes_from("a", [2.0, 0.0], [1, 0], (1, 0)), prototypes_from("b", [6.0, 8.0], [1, 1], (3, 5))
    assert merged(a, b) == {HELD: [1, 1], PROTOTYPES: [5.0, 8.0]}  # (1 * 2 + 3 * 6) / 4
    assert merged(a, prototypes_from("b", [6.0, 8.0], [1, 1], None)) == {HELD: [1, 1], PROTOTYPES: [4.0, 8.0]}
    assert merged(a) == {HELD: [1, 0], PROTOTYPES: [2.0, 0.0]}


def test_a_client_keeps_others_prototypes_of_classes_it_has_no_images_of() -> None:
    ours = {HELD: torch.tensor([1, 0]), PROTOTYPES: torch.tensor([[2.0], [0.0]])}
    found = filled(ours, {HELD: torch.tensor([1, 1]), PROTOTYPES: torch.tensor([[9.0], [7.0]])})
    assert (found[HELD].tolist(), found[PROTOTYPES].flatten().tolist()) == ([1, 1], [2.0, 7.0])


def test_features_are_pulled_to_their_classs_prototype_alone_and_not_where_there_is_none() -> None:
    known = {HELD: torch.tensor([1, 0]), PROTOTYPES: torch.tensor([[1.0, 3.0], [5.0, 5.0]])}
    penalty = on_labels(towards(known, 0.5, "cpu"), [0, 1])
    features = torch.tensor([[2.0, 5.0], [0.0, 0.0]])
    # row 0: ((2 - 1)² + (5 - 3)²) / 2 = 2.5; row 1: no prototype; 0.5 * (2.5 + 0) / 2
    assert penalty(slice(None), features, features).item() == pytest.approx(0.625)


def test_the_nearest_prototype_answers_and_a_class_that_nobody_has_never_does() -> None:
    statistics = {HELD: torch.tensor([1, 1, 0]), PROTOTYPES: torch.tensor([[0.0], [4.0], [1.0]])}
    logits = NearestPrototype(Brightness(), statistics)(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    assert logits.tolist() == [[-1.0, -9.0, -10.0], [-9.0, -1.0, -10.0]]


def test_a_model_of_prototypes_learns_and_is_evaluated_as_the_method_says() -> None:
    spec, data = cases.quick_spec("fedproto", epochs=8, lr=0.01), cases.bright_images(48, 0)
    trained = cases.local_round_of(spec, data).private.parts
    own = {part: trained[part] for part in (Part.EXTRACTOR, Part.STATISTICS)}
    assert evaluate(spec, own, data).accuracy > 0.8
    nobody = {**own, Part.STATISTICS: initial_parts(spec, b"cohort")[Part.STATISTICS]}
    assert evaluate(spec, nobody, data).accuracy < 0.5


def test_what_is_sent_stays_within_the_bounds_of_the_layout_with_noise_too() -> None:
    spec, method = cases.quick_spec("fedproto"), get_method("fedproto")
    initial = initial_parts(spec, b"cohort")
    state, aggregate = method.init_client(spec, initial), method.init_server(spec, initial).aggregate
    ctx = cases.context(spec)
    noisy = ctx.__class__(**{**ctx.__dict__, "privacy": PrivacySettings(update_noise=5.0)})
    sent = protected_round(method, state, cases.bright_images(24, 0), aggregate, noisy).shared.parts[Part.STATISTICS]
    layouts = {layout.name: layout for layout in spec.layouts[Part.STATISTICS]}
    assert (layouts[PROTOTYPES].low, layouts[HELD].high) == (0.0, 1.0)
    assert sent[PROTOTYPES].min() == 0.0
    assert sent[PROTOTYPES].max() > 5.0
    assert all(beyond(tensor.numpy(), layouts[name]) == "" for name, tensor in sent.items())
    assert {name: str(tensor.numpy().dtype) for name, tensor in sent.items()} == {
        one.name: one.dtype for one in layouts.values()
    }
    assert "below 0" in beyond(np.array([-0.1], dtype=np.float32), layouts[PROTOTYPES])
    assert "above 1" in beyond(np.array([2]), layouts[HELD])


def test_the_server_trains_fedghs_head_on_prototypes_with_their_classes() -> None:
    spec = cases.quick_spec("fedgh", server_steps=300, server_lr=0.01, weight_decay=0.0)
    method, initial = get_method("fedgh"), initial_parts(cases.quick_spec("fedgh"), b"cohort")
    rows = torch.eye(3, spec.layouts[Part.STATISTICS][1].shape[1])
    updates = {
        name: Update(
            name, {Part.STATISTICS: {HELD: torch.tensor(held), PROTOTYPES: rows * torch.tensor(held)[:, None]}}, 5
        )
        for name, held in (("a", [1, 1, 0]), ("b", [0, 1, 1]))
    }
    merge = method.aggregator(method.init_server(spec, initial), cases.context(spec), None)  # type: ignore[arg-type]
    aggregate, _ = merge.finish({name: partial(updates.__getitem__, name) for name in updates})
    assert set(aggregate.parts) == {Part.CLASSIFIER}
    head = load_part(spec, Part.CLASSIFIER, aggregate.parts[Part.CLASSIFIER]).eval()
    assert head(rows.view(-1, *feature_shape(spec))).argmax(1).tolist() == [0, 1, 2]


def test_a_client_without_an_aggregate_trains_on_its_own_prototypes() -> None:
    spec = cases.quick_spec("fedproto")
    initial = initial_parts(spec, b"cohort")
    first = cases.local_round_of(
        spec, cases.bright_images(24, 0), Aggregate({Part.STATISTICS: initial[Part.STATISTICS]})
    )
    method = get_method("fedproto")
    again = method.local_round(first.private, cases.bright_images(24, 0), None, cases.context(spec, 3))
    assert not torch.equal(
        again.shared.parts[Part.STATISTICS][PROTOTYPES], first.shared.parts[Part.STATISTICS][PROTOTYPES]
    )
