"""The settings of a demo or a simulation, the plan derived from them, the roots of randomness, and command-line options for their fields.

Imports no torch.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from experiments.data.deal import DealOptions, Partition
from experiments.data.open import open_source
from experiments.data.source import DIGITS, Source
from experiments.errors import ExperimentError, OptionError
from fedcg.config_file import nearest, problems_in_words
from fedcg.errors import FAILED, NOT_FOUND, BadInputError
from fedcg.learning import spec, split_names
from fedcg.learning.errors import LearningError, NetworkError
from fedcg.learning.registry import get_method, method_names

FEDERATION = "demo"

# Quick replacements for the methods' defaults, which suit hours of training. Other parameters keep their defaults.
# `--set` overrides both.
QUICK_PARAMS: Mapping[str, Mapping[str, spec.ParameterValue]] = {
    "fedcg": {"lr": 1e-3, "gan_lr": 1e-3, "server_lr": 1e-3, "server_iterations": 200, "ramp_rounds": 10},
    "fedmd_cg": {"lr": 1e-3, "generator_lr": 1e-3, "server_lr": 1e-3},
    "feddf": {"lr": 1e-3, "server_lr": 1e-3, "server_iterations": 200},
    "fedgen": {"lr": 1e-3, "server_lr": 1e-3, "server_iterations": 200},
}

# Public images that a demo holds out by default, for methods whose server needs them.
DEMO_PUBLIC_IMAGES: Mapping[str, int] = {"feddf": 128}

# Networks of a demo for methods that can't use the usual one.
DEMO_NETWORKS: Mapping[str, Mapping[str, str | int]] = {
    "ppidsg": {"network": "image_small"},
    "analytic": {
        "network": "efficientnet_lite0+project:1280",
        "freeze": "all",
        "normalise": "imagenet",
        "image_size": 64,
    },
}

QUICK_LR: Mapping[str, spec.ParameterValue] = {"lr": 1e-3}

NOISE_DIMS: Mapping[str, int] = {"conv": 100, "mlp": 64}
# Mean and standard deviation per channel: [0, 1] to [-1, 1], or what backbones trained on ImageNet expect (grey: their means).
NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": split_names.IMAGENET,
}


class Setting(BaseModel, frozen=True, extra="forbid"):
    """The settings that a demo and a simulation share. Each field is an option of both commands, with its description as help.

    Attributes:
        validation: `test-half` is FedCG's protocol.
        public_images: number of images held out of the training images.
        flip: as in FedCG; wrong for digits.
        quick: use `QUICK_PARAMS` instead of the method's defaults.
        params: parameters of the method; they override both.
    """

    data: Annotated[
        str, Field(description="digits, digits-domains, a folder, an .npz or torchvision:NAME; see docs/how-to/data.md")
    ] = DIGITS
    clients: Annotated[int, Field(ge=1, le=1000, description="number of clients")] = 4
    partition: Annotated[str, Field(description="iid, dirichlet:OMEGA, classes:GROUPS, or domains[:NAME,...]")] = (
        "dirichlet:0.5"
    )
    images_per_client: Annotated[int | None, Field(ge=10, description="most training images per client")] = None
    validation: Annotated[
        Literal["share", "test-half"],
        Field(description="share: part of the training images; test-half: half of a client's test images"),
    ] = "share"
    test: Annotated[
        Literal["proportional", "even", "all"],
        Field(
            description="proportional: like a client's training images; even: divided evenly; all: every client gets all of them"
        ),
    ] = "proportional"
    public_images: Annotated[int, Field(ge=0, description="unlabelled images for the server (feddf)")] = 0
    rounds: Annotated[int, Field(ge=1, description="number of rounds")] = 5
    local_epochs: Annotated[int, Field(ge=1, description="local epochs per round")] = 4
    local_steps: Annotated[int, Field(ge=0, description="local steps per round instead of epochs; 0: use epochs")] = 0
    batch_size: Annotated[int | None, Field(ge=2, description="local batch size; default: the method's")] = None
    lr: Annotated[float | None, Field(gt=0, description="local learning rate; default: the method's")] = None
    method: Annotated[str, Field(description="fedcg, fedmd_cg, local, ...: see `fedcg method list`")] = "fedcg"
    network: Annotated[
        str,
        Field(description="split of extractor and classifier: a name from `fedcg network list`, or module:function"),
    ] = "lenet5_relu"
    # Older records without these two match records with their defaults.
    weights: Annotated[
        str | None,
        Field(
            exclude_if=lambda weights: weights is None,
            description="for BACKBONE+project: a file or folder with its weights, or random; default: from the installed package",
        ),
    ] = None
    freeze: Annotated[spec.Freeze, Field(exclude_if=lambda freeze: freeze == "none")] = "none"
    backbones: Annotated[
        str,
        Field(
            exclude_if=lambda backbones: not backbones,
            description="for BACKBONE+project: more backbones, comma-separated; clients take turns, starting with the network's own",
        ),
    ] = ""
    generator: Annotated[str, Field(description="conv, mlp, ...")] = "mlp"
    discriminator: Annotated[str | None, Field(description="default: the one that matches the generator")] = None
    noise_dim: Annotated[int | None, Field(ge=1, description="default: the one that matches the generator")] = None
    normalise: Annotated[
        Literal["half", "imagenet"], Field(description="half: to [-1, 1]; imagenet: with ImageNet's mean and deviation")
    ] = "half"
    image_size: Annotated[int, Field(ge=4, le=1024, description="resize images to SIZE x SIZE pixels")] = 32
    flip: Annotated[bool, Field(description="augment with horizontal flips: for photographs, not for digits")] = False
    crop: Annotated[
        spec.CropPixels, Field(description="augment with random crops of images padded by PIXELS on every side; 0: off")
    ] = 0
    seed: Annotated[int, Field(ge=0, lt=1 << 63, description="seed of split, weights, order and noise")] = 0
    quick: Annotated[bool, Field(description="larger steps and a shorter server loop than by default")] = True
    params: dict[str, spec.ParameterValue] = {}

    @field_validator("crop")
    @classmethod
    def _crop_fits(cls, pixels: int, info: ValidationInfo) -> int:
        side = info.data.get("image_size")
        return pixels if side is None else spec.check_crop(pixels, side)

    @field_validator("weights")
    @classmethod
    def _found_from_anywhere(cls, weights: str | None) -> str | None:
        return str(Path(weights).resolve()) if weights not in {None, split_names.RANDOM} else weights

    def deal(self) -> DealOptions:
        """The partition of images between clients.

        Raises:
            SourceError: invalid partition.
        """
        return DealOptions(
            self.clients,
            Partition.parse(self.partition),
            self.seed,
            self.images_per_client,
            self.validation,
            self.test,
            self.public_images,
        )

    def source(self) -> Source:
        """Open the images.

        Raises:
            SourceError: they can't be used.
        """
        return open_source(self.data)

    def plan(self, source: Source) -> dict[str, object]:
        """Return the federation's plan as plain values (`fedcg.learning.spec.FederationPlan`).

        Args:
            source: the images.

        Raises:
            NetworkError: a backbone's name is unknown, or its weights are missing.
        """
        return self.plan_for(source.classes, self.input_form(source))

    def plan_for(self, classes: Sequence[str], form: spec.InputForm) -> dict[str, object]:
        """Return the plan for inputs of a known form.

        Raises:
            NetworkError: as for `plan`.
        """
        own = split_names.parse_projected(self.network).backbone if split_names.is_projected(self.network) else None
        others = [self._backbone(name) for name in self.backbones.split(",") if name]
        return {
            "federation": FEDERATION,
            "classes": list(classes),
            "method": self.method,
            "rounds": self.rounds,
            "seed": self.seed,
            "augment_flip": self.flip,
            "augment_crop": self.crop,
            "min_clients": self.clients,
            "min_cohort": min(self.clients, spec.DEFAULT_MIN_COHORT),
            "input": form.model_dump(mode="json"),
            "network": {
                "split": self.network,
                "generator": self.generator,
                "discriminator": self.discriminator or discriminator_for(self.generator),
                "noise_dim": self.noise_dim or NOISE_DIMS.get(self.generator, spec.NetworkChoice().noise_dim),
                "weights": None if own is None else self._weights(own, self.weights),
                "freeze": self.freeze,
                "backbones": others,
            },
            "params": self.all_params(),
        }

    @staticmethod
    def _weights(backbone: str, where: str | None) -> str | None:
        path = split_names.weights_for(backbone, where)
        return None if path is None else split_names.weights_digest(path)

    def _backbone(self, name: str) -> dict[str, object]:
        """Return another backbone of the plan; a single file of weights belongs to the first."""
        is_for_all = self.weights == split_names.RANDOM or (self.weights and Path(self.weights).is_dir())
        weights = self._weights(name.partition("@")[0], self.weights if is_for_all else None)
        return {"name": name, "weights": weights, "freeze": self.freeze}

    def input_form(self, source: Source) -> spec.InputForm:
        """Return size and normalisation for grey or colour images; tensors are not normalised."""
        form, (mean, std) = source.input_form(self.image_size), NORMALISATIONS[self.normalise]
        if isinstance(form, spec.TensorForm):
            return form
        if form.mode == "L":
            mean, std = ((round(sum(values) / len(values), 3),) for values in (mean, std))
        return form.model_copy(update={"mean": mean, "std": std})

    def all_params(self) -> dict[str, spec.ParameterValue]:
        """Return the method's parameters that differ from its defaults; `params` takes precedence."""
        quick = QUICK_PARAMS.get(self.method, QUICK_LR) if self.quick else {}
        chosen = {"batch_size": self.batch_size, "lr": self.lr, "steps": self.local_steps or None}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {**quick, "epochs": self.local_epochs, **given, **self.params}


