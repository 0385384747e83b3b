"""`fedcg.simulate`: runs a federation of clients from the user's own code, and returns its results.

Uses the same runs, records, checkpoints and workers as the command `fedcg simulate`.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from rich.console import Console

from experiments.data.client_datasets import Cohort
from experiments.errors import OptionError, RunError
from experiments.settings import bad_input_ends, check, check_params
from experiments.simulation.batch import Batch, PlannedRun, RunSetting, has_record, record_path
from experiments.simulation.batch_runner import BatchRunner, open_ray_workers, open_workers
from experiments.simulation.curves import drawn
from experiments.simulation.party_builder import party_of
from experiments.simulation.recorded_updates import UPDATES_FOLDER
from experiments.simulation.single_run import Given
from export.build.to_onnx import as_used, export_personal
from export.errors import ConversionError
from fedcg.config_file import problems_in_words
from fedcg.learning.client import Client
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import downloaded_parts
from fedcg.learning.method import Weights
from fedcg.learning.networks.cut import Halves as Split
from fedcg.learning.networks.plans import complete_spec, shadow_spec
from fedcg.learning.networks.task import Held
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import ClientData, Party
from fedcg.learning.simulation.simulation import Simulation
from fedcg.learning.spec import PROGRAM, TRAINER, FederationSpec, NetworkChoice, TensorForm, plan_from_mapping
from fedcg.learning.training.stage import averaged_parts
from fedcg.tracking import check_track
from fedcg.values import Value
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn


def simulate(
    clients: Sequence[Client] | Mapping[str, Client],
    method: str = "fedcg",
    rounds: int = 10,
    seed: int = 0,
    *,
    out: str | Path | None = None,
    workers: int = 1,
    ray: str | None = None,
    track: str | None = None,
    keep_updates: str | None = None,
    **settings: Any,
) -> Run:
    """Run a federation of these clients in this process, with a local-only model for each client.

    All clients start from the first client's extractor; a classifier of standard layers starts from the seed. With
    `out`, an interrupted run resumes after its last round, and a finished run is not repeated, if network, data and
    settings are unchanged.

    Args:
        clients: two or more, by name or in a list; with the same input shape, classes and network.
        method: a name from `fedcg method list`.
        rounds: number of rounds.
        seed: root of all randomness.
        out: folder for records and checkpoints, which contain the private networks of all clients; None: a temporary
            folder, removed when this process exits.
        workers: number of processes; with more than 1 the network must be importable, not defined in a notebook.
        ray: a running Ray cluster with this machine as a node, "auto" or HOST:PORT, instead of workers.
        track: tracker that receives figures during the run: mlflow:URI or tensorboard:DIR.
        keep_updates: rounds whose updates are recorded for `fedcg.audit`, with the clients' samples: "all", or "1,5,10".
        settings: options of `fedcg simulate`, with `_` for `-`: local_epochs, batch_size, lr, device, evaluate_every,
            params={"server_lr": 1e-3}, and so on.

    Raises:
        BadInputError: names the option, or the client and the sample or parameter, and the problem.
        RunError: no client could train.
    """
    named, tracks = _named(clients), () if track is None else (track,)
    for each in tracks:
        check_track(each)
    with bad_input_ends():
        data = {name: client.data(name) for name, client in named.items()}
        form = _common_form(named, data)
        own = {
            "test": "all",  # each client's own data, unchanged
            "data": f"{PROGRAM}:{_digest(named, data, (rounds, sorted(settings.items())))}",
            "network": PROGRAM if named[next(iter(named))].trainer is None else TRAINER,
            "clients": len(named),
            "method": method,
            "rounds": rounds,
            "seed": seed,
        }
        if unused := settings.keys() & (_OF_SOURCES | own.keys()):
            raise OptionError(f"{', '.join(sorted(unused))}: not allowed here, since clients bring network and data")
        try:
            setting = RunSetting.model_validate({**settings, **own})
        except ValidationError as error:
            raise OptionError(problems_in_words(error, RunSetting)) from error
        check(setting)
        check_params(setting)
        if get_method(method).needs.public:
            raise OptionError(f"{method}: its server needs public samples, which clients don't provide: choose another")
        first = next(iter(named))
        plan = plan_from_mapping(setting.plan_for(tuple(map(str, named[first].classes)), form))
        network = named[first].network(data[first], **_chosen(plan.network))
        spec = complete_spec(plan.model_copy(update={"network": network}))
    folder = _passing_folder() if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    trained: dict[str, FederationSpec] = {
        name: spec.model_copy(update={"network": client.as_started_by(named[first], network, name)})
        for name, client in named.items()
        if client.trainer is not None
    }
    given = Given(spec, Cohort(data, data[first].test, None, spec.classes), trained)
    batch = Batch(runs=(PlannedRun(setting=setting),))
    batch = batch if keep_updates is None else batch.keeping(keep_updates)
    [planned], recording = batch.runs, folder / UPDATES_FOLDER / setting.name
    with open_workers(workers, setting.threads) if ray is None else open_ray_workers(ray, [setting], print) as opened:
        runner = BatchRunner(folder, opened, Console(stderr=True), tracks=tracks, picture=False, given=given)
        is_unrecorded = keep_updates is not None and not recording.exists()
        is_lost = has_record(folder, planned) and (is_unrecorded or runner.runs.stands(planned) is None)
        _, failed = runner.run(batch, force=is_lost)
        stood = runner.runs.stands(planned)
    if failed or stood is None:
        cause = failed[0].error if failed else None
        raise RunError(failed[0].reason if failed else f"{folder}: the run's checkpoint is missing") from cause
    record = json.loads(record_path(folder, planned).read_text())
    return Run(folder, record, party_of(setting, spec, given.cohort, trained), recording, stood)


def _passing_folder() -> Path:
    """Return a temporary folder, which is removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="fedcg-simulate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _named(clients: Sequence[Client] | Mapping[str, Client]) -> dict[str, Client]:
    """Return clients by name.

    Raises:
        OptionError: names the entry that is not a client, or has an invalid name.
    """
    if not isinstance(clients, Mapping | Sequence):
        raise OptionError(f"clients: give a list, or a mapping from names to clients, not a {type(clients).__name__}")
    if isinstance(clients, Mapping):
        pairs = list(clients.items())
    else:
        pairs = [(getattr(one, "name", "") or f"client-{place}", one) for place, one in enumerate(clients, 1)]
    named: dict[str, Client] = {}
    for name, client in pairs:
        if not isinstance(client, Client):
            raise OptionError(f"clients: {name} is a {type(client).__name__}, not a fedcg.Client")
        if name in named or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", str(name)):
            raise OptionError(f"clients: {name!r}: give each a unique name of letters, digits and dashes")
        named[name] = client
    if len(named) < 2:
        raise OptionError("clients: a federation has two or more")
    return named


