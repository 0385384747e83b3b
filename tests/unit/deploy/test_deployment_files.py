"""Every deployment file passes its linter and stays hardened, and every `fedcg` command line in them is understood."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tomllib
from packaging.requirements import Requirement
from ruamel.yaml import YAML

from fedcg.cli import app
from fedcg.learning.spec import plan_from_mapping
from tests.support.commands import commands_of

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
COMPOSE = DEPLOY / "compose" / "compose.yaml"
# systemd-analyze's "exposure" in tenths: 0 is sealed, 100 is an ordinary service without any protection.
MOST_EXPOSURE = 25


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a linter; without it skip visibly, and fail where a skip would hide something (CI)."""
    found = shutil.which(tool, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{tool} is missing, in CI it must be there")
        pytest.skip(f"{tool} is not installed")
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120)


def assert_clean(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr


def compose() -> dict[str, Any]:
    return cast("dict[str, Any]", YAML(typ="safe").load(COMPOSE))


def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit_without_a_word_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    # As it would be installed, but with a command that exists on this machine, and as an instance.
    copy = tmp_path / unit.name.replace("@.", "@line4.")
    copy.write_text(unit.read_text().replace("/opt/fedcg/venv/bin/fedcg", shutil.which("true") or "/bin/true"))
    result = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy)
    assert_clean(result)
    # An unknown or misspelt setting is only a warning to systemd.
    assert copy.name not in result.stderr, result.stderr
    threshold = f"--threshold={MOST_EXPOSURE}"
    assert_clean(run("systemd-analyze", "security", "--offline=true", threshold, "--no-pager", copy))


def test_the_agents_unit_holds_what_the_agent_relies_on() -> None:
    unit = (DEPLOY / "systemd" / "fedcg-agent@.service").read_text()
    # The killing of its trainer does not end it, a wrong configuration is not repeated, its loop is supervised, its memory bounded.
    assert set(unit.splitlines()) >= {
        *("OOMPolicy=continue", "Restart=on-failure", "RestartPreventExitStatus=2 7", "StartLimitIntervalSec=0"),
        *("Type=notify", "NotifyAccess=main", "WatchdogSec=120", "MemoryMax=80%"),
    }


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_accepts_the_dockerfile(dockerfile: Path) -> None:
    assert_clean(run("hadolint", dockerfile))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_the_image_runs_as_an_ordinary_user_by_number_from_a_named_release(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["10001:10001"]
    # A Jetson's base image has to fit its JetPack, so the build names it.
    (release,) = re.findall(r"^ARG (?:PYTHON_IMAGE=\S+:|BASE_IMAGE)(\S*)", text, re.MULTILINE)
    assert release.endswith("bookworm") or (release == "" and "jetson" in dockerfile.name)
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert images
    assert set(images) <= {"${PYTHON_IMAGE}", "${BASE_IMAGE}"}
    ignored = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert "*" in ignored, "the build must not see what it does not need (keys, data)"


def test_the_images_install_extras_that_exist_and_every_package_of_the_distribution() -> None:
    extras = project()["project"]["optional-dependencies"]
    packages = {name.rstrip("*") for name in project()["tool"]["setuptools"]["packages"]["find"]["include"]}
    for name in ("agent", "agent-jetson", "coordinator", "infer"):
        text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text()
        (wanted,) = re.findall(r"'\.\[([a-z0-9,-]+)\]'", text)
        assert set(wanted.split(",")) <= set(extras)
        sent = (DEPLOY / "docker" / f"{name}.Dockerfile.dockerignore").read_text().splitlines()
        assert {f"!{package}" for package in packages} | {"!pyproject.toml"} <= set(sent)
        assert ("--constraint constraints.txt" in text) == ("!constraints.txt" in sent)


def test_one_extra_alone_brings_onnxruntime_so_that_none_is_laid_over_another() -> None:
    extras = project()["project"]["optional-dependencies"]

    def needed(extra: str) -> set[str]:
        own = {Requirement(line) for line in extras[extra]}
        inner = [one for part in own if part.name == "fedcg-edge" for name in part.extras for one in needed(name)]
        return {part.name for part in own} | set(inner)

    brings = {extra: {name for name in needed(extra) if name.startswith("onnxruntime")} for extra in extras}
    assert brings["infer"] == brings["demo"] == brings["dev"] == {"onnxruntime"}
    assert brings["infer-gpu"] == {"onnxruntime-gpu"}
    assert brings["edge"] == brings["serve"] == brings["coordinator"] == set()
    assert {"cryptography", "pillow"} <= needed("serve") & needed("infer") & needed("infer-gpu")
    (torch,) = (Requirement(line).specifier for line in extras["learn"] if line.startswith("torch"))
    for version, fits in (
        ("2.6.0a0+ecf3bae40a.nv25.01", True),
        ("2.6.0rc1", True),
        ("2.13.0+cpu", True),
        ("2.5.1", False),
    ):
        assert torch.contains(version, prereleases=True) is fits, version


def test_no_image_names_an_architecture_and_the_jetsons_keeps_the_torch_of_its_base() -> None:
    for dockerfile in DOCKERFILES:
        lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
        assert not [line for line in lines if re.search(r"amd64|x86_64|arm64|aarch64|igpu", line)], dockerfile.name
    jetson = (DEPLOY / "docker" / "agent-jetson.Dockerfile").read_text()
    assert "PIP_CONSTRAINT=/src/base-torch.txt" in jetson
    assert "'torch==' + version('torch')" in jetson
    assert "--system-site-packages" in jetson
    assert "onnxruntime" not in "".join(re.findall(r"'\.\[.*?\]'", jetson))
    assert "'CUDAExecutionProvider' in onnxruntime.get_available_providers()" in jetson


def test_shellcheck_accepts_the_scripts() -> None:
    assert_clean(run("shellcheck", *sorted(DEPLOY.glob("*/*.sh")), REPOSITORY / ".ci" / "run"))


def test_the_compose_file_fits_its_schema() -> None:
    assert_clean(run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE))


