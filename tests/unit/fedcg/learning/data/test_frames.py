"""`fedcg.table` and `fedcg.signals`: rows, windows, sound; what is wrong with a file in one sentence; the layers in front of a network, in training and in exported models."""

import csv
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from torch import nn

import fedcg
from fedcg.learning.data.image_folder import from_arrays, split_by_hash
from fedcg.learning.errors import DataError, NetworkError
from fedcg.learning.spec import TensorForm

CLASSES = ["walk", "rest"]
PATIENTS: dict[str, Any] = {"age": None, "ward": ["a", "b"], "bp": None}


def written(path: Path, header: str, rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *rows])
    return path


def motion(labels: str, who: str = "") -> list[list[object]]:
    """Row t has x = t and y = -t; w and r stand for the labels."""
    names = {"w": "walk", "r": "rest"}
    return [[t, -t, names[one], (who or "p" * len(labels))[t]] for t, one in enumerate(labels)]


def windows(source: Path, samples: int = 4, hop: int | None = 2, **more: Any) -> Any:
    return fedcg.signals(source, CLASSES, samples, hop, channels=["x", "y"], **more)


def test_windows_never_cross_a_change_of_label_or_group_and_a_short_rest_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "x y label who", motion("wwwwwwwrrrrwwwww", "ppppppppppppqqqq"))
    found = windows(path, group="who")
    assert found.inputs[:, 0, 0].tolist() == [0, 2, 7, 12]  # 11 is alone in its group
    assert found[1][0].tolist() == [[2, 3, 4, 5], [-2, -3, -4, -5]]
    assert found.labels.tolist() == [0, 0, 1, 0]
    assert windows(path, hop=None).inputs[:, 0, 0].tolist() == [0, 7, 11]


def test_windows_that_overlap_are_on_one_side_of_a_split_also_when_the_recording_grows(tmp_path: Path) -> None:
    rows = motion("w" * 990)
    sources = [written(tmp_path / f"{count}.csv", "x y label who", rows[:count]) for count in (410, 990)]
    before, after = (
        fedcg.Client(fedcg.Split(nn.Flatten(), nn.Linear(8, 2)), windows(source), CLASSES).arrays("a")
        for source in sources
    )
    form = TensorForm(kind="tensor", shape=(2, 4), dtype="float32")
    early, late = (from_arrays(one, Path("a"), tuple(CLASSES), form, None) for one in (before, after))
    assert [one.sha256 for one in early.entries] == [one.sha256 for one in late.entries[: len(early.entries)]]
    assert len({one.sha256 for one in late.entries}) == len(late.entries)
    sides = split_by_hash(late.entries, {"train": 0.5, "val": 0.5})
    starts = {entry.path: late.images.images[row, 0, 0].item() for row, entry in enumerate(late.entries)}
    times = [{starts[entry.path] + step for entry in side for step in range(4)} for side in sides.values()]
    assert min(map(len, times)) > 200
    assert not times[0] & times[1]
    data = fedcg.Client(fedcg.Split(nn.Flatten(), nn.Linear(8, 2)), windows(sources[1]), CLASSES).data("a")
    halves = [
        {int(start) + step for start in part.images[:, 0, 0] for step in range(4)} for part in (data.train, data.val)
    ]
    assert not halves[0] & halves[1]


def wav(path: Path, kind: int, bits: int, data: bytes, channels: int = 1, rate: int = 8000) -> Path:
    about = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    chunks = b"WAVELIST\x04\0\0\0abcdfmt " + struct.pack("<I", len(about)) + about + b"data"
    content = chunks + struct.pack("<I", len(data)) + data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"RIFF" + struct.pack("<I", len(content)) + content)
    return path


WAVE = (0.0, 0.5, -0.25, -1.0)


