"""Executes the runs of a batch and stores their outcomes: one JSON per run. Uses torch.

A finished run is not repeated, an interrupted run resumes after its last finished round, a failed run does not stop the
batch. Independent of options and terminals.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.data.client_datasets import Cohort, build_cohort, unheld_images
from experiments.data.deal import DealOptions
from experiments.data.source import Source
from experiments.errors import RunError
from experiments.simulation.batch import STATE_FOLDER, PlannedRun, RunSetting, record_path
from experiments.simulation.checkpoints import Checkpoints
from experiments.simulation.party_builder import Facts, defended, featured, party_of, roots_of
from experiments.simulation.recorded_updates import MAX_AUXILIARY, UPDATES_FOLDER, RecordedUpdates
from experiments.simulation.simulation_record import record_of, write_json
from fedcg.learning.networks.own_backbone import keeps_features
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.simulation.simulation import NONE_TRAINED, Schedule, Simulation, beginning
from fedcg.learning.spec import FederationSpec, InputForm, plan_from_mapping
from fedcg.values import Value

FAILURES_FILE = "failures.json"

OnRound = Callable[[PlannedRun, Simulation], None]
Simulator = Callable[..., Simulation]
"""Runs a federation; takes (party, schedule, resume=, on_round=) like `fedcg.learning.simulation.simulation.simulate`."""


class FailedRun(Value):
    """A failed run, the reason, and the original error."""

    name: str
    reason: str
    error: Exception | None = None


class Given(Value):
    """Clients of the user's own code, instead of a partitioned source.

    Attributes:
        own: by client, the spec with its own trainer.
    """

    spec: FederationSpec
    cohort: Cohort
    own: Mapping[str, FederationSpec] = field(default_factory=dict)


@dataclass(eq=False)
class Runs:
    """The runs of one folder.

    Args:
        folder: for records; checkpoints are in a subfolder.
        simulator: runs a federation; `simulate` does so in this process.
        on_round: called after every round.
        note: receives messages about the preparation before the first round.
        given: the clients of all runs, with their last checkpoints kept; None: clients from the settings.
    """

    folder: Path
    simulator: Simulator
    on_round: OnRound
    note: Callable[[str], None] = lambda _: None
    given: Given | None = None

    # The last ones are cached: the next run is usually another method on the same images.
    _opened: tuple[str, Source] | None = field(default=None, init=False)
    _dealt: tuple[tuple[str, DealOptions, InputForm], Cohort] | None = field(default=None, init=False)
    _defended: tuple[object, Cohort, Facts] | None = field(default=None, init=False)
    _featured: tuple[object, Cohort] | None = field(default=None, init=False)

    def forget(self, planned: PlannedRun) -> None:
        """Delete a run's record, checkpoints and recorded updates."""
        record_path(self.folder, planned).unlink(missing_ok=True)
        self._checkpoints(planned).remove()
        shutil.rmtree(self.recording(planned), ignore_errors=True)

    def recording(self, planned: PlannedRun) -> Path:
        """Return the folder of a run's recorded updates, whether or not they were kept."""
        return self.folder / UPDATES_FOLDER / planned.setting.name

    def files(self, planned: PlannedRun) -> list[Path]:
        """Return the record of a finished run, and the checkpoint with all its models if it was kept."""
        return [record_path(self.folder, planned), *self._checkpoints(planned).files()]

    def done_rounds(self, planned: PlannedRun) -> int:
        """Return the number of rounds of a run in its checkpoint."""
        return self._checkpoints(planned).rounds()

    def stands(self, planned: PlannedRun) -> Simulation | None:
        """Return the state of a run after its newest checkpoint; None without one."""
        found = self._checkpoints(planned).newest()
        return None if found is None else found[0]

    def run(self, planned: PlannedRun) -> dict[str, Any]:
        """Start or resume a run; return its record.

        Raises:
            RunError: no client could train in any round.
            ExperimentError: the data can't be used.
            LearningError: the networks can't be built, or the data can't be read.
        """
        setting = planned.setting
        torch.set_num_threads(setting.threads)
        spec, real = self._cohort_of(setting)
        cohort, facts = self._defence_of(setting, real)
        auxiliary = None
        if planned.keep_updates and self._opened is not None:  # given clients have no source
            auxiliary = unheld_images(self._opened[1], spec.input, setting.deal(), MAX_AUXILIARY)
        seen = self._features_of(setting, spec, cohort)
        own = {} if self.given is None else self.given.own
        party = party_of(setting, spec, cohort, own)
        checkpoints = self._checkpoints(planned)
        stood, spent = checkpoints.newest() or (None, 0.0)
        started = time.monotonic() - spent  # includes the time before an interruption

        schedule = Schedule(
            shadow=setting.shadow,
            evaluate_every=setting.evaluate_every,
            participation=setting.participation,
            kept_updates=planned.kept_rounds,
        )
        recorded = None
        if planned.keep_updates:
            recorded = RecordedUpdates(
                self.recording(planned), party, planned.kept_rounds, stood or beginning(party, schedule)
            )
            recorded.begin(setting, auxiliary, real.clients if setting.defence else {})

        def keep(now: Simulation) -> None:
            if recorded is not None:  # before the checkpoint: a lost round is trained and recorded again
                recorded.add(now)
            checkpoints.save(now, time.monotonic() - started)
            self.on_round(planned, now)

        result = self.simulator(party_of(setting, spec, seen, own), schedule, resume=stood, on_round=keep)
        if (reason := _worthless(result)) is not None:
            checkpoints.remove()
            raise RunError(reason)
        record = record_of(planned, party, result, _names(cohort), time.monotonic() - started, facts)
        write_json(record, record_path(self.folder, planned))
        if self.given is None:
            checkpoints.remove()
        return record

    def _cohort_of(self, setting: RunSetting) -> tuple[FederationSpec, Cohort]:
        """Return the spec of a run, and the images of its clients."""
        if self.given is not None:
            return self.given.spec, self.given.cohort
        if self._opened is None or self._opened[0] != setting.data:
            self._opened = setting.data, setting.source()
        source, deal = self._opened[1], setting.deal()
        spec = complete_spec(plan_from_mapping(setting.plan(source)))
        key = setting.data, deal, spec.input
        if self._dealt is None or self._dealt[0] != key:
            self._dealt = None  # memory may not hold two of them
            self._dealt = key, build_cohort(source, spec.input, deal)
        return spec, self._dealt[1]

    def _defence_of(self, setting: RunSetting, cohort: Cohort) -> tuple[Cohort, Facts]:
        """Return the cohort after the setting's defence, and the defence's facts; all methods of a batch train on the same images."""
        if setting.defence is None:
            return cohort, {}
        assert self._dealt is not None
        key = self._dealt[0], setting.defence_label, setting.defenders, setting.start, setting.device, setting.threads
        if self._defended is None or self._defended[0] != key:
            self._defended = None
            roots = roots_of(setting.seed, tuple(sorted(cohort.clients)))
            folder = self.folder / STATE_FOLDER / "defence" / f"seed{setting.seed}"
            self._defended = key, *defended(cohort, setting, roots, folder, self.note)
        return self._defended[1:]

    def _features_of(self, setting: RunSetting, spec: FederationSpec, cohort: Cohort) -> Cohort:
        """Return the cohort with a frozen backbone's features instead of images; all methods of a batch train on the same ones."""
        if not keeps_features(spec):
            return cohort
        assert self._dealt is not None
        key = (
            self._dealt[0],
            setting.defence_label,
            setting.defenders,
            setting.start,
            spec.network.split,
            spec.network.weights,
            spec.network.backbones,
        )
        if self._featured is None or self._featured[0] != key:
            self._featured = None
            self.note(
                f"{', '.join(spec.network.backbone_names)}: computing the frozen backbone's features of all images once"
            )
            self._featured = key, featured(cohort, spec, setting.device)
        return self._featured[1]

    def _checkpoints(self, planned: PlannedRun) -> Checkpoints:
        return Checkpoints(self.folder / STATE_FOLDER / planned.setting.name, planned.setting)


def _names(cohort: Cohort) -> list[tuple[str, str]]:
    """Return (file, reason) of skipped images; of a path only the class folder and the file are kept."""
    names = (("/".join(Path(skipped.file).parts[-2:]), skipped) for skipped in cohort.skipped)
    return [(name, skipped.reason.replace(skipped.file, name)) for name, skipped in names]


def _worthless(result: Simulation) -> str | None:
    """Return why a run has no result: no client trained in any round; None for others."""
    idle = sum(failure.reason == NONE_TRAINED for failure in result.server_failures)
    if idle < result.rounds:
        return None
    reasons = sorted({failure.reason for failures in result.failures.values() for failure in failures})
    return f"no client could train in any round: {'; '.join(reasons[:3])}"


def write_failures(folder: Path, failed: Sequence[FailedRun]) -> None:
    """Write the failed runs to the folder; no file if none failed."""
    path = folder / FAILURES_FILE
    if not failed:
        path.unlink(missing_ok=True)
        return
    write_json({"failures": [{"run": run.name, "reason": run.reason} for run in failed]}, path)
