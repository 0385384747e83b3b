"""Small federations for the tests of the learning core: 16x16 grey images of three classes that differ in brightness."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from fedcg.learning.aggregation.distillation import SHARED, Pair, load_pair
from fedcg.learning.aggregation.sealed_means import server_half
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Aggregator, Cohort, Example, LocalResult, RoundContext, Update, Weights
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.party import ClientData, Party, Roots
from fedcg.learning.simulation.simulation import Simulation
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice, ParameterValue
from fedcg.wire.parts import Part

torch.set_num_threads(1)  # several test processes share the cores, and idle threads spin

CLASSES = ("dark", "grey", "light")
NAMES = ("a", "b", "c")
GREY = Example().image
QUICK: dict[str, dict[str, ParameterValue]] = {
    "fedcg": {"server_iterations": 6, "server_batch": 4, "ramp_rounds": 2},
    "fedmd_cg": {"server_iterations": 6, "server_batch": 4},
    "feddf": {"server_iterations": 6, "server_batch": 4},
    "fedgen": {"server_iterations": 6, "server_batch": 4},
    "fedgh": {"server_steps": 6},
}


def plan_of(
    method: str, network: NetworkChoice, image: ImageForm, params: Mapping[str, ParameterValue]
) -> FederationPlan:
    """Return a plan of a quick federation; `params` overrides its parameters."""
    return FederationPlan(
        federation="tests",
        classes=CLASSES,
        input=image,
        network=network,
        method=method,
        params={"epochs": 2, "batch_size": 8, **QUICK.get(method, {}), **params},
        rounds=4,
        seed=5,
    )


def plan(
    method: str, network: NetworkChoice | None = None, image: ImageForm = GREY, **params: ParameterValue
) -> FederationPlan:
    """Return the plan, with parameters as keywords."""
    return plan_of(method, network or NetworkChoice(noise_dim=8), image, params)


def usual_plan(method: str, **params: ParameterValue) -> FederationPlan:
    """Return the plan with a method's example networks and images."""
    example = get_method(method).example
    return plan_of(method, example.network, example.image, params)


def quick_spec(
    method: str, *, augment_flip: ParameterValue = False, augment_crop: ParameterValue = 0, **params: ParameterValue
) -> FederationSpec:
    """Return a complete spec of a quick federation."""
    return complete_spec(
        usual_plan(method, **params).model_copy(update={"augment_flip": augment_flip, "augment_crop": augment_crop})
    )


def bright_images(count: int, seed: int, classes: tuple[str, ...] = CLASSES, form: ImageForm = GREY) -> ImageSet:
    """Return noisy images whose brightness depends on their class."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(classes)
    level = 40 + 80 * labels.view(-1, 1, 1, 1)
    noise = torch.randint(-30, 31, (count, form.channels, form.height, form.width), generator=stream)
    return ImageSet((level + noise).to(torch.uint8), labels, classes)


def context(spec: FederationSpec, round_number: int = 3, root: bytes = b"device") -> RoundContext:
    """Return the context of a round for any method, scoped as by the trainer, with public images if needed."""
    streams = Streams(root).at(spec.federation, round_number, 1)
    public = bright_images(10, 77, form=spec.image).images if get_method(spec.method).needs.public else None
    cohort = Cohort(Streams(b"cohort").at(spec.federation))
    return RoundContext(spec, round_number, 1, streams, public=public, cohort=cohort)


def same(first: Weights, second: Weights) -> bool:
    """Whether two parts are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def roots_from_seed(seed: int, clients: tuple[str, ...]) -> Roots:
    """Return all roots of randomness from one public seed."""
    streams = Streams(f"fedcg simulation {seed}".encode())

    def secret(*purpose: object) -> bytes:
        return b"".join(streams.seed(*purpose, part).to_bytes(8, "big") for part in range(4))

    return Roots(secret("cohort"), secret("coordinator"), {name: secret("device", name) for name in clients})


