"""The result: the sentence at the head of a report, and the numbers below it."""

from typing import NamedTuple

import numpy as np

from vitrail.charts.svg import escape
from vitrail.metrics.classification import most_confused
from vitrail.reports.page import Section, absent, name, paragraph
from vitrail.reports.record import Record, Verdict
from vitrail.reports.words import loss_span, many, share, span
from vitrail.training.folder import best_row

NARROW = 0.03
"""An interval wider than this share of either side is worth a word."""


class Number(NamedTuple):
    """A number with its name, how sure it is, and what it says."""

    name: str
    value: str
    span: str
    says: str


def head(run: Record) -> str:
    """Return the verdict as the headline, and what has to be known with it."""
    above = f'<p class="over-title">Report on <strong>{escape(run.name)}</strong></p>'
    if run.verdict is None:
        return f'{above}<h1>{escape(_unfinished_title(run))}</h1><p class="lead">{escape(run.why_no_verdict)}</p>'
    verdict = run.verdict
    what = "training pictures" if verdict.on_training else "held-out pictures"
    noun = what if verdict.pictures != 1 else what.removesuffix("s")
    title = f"Right on {share(verdict.top1)} of {verdict.pictures:,} {noun}"
    return f'{above}<h1>{escape(title)}</h1><p class="lead">{_lead(verdict)}</p>{_warnings(run, verdict)}'


def result(run: Record) -> Section:
    """Return the headline numbers with their intervals."""
    if run.verdict is None:
        return Section("result", "Result", "Result", absent(run.why_no_verdict) + _so_far(run))
    cards = "".join(
        f'<div><dt>{escape(one.name)}</dt><dd><div class="value">{escape(one.value)}</div>'
        f'<div class="span">{escape(one.span)}</div><div class="says">{escape(one.says)}</div></dd></div>'
        for one in numbers(run.verdict)
    )
    bad = run.verdict.bad
    left_out = paragraph(f"{many(len(bad), 'picture')} could not be read and are not counted.") if bad else ""
    return Section("result", "Result", "Result", f'<dl class="numbers">{cards}</dl>{left_out}')


def numbers(verdict: Verdict) -> list[Number]:
    """Return the headline numbers."""
    top5 = [
        Number(
            "Among the first five",
            share(verdict.top5),
            f"95% interval {span(verdict.top5_interval)}" if verdict.top5_interval else "",
            "How often the right class is among the five likeliest.",
        )
    ]
    return [
        Number(
            "Accuracy", share(verdict.top1), f"95% interval {span(verdict.top1_interval)}",
            "The share of right answers, and where it would lie with very many pictures (Wilson).",
        ),
        *(top5 if verdict.top5 is not None else []),
        Number(
            "Macro F1", share(verdict.macro_f1), f"95% interval {span(verdict.macro_f1_interval)}",
            "Precision and recall joined, every class counting alike, however few pictures it has.",
        ),
        Number(
            "Balanced accuracy", share(verdict.balanced_accuracy),
            f"95% interval {span(verdict.balanced_accuracy_interval)}", "The mean of the classes' recalls.",
        ),
        Number(
            "Baselines", share(verdict.baselines.majority), f"chance {share(verdict.baselines.chance)}",
            f"The accuracy of always predicting {verdict.baselines.majority_class}, and of a uniform guess.",
        ),
        Number(
            "Log loss", f"{verdict.loss:.3f}", f"95% interval {loss_span(verdict.loss_interval)}",
            "How surprising the right classes are to the model; 0 is perfect, and sure mistakes cost most.",
        ),
        Number(
            "Calibration error", share(verdict.ece), "",
            f"How far certainty is from how often it is right, on average (ECE, {len(verdict.reliability)} bins).",
        ),
    ]  # fmt: skip


def _lead(verdict: Verdict) -> str:
    low, high = verdict.top1_interval
    ends = f"<strong>{share(low)}</strong> and <strong>{share(high)}</strong>"
    base = verdict.baselines
    said = [
        f"With 95% confidence the true share lies between {ends}.",
        f"Always predicting {name(base.majority_class)} gives {share(base.majority)}, chance {share(base.chance)}.",
    ]
    weakest = verdict.weakest_first
    if verdict.top1 == 1:
        said.append("No picture was mistaken.")
    elif weakest:
        called = f"<strong>{name(weakest[0].name)}</strong>"
        said.append(f"The weakest class is {called}, of which {share(weakest[0].recall)} are recognised.")
        said.append(_worst_confusion(verdict))
    return " ".join(part for part in said if part)


def _worst_confusion(verdict: Verdict) -> str:
    found = most_confused(np.array(verdict.confusion, np.int64), 1)
    if not found or found[0].pictures < 2:
        return ""
    true, predicted = (name(verdict.classes[place]) for place in (found[0].true, found[0].predicted))
    return f"Most often, {true} was taken for {predicted} ({many(found[0].pictures, 'time')})."


def _warnings(run: Record, verdict: Verdict) -> str:
    said = [f"{text[:1].upper()}{text[1:]}." for text in verdict.warnings]
    if verdict.on_training:
        said.append(
            "No picture was held out, so this says how well the model knows what it was taught, and nothing about new "
            "pictures. Leave data.val and data.test above 0 for a verdict."
        )
    elif run.chosen_on_these:
        said.append(
            "There is no test part: the best moment of the run was selected on these same pictures, so expect a little "
            "less on new ones."
        )
    low, high = verdict.top1_interval
    if not verdict.on_training and high - low > 2 * NARROW:
        said.append(
            f"The interval is wide because {many(verdict.pictures, 'picture')} are few; more held-out pictures would "
            "make the number surer."
        )
    return "".join(paragraph(text, "warn") for text in said)


def _unfinished_title(run: Record) -> str:
    done, planned = run.steps
    if run.why_no_verdict.startswith("verdict.json"):
        return "The verdict of this run cannot be shown"
    if not done:
        return "This run has not taken a step yet"
    return f"Not finished: step {done:,}" + (f" of {planned:,}" if planned else "")


def _so_far(run: Record) -> str:
    best = best_row(run.rows)
    if best is None:
        return paragraph("The val part has not been measured yet, either.")
    return paragraph(
        f"So far the checkpoint of step {best['step']:,} is kept, with {share(best['val_top1'])} on the validation "
        "split. This split chooses the checkpoint, so this is not a verdict."
    )
