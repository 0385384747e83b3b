"""Pictures of a run. Knows curves of numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curve = Sequence[Mapping[str, Any]]


def accuracy_over_rounds(curves: Mapping[str, Curve], path: Path, title: str) -> None:
    """Draw accuracy over rounds: one colour per client, solid its personal model, dashed its local-only shadow.

    Left: each client's own test images; right: the common balanced test.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, prefix, heading in zip(
        panels, ("", "common_"), ("own test images", "common balanced test"), strict=True
    ):
        for index, (client, curve) in enumerate(sorted(curves.items())):
            for what, line in (("personal", "-"), ("local", "--")):
                points = [(point["round"], point.get(f"accuracy_{prefix}{what}")) for point in curve]
                known = [(at, 100 * value) for at, value in points if value is not None]
                if known:
                    label = client if what == "personal" else None
                    panel.plot(*zip(*known, strict=True), line, color=f"C{index % 10}", marker=".", label=label)
        panel.set_title(heading)
        panel.set_xlabel("round")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy, %")
    panels[0].legend(title="solid: personal model\ndashed: local only", fontsize="small", title_fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
