"""Recordings of simulated runs, for the audit: the artifacts that an observer would have in a deployment, and the truth.

A run's folder is an observer's folder (`wire.json`, `artifacts/`) with `truth/` (the clients' images and private parts;
in `truth/real/` the original images of clients with a data defence), `auxiliary.npz` (images that an attacker could
have) and `initial.json` (the start of the private parts). Folders have mode 0700, files 0600. Every file is a function
of the run, so a round repeated after a crash writes the same bytes. Uses torch.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from audit.evidence import joined
from audit.recording.capture import Capture
from audit.recording.observer import ARTIFACTS, WIRE_FILE
from edge_client.config import PolicySection
from edge_client.firewall import UpdateFacts, build_update
from experiments.simulation.batch import RunSetting
from fedcg.files import replace_durably
from fedcg.learning.aggregation.sealed_means import range_of
from fedcg.learning.image_set import ImageSet
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import ATTEMPT, ClientData, Party
from fedcg.learning.simulation.simulation import Simulation
from fedcg.learning.spec import ImageForm, InputForm
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.text_output import command_line
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, pack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.messages.schemas import COORDINATOR, SealedSum
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, Part, Report
from fedcg.wire.sealed_numbers import MOST_SHARE, Numbers, number_count, to_numbers
from fedcg.wire.sums import SumRound, cohort_mask, tagged

UPDATES_FOLDER = "updates"
MAX_AUXILIARY = 10_000
_FORMAT = 1
_TRUTH = "truth"
REAL = "real"  # the folder of a defended client's original images
_AUXILIARY_FILE, _INITIAL_FILE = "auxiliary.npz", "initial.json"
_PRIVATE_FOLDER = 0o700
# Also written for methods that share them: attacks on an update need the extractor that computed the features.
_WITH_TRUTH = frozenset({Part.EXTRACTOR, Part.DISCRIMINATOR})


class RecordedUpdates:
    """The recording of one run.

    Args:
        folder: the run's folder, in the batch's folder `updates`; emptied if the run has just started.
        party: of the run.
        kept: the recorded rounds.
        stood: the state of the run: its start, or its checkpoint.
    """

    def __init__(self, folder: Path, party: Party, kept: frozenset[int], stood: Simulation) -> None:
        self._folder, self._party, self._kept, self._before = folder, party, kept, stood
        self._method = get_method(party.spec.method)
        self._policy = PolicySection(
            allow_upload=frozenset(party.spec.upload), allow_report=DEFAULT_ALLOW_REPORT | frozenset(party.spec.report)
        )
        if stood.rounds == 0:
            shutil.rmtree(folder, ignore_errors=True)
        for place in (folder.parent, folder, folder / ARTIFACTS, folder / _TRUTH):
            place.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        self._store = ArtifactStore(folder / ARTIFACTS)
        self._capture = Capture(party.spec.federation)
        for artifact in self._store.ids():
            self._capture.add(self._store.get(artifact))

    def begin(self, setting: RunSetting, auxiliary: ImageSet | None, real: Mapping[str, ClientData]) -> None:
        """Write what is fixed before the first round: images of the clients and of an attacker, and the start of the private parts.

        Args:
            setting: of the run.
            auxiliary: images that no client holds, or None.
            real: the clients' images before a data defence; empty without one.
        """
        self._write_images(self._folder / _TRUTH, self._party.datasets)
        if real:
            self._write_images(self._folder / _TRUTH / REAL, real)
        if auxiliary is not None:
            replace_durably(self._folder / _AUXILIARY_FILE, _npz(_arrays("train", auxiliary, self._party.spec.input)))
        cohort = self._party.roots.cohort.hex() if setting.start == "cohort" else None
        initial = {"format": _FORMAT, "start": setting.start, "cohort_root": cohort}
        replace_durably(self._folder / _INITIAL_FILE, json.dumps(initial))

    def _write_images(self, folder: Path, datasets: Mapping[str, ClientData]) -> None:
        folder.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        for client, data in datasets.items():
            if len(data.train):  # an .npz without training images can't be read, and such a client sent nothing
                replace_durably(folder / f"{client}.npz", _npz(_client_arrays(data, self._party.spec.input)))

    def add(self, now: Simulation) -> None:
        """Record the latest round, if it is one of the recorded rounds.

        Args:
            now: the state of the simulation; called after every round, in order.

        Raises:
            FirewallError: no device would send this update, for example because of numbers that are not finite.
            OSError: the disk is full.
        """
        before, self._before = self._before, now
        if now.rounds not in self._kept:
            return
        self._take(self._party.spec.canonical())
        base = self._take_aggregate(before)
        for client, sent in now.sent.items():
            update = build_update(
                to_arrays(sent.shared.parts),
                _report(client, now),
                spec=self._party.spec,
                policy=self._policy,
                facts=UpdateFacts(client, now.rounds, ATTEMPT),
                base=base,
            )
            self._take(update)
            self._write_parts(client, before, now)
        last = self._take_aggregate(now).id
        if now.rounds == self._party.spec.rounds:
            self._capture.finished_with = last
        # Sorted: a resumed run reads its artifacts in another order, but the record must be the same.
        replace_durably(self._folder / WIRE_FILE, json.dumps(self._capture.record(), indent=1, sort_keys=True))

    def _take(self, data: bytes) -> str:
        self._store.put(data)
        return self._capture.add(data)

    def _take_aggregate(self, now: Simulation) -> Base:
        """Keep the aggregate at the end of a round; after round 0, the initial one.

        Its header names no base, since the earlier aggregate may not be kept.
        """
        spec, plain = self._party.spec, to_arrays(now.aggregate.parts)
        parts, sums = self._behind_masks(plain, now.rounds)
        header = ArtifactHeader(
            kind="aggregate",
            method=spec.method,
            federation=spec.federation,
            round=now.rounds,
            attempt=ATTEMPT if now.rounds else 0,
            client=COORDINATOR,
            label_distribution=now.aggregate.label_distribution,
            sums=sums,
        )
        return Base(self._take(pack(header, parts, spec.aggregate_codec)), parts)

    def _behind_masks(self, parts: PartArrays, number: int) -> tuple[PartArrays, tuple[SealedSum, ...]]:
        """Return an aggregate's parts as sent: sealed means as one device's numbers of a sum, under the mask of the cohort's secret."""
        spec, name = self._party.spec, min(self._party.datasets)
        if not spec.sealed:
            return parts, ()
        numbers: dict[str, Numbers] = {
            part.value: np.zeros(number_count(spec.layouts[part]), np.uint32) for part in spec.sealed
        }
        sums = []
        for part in sorted(parts.keys() & frozenset(spec.sealed)):
            digest = hashlib.sha256(f"round {number}, {part.value}".encode()).hexdigest()
            at = SumRound(spec.federation, max(1, number), ATTEMPT)
            sums.append(SealedSum(round=at.round, attempt=ATTEMPT, parts=(part,), digest=digest, names=(name,)))
            mean = to_numbers(parts[part], spec.layouts[part], range_of(spec), MOST_SHARE)
            secret = self._party.roots.cohort
            numbers[part.value] = tagged(at, secret, mean) + cohort_mask(at, secret, digest, name, mean.size)
        clear = {part: tensors for part, tensors in parts.items() if part not in spec.sealed}
        return {**clear, Part.SEALED: numbers}, tuple(sums)

    def _write_parts(self, client: str, before: Simulation, now: Simulation) -> None:
        """Write a client's private parts before and after the round, and its extras; for shared parts, the downloaded and sent ones."""
        found = {**before.states[client].parts, **before.aggregate.parts}
        left = {**now.states[client].parts, **now.sent[client].shared.parts}
        wanted = sorted((self._method.payload.private | _WITH_TRUTH) & self._method.payload.parts)
        tensors = {
            f"{when}/{part.value}/{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for when, parts in (("before", found), ("after", left))
            for part in wanted
            for name, tensor in parts.get(part, {}).items()
        }
        extras = now.states[client].extras
        tensors |= {f"extras/{group}/{name}": one.cpu() for group, some in extras.items() for name, one in some.items()}
        replace_durably(truth_file(self._folder, client, now.rounds), save(tensors))