@pytest.mark.parametrize(
    ("kind", "bits", "data"),
    [
        (1, 8, bytes(int(one * 128) + 128 for one in WAVE)),
        (1, 16, struct.pack("<4h", *(int(one * 2**15) for one in WAVE))),
        (1, 24, b"".join(int(one * 2**23).to_bytes(3, "little", signed=True) for one in WAVE)),
        (1, 32, struct.pack("<4i", *(int(one * 2**31) for one in WAVE))),
        (3, 32, struct.pack("<4f", *WAVE)),
    ],
)
def test_sound_of_any_kind_is_read_alike_and_channels_mixed(tmp_path: Path, kind: int, bits: int, data: bytes) -> None:
    wav(tmp_path / "rest" / "plain.wav", kind, bits, data)
    stereo = struct.pack("<8f", *(part for one in WAVE for part in (one, 0.5)))
    wav(tmp_path / "walk" / "Stereo.WAV", 3, 32, stereo, channels=2)
    found = fedcg.signals(tmp_path, CLASSES, samples=4, rate=8000)
    assert found.inputs.tolist() == [[[0.25, 0.5, 0.125, -0.25]], [list(WAVE)]]
    assert found.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x,y,who\n1,2,p\n", "d.csv: column label is missing; columns are x, y, who"),
        (b"x,y,label\n1,2,walk\n1,zwei,walk\n", "d.csv: row 2: column y: not a float32 number"),
        (b"x,y,label\n1,,walk\n", "d.csv: row 1: column y: not a float32 number"),
        (b"x,y,label\n1,1e39,walk\n", "d.csv: row 1: column y: not a float32 number"),
        (b"x,y,label\n1,2,jump\n", "d.csv: row 1: column label: unknown class; the classes are walk, rest"),
        (b"x,y,label\n1,2,walk\n1,2,walk,3\n", "d.csv: can't be read as a table"),
        (b"x,y,label\n" + b"1,2,walk\n" * 3, "no recording has 4 samples of one class"),
        (b"x,y,x,label\n1,2,1,walk\n", "d.csv: column x is duplicated"),
        (b"x,y,label\n", "d.csv: has no row"),
        (b"", "d.csv: can't be read as a table"),
        (b"x,y,label\n\xff\xfe\0", "d.csv: can't be read as a table"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_one_sentence_with_the_place(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        windows(tmp_path / "d.csv")
    assert words in str(caught.value)


SAMPLES = struct.pack("<4f", *WAVE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 44100}, "has 44100 Hz, but rate is 8000: convert the file; files are not resampled"),
        ({"bits": 64, "data": SAMPLES[:8] + b"\xff" * 8}, "sample 1 is not finite"),
        ({"data": SAMPLES[:-4] + struct.pack("<f", np.nan)}, "sample 3 is not finite"),
        ({"kind": 2}, "can't be read as WAV"),
        ({"bits": 16, "kind": 1, "cut": 3}, "can't be read as WAV: Reached EOF prematurely"),
    ],
)
def test_sound_of_another_kind_or_damaged_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    cut = changes.pop("cut", 0)
    path = wav(tmp_path / "rest" / "s.wav", **{"kind": 3, "bits": 32, "data": SAMPLES, **changes})
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with pytest.raises(DataError, match=words):
        fedcg.signals(tmp_path, CLASSES, samples=2, rate=8000)
    wav(path, 1, 16, b"")
    with pytest.raises(DataError, match="no recording has 2 samples"):
        fedcg.signals(tmp_path, CLASSES, samples=2, rate=8000)
    path.write_bytes(b"RIFF no sound")
    (tmp_path / "rest" / "._s.wav").write_bytes(b"hidden")
    with pytest.raises(DataError, match=r"s\.wav: can't be read as WAV"):
        fedcg.signals(tmp_path, CLASSES, samples=2, rate=8000)
    (tmp_path / "jump").mkdir()
    with pytest.raises(DataError, match="jump: unknown class; the classes are walk, rest"):
        fedcg.signals(tmp_path, CLASSES, samples=2, rate=8000)


