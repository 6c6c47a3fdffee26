"""Golden training runs, compared bit for bit: losses, weights, logits, a resume.

    python tests/golden/curves.py                      print the values of this tree on this machine, as JSON
    python tests/golden/curves.py --against main~3     train both trees on this machine and compare exactly

Other CPUs round differently, so the tests compare with the golden file (`curves.json`) within a tolerance.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import vitrail

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 50
SMALL = ["model.image_size=16", "model.width=48", "model.depth=2", "model.heads=3", "model.patch_size=4"]
COMMON = [f"steps={STEPS}", "batch=32", "evaluations=2", "precision=float32"]
RECIPES = {
    "scratch-small": [],
    "augreg": ["epochs=none", *SMALL, "schedule.warmup_steps=10"],
    "finetune": ["patience=0"],
}
"""Three recipes, with changes that make the larger ones small."""


def curves(folder: Path) -> dict[str, Any]:
    """Train each recipe for 50 steps; the last one fine-tunes the model of the first."""
    torch.set_num_threads(1)
    first = folder / "scratch-small" / "best"
    return {name: _curve(name, changes, folder, first) for name, changes in RECIPES.items()}


def _curve(name: str, changes: list[str], folder: Path, first: Path) -> dict[str, Any]:
    def run() -> Path:
        begun = {"pretrained": first} if name == "finetune" else {}
        with contextlib.redirect_stdout(sys.stderr):
            done = vitrail.train(
                "digits", recipe=name, changes=[*COMMON, *changes], folder=folder / name,
                device="cpu", workers=0, quiet=True, **begun,
            )  # fmt: skip
        return done.folder

    straight = run()
    result = {"losses": losses(straight), "weights": weights(straight), "logits": logits(straight / "best")}
    # Without its last state, a run resumes from the middle one and must end with the same weights.
    shutil.rmtree(straight / "state" / f"{STEPS:08d}")
    resumed = run()
    if (losses(resumed), weights(resumed)) != (result["losses"], result["weights"]):
        raise SystemExit(f"{name}: resumed in the middle, the run came to other weights")
    return result


def losses(run: Path) -> list[float]:
    """Return the loss of every step once: a resumed run writes some of them twice."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    by_step = {row["step"]: row["loss"] for row in rows if "loss" in row}
    return [by_step[step] for step in sorted(by_step)]


def weights(run: Path) -> dict[str, str]:
    """Return the digest of the weights of each bundle."""
    return {name: digest(load_file(run / name / "model.safetensors")) for name in ("best", "last")}


def logits(bundle: Path) -> str:
    """Return the digest of a model's logits for a fixed input."""
    model = vitrail.load(bundle).model.eval()
    height, width = model.config.image_size
    wave = torch.sin(torch.arange(2 * model.config.channels * height * width) * 0.37)
    with torch.no_grad():
        return digest({"logits": model(wave.reshape(2, model.config.channels, height, width))})


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of names and contents."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        result.update(name.encode())
        result.update(tensors[name].contiguous().numpy().tobytes())
    return result.hexdigest()[:16]


def against(ref: str) -> int:
    """Compare this tree with another commit, each with its own copy of this file; print the differences."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), ref], cwd=ROOT, check=True)
        try:
            before, now = _printed(tree), _printed(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    for name in RECIPES:
        print(f"{name}: {'the same to the last bit' if before[name] == now[name] else 'DIFFERENT'} ({STEPS} steps)")
    return int(before != now)


def _printed(tree: Path) -> dict[str, Any]:
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    command = [sys.executable, str(tree / "tests" / "golden" / "curves.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REF", help="the commit to compare with")
    ref = parser.parse_args().against
    if ref is not None:
        sys.exit(against(ref))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(curves(Path(folder)), indent=1))
