"""Everything that a box installs comes as a wheel for 64-bit Arm: nobody compiles on a Jetson or a Raspberry Pi. Needs a package index."""

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
PINNED_TORCH = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
UV = Path(sys.executable).parent / "uv"


def resolve(
    requirements: Path, python: str, *more: str, platform: str = "aarch64-manylinux_2_28"
) -> subprocess.CompletedProcess[str]:
    """The versions that pip would install on a platform, by default 64-bit Arm with glibc 2.28, from wheels alone; pip itself can't leave its own machine's markers."""
    command: list[str | Path] = [UV, "pip", "compile", requirements, "--python-version", python, *more]
    wheels = ["--no-header", "--no-annotate", "--python-platform", platform, "--only-binary", ":all:"]
    trusted = {"SSL_CERT_FILE": ssl.get_default_verify_paths().openssl_cafile, **os.environ}
    return subprocess.run([*command, *wheels], capture_output=True, text=True, env=trusted, check=False, timeout=250)


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = tmp_path_factory.mktemp("index") / "requirements.in"
    plain.write_text("typing-extensions\n")
    if (found := resolve(plain, "3.12")).returncode:
        pytest.skip(f"no package index can be reached: {found.stderr.strip()[:200]}")


@pytest.mark.parametrize(
    ("python", "options", "some"),
    [
        *[(python, ("--extra", "infer"), ["onnxruntime=="]) for python in ("3.10", "3.12")],
        *[(python, ("--extra", "edge"), ["torch=="]) for python in ("3.10", "3.12")],
        ("3.11", ("--extra", "edge", "--constraint", str(CONSTRAINTS)), PINNED_TORCH),
    ],
)
def test_a_boxs_requirements_are_wheels_on_64_bit_arm(python: str, options: tuple[str, ...], some: list[str]) -> None:
    found = resolve(ROOT / "pyproject.toml", python, *options)
    assert found.returncode == 0, found.stderr
    assert all(one in found.stdout for one in some)
    assert ("onnxruntime" in found.stdout) == ("infer" in options)


def test_the_gpus_onnxruntime_comes_without_the_one_for_the_cpu() -> None:
    extras = ("--extra", "edge", "--extra", "infer-gpu")
    found = resolve(ROOT / "pyproject.toml", "3.12", *extras, platform="x86_64-manylinux_2_28")
    assert found.returncode == 0, found.stderr
    names = [line.partition("==")[0] for line in found.stdout.splitlines()]
    assert [name for name in names if name.startswith("onnxruntime")] == ["onnxruntime-gpu"]
