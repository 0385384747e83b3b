"""Attacks on a sent image generator (PPIDSG): membership, class shares, its images, and the key of the scrambling.

PPIDSG claims that labels and members can't be inferred without a shared classifier, and that images can only be
obtained from the generator's outputs (§3). No attack on the generator itself is published. The attacker here compares
the generator's output for an image with the output of the aggregate before the round, and with those of the other
clients' generators. A larger change of the output means that the round had more to learn.

The block scrambling that an image generator imitates (PPIDSG, algorithm 1) is estimated from its outputs for known
images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from audit import measures as likenesses
from audit.attacks.attack import Attack, Found, Tick, Trial
from audit.attacks.label_distribution import trivial_guesses, two_class_control, update_figures
from audit.attacks.membership import MemberScores, auc, balanced_pairs, membership_figures
from audit.evidence import Case, Knowledge, View, networks
from audit.measures import Control, Figure, Measure, Pictures, Reconstructions, Values, png, proportion, unit_pixels
from audit.techniques.image_decoder import trained_decoder
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.scrambling import Scrambling, draw_keys, scrambling_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.methods.ppidsg import SCRAMBLING, PpidsgParams, scrambling_by
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.values import Value
from fedcg.wire.parts import Part

MOST_NUMBERS = 4096  # numbers in an image: the table of correlations between pixels has the square of this, 64 MB
_TINY = 1e-6


def estimated_scrambling(images: torch.Tensor, made: torch.Tensor, block: int) -> Scrambling:
    """Estimate the scrambling that best explains a generator's outputs.

    Each block of an output is matched with a source block, rotation, reflection, complement and channel permutation.
    The match has the highest sum of absolute correlations between their numbers; every block is used once.

    Args:
        images: known images, [N, C, H, W].
        made: the generator's outputs for them, [N, C, H, W].
        block: side of a block in pixels; it divides both sides of an image.
    """
    shape = images.shape[1:]
    numbers = _blocks(torch.arange(shape.numel()).view(1, *shape), block)[0]
    known, seen = (_standardised(_blocks(some, block)) for some in (images, made))
    moves = _moves(shape[0], block)
    count, size = numbers.shape
    best, which = torch.zeros(count, count), torch.zeros(count, count, dtype=torch.int64)
    for place in range(count):
        table = torch.einsum("ni,nsj->sij", seen[:, place], known) / len(images)
        scores = table[:, torch.arange(size), moves].sum(2)
        chosen = scores.abs().argmax(1)
        which[place] = chosen
        best[place] = scores.gather(1, chosen[:, None])[:, 0]
    _, sources = linear_sum_assignment(best.abs().numpy(), maximize=True)
    source, mask = torch.empty(shape.numel(), dtype=torch.int64), torch.zeros(shape.numel(), dtype=torch.uint8)
    for place, origin in enumerate(sources.tolist()):
        source[numbers[place]] = numbers[origin][moves[which[place, origin]]]
        mask[numbers[place]] = 255 if best[place, origin] < 0 else 0
    return Scrambling((shape[0], shape[1], shape[2]), source, mask)


def _blocks(images: torch.Tensor, block: int) -> torch.Tensor:
    """[N, C, H, W] -> [N, blocks, C * block * block], row by row."""
    count, channels, height, width = images.shape
    grid = images.view(count, channels, height // block, block, width // block, block)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * block * block)


def _standardised(blocks: torch.Tensor) -> torch.Tensor:
    deviation, mean = torch.std_mean(blocks, 0)
    return (blocks - mean) / (deviation + _TINY)


def _moves(channels: int, block: int) -> torch.Tensor:
    """Return [M, C * block * block]: every way in which rotation, reflection and channel permutation can move the numbers of a block."""
    numbers = torch.arange(channels * block * block).view(channels, block, block)
    turned = [some.rot90(turns, (1, 2)) for some in (numbers, numbers.flip(2)) for turns in range(4)]
    orders = itertools.permutations(range(channels))
    return torch.stack([some[list(order)].flatten() for order in orders for some in turned])


_BATCH = 128
_VICTIMS, _SHOWN = 64, 8
_CONCENTRATION = 0.5  # of the simulated clients' class shares
_RIDGE = 0.1
_CONTROL_ROWS, _CONTROL_EPOCHS, _CONTROL_AUC = 48, 40, 0.7
_FLOOR_IS = "the change of the output in the other clients' rounds (without others: its contrast with the aggregate's generator), or chance"
_KEY = Measure(
    "scrambled_blocks", "Blocks of the scrambling recovered from the generator, correct in every pixel", "share"
)
_BY_CLASS = "movement of the image generator's outputs by class"
Make = Callable[[torch.Tensor], torch.Tensor]
"""[N, C, H, W] uint8 -> [N, C, H, W] in [0, 1]: a generator's outputs for images."""


