"""What `fedcg simulate` is asked for: a list of runs, made of options or of a published setting with options over it.

Knows names and numbers only; runs nothing and imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments.errors import OptionError
from experiments.settings import Setting, of_method
from fedcg.errors import NOT_FOUND
from fedcg.files import replace_durably
from fedcg.learning.defences.defence import check_defence, defence_label
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.spec import InputForm, ParameterValue
from fedcg.wire.parts import AggregateCodec, UpdateCodec

BATCH_FORMAT = 1
STATE_FOLDER = ".state"
_BATCH_FILE = "batch.json"
_KEPT_ROUNDS = r"^(all|\d{1,6}(,\d{1,6})*)$"
# Options that are a parameter of every method, and that parameter's name.
PARAM_OPTIONS = {"local_epochs": "epochs", "local_steps": "steps", "batch_size": "batch_size", "lr": "lr"}
_NO_REDUCTION = frozenset(
    {
        "params",
        "defence_params",
        *PARAM_OPTIONS,
        "quick",
        "data",
        "device",
        "precision",
        "threads",
        "evaluate_every",
        "shadow",
        "seed",
        "variant",
        "paper",
    }
)


class RunSetting(Setting):
    """Everything that decides the numbers of one run.

    Attributes:
        precision: of training steps; "bf16" on CUDA devices alone.
        codec: how updates are coded, `aggregate_codec` how aggregates are (`fedcg.wire.artifacts.payload`).
        start: the root of the private parts' initial weights.
        privacy: the mechanisms of every client; a setting without any has the JSON that it had before there were some.
        paper: the published setting that this run started from.
    """

    quick: Annotated[bool, Field(description=Setting.model_fields["quick"].description)] = False
    device: Annotated[str, Field(pattern=r"^[a-z]+(:\d+)?$", description="torch device: cpu, cuda, cuda:1")] = "cpu"
    precision: Annotated[
        Literal["f32", "bf16"],
        Field(description="of training steps: f32; bf16 on cuda, for convolutions and matrix products"),
    ] = "f32"
    threads: Annotated[
        int, Field(ge=1, le=1024, description="torch threads of each process; other numbers give other last digits")
    ] = 1
    evaluate_every: Annotated[
        int, Field(ge=1, description="measure after every so many rounds, and after the last")
    ] = 1
    participation: Annotated[float, Field(gt=0, le=1, description="share of the clients that take part in a round")] = (
        1.0
    )
    early_stop: Annotated[
        int | None, Field(ge=1, description="end after so many rounds without a better validation of any client")
    ] = None
    shadow: Annotated[bool, Field(description="train local-only shadows beside")] = True
    codec: Annotated[UpdateCodec, Field(description="of updates; a deployment's default is i8-delta")] = "f32"
    aggregate_codec: Annotated[AggregateCodec, Field(description="of aggregates; a deployment's default is f16")] = (
        "f32"
    )
    start: Annotated[
        Literal["cohort", "public", "random"],
        # Records from before this field, and those that leave it at its default, are alike.
        Field(
            exclude_if=lambda start: start == "cohort",
            description="private parts start from one secret of all clients (cohort), from the public seed of the spec, or "
            "each client's from a secret of its own (random)",
        ),
    ] = "cohort"
    variant: Annotated[
        str,
        Field(
            pattern=r"^([A-Za-z0-9][A-Za-z0-9._=-]{0,60})?$",
            description="a free label that distinguishes an ablation's runs",
        ),
    ] = ""
    privacy: Annotated[PrivacySettings, Field(exclude_if=lambda privacy: not privacy.is_on)] = OFF
    defence: Annotated[
        str | None,
        Field(
            exclude_if=lambda defence: defence is None,
            description="what every client's training images go through before the first round: antigan, ats, etc",
        ),
    ] = None
    defence_params: dict[str, ParameterValue] = Field(default_factory=dict, exclude_if=lambda params: not params)
    paper: str | None = None

    @model_validator(mode="after")
    def _bf16_is_for_cuda(self) -> RunSetting:
        if self.precision == "bf16" and not self.device.startswith("cuda"):
            raise ValueError(f"precision bf16 needs --device cuda: on {self.device} it is slower than f32")
        return self

    @model_validator(mode="after")
    def _defence_can_be_had(self) -> RunSetting:
        check_defence(self.defence, self.defence_params, dp_sgd=self.privacy.dp_sgd is not None)
        return self

    @property
    def defence_label(self) -> str:
        """The data defence with the parameters that differ from its defaults; empty without one."""
        return defence_label(self.defence, self.defence_params)

    @property
    def data_name(self) -> str:
        """The data set without this machine's paths: a folder's or file's name, or a named data set without its folder."""
        if self.data.startswith("torchvision:"):
            return ":".join(self.data.split(":")[:2])
        return Path(self.data).name if "/" in self.data else self.data

    @property
    def name(self) -> str:
        """The run's file name, without its ending; codecs, defence, mechanisms and start are named where they are not the default."""
        codecs = "" if (self.codec, self.aggregate_codec) == ("f32", "f32") else f"{self.codec}-{self.aggregate_codec}"
        parts = (
            self.paper or self.data_name,
            self.method,
            self.variant,
            self.defence_label,
            self.privacy.label,
            codecs,
            "" if self.start == "cohort" else f"{self.start}-start",
            f"seed{self.seed}",
        )
        return "-".join(re.sub(r"[^A-Za-z0-9._=-]+", "-", part).strip("-") for part in parts if part)

    def plan_for(self, classes: Sequence[str], form: InputForm) -> dict[str, object]:
        """As a demo's, with the codecs that this run asks for."""
        return {**super().plan_for(classes, form), "codec": self.codec, "aggregate_codec": self.aggregate_codec}

    def published(self) -> dict[str, Any]:
        """The setting as a record shows it: no path of this machine in it."""
        weights = {} if self.weights is None else {"weights": Path(self.weights).name}
        return {**self.model_dump(mode="json"), "data": self.data_name, **weights}

    def is_same(self, published: object) -> bool:
        """Whether a setting as a record shows it is this one; what it does not name has its default."""
        try:
            return RunSetting.model_validate(published).published() == self.published()
        except ValidationError:
            return False


