"""What FedGH sends in the part statistics, by hand: class prototypes; and its head."""

from functools import partial

import numpy as np
import torch
from torch import nn

from fedcg.learning.aggregation.prototypes import HELD, PROTOTYPES, prototypes_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Update
from fedcg.learning.networks import feature_shape, load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.wire.artifacts.payload import beyond
from fedcg.wire.parts import Part
from tests.support.learning import learning_cases as cases


class Brightness(nn.Module):
    """One feature: the mean of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3)).view(-1, 1)


def test_a_prototype_is_the_mean_feature_of_a_class_and_one_without_images_is_not_held() -> None:
    images = torch.tensor([0, 255, 255]).to(torch.uint8).view(3, 1, 1, 1).expand(3, 1, 16, 16)
    data = ImageSet(images, torch.tensor([0, 0, 2]), ("dark", "grey", "light"))
    found = prototypes_of(Brightness(), data, cases.quick_spec("fedgh"))
    # (0 - 0.5) / 0.25 = -2 and (1 - 0.5) / 0.25 = 2
    assert found[PROTOTYPES].flatten().tolist() == [0.0, 0.0, 2.0]
    assert found[HELD].tolist() == [1, 0, 1]


def test_what_is_sent_stays_within_the_bounds_of_the_layout_with_noise_too() -> None:
    spec, method = cases.quick_spec("fedgh"), get_method("fedgh")
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
