"""Sections that only pretraining runs have: what to do with the model, and the settings with their reasons."""

import shlex

from vitrail.charts.svg import escape
from vitrail.reports.page import Section, paragraph
from vitrail.reports.run_record import BEST, Record, settings
from vitrail.text import plural

USES = (
    ("Fine-tune it with the labels you have:", "train", "LABELLED/ --from {model}"),
    ("Measure how well its features separate classes, without fine-tuning:", "probe", "{model} LABELLED/"),
    ("Write the features of images to a file, to search or to cluster them:", "embed", "{model} IMAGES/"),
    ("Show what it attends to:", "explain", "{model} IMAGES/ --method rollout"),
)
"""What a pretrained model is for, and the command."""
LISTED = ("batch", "epochs", "steps", "optimizer", "schedule", "averaging", "augmentation")
"""The tables and settings of a recipe that matter most, besides the method's own."""


def next_steps(run: Record) -> Section:
    """Return the commands that use the pretrained model."""
    model = shlex.quote(str(run.folder / BEST))
    lines = "".join(
        f'<p>{escape(text)}</p><pre class="wrap"><code>'
        f"{escape(f'vitrail {command} {rest.format(model=model)}')}</code></pre>"
        for text, command, rest in USES
    )
    about = paragraph(
        "The model is an encoder without a head. The decoder or teacher that pretrained it is not part of the bundle."
    )
    return Section("use", "Next", "What to do next", about + lines)


def chosen_settings(run: Record) -> Section:
    """Return the defaults that were chosen for the data, with their reasons, and the recipe's own settings."""
    rows = "".join(
        f"<dt><code>{escape(one.field)}</code></dt><dd>{escape(one.value)}<br>"
        f'<span class="quiet small">{escape(one.reason)}</span></dd>'
        for one in run.defaults
    )
    resolved = {one.field for one in run.defaults}
    flat = settings({name: run.recipe[name] for name in (*LISTED, run.method or "") if name in run.recipe})
    others = "".join(
        f"<dt><code>{escape(name)}</code></dt><dd>{escape(_shown(value))}</dd>"
        for name, value in flat.items()
        if name not in resolved
    )
    body = ""
    if rows:
        text = f"The recipe left {plural(len(run.defaults), 'setting')} unset. The run chose values for these images:"
        body += f'{paragraph(text)}<dl class="facts">{rows}</dl>'
    summary = "Other settings of the method, the schedule, the optimizer and the augmentation"
    body += f'<details><summary>{summary}</summary><dl class="facts">{others}</dl></details>'
    return Section("settings", "Settings", "Settings", body)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
