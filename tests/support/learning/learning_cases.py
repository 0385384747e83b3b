"""Small federations for the tests of the learning core: 16x16 grey images of three classes that differ in brightness."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, Weights
from fedcg.learning.networks.initial_weights import complete_spec
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.party import Roots
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice, ParameterValue

torch.set_num_threads(1)  # several test processes share the cores, and idle threads spin

CLASSES = ("dark", "grey", "light")
GREY = ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.25,))
QUICK: dict[str, dict[str, ParameterValue]] = {
    "fedcg": {"server_iterations": 6, "server_batch": 4, "ramp_rounds": 2},
    "fedmd_cg": {"server_iterations": 6, "server_batch": 4},
    "feddf": {"server_iterations": 6, "server_batch": 4},
    "fedgen": {"server_iterations": 6, "server_batch": 4},
}


def plan_of(
    method: str, network: NetworkChoice, image: ImageForm, params: Mapping[str, ParameterValue]
) -> FederationPlan:
    """A plan of a quick federation; `params` overrides its parameters."""
    return FederationPlan(
        federation="tests",
        classes=CLASSES,
        image=image,
        network=network,
        method=method,
        params={"epochs": 2, "batch_size": 8, **QUICK.get(method, {}), **params},
        rounds=4,
        seed=5,
    )


def plan(
    method: str, network: NetworkChoice | None = None, image: ImageForm = GREY, **params: ParameterValue
) -> FederationPlan:
    """The same, with parameters as keywords."""
    return plan_of(method, network or NetworkChoice(noise_dim=8), image, params)


def quick_spec(
    method: str, *, augment_flip: ParameterValue = False, augment_crop: ParameterValue = 0, **params: ParameterValue
) -> FederationSpec:
    """A complete spec of a quick federation."""
    quick = plan_of(method, NetworkChoice(noise_dim=8), GREY, params)
    return complete_spec(quick.model_copy(update={"augment_flip": augment_flip, "augment_crop": augment_crop}))


def bright_images(count: int, seed: int, classes: tuple[str, ...] = CLASSES) -> ImageSet:
    """Noisy images whose brightness tells their class."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(classes)
    level = 40 + 80 * labels.view(-1, 1, 1, 1)
    noise = torch.randint(-30, 31, (count, 1, 16, 16), generator=stream)
    return ImageSet((level + noise).to(torch.uint8), labels, classes)


def context(spec: FederationSpec, round_number: int = 2, root: bytes = b"device") -> RoundContext:
    """A round's context, scoped as the trainer scopes it, with public images for the methods that need some."""
    streams = Streams(root).at(spec.federation, round_number, 1)
    public = bright_images(10, 77).images if get_method(spec.method).needs_public else None
    return RoundContext(spec, round_number, 1, spec.rounds, streams, public=public)


def same(first: Weights, second: Weights) -> bool:
    """Whether two parts are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def roots_from_seed(seed: int, clients: tuple[str, ...]) -> Roots:
    """All roots of randomness from one public seed."""
    streams = Streams(f"fedcg simulation {seed}".encode())

    def secret(*purpose: object) -> bytes:
        return b"".join(streams.seed(*purpose, part).to_bytes(8, "big") for part in range(4))

    return Roots(secret("cohort"), secret("coordinator"), {name: secret("device", name) for name in clients})
