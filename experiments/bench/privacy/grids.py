"""The grids of settings that docs/privacy.md reports: rows and columns, each a few options of `fedcg simulate`. Values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LENET = ("--network", "lenet5", "--generator", "conv", "--discriminator", "conv", "--no-quick")
_RELU = ("--network", "lenet5_relu", "--generator", "mlp", "--no-quick")
_SHORT = ("--lr", "0.001")  # runs of a few epochs: at FedCG's own 3e-4 a sigmoid network stands still in them
_METHODS = {
    "FedAvg": ("--method", "fedavg"),
    "FedSplit": ("--method", "fedsplit"),
    "FedCG": ("--method", "fedcg", "--set", "server_iterations=400"),
    "FedMD-CG": ("--method", "fedmd_cg"),
}
_PPIDSG = ("--method", "ppidsg", "--network", "ppidsg=image_small", "--lr", "0.01")
# Per-sample gradients need a discriminator without spectral norm; with Adam and small batches DP-SGD learns next to nothing here.
_PRIVATE = ("--discriminator", "mlp_plain", "--set", "optimiser=sgd", "--lr", "1", "--batch-size", "64")
# A backbone whose weights everybody can have; the projection behind it is the only private part.
_PRETRAINED = (
    "--network",
    "efficientnet_lite0+project:256",
    "--image-size",
    "96",
    "--freeze",
    "all",
    "--generator",
    "mlp",
    "--no-quick",
)
# Anti-GAN's split: each of two clients has half of the classes. Its GAN is trained for as long as two CPUs bear (docs/defences.md).
_TWO = (*_RELU, *_SHORT, "--clients", "2", "--partition", "classes:2")
_TENTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The least noise that keeps epsilon with 450 images, batches of 64 and three rounds of 5 epochs, at delta = 1e-5.
_NOISE_OF = {0.5: 12.12, 1: 6.5, 2: 3.57, 4: 2.06, 8: 1.29}
_ANTIGAN = ("--defence", "antigan", "--defence-set", "gan_steps=400", "--defence-set", "batch_size=25")


@dataclass(frozen=True)
class Grid:
    """A table of runs.

    Attributes:
        common: options of every run; a row's and a column's come after them.
        attacks: which ones are carried out; empty: all.
        rounds: of every run whose column does not say otherwise.
        colluder: one box of the cohort helps the attacker.
    """

    title: str
    common: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    attacks: tuple[str, ...] = ()
    rounds: int = 3
    colluder: bool = False

    def cells(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(row, column, options) of every run."""
        for row, of_row in self.rows.items():
            for column, of_column in self.columns.items():
                yield row, column, (*self.common, *of_row, *of_column)


_FIGURE_4 = {
    "none": (),
    **{f"v_e {value}": (*_ANTIGAN, "--defence-set", f"v_e={value}") for value in _TENTHS},
    **{f"mu {value}": (*_ANTIGAN, "--defence-set", f"mu={value}") for value in _TENTHS if value != 0.5},
}

