"""`python -m tests.page_rates`: what 50 watchers cost the round loop, and the server's time for a page with 1,000 devices.

Rounds of two scripted devices over a broker in memory, without training, so that everything that a round costs is the coordinator's own
work. The watchers are another process: each follows the event stream and loads the page `Now` after an event, at most once in two
seconds, as the page's script does. Runs without and with watchers alternate. The server's time of a page is the processor time of its process, the facts not kept.
"""

from __future__ import annotations

import gzip
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from coordinator.facts.current_round import typical_round_s
from coordinator.members.api_tokens import Role
from coordinator.rounds.round_engine import Phase
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.crowds import add_crowd
from tests.support.page.pages import served
from tests.support.waiting import wait_until

WATCHERS, ROUNDS, RUNS = 50, 40, 2
PAGES = ("/", "/f/tiny/worth", "/f/tiny/models", "/f/tiny/sent", "/devices", "/repairs", "/federations")


def made(folder: Path, rounds: int, *clients: str) -> Federations:
    spec = tiny_spec(rounds)
    return Federations(World(folder / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=clients))


def round_ms(watchers: int) -> float:
    """Mean milliseconds of a round."""
    with tempfile.TemporaryDirectory() as folder:
        federations = made(Path(folder), ROUNDS, "a", "b")
        with served(federations) as page:
            command = [sys.executable, "-m", "tests.page_rates", str(page.port), page.reader().cookie, str(watchers)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as crowd:
                assert crowd.stdout is not None
                crowd.stdout.readline()
                for device in federations.devices["tiny"]:
                    device.start()
                service = federations.coordinator.services["tiny"]
                wait_until(lambda: service.state.phase is Phase.FINISHED, "all rounds are over", 300)
                crowd.terminate()
        attempts = federations.world.store.attempts("tiny")
        federations.world.store.close()
    assert typical_round_s(attempts) is not None
    return 1000 * ((attempts[-1].closed_at or 0.0) - attempts[0].opened_at) / len(attempts)


def page_ms() -> dict[str, tuple[float, int, int]]:
    """Milliseconds of processor time, bytes, and bytes compressed, of each page with 1,000 devices and 8 closed rounds; the median of five."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        federations = made(Path(folder), 20)
        add_crowd(federations.world.store, "tiny", 1000, 8, time.time())
        with served(federations) as page:
            reader = page.reader(Role.VIEWER)
            for path in PAGES:
                spent, packed = [], b""
                for _ in range(5):
                    time.sleep(1.1)
                    began = time.process_time()
                    packed = reader.transfer("GET", path, **{"Accept-Encoding": "gzip"})[2]
                    spent.append(1000 * (time.process_time() - began))
                found[path] = (round(statistics.median(spent), 1), len(gzip.decompress(packed)), len(packed))
        federations.world.store.close()
    return found


def watch(port: int, cookie: str) -> None:
    """One watcher: follow the stream, load the page after an event, at most once in two seconds."""
    stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    stream.request("GET", "/api/v1/events/stream", headers={"Cookie": cookie})
    answer, loaded_at = stream.getresponse(), 0.0
    while line := answer.readline():
        if line.startswith(b"data: ") and time.monotonic() - loaded_at >= 2.0:
            loaded_at = time.monotonic()
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            link.request("GET", "/f/tiny", headers={"Cookie": cookie, "HX-Request": "true"})
            link.getresponse().read()
            link.close()


def main() -> None:
    """Measure and print; with arguments: be the watchers."""
    if len(sys.argv) > 1:
        port, cookie, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        for _ in range(count):
            threading.Thread(target=watch, args=(port, cookie), daemon=True).start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        threading.Event().wait()
    runs = {count: [0.0] * RUNS for count in (0, WATCHERS)}
    for run in range(RUNS):
        for count in runs:
            runs[count][run] = round(round_ms(count), 2)
    sys.stdout.write(f"{json.dumps({'round_ms': runs, 'page_ms_and_bytes': page_ms()}, indent=1)}\n")


if __name__ == "__main__":
    main()