def log_mel(signal: np.ndarray, rate: int, bands: int, n_fft: int, hop: int) -> np.ndarray:
    """[T] to [bands, frames], by the definition: numpy's FFT, and one triangle after another."""
    window = np.hanning(n_fft + 1)[:-1]
    frames = [signal[at : at + n_fft] * window for at in range(0, len(signal) - n_fft + 1, hop)]
    power = np.abs(np.fft.rfft(frames) / window.sum()) ** 2
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = [700 * (10 ** (top * step / (bands + 1) / 2595) - 1) for step in range(bands + 2)]
    made = np.zeros((bands, len(frames)))
    for band in range(bands):
        for place in range(n_fft // 2 + 1):
            f, (low, centre, high) = place * rate / n_fft, edges[band : band + 3]
            share = (f - low) / (centre - low) if f < centre else (high - f) / (high - centre)
            made[band] += max(0.0, share) * power[:, place]
    return np.log(made + 1e-8)


def tones(path: Path, count: int) -> Path:
    """Two classes of tones in noise, 16 kHz, one of them a hundred times quieter."""
    stream, time = np.random.default_rng(0), np.arange(4000) / 16000
    for name, hertz in (("walk", 440), ("rest", 1800)):
        for number in range(count):
            sound = 10 ** -(2 * (number % 2)) * np.sin(2 * np.pi * hertz * time + number)
            sound += 1e-4 * stream.normal(size=4000)
            wav(path / name / f"{number}.wav", 3, 32, sound.astype("<f4").tobytes(), rate=16000)
    return path


def test_a_log_mel_spectrogram_is_that_of_its_definition_and_the_exported_model_takes_samples(tmp_path: Path) -> None:
    found = fedcg.signals(tones(tmp_path / "sound", 12), CLASSES, samples=4000, rate=16000)
    layer = found.log_mel(bands=20, n_fft=512, hop=160)
    spectrograms = layer(torch.from_numpy(found.inputs))
    assert spectrograms.shape == (24, 1, 20, 22)
    for row in (0, 1, 12):
        expected = log_mel(found.inputs[row, 0].astype(np.float64), 16000, 20, 512, 160)
        np.testing.assert_allclose(spectrograms[row, 0].numpy(), expected, atol=2e-3)
    torch.manual_seed(0)
    net = nn.Sequential(layer, nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(440, 16), nn.ReLU(), nn.Linear(16, 2))
    clients = [fedcg.Client(fedcg.split(net, after="4"), found, CLASSES) for _ in range(2)]
    run = fedcg.simulate(clients, "fedsplit", 3, local_epochs=6, batch_size=8, lr=1e-2)
    one = run.clients["client-1"]
    session = onnxruntime.InferenceSession(one.export(tmp_path / "m.onnx"))
    logits = session.run(["logits"], {"input": found.inputs})[0]
    np.testing.assert_allclose(logits, one.model(torch.from_numpy(found.inputs)).detach().numpy(), atol=1e-3)
    assert (logits.argmax(1) == found.labels).all()
    with pytest.raises(DataError, match="n_fft from 16 to the window's 4000"):
        found.log_mel(n_fft=4001)


def test_csv_parquet_and_frames_are_read_alike_and_without_pandas_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[5, 70, "b", "walk"], [-1, 50.5, "x", "rest"]]
    path = written(tmp_path / "d.csv", "bp age ward label", rows)
    frame = pd.DataFrame(rows, columns=["bp", "age", "ward", "label"])
    frame.to_parquet(tmp_path / "d.parquet")
    for source in (path, str(path), tmp_path / "d.parquet", frame):
        found = fedcg.table(source, PATIENTS, classes=CLASSES)
        assert found.inputs.tolist() == [[70, 1, 5], [50.5, -1, -1]]
        assert found.labels.tolist() == [0, 1]
        assert found.one_hot()(torch.from_numpy(found.inputs)).tolist() == [[70, 0, 1, 5], [50.5, 0, 0, -1]]
    whole = pd.DataFrame(
        {"level": [1, None, 2], "label": [True, False, True], "at": pd.to_datetime(["2026-01-01"] * 3)}
    )
    whole.to_parquet(tmp_path / "w.parquet")  # pandas makes floats of these levels
    whole.to_csv(tmp_path / "w.csv")
    for path in (tmp_path / "w.parquet", tmp_path / "w.csv"):
        levels = fedcg.table(path, {"level": ["1", "2"]}, classes=["True", "False"])
        assert (levels.inputs.tolist(), levels.labels.tolist()) == ([[0], [-1], [1]], [0, 1, 0])
    with pytest.raises(DataError, match="without the label"):
        fedcg.table(whole, {"label": None})
    with pytest.raises(DataError, match=r"column at is datetime64.* convert it to numbers"):
        fedcg.table(whole, {"at": None}, classes=["True", "False"])
    with pytest.warns(UserWarning, match="column level: no row has one of the values"):
        fedcg.table(whole, {"level": ["one"]}, classes=["True", "False"])
    halves = fedcg.Split(nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(DataError, match="its classes are walk, rest: set the client's classes to the same names"):
        fedcg.Client(halves, found, CLASSES[::-1]).arrays("a")
    with pytest.raises(NetworkError, match="test and train must have the same columns"):
        fedcg.Client(halves, found, CLASSES, test=fedcg.table(frame, dict(reversed(PATIENTS.items())), classes=CLASSES))
    assert fedcg.table(frame, {"bp": None}, label="age").labels.tolist() == [70, 50.5]
    with pytest.raises(DataError, match=r"the table: column ward: \['a', 'a'\] must be a list of distinct values"):
        fedcg.table(frame, {"ward": ["a", "a"]}, classes=CLASSES)
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        fedcg.table(tmp_path / "none.csv", PATIENTS, classes=CLASSES)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataError, match=r"needs the package pandas: pip install 'fedcg-edge\[tables\]'"):
        fedcg.table(path, PATIENTS, classes=CLASSES)


