"""FedMD-CG's server half against hand-worked numbers: shares, the divergence, crossed terms, and draws of the client that counts."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import nn

from fedcg.learning.aggregation import crossed_distillation as crossed
from fedcg.learning.aggregation.distillation import (
    SHARED,
    Bank,
    Distillation,
    Pair,
    draw_bank,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.method import Aggregate, ServerState, Update
from fedcg.learning.networks import weights_of
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.losses import Divergence
from fedcg.learning.training.stage import Nets
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, loaders, merged, quick_spec, same_parts, teacher_pairs
from tests.support.learning.networks import FIRST, GEOMETRIC, PATTERN, SECOND, Answer, Identity, pair, settled

SETTINGS = Distillation(iterations=600, batch=4, lr=0.02, weight_decay=0.0)


def test_label_shares_and_distribution_come_from_counts() -> None:
    # class 0: 1 of 4 and 3 of 4; class 1: 3 of 3 and 0 of 3; class 2: nobody
    counts = [(1, 3, 0), (3, 0, 0)]
    assert crossed.label_shares(counts).tolist() == [[0.25, 1.0, 0.0], [0.75, 0.0, 0.0]]
    assert crossed.label_distribution(counts).tolist() == pytest.approx([4 / 7, 3 / 7, 0.0])


class Shift(nn.Module):
    """A classifier that adds a constant to the features."""

    def __init__(self, shift: Sequence[float]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.shift


def test_fedmd_cg_student_settles_where_the_divergence_from_student_to_teacher_is_least() -> None:
    student = pair(Answer(0.0, 0.0, 0.0), Identity())
    mean_log = PATTERN.repeat(600, 1)

    def loss_of(nets: Nets, features: torch.Tensor, logits: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return crossed.crossed_loss(features, logits, mean, [], nets[Part.CLASSIFIER], Divergence()).mean()

    bank = Bank(torch.zeros(2400, 1), torch.zeros(2400, dtype=torch.int64))
    train_student(student, bank, SETTINGS, context(quick_spec("fedcg")), loss_of, lambda rows: (mean_log[rows],))
    assert settled(student) == pytest.approx(GEOMETRIC, abs=0.02)


def test_the_third_crossed_term_moves_the_generator_through_the_frozen_teacher() -> None:
    teacher = pair(Answer(0.0, 0.0), Shift((0.5, 0.0)))
    bank = Bank(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    log_teacher = torch.tensor([[0.9, 0.1]]).log()
    outputs = crossed.outputs_of(
        [crossed.FrozenTeacher(teacher, bank, log_teacher, torch.ones(1), 1, "cpu")], slice(0, 1)
    )
    features = torch.zeros(1, 2, requires_grad=True)
    student = Identity()
    loss = crossed.crossed_loss(features, torch.zeros(1, 2), log_teacher, outputs, student, Divergence())
    # KL_1: (1/2, 1/2) from (0.9, 0.1) = 1/2 ln(0.5/0.9) + 1/2 ln(0.5/0.1) = 0.510826; KL_2: the same (teacher features are 0)
    # KL_3: softmax(0.5, 0) = (0.622459, 0.377541): 0.622459 ln(0.622459/0.9) + 0.377541 ln(0.377541/0.1) = 0.272055
    assert loss.item() == pytest.approx(0.510826 + 0.510826 + 0.272055, abs=1e-5)
    loss.sum().backward()
    assert features.grad is not None
    assert features.grad.abs().max().item() > 0.0
    assert all(parameter.grad is None for parameter in teacher[Part.CLASSIFIER].parameters())


def test_a_teachers_features_are_made_a_block_ahead_and_equal_those_made_at_once() -> None:
    ctx, (teacher,) = teacher_pairs(1)
    bank = draw_bank(Streams(b"c"), 10, 8, uniform(3))
    weight = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    log_teacher = teacher_logits(teacher, bank, ctx).log_softmax(1)
    everybody = [crossed.FrozenTeacher(teacher, bank, log_teacher, weight, 4, "cpu")]
    pieces = [crossed.outputs_of(everybody, slice(start, min(start + 3, 10))) for start in range(0, 10, 3)]
    with torch.no_grad():
        expected = teacher[Part.GENERATOR](bank.noise, bank.labels)[weight > 0]
    assert torch.allclose(torch.cat([outputs[0].features for outputs in pieces if outputs]), expected, atol=1e-6)
    assert torch.equal(torch.cat([outputs[0].weight for outputs in pieces if outputs]), weight[weight > 0])
    assert [outputs[0].position.tolist() if outputs else [] for outputs in pieces] == [[0, 2], [0, 1], [1, 2], [0]]


class PerLabel(nn.Module):
    """A generator that answers each label with its own given features."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.features = rows

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.features[labels]


