"""The active GAN attack (Hitaj et al. 2017; Anti-GAN §3) inside a federation's rounds. Uses torch.

The last client is the attacker. Its generator lasts over all rounds; the discriminator is each round's aggregate. It adds
generated images of the victim's class to its training images, with a wrong label, so that the victim corrects them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from audit.attacks.class_inference import DRAWN, ClassGan, class_ssim, recognised, trained_judges
from audit.evidence import View, joined, networks
from audit.measures import psnr, ssim, unit_pixels
from experiments.data.client_datasets import build_cohort, unheld_images
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import defended, party_of, roots_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, beginning, simulated_rounds
from fedcg.learning.spec import plan_from_mapping

_STEPS = 40  # of the GAN in a round
_SENT = 32  # mislabelled images in a round
_COMPARED = 50  # images of the victim for SSIM
Figures = Iterator[tuple[str, float]]


def active_gan(run: RunSetting) -> Figures:
    """Mean SSIM (Anti-GAN eq. 5) and the judges' probability of the class, by arm; guesses, a control and real images beside them.

    The class is the victim's most frequent one. The control is the same GAN on a model trained for long on the victim's
    real images. `passive` sends no generated images. The floor is the same attack where the victim lacks the class.
    """
    source = run.source()
    spec = complete_spec(plan_from_mapping(run.plan(source)))
    real, streams = build_cohort(source, spec.input, run.deal()), Streams(b"active_gan").at(run.seed)
    victim, attacker = min(real.clients), max(real.clients)
    train, known = real.clients[victim].train, real.clients[attacker].train
    target = int(train.labels.mode().values)
    outside, own = unheld_images(source, spec.input, run.deal(), 1500), train.labels == target
    view = View(spec, attacker, 1, {}, beginning(party_of(run, spec, real), Schedule(shadow=False)).aggregate)
    judges = trained_judges(view, joined(outside, train), 2, 8, streams, lambda: None)
    mine = unit_pixels(train.images[own])[:_COMPARED]

    def scored(name: str, images: torch.Tensor) -> Figures:
        yield f"{name}, SSIM", float(class_ssim(images, mine).mean())
        yield f"{name}, class recognised", float(recognised(judges, images, target).mean())

    yield from scored("guess: images of other classes", unit_pixels(known.images)[:DRAWN])
    yield from scored("guess: mean image of other classes", unit_pixels(known.images).mean(0, keepdim=True))
    yield from scored("real images of the class", unit_pixels(outside.images[outside.labels == target])[:DRAWN])
    long = networks.trained_alone(view, initial_parts(spec, bytes(32)), train, streams, 40)
    gan = ClassGan(known, target, streams.at("control"))
    gan.train(networks.whole_model(spec, long), _STEPS * run.rounds)
    yield from scored("control", gan.images(streams.generator("images")))
    for has_class in (True, False):
        held = train if has_class else train.rows((~own).nonzero().flatten())
        cohort = replace(real, clients={**real.clients, victim: replace(real.clients[victim], train=held)})
        if run.defence is not None:
            with TemporaryDirectory() as folder:
                roots = roots_of(run.seed, tuple(sorted(cohort.clients)))
                cohort, facts = defended(cohort, run, roots, Path(folder), lambda _: None)
            if has_class:
                yield from ((name, float(value)) for name, value in facts[victim].items() if "spread" in name)
                yield from _unmixed(cohort.clients[victim].train, train, outside, float(str(run.defence_params["mu"])))
        for is_active in (False, True):
            name = f"{'active' if is_active else 'passive'}, victim {'has' if has_class else 'lacks'} the class"
            party = party_of(run, spec, cohort)
            images, accuracy = _attacked(party, attacker, target, streams.at("attack"), is_active=is_active)
            yield f"{name}, accuracy of the average model", accuracy
            yield from scored(name, images)


def _attacked(
    party: Party, attacker: str, target: int, streams: Streams, *, is_active: bool
) -> tuple[torch.Tensor, float]:
    """Run the federation with the attacker; return the images of its GAN after the last round, and the average model's accuracy."""
    data, rounds, now = party.datasets[attacker], party.spec.rounds, None
    gan, wrong = ClassGan(data.train, target, streams), int(data.train.labels.mode().values)
    for number in range(rounds):
        train = data.train
        if now is not None and is_active:
            fakes = (gan.images(streams.generator("fakes", number))[:_SENT] * 255.0).round().byte()
            train = joined(train, ImageSet(fakes, torch.full((_SENT,), wrong), train.classes))
        poisoned = replace(party, datasets={**party.datasets, attacker: replace(data, train=train)})
        now = next(simulated_rounds(poisoned, Schedule(shadow=False, evaluate_every=rounds), resume=now))
        gan.train(networks.whole_model(party.spec, now.aggregate.parts), _STEPS)
    assert now is not None
    return gan.images(streams.generator("images")), now.global_accuracy[-1][1]


def _unmixed(mixed: ImageSet, real: ImageSet, known: ImageSet, mu: float) -> Figures:
    """Anti-GAN §5.4, for an attacker whose gradient matching is exact: likeness of mixed images to the real ones, as they are and unmixed.

    To unmix, it replaces the mean of a class's mixed images by that of known images of the class: a texture that all
    generated images of the class share is gone.
    """
    truth, seen = unit_pixels(real.images), unit_pixels(mixed.images)
    means = torch.stack([unit_pixels(known.images[known.labels == label]).mean(0) for label in real.labels])
    textures = torch.stack([seen[real.labels == label].mean(0) for label in real.labels])
    shown = {"mixed": seen, "unmixed": (means + (seen - textures) / mu).clamp(0, 1), "class mean": means}
    for name, some in shown.items():
        yield f"gradient matching, {name}, PSNR", float(psnr(some, truth).mean())
        yield f"gradient matching, {name}, SSIM", float(ssim(some, truth).mean())
