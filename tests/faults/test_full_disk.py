"""A disk that is full: what there is stays whole, the fix is named, and the next try works.

The disk is the system's own refusal (RLIMIT_FSIZE: a file may not grow), under a real agent, coordinator and training process, and at any write of a new version of a model.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from edge_client.store.private_store import PrivateStore
from export.model.versions import POINTER_NAME
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import COORDINATOR, RoundAttempt
from tests.conftest import StartMosquitto
from tests.support.broker.brokers import acl_for
from tests.support.edge.filled_store import files_of
from tests.support.edge.training_site import Site, real_spec
from tests.support.learning.export_models import encoded, make_parts, make_spec, picture, write_images
from tests.support.serving import PNG, install_versions, serving
from tests.support.wire.transfer_parties import FEDERATION, Parties, prepared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIZE = 400_000
TOO_SMALL = 300_000


@pytest.fixture
def parties(tmp_path: Path, mosquitto: StartMosquitto) -> Iterator[Parties]:
    broker = mosquitto(acl_for(FEDERATION))
    with prepared(tmp_path, broker, {"a": broker.port}, size=SIZE) as made:
        yield made


def finish(parties: Parties) -> None:
    """The round completes with the one update, once."""
    parties.wait_finished()
    (stored,) = parties.events(COORDINATOR, "update_stored")
    (receipt,) = parties.events("a", "receipt")
    assert (receipt["outcome"], receipt["artifact"]) == ("accepted", stored["artifact"])
    assert len(parties.events(COORDINATOR, "attempt_opened")) == 1


@pytest.mark.broker
def test_an_agent_whose_disk_is_full_stays_up_reports_it_and_goes_on_when_there_is_room(parties: Parties) -> None:
    parties.start_all()
    parties.limit_files("a", TOO_SMALL)
    assert "File too large" in parties.event("a", "agent_error", "the disk is full")["detail"]
    assert "Free space on" in parties.tail("a")
    assert [event["what"] for event in parties.events("a", "artifact_stored")] in ([], ["spec"])
    assert parties.running["a"].poll() is None
    parties.limit_files("a")
    finish(parties)
    assert len(parties.events("a", "agent_started")) == 1


TRAIN = """
import json, pickle, resource, sys, time
from edge_client.config import TrainingSection
from edge_client.store.private_store import PrivateStore
from edge_client.training.trainer_child import Trainer
from fedcg.event_log import EventLog
config, command, limit = pickle.loads(bytes.fromhex(sys.argv[1]))
store = PrivateStore.open(config.store, config.federation, config.device)
events = EventLog(config.store / "events.jsonl", time.time)
trainer = Trainer(config, store, events)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
report = trainer.do(command)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps([type(report).__name__, getattr(report, "detail", "")]))
"""
ENOUGH = {  # bytes that a file may have: what then still fits
    "nothing": 100,
    "the snapshot": 40_000,
    "all but the state": 500_000,
}


@pytest.mark.parametrize("fits", ENOUGH)
def test_a_round_on_a_full_disk_is_refused_and_what_there_is_stays(tmp_path: Path, fits: str) -> None:
    site = Site(tmp_path, real_spec("fedcg", epochs=2))
    site.configure(training={"checkpoint_s": 1e-9})
    site.train(1)
    first = {name: data for name, data in files_of(site.store.root / "generations").items() if name.startswith("1/")}
    call = pickle.dumps((site.config, site.round(2), ENOUGH[fits])).hex()
    done = subprocess.run([sys.executable, "-c", TRAIN, call], capture_output=True, text=True, timeout=100, check=True)
    kind, detail = json.loads(done.stdout.splitlines()[-1])
    assert kind == "RoundFailed", detail
    assert f"Free space on, or repair, {site.store.root}" in detail
    kept = files_of(site.store.root / "generations")
    assert {name: data for name, data in kept.items() if name.startswith("1/")} == first
    store = PrivateStore.open(site.config.store, site.config.federation, site.config.device)
    generation, problems = store.generations.current()
    assert generation is not None
    assert (generation.round_attempt, problems) == (RoundAttempt(1, 1), ())
    site.train(2)
    if fits == "all but the state":  # checkpoints of small stages fitted, or were refused without an end of the round
        assert not (site.store.root / "checkpoint.bin").exists()


FULL_AT = """
import re, resource, sys
written = re.compile("[.](staging-|CURRENT[.])[^/]*" + sys.argv.pop(1) + "$")
def full(event, arguments):
    if event == "open" and written.search(str(arguments[0])) and arguments[2] & 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sys.addaudithook(full)
"""
"""From the moment on at which this file of a version is opened for writing (none named: the pointer), no file can grow."""

COMMAND = f"""{FULL_AT}
from export.build import variants
variants._objection = lambda *_: ""  # every variant is kept
variants._latencies = lambda predictors, _: [1.0 / (1 + number) for number in range(len(predictors))]  # and the last is best
from fedcg.cli import main
main()
"""


def _python(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `fedcg export` and `fedcg model optimise` are given."""
    folder, spec = tmp_path_factory.mktemp("checkpoint"), make_spec()
    (folder / "spec.json").write_bytes(spec.canonical())
    tensors = {
        f"{part.value}/{name}": tensor for part, found in make_parts(spec).items() for name, tensor in found.items()
    }
    save_file(tensors, folder / "weights.safetensors")
    SigningKey.generate().save(folder / "signing.key")
    write_images(folder / "images")
    return folder


def _export(folder: Path, root: Path) -> list[str]:
    given = ["--spec", folder / "spec.json", "--weights", folder / "weights.safetensors", "--out", root]
    return ["export", *map(str, given), "--sign", str(folder / "signing.key")]


def _optimise(folder: Path, root: Path) -> list[str]:
    given = [str(root), "--images", str(folder / "images"), "--sign", str(folder / "signing.key")]
    return ["model", "optimise", *given]


WRITES = [(_export, part) for part in ("/model.onnx", "")] + [
    (_optimise, part) for part in ("/model.onnx", "/model-.*[.]onnx", "/manifest.json", "/manifest.sig", "")
]


@pytest.mark.parametrize(("command", "part"), WRITES)
def test_each_write_of_a_command_that_finds_no_room_is_reported_and_the_server_goes_on(
    tmp_path: Path, checkpoint: Path, command: Callable[[Path, Path], list[str]], part: str
) -> None:
    root = tmp_path / "models"
    install_versions(root, 1)
    served = encoded(picture(1), "PNG")
    with serving(root, "--shadow", 0) as server:
        done = _python(COMMAND, part, *command(checkpoint, root))
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"Free space on, or repair, {root}, then try again" in done.stderr, done.stderr
        assert "the version in use is unchanged" in done.stderr
        assert "Traceback" not in done.stderr
        assert sorted(path.name for path in root.iterdir()) == [".lock", "0001", POINTER_NAME]
        answer = server.ask("/predict", served, PNG)
        assert (answer.status, answer.document["version"]) == (200, "0001")
        done = _python(COMMAND, "/nowhere", *command(checkpoint, root))
        assert done.returncode == 0, done.stderr
        server.wait_for_version("0002")