def discriminator_for(generator: str) -> str:
    """Return the discriminator that matches a generator: convolutional for a convolutional one."""
    return "conv" if generator.startswith("conv") else "mlp"


def root_secret(seed: int, purpose: str) -> bytes:
    """Return 32 bytes for one root of randomness; a demo's secrets follow from its seed so that a run can be repeated."""
    return hashlib.sha256(f"fedcg experiment {seed} {purpose}".encode()).digest()


def parse_params(pairs: Sequence[str], option: str = "--set") -> dict[str, spec.ParameterValue]:
    """Parse `key=value` pairs; values are JSON if possible (numbers, true, null), else text.

    Raises:
        OptionError: a pair without `=`.
    """
    params: dict[str, spec.ParameterValue] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"{option} {pair!r}: write key=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        params[key] = value if isinstance(value, (bool, int, float, str)) or value is None else text
    return params


_Value = TypeVar("_Value")


def of_method(values: Mapping[str, Mapping[str, _Value]], method: str) -> dict[str, _Value]:
    """Return the values under "", which apply to every method, overridden by those under the method's name."""
    return {**values.get("", {}), **values.get(method, {})}


def parse_method_params(pairs: list[str], methods: tuple[str, ...]) -> dict[str, dict[str, spec.ParameterValue]]:
    """Read `key=value` (every method's) and `METHOD.key=value` (one method's).

    Raises:
        OptionError: a pair without `=`, or of a method that is not run.
    """
    params: dict[str, dict[str, spec.ParameterValue]] = {}
    for key, value in parse_params(pairs).items():
        method, dot, name = key.rpartition(".")
        if dot and method not in methods:
            raise OptionError(f"--set {key}: {method!r} is not one of the methods of this call ({', '.join(methods)})")
        params.setdefault(method, {})[name] = value
    return params


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `0,1,2`, or a range `0-4`.

    Raises:
        OptionError: anything else.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(1000):
            raise OptionError(f"--seeds {text!r}: write numbers with commas between them, or a range such as 0-4")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(seeds)


