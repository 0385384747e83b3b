"""How a training process follows `[training]`, a share of the steps, and memory that runs out in a round."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from devices.nvidia import GpuReadings
from devices.profile import GIB, DeviceKind, DeviceProfile, Gpu, Trainable
from edge_client.agent.hardware import HardwareWatch
from edge_client.config import PolicySection, TrainingSection
from edge_client.session.signals import RoundCommitted, RoundFailed
from edge_client.store.checked_files import LEDGER_FILE, append_line, read_lines
from edge_client.store.private_store import PRIVACY_FILE
from edge_client.training import local_round, trainer_child
from edge_client.training.box_limits import LEAST_SHARE, MEMORY_FILE, NEAR_END_BYTES, MemoryShare
from edge_client.training.trainer_child import free_memory
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Method, RoundContext
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.spec import NetworkChoice
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, ReportField
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import FEDERATION, make_config
from tests.support.raising import raising

BATCH = 8


def box(root: Path, kills: int, boot: str = "b0") -> Path:
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {kills}\n")
    (root / "proc/sys/kernel/random/boot_id").write_text(boot + "\n")
    return root


@pytest.fixture
def rows_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What each round was trained with."""
    seen: list[int | None] = []

    def noted(method: Method, state: object, data: object, aggregate: object, ctx: RoundContext) -> object:
        seen.append(ctx.machine.most_rows)
        return protected_round(method, state, data, aggregate, ctx)  # type: ignore[arg-type]

    monkeypatch.setattr(local_round, "protected_round", noted)
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, times: int, error: Callable[[], Exception]) -> None:
    """The first `times` calls of the method's round fail as they do without memory."""
    left, plain = [times], vars(local_round)["protected_round"]

    def short(*arguments: object) -> object:
        if left[0] > 0:
            left[0] -= 1
            plain(*arguments)
            raise error()
        return plain(*arguments)

    monkeypatch.setattr(local_round, "protected_round", short)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError,
        lambda: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_round_that_runs_out_of_memory_goes_on_in_pieces_and_later_rounds_begin_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: list[int | None], error: Callable[[], Exception]
) -> None:
    site = Site(tmp_path, real_spec(batch_size=BATCH))
    failing(monkeypatch, 2, error)
    trainer = site.trainer()
    assert isinstance(trainer.do(site.round(1)), RoundCommitted)
    assert rows_at_once == [None, BATCH // 2, BATCH // 4]
    assert [event["share"] for event in site.events("memory_short")] == [0.5, 0.25]
    assert isinstance(trainer.do(site.round(2)), RoundCommitted)
    site.train(3)  # another process
    assert rows_at_once[3:] == [BATCH // 4] * 2
    assert [event["batch_scale"] for event in site.events("plan")] == [1.0, 0.25]


def test_a_round_that_never_fits_is_declined_and_the_share_stays_above_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(batch_size=BATCH))

    monkeypatch.setattr(local_round, "protected_round", raising(MemoryError("no room for the networks")))
    assert site.declined(DeclineReason.TRAINING_FAILED) == "no room for the networks"
    assert (site.events("memory_short")[-1]["share"], site.store.generations.load()) == (LEAST_SHARE, None)


def test_the_successor_of_a_process_that_the_kernel_killed_in_a_round_begins_with_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: list[int | None]
) -> None:
    site, root = Site(tmp_path / "site", real_spec(batch_size=BATCH)), box(tmp_path / "box", kills=4)
    monkeypatch.setattr(trainer_child, "MemoryShare", partial(MemoryShare, root=root))
    site.trainer()._memory.round_begins()  # and is killed
    box(root, kills=5)
    trainer = site.trainer()
    assert [event["share"] for event in site.events("memory_short")] == [0.5]
    assert isinstance(trainer.do(site.round()), RoundCommitted)
    assert rows_at_once == [BATCH // 2]
    site.trainer()
    assert len(site.events("memory_short")) == 1, "the same kill counts once"


def test_three_failures_of_any_kind_with_memory_near_its_end_halve_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: list[int | None]
) -> None:
    site, free = Site(tmp_path, real_spec(batch_size=BATCH)), [64 << 30]
    monkeypatch.setattr(trainer_child, "free_memory", lambda gpu: free[0])
    failing(monkeypatch, 4, lambda: SystemError("error return without exception set"))
    trainer = site.trainer()
    free[0] = NEAR_END_BYTES
    assert isinstance(trainer.do(site.round(1, 1)), RoundFailed)  # memory was not near its end
    free[0] -= 1
    for attempt in (2, 3):
        assert isinstance(trainer.do(site.round(1, attempt)), RoundFailed)
    assert site.events("memory_short") == []
    assert isinstance(trainer.do(site.round(1, 4)), RoundCommitted)
    assert [event["share"] for event in site.events("memory_short")] == [0.5]
    assert rows_at_once[-1] == BATCH // 2