GRIDS: Mapping[str, Grid] = {
    "methods": Grid(
        "attack by attack, by method and by what the server knows of the extractors' start",
        (*_RELU, *_SHORT, "--partition", "dirichlet:0.5"),
        {
            "FedAvg": _METHODS["FedAvg"],
            **{
                f"{method}, {start} start": (*options, "--start", start)
                for method, options in _METHODS.items()
                if method != "FedAvg"  # whose server has the extractors anyway
                for start in ("random", "cohort", "public")
            },
            "PPIDSG, own keys": _PPIDSG,
            "PPIDSG, a cohort's key": (*_PPIDSG, "--set", "key=cohort"),
        },
        {"": ()},
    ),
    "pretrained": Grid(
        "a public pretrained backbone with a private projection: attack by attack, by what the server knows of the projection's start",
        (*_PRETRAINED, *_SHORT, "--partition", "dirichlet:0.5"),
        {
            "FedAvg": _METHODS["FedAvg"],
            **{
                f"{method}, {start} start": (*_METHODS[method], "--start", start)
                for method in ("FedSplit", "FedCG")
                for start in ("cohort", "public")
            },
        },
        {"": ()},
        ("labels", "membership", "memorisation", "reidentification"),
    ),
    "fedprobe": Grid(
        "fedprobe, with one box of the cohort helping the server: what the mean outputs of 4, 8 and 16 boxes give away",
        (*_RELU, *_SHORT, "--partition", "iid", "--start", "cohort"),
        {
            **{
                f"fedprobe, {clients} clients": ("--method", "fedprobe", "--clients", str(clients))
                for clients in (4, 8, 16)
            },
            # A coordinator that plans rounds in which nobody moves, so that what a device adds to a sum stands out.
            "fedprobe, 4 clients, one step a round": (
                *("--method", "fedprobe", "--clients", "4", "--rounds", "10", "--set", "steps=1"),
            ),
            "FedSplit, 4 clients": _METHODS["FedSplit"],
            "FedAvg, 4 clients": _METHODS["FedAvg"],
        },
        {"": ()},
        ("extractor", "membership", "reidentification", "inversion"),
        colluder=True,
    ),
    "fedcg-table2": Grid(
        "FedCG's table 2: one network, what is sent and with how much noise",
        (*_LENET, *_SHORT, "--partition", "iid", "--local-epochs", "20", "--rounds", "5"),
        {
            "FedAvg": _METHODS["FedAvg"],  # with the effort `default` its noisy gradients too
            "FedAvg (0.001)": (*_METHODS["FedAvg"], "--mechanism", "gradient_noise=0.0316"),
            "FedAvg (0.1)": (*_METHODS["FedAvg"], "--mechanism", "gradient_noise=0.316"),
            "FedSplit": _METHODS["FedSplit"],
            "FedCG": _METHODS["FedCG"],
        },
        {"": ()},
        ("inversion",),
    ),
    "ppidsg": Grid(
        "PPIDSG's tables 1 to 3 for what exists here: labels and membership",
        (*_SHORT, "--generator", "conv", "--no-quick", "--partition", "iid", "--batch-size", "64"),
        {
            "FedAvg": _METHODS["FedAvg"],
            "FedAvg, GC 10 %": (*_METHODS["FedAvg"], "--mechanism", "prune=0.1"),
            "FedAvg, GC 40 %": (*_METHODS["FedAvg"], "--mechanism", "prune=0.4"),
            "FedCG": _METHODS["FedCG"],
        },
        {"sigmoid": ("--network", "lenet5"), "ReLU": ("--network", "lenet5_relu")},
        ("labels", "membership"),
    ),
    "epochs": Grid(
        "local epochs before the update is sent",
        (*_RELU, *_SHORT, "--partition", "dirichlet:0.5"),
        {name: _METHODS[name] for name in ("FedAvg", "FedCG")},
        {f"{epochs} epochs": ("--local-epochs", str(epochs), "--rounds", "2") for epochs in (1, 10, 25, 60)},
        ("labels", "membership", "memorisation", "reidentification"),
        2,
    ),
    "mechanisms": Grid(
        "defences: accuracy beside what comes back",
        (*_RELU, *_SHORT, "--partition", "dirichlet:0.5"),
        {"FedCG": _METHODS["FedCG"]},
        {
            "none": (),
            "balance: logits": ("--mechanism", "balance=logits"),
            "balance: bias": ("--mechanism", "balance=bias"),
            "clip 1": ("--mechanism", "update_clip=1.0"),
            "clip 1, noise 0.01": ("--mechanism", "update_clip=1.0", "--mechanism", "update_noise=0.01"),
            "noise 0.03": ("--mechanism", "update_noise=0.03"),
            "prune 90 %": ("--mechanism", "prune=0.9"),
            "dropout 0.5": ("--mechanism", "dropout=0.5"),
            "DP-SGD, noise 0.5": (*_PRIVATE, "--mechanism", "dp_sgd.noise_multiplier=0.5"),
            "DP-SGD, noise 1": (*_PRIVATE, "--mechanism", "dp_sgd.noise_multiplier=1.0"),
        },
        ("labels", "membership", "memorisation", "reidentification"),
    ),
    "antigan": Grid(
        "Anti-GAN's table 1 and figure 4: what a GAN reads out of a shared model, and what defences cost",
        _TWO,
        {"FedAvg": _METHODS["FedAvg"]},
        {
            **_FIGURE_4,
            "ATS": ("--defence", "ats"),
            "EtC": ("--defence", "etc"),
            "dropout 0.1": ("--mechanism", "dropout=0.1"),
            "dropout 0.5": ("--mechanism", "dropout=0.5"),
            **{
                # With the rate of the others the training diverges at the largest noise.
                f"DP-SGD, epsilon {epsilon}": (
                    *(*_PRIVATE, "--mechanism", f"dp_sgd.noise_multiplier={noise}"),
                    *(("--lr", "0.1") if epsilon == min(_NOISE_OF) else ()),
                )
                for epsilon, noise in _NOISE_OF.items()
            },
        },
        ("class_inference",),
    ),
    "antigan-four": Grid(
        "Anti-GAN where four clients have all classes",
        (*_RELU, *_SHORT, "--partition", "iid"),
        {name: _METHODS[name] for name in ("FedAvg", "FedSplit", "FedCG")},
        {"none": (), "Anti-GAN": _ANTIGAN},
        ("class_inference",),
    ),
    "antigan-four-curves": Grid(
        "Anti-GAN's figure 4 where four clients have all classes",
        (*_RELU, *_SHORT, "--partition", "iid"),
        {"FedAvg": _METHODS["FedAvg"]},
        _FIGURE_4,
        ("class_inference",),
    ),
    "antigan-split": Grid(
        "Anti-GAN where only classifiers and generators are shared: does the attack work there at all",
        _TWO,
        {name: _METHODS[name] for name in ("FedSplit", "FedCG")},
        {"none": (), "Anti-GAN": _ANTIGAN},
        ("class_inference",),
    ),
}
