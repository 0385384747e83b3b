"""What can be asked for, in which words, and that nothing asked for means nothing done."""

import subprocess
import sys
from dataclasses import replace

import pytest
from pydantic import ValidationError

from fedcg.learning.errors import PrivacyError
from fedcg.learning.mechanisms.protected_round import protected_round
from fedcg.learning.method import LocalResult
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import OFF, PrivacySettings, parse_mechanisms
from fedcg.learning.registry import get_method
from tests.support.learning.learning_cases import bright_images, context, quick_spec


def test_settings_are_read_from_pairs_and_name_a_run() -> None:
    found = parse_mechanisms(["update_clip=1", "dp_sgd.noise_multiplier=1.1", "balance=bias"])
    assert (found.update_clip, found.balance) == (1.0, "bias")
    assert found.dp_sgd is not None
    assert (found.dp_sgd.noise_multiplier, found.dp_sgd.clip, found.dp_sgd.budget_epsilon) == (1.1, 1.0, None)
    assert found.label == "update_clip=1.0-balance=bias-dp_sgd.noise_multiplier=1.1"
    assert (parse_mechanisms([]), OFF.label, OFF.is_on, found.is_on) == (OFF, "", False, True)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (["update_clip"], "write KEY=VALUE"),
        (["=1"], "write KEY=VALUE"),
        (["dp_sgd=1"], "dp_sgd.KEY=VALUE"),
        (["dp_sgd.=1"], "dp_sgd.KEY=VALUE"),
        (["prune.share=1"], "dp_sgd.KEY=VALUE"),
        (["clip=1"], "--mechanism clip: no such mechanism; there are update_clip, .*dp_sgd.noise_multiplier"),
        (["dp_sgd.sigma=1"], "--mechanism dp_sgd.sigma: no such mechanism"),
        (["dp_sgd.clip=2"], "--mechanism dp_sgd.noise_multiplier: is missing"),
        (["prune=1"], "--mechanism prune: .*less than 1"),
        (["update_noise=NaN"], "--mechanism update_noise: .*1000000000"),
        (["update_clip=0", "dropout=-1"], "--mechanism update_clip: .*; --mechanism dropout: "),
        (["dp_sgd.noise_multiplier=1", "gradient_noise=1"], "leave gradient_noise out"),
        (["dp_sgd.noise_multiplier=1", "balance=logits"], "exact label distribution"),
    ],
)
def test_bad_settings_are_refused_by_name(pairs: list[str], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        parse_mechanisms(pairs)


def test_settings_refuse_unknown_fields_and_need_no_torch() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        PrivacySettings.model_validate({"updateclip": 1})
    code = "import sys, fedcg.learning.privacy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_mechanisms_a_round_is_the_methods_own() -> None:
    spec, method = quick_spec("local"), get_method("local")
    state, data, ctx = method.init_client(spec, initial_parts(spec, b"cohort")), bright_images(8, 0), context(spec)
    own = method.local_round(state, data, None, ctx)
    asked: list[tuple[object, ...]] = []

    def round_of(*given: object) -> LocalResult:
        asked.append(given)
        return own

    assert protected_round(replace(method, local_round=round_of), state, data, None, ctx) is own
    assert asked == [(state, data, None, ctx)]
