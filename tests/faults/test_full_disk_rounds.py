"""A disk that is full while a round is trained: the round is refused with the fix, the last committed one stays, the next try works.

The disk is the system's own refusal: no file may grow beyond a size (RLIMIT_FSIZE) in the process that trains.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.edge.filled_store import files_of
from tests.support.edge.training_site import Site, real_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

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
