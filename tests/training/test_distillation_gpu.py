"""Teachers on a GPU: the fused path gives the same targets, and a compiled student learns from them."""

from pathlib import Path

import pytest
import torch
from tests.support import tiny_models
from tests.support.peers import relative_error

import vitrail
from vitrail.data.batches import Batch
from vitrail.training.pretraining.distill import FeatureTeacher
from vitrail.training.teacher import ClassTeacher, Teacher

pytestmark = pytest.mark.gpu


def batch(device: str) -> Batch:
    pixels = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = Batch(pixels, torch.zeros(8), torch.arange(8), torch.ones(8), torch.zeros(8, 4, dtype=torch.int64))
    return made.to(torch.device(device))


def digits_teacher() -> vitrail.Bundle:
    made = tiny_models.bundle()
    made.model.reset_head(10)
    torch.nn.init.normal_(made.model.head.weight, generator=torch.Generator().manual_seed(1))
    return vitrail.Bundle(made.model, made.preprocess, tuple("0123456789"))


def test_targets_are_those_of_the_cpu() -> None:
    teacher = Teacher(digits_teacher(), "teacher")
    classes = tuple("9876543210")
    exact = ClassTeacher(teacher, classes, torch.device("cpu"), "float32", mixed=False)(batch("cpu"))
    quick = ClassTeacher(teacher, classes, torch.device("cuda"), "bf16", mixed=False)
    assert relative_error(quick(batch("cuda")).cpu(), exact) < 0.05
    features = FeatureTeacher(teacher, (2, 2), torch.device("cpu"), "float32")(batch("cpu"))
    others = FeatureTeacher(teacher, (2, 2), torch.device("cuda"), "bf16")(batch("cuda"))
    for one, other in zip(features, others, strict=True):
        assert relative_error(other.cpu(), one) < 0.05


@pytest.mark.parametrize("targets", ["soft", "hard"])
def test_a_compiled_student_learns(targets: str, tmp_path: Path) -> None:
    changes = ["steps=60", "batch=64", "evaluations=2", "compile=true", f"teacher.targets={targets}", "model.stem=conv"]
    run = vitrail.train(
        "digits", teacher=digits_teacher(), changes=changes, folder=tmp_path / "run", device="cuda", workers=0,
        quiet=True,
    )  # fmt: skip
    assert "teacher" in run.bundle.provenance
    assert "fused CUDA path, compiled" in (run.folder / "log.txt").read_text()
