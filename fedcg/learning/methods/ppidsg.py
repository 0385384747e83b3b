"""PPIDSG (Ma et al., 2024): only a generator is shared, which turns images into block-scrambled ones; the classifier works on those.

A box trains a generator, which imitates the encryption of its own images, a feature extractor and a classifier on generated images, and a
discriminator (`training.encrypting_translation` has the losses, eq. 7-11). The generator alone goes up and is averaged (eq. 5). It takes
IMAGES, so a device shares it only where its owner lists `image_generator`. The classifier starts every round from its key, weights that the
coordinator does not know where the federation has a cohort secret.

`key = device`: each box scrambles by keys of its own, drawn in its first round. `key = cohort`: all that hold the cohort secret scramble
alike, as the authors' code does; their generators then have one target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import cast

import torch
from torch import nn

from fedcg.learning.aggregation.averaging import AverageAggregator
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import Scrambling, ScramblingKeys, draw_keys, scrambling_of
from fedcg.learning.errors import DefenceError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import (
    Aggregate,
    Aggregator,
    ClientState,
    Example,
    LocalResult,
    Method,
    Needs,
    Payload,
    Personal,
    RoundContext,
    ServerState,
    SharedResult,
    Spill,
    Weights,
)
from fedcg.learning.methods._averaging import init_server_of
from fedcg.learning.networks import build_part, load_part, weights_of
from fedcg.learning.networks.assembly import allocated, split_of
from fedcg.learning.networks.image_networks import IMAGE_SPLITS, ImageAutoencoder, unfit_form
from fedcg.learning.networks.layers.initial_values import draw_weights
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice, NetworkSpec
from fedcg.learning.training.encrypting_translation import (
    TRANSLATION_LOSSES,
    TranslationNetworks,
    TranslationParams,
    translation,
)
from fedcg.learning.training.moving_average import average_extras, moving_average
from fedcg.learning.training.stage import run_stage
from fedcg.wire.parts import Part, Report

SHARED = frozenset({Part.IMAGE_GENERATOR})
PRIVATE = frozenset({Part.EXTRACTOR, Part.CLASSIFIER})
SCRAMBLING = "scrambling"  # the extras that hold the keys of a device
_KEY, _DISCRIMINATOR = "key", "discriminator"


class PpidsgParams(TranslationParams, EtcParams):
    """Training, and the encryption that the generator imitates."""


def problem_with(spec: NetworkSpec) -> str:
    """Why a federation can't be planned so, or nothing."""
    if spec.network.split not in IMAGE_SPLITS:
        first, *_ = names = tuple(IMAGE_SPLITS)
        return f"its networks work on whole images: network.split must be {' or '.join(names)} (--network {first})"
    form, params = spec.image, PpidsgParams.model_validate(spec.params)
    if unfit := unfit_form(form):
        return unfit
    try:
        size = form.channels, form.height, form.width
        scrambling_of(draw_keys(Streams(b""), size, params.block), size, params.order(form.channels))
    except DefenceError as error:
        return f"params: {error}"
    return ""


def init_client(spec: FederationSpec, initial: Mapping[Part, Weights]) -> ClientState:
    """A client starts with initial networks.

    A classifier's initial weights follow from the public seed, whatever the method; an extractor's from the cohort secret. So the
    classifier's key, and a cohort's scrambling, are drawn by a secret that follows from the extractor's.
    """
    digest = hashlib.sha256()
    for name in sorted(initial[Part.EXTRACTOR]):
        digest.update(initial[Part.EXTRACTOR][name].numpy().tobytes())
    params, streams = PpidsgParams.model_validate(spec.params), Streams(digest.digest())
    key = weights_of(build_part(spec, Part.CLASSIFIER, streams.generator("key")))
    extras: dict[str, Weights] = {_KEY: key}
    if params.key == "cohort":
        extras[SCRAMBLING] = _stored(draw_keys(streams, _size(spec), params.block))
    return ClientState({part: initial[part] for part in sorted(SHARED | PRIVATE)}, extras)


def _size(spec: NetworkSpec) -> tuple[int, int, int]:
    return spec.image.channels, spec.image.height, spec.image.width


