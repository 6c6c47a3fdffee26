"""The model (architecture, parameters, input, the cost of training it), and how to reproduce the run."""

import importlib.metadata
import platform
import shlex

from vitrail._version import __version__
from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import TEACHER, WEIGHTS, Bundle
from vitrail.data.sources.in_memory import TITLES, recorded_kind
from vitrail.io import file_digest
from vitrail.models.stages import cost
from vitrail.models.variants import variant_name
from vitrail.reports.page import Section, absent, paragraph
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.run_record import BEST, Record
from vitrail.text import byte_size, duration, plural
from vitrail.training.run_folder import METRICS, RECIPE, SPLIT, TEST_PREDICTIONS
from vitrail.training.sessions import read_sessions

TITLE = "Model"
STEMS = {
    "conv": "patch convolution (stride equal to the kernel)",
    "linear": "patches, flattened and projected",
    "linear_norm": "patches, flattened, normalised and projected",
    "conv_stem": "early convolutions",
    "resnet": "a ResNet",
}
POOLS = {
    "cls": "the class token",
    "mean": "the mean of the tokens",
    "map": "attention pooling",
    "none": "every token separately",
    "patches": "every patch separately",
}


# ── model ──


def model_summary(artifacts: RunArtifacts) -> Section:
    """Return the key facts about the model and its training."""
    facts = (
        {**_architecture(artifacts.bundle), **_training(artifacts.run)}
        if artifacts.bundle is not None
        else _training(artifacts.run)
    )
    rows = "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in facts.items())
    missing = absent(artifacts.why_no_bundle) if artifacts.bundle is None else ""
    return Section("model", "Model", TITLE, f'{missing}<dl class="facts">{rows}</dl>')


def _architecture(bundle: Bundle) -> dict[str, str]:
    config, preprocess = bundle.model.config, bundle.preprocess
    variant = variant_name(config)
    height, width = config.image_size
    rows, columns = config.grid
    patch = "×".join(map(str, config.patch_size))
    special = config.tokens - config.patches
    compute = cost(config)
    kind, mlp = ("Vision Transformer", f", MLP of {config.mlp_hidden:,}") if config.depth else ("Convolutional", "")
    return {
        "Architecture": f"{kind}{f' {variant}' if variant else ''}: {config.encoder_text}{mlp}",
        "Stem and pooling": f"{STEMS[config.stem]}; position: {config.position.replace('_', ' ')}; "
        f"{'the head reads' if config.classes else 'the features are'} {POOLS[config.pool]}",
        "Parameters": f"{compute.parameters:,}",
        "Compute": f"{compute.flops / 1e9:.3g} GFLOPs per image",
        "Input": f"{height}×{width} pixels, {plural(config.channels, 'channel')}; {rows}×{columns} patches of {patch}"
        + (f" and {plural(special, 'special token')}" if special else ""),
        "Preprocessing": f"{preprocess.resize}, {preprocess.interpolation}; mean {_numbers(preprocess.mean)}, std "
        f"{_numbers(preprocess.std)}",
    }


def _training(run: Record) -> dict[str, str]:
    done, planned = run.steps
    trained = run.provenance.get("trained")
    best = trained.get("step") if isinstance(trained, dict) else None
    facts = {"Initialisation": str(run.provenance.get("source") or "unknown")}
    if isinstance(teacher := run.provenance.get(TEACHER), dict):
        facts["Teacher"] = str(teacher.get("name"))
    epochs = max((row["epoch"] for row in run.rows if "epoch" in row), default=None)
    steps = f"{plural(done, 'step')}" + (f" of {planned:,}" if planned and planned != done else "")
    batch = run.recipe.get("batch")
    facts["Training"] = ", ".join(
        [
            steps,
            *([f"{epochs:.4g} epochs"] if epochs is not None else []),
            *([f"batch size {batch:,}"] if isinstance(batch, int) else []),
            *([f"best checkpoint at step {best:,}"] if isinstance(best, int) and run.method is None else []),
        ]
    )
    return {**facts, **_effort(run, done)}


def _effort(run: Record, done: int) -> dict[str, str]:
    sessions = read_sessions(run.folder)
    if not sessions:
        return {"Time and hardware": "not recorded by this run"}
    # A killed process records no session, so these may be only some of the steps.
    recorded = sum(one.last_step - one.first_step for one in sessions)
    total = sum(one.seconds for one in sessions)
    time = (
        duration(total)
        if recorded >= done
        else f"more than {duration(total)} ({recorded:,} of {done:,} steps recorded)"
    )
    resumed = f" in {len(sessions)} sessions" if len(sessions) > 1 else ""
    machines = dict.fromkeys(
        f"{plural(one.ranks, 'rank')} on {one.device}" if one.ranks > 1 else one.device for one in sessions
    )
    precisions = dict.fromkeys(one.precision for one in sessions)
    return {
        "Time": f"{time}{resumed}, including data loading, validation and saving",
        "Hardware": "; ".join(machines),
        "Precision": ", ".join(precisions),
        "Software": ", ".join(dict.fromkeys(f"vitrail {one.vitrail} with torch {one.torch}" for one in sessions)),
    }


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


# ── reproduction ──

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
    if kind := recorded_kind(run.data):
        body += paragraph(f"DATA is {TITLES[kind]} with the fingerprint {run.data.partition(':')[2]}, from Python.")
    if pretrained:
        source = run.provenance.get("source")
        named = f" ({source})" if source else ""
        body += paragraph(f"MODEL is the pretrained model{named} with the checksum {pretrained}.")
    if taught_by := run.origin.get("teacher"):
        teacher = run.provenance.get(TEACHER)
        named = f" ({teacher.get('name')})" if isinstance(teacher, dict) else ""
        body += paragraph(f"TEACHER is the teacher{named} with the checksum {taught_by}.")
    expect = "metrics within the intervals above" if run.method is None else "slightly different metrics"
    body += paragraph(
        "With the same versions, machine and number of threads, the weights are bit-identical; otherwise expect "
        f"{expect}."
    )
    body += f"<h3>Versions used for this report</h3>{_versions(run)}"
    body += f"<h3>Files of the run and their SHA-256</h3>{_files(run)}"
    body += f"<details><summary>Full recipe</summary><pre><code>{escape(run.recipe_text)}</code></pre></details>"
    return Section("reproduce", "Reproduce", "Reproduce this run", body)


def command(run: Record) -> str:
    """Return the command that reproduces a run."""
    words = [
        "vitrail",
        "train" if run.method is None else "pretrain",
        "DATA" if recorded_kind(run.data) else run.data or "DATA",
        "--recipe",
        str(run.folder / RECIPE),
    ]
    if run.origin.get("pretrained"):
        words += ["--from", "MODEL"]
    if run.origin.get("teacher"):
        words += ["--teacher", "TEACHER"]
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


def _files(run: Record) -> str:
    rows = []
    for name, what in FILES.items():
        if name == TEST_PREDICTIONS and run.method is not None:  # it predicts nothing
            continue
        path = run.folder / name
        if path.is_file():
            try:
                checksum = file_digest(path)
            except OSError as error:
                checksum = f"cannot be read: {error.strerror or error}"
            about = f"{escape(what)}, {byte_size(path.stat().st_size)}<br><code>{escape(checksum)}</code>"
        else:
            why = "missing; pip install 'vitrail[train]' adds it" if name == TEST_PREDICTIONS else "missing"
            about = f'{escape(what)}<br><span class="quiet">{escape(why)}</span>'
        rows.append(f"<dt><code>{escape(name)}</code></dt><dd>{about}</dd>")
    return f'<dl class="facts">{"".join(rows)}</dl>'
