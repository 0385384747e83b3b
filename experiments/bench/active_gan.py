"""The active GAN attack (Hitaj et al. 2017; Anti-GAN §3) inside a federation's rounds. Uses torch.

The last client is the attacker. Its generator lasts over all rounds; the discriminator is each round's aggregate. It adds
generated images of the victim's class to its training images, with a wrong label, so that the victim corrects them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from audit.attacks.class_inference import DRAWN, ClassGan, class_ssim, recognised, trained_judges
from audit.evidence import View, WholeModel, joined
from audit.evidence.networks import trained_alone, whole_model
from audit.measures import unit_pixels
from experiments.data.client_datasets import Cohort, build_cohort, unheld_images
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import defended, party_of, roots_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, beginning, simulated_rounds
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.wire.parts import Part

_STEPS = 40  # of the GAN in a round
_SENT = 32  # mislabelled images in a round
_COMPARED = 50  # images of the victim for SSIM
_ARMS = {"active": (True, True), "passive": (True, False), "floor: active, no victim has the class": (False, True)}


def active_gan(run: RunSetting) -> Iterator[tuple[str, float]]:
    """Mean SSIM (eq. 5) and the judges' probability of the class, by arm; trivial guesses, control and real images beside them.

    The class is the victim's most frequent one. The control is the same GAN on a model trained for long on the victim's
    real images. `passive` sends no generated images.
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

    def scored(name: str, images: torch.Tensor) -> Iterator[tuple[str, float]]:
        yield f"{name}, SSIM", float(class_ssim(images, mine).mean())
        yield f"{name}, class recognised", float(recognised(judges, images, target).mean())

    yield from scored("guess: images of other classes", unit_pixels(known.images)[:DRAWN])
    yield from scored("guess: mean image of other classes", unit_pixels(known.images).mean(0, keepdim=True))
    yield from scored("real images of the class", unit_pixels(outside.images[outside.labels == target])[:DRAWN])
    long = trained_alone(view, initial_parts(spec, bytes(32)), train, streams, 40)
    gan = ClassGan(known, target, streams.at("control"))
    gan.train(_model(spec, long), _STEPS * run.rounds)
    yield from scored("control", gan.images(streams.generator("images")))
    for name, (has_class, is_active) in _ARMS.items():
        held = train if has_class else train.rows((~own).nonzero().flatten())
        cohort = replace(real, clients={**real.clients, victim: replace(real.clients[victim], train=held)})
        images, accuracy = _attacked(run, spec, cohort, target, streams.at("attack"), is_active=is_active)
        yield f"{name}, accuracy of the average model", accuracy
        yield from scored(name, images)


def _attacked(
    run: RunSetting, spec: FederationSpec, cohort: Cohort, target: int, streams: Streams, *, is_active: bool
) -> tuple[torch.Tensor, float]:
    """Run the federation with the attacker; return the images of its GAN after the last round, and the average model's accuracy."""
    attacker = max(cohort.clients)
    if run.defence is not None:
        with TemporaryDirectory() as folder:
            roots = roots_of(run.seed, tuple(sorted(cohort.clients)))
            cohort, _ = defended(cohort, run, roots, Path(folder), lambda _: None)
    party = party_of(run, spec, cohort)
    data = party.datasets[attacker]
    gan, wrong = ClassGan(data.train, target, streams), int(data.train.labels.mode().values)
    now = None
    for number in range(run.rounds):
        train = data.train
        if now is not None and is_active:
            fakes = (gan.images(streams.generator("fakes", number))[:_SENT] * 255.0).round().byte()
            train = joined(train, ImageSet(fakes, torch.full((_SENT,), wrong), train.classes))
        poisoned: Party = replace(party, datasets={**party.datasets, attacker: replace(data, train=train)})
        schedule = Schedule(shadow=False, evaluate_every=run.rounds)
        now = next(simulated_rounds(poisoned, schedule, resume=now))
        gan.train(_model(spec, now.aggregate.parts), _STEPS)
    assert now is not None
    return gan.images(streams.generator("images")), now.global_accuracy[-1][1]


def _model(spec: FederationSpec, parts: Mapping[Part, Weights]) -> WholeModel:
    return whole_model(spec, parts[Part.EXTRACTOR], parts[Part.CLASSIFIER])