Values = dict[str, Any]
"""All options of a command by field name, typed or default."""

# Options that are not named `--FIELD`, or have no `--no-FIELD`; and placeholders for values in the help.
_NAMES = {
    "params": "--set",
    "privacy": "--mechanism",
    "defence_params": "--defence-set",
    "as_json": "--json",
    "force": "--force",
}
_METAVARS = {"crop": "PIXELS", "ray": "[ADDRESS]"}
_ARGUMENTS = frozenset({"project"})


def options_of(
    *models: type[BaseModel], defaults: Mapping[str, object] | None = None
) -> Callable[[Callable[[Values, frozenset[str]], None]], Callable[..., None]]:
    """Decorate a command: it gets one option for each field of some models, and is called with (values, typed names).

    Args:
        models: if two have the same field, the later one counts; a field's description is the option's help.
        defaults: the command's defaults that differ from the fields'.
    """
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, field in fields.items():
        names = [_NAMES[name]] if name in _NAMES else []
        option = typer.Option(*names, help=field.description, metavar=_METAVARS.get(name))
        if name in _ARGUMENTS:
            option = typer.Argument(help=field.description)
        default = {**(defaults or {})}.get(name, field.get_default())
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.annotation, option]
            )
        )

    def decorate(function: Callable[[Values, frozenset[str]], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            sources = {name: ctx.get_parameter_source(name) for name in values}
            typed = (name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
            function(values, frozenset(typed))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def check_params(setting: Setting) -> None:
    """Check the parameters of a setting's method.

    Raises:
        OptionError: names the parameter, and the most similar one.
    """
    method, params = get_method(setting.method), setting.all_params()
    known = tuple(method.params_type.model_fields)
    if unknown := sorted(params.keys() - set(known)):
        raise OptionError(
            f"{method.name} has no parameter {unknown[0]}; `fedcg method show {method.name}` lists its parameters "
            f"({nearest(unknown[0], known)})"
        )
    try:
        method.params_type.model_validate(params)
    except ValidationError as error:
        raise OptionError(f"{method.name}: {problems_in_words(error, method.params_type)}") from error


@contextmanager
def bad_input_ends() -> Iterator[None]:
    """Turn errors about bad values and unusable data within the block into bad input.

    Raises:
        BadInputError: instead of another error, with its reason.
    """
    try:
        yield
    except ValidationError as error:
        raise BadInputError(problems_in_words(error)) from error
    except (ExperimentError, LearningError) as error:
        raise BadInputError(str(error), exit_code=error.exit_code if error.exit_code != FAILED else None) from error


def check(setting: Setting) -> None:
    """Check whether method, network name, weights and partition can be used.

    A `module:function` network was typed by the user of the command: this process and its children may import it and read the named weights.

    Raises:
        OptionError: no such method.
        NetworkError: no such network, or weights for one without a backbone.
        SourceError: invalid partition.
    """
    if setting.method not in method_names():
        raise OptionError(f"unknown method {setting.method!r}; choose {', '.join(method_names())}", exit_code=NOT_FOUND)
    split_names.allow_here(setting.network)
    if setting.weights not in {None, split_names.RANDOM}:
        if not split_names.is_projected(setting.network):
            raise NetworkError(f"--weights are for a backbone with a projection; {setting.network} has none: omit them")
        split_names.use_weights(Path(str(setting.weights)))
    split_names.check_name(setting.network)
    setting.deal()


def data_text(data: str) -> str:
    """Make a folder's path absolute, so that a run can be resumed from anywhere; keep names of data sets."""
    return str(Path(data).resolve()) if data != DIGITS and Path(data).exists() else data


def free_folder(stem: str) -> Path:
    """Return `./STEM`, or the next `./STEM-N` that does not exist."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 10_000))]
    return next(path for path in map(Path, names) if not path.exists())
