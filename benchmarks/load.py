"""From a Base model on disk to its first logits: `vitrail.load` vs. timm's `create_model("local-dir:…")`.

    python benchmarks/load.py

Both open the same bundle, alternating, each time in a fresh process. Reported are the seconds from opening to the first
logits of one image (without imports), the growth of the process's peak memory, and the ratio ours / timm of the
medians: below 1 ours is faster or smaller. Target: at most 1.2 for both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PREPARE = """
import torch, vitrail
torch.manual_seed(0)
model = vitrail.create("B/16").eval()
vitrail.Bundle(model, vitrail.Preprocess()).save({folder!r})
"""
MEASURE = """
import json, resource, time
import torch
torch.set_num_threads(2)
{imports}
images = torch.zeros(1, 3, 224, 224)
with torch.inference_mode():
    torch.nn.Conv2d(3, 8, 16, 16)(images)  # warm up: the first convolution initialises libraries
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
model = {build}
with torch.inference_mode():
    model(images)
seconds = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps([seconds, grown]))
"""
OURS = ("import vitrail; vitrail.load; import vitrail.api", "vitrail.load({folder!r}).model")
TIMM = (
    "import sys; sys.path.insert(0, {root!r}); from tests.support.peers import import_peer; timm = import_peer('timm')",
    "timm.create_model('local-dir:' + {folder!r}, pretrained=True).eval()",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def benchmark(side: tuple[str, str], folder: str) -> tuple[float, float]:
    imports, build = (code.format(folder=folder, root=str(ROOT)) for code in side)
    seconds, grown = json.loads(run(MEASURE.format(imports=imports, build=build)).splitlines()[-1])
    return seconds, grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "base")
        run(PREPARE.format(folder=folder))
        results: dict[str, list[tuple[float, float]]] = {"ours": [], "timm": []}
        for i in range(repeats):
            order = [("ours", OURS), ("timm", TIMM)]
            for name, side in order if i % 2 == 0 else reversed(order):
                results[name].append(benchmark(side, folder))
    print(f"{'':8}{'ours':>10}{'timm':>10}{'ours / timm':>14}")
    for what, column in (("seconds", 0), ("MiB", 1)):
        ours, timm = (statistics.median(row[column] for row in results[name]) for name in ("ours", "timm"))
        print(f"{what:8}{ours:>10.2f}{timm:>10.2f}{ours / timm:>14.2f}")


if __name__ == "__main__":
    main()
