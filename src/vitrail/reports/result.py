"""The result: the headline of a report and its metrics."""

from typing import NamedTuple

import numpy as np

from vitrail.charts.svg import escape
from vitrail.metrics.classification import most_confused
from vitrail.reports.page import Section, absent, loss_span, name, paragraph, span
from vitrail.reports.run_record import Record, RunResult
from vitrail.text import as_percent, plural
from vitrail.training.run_folder import best_row

NARROW = 0.03
"""An interval with a larger half-width than this gets a warning."""


class Number(NamedTuple):
    """A metric with its interval and an explanation."""

    name: str
    value: str
    span: str
    explanation: str


def head(run: Record) -> str:
    """Return the result as the headline, with a summary and warnings."""
    above = f'<p class="over-title">Report on <strong>{escape(run.name)}</strong></p>'
    if run.result is None:
        return f'{above}<h1>{escape(_unfinished_title(run))}</h1><p class="lead">{escape(run.why_no_result)}</p>'
    result = run.result
    what = "training images" if result.on_training else "held-out images"
    noun = what if result.images != 1 else what.removesuffix("s")
    title = f"{as_percent(result.top1)} accuracy on {result.images:,} {noun}"
    return f'{above}<h1>{escape(title)}</h1><p class="lead">{_lead(result)}</p>{_warnings(run, result)}'


def result(run: Record) -> Section:
    """Return the section with the headline metrics and their intervals."""
    if run.result is None:
        return Section("result", "Result", "Result", absent(run.why_no_result) + _so_far(run))
    cards = "".join(
        f'<div><dt>{escape(one.name)}</dt><dd><div class="value">{escape(one.value)}</div>'
        f'<div class="span">{escape(one.span)}</div><div class="says">{escape(one.explanation)}</div></dd></div>'
        for one in numbers(run.result)
    )
    bad = run.result.bad
    skipped = paragraph(f"{plural(len(bad), 'image')} could not be read and were skipped.") if bad else ""
    return Section("result", "Result", "Result", f'<dl class="numbers">{cards}</dl>{skipped}')


def numbers(result: RunResult) -> list[Number]:
    """Return the headline metrics."""
    top5 = [
        Number(
            "Top-5 accuracy",
            as_percent(result.top5),
            f"95% interval {span(result.top5_interval)}" if result.top5_interval else "",
            "How often the true class is among the five most probable.",
        )
    ]
    return [
        Number(
            "Accuracy", as_percent(result.top1), f"95% interval {span(result.top1_interval)}",
            "The fraction of correct predictions, with its Wilson interval.",
        ),
        *(top5 if result.top5 is not None else []),
        Number(
            "Macro F1", as_percent(result.macro_f1), f"95% interval {span(result.macro_f1_interval)}",
            "The mean F1 (of precision and recall) over classes, whatever their size.",
        ),
        Number(
            "Balanced accuracy", as_percent(result.balanced_accuracy),
            f"95% interval {span(result.balanced_accuracy_interval)}", "The mean recall over classes.",
        ),
        Number(
            "Baselines", as_percent(result.baselines.majority), f"chance {as_percent(result.baselines.chance)}",
            f"The accuracy of always predicting {result.baselines.majority_class}, and of a uniform guess.",
        ),
        Number(
            "Log loss", f"{result.loss:.3f}", f"95% interval {loss_span(result.loss_interval)}",
            "Cross-entropy of the true classes; 0 is perfect, and confident mistakes cost the most.",
        ),
        Number(
            "Calibration error", as_percent(result.ece), "",
            f"The mean gap between confidence and accuracy (ECE, {len(result.reliability)} bins).",
        ),
    ]  # fmt: skip


def _lead(result: RunResult) -> str:
    low, high = result.top1_interval
    ends = f"<strong>{as_percent(low)}</strong> to <strong>{as_percent(high)}</strong>"
    base = result.baselines
    sentences = [
        f"The 95% confidence interval is {ends}.",
        f"Always predicting {name(base.majority_class)} gives {as_percent(base.majority)}, chance "
        f"{as_percent(base.chance)}.",
    ]
    weakest = result.weakest_first
    if result.top1 == 1:
        sentences.append("Every prediction is correct.")
    elif weakest:
        weakest_name = f"<strong>{name(weakest[0].name)}</strong>"
        sentences.append(f"The weakest class is {weakest_name}, with a recall of {as_percent(weakest[0].recall)}.")
        sentences.append(_worst_confusion(result))
    return " ".join(sentence for sentence in sentences if sentence)


def _worst_confusion(result: RunResult) -> str:
    pairs = most_confused(np.array(result.confusion, np.int64), 1)
    if not pairs or pairs[0].images < 2:
        return ""
    true, predicted = (name(result.classes[place]) for place in (pairs[0].true, pairs[0].predicted))
    return f"The most frequent confusion is {true} predicted as {predicted} ({plural(pairs[0].images, 'time')})."


def _warnings(run: Record, result: RunResult) -> str:
    sentences = [f"{text[:1].upper()}{text[1:]}." for text in result.warnings]
    if result.on_training:
        sentences.append(
            "No images were held out, so this is the accuracy on the training images and says nothing about new "
            "images. Set data.val and data.test above 0 to get a result."
        )
    elif run.selected_on_test_images:
        sentences.append(
            "The run has no test split: the best checkpoint was selected on these same images, so expect slightly "
            "lower accuracy on new ones."
        )
    low, high = result.top1_interval
    if not result.on_training and high - low > 2 * NARROW:
        sentences.append(
            f"The interval is wide because there are only {plural(result.images, 'image')}; more held-out images would "
            "narrow it."
        )
    return "".join(paragraph(text, "warn") for text in sentences)


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
        return paragraph("The run has not been validated yet, either.")
    return paragraph(
        f"So far the checkpoint of step {best['step']:,} is kept, with a validation accuracy of "
        f"{as_percent(best['val_top1'])}. The validation split selects the checkpoint, so this is not a final result."
    )
