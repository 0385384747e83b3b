"""A federation of real processes that train the user's own program, with the commands of docs/how-to/programs.md."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tomllib

from fedcg.learning.project import plan_text
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack


@dataclass
class ProgramStack(Stack):
    """Four devices that run a project's `client.py`, which is next to each agent.toml."""

    devices: tuple[str, ...] = ("site-1", "site-2", "site-3", "site-4")
    project: Path = Path()

    def plan(self) -> str:
        made = tomllib.loads(self.command("federation", "plan", "--from", str(self.project)))
        own = {"min_clients": len(self.devices), "seed": 7, "rounds": self.rounds, "method": self.method}
        return plan_text({**made, **own, "params": dict(self.params)})

    def adapt_config(self, device: str, data: Path, config: Path | None = None) -> None:
        path = config or self.config(device)
        shutil.copy(self.project / "client.py", path.parent)
        allowed = (
            {} if device not in self.allow_upload else {("policy", "allow_upload"): list(self.allow_upload[device])}
        )
        set_values(path, {("training", "program"): "client:client", ("training", "shadow_every"): 1, **allowed})
