"""agent.toml: all problems at once, with their line; the environment wins; paths are relative to the file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator.page
from edge_client.config import AgentConfig, environment_names, load_config
from edge_client.errors import ConfigError
from fedcg.agent_config import render_agent_config
from fedcg.config_file import section_of
from fedcg.wire.parts import DEFAULT_ALLOW_REPORT, DEFAULT_ALLOW_UPLOAD, Part, ReportField
from fedcg.wire.transfer.windows import PRESETS, limits_for

GOOD = """\
federation = "shapes"
device = "site-1"

[broker]
host = "broker.example"
port = 8884

[tls]
ca = "tls/ca.pem"
cert = "tls/device.pem"
key = "/etc/device.key"

[data]
root = "images"
"""


def load(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> AgentConfig:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return load_config(path, environment or {})


def test_a_preset_and_single_limits_are_read_and_checked(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).broker.limits == PRESETS["mosquitto"]
    changed = GOOD.replace("port = 8884", 'port = 8884\npreset = "aws-iot"\nwindow_chunks = 8')
    assert load(tmp_path, changed).broker.limits == limits_for("aws-iot", window_chunks=8)
    environment = {"FEDCG_AGENT_BROKER_PRESET": "emqx", "FEDCG_AGENT_BROKER_CHUNK_BYTES": "20000"}
    assert load(tmp_path, GOOD, environment).broker.limits == limits_for("emqx", chunk_bytes=20_000)
    wrong = problems(tmp_path, GOOD.replace("port = 8884", 'port = 8884\npreset = "other"\nchunk_bytes = 5'))
    assert "aws-iot" in wrong["broker.preset"]
    assert wrong["broker.chunk_bytes"].startswith("line 8")


def problems(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environment)
    told = re.findall(r"^  (line \d+|\$\w+|environment): (\S+): (.*)$", str(caught.value), re.MULTILINE)
    return {key: f"{where}: {message}" for where, key, message in told}


def test_paths_are_relative_to_the_file_and_absolute_ones_stay(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.tls is not None
    assert (config.tls.ca, config.tls.key) == (tmp_path / "tls/ca.pem", Path("/etc/device.key"))
    assert config.data.root == tmp_path / "images"
    assert (config.data.common_test, config.store) == (None, tmp_path / "store")
    assert config.keys.signing == tmp_path / "signing.key"


def test_by_default_only_classifier_generator_and_harmless_fields_leave_and_no_shadow_trains(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.policy.allow_upload == DEFAULT_ALLOW_UPLOAD == {Part.CLASSIFIER, Part.GENERATOR}
    assert config.policy.allow_report == DEFAULT_ALLOW_REPORT
    assert ReportField.LABEL_COUNTS not in config.policy.allow_report
    assert config.training.shadow_every == 0
    assert config.export.enabled


def test_all_problems_are_listed_at_once_with_their_lines(tmp_path: Path) -> None:
    text = GOOD.replace('"shapes"', '"Shapes!"').replace("8884", "70000").replace('ca = "tls/ca.pem"\n', "")
    text = text.replace('root = "images"', 'root = "images"\nsplt = 0.2') + '\n[policy]\nallow_upload = ["extracter"]\n'
    found = problems(tmp_path, text)
    assert found["federation"].startswith("line 1:")
    assert found["broker.port"].startswith("line 6:")
    assert found["tls.ca"].startswith("line 8:")
    assert "add `ca` to [tls]" in found["tls.ca"]
    assert found["data.splt"].startswith("line 14:")
    upload = next(value for key, value in found.items() if key.startswith("policy.allow_upload"))
    assert upload.startswith("line 17:")
    assert "'generator'" in upload
    assert len(found) == 5


def test_broken_toml_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 5"):
        load(tmp_path, GOOD.replace('"broker.example"', '"broker.example'))


PLAIN = GOOD[: GOOD.index("[tls]")] + GOOD[GOOD.index("[data]") :]
INSECURE = GOOD.replace("port = 8884", "insecure = true")
DEFENDED = GOOD + 'defence = "antigan"\ndefence_stem = "weights.pth"\n[data.defence_params]\nv_e = 0.3\nwindow = 8\n'


def test_without_tls_only_a_broker_on_this_machine_and_only_when_asked_for(tmp_path: Path) -> None:
    local = PLAIN.replace("port = 8884", "insecure = true").replace("broker.example", "127.0.0.1")
    assert load(tmp_path, local).broker.insecure


@pytest.mark.parametrize(
    ("text", "setting", "told"),
    [
        (GOOD.replace("port =", "prot ="), "broker.prot", "did you mean `port`?"),
        (PLAIN, "(file)", "[tls]"),
        (PLAIN.replace("port = 8884", "insecure = true"), "broker", "not for 'broker.example'"),
        # else weights might go in the clear
        (INSECURE.replace("broker.example", "127.0.0.1"), "(file)", "remove one of them"),
        (GOOD + '[eligibility]\nquiet_hours = "15W"\n', "eligibility.quiet_hours", 'a list: quiet_hours = ["15W"]'),
        (GOOD + "[eligibility]\nquiet_hours = 22\n", "eligibility.quiet_hours", 'a list: quiet_hours = ["…"]'),
        (GOOD + '[eligibility]\nquiet_hours = ["at night"]\n', "eligibility.quiet_hours", "22:00-06:00"),
        (GOOD + "[eligibility]\nmax_temperature = 70\n", "eligibility.max_temperature", "max_temperature_c"),
        (GOOD + '[policy]\nmethods = ["Fed CG"]\n', "policy.methods", ""),
        (GOOD + '[policy]\nfederations = ["A B"]\n', "policy.federations", ""),
        (GOOD + '[audit]\ngate = "reid<0.1"\n', "audit", "gate has no effect while before_publish"),
        (DEFENDED.replace('"antigan"', '"antigam"'), "data", "unknown name 'antigam' (did you mean `antigan`?)"),
        (DEFENDED + "[privacy.dp_sgd]\nnoise_multiplier = 1.0\n", "", "dp_sgd's epsilon does not cover"),
    ],
)
def test_a_bad_setting_is_named_with_what_it_may_be(tmp_path: Path, text: str, setting: str, told: str) -> None:
    found = {name: message for name, message in problems(tmp_path, text).items() if name.startswith(setting)}
    assert any(told in message for message in found.values()), found


def test_a_new_box_reports_what_it_would_have_alone_and_the_page_asks_others_for_the_same_lines(tmp_path: Path) -> None:
    text = render_agent_config("shapes", "site-1", host="broker.example", port=8884, preset="mosquitto")
    config = load(tmp_path, text)
    assert config.training.shadow_every == 4
    assert config.policy.allow_report == DEFAULT_ALLOW_REPORT | {ReportField.SHADOW}
    page = (Path(coordinator.page.__file__).parent / "templates" / "worth.html").read_text()
    lines = page.partition("<pre>")[2].partition("</pre>")[0].splitlines()
    assert [line for line in lines if line not in text.splitlines()] == []
    assert {"shadow_every = 4", "[training]", "[policy]"} <= set(lines)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environment = {
        "FEDCG_AGENT_BROKER_PORT": "1234",
        "FEDCG_AGENT_STORE": "/var/lib/fedcg",
        "FEDCG_AGENT_TRAINING_SHADOW_EVERY": "3",
        "FEDCG_AGENT_POLICY_ALLOW_UPLOAD": "classifier, generator, extractor",
        "FEDCG_AGENT_POLICY_MAX_EPOCHS": "5",
        "UNRELATED": "x",
    }
    config = load(tmp_path, GOOD, environment)
    assert (config.broker.port, config.store, config.training.shadow_every) == (1234, Path("/var/lib/fedcg"), 3)
    assert config.policy.allow_upload == {Part.CLASSIFIER, Part.GENERATOR, Part.EXTRACTOR}
    assert config.policy.max_epochs == 5


def test_audit_and_privacy_are_off_unless_asked_for_and_read_without_torch(tmp_path: Path) -> None:
    plain = load(tmp_path, GOOD)
    assert (plain.audit.before_publish, plain.privacy.is_on) == ("off", False)
    text = (
        GOOD + '[audit]\nbefore_publish = "quick"\ngate = "label_l1_gain<0.05, reid<0.1"\nauxiliary = "aux"\n'
        'attacks = ["labels"]\n[privacy]\nupdate_clip = 1.5\n[privacy.dp_sgd]\nnoise_multiplier = 1.1\nbudget_epsilon = 8\n'
    )
    config = load(tmp_path, text)
    assert config.audit.auxiliary == tmp_path / "aux"
    assert config.privacy.dp_sgd is not None
    assert (config.privacy.update_clip, config.privacy.dp_sgd.budget_epsilon) == (1.5, 8.0)
    chosen = load(tmp_path, text, {"FEDCG_AGENT_AUDIT_ATTACKS": "labels, membership"}).audit.attacks
    assert chosen == ("labels", "membership")
    code = "import sys; from edge_client.config import load_config; from pathlib import Path; "
    code += "load_config(Path(sys.argv[1]), {}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "agent.toml")], check=False).returncode == 0


def test_problems_of_audit_and_privacy_name_section_line_and_remedy(tmp_path: Path) -> None:
    text = (
        GOOD + '[audit]\nbefore_publish = "slow"\ngate = "faces<0.1"\nattacks = ["labels", "magic"]\n'
        "[privacy]\nprune = 1.5\nnoise = 1\n[privacy.dp_sgd]\nclip = 1\n"
    )
    first = len(GOOD.splitlines()) + 1
    found = problems(tmp_path, text)
    assert found["audit.before_publish"].startswith(f"line {first + 1}: must be 'off' or 'quick'")
    assert found["audit.gate"].startswith(f"line {first + 2}: gate 'faces<0.1': no figure 'faces'; choose label_l1")
    assert found["audit.attacks"].startswith(f"line {first + 3}: unknown attack 'magic'; available: labels")
    assert found["privacy.prune"].startswith(f"line {first + 5}")
    assert found["privacy.noise"].startswith(f"line {first + 6}: there is no such setting")
    assert found["privacy.dp_sgd.noise_multiplier"].startswith(f"line {first + 7}: is missing")
    both = problems(tmp_path, GOOD + "[privacy]\ngradient_noise = 0.1\n[privacy.dp_sgd]\nnoise_multiplier = 1\n")
    assert "leave gradient_noise out" in both["privacy"]


def test_true_in_the_environment_is_no_number_and_a_number_is_one(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD, {"FEDCG_AGENT_TRAINING_THREADS": "true", "FEDCG_AGENT_TRAINING_STALL_S": '"5"'})
    assert set(found) == {"training.threads", "training.stall_s"}
    assert all("must be a" in told for told in found.values()), found
    given = {"FEDCG_AGENT_TRAINING_STALL_S": "5", "FEDCG_AGENT_ELIGIBILITY_ON_MAINS": "true", "FEDCG_AGENT_DEVICE": "7"}
    config = load(tmp_path, GOOD, {**given, "FEDCG_AGENT_POLICY_MAX_UPLOAD_MB_PER_DAY": "9"})
    read = (config.training.stall_s, config.eligibility.on_mains, config.device, config.policy.max_upload_mb_per_day)
    assert read == (5.0, True, "7", 9)


def test_an_empty_list_in_the_environment_allows_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, {"FEDCG_AGENT_POLICY_ALLOW_UPLOAD": ""}).policy.allow_upload == frozenset()


def test_problems_of_the_environment_name_the_variable(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD, {"FEDCG_AGENT_BROKER_PORT": "many", "FEDCG_AGENT_BROKER_PROT": "1"})
    assert found["broker.port"].startswith("$FEDCG_AGENT_BROKER_PORT")
    assert "FEDCG_AGENT_BROKER_PORT" in found["FEDCG_AGENT_BROKER_PROT"]


def test_only_true_and_false_are_answers_to_a_yes_or_no_setting_of_a_file_or_a_variable(tmp_path: Path) -> None:
    sections = {name: section_of(AgentConfig, (name,)) for name in AgentConfig.model_fields}
    asked = [
        (name, key) for name, one in sections.items() for key, at in one.model_fields.items() if at.annotation is bool
    ]
    assert len(asked) == 6
    for section, key in asked:
        variable = f"FEDCG_AGENT_{section}_{key}".upper()
        assert "must be true or false" in problems(tmp_path, GOOD, {variable: "1"})[f"{section}.{key}"]
        if key != "insecure":
            assert getattr(getattr(load(tmp_path, GOOD, {variable: "true"}), section), key) is True


def test_every_setting_has_a_variable() -> None:
    names = environment_names()
    assert names["FEDCG_AGENT_DEVICE"] == ("device",)
    assert names["FEDCG_AGENT_DATA_COMMON_TEST"] == ("data", "common_test")
    assert len(names) == len(set(names.values())) >= 20


def test_a_defence_is_read(tmp_path: Path) -> None:
    data = load(tmp_path, DEFENDED).data
    assert (data.defence, dict(data.defence_params)) == ("antigan", {"v_e": 0.3, "window": 8})
    assert data.defence_stem == tmp_path / "weights.pth"
    assert load(tmp_path, GOOD + '[training]\nweights = "here"\n').training.weights == tmp_path / "here"
    assert load(tmp_path, GOOD, {"FEDCG_AGENT_DATA_DEFENCE": "ats"}).data.defence == "ats"


def test_eligibility_is_read_from_the_file_and_the_environment_with_paths_beside_the_file(tmp_path: Path) -> None:
    text = f'{GOOD}\n[eligibility]\nstop_file = "stop"\non_mains = true\n'
    environment = {
        "FEDCG_AGENT_ELIGIBILITY_QUIET_HOURS": "22:00-06:00, 12:00-13:00",
        "FEDCG_AGENT_ELIGIBILITY_METERED_INTERFACES": "wwan0,usb*",
    }
    config = load(tmp_path, text, environment)
    found = config.eligibility
    assert (found.stop_file, found.on_mains, found.quiet_hours) == (
        tmp_path / "stop",
        True,
        ("22:00-06:00", "12:00-13:00"),
    )
    assert found.metered_interfaces == ("wwan0", "usb*")


def test_the_consent_of_a_new_devices_configuration_needs_only_its_comment_signs_taken_away(tmp_path: Path) -> None:
    text = render_agent_config("shapes", "site-1", host="broker.example", port=8883, preset="mosquitto")
    begin, end = text.index("# federations ="), text.index("\n\n[training]")
    policy = load(tmp_path, text[:begin] + re.sub(r"(?m)^# ([a-z_]+ =)", r"\1", text[begin:end]) + text[end:]).policy
    assert (policy.federations, policy.methods) == (frozenset({"shapes"}), frozenset({"fedcg", "fedmd_cg"}))
    assert (policy.max_upload_mb_per_day, policy.max_download_mb_per_day) == (200, 500)