def answer_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
    outputs: Sequence[torch.Tensor],
    counts: Sequence[tuple[int, ...]],
    *,
    bank: str = "exact",
    exact_clients: int = 32,
    last: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3),
) -> list[float]:
    """What the student comes to in a round of clients a and b, whose teachers say given log-probabilities for each label."""
    student = pair(Answer(0.0, 0.0, 0.0), Identity())
    loaded = {float(at): pair(PerLabel(rows), Identity()) for at, rows in enumerate(outputs, 1)}
    monkeypatch.setattr(
        crossed, "load_pair", lambda parts, ctx: loaded.get(parts[Part.CLASSIFIER]["unused"].item(), student)
    )
    monkeypatch.setattr(crossed, "load_part", lambda *_: Identity().requires_grad_(requires_grad=False))
    updates = {
        name: Update(name, {part: {"unused": torch.tensor([tag])} for part in SHARED}, sum(mine), mine)
        for name, tag, mine in (("a", 1.0, counts[0]), ("b", 2.0, counts[1]))
    }
    settings = Distillation(iterations=400, batch=64, lr=0.02, weight_decay=0.0)
    crossing, state = crossed.Crossing(bank, exact_clients, Divergence()), ServerState(Aggregate({}, last))
    merged(crossed.CrossedAggregator(settings, crossing, state, context(quick_spec("fedcg")), MemorySpill()), updates)
    return settled(student)


@pytest.mark.parametrize("bank", ["exact", "arrival", "auto"])
@pytest.mark.parametrize("exact_clients", [1, 2])
def test_every_crossed_term_weights_a_client_by_its_share_of_the_label(
    monkeypatch: pytest.MonkeyPatch, bank: str, exact_clients: int
) -> None:
    # Client a has 3 of 4 images of every class and says FIRST, b has the rest and says SECOND. Every classifier is the identity,
    # so eq. 10 and the third divergence both settle at FIRST^(3/4) SECOND^(1/4), normalised.
    outputs = [torch.tensor([one] * 3).log() for one in (FIRST, SECOND)]
    answer = answer_of_a_round(monkeypatch, outputs, [(3, 3, 3), (1, 1, 1)], bank=bank, exact_clients=exact_clients)
    assert answer == pytest.approx(GEOMETRIC, abs=0.04)


@pytest.mark.parametrize("bank", ["exact", "arrival"])
def test_a_round_weighs_labels_as_its_clients_have_them_whatever_was_published_last(
    monkeypatch: pytest.MonkeyPatch, bank: str
) -> None:
    # Both teachers say FIRST for class 0 and SECOND for class 1, and p(y) = (3/4, 1/4, 0): the geometric mean again. The bank of
    # arrival is drawn from nearly the opposite, (0.11, 0.87, 0.02): unweighted the student would settle close to SECOND.
    outputs = torch.tensor([FIRST, SECOND, (0.01, 0.01, 0.98)]).log()
    counts = [(4, 1, 0), (2, 1, 0)]
    answer = answer_of_a_round(monkeypatch, [outputs, outputs], counts, bank=bank, last=(0.1, 0.9, 0.0))
    assert answer == pytest.approx(GEOMETRIC, abs=0.04)


@pytest.mark.parametrize("bank", ["exact", "arrival"])
def test_the_published_label_distribution_is_that_of_this_rounds_counts(bank: str) -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    updates = {"a": Update("a", parts, 4, (4, 0, 0)), "b": Update("b", parts, 4, (0, 3, 1))}
    crossing, state = crossed.Crossing(bank, 32, Divergence()), ServerState(Aggregate(parts, (1.0, 0.0, 0.0)))
    aggregator = crossed.CrossedAggregator(Distillation(2, 6, 1e-3, 0.0), crossing, state, ctx, MemorySpill())
    assert merged(aggregator, updates).label_distribution == pytest.approx((0.5, 0.375, 0.125))


