"""The page on pretraining: fine-tuning with few and many labels, transfer, LoRA and a teacher."""

from statistics import fmean
from typing import Any

from studies.tables import Study, between, by_name, cost, estimate, learning_rate, percent, read, table, test_accuracies

from vitrail.charts.lines import Series, line_chart
from vitrail.metrics.intervals import t_interval

NAME = "pretraining"
METHODS = ("mae", "dino", "masked-patches")
LABELS = {"labels-1": ("1%", 1_010), "labels-10": ("10%", 9_696), "labels-100": ("100%", 95_950)}
"""The candidates of a sweep over labels as text, and their labelled images."""
LORA = {"full": "all weights", "lora-attention": "LoRA on `qkv` and `proj`", "lora-all": "LoRA on all four matrices"}


def pretraining() -> Study:
    """Accuracy after fine-tuning, from each method and from scratch."""
    scratch = read(NAME, "labels-scratch.json")["means"]
    long = by_name(sweep("labels-long"))["labels-100"]
    tuned = {method: by_name(sweep(f"labels-{method}")) for method in METHODS}
    accuracies = {method: {key: test_accuracies(tuned[method][key]) for key in LABELS} for method in METHODS}
    rows = [
        ["from scratch", *(f"{percent(scratch[key])} (three seeds)" for key in LABELS)],
        *([method, *(estimate(accuracies[method][key]) for key in LABELS)] for method in METHODS),
        ["from scratch, 13,000 steps", "–", "–", estimate(test_accuracies(long))],
    ]
    rates = [[method, *(learning_rate(tuned[method][key]) for key in LABELS)] for method in METHODS]
    header = [f"{share} of the labels: {images:,}" for share, images in LABELS.values()]
    pieces = {
        "table": table(["test accuracy, %", *header], rows),
        "rates": table(["learning rate", *header], rates),
        "probes": probes(),
        "pets": pets(),
        "lora": lora(),
        "teacher": teacher(),
        "cost": cost(*(sweep(name) for name in (*(f"labels-{method}" for method in METHODS), "labels-long"))),
    }
    return Study(pieces, {"pretraining.svg": chart(scratch, accuracies, test_accuracies(long))})


def sweep(name: str) -> Any:
    """Read the results of one of the sweeps."""
    return read(NAME, f"{name}.json")


def chart(scratch: dict[str, float], accuracies: dict[str, dict[str, list[float]]], longer: list[float]) -> str:
    """Draw accuracy against the number of labelled images; only sweeps with three seeds have intervals."""
    images = [count for _, count in LABELS.values()]
    series = [Series("from scratch (three seeds)", images, [scratch[key] for key in LABELS], 1, marks=True)]
    for colour, method in enumerate(METHODS, start=2):
        values = [accuracies[method][key] for key in LABELS]
        spans = [interval for interval in map(t_interval, values) if interval is not None]
        seeds = "three seeds" if len(spans) == len(images) else "one seed"
        means = [fmean(each) for each in values]
        series.append(Series(f"{method} ({seeds})", images, means, colour, marks=True, intervals=spans))
    series.append(Series("from scratch, 13,000 steps (one seed)", images[-1:], longer, 5, marks=True))
    return line_chart(
        series, title="Test accuracy on Tiny-ImageNet against the number of labelled images", x_label="labelled images",
        x_log=True, x_unit="integer", y_unit="percent", y_label="accuracy", width=640, height=380,
    )  # fmt: skip


def probes() -> str:
    """Return how well features classify without fine-tuning."""
    rows = []
    for method, results in read(NAME, "probes.json").items():
        probed = [results[probe] for probe in ("knn", "linear")]
        rows.append([method, *(between(one["accuracy"], *one["interval"]) for one in probed)])
    return table(["test accuracy, %", "20 nearest neighbours", "linear probe"], rows)


def pets() -> str:
    """Return the accuracy on Pets, from scratch and after pretraining."""
    starts = {"from scratch": "scratch", "mae": "mae", "dino": "dino"}
    results = {title: by_name(sweep(f"pets-{start}"))["pets"] for title, start in starts.items()}
    rows = [[title, estimate(test_accuracies(one)), learning_rate(one)] for title, one in results.items()]
    return table(["Pets", "test accuracy, %", "learning rate"], rows)


def lora() -> str:
    """Return the accuracy on Pets of LoRA and of full fine-tuning."""
    results = by_name(sweep("pets-lora"))
    rows = [
        [title, estimate(test_accuracies(results[key])), learning_rate(results[key])] for key, title in LORA.items()
    ]
    return table(["trained, from mae", "test accuracy, %", "learning rate"], rows)


def teacher() -> str:
    """Return the accuracy of a student alone and with a teacher."""
    titles = {"student": "alone", "student-distilled": "with a teacher"}
    rows = []
    for name, title in titles.items():
        result = sweep(name)
        seconds = result["seconds"] / len(result["seeds"])
        rows.append([title, estimate(test_accuracies(by_name(result)["student"])), f"{seconds:.0f} s"])
    return table(["student", "test accuracy, %", "a run"], rows)
