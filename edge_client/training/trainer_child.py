"""The training process: uses torch, executes one command at a time and reports the result. All durable data is in the store."""

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from devices.detect import detect
from devices.files import LIVE_ROOT
from devices.files import free_memory as free_memory_of
from devices.nvidia import nvml_readings, torch_obstacle
from devices.power import EnergyMeter
from devices.profile import DeviceProfile, Gpu, NotTrainableError, TrainingPlan, batch_share, plan_training
from devices.telemetry import Sensors, read_power
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError, FirewallError, RoundError
from edge_client.session import signals
from edge_client.store.checked_files import LEDGER_FILE, append_line
from edge_client.store.generations import Generation
from edge_client.store.private_store import PrivateStore, open_store
from edge_client.training.box_limits import MemoryShare, Pauses, turn, yield_cpu
from edge_client.training.local_data import LocalData, LocalDefence
from edge_client.training.local_round import images_of_round, train_round
from edge_client.training.own_program import OwnProgram
from edge_client.training.personal_model import choose_model, export_best
from edge_client.training.workplace import Workplace
from export.errors import ExportError
from fedcg.errors import told, users_trace
from fedcg.event_log import EventLog
from fedcg.files import advice_for
from fedcg.learning.data.sources import IMAGE_SUFFIXES
from fedcg.learning.errors import DataError, LearningError, ProgramError
from fedcg.learning.image_set import SkippedImage
from fedcg.learning.method import DivergedError
from fedcg.learning.program import Program
from fedcg.learning.training.device_errors import BROKEN_EXIT, is_out_of_memory, is_sticky
from fedcg.wire.errors import CodecError, WireError
from fedcg.wire.messages.schemas import NO_ATTEMPT, DeclineReason, RoundAttempt
from fedcg.wire.parts import RoundCost
from fedcg.worker_process import requests_of

LOCK_WAIT_S = 30.0
LOOK_S = 1.0  # between two readings of the available memory
WORKING_EVERY_S = 1.0
_SUFFIXES = "|".join(map(re.escape, IMAGE_SUFFIXES))
_log = logging.getLogger(__name__)


def trainer_main(connection: Connection, config: AgentConfig) -> None:
    """Execute the agent's commands until the agent ends. An unfinished round leaves no changes."""
    yield_cpu(config.training.priority)
    store = open_store(config)
    events = EventLog(
        config.store / "events.jsonl", time.time, watch=lambda event: connection.send(signals.Noted(event))
    )
    with store.locked("trainer.lock", wait_s=LOCK_WAIT_S):
        trainer = Trainer(config, store, events, SignsOfLife(connection))
        connection.send(signals.TrainerReady())
        for command in requests_of(connection):
            if isinstance(command, signals.ReleaseTrainer):
                return
            report = trainer.do(command)
            connection.send(report)
            trainer.afterwards(report)