def test_fedmd_cg_refuses_a_client_that_does_not_report_its_label_counts() -> None:
    ctx, _ = teacher_pairs(1)
    parts = {part: initial_parts(ctx.spec, b"x")[part] for part in SHARED}
    incomplete = Update("quiet", parts, 4)
    crossing, state = crossed.Crossing("exact", 32, Divergence()), ServerState(Aggregate(parts))
    aggregator = crossed.CrossedAggregator(Distillation(2, 6, 1e-3, 0.0), crossing, state, ctx, MemorySpill())
    with pytest.raises(ValueError, match="missing from quiet"):
        aggregator.finish({"quiet": lambda: incomplete})


COUNTS = {"a": (1, 3, 0), "b": (3, 0, 0), "c": (4, 1, 0)}


def winners(sampling: crossed.ClientSampling, counts: Mapping[str, tuple[int, ...]], rows: int) -> list[str | None]:
    """Who won each row after all have entered, each with its own number as its features."""
    for number, (client, mine) in enumerate(counts.items()):
        led = sampling.enter(client, torch.tensor(mine, dtype=torch.float64))
        sampling.keep(led, torch.full((len(led), 1), float(number)), torch.zeros(len(led), 1))
    found: list[str | None] = [None] * rows
    for output in sampling.outputs(slice(0, rows), lambda _: Identity(), "cpu"):
        for row, number in zip(output.position.tolist(), output.features.flatten().tolist(), strict=True):
            found[row] = list(counts)[int(number)]
    return found


def labelled(labels: torch.Tensor) -> Bank:
    return Bank(torch.zeros(len(labels), 1), labels)


def test_a_client_wins_a_label_as_often_as_its_share_of_it_says() -> None:
    # 10,000 batches of one row per label
    sampling = crossed.ClientSampling(labelled(torch.arange(30_000) % 3), 3, 3, Streams(b"c"))
    won = winners(sampling, COUNTS, 30_000)
    for label, shares in enumerate(crossed.label_shares(list(COUNTS.values())).t().tolist()):
        assert [won[label::3].count(client) / 10_000 for client in COUNTS] == pytest.approx(shares, abs=0.015)
    assert set(won[2::3]) == {None}


def test_rows_of_one_label_in_one_batch_have_one_winner_and_other_batches_draw_anew() -> None:
    sampling = crossed.ClientSampling(labelled(torch.zeros(400, dtype=torch.int64)), 4, 3, Streams(b"c"))
    won = winners(sampling, COUNTS, 400)
    batches = [set(won[start : start + 4]) for start in range(0, 400, 4)]
    assert {len(names) for names in batches} == {1}
    assert len(set.union(*batches)) == 3


def test_clients_with_like_labels_win_few_at_a_time_however_many_labels_there_are() -> None:
    sampling = crossed.ClientSampling(labelled(torch.arange(400) % 40), 40, 40, Streams(b"c"))
    won = winners(sampling, {f"c{number}": (7,) * 40 for number in range(64)}, 400)
    for start in range(0, 400, 40):
        assert len(set(won[start : start + 40])) <= crossed.HEATS


OF_ABC = {"a": (1, 3, 1), "b": (2, 2, 1), "c": (3, 1, 1)}


def updates_of(pairs: Sequence[Pair]) -> dict[str, Update]:
    """An update for each pair, of clients a, b, c with different label counts."""
    return {
        name: Update(name, {part: weights_of(net) for part, net in one.items()}, 4, OF_ABC[name])
        for name, one in zip("abc", pairs, strict=True)
    }


