"""One byte of a device's files flipped at a time, and what `fedcg doctor` then says."""

from pathlib import Path

from tests.support.commands import data_of, run_fedcg
from tests.support.edge.filled_store import files_of

UNCHECKED = ("agent.toml", "checkpoint.bin", "events.jsonl", "lock", "trainer.lock", "generations/1/", "models/")
"""Beginnings of files below a device's folder or its store that have no check, or one where they are used."""
CURES = ("estore", "delete it", "move it away", "enrol", "again", "anew", "the agent goes on")
_CHECKS = ("keys", "certificate", "broker", "store", "cohort secret")


def unnamed(device: Path, share: float) -> list[str]:
    """Files with a check of which a flipped byte is not named together with a cure.

    Args:
        device: the folder with agent.toml and the store.
        share: where in each file, in [0, 1).
    """
    assert "damaged" not in _found(device)
    kept = [name for name, content in files_of(device).items() if content and not _is_unchecked(name)]
    assert len(kept) > 15
    return [name for name in kept if not _is_named(device, name, share)]


def undocumented() -> list[str]:
    """Those in `UNCHECKED` that the documentation does not except."""
    text = Path("docs/how-to/troubleshooting.md").read_text().partition("## A file is damaged")[2].partition("\n## ")[0]
    return [name for name in UNCHECKED if f"`{name.replace('/1/', '/')}`" not in text]


def _is_unchecked(name: str) -> bool:
    return name.removeprefix("store/").startswith(UNCHECKED) or name.endswith(".training.lock")


def _is_named(device: Path, name: str, share: float) -> bool:
    path = device / name
    whole = path.read_bytes()
    at = int(share * len(whole))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    try:
        lines = _found(device).splitlines()
    finally:
        path.write_bytes(whole)
    return any(path.name in line and "damaged" in line and any(cure in line for cure in CURES) for line in lines)


def _found(device: Path) -> str:
    told = data_of(run_fedcg("doctor", "--config", device / "agent.toml", "--json").stdout)["findings"]
    return "\n".join(f"{one['detail']} {one['advice']}" for one in told if one["check"] in _CHECKS)
