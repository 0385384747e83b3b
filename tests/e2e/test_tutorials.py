"""The two first tutorials, followed to the letter: every file that they save, every command that they type, every line that they print."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker.broker_plant import end
from tests.support.stack import wait_for

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
SERVERS = ("broker run", "coordinator run", "agent run", "infer serve")
ANYTHING = re.compile(r"\\\.\\\.\\\.|\d{4}\\-\d\d\\-\d\d|([A-Z0-9]{4}\\-)+|[0-9a-f]{32}|\d\d:\d\d(:\d\d)?")
"""What differs from run to run, in a line that `re.escape` quoted."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each code block of a page, from the heading of its second step on."""
    text = (TUTORIALS / page).read_text().partition("\n## 2.")[2]
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Reader:
    """Types the commands of a page in one folder, as a person with several terminals does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[subprocess.Popen[bytes]] = []
        self.code, self.tokens = "", dict[str, str]()
        self.agents: list[subprocess.Popen[bytes]] = []

    def type(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        python = [sys.executable, "-m", *words] if words[0] == "fedcg" else [sys.executable, *words[1:]]
        command = python if words[0] in ("fedcg", "python", ".venv/bin/python") else words
        if any(f"fedcg {server}" in line for server in SERVERS):
            return self.start(command)
        if "join" in words:
            return self.answer(command)
        typed = self.tokens[words[words.index("--out") + 1]] + "\n" if "enrol" in words else None
        done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=280, cwd=self.folder)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        self.code = next(iter(re.findall(r"^  ([A-Z0-9-]{40,})$", done.stdout, re.MULTILINE)), self.code)
        if "--device" in words:
            self.tokens[words[words.index("--device") + 1]] = done.stdout.split()[0]
        return done.stdout

    def answer(self, command: list[str]) -> str:
        """Type the cohort's code at a terminal, where it is not shown."""
        path = self.folder / "terminal.txt"
        with path.open("wb") as screen:
            there = ["script", "--quiet", "--return", "--command", shlex.join(command), "/dev/null"]
            asking = subprocess.Popen(there, stdin=subprocess.PIPE, stdout=screen, cwd=self.folder)
            wait_for(lambda: "Cohort code" in path.read_text(), "it asks")
            asking.communicate(f"{self.code}\n".encode(), timeout=60)
        assert asking.returncode == 0, path.read_text()
        return path.read_text()

    def start(self, command: list[str]) -> str:
        path = self.folder / f"{len(self.servers)}.log"
        with path.open("wb") as log:
            self.servers.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))
        self.agents += self.servers[-1:] if "agent" in command else []
        ready = r"ready on|enrolment on|listening on|\[info"
        wait_for(lambda: re.search(ready, path.read_text()) is not None, f"{command} is ready", 60)
        return path.read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    for process in reversed(made.servers):
        end(process)


def missing(expected: str, printed: str) -> list[str]:
    """The lines of a page that no line printed is like; words and spaces count, dates and digests do not."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    wanted = [" ".join(line.split()) for line in expected.splitlines() if line.strip(" .")]
    patterns = {line: ANYTHING.sub(".*", re.escape(line).replace("\\ ", " ")) for line in wanted}
    return [line for line, pattern in patterns.items() if not any(re.match(pattern, one) for one in lines)]


@pytest.mark.slow
def test_the_first_federation_is_simulated_as_its_page_says(reader: Reader) -> None:
    code = [text for language, text in blocks("first-federation.md") if language == "python"]
    (reader.folder / "first.py").write_text(code[0] + code[1])
    (reader.folder / "use.py").write_text(code[2])
    table = next(text for language, text in blocks("first-federation.md") if language == "text")
    assert missing(table, reader.type("python first.py")) == []
    assert float(reader.type("python use.py")) > 0.5
    assert (reader.folder / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(600)
def test_the_real_fleet_runs_as_its_page_says(reader: Reader) -> None:
    printed, lacking = "", []
    for language, text in blocks("fleet.md"):
        if language in ("python", "toml"):
            (reader.folder / {"python": "images.py", "toml": "plan.toml"}[language]).write_text(text)
        elif language == "sh":
            printed = "\n".join(reader.type(line) for line in text.splitlines() if line.strip())
            assert {process.wait(400) for process in reader.agents} <= {0}
        elif language == "text":
            logs = "\n".join(path.read_text() for path in sorted(reader.folder.glob("*.log")))
            lacking += missing(text, f"{printed}\n{logs}")
    assert "\n".join(lacking) == ""