def patients(path: Path, seed: int, age: float) -> fedcg.Client:
    """Those who walk are older by 20, whatever the age of the others."""
    stream = np.random.default_rng(seed)
    rows = [
        [age + 20 * (k % 2) + 5 * stream.normal(), "ab"[k % 2], stream.normal(), CLASSES[1 - k % 2]] for k in range(200)
    ]
    train = fedcg.table(written(path, "age ward bp label", rows), PATIENTS, classes=CLASSES)
    torch.manual_seed(0)
    layer = train.one_hot()
    body = nn.Sequential(nn.BatchNorm1d(layer.width), nn.Linear(layer.width, 8), nn.ReLU())
    return fedcg.Client(fedcg.split(nn.Sequential(layer, body, nn.Linear(8, 2)), after="1"), train, CLASSES)


def test_batch_norm_in_front_scales_a_table_by_each_clients_own_rows_in_the_exported_model_too(tmp_path: Path) -> None:
    clients = {name: patients(tmp_path / f"{name}.csv", seed, 100.0 * seed) for seed, name in enumerate("abc")}
    run = fedcg.simulate(clients, "fedsplit", 4, local_epochs=5, batch_size=8, lr=1e-2)
    assert (run.table()["own model"] > 90).all()
    logits = run.clients["c"].model(row := torch.tensor([[220.0, 1, 0.0], [200.0, 0, 0.0]]))
    assert logits.argmax(1).tolist() == [0, 1]
    session = onnxruntime.InferenceSession(run.clients["c"].export(tmp_path / "c.onnx"))
    np.testing.assert_allclose(session.run(["logits"], {"input": row.numpy()})[0], logits.detach().numpy(), atol=1e-3)
