"""Memory that runs out in a round: half the rows go through at once, the round goes on, and the share is remembered."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from edge_client.session.signals import RoundCommitted, RoundFailed
from edge_client.training import local_round, trainer_child
from edge_client.training.box_limits import LEAST_SHARE, MEMORY_FILE, NEAR_END_BYTES, MemoryShare
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import Method, RoundContext
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.edge.training_site import Site, real_spec

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


def test_the_update_in_pieces_is_that_of_the_whole_batch_up_to_the_last_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (Site(tmp_path / name, real_spec("fedavg", batch_size=BATCH)) for name in ("whole", "cut"))
    for site in (whole, cut):
        site.configure(policy={"allow_upload": frozenset(site.spec.upload)})
    whole.train()
    failing(monkeypatch, 1, MemoryError)
    cut.train()
    ours, theirs = cut.state().slots["personal"], whole.state().slots["personal"]
    differences = [abs(ours[part][name] - theirs[part][name]).max() for part in theirs for name in theirs[part]]
    assert 0 < max(differences) < 1e-4


def test_a_round_that_never_fits_is_declined_and_the_share_stays_above_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, real_spec(batch_size=BATCH))

    def never(*_: object) -> object:
        raise MemoryError("no room for the networks")

    monkeypatch.setattr(local_round, "protected_round", never)
    report = site.declined()
    assert (report.reason, report.detail) == (DeclineReason.TRAINING_FAILED, "no room for the networks")
    assert site.events("memory_short")[-1]["share"] == LEAST_SHARE
    assert site.store.generations.load() is None


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


def test_three_deaths_with_memory_near_its_end_halve_and_a_round_that_goes_well_forgets_them(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, real_spec(batch_size=BATCH))

    def dies() -> None:  # by a signal, as of an allocation that was not checked
        memory = site.trainer()._memory
        memory.round_begins()
        memory.look(NEAR_END_BYTES - 1)

    dies()
    dies()
    site.train()
    for _ in range(3):
        assert site.events("memory_short") == []
        dies()
    site.train(2)
    assert [event["share"] for event in site.events("memory_short")] == [0.5]


@pytest.mark.parametrize(
    ("in_round", "kills", "boot"),
    [(True, 4, "b0"), (True, 9, "b1"), (False, 9, "b0")],
    ids=["killed by hand", "power cut", "killed between rounds"],
)
def test_other_ends_of_a_process_leave_the_share_as_it_is(
    tmp_path: Path, in_round: bool, kills: int, boot: str
) -> None:
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
    assert MemoryShare(tmp_path, 1.0, "cpu 4").share == 0.5
    assert MemoryShare(tmp_path, 0.25, "cpu 4").share == 0.25
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