def maker(view: View, weights: Weights) -> Make:
    """Return an image generator of the federation with these weights."""
    form, network = view.spec.image, load_part(view.spec, Part.IMAGE_GENERATOR, weights).eval()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (form.mean, form.std))

    @torch.no_grad()
    def make(images: torch.Tensor) -> torch.Tensor:
        made = torch.cat([network(normalise(some, form)) for some in images.split(_BATCH)])
        return (made * std + mean).clamp(0, 1)

    return make


class Movement(Value):
    """The sent generator, the aggregate's before the round, and those of the other clients."""

    own: Make
    before: Make
    others: tuple[Make, ...]

    @staticmethod
    def of(view: View) -> Movement:
        """Build from the update of a view."""
        own, before, *others = (
            maker(view, parts[Part.IMAGE_GENERATOR])
            for parts in (view.update, view.before.parts, *view.others.values())
        )
        return Movement(own, before, tuple(others))

    def scores(self, images: torch.Tensor) -> dict[str, Values]:
        """Return the change of the generator's output for each image (mean, log), also relative to the other clients' rounds.

        Args:
            images: [N, C, H, W] uint8.

        Returns:
            [N] by setting.
        """
        base = self.before(images)
        own = _moved(self.own(images), base)
        found = {"movement of its output": own}
        if self.others:
            found["movement of its output relative to the other clients'"] = own - self._usual(images, base)
        return found

    def blind(self, images: torch.Tensor) -> Values:
        """Return scores that use no update of this client, [N]."""
        base = self.before(images)
        return self._usual(images, base) if self.others else base.flatten(1).std(1).double().numpy()

    def _usual(self, images: torch.Tensor, base: torch.Tensor) -> Values:
        found: Values = np.mean([_moved(one(images), base) for one in self.others], axis=0)
        return found

    def by_class(self, probes: ImageSet, classes: int) -> torch.Tensor:
        """Return mean scores over the probes of each class, minus the mean of all classes, [classes, scores]."""
        each = torch.from_numpy(np.stack(list(self.scores(probes.images).values()), 1))
        means = torch.stack([each[probes.labels == label].mean(0) for label in range(classes)])
        return means.nan_to_num(0.0) - means.nanmean(0)


def _moved(made: torch.Tensor, base: torch.Tensor) -> Values:
    return ((made - base).abs().flatten(1).mean(1) + _TINY).log().double().numpy()


def _params(view: View) -> PpidsgParams:
    return PpidsgParams.model_validate(view.spec.params)


def _member_scores(movement: Movement, candidates: ImageSet) -> Iterator[MemberScores]:
    used = {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.CANDIDATES}
    blind = movement.blind(candidates.images)
    for setting, score in movement.scores(candidates.images).items():
        beside = {Knowledge.OTHERS} if "other" in setting else set()
        yield MemberScores(setting, frozenset(used | beside), score, blind, None, _FLOOR_IS)


