"""The batch of `fedcg simulate`: a list of runs, from options or from a published setting overridden by options.

Only handles names and numbers; runs nothing and imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

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
# Options that set a parameter of every method, and that parameter's name.
PARAM_OPTIONS = {"local_epochs": "epochs", "local_steps": "steps", "batch_size": "batch_size", "lr": "lr"}
_NO_REDUCTION = frozenset(PARAM_OPTIONS) | {
    "params", "defence_params", "quick", "data", "device", "threads", "evaluate_every", "shadow", "seed", "variant", "paper",
}  # fmt: skip


GONE = (("precision", "f32"), ("early_stop", None))
"""Settings that earlier records name, with the only values that they had."""


class RunSetting(Setting):
    """Everything that determines the numbers of one run.

    Attributes:
        codec: codec of updates; `aggregate_codec`: codec of aggregates (`fedcg.wire.artifacts.payload`).
        start: the seed of the private parts' initial weights.
        privacy: the mechanisms of the clients; a setting without any has the same JSON as before mechanisms existed.
        paper: the published setting of this run.
    """

    quick: Annotated[bool, Field(description=Setting.model_fields["quick"].description)] = False
    device: Annotated[str, Field(pattern=r"^[a-z]+(:\d+)?$", description="torch device: cpu, cuda, cuda:1")] = "cpu"
    threads: Annotated[
        int, Field(ge=1, le=1024, description="torch threads of each process; the number affects the last digits")
    ] = 1
    evaluate_every: Annotated[int, Field(ge=1, description="measure every this many rounds, and after the last")] = 1
    participation: Annotated[float, Field(gt=0, le=1, description="share of clients that participate in a round")] = 1.0
    shadow: Annotated[bool, Field(description="also train local-only models")] = True
    codec: Annotated[UpdateCodec, Field(description="codec of updates; default of a deployment: i8-delta")] = "f32"
    aggregate_codec: Annotated[
        AggregateCodec, Field(description="codec of aggregates; default of a deployment: f16")
    ] = "f32"
    start: Annotated[
        Literal["cohort", "public", "random"],
        # Older records without this field match records with its default.
        Field(
            exclude_if=lambda start: start == "cohort",
            description="private parts start from one secret of all clients (cohort), from the public seed of the spec, or "
            "from each client's own secret (random)",
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
            description="defence of every client's training images before the first round: antigan, ats, etc",
        ),
    ] = None
    defence_params: dict[str, ParameterValue] = Field(default_factory=dict, exclude_if=lambda params: not params)
    defenders: Annotated[
        int,
        Field(
            ge=0,
            exclude_if=lambda defenders: not defenders,
            description="only this many clients, the first ones, have the defence and the mechanisms; 0: all",
        ),
    ] = 0
    paper: str | None = None

    @model_validator(mode="after")
    def _defence_can_be_had(self) -> RunSetting:
        check_defence(self.defence, self.defence_params, dp_sgd=self.privacy.dp_sgd is not None)
        return self

    @property
    def defence_label(self) -> str:
        """Return the data defence with the parameters that differ from its defaults; empty without one."""
        return defence_label(self.defence, self.defence_params)

    @property
    def data_name(self) -> str:
        """Return the data set without this machine's paths: a folder's or file's name, or a named data set without its folder."""
        if self.data.startswith("torchvision:"):
            return ":".join(self.data.split(":")[:2])
        return Path(self.data).name if "/" in self.data else self.data

    @property
    def name(self) -> str:
        """Return the run's file name without ending; codecs, defence, mechanisms and start are included if not the default."""
        codecs = "" if (self.codec, self.aggregate_codec) == ("f32", "f32") else f"{self.codec}-{self.aggregate_codec}"
        parts = (
            self.paper or self.data_name,
            self.method,
            self.variant,
            self.defence_label,
            self.privacy.label,
            f"{self.defenders}-defender" if self.defenders else "",
            codecs,
            "" if self.start == "cohort" else f"{self.start}-start",
            f"seed{self.seed}",
        )
        return "-".join(re.sub(r"[^A-Za-z0-9._=-]+", "-", part).strip("-") for part in parts if part)

    def plan_for(self, classes: Sequence[str], form: InputForm) -> dict[str, object]:
        """Return the plan as for a demo, with the codecs of this run."""
        return {**super().plan_for(classes, form), "codec": self.codec, "aggregate_codec": self.aggregate_codec}

    def published(self) -> dict[str, Any]:
        """Return the setting for a record, without paths of this machine."""
        weights = {} if self.weights is None else {"weights": Path(self.weights).name}
        return {**self.model_dump(mode="json"), "data": self.data_name, **weights}

    def is_same(self, published: object) -> bool:
        """Return whether a record's setting equals this one; missing fields have their defaults."""
        if isinstance(published, dict):  # earlier records name settings that are gone, with their only values
            published = {name: one for name, one in published.items() if (name, one) not in GONE}
        try:
            return RunSetting.model_validate(published).published() == self.published()
        except ValidationError:
            return False


