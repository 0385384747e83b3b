"""The worker's jobs: one update that can't be merged is rejected alone, by name; what is measured; how it merges when memory is short."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation import jobs
from coordinator.aggregation.worker import JobRunner, public_images
from coordinator.aggregation.worker_handle import MAX_DEATHS
from coordinator.operations.create_federation import InitialArtifacts
from coordinator.updates.robustness import Distances
from coordinator.updates.validation import base_in, unpack_update
from fedcg.learning.aggregation import distillation
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base, pack, unpack
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from fedcg.wire.parts import Part, Report
from tests.support.coordinator import driven_worker
from tests.support.coordinator.driven_worker import DrivenWorker, worker_settings
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import random_parts, shared_layouts, update_header
from tests.support.coordinator.world import ALL_FIRST, MakeWorld, PlainWorker, RunningService
from tests.support.raising import raising
from tests.support.waiting import wait_until
from tests.unit.coordinator.aggregation.test_aggregation import founded, real_world

Parts = dict[Part, dict[str, Array]]
JOB = jobs.Job("tiny", 1, 1, "0" * 64, "1" * 64, "2" * 64)


@dataclass
class Spoiler(FakeDevice):
    """A device that changes the tensors of its updates before it packs them."""

    spoil: Callable[[Parts], None] = lambda parts: None

    def make_update(self, round_number: int, attempt: int, base: str, **changes: Any) -> bytes:
        parts = random_parts(shared_layouts(self.spec), seed=round_number, scale=0.05)
        self.spoil(parts)
        header = update_header(self.spec, round_number, attempt, self.name, base, **changes)
        return pack(header, parts, self.spec.codec, self._base(base))


def negative_variance(parts: Parts) -> None:
    name = next(name for name in parts[Part.GENERATOR] if name.endswith("running_var"))
    parts[Part.GENERATOR][name][0] = -1.0


def huge(parts: Parts) -> None:
    weights = parts[Part.CLASSIFIER]
    norm = np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in weights.values()))
    for array in weights.values():
        array *= np.float32(9e4 / norm)


def scaled(factor: float) -> Callable[[Parts], None]:
    def scale(parts: Parts) -> None:
        for array in parts[Part.CLASSIFIER].values():
            array *= array.dtype.type(factor)

    return scale


# ------------------------------------------------------------------ whole federations


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[InitialArtifacts, ArtifactStore]:
    return founded(tmp_path_factory.mktemp("founded"), "fedcg", 3, "server_iterations = 2\nserver_batch = 4")


@pytest.mark.slow
def test_devices_with_a_negative_variance_or_a_norm_of_9e4_are_left_out_of_all_rounds(
    tmp_path: Path, first: tuple[InitialArtifacts, ArtifactStore]
) -> None:
    honest = ("a", "b", "c")
    world = real_world(tmp_path, *first, clients=honest, min_clients=3, max_attempts=1, pacing=ALL_FIRST)
    spec = world.spec
    for name, spoil in (("mallory", negative_variance), ("oscar", huge)):
        world.devices[name] = Spoiler(name, world.broker, spec, world.key, spoil=spoil)
        world.store.add_device(name, world.devices[name].key.public.hex, 1.0)
    with RunningService(world):
        world.start_devices()
        wait_until(lambda: bool(world.events("finished")), "the end", 120)
    assert not world.events("attempt_failed")
    assert [tuple(event["clients"]) for event in world.events("distilling")] == [honest] * 3
    refused = {(event["client"], event["reason"].partition(";")[0]) for event in world.events("update_refused")}
    assert {client for client, _ in refused} == {"mallory", "oscar"}
    assert ("mallory", "its generator's body.1.running_var contains a variance below 0") in refused
    assert any("its classifier from the round's base is 9e+04" in reason for _, reason in refused)
    world.close()


class RejectingWorker(PlainWorker):
    """Can't merge one client's update, which it says when it is asked to merge."""

    def finish(self, updates: Any, limits: Any, opened: Any = None) -> None:
        assert self.job is not None
        if any(client == "b" for client, *_ in updates):
            self.asked.append(("finish", updates))
            self._reply(jobs.UpdateFailed(self.job.round, self.job.attempt, "b", "its logits are not finite"))
        else:
            super().finish(updates, limits)


def test_an_update_whose_merge_fails_is_rejected_for_good_and_the_others_close_the_round(make_world: MakeWorld) -> None:
    world = make_world(5, clients=("a", "b", "c"), make_worker=RejectingWorker)
    first, bad, last = world.devices.values()
    last.silent = True
    with RunningService(world) as running:
        for device in (first, last):
            device.start()
        world.wait_event("attempt_opened")
        bad.start()  # takes part from the second round on
        world.wait_event("online", 3)
        last.silent = False
        last.act()
        world.wait_event("finished")
        assert running.service.state.left_out == {"b": "its logits are not finite"}
    assert not world.events("attempt_failed")
    merged = [event["clients"] for event in world.events("distilling")]
    assert ["".join(clients) for clients in merged] == ["ac", "abc", "ac", "abc", "ac", "ac", "ac"]
    rejected = world.store.update("tiny", RoundAttempt(2, 1), "b")
    assert rejected is not None
    assert (rejected.outcome, rejected.reason) == (Outcome.REJECTED, "its logits are not finite")
    assert [event["client"] for event in world.events("update_rejected")] == ["b", "b"]
    assert [(event["client"], event["round"]) for event in world.events("left_out")] == [("b", 3)]
    assert [sorted(event["participants"]) for event in world.events("attempt_opened")][3:] == [["a", "c"]] * 2


def test_an_attempt_that_needs_the_rejected_update_fails_by_the_devices_name(make_world: MakeWorld) -> None:
    world = make_world(5, clients=("a", "b", "c"), make_worker=RejectingWorker, min_clients=3, max_attempts=2)
    stalled = world.run("stalled")
    assert "the update of b was rejected (its logits are not finite); 2 updates are left, but 3 are required" in str(
        stalled["reason"]
    )


# ------------------------------------------------------------------ the worker's handle


def handle(folder: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[..., None]) -> DrivenWorker:
    monkeypatch.setattr("coordinator.aggregation.worker_handle.worker_main", child)
    monkeypatch.setattr("coordinator.aggregation.worker_handle.MAX_BACKOFF_S", 0.01)
    return DrivenWorker(worker_settings(folder))


@pytest.mark.slow
def test_an_update_that_kills_every_worker_is_rejected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with handle(tmp_path, monkeypatch, driven_worker.die_over_b) as driven:
        driven.worker.open(JOB)
        for client in "abc":
            driven.worker.add(client, "3" * 64)
        assert driven.until(jobs.UpdateFailed).client == "b"
        driven.worker.finish((("a", "3" * 64, 1), ("c", "3" * 64, 1)), {})
        driven.until(jobs.JobDone, jobs.JobFailed)
    assert [event.client for event in driven.events if isinstance(event, jobs.UpdateFailed)] == ["b"]
    assert [event.deaths for event in driven.events if isinstance(event, jobs.WorkerDied)] == list(
        range(1, MAX_DEATHS + 1)
    )
    assert not any(isinstance(event, jobs.JobFailed) for event in driven.events)


# ------------------------------------------------------------------ the worker at work


class Benches:
    """Job runners of this process over the updates of four devices, one of which can be spoilt."""

    def __init__(self, folder: Path, ids: InitialArtifacts, artifacts: ArtifactStore) -> None:
        self._folder, self._ids, self.artifacts = folder, ids, artifacts
        self.spec = FederationSpec.parse(artifacts.get(ids.spec))
        self.base = ids.aggregate

    def open(self, name: str, **job: Any) -> tuple[JobRunner, list[jobs.Reply]]:
        ids, said = self._ids, list[jobs.Reply]()
        settings = jobs.WorkerSettings(1, "cpu", b"s" * 32, self.artifacts.root, self._folder / name)
        asked = jobs.Job("tiny", 1, 1, ids.spec, ids.aggregate, ids.server_state, **job)
        return JobRunner(asked, settings, "cpu", said.append, public_images(None, 1)), said

    def update(self, client: str, spoil: Callable[[Parts], None] = lambda parts: None, examples: int = 10) -> str:
        parts = random_parts(shared_layouts(self.spec), seed=ord(client[0]))
        spoil(parts)
        header = update_header(self.spec, 1, 1, client, self._ids.aggregate, report=Report(examples=examples))
        known = unpack(self.artifacts.get(self._ids.aggregate), shared_layouts(self.spec), codecs=None).parts
        base = Base(self._ids.aggregate, {part: known[part] for part in self.spec.with_base})
        return self.artifacts.put(pack(header, parts, self.spec.codec, base))


@pytest.fixture
def benches(tmp_path: Path, first: tuple[InitialArtifacts, ArtifactStore]) -> Benches:
    torch.set_num_threads(1)
    return Benches(tmp_path, *first)


def merged(
    bench: JobRunner, said: list[jobs.Reply], *updates: tuple[str, str, int], limits: Distances | None = None
) -> str:
    """The id of the aggregate."""
    bench.serve(jobs.FinishJob(updates, limits or {}))
    done = said[-1]
    assert isinstance(done, jobs.JobDone), done
    return done.aggregate


def test_an_update_whose_teacher_pass_fails_is_reported_and_leaves_no_trace_in_the_merge(benches: Benches) -> None:
    good = {client: benches.update(client) for client in "ac"}
    bad = benches.update("b", negative_variance)
    bench, said = benches.open("with")
    for client, artifact in (("a", good["a"]), ("b", bad), ("c", good["c"])):
        bench.serve(jobs.AddUpdate(client, artifact))
    (failed,) = (reply for reply in said if isinstance(reply, jobs.UpdateFailed))
    assert failed.client == "b"
    assert "not finite" in failed.reason
    bench.serve(
        jobs.FinishJob((("a", good["a"], 10), ("b", bad, 10), ("c", good["c"], 10)))
    )  # asked before that was known
    assert said[-1] == failed
    chosen = [(client, artifact, 10) for client, artifact in good.items()]
    assert merged(bench, said, *chosen) == merged(*benches.open("without"), *chosen)


def test_a_merge_that_diverges_is_tried_again_without_the_farthest_update_and_only_once(benches: Benches) -> None:
    chosen = [(client, benches.update(client), 10) for client in "ac"]

    bad = ("b", benches.update("b", scaled(1e7)), 10)
    bench, said = benches.open("with")
    bench.serve(jobs.FinishJob((chosen[0], bad, chosen[1])))
    failed = said[-1]
    assert isinstance(failed, jobs.UpdateFailed)
    assert failed.client == "b"
    assert "the merge diverged, and this update is the farthest from the base" in failed.reason
    assert merged(bench, said, *chosen) == merged(*benches.open("without"), *chosen)


def test_a_weight_that_was_capped_counts_as_if_it_had_been_reported(benches: Benches) -> None:
    honest = ("a", benches.update("a"), 10)
    boast, modest = benches.update("b", examples=10**9), benches.update("b", examples=30)
    bench, said = benches.open("capped")
    for client, artifact in (("a", honest[1]), ("b", boast)):
        bench.serve(jobs.AddUpdate(client, artifact))
    capped = merged(bench, said, honest, ("b", boast, 30))
    assert capped == merged(*benches.open("reported"), honest, ("b", modest, 30))
    assert capped != merged(*benches.open("uncapped"), honest, ("b", boast, 10**9))


def test_limits_known_at_last_give_the_bytes_of_limits_known_at_arrival(benches: Benches) -> None:
    updates = [(client, benches.update(client), 10) for client in "ab"]

    def aggregate(name: str, on_arrival: Distances, at_last: Distances) -> str:
        bench, said = benches.open(name, limits=on_arrival)
        for client, artifact, _ in updates:
            bench.serve(jobs.AddUpdate(client, artifact))
        return merged(bench, said, *updates, limits=at_last)

    wide, narrow = {Part.CLASSIFIER: 1e6}, {Part.CLASSIFIER: 1e-3}
    free = aggregate("free", {}, {})
    assert aggregate("wide", wide, wide) == free
    assert aggregate("late", {}, narrow) == aggregate("early", narrow, narrow) != free


@pytest.mark.slow
def test_figures_are_the_same_in_a_worker_that_starts_anew_and_in_any_order(benches: Benches) -> None:
    updates = [(client, benches.update(client, scaled(20.0 if client == "d" else 1.0))) for client in "abcd"]
    runner, said = benches.open("first")
    for client, artifact in reversed(updates):
        runner.serve(jobs.AddUpdate(client, artifact))
    again, said_again = benches.open("second")  # after SIGKILL: nothing but the stored updates is left
    for bench in (runner, again):
        bench.serve(jobs.AssessJob(tuple(updates)))
    assessed = said[-1]
    assert isinstance(assessed, jobs.Assessed)
    assert assessed == said_again[-1]
    assert (assessed.figures["d"].norm or 0.0) > 3.0
    assert None not in {each.direction for each in assessed.figures.values()}


def test_a_teacher_pass_without_memory_takes_smaller_batches(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [(client, benches.update(client), 10) for client in "abc"]
    small = merged(*benches.open("small", ease=1), *chosen)
    real = distillation.teacher_logits

    def hungry(teacher: Any, bank: Any, ctx: Any) -> torch.Tensor:
        if ctx.machine.most_rows is None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return real(teacher, bank, ctx)

    monkeypatch.setattr(distillation, "teacher_logits", hungry)
    runner, said = benches.open("hungry")
    runner.serve(jobs.AddUpdate(*chosen[0][:2]))
    assert merged(runner, said, *chosen) == small
    eased = [reply for reply in said if isinstance(reply, jobs.JobEased)]
    assert [reply.ease for reply in eased] == [1]
    assert "can't allocate memory" in eased[0].reason
    assert isinstance(said[-1], jobs.JobDone)
    assert said[-1].ease == 1


def test_a_distillation_without_memory_becomes_an_average(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "train_student", raising(MemoryError("3 GiB")))
    artifacts = {client: benches.update(client) for client in "ab"}
    runner, said = benches.open("average")
    runner.serve(jobs.FinishJob((("a", artifacts["a"], 10), ("b", artifacts["b"], 30))))
    done = said[-1]
    assert isinstance(done, jobs.JobDone)
    assert [reply.ease for reply in said if isinstance(reply, jobs.JobEased)] == [1, 2]
    base = base_in(benches.artifacts.get(benches.base), benches.spec, benches.base)
    parts = [
        unpack_update(benches.artifacts.get(artifact), benches.spec, base).parts[Part.CLASSIFIER]
        for artifact in artifacts.values()
    ]
    mean = unpack(benches.artifacts.get(done.aggregate), shared_layouts(benches.spec), codecs=None).parts[
        Part.CLASSIFIER
    ]
    for name, array in mean.items():
        expected = (10 * parts[0][name] + 30 * parts[1][name]) / 40
        np.testing.assert_allclose(array, expected, rtol=1e-2, atol=1e-3)  # the aggregate's codec


@pytest.mark.slow
def test_a_worker_that_each_merge_kills_is_asked_for_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with handle(tmp_path, monkeypatch, driven_worker.die_over_the_merge_until_it_averages) as driven:
        driven.worker.open(JOB)
        driven.worker.finish((("a", "3" * 64, 1), ("b", "3" * 64, 1)), {})
        done = driven.until(jobs.JobDone, jobs.JobFailed)
    assert isinstance(done, jobs.JobDone)
    assert done.ease == 2
    assert [event.ease for event in driven.events if isinstance(event, jobs.JobEased)] == [1, 2]
    died = [event for event in driven.events if isinstance(event, jobs.WorkerDied)]
    assert [event.deaths for event in died] == [1, 2, 3, 4]
