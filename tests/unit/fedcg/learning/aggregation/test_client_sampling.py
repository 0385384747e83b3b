"""Draws of the client that counts in FedMD-CG's eq. 11: by share, in any order of arrival, with eq. 11 as their expectation."""

from collections.abc import Sequence
from itertools import permutations, product

import pytest
import torch

from fedcg.learning.aggregation.crossed_distillation import (
    HEATS,
    ClientSampling,
    CrossedAggregator,
    Crossing,
    FrozenTeacher,
    TaughtBank,
    TeacherRows,
    crossed_loss,
    label_shares,
    outputs_of,
)
from fedcg.learning.aggregation.distillation import Bank, Distillation, Pair, draw_bank, teacher_logits, uniform
from fedcg.learning.method import Aggregate, ServerState, Update
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.tasks import MemorySpill
from fedcg.learning.training.losses import Divergence
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import loaders, same_parts, teacher_pairs

COUNTS = {"a": (1, 3, 0), "b": (3, 0, 0), "c": (4, 1, 0)}


def tensor(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64)


def labelled(labels: torch.Tensor) -> Bank:
    return Bank(torch.zeros(len(labels), 1), labels)


def test_a_client_wins_a_label_as_often_as_its_share_of_it_says() -> None:
    sampling = ClientSampling(
        labelled(torch.arange(30_000) % 3), 3, 3, Streams(b"c")
    )  # 10,000 batches of one row per label
    for client, counts in COUNTS.items():
        sampling.enter(client, tensor(counts))
    winners = [sampling.winner(row) for row in range(30_000)]
    for label, shares in enumerate(label_shares(list(COUNTS.values())).t().tolist()):
        wins = [winners[label::3].count(client) / 10_000 for client in COUNTS]
        assert wins == pytest.approx(shares, abs=0.015)
    assert set(winners[2::3]) == {None}


def test_rows_of_one_label_in_one_batch_have_one_winner_and_other_batches_draw_anew() -> None:
    sampling = ClientSampling(labelled(torch.zeros(400, dtype=torch.int64)), 4, 3, Streams(b"c"))
    for client, counts in COUNTS.items():
        sampling.enter(client, tensor(counts))
    batches = [{sampling.winner(row) for row in range(start, start + 4)} for start in range(0, 400, 4)]
    assert {len(winners) for winners in batches} == {1}
    assert len(set.union(*batches)) == 3


def test_clients_with_like_labels_win_few_at_a_time_however_many_labels_there_are() -> None:
    sampling = ClientSampling(labelled(torch.arange(400) % 40), 40, 40, Streams(b"c"))
    for number in range(64):
        sampling.enter(f"c{number}", torch.full((40,), 7.0, dtype=torch.float64))
    for start in range(0, 400, 40):
        assert len({sampling.winner(row) for row in range(start, start + 40)}) <= HEATS


def test_the_order_of_arrival_changes_no_winner() -> None:
    bank = labelled(torch.randint(0, 3, (120,), generator=torch.Generator().manual_seed(0)))
    outcomes = []
    for order in permutations(COUNTS):
        sampling = ClientSampling(bank, 6, 3, Streams(b"c"))
        for client in order:
            sampling.enter(client, tensor(COUNTS[client]))
        outcomes.append([sampling.winner(row) for row in range(120)])
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_a_dead_heat_goes_to_the_first_in_id_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "generator", lambda self, *purpose: torch.Generator().manual_seed(0))
    for order in permutations(("x", "y")):
        sampling = ClientSampling(labelled(torch.zeros(4, dtype=torch.int64)), 2, 3, Streams(b"c"))
        for client in order:
            sampling.enter(client, tensor((1, 1, 1)))
        assert {sampling.winner(row) for row in range(4)} == {"x"}


def updates_of(pairs: Sequence[Pair]) -> dict[str, Update]:
    """An update for each pair, of clients a, b, c with different label counts."""
    return {
        "abc"[number]: Update("abc"[number], pair.weights(), 4, (1 + number, 3 - number, 1))
        for number, pair in enumerate(pairs)
    }


