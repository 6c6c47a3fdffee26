"""The result: the sentence at the head of a report, and the numbers below it."""

from typing import NamedTuple

import numpy as np

from vitrail.charts.svg import escape
from vitrail.metrics.classification import most_confused
from vitrail.reports.formatting import loss_span, many, share, span
from vitrail.reports.page import Section, absent, name, paragraph
from vitrail.reports.run_record import Record, RunResult
from vitrail.training.run_folder import best_row

NARROW = 0.03
"""An interval wider than this share of either side is worth a word."""


class Number(NamedTuple):
    """A number with its name, how sure it is, and what it says."""

    name: str
    value: str
    span: str
    says: str


def head(run: Record) -> str:
    """Return the result as the headline, and what has to be known with it."""
    above = f'<p class="over-title">Report on <strong>{escape(run.name)}</strong></p>'
    if run.result is None:
        return f'{above}<h1>{escape(_unfinished_title(run))}</h1><p class="lead">{escape(run.why_no_result)}</p>'
    result = run.result
    what = "training images" if result.on_training else "held-out images"
    noun = what if result.images != 1 else what.removesuffix("s")
    title = f"Right on {share(result.top1)} of {result.images:,} {noun}"
    return f'{above}<h1>{escape(title)}</h1><p class="lead">{_lead(result)}</p>{_warnings(run, result)}'


def result(run: Record) -> Section:
    """Return the headline numbers with their intervals."""
    if run.result is None:
        return Section("result", "Result", "Result", absent(run.why_no_result) + _so_far(run))
    cards = "".join(
        f'<div><dt>{escape(one.name)}</dt><dd><div class="value">{escape(one.value)}</div>'
        f'<div class="span">{escape(one.span)}</div><div class="says">{escape(one.says)}</div></dd></div>'
        for one in numbers(run.result)
    )
    bad = run.result.bad
    left_out = paragraph(f"{many(len(bad), 'image')} could not be read and are not counted.") if bad else ""
    return Section("result", "Result", "Result", f'<dl class="numbers">{cards}</dl>{left_out}')


def numbers(result: RunResult) -> list[Number]:
    """Return the headline numbers."""
    top5 = [
        Number(
            "Among the first five",
            share(result.top5),
            f"95% interval {span(result.top5_interval)}" if result.top5_interval else "",
            "How often the right class is among the five likeliest.",
        )
    ]
    return [
        Number(
            "Accuracy", share(result.top1), f"95% interval {span(result.top1_interval)}",
            "The share of right answers, and where it would lie with very many images (Wilson).",
        ),
        *(top5 if result.top5 is not None else []),
        Number(
            "Macro F1", share(result.macro_f1), f"95% interval {span(result.macro_f1_interval)}",
            "Precision and recall joined, every class counting alike, however few images it has.",
        ),
        Number(
            "Balanced accuracy", share(result.balanced_accuracy),
            f"95% interval {span(result.balanced_accuracy_interval)}", "The mean of the classes' recalls.",
        ),
        Number(
            "Baselines", share(result.baselines.majority), f"chance {share(result.baselines.chance)}",
            f"The accuracy of always predicting {result.baselines.majority_class}, and of a uniform guess.",
        ),
        Number(
            "Log loss", f"{result.loss:.3f}", f"95% interval {loss_span(result.loss_interval)}",
            "How surprising the right classes are to the model; 0 is perfect, and sure mistakes cost most.",
        ),
        Number(
            "Calibration error", share(result.ece), "",
            f"How far certainty is from how often it is right, on average (ECE, {len(result.reliability)} bins).",
        ),
    ]  # fmt: skip


def _lead(result: RunResult) -> str:
    low, high = result.top1_interval
    ends = f"<strong>{share(low)}</strong> and <strong>{share(high)}</strong>"
    base = result.baselines
    said = [
        f"With 95% confidence the true share lies between {ends}.",
        f"Always predicting {name(base.majority_class)} gives {share(base.majority)}, chance {share(base.chance)}.",
    ]
    weakest = result.weakest_first
    if result.top1 == 1:
        said.append("No image was mistaken.")
    elif weakest:
        called = f"<strong>{name(weakest[0].name)}</strong>"
        said.append(f"The weakest class is {called}, of which {share(weakest[0].recall)} are recognised.")
        said.append(_worst_confusion(result))
    return " ".join(part for part in said if part)


def _worst_confusion(result: RunResult) -> str:
    found = most_confused(np.array(result.confusion, np.int64), 1)
    if not found or found[0].images < 2:
        return ""
    true, predicted = (name(result.classes[place]) for place in (found[0].true, found[0].predicted))
    return f"Most often, {true} was taken for {predicted} ({many(found[0].images, 'time')})."


def _warnings(run: Record, result: RunResult) -> str:
    said = [f"{text[:1].upper()}{text[1:]}." for text in result.warnings]
    if result.on_training:
        said.append(
            "No image was held out, so this says how well the model knows what it was taught, and nothing about new "
            "images. Leave data.val and data.test above 0 for a result."
        )
    elif run.chosen_on_these:
        said.append(
            "There is no test split: the best moment of the run was selected on these same images, so expect a little "
            "less on new ones."
        )
    low, high = result.top1_interval
    if not result.on_training and high - low > 2 * NARROW:
        said.append(
            f"The interval is wide because {many(result.images, 'image')} are few; more held-out images would "
            "make the number surer."
        )
    return "".join(paragraph(text, "warn") for text in said)


def _unfinished_title(run: Record) -> str:
    done, planned = run.steps
    if run.why_no_result.startswith("result.json"):
        return "The result of this run cannot be shown"
    if not done:
        return "This run has not taken a step yet"
    return f"Not finished: step {done:,}" + (f" of {planned:,}" if planned else "")


def _so_far(run: Record) -> str:
    best = best_row(run.rows)
    if best is None:
        return paragraph("The validation split has not been measured yet, either.")
    return paragraph(
        f"So far the checkpoint of step {best['step']:,} is kept, with {share(best['val_top1'])} on the validation "
        "split. This split chooses the checkpoint, so this is not a result."
    )