class SignsOfLife:
    """Reports progress to the handle, at most once a second."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._sent_at = float("-inf")

    def __call__(self) -> None:
        """Call after a step."""
        now = self._clock()
        if now - self._sent_at >= WORKING_EVERY_S:
            self._sent_at = now
            self._connection.send(signals.Working())


class Trainer:
    """Executes commands.

    Args:
        config: of the device.
        store: the private store, locked for this process.
        events: the event log.
        working: called at every step of the work.
    """

    def __init__(
        self, config: AgentConfig, store: PrivateStore, events: EventLog, working: Callable[[], None] = lambda: None
    ) -> None:
        self._obstacle: str | None = None
        self._events = events
        box = detect()
        try:
            plan = plan_here(config, box)
        except NotTrainableError as error:
            self._obstacle = str(error)
            plan = TrainingPlan("cpu", config.training.threads or 1, 1.0, str(error))
        place = plan.device
        torch.set_num_threads(plan.threads)
        of_place = box.gpu if place == "cuda" and box.gpu is not None else box
        self._gpu = None if of_place is box else box.gpu
        at_first = batch_share(box, place, free_memory(self._gpu))
        self._memory = MemoryShare(store.root, plan.batch_scale, f"{place} {of_place.memory_bytes}", at_first=at_first)
        share = self._memory.share
        events.write("plan", device=place, threads=plan.threads, batch_scale=share, reason=plan.reason)
        if self._memory.was_killed:
            events.write("memory_short", share=share, detail="the training process died in a round for lack of memory")
        defence = LocalDefence(config.data, store, events, place)
        own = Program.of_source(config.data.root)
        program = None if own is None else OwnProgram(own, config.device, store)
        arrays = None if program is None else program.arrays
        data = LocalData(config.data.root, config.data.common_test, store, self._report_skipped, arrays, defence)
        self._working = working
        self._meter = EnergyMeter(lambda: None)
        self._looked = 0.0
        self._started = time.monotonic()
        duty = config.training.duty_cycle
        self._pauses = Pauses(config.eligibility, Sensors(store.root).read, self._is_working, events, duty_cycle=duty)
        self._work = Workplace(
            config,
            store,
            data,
            events,
            place,
            plan.threads,
            share,
            working=self._pauses,
            cost=self._cost,
            program=program,
        )

    def _report_skipped(self, skipped: tuple[SkippedImage, ...]) -> None:
        self._work.store.save_left_out({image.file: image.reason for image in skipped})
        if skipped:
            self._events.write("images_skipped", count=len(skipped))

    def _is_working(self) -> None:
        self._working()
        self._meter.look()
        if (now := time.monotonic()) - self._looked >= LOOK_S:
            self._looked = now
            self._memory.look(free_memory(self._gpu))

    def _cost(self) -> RoundCost:
        self._meter.look(at_once=True)
        joules = None if self._meter.rail is None else round(self._meter.joules, 1)
        return RoundCost(seconds=round(time.monotonic() - self._started, 3), joules=joules)

    def do(self, command: signals.Work) -> signals.WorkReport:
        """Execute one command when it is this federation's turn. A failure becomes a report and leaves the state unchanged."""
        attempt = NO_ATTEMPT if isinstance(command, signals.ChooseModel) else command.round_attempt
        self._pauses.at = attempt
        try:
            with self._turn(attempt):
                if isinstance(command, signals.WeighRound):
                    return signals.Weighed(attempt, *images_of_round(self._work, command))
                return self._train(command) if isinstance(command, signals.TrainRound) else self._choose(command)
        except (EdgeError, WireError, ExportError, LearningError, DivergedError, OSError) as error:
            if not isinstance(command, signals.ChooseModel):
                return signals.RoundFailed(attempt, reason_for(error), self._explain(error))
            self._events.write("finalise_failed", detail=self._explain(error))
            return signals.Chosen(command.aggregate, succeeded=False)

    def _turn(self, attempt: RoundAttempt) -> AbstractContextManager[None]:
        lock, working = self._work.config.training_lock, self._working

        def waits() -> None:
            self._events.write("phase_started", phase="wait", **vars(attempt), pid=os.getpid())

        return turn(lock, waits, working)

    def _train(self, command: signals.TrainRound) -> signals.WorkReport:
        if self._obstacle is not None:
            return signals.RoundFailed(command.round_attempt, DeclineReason.NOT_ELIGIBLE, self._obstacle)
        self._started, self._meter = time.monotonic(), EnergyMeter(read_power)
        while (report := self._attempted(command)) is None:
            if self._work.place == "cuda":
                torch.cuda.empty_cache()
        return report

    def _attempted(self, command: signals.TrainRound) -> signals.WorkReport | None:
        """Train a round once. None if memory ran out and the round must be retried with half the rows at once."""
        before = self._work.store.generations.newest()
        self._memory.round_begins()
        try:
            generation = train_round(self._work, command)
            if before is None or generation.number > before.number:  # otherwise it was committed before a crash
                write_cost(self._work, generation, self._cost(), self._meter.rail, command.share)
            self._memory.round_ended(well=True)
        except Exception as error:  # noqa: BLE001 - a run loop: a failed round must not end the process
            self._memory.look(free_memory(self._gpu))
            if is_sticky(error):
                self._give_up(command, error)
            reason = reason_for(error)
            unexplained = reason is DeclineReason.TRAINING_FAILED and not isinstance(
                error, EdgeError | OSError | ProgramError
            )
            if (is_out_of_memory(error) and self._memory.halve()) or (unexplained and self._memory.failed()):
                share = self._memory.share
                self._events.write("memory_short", share=share, detail=self._explain(error))
                self._work = replace(self._work, batch_scale=share)
                return None
            if trace := users_trace(error):
                _log.error("%s failed in this device's own code:\n%s", command.round_attempt, trace)
            elif unexplained:
                _log.exception("%s failed on %s", command.round_attempt, self._work.config.device)
            return signals.RoundFailed(command.round_attempt, reason, self._explain(error))
        finally:
            self._memory.round_ended()
        return signals.RoundCommitted(generation.round_attempt)

    def afterwards(self, report: signals.WorkReport) -> None:
        """Export the personal model after a round that improved it. The round's report has already been sent."""
        export = self._work.config.export
        if not (isinstance(report, signals.RoundCommitted) and export.enabled and export.each_best):
            return
        try:
            with self._turn(report.round_attempt):
                export_best(self._work)
        # Errors such as a full disk must not end the process. The next round tries again.
        except (ExportError, LearningError, OSError) as error:
            self._events.write("export_failed", round=report.round_attempt.round, detail=self._explain(error))

    def _explain(self, error: Exception) -> str:
        advice = f". {advice_for(error, self._work.store.root)}" if isinstance(error, OSError) else ""
        data, auxiliary = self._work.config.data, self._work.config.audit.auxiliary
        text = f"{told(error)}{advice}"
        return without_image_names(text, data.root, data.common_test, auxiliary)

    def _give_up(self, command: signals.TrainRound, error: Exception) -> None:
        """End the process, because all further GPU calls in it would fail. The agent starts a new one."""
        self._events.write("gpu_failed", **vars(command.round_attempt), pid=os.getpid(), detail=str(error))
        os._exit(BROKEN_EXIT)

    def _choose(self, command: signals.ChooseModel) -> signals.WorkReport:
        outcome = choose_model(self._work, command)
        self._events.write("finalised", **{name: outcome[name] for name in outcome if name != "format"})
        return signals.Chosen(command.aggregate, succeeded=True)