@torch.no_grad()
def test_the_expectation_over_all_draws_of_a_batch_is_equation_11() -> None:
    # Three clients, labels 0 and 1 present: nine outcomes, the probability of each the product of two shares.
    ctx, teachers = teacher_pairs(3)
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    bank = Bank(noise, torch.tensor([0, 1, 0, 0, 1, 1]))
    shares = label_shares([(1, 3, 0), (3, 0, 0), (4, 1, 0)])
    logs = [teacher_logits(teacher, bank, ctx).log_softmax(1) for teacher in teachers]
    mean_log = torch.zeros(6, 3).log_softmax(1)
    judge = teacher_pairs(1)[1][0]
    made = judge.generator(bank.noise, bank.labels) * 0.5
    ours = judge.classifier(made)

    def loss_with(weights: torch.Tensor) -> torch.Tensor:
        outputs = outputs_of(
            [FrozenTeacher(*each, 6, "cpu") for each in zip(teachers, [bank] * 3, logs, weights, strict=True)],
            slice(0, 6),
        )
        return crossed_loss(made, ours, mean_log, outputs, judge.classifier, Divergence())

    expected = torch.zeros(6)
    for zero, one in product(range(3), repeat=2):
        chance = float(shares[zero, 0] * shares[one, 1])
        winner = torch.where(bank.labels == 0, zero, one)
        expected += chance * loss_with(torch.nn.functional.one_hot(winner, 3).t())
    assert torch.allclose(expected, loss_with(shares[:, bank.labels]), atol=1e-5)
    assert not torch.allclose(loss_with(shares[:, bank.labels]), loss_with(torch.zeros(3, 6)), atol=1e-5)


def counted(
    order: tuple[int, ...], *, again: bool = False
) -> tuple[TaughtBank, MemorySpill, list[TeacherRows], list[Pair]]:
    ctx, made = teacher_pairs(3)
    updates = list(updates_of(made).values())
    bank = draw_bank(Streams(b"c"), 12, 8, uniform(3))
    spill = MemorySpill()
    taught_bank = TaughtBank(bank, uniform(3), 6, ctx, Divergence(), sampling=True)
    for number in order:
        update = updates[number]
        logits = teacher_logits(made[number], bank, ctx) if again else None
        kept = {f"classifier/{name}": weight for name, weight in update.parts[Part.CLASSIFIER].items()}
        spill.put(update.client, {"logits": taught_bank.add(update, logits), **kept})
    return taught_bank, spill, taught_bank.drawn(slice(6, 12), spill), made


def test_the_winners_own_features_log_probabilities_and_classifier_are_what_a_batch_gets() -> None:
    taught_bank, _, outputs, made = counted((0, 1, 2))
    bank = taught_bank.bank
    assert sorted(row for output in outputs for row in output.position.tolist()) == list(range(6))
    clients = [
        {taught_bank._sampling.winner(6 + int(row)) for row in output.position}
        for output in outputs
        if taught_bank._sampling
    ]
    assert clients == sorted(clients, key=str)
    for names, output in zip(clients, outputs, strict=True):
        (name,) = names
        pair, rows = made["abc".index(str(name))], output.position + 6
        with torch.no_grad():
            features = pair.generator(bank.noise[rows], bank.labels[rows])
            assert torch.allclose(output.features, features, atol=1e-6)
            assert torch.allclose(output.classify(features), pair.classifier(features), atol=1e-6)
            assert torch.allclose(output.log_teacher, pair.classifier(features).log_softmax(1), atol=1e-5)
        assert output.weight.tolist() == [1.0] * len(rows)


def test_a_worker_that_goes_on_where_another_one_died_gets_the_same() -> None:
    first, second = counted((0, 1, 2)), counted((2, 0, 1), again=True)
    assert torch.equal(first[0].mean(), second[0].mean())
    for one, other in zip(first[2], second[2], strict=True):
        assert torch.equal(one.position, other.position)
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.log_teacher, other.log_teacher)


def test_eq_10s_mean_is_weighted_by_shares_of_the_rows_label() -> None:
    taught_bank, spill, _, _ = counted((0, 1, 2))
    shares = label_shares([(1, 3, 1), (2, 2, 1), (3, 1, 1)])
    expected = sum(
        shares[number][taught_bank.bank.labels].unsqueeze(1) * spill.get(client)["logits"].log_softmax(1).double()
        for number, client in enumerate("abc")
    )
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(taught_bank.mean().double(), expected, atol=1e-6)


def aggregated(exact_clients: int, added: str, present: str = "abc", bank: str = "auto") -> Aggregate:
    ctx, made = teacher_pairs(3)
    updates = updates_of(made)
    initial = ServerState(Aggregate(updates["a"].parts, (0.5, 0.25, 0.25)))
    crossing = Crossing(bank, exact_clients, Divergence())
    merge = CrossedAggregator(Distillation(4, 6, 1e-3, 0.0), crossing, initial, ctx, MemorySpill())
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