class ShareModel(Value):
    """A linear map from the movement of a class's outputs to the class's share, fitted on clients that the attacker simulates.

    Attributes:
        probes: auxiliary images for measuring movements.
        weights: [scores].
    """

    probes: ImageSet
    weights: torch.Tensor

    @staticmethod
    def fitted(view: View, probes: ImageSet, images: ImageSet, count: int, streams: Streams, tick: Tick) -> ShareModel:
        """Fit by ridge regression.

        Args:
            view: gives the method and aggregate of the simulated clients.
            probes: none of `images`, on which the clients are trained.
            images: auxiliary images.
            count: number of clients, at least 1; their shares are drawn from a Dirichlet distribution.
            streams: for shares, images and training.
            tick: called after each client.
        """
        classes, drawn = view.spec.class_count, np.random.default_rng(streams.seed("shares"))
        rows, inputs, targets = min(view.report.examples or len(images), len(images)), [], []
        for at in range(count):
            wanted = torch.from_numpy(drawn.dirichlet([_CONCENTRATION] * classes))[images.labels] + _TINY
            some = images.rows(torch.multinomial(wanted, rows, generator=streams.generator("images", at)))
            sent = networks.of_simulated_client(view, some, streams.at("client", at), _params(view).epochs)
            inputs.append(Movement.of(sent).by_class(probes, classes))
            targets.append(torch.tensor(some.label_counts(), dtype=torch.float64) / rows - 1 / classes)
            tick()
        table, right = torch.cat(inputs), torch.cat(targets)
        square = table.T @ table
        eye = torch.eye(len(square), dtype=torch.float64) * (_RIDGE * square.diagonal().mean() + _TINY)
        return ShareModel(probes, torch.linalg.solve(square + eye, table.T @ right))

    def shares(self, view: View) -> torch.Tensor:
        """Return the shares of the client whose update the view has, [C]."""
        classes = view.spec.class_count
        guess = (1 / classes + Movement.of(view).by_class(self.probes, classes) @ self.weights).clamp(min=_TINY)
        return guess / guess.sum()


def _decoded(trial: Trial, known: ImageSet, movement: Movement, steps: int, tick: Tick) -> Iterator[Figure | Pictures]:
    """Reconstruct training images from the generator's outputs, with a network trained on auxiliary images."""
    streams, train = trial.streams, trial.truth.train
    victims = train.rows(torch.randperm(len(train), generator=streams.generator("victims"))[:_VICTIMS])
    pixels, made = unit_pixels(victims.images), movement.own(victims.images)
    decode = trained_decoder(known, movement.own(known.images).flatten(1), steps, streams, tick)
    found = decode(made.flatten(1)).view(pixels.shape)
    view = replace(trial.view, auxiliary=known)
    guesses = likenesses.trivial_images(view, victims, streams.generator("floor"))
    against = Reconstructions(found, pixels, {name: (guess, pixels) for name, guess in guesses})
    used = (Knowledge.UPDATE, Knowledge.AUXILIARY, Knowledge.PRIVATE)
    setting = "outputs for images of the device, which are not sent"
    figure = against.figure("psnr", setting, used, None, streams.seed("bootstrap"))
    yield replace(figure, name="decoded_psnr", title="Images reconstructed from the generator's outputs, PSNR")
    rows = (("image of the device", pixels), ("generator's output", made), ("reconstruction", found))
    pictures = tuple((name, tuple(map(png, some[:_SHOWN]))) for name, some in rows)
    yield Pictures("Images, the generator's outputs, and reconstructions", pictures)


def right_blocks(make: Make, true: Scrambling, known: ImageSet, block: int) -> tuple[int, int]:
    """Return the number of blocks in an image, and how many blocks of the estimated scrambling are correct in every pixel."""
    found = estimated_scrambling(unit_pixels(known.images), make(known.images), block)
    same = ((found.source == true.source) & (found.mask == true.mask)).view(known.images.shape[1:])
    right = same.all(0).unfold(0, block, block).unfold(1, block, block).flatten(2).all(2)
    return right.numel(), int(right.sum())


def _key_figure(blocks: int, right: int) -> Figure:
    """Return the figure; 1 / k! bounds the probability that a random order of blocks has k in place (Markov's inequality)."""
    likely = likenesses.Chance(1 / math.factorial(right), 1 / math.factorial(blocks))
    used, floor = (Knowledge.UPDATE, Knowledge.AUXILIARY), ("a block at random", 1 / blocks)
    return _KEY.figure("whole update", used, proportion(right, blocks), floor, blocks, chance=likely)


