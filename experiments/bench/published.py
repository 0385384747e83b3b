"""Repeats attacks of PPIDSG (Ma et al. 2024) as published, beside the arms that show what each of them measures. Uses torch.

Settings are in `published.toml`. A figure has a name in words and is the mean over the images or batches of one seed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import fmean

import tomllib
import torch
from torch import nn

from audit.attacks.label_distribution import counts_of, labels_by_weight
from audit.evidence import WholeModel, networks
from audit.measures import psnr, unit_pixels
from audit.techniques import gradients, shadow_models
from experiments.bench.active_gan import active_gan
from experiments.data.client_datasets import unheld_images
from experiments.record import bench_record, write_record
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import simulated_party
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import reduced_update
from fedcg.learning.method import silent
from fedcg.learning.networks import build_part, load_part, weights_of
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import PrivacySettings
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.parts import Part

Figures = Iterator[tuple[str, float]]
_PROBES = ("uniform", "gaussian", "auxiliary", "features")
_SIZES, _TRIES, _DRAWS, _ROWS, _IMAGES = (32, 64, 128), 32, 10, 500, 2
_SETTINGS = tomllib.loads(files(__package__).joinpath("published.toml").read_text(encoding="utf-8"))


def recorded(name: str, rows: Sequence[str], data: str, seeds: Sequence[int], out: Path) -> dict[str, list[float]]:
    """Carry out a published experiment; return its figures by data, row and name, one value per seed.

    A record per row and seed is written, and a finished one is not repeated. Without `rows` all are run.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for seed, (row, own) in product(seeds, _SETTINGS[name]["rows"].items()):
        run = RunSetting.model_validate({**_SETTINGS[name]["setting"], **own, "data": data, "seed": seed})
        path = out / name / f"{run.data_name}-{row}-seed{seed}.json"
        if not path.is_file() and row in (rows or [row]):
            values: dict[str, list[float]] = defaultdict(list)
            for figure, value in EXPERIMENTS[name](run):
                values[figure].append(value)
            options = {"row": row, "data": run.data_name, "seeds": seed}
            head = bench_record("bench privacy published", run.published(), name, **options)
            write_record({**head, "figures": {figure: round(fmean(some), 5) for figure, some in values.items()}}, path)
        for figure, mean in json.loads(path.read_text())["figures"].items() if path.is_file() else ():
            found[f"{run.data_name}, {row}: {figure}"].append(mean)
    return found


def _trained(run: RunSetting) -> tuple[Party, ImageSet, Simulation]:
    """Return the participants, images of no client, and the state after the last round with its updates."""
    source = run.source()
    party = simulated_party(run, source)
    auxiliary = unheld_images(source, party.spec.input, run.deal(), 2000)
    assert auxiliary is not None
    schedule = Schedule(shadow=False, evaluate_every=run.rounds, kept_updates=frozenset({run.rounds}))
    return party, auxiliary, simulate(party, schedule)


def _defended(values: gradients.Gradients, name: str, streams: Streams) -> gradients.Gradients:
    """Return a gradient after a mechanism of `published.toml`."""
    sent = {Part.CLASSIFIER: {f"{at:02}": value for at, value in enumerate(values)}}
    base = {part: {at: torch.zeros_like(value) for at, value in one.items()} for part, one in sent.items()}
    privacy = PrivacySettings.model_validate(_SETTINGS["defences"].get(name, {}))
    return tuple(reduced_update(sent, base, privacy, streams.generator(name))[Part.CLASSIFIER].values())


