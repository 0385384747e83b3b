"""Where a Mosquitto is found, and what it is started with."""

from pathlib import Path

import pytest

from fedcg.find_mosquitto import Mosquitto, find_extracted, find_installed, find_mosquitto


def extracted(root: Path) -> Path:
    binary = root / "usr" / "sbin" / "mosquitto"
    for path in (binary, root / "usr" / "lib" / "x86_64-linux-gnu" / "libwrap.so.0"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    binary.chmod(0o755)
    return binary


def test_an_extracted_broker_is_found_with_its_libraries_here_or_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDCG_BROKER_DIR", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/x")
    monkeypatch.chdir(tmp_path)
    assert find_extracted() is None
    for folder in (tmp_path / ".broker", tmp_path / "elsewhere"):
        broker = Mosquitto(extracted(folder), folder / "usr" / "lib" / "x86_64-linux-gnu")
        assert find_extracted() == find_extracted(folder) == broker
        libraries = broker.environment()["LD_LIBRARY_PATH"].split(":")
        assert (libraries[0], libraries[-1]) == (str(broker.library_path), "/x")
        monkeypatch.setenv("FEDCG_BROKER_DIR", str(tmp_path / "elsewhere"))


def test_a_broker_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extracted(tmp_path)
    monkeypatch.setenv("FEDCG_BROKER_DIR", str(tmp_path))
    on_path = tmp_path / "bin" / "mosquitto"
    on_path.parent.mkdir()
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_installed() == find_mosquitto() == Mosquitto(on_path)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "LD_LIBRARY_PATH" not in Mosquitto(on_path).environment()
    assert Mosquitto(on_path, tmp_path).environment()["LD_LIBRARY_PATH"] == str(tmp_path)
