"""What the real worker measures of updates, and how it merges when memory is short."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.jobs import (
    AddUpdate,
    Assessed,
    AssessJob,
    FinishJob,
    JobDone,
    JobEased,
    JobFailed,
    Reply,
    WorkerDied,
)
from coordinator.operations.create_federation import InitialArtifacts
from coordinator.updates.robustness import Figures
from coordinator.updates.validation import base_in, unpack_update
from fedcg.learning.aggregation import distillation
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.parts import Part
from tests.support.coordinator import hanging_children
from tests.support.coordinator.toy_artifacts import shared_layouts
from tests.unit.coordinator.aggregation.test_aggregation import founded
from tests.unit.coordinator.aggregation.test_one_hostile_device import JOB, Benches, Parts, handle, merged


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> tuple[InitialArtifacts, ArtifactStore]:
    return founded(tmp_path_factory.mktemp("founded"), "fedcg", 3, "server_iterations = 2\nserver_batch = 4")


@pytest.fixture
def work(tmp_path: Path, initial: tuple[InitialArtifacts, ArtifactStore]) -> Benches:
    torch.set_num_threads(1)
    return Benches(tmp_path, *initial)


def far(parts: Parts) -> None:
    for array in parts[Part.CLASSIFIER].values():
        array *= array.dtype.type(20)


def figures(said: list[Reply]) -> dict[str, Figures]:
    (found,) = (reply.figures for reply in said if isinstance(reply, Assessed))
    return found


@pytest.mark.slow
def test_figures_are_the_same_in_a_worker_that_starts_anew_and_in_any_order(work: Benches) -> None:
    updates = [(client, work.update(client, far if client == "d" else lambda parts: None)) for client in "abcd"]
    runner, said = work.open("first")
    for client, artifact in reversed(updates):
        runner.serve(AddUpdate(client, artifact))
    runner.serve(AssessJob(tuple(updates)))
    again, said_again = work.open("second")  # after SIGKILL: nothing but the stored updates is left
    again.serve(AssessJob(tuple(updates)))
    assert figures(said) == figures(said_again)
    odd = figures(said)["d"]
    assert odd.norm is not None
    assert odd.norm > 3.0
    for each in figures(said).values():
        assert each.direction is not None


def test_a_teacher_pass_without_memory_is_done_in_smaller_batches(
    work: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [(client, work.update(client), 10) for client in "abc"]
    small = merged(*work.open("small", ease=1), *chosen)
    real = distillation.teacher_logits

    def hungry(teacher: Any, bank: Any, ctx: Any, watch: Any = None) -> torch.Tensor:
        if ctx.machine.most_rows is None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return real(teacher, bank, ctx, watch)

    monkeypatch.setattr(distillation, "teacher_logits", hungry)
    runner, said = work.open("hungry")
    runner.serve(AddUpdate(*chosen[0][:2]))
    assert merged(runner, said, *chosen) == small
    eased = [reply for reply in said if isinstance(reply, JobEased)]
    assert [reply.ease for reply in eased] == [1]
    assert "can't allocate memory" in eased[0].reason
    assert isinstance(said[-1], JobDone)
    assert said[-1].ease == 1


def test_a_distillation_without_memory_ends_as_the_weighted_average(
    work: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(*_: Any, **__: Any) -> None:
        raise MemoryError("3 GiB")

    monkeypatch.setattr(distillation, "train_student", hungry)
    artifacts = {client: work.update(client) for client in "ab"}
    runner, said = work.open("average")
    runner.serve(FinishJob((("a", artifacts["a"], 10), ("b", artifacts["b"], 30))))
    done = said[-1]
    assert isinstance(done, JobDone)
    assert [reply.ease for reply in said if isinstance(reply, JobEased)] == [1, 2]
    base = base_in(work.artifacts.get(work.base), work.spec, work.base)
    parts = [
        unpack_update(work.artifacts.get(artifact), work.spec, base).parts[Part.CLASSIFIER]
        for artifact in artifacts.values()
    ]
    mean = unpack(work.artifacts.get(done.aggregate), shared_layouts(work.spec), codecs=None).parts[Part.CLASSIFIER]
    for name, array in mean.items():
        expected = (10 * parts[0][name] + 30 * parts[1][name]) / 40
        np.testing.assert_allclose(array, expected, rtol=1e-2, atol=1e-3)  # the aggregate's codec


@pytest.mark.slow
def test_a_worker_that_is_killed_over_every_merge_is_asked_for_less_each_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with handle(tmp_path, monkeypatch, hanging_children.die_over_the_merge_until_it_averages) as driven:
        driven.worker.open(JOB)
        driven.worker.finish((("a", "3" * 64, 1), ("b", "3" * 64, 1)), {})
        done = driven.until(JobDone, JobFailed)
    assert isinstance(done, JobDone)
    assert done.ease == 2
    assert [event.ease for event in driven.events if isinstance(event, JobEased)] == [1, 2]
    died = [event for event in driven.events if isinstance(event, WorkerDied)]
    assert [event.deaths for event in died] == [1, 2, 3, 4]
