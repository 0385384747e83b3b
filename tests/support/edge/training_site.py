"""A device's folder with everything that a trainer needs, for tests with real training."""

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from coordinator.aggregation.server_state import before_first_sum
from edge_client.cli.doctor.checks import Finding, examine
from edge_client.config import DataSection, KeysSection
from edge_client.session.signals import ChooseModel, RoundCommitted, RoundFailed, TrainRound
from edge_client.store.generations import StoredState
from edge_client.store.private_store import PrivateStore
from edge_client.training.local_data import LocalData, RoundData
from edge_client.training.trainer_child import Trainer
from fedcg.event_log import EventLog, read_events
from fedcg.files import checked_secret
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import FederationPlan, FederationSpec, NetworkChoice, ParameterValue
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import read_header, unpack
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import Part, Report, TensorLayout
from tests.support.edge.world import CLASSES, DEVICE, FEDERATION, FORM, aggregate_of, draw_images, make_config
from tests.support.present import present

DEVICE_KEY = b"d" * 32
FAST: dict[str, ParameterValue] = {"epochs": 1, "server_iterations": 2, "ramp_rounds": 1}


def real_plan(
    method: str = "fedcg", *, network: NetworkChoice | None = None, **params: ParameterValue
) -> FederationPlan:
    return FederationPlan(
        federation=FEDERATION,
        classes=CLASSES,
        input=FORM,
        network=network or get_method(method).example.network,
        method=method,
        params={**(FAST if method == "fedcg" else {"epochs": 1}), **params},
        rounds=3,
        seed=7,
    )


def real_spec(
    method: str = "fedcg", *, network: NetworkChoice | None = None, **params: ParameterValue
) -> FederationSpec:
    return complete_spec(real_plan(method, network=network, **params))


class Site:
    """A device's folder with images, secrets, a spec and the first aggregate, and a trainer in this process."""

    def __init__(self, root: Path, spec: FederationSpec, *, shadow: int = 0, export: bool = False) -> None:
        self.root, self.spec = root, spec
        draw_images(root / "data" / "train", 12, seed=1)
        draw_images(root / "data" / "test", 5, seed=2)
        draw_images(root / "common", 4, seed=3)
        self.key = SigningKey.generate()
        self.key.save(root / "signing.key")
        self.config = make_config(root, shadow=shadow, export=export)
        data = DataSection(root=root / "data", common_test=root / "common")
        self.configure(data=data, keys=KeysSection(signing=root / "signing.key"))
        (root / "store" / "secrets").mkdir(parents=True)
        (root / "store" / "secrets" / "device.key").write_bytes(checked_secret(DEVICE_KEY))
        self.store = PrivateStore.open(root / "store", FEDERATION, DEVICE)
        self.store.save_spec(spec.canonical())
        method = get_method(spec.method)
        known = (method.payload.up | method.payload.down) - frozenset(spec.sealed)
        first = method.init_server(spec, initial_parts(spec, spec_root(spec.seed), known)).aggregate
        first = before_first_sum(spec, first) if spec.sealed else first
        self.aggregate = self.store.artifacts.put(aggregate_of(to_arrays(first.parts), spec, 0))
        self.events_path = root / "store" / "events.jsonl"

    def round(self, number: int = 1, attempt: int = 1) -> TrainRound:
        return TrainRound(RoundAttempt(number, attempt), self.spec.digest, self.aggregate)

    def data(self, number: int = 1) -> RoundData:
        """Return the images of a round, without the device's defence; accepts them for it if needed."""
        return LocalData(self.config.data.root, None, self.store).for_round(self.spec, number)

    def trainer(self) -> Trainer:
        return Trainer(self.config, self.store, EventLog(self.events_path, time.time))

    def train(self, number: int = 1, attempt: int = 1) -> None:
        """Train a round and commit it, as if in a new process each time."""
        report = self.trainer().do(self.round(number, attempt))
        assert report == RoundCommitted(RoundAttempt(number, attempt)), report

    def declined(self, reason: DeclineReason, number: int = 1, attempt: int = 1) -> str:
        """Return why a round can't be trained, in words; it must be declined for this reason."""
        report = self.trainer().do(self.round(number, attempt))
        assert isinstance(report, RoundFailed), report
        assert (report.round_attempt, report.reason) == (RoundAttempt(number, attempt), reason), report
        return report.detail

    @property
    def end(self) -> ChooseModel:
        """Return the command that ends the federation."""
        return ChooseModel(self.spec.digest, self.aggregate)

    def configure(self, **changes: Any) -> None:
        """Change the configuration: a mapping changes settings of a section, any other value replaces the section."""
        for name, value in changes.items():
            section = getattr(self.config, name).model_copy(update=value) if isinstance(value, dict) else value
            self.config = self.config.model_copy(update={name: section})

    def share_cohort_secret(self) -> None:
        """Give the device the secret of its cohort."""
        self.store.keep_cohort_secret(b"c" * 32)

    def finding(self, check: str) -> Finding:
        """Return the doctor's result for one of its checks of the device."""
        return examine(self.config, datetime.now(timezone.utc), (check,))[0]

    def state(self) -> StoredState:
        return present(self.store.generations.load())

    def weights(self, slot: str = "personal", *parts: Part) -> dict[str, bytes]:
        """Return tensors of a slot as bytes, of all its parts or of some."""
        held = self.state().slots[slot]
        chosen = {part: held[part] for part in parts or held}
        return {
            f"{part.value}/{name}": one.tobytes() for part, tensors in chosen.items() for name, one in tensors.items()
        }

    def update(self) -> bytes:
        return self.store.generations.update_bytes(self.state().generation)

    def report(self) -> Report:
        """Return the update's report."""
        return present(read_header(self.update()).report)

    @property
    def shared(self) -> dict[Part, tuple[TensorLayout, ...]]:
        """Return the layouts of an update's parts."""
        return {part: self.spec.layouts[part] for part in self.spec.upload}

    def brought(self) -> PartArrays:
        """The tensors of the aggregate from which rounds start."""
        return unpack(self.store.artifacts.get(self.aggregate), self.shared).parts

    def events(self, name: str) -> list[dict[str, Any]]:
        return [dict(event) for event in read_events(self.events_path) if event["event"] == name]