class PlannedRun(BaseModel, frozen=True, extra="forbid"):
    """One run to do.

    Attributes:
        setting: everything that determines its numbers.
        reduced: its differences from the published setting: name to (published, run); empty without one.
        keep_updates: the rounds whose updates are recorded, `all` or `1,5,10`; None: no recording.
    """

    setting: RunSetting
    reduced: dict[str, tuple[Any, Any]] = {}
    keep_updates: Annotated[str, Field(pattern=_KEPT_ROUNDS)] | None = None

    @property
    def kept_rounds(self) -> frozenset[int]:
        """The rounds whose updates are recorded."""
        if self.keep_updates == "all":
            return frozenset(range(1, self.setting.rounds + 1))
        return frozenset(map(int, self.keep_updates.split(","))) if self.keep_updates else frozenset()


class Batch(BaseModel, frozen=True, extra="forbid"):
    """Runs that belong together, in order."""

    runs: Annotated[tuple[PlannedRun, ...], Field(min_length=1)]

    def keeping(self, rounds: str) -> Batch:
        """Return the same runs, with the updates of some rounds recorded.

        Args:
            rounds: `all`, or comma-separated numbers.

        Raises:
            OptionError: another form, or a round beyond a run's last.
        """
        if re.fullmatch(_KEPT_ROUNDS, rounds) is None:
            raise OptionError(f"--keep-updates {rounds!r}: write all, or comma-separated rounds such as 1,5,10")
        if any(run.setting.backbones for run in self.runs):
            raise OptionError("--keep-updates records one network for all clients: omit --backbones")
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
    """Return a run for every method and seed; all methods of a seed before the next seed.

    Args:
        options: fields of `RunSetting` by name, without method, seed and params.
        methods: names of methods.
        seeds: seeds of all randomness.
        method_params: parameters by method; those under "" apply to every method.
        networks: likewise fields of `RunSetting` that a method needs; they override `options`.

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
    """Return a published setting, overridden by some options.

    Args:
        published: fields of `RunSetting`, `params` among them.
        given: the user's fields; each overrides the published value, also in `params`.

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
    """Return a setting for comparison: without fields that change no published figure, and with one name for each field."""
    values = {name: value for name, value in setting.published().items() if name not in _NO_REDUCTION}
    values |= {"start": setting.start, "privacy": setting.privacy.label, "defence": setting.defence_label}
    values |= {"defenders": setting.defenders}
    return values | {f"params.{name}": value for name, value in setting.all_params().items()}


def save_batch(batch: Batch, folder: Path, *, force: bool = False) -> None:
    """Store the batch in `folder`, in addition to earlier runs; the file stays on this machine, since it may contain paths.

    Args:
        batch: a run replaces an earlier one of the same name.
        folder: the batch's folder.
        force: whether such a run may have other data than the earlier one.

    Raises:
        OptionError: an earlier run of the same name had another setting, or other data, which its record would not
        show, or the folder is not writable; nothing was written.
    """
    known = _known_runs(folder)
    for run in batch.runs:
        if not force:
            has_record(folder, run)
        before = known.get(run.setting.name)
        if before is not None and before.setting.data != run.setting.data and not force:
            raise OptionError(
                f"{folder}: {run.setting.name} was run on {before.setting.data} there, not on {run.setting.data}; "
                "choose another --out, or --force to repeat it"
            )
    runs = {**known, **{run.setting.name: run for run in batch.runs}}
    state = folder / STATE_FOLDER
    whole = Batch(runs=tuple(runs.values())).model_dump(mode="json")
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_durably(state / _BATCH_FILE, json.dumps({"format": BATCH_FORMAT, "batch": whole}, indent=1))
    except OSError as error:
        raise OptionError(f"--out {folder}: not writable ({error.strerror}); choose another folder") from error


def record_path(folder: Path, run: PlannedRun) -> Path:
    """Return the path of a run's record in `folder`."""
    return folder / f"{run.setting.name}.json"


def has_record(folder: Path, run: PlannedRun) -> bool:
    """Return whether `folder` has the record of this run.

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
    """Return the runs stored in `folder` by name; empty without a readable file."""
    try:
        return {run.setting.name: run for run in load_batch(folder).runs}
    except OptionError:
        return {}


def load_batch(folder: Path) -> Batch:
    """Return the batch stored in `folder`.

    Raises:
        OptionError: no readable batch.
    """
    try:
        return Batch.model_validate(json.loads((folder / STATE_FOLDER / _BATCH_FILE).read_text())["batch"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise OptionError(
            f"{folder} holds no simulation that could be resumed: {STATE_FOLDER}/{_BATCH_FILE} is missing or damaged",
            exit_code=NOT_FOUND,
        ) from error