def test_three_deaths_with_memory_near_its_end_halve_and_a_round_that_goes_well_forgets_them(tmp_path: Path) -> None:
    def started() -> MemoryShare:
        return MemoryShare(tmp_path, 1.0, "cpu 4", box(tmp_path, kills=4))

    def dies() -> None:  # by a signal, as of an allocation that was not checked
        memory = started()
        assert memory.share == 1.0
        memory.round_begins()
        memory.look(NEAR_END_BYTES - 1)

    dies()
    dies()
    started().round_ended(well=True)
    for _ in range(3):
        dies()
    assert started().share == 0.5


@pytest.mark.parametrize(
    ("in_round", "kills", "boot"),
    [(True, 4, "b0"), (True, 9, "b1"), (False, 9, "b0")],
    ids=["killed by hand", "power cut", "killed between rounds"],
)
def test_other_ends_of_a_process_leave_the_share_alone(tmp_path: Path, in_round: bool, kills: int, boot: str) -> None:
    root = box(tmp_path, kills=4)
    first = MemoryShare(tmp_path, 1.0, "cpu 4", root)
    first.round_begins()
    if not in_round:
        first.round_ended()
    box(tmp_path, kills, boot)
    later = MemoryShare(tmp_path, 1.0, "cpu 4", root)
    assert (later.share, later.was_killed) == (1.0, False)


def test_a_box_with_another_memory_begins_anew_and_one_with_a_smaller_plan_follows_it(tmp_path: Path) -> None:
    assert MemoryShare(tmp_path, 1.0, "cpu 4").halve()
    assert (MemoryShare(tmp_path, 1.0, "cpu 4").share, MemoryShare(tmp_path, 0.25, "cpu 4").share) == (0.5, 0.25)
    assert MemoryShare(tmp_path, 1.0, "cpu 8").share == 1.0


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{" * 5000, json.dumps({"memory": "cpu 4", "share": 7.0, "in_round": "b x"}).encode()],
)
def test_a_damaged_file_costs_what_was_learned_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MEMORY_FILE).write_bytes(content)
    share = MemoryShare(tmp_path, 1.0, "cpu 4", box(tmp_path, kills=1, boot="b"))
    assert share.share == 1.0
    share.round_begins()
    assert json.loads((tmp_path / MEMORY_FILE).read_bytes())["share"] == 1.0


CPU_BOX = DeviceProfile(
    DeviceKind.CPU, None, None, "x86_64", 2, 8 * GIB, None, None, Trainable(possible=True, reason="")
)
ORIN = replace(CPU_BOX, kind=DeviceKind.JETSON, gpu=Gpu("Orin", 8 * GIB, (8, 7), None, shares_memory=True))
NO_CUDA = "this torch (2.13.0) has no CUDA: install the build for this board"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    threads = torch.get_num_threads()
    yield Site(tmp_path, real_spec(batch_size=8))
    torch.set_num_threads(threads)


def on(monkeypatch: pytest.MonkeyPatch, box: DeviceProfile, problem: str = "", free: int | None = None) -> None:
    """The device is such a box, with a torch that can't use its GPU for that reason."""
    for module in ("edge_client.training.trainer_child", "edge_client.cli.doctor.hardware"):
        monkeypatch.setattr(f"{module}.detect", lambda: box)
        monkeypatch.setattr(f"{module}.torch_obstacle", lambda: problem)
    monkeypatch.setattr(trainer_child, "free_memory", lambda gpu: free)


def configure(site: Site, **training: object) -> None:
    site.configure(training=TrainingSection.model_validate({"threads": 1, **training}))


def test_a_torch_without_cuda_trains_on_the_cpu_for_a_stated_reason_or_declines_where_cuda_is_asked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, ORIN, NO_CUDA)
    configure(site, device="auto")
    site.train()
    plan = site.events("plan")[0]
    assert (plan["device"], plan["reason"]) == ("cpu", NO_CUDA)
    found = site.finding("training")
    assert (found.state, found.advice) == ("warning", NO_CUDA)
    assert "on the CPU, although the device has a GPU (Orin" in found.detail
    configure(site, device="cuda")  # its owner asks for it
    detail, found = site.declined(DeclineReason.NOT_ELIGIBLE), site.finding("training")
    assert detail == f'device = "cuda" under [training] can\'t be used: {NO_CUDA}'
    assert (found.state, found.detail) == ("failed", detail)