def same_parts(first: Mapping[Part, Weights], second: Mapping[Part, Weights]) -> bool:
    """Whether two sets of parts are equal bit for bit."""
    return first.keys() == second.keys() and all(same(first[part], second[part]) for part in first)


def client_data(name: str, train: int = 24, form: ImageForm = GREY) -> ClientData:
    """The images of a client of `party_of`."""
    seed = 10 * NAMES.index(name)
    train_images, val, test = (bright_images(count, seed + at, form=form) for at, count in enumerate((train, 9, 9)))
    return ClientData(train_images, val, test)


def party_of(method: str, names: Iterable[str] = NAMES, **params: ParameterValue) -> Party:
    """Return a quick federation of up to three clients, with public images for methods that need them."""
    spec = quick_spec(method, **params)
    public = bright_images(10, 77, form=spec.image).images if get_method(method).needs.public else None
    datasets = {name: client_data(name, form=spec.image) for name in names}
    common = bright_images(6, 99, form=spec.image)
    return Party(spec, datasets, roots_from_seed(0, NAMES), common=common, public=public)


def assert_same_simulation(one: Simulation, other: Simulation) -> None:
    """Check that two simulations only differ in their duration."""
    assert one.rounds == other.rounds
    for name, curve in one.curves.items():
        assert [replace(record, seconds=None) for record in curve] == [
            replace(record, seconds=None) for record in other.curves[name]
        ]
        assert same_parts(one.states[name].parts, other.states[name].parts)
    assert same_parts(one.aggregate.parts, other.aggregate.parts)
    assert one.aggregate.label_distribution == other.aggregate.label_distribution
    assert one.global_accuracy == other.global_accuracy


def local_round_of(
    spec: FederationSpec, data: ImageSet, aggregate: Aggregate | None = None, ctx: RoundContext | None = None
) -> LocalResult:
    """Run the first local round of a client from the cohort's initial weights."""
    method = get_method(spec.method)
    state = method.init_client(spec, initial_parts(spec, b"cohort"))
    return method.local_round(state, data, aggregate, ctx or context(spec))


def aggregator_of(spec: FederationSpec, ctx: RoundContext | None = None) -> Aggregator:
    """Run the server half of a round from the cohort's initial weights."""
    method = get_method(spec.method)
    server = method.init_server(spec, initial_parts(spec, b"cohort"))
    return server_half(method, server, ctx or context(spec, root=b"coordinator"), MemorySpill())


def loaders(updates: Mapping[str, Update], *present: str) -> dict[str, Callable[[], Update]]:
    """Return a loader for the updates of the present clients; all of them by default."""
    return {client: partial(updates.__getitem__, client) for client in present or updates}


def merged(merge: Aggregator, updates: Mapping[str, Update], added: Iterable[str] | None = None) -> Aggregate:
    """Add updates, all by default, and merge them."""
    for client in updates if added is None else added:
        merge.add(updates[client])
    return merge.finish(loaders(updates))[0]


def round_of_one_client(ctx: RoundContext, images: int) -> tuple[LocalResult, Aggregate]:
    """Return the local round of one client and the aggregate of its update only."""
    method, initial, data = get_method(ctx.spec.method), initial_parts(ctx.spec, b"cohort"), bright_images(images, 0)
    server = method.init_server(ctx.spec, initial)
    result = method.local_round(method.init_client(ctx.spec, initial), data, server.aggregate, ctx)
    update = Update("a", result.shared.parts, len(data), data.label_counts())
    return result, merged(method.aggregator(server, ctx, MemorySpill()), {"a": update}, ())


def teacher_pairs(count: int) -> tuple[RoundContext, list[Pair]]:
    """Return a round of FedMD-CG, and generators and classifiers in eval mode with different initial weights."""
    spec = quick_spec("fedmd_cg", server_iterations=2, server_batch=6)
    ctx, pairs = context(spec), []
    for seed in range(count):
        parts = initial_parts(spec.model_copy(update={"seed": seed}), b"x")
        pairs.append(load_pair({part: parts[part] for part in SHARED}, ctx))
        for half in pairs[-1].values():
            half.eval()
    return ctx, pairs
