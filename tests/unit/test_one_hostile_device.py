"""One device whose update can't be merged: it is rejected alone, by name, and the round closes with the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation import AggregationWorker
from coordinator.founding import Founded, found, read_plan
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts import ArtifactStore, pack
from fedcg.wire.messages import Outcome
from fedcg.wire.parts import Part
from fedcg.wire.tensors import Array
from tests.unit.coordinator_support import (
    FakeDevice,
    RunningService,
    World,
    random_parts,
    shared_layouts,
    update_header,
    wait_until,
)
from tests.unit.test_coordinator_aggregation import plan_file

Parts = dict[Part, dict[str, Array]]
HONEST = ("a", "b", "c")


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Founded, ArtifactStore]:
    folder = tmp_path_factory.mktemp("founded")
    params = "server_iterations = 20\nserver_batch = 8"
    return found(read_plan(plan_file(folder, rounds=3, params=params)), folder / "artifacts"), ArtifactStore(
        folder / "artifacts"
    )


@dataclass
class Spoiler(FakeDevice):
    """A device that changes the tensors of its updates before it packs them."""

    spoil: Callable[[Parts], None] = lambda parts: None

    def make_update(self, round_number: int, attempt: int, base: str, **changes: Any) -> bytes:
        parts = random_parts(shared_layouts(self.spec), seed=round_number, scale=self.scale)
        self.spoil(parts)
        header = update_header(self.spec, round_number, attempt, self.name, base, **changes)
        return pack(header, parts, self.spec.codec, self._base(base))


def negative_variance(parts: Parts) -> None:
    name = next(name for name in parts[Part.GENERATOR] if name.endswith("running_var"))
    parts[Part.GENERATOR][name][0] = -1.0


def huge(parts: Parts) -> None:
    weights = parts[Part.CLASSIFIER]
    norm = float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in weights.values())))
    for array in weights.values():
        array *= np.float32(9e4 / norm)


def world_with(root: Path, founded: tuple[Founded, ArtifactStore], spoil: Callable[[Parts], None]) -> World:
    ids, store = founded
    spec = FederationSpec.parse(store.get(ids.spec))
    world = World(
        root,
        spec,
        store.get(ids.aggregate),
        store.get(ids.server_state),
        clients=HONEST,
        make_worker=AggregationWorker,
        min_clients=3,
    )
    world.devices["mallory"] = Spoiler("mallory", world.broker, spec, world.key, spoil=spoil)
    world.store.add_device("mallory", world.devices["mallory"].key.public.hex, 1.0)
    return world


@pytest.mark.parametrize("spoil", [negative_variance, huge])
def test_before(tmp_path: Path, founded: tuple[Founded, ArtifactStore], spoil: Callable[[Parts], None]) -> None:
    world = world_with(tmp_path, founded, spoil)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(world.events("paused") or world.events("finished")), "the end", 100)
        for e in world.events():
            if e["event"] not in ("phase_started", "aggregate_step", "update_stored", "teacher_done", "accepted"):
                print(e)
    world.close()