def _key_control(case: Case, known: ImageSet, streams: Streams) -> Control:
    """Test on a planted generator that encrypts with its own keys, exactly but for some noise."""
    form, params = case.view.spec.image, _params(case.view)
    size = form.channels, form.height, form.width
    planted = scrambling_of(draw_keys(streams, size, params.block), size, params.etc.order(form.channels))
    stream = streams.generator("planted")

    def make(images: torch.Tensor) -> torch.Tensor:
        return unit_pixels(planted.encrypt(images)) + 0.1 * torch.randn(images.shape, generator=stream)

    blocks, right = right_blocks(make, planted, known, params.block)
    title = "planted generator that encrypts with noise: correct blocks of the scrambling"
    return Control(title, right / blocks, "above 0.95", right / blocks > 0.95, _KEY.name)


def membership_control(case: Case, streams: Streams) -> Control:
    """Test on a simulated client that trained on a few images for long."""
    stream = streams.generator("rows")
    inside, outside = (
        some.rows(torch.randperm(len(some), generator=stream)[:_CONTROL_ROWS])
        for some in (case.truth.train, case.truth.held_out)
    )
    movement = Movement.of(networks.of_simulated_client(case.view, inside, streams, _CONTROL_EPOCHS))
    name, members = list(movement.scores(inside.images).items())[-1]
    value = auc(members, movement.scores(outside.images)[name])
    title = f"simulated client that trained on {len(inside)} images for {_CONTROL_EPOCHS} epochs, {name}: AUC"
    return Control(title, value, f"above {_CONTROL_AUC}", value > _CONTROL_AUC, "mia_auc")


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, view, streams, effort = trial.case, trial.view, trial.streams, trial.effort
    assert view.auxiliary is not None
    count, steps, params = effort.of(2, 6, 16), effort.of(200, 1500, 5000), _params(view)
    tick = trial.steps(steps + count + 3)
    order = torch.randperm(len(view.auxiliary), generator=streams.generator("auxiliary"))
    known, fit = (view.auxiliary.rows(some) for some in order[: effort.of(1500, 4000, 20_000)].tensor_split(2))
    movement = Movement.of(view)
    candidates, members = balanced_pairs(case.truth, effort.of(400, 1000, 10_000), streams.generator("candidates"))
    scores = list(_member_scores(movement, candidates))
    for one in scores:
        yield from membership_figures(one, members, candidates.labels, streams.seed("bootstrap"))
    model = ShareModel.fitted(view, known, fit, count, streams, tick)
    yield from update_figures(case, {_BY_CLASS: model.shares(view)[None]}, trivial_guesses(view, streams))
    yield from _decoded(trial, known, movement, steps, tick)
    keys = case.truth.extras.get(SCRAMBLING)
    if keys is not None:
        yield _key_figure(*right_blocks(movement.own, scrambling_by(view.spec, keys), known, params.block))
    tick()

    def of_simulated(some: ImageSet, own: Streams) -> torch.Tensor:
        return model.shares(networks.of_simulated_client(view, some, own, params.epochs))

    classes = two_class_control(case, _BY_CLASS, of_simulated)
    tick()
    yield membership_control(case, streams.at("control"))
    yield replace(classes, figure="label_l1")
    yield _key_control(case, known, streams)
    tick()
    yield f"Class shares were fitted on {count} clients simulated by the attacker."
    yield (
        "Neither images nor the generator's outputs cross the wire: for decoded_psnr an attacker would have to steal outputs."
    )
    if keys is None:
        yield "Recovering the key of the scrambling was not tried: its keys were not given."


def _lacks(case: Case) -> str | None:
    form = case.view.spec.image
    if not issubclass(case.view.method.params_type, PpidsgParams):
        return f"{case.view.spec.method} has no block scrambling for its image generator to imitate"
    if form.channels * form.height * form.width > MOST_NUMBERS:
        return f"images of more than {MOST_NUMBERS} numbers: the table of correlations between pixels would take over 64 MB"
    return None


ATTACK = Attack(
    name="image_generator",
    title="Shared image generator",
    question="Does the generator reveal images of the device, its classes, or the key of its encryption?",
    source="PPIDSG algorithm 1 and section 3; movement of an output as a membership score, after RMIA's ratio and update-based leakage (Melis 2019)",
    carry_out=_carry_out,
    parts=frozenset({Part.IMAGE_GENERATOR}),
    auxiliary=True,
    held_out=True,
    lacking=_lacks,
    least_side=7,
)
