"""Evaluate the models of a sweep at other resolutions, before and after a short fine-tuning there.

    python studies/resolution/run.py runs/resolution tiny-imagenet/ --jobs 6

A model with learned positions is resized with each of the five resampling methods; sincos and RoPE need none. Writes
resolution.json next to sweep.json: a row per candidate, seed, image size and method, with the test accuracy before and
after the fine-tuning. Rerun the same command to resume.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args

import vitrail
from vitrail.models.position import Method
from vitrail.training.run_folder import write_json

SIZES = (24, 32, 48, 64)
"""32 is the size of training: fine-tuning there shows what more training alone gives."""
FINE_TUNING = ("steps=200", "batch=512", "evaluations=1", "data.val=0.05", "data.on_device=true", "optimizer.lr=0.0005",
               "augmentation.crop=padded", "augmentation.flip=0.5", "compile=true")  # fmt: skip


IDENTITY = ("candidate", "size", "method", "seed")
"""What tells one trial from another."""


class Trial(NamedTuple):
    """A model to resize, evaluate and fine-tune."""

    candidate: str
    seed: int
    size: int
    method: Method
    folder: str
    """The run of the sweep."""
    target: str
    data: str
    device: str
    changes: tuple[str, ...]


def measure(trial: Trial) -> dict[str, Any]:
    """Return the test accuracy before and after the fine-tuning."""
    bundle = vitrail.load(Path(trial.folder) / "best", image_size=trial.size, position_method=trial.method)
    before = vitrail.evaluate(bundle, trial.data, split="test", device=trial.device)
    tuned = vitrail.train(
        trial.data,
        recipe="finetune",
        changes=[*FINE_TUNING, *trial.changes, f"seed={trial.seed}"],
        pretrained=bundle,
        folder=trial.target,
        device=trial.device,
        quiet=True,
    )
    row = {name: getattr(trial, name) for name in IDENTITY}
    return {**row, "before": before.headline.value, "after": tuned.metrics.headline.value}


def trials(sweep: Path, data: Path, device: str, changes: tuple[str, ...]) -> list[Trial]:
    """Return every combination of a run, a size and a method."""
    listed = []
    content = json.loads((sweep / "sweep.json").read_text())
    for candidate in content["candidates"]:
        settings = {**content["settings"], **candidate["settings"]}
        learned = settings.get("model.position") == "learned_1d"
        for run in candidate["seeds"]:
            for size in SIZES:
                for method in get_args(Method) if learned and size != settings.get("model.image_size") else ("timm",):
                    name = f"{candidate['name']},size={size},method={method},seed={run['seed']}"
                    listed.append(
                        Trial(
                            candidate["name"], run["seed"], size, method, str(sweep / run["folder"]),
                            str(sweep / "fine-tuned" / name), str(data), device, changes,
                        )
                    )  # fmt: skip
    return listed


def main() -> None:
    """Measure all trials, several at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the folder of the sweep")
    parser.add_argument("data", type=Path, help="the data of the sweep")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], help="change a setting of the fine-tuning"
    )
    args = parser.parse_args()
    file = args.sweep / "resolution.json"
    rows = json.loads(file.read_text()) if file.is_file() else []
    measured = {tuple(row[name] for name in IDENTITY) for row in rows}
    planned = trials(args.sweep, args.data, args.device, tuple(args.changes))
    missing = [trial for trial in planned if tuple(getattr(trial, name) for name in IDENTITY) not in measured]
    missing.sort(key=lambda trial: -trial.size)  # the longest first
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(measure, trial) for trial in missing]):
                rows.append(future.result())
                print(f"{len(rows)} of {len(planned)}:", rows[-1], flush=True)
                rows.sort(key=lambda row: tuple(row[name] for name in IDENTITY))
                write_json(file, rows)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else it would measure all others and forget them
            raise


if __name__ == "__main__":
    main()
