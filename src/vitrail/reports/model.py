"""What the model is: architecture, parameters, input; and what training it took."""

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import Bundle
from vitrail.models.cost import cost
from vitrail.models.variants import variant_name
from vitrail.reports.formatting import duration, many
from vitrail.reports.page import Section, absent
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.run_record import Record
from vitrail.training.sessions import read_sessions

STEMS = {
    "conv": "a convolution whose stride is its kernel",
    "linear": "patches, flattened and projected",
    "linear_norm": "patches, flattened, normalised and projected",
    "conv_stem": "early convolutions",
    "resnet": "a ResNet",
}
POOLS = {
    "cls": "the class token",
    "mean": "the mean of the tokens",
    "map": "attention pooling",
    "none": "every token for itself",
}
TITLE = "The model"


def model_summary(sight: RunArtifacts) -> Section:
    """Return what somebody asks first of a model: what it is, what goes in, what it took."""
    facts = (
        {**_architecture(sight.bundle), **_training(sight.run)} if sight.bundle is not None else _training(sight.run)
    )
    rows = "".join(f"<dt>{escape(title)}</dt><dd>{escape(said)}</dd>" for title, said in facts.items())
    missing = absent(sight.why_no_bundle) if sight.bundle is None else ""
    return Section("model", "Model", TITLE, f'{missing}<dl class="facts">{rows}</dl>')


def _architecture(bundle: Bundle) -> dict[str, str]:
    config, preprocess = bundle.model.config, bundle.preprocess
    known = variant_name(config)
    height, width = config.image_size
    rows, columns = config.grid
    patch = "×".join(map(str, config.patch_size))
    special = config.tokens - config.patches
    spent = cost(config)
    return {
        "Architecture": f"Vision Transformer{f' {known}' if known else ''}: {many(config.depth, 'block')} of width "
        f"{config.width:,} with {many(config.heads, 'head')}, MLP of {config.mlp_hidden:,}",
        "Stem and pooling": f"{STEMS[config.stem]}; position: {config.position.replace('_', ' ')}; the head reads "
        f"{POOLS[config.pool]}",
        "Parameters": f"{spent.parameters:,}",
        "Compute": f"{spent.flops / 1e9:.3g} GFLOPs an image",
        "Input": f"{height}×{width} pixels, {many(config.channels, 'channel')}; {rows}×{columns} patches of {patch}"
        + (f" and {many(special, 'more token')}" if special else ""),
        "Preprocessing": f"{preprocess.resize}, {preprocess.interpolation}; mean {_numbers(preprocess.mean)}, std "
        f"{_numbers(preprocess.std)}",
    }


def _training(run: Record) -> dict[str, str]:
    done, planned = run.steps
    trained = run.provenance.get("trained")
    best = trained.get("step") if isinstance(trained, dict) else None
    facts = {"Started from": str(run.provenance.get("source") or "not known")}
    epochs = max((row["epoch"] for row in run.rows if "epoch" in row), default=None)
    steps = f"{many(done, 'step')}" + (f" of {planned:,}" if planned and planned != done else "")
    batch = run.recipe.get("batch")
    facts["Training"] = ", ".join(
        [
            steps,
            *([f"{epochs:.4g} epochs"] if epochs is not None else []),
            *([f"batches of {batch:,}"] if isinstance(batch, int) else []),
            *([f"best checkpoint at step {best:,}"] if isinstance(best, int) else []),
        ]
    )
    return {**facts, **_effort(run, done)}


def _effort(run: Record, done: int) -> dict[str, str]:
    sessions = read_sessions(run.folder)
    if not sessions:
        return {"Time and hardware": "not noted by this run"}
    # A process that was killed could not note anything: then these are only some of the steps.
    noted = sum(one.last_step - one.first_step for one in sessions)
    whole = sum(one.seconds for one in sessions)
    time = duration(whole) if noted >= done else f"more than {duration(whole)} ({noted:,} of {done:,} steps noted)"
    resumed = f" in {len(sessions)} sessions" if len(sessions) > 1 else ""
    machines = dict.fromkeys(
        f"{many(one.ranks, 'process', 'processes')} on {one.device}" if one.ranks > 1 else one.device
        for one in sessions
    )
    precisions = dict.fromkeys(one.precision for one in sessions)
    return {
        "Time": f"{time}{resumed}, with reading, validation and saving",
        "Hardware": "; ".join(machines),
        "Precision": ", ".join(precisions),
        "Software": ", ".join(dict.fromkeys(f"vitrail {one.vitrail} with torch {one.torch}" for one in sessions)),
    }


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
