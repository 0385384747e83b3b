"""Every step of a client and of a server can be recorded once and replayed: results as without, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcg.learning.aggregation import distillation
from fedcg.learning.method import Aggregate, ClientState
from fedcg.learning.networks.initial_weights import complete_spec
from fedcg.learning.spec import FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.training import cuda_graph
from fedcg.learning.training import training_loop as loops
from tests.support.learning.learning_cases import GREY, context, plan_of, round_of_one_client, same_parts
from tests.support.learning.replayed_steps import ReplayedStep

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IMAGES = 44  # with batches of 8: five, and a smaller one
CASES: list[tuple[str, dict[str, ParameterValue], dict[str, str]]] = [
    ("local", {"optimiser": "sgd", "lr": 0.01}, {}),
    ("fedavg", {}, {"split": "lenet5"}),
    ("fedprox", {"mu": 1.0}, {}),
    ("feddf", {}, {}),
    ("fedgen", {}, {}),
    ("fedcg", {}, {"generator": "mlp", "discriminator": "mlp"}),
    ("fedcg", {}, {"generator": "conv_small", "discriminator": "conv"}),
    ("fedcg", {"discriminator_passes": "separate"}, {"generator": "mlp", "discriminator": "conv_published"}),
    ("fedmd_cg", {"lambda2": 0.5}, {}),
]


def spec_of(method: str, params: dict[str, ParameterValue], network: dict[str, str]) -> FederationSpec:
    choice = NetworkChoice(noise_dim=8).model_copy(update=network)
    return complete_spec(plan_of(method, choice, GREY, params))


def round_of(spec: FederationSpec, device: str = "cpu", *, graphs: bool = True) -> tuple[ClientState, Aggregate]:
    """A client's state and the server's aggregate after one round of one client."""
    result, aggregate = round_of_one_client(replace(context(spec, 3), device=device, graphs=graphs), IMAGES)
    return result.private, aggregate


@pytest.mark.parametrize(("method", "params", "network"), CASES)
def test_replayed_steps_train_as_plain_ones_do(
    method: str, params: dict[str, ParameterValue], network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # blocks of two batches: a step that held on to a tensor of the first block would be found out
    monkeypatch.setattr(loops, "BLOCK_ROWS", 16)
    monkeypatch.setattr(cuda_graph, "LEAST_STEPS", 1)
    spec = spec_of(method, params, network)
    clients_stages = 2 if method in {"fedcg", "fedmd_cg"} else 1
    state, aggregate = round_of(spec)
    with monkeypatch.context() as patch:
        for module in (cuda_graph, distillation):
            patch.setattr(module, "on_cuda", lambda _: True)
        patch.setattr(cuda_graph, "GraphedStep", ReplayedStep)
        patch.setattr(ReplayedStep, "made", 0)
        patch.setattr(ReplayedStep, "eager", 0)
        replayed_state, replayed = round_of(spec)
        made, eager = ReplayedStep.made, ReplayedStep.eager
    assert made == clients_stages + (method in {"fedcg", "feddf", "fedgen"})  # FedMD-CG's student isn't recorded
    assert eager == 2 * clients_stages  # the last batch of each epoch
    assert same_parts(state.parts, replayed_state.parts)
    assert same_parts(aggregate.parts, replayed.parts)


def test_a_round_that_wants_no_graphs_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "LEAST_STEPS", 1)
    for module in (cuda_graph, distillation):
        monkeypatch.setattr(module, "on_cuda", lambda _: True)
    monkeypatch.setattr(cuda_graph, "GraphedStep", ReplayedStep)
    for graphs in (True, False):
        monkeypatch.setattr(ReplayedStep, "made", 0)
        round_of(spec_of("fedcg", {}, {}), graphs=graphs)
        assert (ReplayedStep.made > 0) is graphs


@needs_cuda
@pytest.mark.parametrize(("method", "params", "network"), CASES)
def test_a_round_under_graphs_is_the_round_without_them(
    method: str, params: dict[str, ParameterValue], network: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(method, params, network)
    monkeypatch.setattr(cuda_graph, "LEAST_STEPS", 10**9)
    state, aggregate = round_of(spec, "cuda")
    monkeypatch.setattr(cuda_graph, "LEAST_STEPS", 1)
    graphed_state, graphed_aggregate = round_of(spec, "cuda")
    for mine, other in ((state.parts, graphed_state.parts), (aggregate.parts, graphed_aggregate.parts)):
        for part in mine:
            for name, tensor in mine[part].items():
                assert torch.allclose(tensor.float(), other[part][name].float(), atol=1e-3), (part, name)
