"""TensorBoard shows the same numbers as the metrics file, however often the run was interrupted."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked_commands

from vitrail.training.run_folder import MetricsFile
from vitrail.training.run_logger import Events
from vitrail.training.train import train

CHANGES = [
    "epochs=1",
    "batch=64",
    "evaluations=2",
    "save_minutes=0",
    "model.width=32",
    "model.depth=1",
    "model.heads=1",
    "model.patch_size=4",
]
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "val_top1": "val/top1",
    "val_loss": "val/loss",
    "val_balanced_accuracy": "val/balanced_accuracy",
    "val_macro_f1": "val/macro_f1",
    "images_per_second": "speed/images_per_second",
    "waiting_fraction": "speed/waiting_fraction",
}
"""Key in the metrics file, and tag in TensorBoard."""


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in result.Scalars(tag)] for tag in result.Tags()["scalars"]}


def metrics_file(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers of the metrics file, by their expected tag."""
    rows = MetricsFile.read(folder)
    result = {tag: [(row["step"], row[name]) for row in rows if name in row] for name, tag in TAGS.items()}
    return {tag: points for tag, points in result.items() if points}


def assert_the_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for tag, points in expected.items():
        assert [step for step, _ in actual[tag]] == [step for step, _ in points], tag
        assert [value for _, value in actual[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_every_point_exactly_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [word for change in CHANGES for word in ("--set", change)]
    command = ["train", "digits", "--run", folder, "--device", "cpu", "--workers", "0", *words]
    process = forked_commands.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list((folder / "state").glob("[0-9]*"))) < 2:
        time.sleep(0.005)
        assert process.poll() is None
    process.kill()
    process.wait()
    before = len(MetricsFile.read(folder))
    train("digits", changes=CHANGES, folder=folder, device="cpu", workers=0, quiet=True)

    rows, result = MetricsFile.read(folder), read_back(folder / "tensorboard")
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, 21))
    assert 2 <= before < len(rows)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert_the_same(result, metrics_file(folder))
    assert set(result) == set(TAGS.values())
    for tag in ("speed/images_per_second", "speed/waiting_fraction"):
        points = [step for step, _ in result[tag]]
        # The first step of a session loads libraries and compiles: it has no throughput.
        assert points[0] == 2
        assert points[-1] == steps[-1]
        assert len(points) == len(steps) - 2
    assert all(0 <= share <= 1 for _, share in result["speed/waiting_fraction"])


def test_repeated_steps_replace_earlier_events(tmp_path: Path) -> None:
    first = Events(tmp_path, 0)
    for step in range(1, 11):
        first.write({"step": step, "loss": 100.0})
    first.flush()  # but not closed, as if it were killed
    assert [step for step, _ in read_back(tmp_path)["train/loss"]] == list(range(1, 11))
    again = Events(tmp_path, 6)
    for step in range(7, 10):
        again.write({"step": step, "loss": 1.0})
    again.close()
    first.close()
    names = sorted(path.name.split(".")[3] for path in tmp_path.iterdir())
    assert names[0] < names[1], "the files lie in different seconds, or a reader may take the later one first"
    expected = [*((step, 100.0) for step in range(1, 7)), (7, 1.0), (8, 1.0), (9, 1.0)]
    assert read_back(tmp_path) == {"train/loss": expected}


def test_no_file_is_created_before_the_first_row(tmp_path: Path) -> None:
    events = Events(tmp_path / "tensorboard", 0)
    events.flush()
    events.close()
    assert not (tmp_path / "tensorboard").exists()
