"""The model: architecture, parameters, input; and the cost of training it."""

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.models.cost import cost
from vitrail.models.variants import variant_name
from vitrail.reports.formatting import duration, plural
from vitrail.reports.page import Section, absent
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.run_record import Record
from vitrail.training.sessions import read_sessions

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
}
TITLE = "Model"


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
    return {
        "Architecture": f"Vision Transformer{f' {variant}' if variant else ''}: {plural(config.depth, 'block')} of "
        f"width {config.width:,} with {plural(config.heads, 'head')}, MLP of {config.mlp_hidden:,}",
        "Stem and pooling": f"{STEMS[config.stem]}; position: {config.position.replace('_', ' ')}; the head reads "
        f"{POOLS[config.pool]}",
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
    epochs = max((row["epoch"] for row in run.rows if "epoch" in row), default=None)
    steps = f"{plural(done, 'step')}" + (f" of {planned:,}" if planned and planned != done else "")
    batch = run.recipe.get("batch")
    facts["Training"] = ", ".join(
        [
            steps,
            *([f"{epochs:.4g} epochs"] if epochs is not None else []),
            *([f"batch size {batch:,}"] if isinstance(batch, int) else []),
            *([f"best checkpoint at step {best:,}"] if isinstance(best, int) else []),
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
