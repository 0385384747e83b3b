"""Settings of the mechanisms that make a device's updates reveal less, with any method. Torch-free.

They belong to the device, not to the spec. Each client chooses its own, and the server half of a method does not need
them. All are off by default and then change no bit of a result. The implementation is in `fedcg.learning.mechanisms`.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from fedcg.config_file import Settings, problems_of
from fedcg.learning.errors import PrivacyError

_Scale = Annotated[float, Field(ge=0, le=1e9)]
_Bound = Annotated[float, Field(gt=0, le=1e9)]


class DpSgdSettings(Settings):
    """DP-SGD (Abadi et al., 2016) instead of ordinary local steps; `mechanisms.dp_sgd` states what its ε covers.

    Attributes:
        noise_multiplier: σ; the noise on a sum of gradients has the standard deviation σ · clip.
        clip: L2 norm to which one image's gradient is clipped.
        delta: δ of the guarantee; well below one over the number of images.
        budget_epsilon: rounds that would exceed this ε are not trained. Default: no limit.
    """

    noise_multiplier: Annotated[float, Field(gt=0, le=1e9, description="noise of a step, in units of clip (sigma)")]
    clip: Annotated[_Bound, Field(description="L2 norm to which one image's gradient is clipped")] = 1.0
    delta: Annotated[float, Field(gt=0, lt=1, description="delta of the guarantee; well below 1 / images")] = 1e-5
    budget_epsilon: Annotated[
        _Bound | None, Field(description="rounds that would exceed this epsilon are not trained")
    ] = None


class PrivacySettings(Settings):
    """The mechanisms of one device; the defaults turn each off.

    Attributes:
        update_clip: L2 norm to which the update's difference from its aggregate is clipped, over all shared float tensors together. Default:
            not clipped.
        update_noise: standard deviation of Gaussian noise on every number of that difference.
        prune: share of the smallest magnitudes in each tensor of that difference that are set to 0.
        label_counts_noise: scale of discrete Laplace noise on reported label counts.
        gradient_noise: standard deviation of Gaussian noise on every number of every gradient of the local steps.
        dropout: dropout rate of the features between extractor and classifier in a local step.
        balance: keeps the label distribution out of the sent classifier: logits (logit adjustment), bias (the last bias is sent as it was
            downloaded) or none.
        dp_sgd: None: ordinary steps.
    """

    update_clip: Annotated[_Bound | None, Field(description="clip the update's L2 distance from its aggregate")] = None
    update_noise: Annotated[_Scale, Field(description="deviation of the noise on every number of the update")] = 0.0
    prune: Annotated[float, Field(ge=0, lt=1, description="share of the smallest numbers that are set to 0")] = 0.0
    label_counts_noise: Annotated[_Scale, Field(description="scale of Laplace noise on reported label counts")] = 0.0
    gradient_noise: Annotated[_Scale, Field(description="standard deviation of noise on every local gradient")] = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout rate between extractor and classifier")] = 0.0
    balance: Annotated[
        Literal["none", "logits", "bias"],
        Field(description="keep the label distribution out of the sent classifier: logit adjustment, or no bias"),
    ] = "none"
    dp_sgd: Annotated[DpSgdSettings | None, Field(description="differentially private local steps")] = None

    @model_validator(mode="after")
    def _covered_by_dp_sgd(self) -> Self:
        if self.dp_sgd is None:
            return self
        if self.gradient_noise:
            raise ValueError("dp_sgd already adds noise to gradients: leave gradient_noise out")
        if self.balance == "logits":
            raise ValueError(
                "balance = logits trains with the exact label distribution, which dp_sgd's epsilon does not cover: "
                "leave one of them out, or use balance = bias"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether any mechanism is on."""
        return self != OFF

    def without_balance(self) -> Self:
        """The same settings for a task without classes, which has no label distribution."""
        return self.model_copy(update={"balance": "none"})

    @property
    def reduces_update(self) -> bool:
        """Whether a finished update is clipped, noised or pruned."""
        return self.update_clip is not None or bool(self.update_noise) or bool(self.prune)

    @property
    def label(self) -> str:
        """The enabled mechanisms, for a run's name: `update_clip=1.0-update_noise=0.01`; empty if none is."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        values |= {f"dp_sgd.{key}": value for key, value in values.pop("dp_sgd", {}).items()}
        return "-".join(f"{key}={value}" for key, value in values.items())


OFF = PrivacySettings()


def parse_mechanisms(pairs: Sequence[str]) -> PrivacySettings:
    """Read `key=value` and `dp_sgd.key=value` as typed on a command line.

    Raises:
        PrivacyError: names every pair with a wrong form, an unknown key or a value out of range.
    """
    fields: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        owner, dot, name = key.partition(".")
        if not equals or not key or (dot and (owner != "dp_sgd" or not name)) or key == "dp_sgd":
            raise PrivacyError(
                f"--mechanism {pair!r}: write KEY=VALUE, such as update_clip=1, or dp_sgd.KEY=VALUE, "
                "such as dp_sgd.noise_multiplier=1.1"
            )
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if dot:
            fields.setdefault(owner, {})[name] = value
        else:
            fields[key] = value
    try:
        return PrivacySettings.model_validate(fields)
    except ValidationError as error:
        problems = (line.removeprefix("(file): ") for line in problems_of(PrivacySettings, error))
        raise PrivacyError("; ".join(f"--mechanism {problem}" for problem in problems)) from error