def test_yamllint_accepts_the_yaml_files() -> None:
    config = DEPLOY / ".yamllint.yaml"
    assert_clean(run("yamllint", "--strict", "--config-file", config, DEPLOY, REPOSITORY / ".pre-commit-config.yaml"))


def test_everything_that_listens_may_open_as_many_files_as_its_bound_of_connections_needs() -> None:
    for name in ("fedcg-coordinator.service", "fedcg-infer@.service", "fedcg-broker.service"):
        assert "\nLimitNOFILE=65536\n" in (DEPLOY / "systemd" / name).read_text()
    assert compose()["services"]["coordinator"]["ulimits"] == {"nofile": 65536}


def test_the_compose_file_starts_a_broker_a_coordinator_and_as_many_agents_as_a_round_needs() -> None:
    services = compose()["services"]
    agents = [name for name in services if name.startswith("agent-")]
    assert {"broker", "coordinator"} <= set(services)
    assert len(agents) >= plan_from_mapping(tomllib.loads((COMPOSE.parent / "plan.toml").read_text())).min_clients
    for service in services.values():
        assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_every_container_is_sealed_and_publishes_no_port() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "mem_limit" in service, name
        assert not {"privileged", "ports", "user", "network_mode", "pid"} & set(service), name


def test_agents_get_their_own_bundle_and_images_read_only_and_share_nothing() -> None:
    seen: set[str] = set()
    for name, service in compose()["services"].items():
        if not name.startswith("agent-"):
            continue
        sources = {volume.split(":")[0] for volume in service["volumes"]}
        assert not sources & seen, f"{name} shares a volume"
        seen |= sources
        writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
        assert [volume.split(":")[1] for volume in writable] == ["/var/lib/fedcg"]


def test_the_broker_sees_of_the_coordinator_only_the_folder_that_was_deployed_for_it() -> None:
    assert [volume.split(":")[0] for volume in compose()["services"]["broker"]["volumes"]] == ["./state/broker"]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Where a command line is written, and its words after `fedcg`."""
    for unit in UNITS:
        for line in re.findall(r"^ExecStart=\S+/fedcg (.+)$", unit.read_text(), re.MULTILINE):
            yield unit.name, shlex.split(line)
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text()
        if 'ENTRYPOINT ["fedcg"]' in text:
            yield dockerfile.name, json.loads(re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)[0])
    for name, service in compose()["services"].items():
        if "command" in service:
            yield f"compose {name}", service["command"]
    readme = (DEPLOY / "README.md").read_text()
    for line in re.findall(r"^(?:fedcg|docker compose run --rm --no-deps coordinator) (.+)$", readme, re.MULTILINE):
        yield "README.md", shlex.split(line)
    for line in re.findall(r"`fedcg ([a-z][^`]+)`", readme):
        yield "README.md", shlex.split(line)


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), LINES, ids=[f"{where}: {' '.join(words)}" for where, words in LINES])
def test_the_command_line_is_understood(where: str, words: list[str]) -> None:
    """Its options and arguments are parsed and checked; it is not run."""
    there = dict(commands_of(app))
    name = next(name for length in (3, 2, 1) if (name := tuple(words[:length])) in there)
    there[name].make_context("fedcg", words[len(name) :])


def test_the_deployment_files_hold_command_lines_of_both_sides() -> None:
    starts = {tuple(words[:2]) for _, words in LINES}
    assert {("agent", "run"), ("coordinator", "run"), ("broker", "run"), ("device", "add")} <= starts