@torch.no_grad()
def _means(model: WholeModel, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean prediction [C] and the mean input [D] of the last layer, for features."""
    *before, last = model.classifier.children()
    inputs = nn.Sequential(*before)(features)
    return last(inputs).softmax(1).mean(0), inputs.mean(0)


@torch.no_grad()
def _probes(model: WholeModel, probe: str, auxiliary: ImageSet, stream: torch.Generator) -> torch.Tensor:
    """Return features of random images, of auxiliary ones, or random features."""
    pixels = unit_pixels(auxiliary.rows(torch.randperm(len(auxiliary), generator=stream)[:_ROWS]).images)
    pixels = torch.rand(pixels.shape, generator=stream) if probe == "uniform" else pixels
    # Gaussian after normalisation, as in the authors' code
    given = torch.randn(pixels.shape, generator=stream) if probe == "gaussian" else normalise(pixels, model.form)
    features: torch.Tensor = model.extractor(given)
    return torch.rand(features.shape, generator=stream) if probe == "features" else features


def labels(run: RunSetting) -> Figures:
    """Label inference (eq. 1-3): the share of a batch's labels that is right, by state of the network, probes, batch and defence.

    Probes are uniform or Gaussian images (their code), auxiliary images, or uniform features (the audit's). If the
    extractor is private, the attacker has the public start's. Controls: `itself`, the batch as probes, and a batch of
    one class. The best guess is that all classes are alike.
    """
    party, auxiliary, result = _trained(run)
    spec, client, streams = party.spec, min(party.datasets), Streams(b"labels").at(run.seed)
    train, order = party.datasets[client].train, streams.generator("batches")
    sizes = [size for size in _SIZES for _ in range(_TRIES) if size <= len(train)]
    batches = [(f"batches of {size}", torch.randperm(len(train), generator=order)[:size]) for size in sizes]
    one_class = torch.nonzero(train.labels == train.labels.mode().values).flatten()[:32]
    ends = {**result.states[client].parts, **result.aggregate.parts}
    for state, parts in (("initial", initial_parts(spec, party.roots.cohort)), ("trained", ends)):
        own = Part.EXTRACTOR in result.aggregate.parts
        known = (
            parts if own else {**parts, networks.WHOLE[0]: initial_parts(spec, spec_root(spec.seed))[networks.WHOLE[0]]}
        )
        true, model = (networks.whole_model(spec, some) for some in (parts, known))
        means = defaultdict(list)
        for probe, at in product(_PROBES, range(_DRAWS)):
            means[probe].append(_means(model, _probes(model, probe, auxiliary, streams.generator(probe, at))))
        for number, (title, rows) in enumerate([*batches, ("control, one class", one_class)]):
            some, right = train.rows(rows), torch.bincount(train.labels[rows], minlength=spec.class_count)
            pixels = unit_pixels(some.images)
            values = gradients.gradient(true, pixels, some.labels, networks.WHOLE if own else networks.WHOLE[1:])
            with torch.no_grad():
                means["itself"] = [_means(true, true.features(pixels))]
            found = {"best guess": counts_of(torch.ones(spec.class_count), len(rows))}
            for name in _SETTINGS["defences"]:
                weight = _defended(values, name, streams.at(number))[-2]
                for probe, draws in means.items():
                    counts = [counts_of(labels_by_weight(weight, *one), len(rows)) for one in draws]
                    found[f"{probe}, {name}"] = torch.stack(counts).mode(0).values
            for name, counted in found.items():
                yield f"{title}, {state}, {name}", float(torch.minimum(counted, right).sum() / len(rows))


def membership(run: RunSetting) -> Figures:
    """Two shadow models (section 3): accuracy on suspects, half of them the victim's.

    `published`: as in their code, each suspect passes the model of its true owner. `untouched`: the same with images
    that no client has. `swapped`: each passes the other model, and the answer counts as right if it names the model.
    `victim`: every suspect passes the victim's model, the only choice of an attacker who does not know the owner.
    """
    party, known, result = _trained(run)
    names, order = sorted(party.datasets), Streams(b"membership").generator(run.seed)
    mine, theirs = (party.datasets[name].train for name in names[:2])
    *halves, outside = (known.rows(some) for some in torch.randperm(len(known), generator=order).tensor_split(3))
    count = min(len(mine), len(theirs), len(outside) // 2)
    pairs = (mine.rows(range(count)), theirs.rows(range(count)))
    unseen = (outside.rows(range(count)), outside.rows(range(count, 2 * count)))
    arms = {"published": (pairs, (0, 1)), "untouched": (unseen, (0, 1)), "swapped": (pairs, (1, 0))}
    arms["victim"] = (pairs, (0, 0))
    for case, others in (("part", names[1:2]), ("all", names[1:])):
        sent = [[result.sent[name].shared.parts for name in some] for some in (names[:1], others)]
        means = [shadow_models.mean_parts(some) for some in sent]
        models = [networks.whole_model(party.spec, parts) for parts in means]
        rows = [shadow_models.posteriors(model, some) for model, some in zip(models, halves, strict=True)]
        units, lr = shadow_models.PAIR_UNITS, shadow_models.PAIR_LR
        judge = shadow_models.separator(rows[0], rows[1], units, lr, Streams(b"judge").at(run.seed))
        for arm, (suspects, passed) in arms.items():
            for owner, (some, at) in enumerate(zip(suspects, passed, strict=True)):
                is_others = judge(shadow_models.posteriors(models[at], some)) <= 0.5
                yield f"{case}, {arm}", float((is_others == (at if arm == "swapped" else owner)).mean())


def keys(run: RunSetting) -> Figures:
    """Figure 7: accuracy with the averaged generator, by the weights of C; log10 of the key space, eq. 12; PSNR of G's images."""
    party, _, result = _trained(run)
    channels, height, width = party.spec.image.tensor_shape
    count, states = height // 4 * (width // 4), 4 * 2 * 3 * math.factorial(channels)
    yield "log10 of the key space", (math.lgamma(count + 1) + count * math.log(states)) / math.log(10)
    other = weights_of(build_part(party.spec, Part.CLASSIFIER, Streams(b"other key").generator(run.seed)))
    for client, data in party.datasets.items():
        own = {**result.states[client].parts, **result.aggregate.parts}
        extras = result.states[client].extras
        for name, weights in {"trained": own[Part.CLASSIFIER], "key": extras["key"], "another key": other}.items():
            yield f"accuracy, {name}", evaluate(party.spec, {**own, Part.CLASSIFIER: weights}, data.test).accuracy
        pixels, stream = unit_pixels(data.test.images[:_IMAGES]), Streams(b"noise").generator(run.seed, client)
        generator = load_part(party.spec, Part.IMAGE_GENERATOR, own[Part.IMAGE_GENERATOR]).eval()
        given = {"image": normalise(pixels, party.spec.image), "noise": torch.randn(pixels.shape, generator=stream)}
        for name, images in given.items():
            yield f"PSNR of G({name})", float(psnr(generator(images).detach() / 2 + 0.5, pixels).mean())


def _dlg_network(party: Party, stream: torch.Generator) -> WholeModel:
    """Return DLG's LeNet with sigmoids and weights in (-0.5, 0.5)."""
    channels, height, width = party.spec.image.tensor_shape
    with torch.device("meta"):
        layers = [nn.Conv2d(of, 12, 5, padding=2, stride=by) for of, by in ((channels, 2), (12, 2), (12, 1))]
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(3 * height * width // 4, party.spec.class_count))
    extractor = nn.Sequential(*(one for layer in layers for one in (layer, nn.Sigmoid())))
    for weight in (weight for net in (extractor, classifier) for weight in net.to_empty(device="cpu").parameters()):
        nn.init.uniform_(weight, -0.5, 0.5, generator=stream)
    return WholeModel(extractor, classifier, party.spec.input)


def reconstruction(run: RunSetting) -> Figures:
    """Figures 4 and 17-19: PSNR of DLG's result to the real image, and to the image that the network saw, by defence."""
    party = simulated_party(run, run.source())
    streams, train = Streams(b"reconstruction").at(run.seed), party.datasets[min(party.datasets)].train
    some, draws = train.rows(range(_IMAGES)), streams.generator("weights")
    model, other = (_dlg_network(party, draws) for _ in range(2))
    real, form, classes = unit_pixels(some.images), party.spec.image.tensor_shape, party.spec.class_count
    how = gradients.Search(200, gradients.Start.NOISE)
    for name in (*_SETTINGS["defences"], "ats", "etc", "classifier alone"):
        given = some
        if name in {"ats", "etc"}:
            defence, params = defence_of(name, {})
            given = defence.apply(some, params, DefencePlace(streams, silent)).images
        sent = networks.WHOLE[1:] if name == "classifier alone" else networks.WHOLE
        attacker = model if sent == networks.WHOLE else WholeModel(other.extractor, model.classifier, model.form)
        for row, seen in enumerate(unit_pixels(given.images).unsqueeze(1)):
            values = gradients.gradient(model, seen, some.labels[row : row + 1], sent)
            observed = gradients.BatchGradient(sent, _defended(values, name, streams.at(row)), 1)
            objective, stream = gradients.gradient_distance(attacker, observed), streams.generator("search", row)
            found = gradients.search(objective, some.labels[row : row + 1], form, classes, how, stream).pixels
            yield f"{name}, real image", float(psnr(found, real[row : row + 1])[0])
            yield f"{name}, image seen", float(psnr(found, seen)[0])
    mean = unit_pixels(train.images).mean(0, keepdim=True).expand_as(real)
    yield "mean image", float(psnr(mean, real).mean())


EXPERIMENTS: Mapping[str, Callable[[RunSetting], Figures]] = {
    function.__name__: function for function in (labels, membership, keys, reconstruction, active_gan)
}
