"""Clients whose images went through a data defence, each with its own secret, as devices do it. Uses torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.data.client_datasets import Cohort
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.errors import DataError
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import ParameterValue


@dataclass(frozen=True)
class Asked:
    """A defence, its parameters, and what it works with.

    Attributes:
        secrets: of the clients by id; each client's defence has the streams of a device with that secret.
        cohort: the secret that all of them have, or None.
        federation: its name.
        folder: what was learned is kept below it; another run of the same images goes on from there.
        device: torch device.
        note: gets a line for every tenth of a client's training that is done, and the warnings.
    """

    name: str
    params: Mapping[str, ParameterValue]
    secrets: Mapping[str, bytes]
    cohort: bytes | None
    federation: str
    folder: Path
    device: str = "cpu"
    note: Callable[[str], None] = lambda _: None


def defend(cohort: Cohort, asked: Asked) -> tuple[Cohort, dict[str, dict[str, str]]]:
    """The same cohort with defended training images, the others as the defence's input layer leaves them, and its facts by client.

    Raises:
        DataError: a client lacks the images that the defence needs; names it.
        DefenceError: images or secrets that the defence does not allow.
        NetworkError: weights that the defence asks for can't be had.
        DivergedError: its training diverged.
    """
    defence, params = defence_of(asked.name, asked.params)
    clients, facts, scope = dict(cohort.clients), {}, (asked.federation, "defence")
    together = None if asked.cohort is None else Streams(asked.cohort).at(*scope)
    for name, data in cohort.clients.items():
        streams, folder = Streams(asked.secrets[name]).at(*scope), asked.folder / name
        place = DefencePlace(
            streams, _tenths(name, asked), folder, asked.device, cohort=together, warn=_named(name, asked)
        )
        try:
            made = defence.apply(data.train, params, place)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        made.keep_picture(folder)
        channels, height, width = data.train.images.shape[1:]
        make = defence.input_layer
        given = replace(data, input_layer=make(params, place, (channels, height, width)) if make else None)
        clients[name] = replace(given, train=made.images, val=given.seen(data.val), test=given.seen(data.test))
        facts[name] = dict(made.facts)
    return replace(cohort, clients=clients), facts


def _named(client: str, asked: Asked) -> Callable[[str], None]:
    return lambda sentence: asked.note(f"{client}: {sentence}")


def _tenths(client: str, asked: Asked) -> Callable[[str, int, int], None]:
    def progress(phase: str, step: int, steps: int) -> None:
        if step * 10 // steps > (step - 1) * 10 // steps:
            asked.note(f"{client}: {asked.name} {step}/{steps}")

    return progress
