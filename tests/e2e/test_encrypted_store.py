"""A federation with a device whose private store is encrypted: it takes part in every round, over the real broker, and its model is served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_client.config import load_config
from edge_client.store.encryption import private_files
from edge_client.store.private_store import open_store
from edge_client.store.sealed_files import MAGIC
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(280)]
DEVICE = "site-2"


def test_a_device_with_an_encrypted_store_takes_part_until_the_end(tmp_path: Path) -> None:
    stack = Stack(root=tmp_path, params={"epochs": 1, "server_iterations": 10, "ramp_rounds": 2}, rounds=2)
    try:
        stack.prepare()
        shutil.rmtree(stack.store(DEVICE))  # its secrets, which are not encrypted
        set_values(stack.config(DEVICE), {("encryption", "key"): "store.key"})
        key = stack.config(DEVICE).with_name("store.key")
        key.write_text("ab" * 32)
        key.chmod(0o600)
        stack.start_all()
        stack.wait_finished()
    finally:
        stack.stop()
    receipts = [event for event in stack.events(DEVICE) if event["event"] == "receipt"]
    assert [(one["round"], one["outcome"]) for one in receipts] == [(1, "accepted"), (2, "accepted")]
    store = open_store(load_config(stack.config(DEVICE), {}))
    assert all(path.read_bytes().startswith(MAGIC) for path in private_files(store.root))
    assert store.finalised()["candidate"]
