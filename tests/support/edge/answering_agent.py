"""The part of an agent that answers its owner's requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_client.agent.owner import OwnerRequest, OwnerRequests, Reply


@contextmanager
def answering_agent(store: Path, reply: Any) -> Iterator[list[OwnerRequest]]:
    """Give all requests to a store the same answer while the context lasts; yield the requests so far."""
    taken: list[OwnerRequest] = []
    requests, ended = OwnerRequests(store), threading.Event()

    def answer(request: OwnerRequest) -> Reply:
        taken.append(request)
        return reply  # type: ignore[no-any-return]

    def run() -> None:
        while not ended.wait(0.01):
            requests.answer_all(answer)

    thread = threading.Thread(target=run, daemon=True)
    requests.open()
    thread.start()
    yield taken
    ended.set()
    thread.join()
    requests.close()