def truth_file(recording: Path, client: str, round_number: int) -> Path:
    """Return the path of a client's private parts of a round in a run's recording."""
    return recording / _TRUTH / f"{client}-round-{round_number}.safetensors"


def _report(client: str, now: Simulation) -> Report:
    """Return the report of a simulated client: that of its local round, and its accuracy if the round was measured.

    There is no `health`, since a simulated client is not a machine.
    """
    report, curve = now.sent[client].report, now.curves[client]
    is_measured = bool(curve) and curve[-1].round == now.rounds
    return report.model_copy(update={"accuracy": curve[-1].accuracy}) if is_measured else report


def _client_arrays(data: ClientData, form: InputForm) -> dict[str, Any]:
    """Return the client's training images, and other images as validation and test images.

    Both are present if there are at least two other images, because a device splits a source without one of them
    itself.
    """
    unseen = joined(data.val, data.test)
    val = max(1, len(data.val)) if len(data.test) else len(unseen) // 2
    parts = {"train": data.train, "val": unseen.rows(range(val)), "test": unseen.rows(range(val, len(unseen)))}
    return {
        name: array
        for part, images in parts.items()
        if len(images)
        for name, array in _arrays(part, images, form).items()
    }


def _arrays(part: str, images: ImageSet, form: InputForm) -> dict[str, Any]:
    """Return images as [N, H, W, C] uint8, or tensors unchanged, and labels as [N] int64, by their names in an `.npz`."""
    inputs = images.images.permute(0, 2, 3, 1) if isinstance(form, ImageForm) else images.images
    return {f"x_{part}": inputs.cpu().numpy(), f"y_{part}": images.labels.cpu().numpy()}


def _npz(arrays: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def audit_command(folder: Path) -> str | None:
    """Return the command that audits a run's recording, for its first client with (original) images; None without a recording."""
    images = sorted((folder / _TRUTH / REAL).glob("*.npz")) or sorted((folder / _TRUTH).glob("*.npz"))
    if not images or not (folder / WIRE_FILE).exists():
        return None
    client = images[0].stem
    private = sorted(
        (folder / _TRUTH).glob(f"{client}-round-*.safetensors"), key=lambda file: int(file.stem.rpartition("-")[2])
    )
    named = {
        "updates": folder,
        "client": client,
        "data": images[0],
        "auxiliary": folder / _AUXILIARY_FILE,
        "out": "DIR",
    }
    return command_line("audit", "run", **named, **({"private": private[-1]} if private else {}))
