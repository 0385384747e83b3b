"""What users read of what they wrote wrong is in this program's words: no class, no pattern, no text of a library or of the system."""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from coordinator.config import CoordinatorConfig
from coordinator.http import operator_api
from coordinator.members.enrolment import WantedToken
from coordinator.operations.create_federation import OperatorPlan
from edge_client.config import AgentConfig
from edge_client.store.private_store import PrivateStore
from fedcg.config_file import problems_of, section_of
from fedcg.errors import FedcgError
from fedcg.learning.defences.defence import defence_names, defence_of
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import FederationPlan, RoundPolicy
from tests.support.commands import run_fedcg
from tests.support.edge.world import DEVICE, FEDERATION, write_device

RAW = re.compile(
    r"<class|validation error|type=|\[Errno|_ssl\.c|frozenset|instance of|[Ii]nput should|should |pattern|'\^|\^[\[(]|\{\d|dictionary|boolean|integer|string|parse|"
    r"pydantic|constrained|function-|of another form(?! \()|[A-Z][a-z]+(Section|Settings|Policy|Config|Params)\b"
)
WRONG: tuple[object, ...] = (
    "text", "", -1, 10**30, 1e300, 3.5, True, [], ["x"], [1], [["y"]], {}, {"a": 1}, {"a": {"b": []}}, "../x y!", "z" * 500
)  # fmt: skip
SCHEMAS: dict[str, type[BaseModel]] = {
    "agent.toml": AgentConfig,
    "coordinator.toml": CoordinatorConfig,
    "plan.toml": FederationPlan,
    **{f"params of {name}": get_method(name).params_type for name in method_names()},
}

MORE_SCHEMAS: dict[str, type[BaseModel]] = {
    "operator's plan": OperatorPlan,
    "policy": RoundPolicy,
    **{kind.__name__: kind for kind in (operator_api.NewFederation, operator_api.MoreRounds)},
    **{kind.__name__: kind for kind in (WantedToken, operator_api.NewApiToken)},
    **{f"params of {name}": defence_of(name, {})[0].params_type for name in defence_names()},
}


def _places(model: type[BaseModel], outside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in model.model_fields:
        yield (*outside, name)
        if (inner := section_of(model, (name,))) is not model:
            yield from _places(inner, (*outside, name))


def _with(place: tuple[str, ...], value: object) -> dict[str, object]:
    first, *rest = place
    return {first: _with(tuple(rest), value) if rest else value}


def _problems(schema: type[BaseModel], values: dict[str, object]) -> list[str]:
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return problems_of(schema, error)
    return []


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_setting_that_is_wrong_is_told_in_words_of_a_library(name: str) -> None:
    schema = SCHEMAS[name]
    told = {place: [_problems(schema, _with(place, value)) for value in WRONG] for place in _places(schema)}
    assert [place for place, problems in told.items() if not any(problems)] == []
    assert {line for problems in told.values() for lines in problems for line in lines if RAW.search(line)} == set()


def _is_no_number(schema: type[BaseModel], place: tuple[str, ...], value: object) -> bool:
    """Whether this value is refused at its place because a number belongs there, whatever else is missing."""
    with pytest.raises(ValidationError) as refused:
        schema.model_validate({**_with(place, value), "no such field": 1})
    kinds = {problem["type"] for problem in refused.value.errors() if problem["loc"] == place}
    return bool(kinds & {"int_type", "float_type"})


@pytest.mark.parametrize("name", [*SCHEMAS, *MORE_SCHEMAS])
def test_a_setting_that_is_a_number_takes_neither_true_nor_text(name: str) -> None:
    schema = {**SCHEMAS, **MORE_SCHEMAS}[name]
    numbers = [place for place in _places(schema) if _is_no_number(schema, place, {})]
    values: tuple[object, ...] = (True, "5")
    taken = [(*place, value) for place in numbers for value in values if not _is_no_number(schema, place, value)]
    assert taken == []
    assert numbers or name == "params of ats"


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A device's folder whose TLS files hold no PEM."""
    text = write_device(tmp_path).read_text().replace("insecure = true\n", "")
    text += '[tls]\nca = "odd"\ncert = "odd"\nkey = "odd"\n[enrolment]\nurl = "https://127.0.0.1:1"\n'
    (tmp_path / "agent.toml").write_text(text)
    (tmp_path / "odd").write_text("odd")
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)))
    (tmp_path / "no-key").mkdir()
    (write_device(tmp_path / "no-key").parent / "signing.key").unlink()
    return tmp_path


SERVE_MQTT = "infer serve-mqtt --model {box} --name line-4 --host 127.0.0.1 --port 1"
SAID = {
    "agent leave --yes --config {box}/no-key/agent.toml": "signing.key'. Enrol the device again",
    "agent renew --config {box}/agent.toml": "odd can't be used: ",
    "agent status --config {box}": "can't be read: Is a directory",
    "agent status --config {box}/noise": "can't be read: it is not plain text",
    "agent backup --out {box}/backup --config {box}/agent.toml --passphrase-file {box}": "can't be read: Is a directory",
    "cohort roster {box} --config {box}/agent.toml": "can't be read: Is a directory",
    "model list {box} --signed-by {box}/nope.pub": "nope.pub: No such file or directory; give a device's public key",
    SERVE_MQTT: "name them (ca, cert and key); only a broker at a loopback address does without, with `insecure`",
    f"{SERVE_MQTT} --ca {{box}}/odd --cert {{box}}/odd --key {{box}}/odd": "is damaged, or the key is not the certificate's. Restore",
    "coordinator init --dir {box}/noise/home": "Error: Not a directory: '",
    "coordinator init --dir {box}/home --host=": "Error: broker.host: must be a DNS name or an IP address",
    "simulate --clients 0 --out {box}/runs": ": must ",
    "simulate --mechanism update_clip=-1 --out {box}/runs": ": must ",
    "demo --rounds -1 --out {box}/demo": ": must ",
    "federation extend --rounds 0 --dir {box}": ": must ",
}


@pytest.mark.parametrize("words", SAID)
def test_what_the_system_openssl_or_a_schema_refuses_is_told_with_place_in_our_words(box: Path, words: str) -> None:
    (box / "store").mkdir(mode=0o700)
    PrivateStore.open(box / "store", FEDERATION, DEVICE)
    told = run_fedcg(*words.format(box=box).split())
    assert told.exit_code in (1, 2, 4, 7)
    assert SAID[words] in " ".join(told.stderr.split())
    assert not RAW.search(told.output)
    assert "insecure=True" not in told.output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ssl.SSLError(1, "[X509: KEY_VALUES_MISMATCH] key values mismatch (_ssl.c:4063)"), "key values mismatch"),
        (OSError(28, "No space left on device", "/data"), "No space left on device: '/data'"),
        (UnicodeDecodeError("utf-8", b"\x80", 0, 1, "invalid start byte"), "it is not plain text"),
        (
            "(sqlite3.OperationalError) disk is full\n[SQL: INSERT]\n(Background on this error at: https://sqlalche.me/e)",
            "disk is full",
        ),
        (ValueError("[tls] is missing"), "[tls] is missing"),
    ],
)
def test_an_error_that_is_made_of_another_has_no_number_and_no_place_in_code(error: object, words: str) -> None:
    assert str(FedcgError(f"it failed: {error}")) == f"it failed: {words}"
    assert str(FedcgError(error)) == words