def _stored(keys: ScramblingKeys) -> Weights:
    return {field.name: getattr(keys, field.name) for field in fields(keys) if field.name != "block"}


def scrambling_by(spec: NetworkSpec, keys: Weights) -> Scrambling:
    """What a generator imitates: the scrambling by a device's keys (its extras `scrambling`)."""
    params = PpidsgParams.model_validate(spec.params)
    return scrambling_of(ScramblingKeys(params.block, **keys), _size(spec), params.order(spec.image.channels))


def local_round(state: ClientState, data: ImageSet, aggregate: Aggregate | None, ctx: RoundContext) -> LocalResult:
    """Go on from the averaged generator; the classifier starts from its key."""
    params, spec = PpidsgParams.model_validate(ctx.spec.params), ctx.spec
    kept = state.extras.get(SCRAMBLING)
    if kept is None:
        kept = _stored(draw_keys(ctx.streams.at("keys"), _size(spec), params.block))
    generator = (aggregate or state).parts[Part.IMAGE_GENERATOR]
    nets = TranslationNetworks(
        load_part(spec, Part.IMAGE_GENERATOR, generator, ctx.device),
        _discriminator(state, ctx),
        cast(ImageAutoencoder, load_part(spec, Part.EXTRACTOR, state.parts[Part.EXTRACTOR], ctx.device)),
        load_part(spec, Part.CLASSIFIER, state.extras[_KEY], ctx.device),
    )
    encrypt = scrambling_by(spec, kept).encrypt
    own = {
        Part.IMAGE_GENERATOR: nets.generator,
        Part.EXTRACTOR: nets.extractor,
        Part.CLASSIFIER: nets.classifier,
    }
    average = moving_average(own, params, own)
    told = run_stage(translation(nets, data.to(ctx.device), encrypt, params, ctx, average), ctx)
    losses = dict(zip(TRANSLATION_LOSSES, told, strict=True))
    parts = {part: weights_of(net) for part, net in own.items()}
    extras = {
        **average_extras(average),
        _KEY: {name: tensor.clone() for name, tensor in state.extras[_KEY].items()},
        SCRAMBLING: {name: tensor.clone() for name, tensor in kept.items()},
        _DISCRIMINATOR: weights_of(nets.discriminator),
    }
    shared = SharedResult({Part.IMAGE_GENERATOR: weights_of(nets.generator)})
    return LocalResult(shared, ClientState(parts, extras), Report(examples=len(data), loss=losses["classification"]))


def _discriminator(state: ClientState, ctx: RoundContext) -> nn.Module:
    """The client's own; a new one in its first round."""
    make = split_of(ctx.spec).image_discriminator
    assert make is not None
    with torch.device("meta"):
        module = make(ctx.spec.image.channels)
    module = allocated(module, "cpu")
    if _DISCRIMINATOR in state.extras:
        module.load_state_dict(dict(state.extras[_DISCRIMINATOR]))
    else:
        draw_weights(module, ctx.streams.generator("discriminator"))
    return module.to(ctx.device)


def predict(spec: NetworkSpec, parts: Mapping[Part, Weights]) -> nn.Module:
    """Generator, extractor and classifier, one after the other."""
    order = (Part.IMAGE_GENERATOR, Part.EXTRACTOR, Part.CLASSIFIER)
    return nn.Sequential(*(load_part(spec, part, parts[part]) for part in order))


def aggregator(state: ServerState, ctx: RoundContext, spill: Spill) -> Aggregator:
    """The server half: generators averaged by data size."""
    return AverageAggregator(SHARED, spill)


METHOD = Method(
    name="ppidsg",
    title="PPIDSG: an encrypting image generator is averaged; extractor and classifier stay private",
    params_type=PpidsgParams,
    payload=Payload(SHARED, SHARED, PRIVATE),
    needs=Needs(networks=problem_with),
    personal=Personal(SHARED | PRIVATE, predict),
    init_client=init_client,
    local_round=local_round,
    init_server=partial(init_server_of, SHARED),
    aggregator=aggregator,
    example=Example(
        NetworkChoice(split="image_small"), ImageForm(mode="L", height=16, width=16, mean=(0.5,), std=(0.5,))
    ),
)
