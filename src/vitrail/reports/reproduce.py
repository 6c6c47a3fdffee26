"""How to reproduce a run: command, recipe, versions, checksums."""

import hashlib
import importlib.metadata
import platform
import shlex
from pathlib import Path

from vitrail._version import __version__
from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import WEIGHTS
from vitrail.reports.page import Section, paragraph
from vitrail.reports.run_record import BEST, Record
from vitrail.training.run_folder import METRICS, RECIPE, SPLIT, TEST_PREDICTIONS

PACKAGES = ("torch", "numpy", "pillow", "simplejpeg", "safetensors")
FILES = {
    f"{BEST}/{WEIGHTS}": "weights of the best model",
    RECIPE: "all settings",
    SPLIT: "which image is in which split",
    METRICS: "metrics of every step",
    TEST_PREDICTIONS: "predictions for every test image",
}


def reproduce(run: Record) -> Section:
    """Return everything needed to reproduce the run and to verify the result."""
    pretrained = str(run.origin.get("pretrained", ""))
    body = f'<pre class="wrap"><code>{escape(command(run))}</code></pre>'
    if pretrained:
        source = run.provenance.get("source")
        named = f" ({source})" if source else ""
        body += paragraph(f"MODEL is the pretrained model{named} with the checksum {pretrained}.")
    body += paragraph(
        "With the same versions, machine and number of threads, the weights are bit-identical; otherwise expect "
        "metrics within the intervals above."
    )
    body += f"<h3>Versions used for this report</h3>{_versions(run)}"
    body += f"<h3>Files of the run and their SHA-256</h3>{_files(run.folder)}"
    body += f"<details><summary>Full recipe</summary><pre><code>{escape(run.recipe_text)}</code></pre></details>"
    return Section("reproduce", "Reproduce", "Reproduce this run", body)


def command(run: Record) -> str:
    """Return the command that reproduces a run."""
    words = ["vitrail", "train", run.data or "DATA", "--recipe", str(run.folder / RECIPE)]
    if run.origin.get("pretrained"):
        words += ["--from", "MODEL"]
    return shlex.join([*words, "--run", f"{run.folder}-again"])


def _versions(run: Record) -> str:
    facts = {"vitrail": __version__, "Python": platform.python_version()}
    facts |= {name: importlib.metadata.version(name) for name in PACKAGES}
    facts["machine"] = f"{platform.system()} {platform.machine()}"
    written = run.provenance.get("written_by")
    if written and written != f"vitrail {__version__}":
        facts["model written by"] = str(written)
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _files(folder: Path) -> str:
    rows = []
    for name, what in FILES.items():
        path = folder / name
        if path.is_file():
            try:
                checksum = _checksum(path)
            except OSError as error:
                checksum = f"cannot be read: {error.strerror or error}"
            about = f"{escape(what)}, {_size(path.stat().st_size)}<br><code>{escape(checksum)}</code>"
        else:
            why = "missing; pip install 'vitrail[train]' adds it" if name == TEST_PREDICTIONS else "missing"
            about = f'{escape(what)}<br><span class="quiet">{escape(why)}</span>'
        rows.append(f"<dt><code>{escape(name)}</code></dt><dd>{about}</dd>")
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(count: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} B"