def test_the_batch_follows_what_is_free_before_round_1_and_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(free: int) -> object:
        on(monkeypatch, CPU_BOX, free=free)
        site.trainer()._memory.round_begins()
        return site.events("plan")[-1]["batch_scale"]

    configure(site, device="cpu")
    assert share(GIB - 1) == 0.5
    assert share(8 * GIB) == share(1) == 0.5, "another share would give a repeated round other last digits"
    (site.store.root / MEMORY_FILE).unlink()
    assert share(GIB) == share(1) == 1.0


def test_memory_is_that_of_a_gpu_of_its_own_and_else_the_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_child, "nvml_readings", lambda: GpuReadings(None, None, None, (), (), free_bytes=7))
    assert free_memory(Gpu("Card", 8 * GIB, (8, 6), None)) == 7
    box = free_memory(None)
    assert box is not None
    assert box > 7
    assert free_memory(ORIN.gpu) != 7


STEPS = {"classify": 16, "generate": 16, "shadow-classify": 16}


def steps_of(site: Site) -> dict[str, int]:
    """The last step of each phase that was reported."""
    return {event["phase"]: event["steps"] for event in site.events("progress") if event["phase"] in STEPS}


def test_half_of_the_steps_are_taken_in_every_stage_and_by_the_shadow_and_told_the_ledger(tmp_path: Path) -> None:
    whole = Site(tmp_path / "whole", real_spec(epochs=8), shadow=1)
    half = Site(tmp_path / "half", real_spec(epochs=8), shadow=1)
    whole.train()
    half.trainer().do(replace(half.round(), share=0.5))
    assert steps_of(whole).keys() == STEPS.keys()
    assert steps_of(half) == {phase: (steps + 1) // 2 for phase, steps in steps_of(whole).items()}
    assert [line["share"] for site in (whole, half) for line in read_lines(site.store.root / LEDGER_FILE)] == [1.0, 0.5]
    assert [event.get("share") for site in (whole, half) for event in site.events("committed")] == [None, 0.5]


def test_differentially_private_training_counts_the_steps_that_are_taken(tmp_path: Path) -> None:
    spent = []
    for share in (1.0, 0.5):
        site = Site(
            tmp_path / str(share), real_spec(epochs=8, network=NetworkChoice(noise_dim=8, discriminator="mlp_plain"))
        )
        site.configure(
            privacy=PrivacySettings(dp_sgd=DpSgdSettings(noise_multiplier=1.0, clip=1.0)),
            training=TrainingSection(device="cpu", threads=1),
        )
        site.trainer().do(replace(site.round(), share=share))
        spent.append(site.store.record(PRIVACY_FILE)["epsilon"])
    assert 0 < spent[1] < spent[0]


def test_the_time_of_a_round_is_predicted_from_the_ledger_after_a_restart_and_told_only_where_health_is_allowed(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, policy=PolicySection(allow_report=DEFAULT_ALLOW_REPORT))
    config.store.mkdir(parents=True)
    assert HardwareWatch(config).predicted_s(1.0) is None  # nothing was trained here
    line = {"t": 1.0, "kind": "round", "federation": FEDERATION, "seconds": 30.0, "share": 0.5}
    append_line(config.store / LEDGER_FILE, {**line, "seconds": 8.0})
    append_line(config.store / LEDGER_FILE, line)
    append_line(config.store / LEDGER_FILE, {**line, "federation": "another", "seconds": 500.0})
    append_line(config.store / LEDGER_FILE, {**line, "seconds": "?"})
    watch = HardwareWatch(config)
    assert watch.predicted_s(1.0) == 60.0  # half of the steps took 30 s
    assert watch.predicted_s(0.25) == 15.0
    watch.noted({"event": "committed", "seconds": 5.0, "share": 0.25})
    assert watch.predicted_s(1.0) == pytest.approx(20.0)
    silent = config.model_copy(
        update={"policy": PolicySection(allow_report=DEFAULT_ALLOW_REPORT - {ReportField.HEALTH})}
    )
    assert HardwareWatch(silent).predicted_s(1.0) is None