def _common_form(named: Mapping[str, Client], data: Mapping[str, ClientData]) -> TensorForm:
    """Return the common form of all clients' inputs.

    Raises:
        DataError: names two clients that differ, and the difference.
    """
    first, *others = named
    form = named[first].form(data[first].train.images)
    for name in others:
        if (found := named[name].form(data[name].train.images)) != form:
            raise DataError(
                f"client {name}: inputs are {found.in_words}, but those of {first} are {form.in_words}: use one form"
            )
        if str(_private(named[name])) != str(_private(named[first])):
            raise DataError(f"client {name}: its network differs from that of {first}: use the same one for all")
        if list(named[name].classes) != list(named[first].classes):
            raise DataError(f"client {name}: classes differ from those of {first}: use the same ones in the same order")
    return form


_COLUMNS = {
    "own model": "accuracy_personal",
    "local only": "accuracy_local",
    "downloaded": "accuracy_after",
    "deployed": "accuracy_deployed",
}


def _pandas() -> Any:
    """Import and return the package.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return import_module("pandas")
    except ModuleNotFoundError as error:
        raise OptionError(
            "tables need the Python package pandas: pip install pandas; Run.record also has the figures"
        ) from error


def _chosen(network: NetworkChoice) -> dict[str, Any]:
    """Return the settings' choices for networks, apart from the split."""
    return network.model_dump(include={"generator", "discriminator", "noise_dim"})


_OF_SOURCES = {"partition", "images_per_client", "validation", "public_images", "image_size", "normalise", "flip", "crop"} | {
    "weights", "freeze", "backbones", "defence", "paper"
}  # fmt: skip


def _some_inputs(spec: FederationSpec, data: ImageSet) -> torch.Tensor:
    """Return inputs for comparing an exported model: samples, or random inputs if a trainer holds the data."""
    if not isinstance(data, Held):
        return data.images[:33]
    drawn = torch.rand(33, *spec.input.tensor_shape, generator=torch.Generator().manual_seed(0))
    return (drawn * 255).to(torch.uint8) if spec.input.dtype == "uint8" else drawn


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in a shell
        return kind.__qualname__


def _private(client: Client) -> nn.Module:
    """Return the part of a client that keeps its weights: its extractor, or the whole network of a trainer."""
    return client.model.extractor if isinstance(client.model, Split) else client.model