class PlannedRun(BaseModel):
    """One run to be done.

    Attributes:
        setting: what decides its numbers.
        reduced: where that differs from the published setting: name to (published, run); empty without one.
        keep_updates: the rounds whose updates are recorded, `all` or `1,5,10`; None: of none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: RunSetting
    reduced: dict[str, tuple[Any, Any]] = {}
    keep_updates: Annotated[str, Field(pattern=_KEPT_ROUNDS)] | None = None

    @property
    def kept_rounds(self) -> frozenset[int]:
        """The rounds whose updates are recorded."""
        if self.keep_updates == "all":
            return frozenset(range(1, self.setting.rounds + 1))
        return frozenset(map(int, self.keep_updates.split(","))) if self.keep_updates else frozenset()


class Batch(BaseModel):
    """Runs that belong together, in the order they are done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: Annotated[tuple[PlannedRun, ...], Field(min_length=1)]

    def keeping(self, rounds: str) -> Batch:
        """The same runs, with the updates of some rounds recorded.

        Args:
            rounds: `all`, or numbers with commas between them.

        Raises:
            OptionError: something else, or a round that a run does not have.
        """
        if re.fullmatch(_KEPT_ROUNDS, rounds) is None:
            raise OptionError(
                f"--keep-updates {rounds!r}: write all, or rounds with commas between them such as 1,5,10"
            )
        if any(run.setting.backbones for run in self.runs):
            raise OptionError("--keep-updates records one network for all clients: leave --backbones out")
        kept = tuple(run.model_copy(update={"keep_updates": rounds}) for run in self.runs)
        for run in kept:
            if strange := run.kept_rounds - frozenset(range(1, run.setting.rounds + 1)):
                raise OptionError(
                    f"--keep-updates {rounds}: {run.setting.name} has rounds 1 to {run.setting.rounds}, not {min(strange)}"
                )
        return Batch(runs=kept)