def plan_here(config: AgentConfig, box: DeviceProfile) -> TrainingPlan:
    """The plan for training in this process.

    Raises:
        NotTrainableError: the device can't train, or not with the settings under `[training]` in agent.toml.
    """
    problem = torch_obstacle()
    if not problem and not torch.cuda.is_available():
        problem = "torch finds no usable GPU: check NVIDIA's driver (`nvidia-smi`)"
    wanted = config.training
    return plan_training(box, device=wanted.device, threads=wanted.threads, gpu_problem=problem)


def free_memory(gpu: Gpu | None) -> int | None:
    """Available memory in bytes where training runs: of a GPU with separate memory, else of the system."""
    if gpu is None or gpu.shares_memory:
        return free_memory_of(LIVE_ROOT)
    readings = nvml_readings()
    return None if readings is None else readings.free_bytes


def without_image_names(text: str, *roots: Path | None) -> str:
    """A text for the logs, with each image path replaced by its folder, because image names may be private."""
    for root in (str(one) for one in roots if one is not None):
        text = re.sub(
            rf"{re.escape(root)}/.*({_SUFFIXES})", f"an image in {root}", text, flags=re.IGNORECASE | re.DOTALL
        )
    return text


def reason_for(error: Exception) -> DeclineReason:
    """The decline reason for the coordinator, from a closed list. The error's text never leaves the device."""
    if isinstance(error, RoundError):
        return error.reason
    if isinstance(error, DivergedError | CodecError):  # a codec refuses numbers that normal training does not produce
        return DeclineReason.DIVERGED
    if isinstance(error, FirewallError):
        return DeclineReason.UPLOAD_NOT_ALLOWED
    if isinstance(error, DataError):
        return DeclineReason.NO_DATA
    if isinstance(error, LearningError) and not isinstance(error, ProgramError):
        return DeclineReason.SPEC_REFUSED
    return DeclineReason.TRAINING_FAILED


def write_cost(work: Workplace, generation: Generation, cost: RoundCost, rail: str | None, share: float) -> None:
    """Add a round's cost to the ledger. A disk error is reported and otherwise ignored."""
    at, outbox = generation.round_attempt, generation.outbox
    line = {
        "kind": "round",
        "t": round(time.time(), 3),
        "federation": work.config.federation,
        **vars(at),
        "seconds": cost.seconds,
        "share": share,
        "device": work.place,
        "images": work.store.generations.snapshot(generation).counts()["train"],
        "update_bytes": None if outbox is None else outbox.size,
        "joules": cost.joules,
        "rail": rail,
    }
    try:
        append_line(work.store.root / LEDGER_FILE, line)
    except OSError as error:
        work.events.write("refused", what="ledger", **vars(at), detail=str(error))
