"""Infers class shares with clients that the attacker simulates: they train on auxiliary images, with shares that the attacker knows, through the recorded rounds.

Each follows the recorded aggregates, so nothing has to be aggregated. What the last layer and the generator do for a class
in each round is set against the share of the class (shadow training after Shokri et al. 2017). Does not use the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from audit.evidence import Knowledge, View
from audit.evidence.case import Earlier
from audit.evidence.networks import plain_params
from audit.techniques.class_shares import Shares, fitted, generator_statistics, response
from fedcg.learning.errors import PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Cohort, DivergedError, RoundContext, Weights
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.seeds import Streams
from fedcg.learning.training.batches import steps_of
from fedcg.values import Value
from fedcg.wire.parts import Part

THIS_ROUND, ROUNDS = "simulated clients, this round", "simulated clients, {} rounds"
_FEWEST, _PILOTS = 6, 2  # clients
_MOST_EXAMPLES = 1000
_CONCENTRATIONS = (0.2, 0.5, 1.0, 3.0)  # of the shares: from a class or two to nearly all alike
_LEAST_SHARE, _LEAST_SIZE = 1e-3, 1e-6
_RIDGE = 3e-3  # chosen by leaving out one simulated client each (digits)
Sent = Mapping[Part, Weights]


def knowledge(setting: str) -> tuple[Knowledge, ...]:
    """Return what a reading of simulated clients needs beside the round's updates; nothing for other readings."""
    if setting == THIS_ROUND:
        return (Knowledge.AUXILIARY,)
    return (Knowledge.AUXILIARY, Knowledge.HISTORY) if setting.startswith("simulated") else ()


class SimulatedClients(Value):
    """Simulated clients and what their updates show.

    Attributes:
        view: of the audited update; `rounds`: it and the recorded rounds before it, in order.
        privacy: the mechanisms of the clients.
        moved: what changed, [clients, rounds, C, F]; `shares`: [clients, C].
    """

    view: View
    rounds: tuple[Earlier, ...]
    privacy: PrivacySettings
    streams: Streams
    moved: torch.Tensor
    shares: torch.Tensor

    def inferred(self, own: Sequence[Sent] = ()) -> Shares:
        """Infer the shares [clients, C] of the recorded clients, the audited one first, from all rounds and from the last.

        With several clients, changes are also read relative to the clients' mean, and both readings are averaged in logarithms.

        Args:
            own: updates of another client in place of the audited one's, by round.
        """
        mine, *others = [[one.updates[name] for one in self.rounds] for name in _clients(self.view, self.rounds)]
        sent = [own or mine, *others]
        seen = torch.stack([_moved(self.view, self.rounds, one, self.streams) for one in sent])
        return {
            name: self._read(seen[:, first:])
            for name, first in ((ROUNDS.format(len(self.rounds)), 0), (THIS_ROUND, len(self.rounds) - 1))
            if name == THIS_ROUND or len(self.rounds) > 1
        }

    def _read(self, seen: torch.Tensor) -> torch.Tensor:
        known = self.moved[:, -seen.shape[1] :]
        changed = seen.abs().amax((0, 2)) > 0  # `balance = bias` sends the last bias as it was
        known, seen = ((some * changed.unsqueeze(1)).transpose(1, 2).flatten(2) for some in (known, seen))
        readings = [fitted(known, self.shares, _RIDGE)(seen)]
        if len(seen) > 1:
            readings.append(fitted(known - known.mean(0), self.shares, _RIDGE)(seen - seen.mean(0)))
        return torch.stack(readings).clamp(min=_LEAST_SHARE).log().mean(0).softmax(-1)


