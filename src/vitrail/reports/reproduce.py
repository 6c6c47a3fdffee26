"""How a run can be made again: command, recipe, versions, checksums."""

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
    f"{BEST}/{WEIGHTS}": "the best model's weights",
    RECIPE: "every setting",
    SPLIT: "which image is in which split",
    METRICS: "every step, as numbers",
    TEST_PREDICTIONS: "the answer to every held-out image",
}


def reproduce(run: Record) -> Section:
    """Return all that is needed to make the run again, and to see that it came out the same."""
    pretrained = str(run.origin.get("pretrained", ""))
    body = f'<pre class="wrap"><code>{escape(command(run))}</code></pre>'
    if pretrained:
        source = run.provenance.get("source")
        named = f" ({source})" if source else ""
        body += paragraph(f"MODEL is what the run began with{named}: the weights whose checksum is {pretrained}.")
    body += paragraph(
        "With the same versions, machine and number of threads the weights come out bit for bit the same; elsewhere, "
        "as good within the intervals above."
    )
    body += f"<h3>Versions where this report was written</h3>{_versions(run)}"
    body += f"<h3>Files of the run, with their SHA-256</h3>{_files(run.folder)}"
    body += f"<details><summary>The whole recipe</summary><pre><code>{escape(run.recipe_text)}</code></pre></details>"
    return Section("reproduce", "Making it again", "Making it again", body)


def command(run: Record) -> str:
    """Return the command that makes a run again."""
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
        facts["the model was written by"] = str(written)
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{said}</dl>'


def _files(folder: Path) -> str:
    said = []
    for name, what in FILES.items():
        path = folder / name
        if path.is_file():
            try:
                checksum = _checksum(path)
            except OSError as error:
                checksum = f"cannot be read: {error.strerror or error}"
            about = f"{escape(what)}, {_size(path.stat().st_size)}<br><code>{escape(checksum)}</code>"
        else:
            why = "is not there; pip install 'vitrail[train]' adds it" if name == TEST_PREDICTIONS else "is not there"
            about = f'{escape(what)}<br><span class="quiet">{escape(why)}</span>'
        said.append(f"<dt><code>{escape(name)}</code></dt><dd>{about}</dd>")
    return f'<dl class="facts">{"".join(said)}</dl>'


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(count: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.1f} {unit}"
    return f"{count} B"