def test_the_winners_own_features_log_probabilities_and_classifier_are_what_a_batch_gets() -> None:
    ctx, made = teacher_pairs(3)
    bank, spill = draw_bank(Streams(b"c"), 12, 8, uniform(3)), MemorySpill()
    taught_bank = crossed.TaughtBank(bank, uniform(3), 6, ctx, Divergence(), sampling=True)
    for update in updates_of(made).values():
        kept = {f"classifier/{name}": weight for name, weight in update.parts[Part.CLASSIFIER].items()}
        spill.put(update.client, {"logits": taught_bank.add(update, None), **kept})
    won = winners(crossed.ClientSampling(bank, 6, 3, ctx.streams), OF_ABC, 12)
    outputs = taught_bank.drawn(slice(6, 12), spill)
    assert sorted(row for output in outputs for row in output.position.tolist()) == list(range(6))
    clients = [{won[6 + int(row)] for row in output.position} for output in outputs]
    assert clients == sorted(clients, key=str)
    for names, output in zip(clients, outputs, strict=True):
        (name,) = names
        teacher, rows = made["abc".index(str(name))], output.position + 6
        with torch.no_grad():
            features = teacher[Part.GENERATOR](bank.noise[rows], bank.labels[rows])
            assert torch.allclose(output.features, features, atol=1e-6)
            assert torch.allclose(output.classify(features), teacher[Part.CLASSIFIER](features), atol=1e-6)
            assert torch.allclose(output.log_teacher, teacher[Part.CLASSIFIER](features).log_softmax(1), atol=1e-5)
        assert output.weight.tolist() == [1.0] * len(rows)


def aggregated(exact_clients: int, added: str, present: str = "abc", bank: str = "auto") -> Aggregate:
    ctx, made = teacher_pairs(3)
    updates = updates_of(made)
    initial = ServerState(Aggregate(updates["a"].parts, (0.5, 0.25, 0.25)))
    crossing = crossed.Crossing(bank, exact_clients, Divergence())
    merge = crossed.CrossedAggregator(Distillation(4, 6, 1e-3, 0.0), crossing, initial, ctx, MemorySpill())
    for client in added:
        merge.add(updates[client])
    return merge.finish(loaders(updates, *present))[0]


def equal(first: Aggregate, second: Aggregate) -> bool:
    return same_parts(first.parts, second.parts)


@pytest.mark.parametrize("exact_clients", [1, 3])
def test_who_was_added_and_has_no_part_in_the_round_leaves_no_trace(exact_clients: int) -> None:
    assert equal(aggregated(exact_clients, "cab", "ab"), aggregated(exact_clients, "", "ab"))


def test_a_round_of_few_is_that_of_an_exact_bank_and_one_of_many_that_of_arrival() -> None:
    assert equal(aggregated(3, "abc"), aggregated(3, "abc", bank="exact"))
    assert equal(aggregated(2, "abc"), aggregated(2, "abc", bank="arrival"))
    assert not equal(aggregated(2, "abc"), aggregated(2, "abc", bank="exact"))


@torch.no_grad()
def test_the_expectation_over_all_draws_of_a_batch_is_equation_11() -> None:
    # Three clients, labels 0 and 1 present: nine outcomes, the probability of each the product of two shares.
    ctx, teachers = teacher_pairs(3)
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    bank = Bank(noise, torch.tensor([0, 1, 0, 0, 1, 1]))
    shares = crossed.label_shares([(1, 3, 0), (3, 0, 0), (4, 1, 0)])
    logs = [teacher_logits(teacher, bank, ctx).log_softmax(1) for teacher in teachers]
    mean_log = torch.zeros(6, 3).log_softmax(1)
    generator, judge = (teacher_pairs(1)[1][0][part] for part in (Part.GENERATOR, Part.CLASSIFIER))
    made = generator(bank.noise, bank.labels) * 0.5
    ours = judge(made)

    def loss_with(weights: torch.Tensor) -> torch.Tensor:
        outputs = crossed.outputs_of(
            [crossed.FrozenTeacher(*each, 6, "cpu") for each in zip(teachers, [bank] * 3, logs, weights, strict=True)],
            slice(0, 6),
        )
        return crossed.crossed_loss(made, ours, mean_log, outputs, judge, Divergence())

    expected = torch.zeros(6)
    for zero, one in product(range(3), repeat=2):
        chance = float(shares[zero, 0] * shares[one, 1])
        winner = torch.where(bank.labels == 0, zero, one)
        expected += chance * loss_with(torch.nn.functional.one_hot(winner, 3).t())
    assert torch.allclose(expected, loss_with(shares[:, bank.labels]), atol=1e-5)
    assert not torch.allclose(loss_with(shares[:, bank.labels]), loss_with(torch.zeros(3, 6)), atol=1e-5)