def plan_batch(
    options: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    method_params: Mapping[str, Mapping[str, ParameterValue]],
    networks: Mapping[str, Mapping[str, object]] | None = None,
) -> Batch:
    """Every method with every seed; all methods of a seed before the next seed.

    Args:
        options: fields of `RunSetting` by name, without method, seed and params.
        methods: names.
        seeds: roots of all randomness.
        method_params: parameters by method; those under "" are every method's.
        networks: likewise fields of `RunSetting`, over those in `options`: what a method needs.

    Raises:
        ValidationError: names every bad value.
    """
    return Batch(
        runs=tuple(
            PlannedRun(
                setting=RunSetting.model_validate(
                    {
                        **options,
                        **of_method(networks or {}, method),
                        "method": method,
                        "seed": seed,
                        "params": of_method(method_params, method),
                    }
                )
            )
            for seed in dict.fromkeys(seeds)
            for method in dict.fromkeys(methods)
        )
    )


def planned_run(published: Mapping[str, Any], given: Mapping[str, Any]) -> PlannedRun:
    """A published setting with some options over it.

    Args:
        published: fields of `RunSetting`, `params` among them.
        given: such fields that the user asks for; each beats what is published, also where that stands in `params`.

    Raises:
        ValidationError: names every bad value.
    """
    masked = {PARAM_OPTIONS[name] for name in given if name in PARAM_OPTIONS}
    params = {name: value for name, value in published.get("params", {}).items() if name not in masked}
    base = RunSetting.model_validate(published)
    run = RunSetting.model_validate({**published, **given, "params": {**params, **given.get("params", {})}})
    before, after = _compared(base), _compared(run)
    reduced = {name: (before.get(name), after[name]) for name in after if before.get(name) != after[name]}
    return PlannedRun(setting=run, reduced=reduced)


def _compared(setting: RunSetting) -> dict[str, Any]:
    """What two settings are compared by: neither what changes no published figure nor the same thing under two names."""
    values = {name: value for name, value in setting.published().items() if name not in _NO_REDUCTION}
    values |= {"start": setting.start, "privacy": setting.privacy.label, "defence": setting.defence_label}
    return values | {f"params.{name}": value for name, value in setting.all_params().items()}


def save_batch(batch: Batch, folder: Path, *, force: bool = False) -> None:
    """Remember in `folder` what is being run there, beside what was before; it stays on this machine, for it may hold paths.

    Args:
        batch: a run of a name that is known takes its place.
        folder: of the batch.
        force: whether such a run may have other data than the one before.

    Raises:
        OptionError: a run of the same name had another setting, or other data, which its record would not show; nothing was
            written.
    """
    known = _known_runs(folder)
    for run in batch.runs:
        if not force:
            has_record(folder, run)
        before = known.get(run.setting.name)
        if before is not None and before.setting.data != run.setting.data and not force:
            raise OptionError(
                f"{folder}: {run.setting.name} was run with {before.setting.data} there, not {run.setting.data}; "
                "choose another --out, or --force to run it again"
            )
    runs = {**known, **{run.setting.name: run for run in batch.runs}}
    state = folder / STATE_FOLDER
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = Batch(runs=tuple(runs.values())).model_dump(mode="json")
    replace_durably(state / _BATCH_FILE, json.dumps({"format": BATCH_FORMAT, "batch": whole}, indent=1))


def record_path(folder: Path, run: PlannedRun) -> Path:
    """Where the record of a run in `folder` lies."""
    return folder / f"{run.setting.name}.json"


def has_record(folder: Path, run: PlannedRun) -> bool:
    """Whether `folder` has the record of this very run.

    Raises:
        OptionError: the record of another setting has its name.
    """
    path = record_path(folder, run)
    if not path.exists():
        return False
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        record = None
    if not run.setting.is_same(record.get("setting") if isinstance(record, dict) else None):
        raise OptionError(
            f"{path} is the record of another setting; choose another --out or a --variant, or --force to replace it"
        )
    return True


def _known_runs(folder: Path) -> dict[str, PlannedRun]:
    """By name the runs that `folder` remembers; none where nothing that can be read does."""
    try:
        return {run.setting.name: run for run in load_batch(folder).runs}
    except OptionError:
        return {}


def load_batch(folder: Path) -> Batch:
    """What was being run in `folder`.

    Raises:
        OptionError: nothing was.
    """
    try:
        return Batch.model_validate(json.loads((folder / STATE_FOLDER / _BATCH_FILE).read_text())["batch"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise OptionError(
            f"{folder} holds no simulation that could be resumed: {STATE_FOLDER}/{_BATCH_FILE} is missing or damaged",
            exit_code=NOT_FOUND,
        ) from error