class Plan(Value):
    """The clients to simulate.

    Attributes:
        rounds: the audited round and those before it that they train through, in order.
        mechanisms: those that they may use; two clients of each are simulated, and those remain whose last update is more similar in size
            to the audited one.
        count: number of clients that remain.
        examples: images of each.
    """

    rounds: tuple[Earlier, ...]
    mechanisms: tuple[PrivacySettings, ...]
    count: int
    examples: int

    @staticmethod
    def of(view: View, privacy: PrivacySettings | None, count: int, steps: int) -> Plan | None:
        """Plan at most `count` clients with at most `steps` local steps together; None without auxiliary images, or if that allows fewer than 6.

        Without mechanisms of the device (`privacy`), clients train without any and with `balance = logits`.
        """
        examples = min(view.report.examples or _MOST_EXAMPLES, _MOST_EXAMPLES)
        params = view.method.params_type.model_validate(plain_params(view.spec.params))
        of_round = max(1, steps_of(params, examples))
        rounds = (*view.history, Earlier(view.before, {view.client: view.update, **view.others}))
        rounds = rounds[-max(1, steps // (of_round * _FEWEST)) :]
        count = min(count, steps // (of_round * len(rounds)))
        given = privacy is not None and privacy.is_on
        mechanisms = (privacy,) if privacy is not None and given else (OFF, PrivacySettings(balance="logits"))
        return None if count < _FEWEST or view.auxiliary is None else Plan(rounds, mechanisms, count, examples)

    @property
    def runs(self) -> int:
        """The number of clients that are simulated."""
        return self.count + _PILOTS * (len(self.mechanisms) - 1)


def simulated_clients(
    view: View, plan: Plan | None, streams: Streams, tick: Callable[[], None]
) -> SimulatedClients | None:
    """Simulate clients through the recorded rounds; None without a plan, or if none can train.

    Args:
        view: of the audited update.
        plan: the clients.
        streams: for shares, images and training.
        tick: called after each client.
    """
    if plan is None:
        return None
    rounds, found = plan.rounds, dict[PrivacySettings, list[tuple[torch.Tensor, torch.Tensor]]]()

    def simulate(settings: PrivacySettings, first: int, last: int) -> None:
        for number in range(first, last):
            _add(found.setdefault(settings, []), view, rounds, settings, streams, number, plan.examples)
            tick()

    for settings in plan.mechanisms:
        simulate(settings, 0, _PILOTS)
    seen = _moved(view, rounds, [one.updates[view.client] for one in rounds], streams)
    chosen = min((one for one in found if found[one]), key=lambda one: _unlike(seen, found[one]), default=None)
    if chosen is None:
        return None
    simulate(chosen, _PILOTS, plan.count)
    moved, shares = (torch.stack(some) for some in zip(*found[chosen], strict=True))
    return SimulatedClients(view, rounds, chosen, streams, moved, shares)


def _clients(view: View, rounds: Sequence[Earlier]) -> list[str]:
    """Return the names of the clients that sent updates in all rounds, the audited one first."""
    others = sorted(set.intersection(*(set(one.updates) for one in rounds)) - {view.client})
    return [view.client, *others]


def _unlike(seen: torch.Tensor, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the distance of the log sizes of the last round's changes from the clients' mean."""
    sizes = [(one[-1].std(0) + _LEAST_SIZE).log() for one in (seen, *(moved for moved, _ in found))]
    return float((sizes[0] - torch.stack(sizes[1:]).mean(0)).abs().sum())


def _add(
    found: list[tuple[torch.Tensor, torch.Tensor]],
    view: View,
    rounds: Sequence[Earlier],
    privacy: PrivacySettings,
    streams: Streams,
    number: int,
    examples: int,
) -> None:
    """Simulate a client with random shares and add what changed and its shares, unless it diverges or can't use the mechanisms."""
    assert view.auxiliary is not None
    own = streams.at(number)
    drawn, labels = np.random.default_rng(own.seed("shares")), view.auxiliary.labels.numpy()
    counts = np.bincount(labels, minlength=view.spec.class_count)
    shares = drawn.dirichlet([drawn.choice(_CONCENTRATIONS)] * len(counts)) + _LEAST_SHARE
    chances = (shares / counts.clip(1))[labels]
    images = view.auxiliary.rows(drawn.choice(len(labels), examples, p=chances / chances.sum()).tolist())
    try:
        sent = followed(view, rounds, images, privacy, own)
    except (DivergedError, PrivacyError):
        return
    found.append((_moved(view, rounds, sent, streams), torch.tensor(images.label_counts()) / len(images)))


def followed(
    view: View, rounds: Sequence[Earlier], images: ImageSet, privacy: PrivacySettings, streams: Streams
) -> list[Sent]:
    """Return the updates of a client with these images that trains from each round's recorded aggregate; its private parts start from the public seed.

    Raises:
        DivergedError: its training diverged.
        PrivacyError: the method does not support the mechanisms.
    """
    spec = view.spec.model_copy(update={"params": plain_params(view.spec.params)})
    state, sent = view.method.init_client(spec, {**view.start(), **rounds[0].before.parts}), list[Sent]()
    for number, one in enumerate(rounds, view.round - len(rounds) + 1):
        # An attacker who simulates a client does not know the cohort's secret, and uses another one.
        ctx = RoundContext(spec, number, 1, streams.at(number), cohort=Cohort(streams), privacy=privacy)
        result = protected_round(view.method, state, images, one.before, ctx)
        state = result.private
        sent.append(result.shared.parts)
    return sent


def _moved(view: View, rounds: Sequence[Earlier], sent: Sequence[Sent], streams: Streams) -> torch.Tensor:
    """Return what changed in each round, [rounds, C, F]: of the last layer, and of the generator if one is sent."""
    found = []
    for one, parts in zip(rounds, sent, strict=True):
        before, after = one.before.parts, parts[Part.CLASSIFIER]
        columns = [response(view.spec, before[Part.CLASSIFIER], after)]
        if Part.GENERATOR in parts and Part.GENERATOR in before:
            columns.append(generator_statistics(view, before[Part.GENERATOR], parts, streams))
        found.append(torch.cat(columns, 1))
    return torch.stack(found)