def _digest(named: Mapping[str, Client], data: Mapping[str, ClientData], asked: object) -> str:
    """Hash everything that determines a run's numbers: samples, source code, initial weights, and settings."""
    digest = hashlib.sha256(repr(asked).encode())
    for name in named:
        found = data[name]
        digest.update("\0".join((name, *(one.digest() for one in (found.train, found.val, found.test)))).encode())
    first = named[next(iter(named))]
    digest.update(f"{_private(first)}{getattr(first.model, 'classifier', '')}".encode())
    for trainer in (client.trainer for client in named.values() if client.trainer is not None):
        digest.update(f"{_source(type(trainer))}{trainer.private}{trainer.metric}".encode())
    for tensor in _private(first).state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class ClientRun(Value):
    """The result of one client: its figures, and the model that it would use.

    Attributes:
        name: the client's name.
        figures: its part of the run's record: accuracies in [0, 1], the curve, failures.
        choice: the model with the lowest loss on its validation samples: own, ema (its moving average), downloaded or
            local (local-only).
    """

    name: str
    figures: Mapping[str, Any] = field(repr=False)
    choice: str
    _spec: FederationSpec = field(repr=False)
    _parts: Mapping[Part, Weights] = field(repr=False)
    _some: torch.Tensor = field(repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The network from inputs [B, *shape], as in the data, to logits [B, C]; in eval mode, on the CPU."""
        return as_used(self._spec, self._parts).eval()

    def export(self, path: str | Path) -> Path:
        """Write the model as ONNX: from `input`, [B, *shape] of the data's type, to `logits` and `probabilities` [B, C].

        Raises:
            ConversionError: the file can't be written, or differs from the model for some number of inputs.
        """
        import onnxruntime

        content = export_personal(self._spec, self._parts, Path(path)).content
        try:
            session = onnxruntime.InferenceSession(content)
            found = session.run(None, {"input": self._some.numpy()})[0]
        except Exception as error:
            raise ConversionError(f"{path}: the exported model fails on {len(self._some)} inputs: {error}") from error
        if not torch.allclose(torch.from_numpy(found), self.model(self._some), rtol=1e-3, atol=1e-4):
            raise ConversionError(f"{path}: the exported model's logits differ from the model's")
        return Path(path)


class Run(Value):
    """A finished run.

    Attributes:
        folder: the folder of its files.
        record: as written by `fedcg simulate` (docs/reference/simulation-records.md).
        party: the participants.
        recording: the folder of the clients' updates; missing without `keep_updates`.
    """

    folder: Path
    record: Mapping[str, Any] = field(repr=False)
    party: Party = field(repr=False)
    recording: Path = field(repr=False)
    _stood: Simulation = field(repr=False)

    @cached_property
    def clients(self) -> Mapping[str, ClientRun]:
        """All clients by name."""
        return {figures["id"]: self._client(figures) for figures in self.record["clients"]}

    def table(self) -> pd.DataFrame:
        """Return one row per client: samples, and accuracies in % of the client's own, local-only, downloaded and deployed models."""
        rows = [
            {
                "client": one["id"],
                "train samples": one["train_images"],
                **{label: None if one[name] is None else 100 * one[name] for label, name in _COLUMNS.items()},
            }
            for one in self.record["clients"]
        ]
        return _pandas().DataFrame(rows).set_index("client")

    def curves(self) -> pd.DataFrame:
        """Return one row per client and measured round, with the columns of the record's curves."""
        rows = [
            {"client": one["id"], **dict(zip(one["curve"], values, strict=True))}
            for one in self.record["clients"]
            for values in zip(*one["curve"].values(), strict=True)
        ]
        return _pandas().DataFrame(rows)

    def plot(self) -> Figure:
        """Plot mean accuracy of clients over rounds, and of local-only training (dashed)."""
        return drawn([self.record])

    def _client(self, figures: Mapping[str, Any]) -> ClientRun:
        name, stood, party = figures["id"], self._stood, self.party
        spec, state = party.spec_of(name), stood.states[name]
        losses = stood.curves[name][-1].losses
        choice = min(losses, key=losses.__getitem__, default="own")
        parts: Mapping[Part, Weights] = state.parts
        if choice == "ema":
            parts = averaged_parts(state.extras) or parts
        elif choice == "downloaded":
            ctx = party.client_context(name, stood.rounds + 1)
            parts = {**parts, **downloaded_parts(parts, stood.aggregate, party.datasets[name].train, ctx)}
        elif choice == "local":
            spec, parts = shadow_spec(spec), stood.shadows[name].parts
        return ClientRun(name, figures, choice, spec, parts, _some_inputs(spec, party.datasets[name].val))
