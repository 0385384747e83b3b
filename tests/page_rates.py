"""`python -m tests.page_rates`: the server's time for a page with 1,000 devices, and its size.

The time is the processor time of the server's process, the facts not kept. `fedcg bench coordinator --watchers` has what watchers cost.
"""

import gzip
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from coordinator.members.api_tokens import Role
from tests.support.coordinator.federations import Federations
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.coordinator.world import World
from tests.support.page.crowds import add_crowd
from tests.support.page.pages import served

PAGES = ("/", "/f/tiny/worth", "/f/tiny/models", "/f/tiny/sent", "/devices", "/repairs", "/federations")


def page_ms() -> dict[str, tuple[float, int, int]]:
    """Milliseconds of processor time, bytes, and bytes compressed, of each page with 1,000 devices and 8 closed rounds; the median of five."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        spec = tiny_spec(20)
        world = World(Path(folder) / "home", spec, aggregate_bytes(spec, 0, 0, seed=1), clients=())
        federations = Federations(world)
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


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(page_ms(), indent=1)}\n")
