"""Updates of small simulated federations as cases for an audit, also as files, and findings made by hand."""

import functools
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from audit.attacks.attack import Attack, Effort, get_attack
from audit.evidence import Case, Colluder, Truth, View, joined
from audit.evidence.case import Earlier, Knowledge
from audit.measures import Control, Figure, Interval, Outcome, Pictures, png
from audit.report import Finding, GateResult, Subject, findings_of
from experiments.settings import root_secret
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import simulated_party
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import neutral_parts
from fedcg.learning.method import RoundContext, Weights
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulated_rounds
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, artifact_id, codecs_for, pack, unpack
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.parts import Part, Report

WHOLE_MODEL: dict[str, Any] = {"method": "fedavg", "data": "digits", "images_per_client": 200, "local_epochs": 4}
WITH_GENERATOR: dict[str, Any] = {"method": "fedcg", "data": "digits", "images_per_client": 200}
HELPED: dict[str, Any] = {"method": "fedsplit", "helped": True}
TRANSLATING: dict[str, Any] = {
    "method": "ppidsg", "data": "digits", "images_per_client": 100, "network": "image_small", "image_size": 16,
    "local_epochs": 6, "clients": 2, "quick": False, "lr": 0.01,
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def simulated_case(
    *, auxiliary: int = 300, client: str = "client-1", helped: bool = False, balance: str = "none", **setting: Any
) -> Case:
    """Return the last round of a simulation as an audit's case for one client.

    Args:
        auxiliary: images that no client holds, from the common test set.
        client: the client whose update is audited.
        helped: whether another device of the cohort colludes.
        balance: of every client's mechanisms.
        setting: of the run (`RunSetting`); default: 3 clients, 2 rounds, 100 images each, 2 epochs, digits, FedCG.
    """
    small = {"clients": 3, "rounds": 2, "images_per_client": 100, "local_epochs": 2, "quick": True, "partition": "iid"}
    run = RunSetting.model_validate({**small, "privacy": {"balance": balance}, **setting})
    party = simulated_party(run, run.source())
    spec = party.spec
    rounds = list(simulated_rounds(party, Schedule(shadow=False, evaluate_every=run.rounds)))
    assert len(rounds) >= 2, "an audit of round 1 would need the start as a simulation"
    before, after = rounds[-2:]
    method, data = get_method(spec.method), party.datasets[client]
    ctx = RoundContext(spec, run.rounds, 1, Streams(root_secret(run.seed, "audit")), privacy=party.privacy)

    def sent_in(one: Simulation) -> dict[str, dict[Part, Weights]]:
        neutral = {
            name: neutral_parts(some.parts, party.datasets[name].train, ctx) for name, some in one.states.items()
        }
        return {name: _some(parts, method.payload.up) for name, parts in neutral.items()}

    sent = sent_in(after)
    assert party.common is not None
    view = View(
        spec,
        client,
        run.rounds,
        sent[client],
        before.aggregate,
        {name: parts for name, parts in sent.items() if name != client},
        Report(examples=len(data.train)),
        party.common.rows(torch.arange(min(auxiliary, len(party.common)))),
        colluder=Colluder.of(spec, party.roots.cohort, {}) if helped else None,
        history=tuple(Earlier(one.aggregate, sent_in(then)) for one, then in pairwise(rounds[:-1])),
    )
    start, end = (_some(one.states[client].parts, method.payload.private) for one in (before, after))
    truth = Truth(data.train, joined(data.val, data.test), start, end, after.states[client].extras, run.privacy)
    return Case(view, truth, Streams(root_secret(run.seed, "audit")))


def _some(parts: Mapping[Part, Weights], wanted: frozenset[Part]) -> dict[Part, Weights]:
    return {part: parts[part] for part in sorted(wanted)}


def carried_out(attack: str, case: Case, effort: Effort = Effort.QUICK) -> Outcome:
    """Return the outcome of an attack on a complete case."""
    found = get_attack(attack)
    assert found.lacks(case) is None
    return found.run(case, effort, lambda done, total: None)


@functools.lru_cache(maxsize=16)
def outcome_of(attack: str, **setting: Any) -> Outcome:
    """Return the outcome of a quick attack on a `simulated_case` of this setting."""
    return carried_out(attack, simulated_case(**setting))


def write_recording(case: Case, folder: Path) -> dict[str, str]:
    """Write spec, aggregate and all updates of the case's round below `folder/artifacts`; return their ids by name."""
    spec, view = case.view.spec, case.view
    (folder / "artifacts").mkdir(parents=True)

    def keep(data: bytes) -> str:
        (folder / "artifacts" / artifact_id(data)).write_bytes(data)
        return artifact_id(data)

    names = {"kind": "aggregate", "method": spec.method, "federation": spec.federation, "client": COORDINATOR}
    first = ArtifactHeader.model_validate({**names, "round": view.round - 1, "attempt": 1})
    data = pack(first, to_arrays(view.before.parts), spec.aggregate_codec)
    ids = {"spec": keep(spec.canonical()), "before": keep(data)}
    layouts = {part: spec.layouts[part] for part in sorted(view.before.parts)}
    decoded = unpack(data, layouts, codecs=codecs_for(layouts, spec.aggregate_codec))
    base = Base(ids["before"], {part: decoded.parts[part] for part in spec.with_base})
    for client, parts in {view.client: view.update, **view.others}.items():
        report = view.report if client == view.client else None
        made = {"kind": "update", "round": view.round, "client": client, "base": ids["before"], "report": report}
        head = first.model_copy(update=made)
        ids[client] = keep(pack(head, to_arrays(parts), spec.codec, base if spec.with_base else None))
    return ids


def write_images(images: ImageSet, held_out: ImageSet | None, file: Path) -> Path:
    """Write images as an .npz with the device's own split."""
    arrays = {"train_images": _pixels(images), "train_labels": images.labels.numpy()}
    if held_out is not None:
        for name, first in (("val", 0), ("test", 1)):
            some = held_out.rows(torch.arange(first, len(held_out), 2))
            arrays |= {f"{name}_images": _pixels(some), f"{name}_labels": some.labels.numpy()}
    np.savez(file, allow_pickle=False, **arrays)
    return file


def write_private(case: Case, file: Path) -> Path:
    """Write the private parts before and after the round."""
    tensors = {
        f"{when}/{part.value}/{name}": tensor.contiguous().clone()
        for when, parts in (("before", case.truth.before), ("after", case.truth.after))
        for part, weights in (parts or {}).items()
        for name, tensor in weights.items()
    }
    save_file(tensors, file)
    return file


def _pixels(images: ImageSet) -> np.ndarray:
    return np.ascontiguousarray(images.images.permute(0, 2, 3, 1).squeeze(-1).numpy())


def write_case(case: Case, folder: Path) -> None:
    """Write a coordinator's artifacts (`home`), a device's images and its private weights."""
    write_recording(case, folder / "home")
    write_images(case.truth.train, case.truth.held_out, folder / "data.npz")
    write_private(case, folder / "private.safetensors")


def audit_command(place: Path, out: Path, *more: object) -> tuple[object, ...]:
    """Return the arguments of `fedcg audit run` for the files of `write_case`."""
    given = ("--updates", place / "home", "--data", place / "data.npz", "--private", place / "private.safetensors")
    return ("audit", "run", *given, "--client", "client-1", "--effort", "quick", "--processes", 1, "--out", out, *more)


SUBJECT = Subject(
    "demo", "fedcg", "lenet5", "client-1", 3, {"classifier": 61_000, "generator": 120_000}, ("accuracy", "examples"), (332, 139),
    0, ("3 frames dropped because the observer was too slow",), {"effort": "quick", "seed": 0}, "fedcg audit run --updates <here>",
    "public spec seed", 42.0,
)  # fmt: skip
VERDICTS = (GateResult("reid_gain<0.02", passed=False, why="at most 0.31 (95 %): classifier, public start"),)


def figure(
    name: str, gain: Interval, *, given: bool = False, unit: str = "share", setting: str = "classifier alone"
) -> Figure:
    """Return a figure with this gain over a floor of 0.1; no chance where its interval is above 0."""
    knowledge = (Knowledge.UPDATE, Knowledge.PRIVATE) if given else (Knowledge.UPDATE, Knowledge.START)
    value = Interval(0.1 + gain.value, 0.1 + gain.low, 0.1 + gain.high)
    likely = 1e-5 if gain.low > 0 else 0.4
    return Figure(
        name, f"title of {name}", setting, knowledge, value, 0.1, "a random guess", gain, 200, 0.9, unit, likely
    )


def attack(name: str) -> Attack:
    """Return an attack with texts only."""
    return Attack(name, f"Attack {name}", f"Does {name} get something?", "Paper, eq. 1", lambda _: ())


def findings() -> tuple[Finding, ...]:
    """Return a leak (with pictures), no leak, a failed control, and an attack that was not tried."""
    image = png(torch.linspace(0, 1, 3 * 8 * 8).view(3, 8, 8))
    passed = Control("the whole model, one image", 24.1, "at least 3 dB over the best guess", passed=True)
    failed = Control("a planted generator", 0.5, "over 0.9", passed=False)
    pictures = Pictures(
        "Reconstructions <b>", (("true", (image, image)), ("guess", (image,))), (("", ""), ("12.1 dB",))
    )
    leaked = Outcome(
        "reidentification",
        (figure("reid", Interval(0.2, 0.1, 0.31)), figure("reid", Interval(0.8, 0.7, 0.9), given=True, setting="true extractor")),
        (passed,), (pictures,), ("A note.",), seconds=3.2,
    )  # fmt: skip
    quiet = Outcome("membership", (figure("mia_auc", Interval(0.0, -0.02, 0.02), unit=""),), (passed,))
    broken = Outcome("memorisation", (figure("memory_auc", Interval(0.0, -0.02, 0.0), unit=""),), (failed,))
    skipped = Outcome("epsilon", skipped="the attacker needs labelled images of the same kind: give --auxiliary")
    outcomes = (leaked, quiet, broken, skipped)
    return findings_of([attack(outcome.attack) for outcome in outcomes], outcomes)
