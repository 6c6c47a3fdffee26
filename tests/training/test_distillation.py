"""Training with a teacher: losses, its preprocessing and classes, exact resume, what is recorded, what is refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tests.support import forked_commands
from tests.support.commands import run_command
from tests.support.peers import scramble
from torch import Tensor

import vitrail
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.augmentation.mixing import mix_pixels
from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays
from vitrail.errors import ConfigError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.training.defaults import resolve_defaults
from vitrail.training.distillation import Distillation, TwoHeads, hard_loss, soft_loss
from vitrail.training.optimizers import Optimizer, parameter_groups
from vitrail.training.plan import DataFacts
from vitrail.training.recipe_files import read_recipe
from vitrail.training.sweep import sweep
from vitrail.training.teacher import ClassTeacher, Teacher, TeacherImages, class_columns, opened_teacher

DIGITS = tuple("0123456789")
SMALL = ("steps=12", "batch=32", "evaluations=2", "model.width=32", "model.depth=2", "model.heads=2", "model.stem=conv",
         "precision=float32")  # fmt: skip
CPU = torch.device("cpu")


def teacher_bundle(classes: tuple[str, ...] | None = DIGITS, **options: Any) -> Bundle:
    """Return a model that is unlike the student: other size, channels, mean and std."""
    fields = {
        "image_size": 12,
        "patch_size": 4,
        "width": 24,
        "depth": 1,
        "heads": 2,
        "classes": 10 if classes is None else len(classes),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViT(ViTConfig(**{**fields, **options}))
        scramble(model)
    size = Preprocess(size=model.config.image_size, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    return Bundle(model, size.with_channels(model.config.channels), classes if model.config.classes else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved teacher."""
    return teacher_bundle().save(tmp_path_factory.mktemp("teacher") / "bundle")


def trained(teacher: Any, folder: Path, *changes: str, data: str | Path = "digits") -> vitrail.Run:
    return vitrail.train(
        data, teacher=teacher, changes=[*SMALL, *changes], folder=folder, device="cpu", workers=0, quiet=True,
        evaluate_on="val",
    )  # fmt: skip


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(max((folder / "state").glob("[0-9]*")) / "state.safetensors")


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


# ── losses ──


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_soft_loss_in_float64(temperature: float) -> None:
    student, teacher = (torch.randn(6, 5, dtype=torch.float64) * 3 for _ in range(2))
    expected = 0.0
    for own, other in zip((student / temperature).tolist(), (teacher / temperature).tolist(), strict=True):
        p, q = (np.exp(row) / np.exp(row).sum() for row in (np.array(other), np.array(own)))
        expected += float((p * np.log(p / q)).sum()) * temperature**2 / 6
    assert float(soft_loss(student, teacher, temperature)) == pytest.approx(expected, rel=1e-12)
    assert float(soft_loss(student.float(), teacher.float(), temperature)) == pytest.approx(expected, rel=1e-5)
    assert soft_loss(student.bfloat16(), teacher, temperature).dtype == torch.float64
    assert float(soft_loss(teacher, teacher, temperature)) == pytest.approx(0, abs=1e-12)


def test_the_hard_loss_takes_the_predicted_class() -> None:
    student, teacher = torch.randn(6, 5), torch.randn(6, 5)
    expected = -student.log_softmax(dim=1)[torch.arange(6), teacher.argmax(dim=1)].mean()
    assert torch.allclose(hard_loss(student, teacher), expected)


def batch(channels: int = 1, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, channels, size, size), dtype=torch.uint8, generator=generator)
    box = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 5, 7], [1, 2, 5, 7]])
    lam = torch.tensor([0.3, 0.3, 1 - 20 / 64, 1 - 20 / 64])
    return Batch(pixels, torch.tensor([3, 1, 0, 3]), torch.arange(4), lam, box)


def learner(teacher: Teacher, *changes: str) -> tuple[Distillation, ViT]:
    recipe = read_recipe("scratch-small", [*SMALL, *changes])
    facts = DataFacts(100, DIGITS, 8, grey=True)
    plan = resolve_defaults(recipe, facts, None, teacher)
    source = Arrays(np.zeros((10, 8, 8), np.uint8), np.arange(10), DIGITS)
    torch.manual_seed(0)
    model = ViT(plan.model)
    scramble(model)
    return Distillation.taught(plan, teacher, source, CPU, "float32"), model


def test_the_loss_of_one_head() -> None:
    teacher = Teacher(teacher_bundle(), "teacher")
    made, model = learner(teacher, "teacher.weight=0.3", "teacher.temperature=2", "objective.label_smoothing=0")
    assert made.module(model) is model is made.kept(model)
    images = batch()
    logits = model(images.pixels.float() / 127.5 - 1)
    taught = teacher.bundle.model.eval()(TeacherImages(teacher, mixed=False)(images))
    loss, correct = made.loss(logits, images)
    expected = 0.7 * F.cross_entropy(logits, images.labels) + 0.3 * soft_loss(logits, taught, 2.0)
    assert torch.allclose(loss, expected)
    assert int(correct) == int((logits.argmax(dim=1) == images.labels).sum())
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.bundle.model.parameters())


def test_the_heads_of_a_distillation_token_learn_from_label_and_teacher() -> None:
    """As DeiT: each head has its own target, and the prediction is the mean."""
    teacher = Teacher(teacher_bundle(), "teacher")
    made, model = learner(teacher, "teacher.targets=hard", "objective.label_smoothing=0")
    module = made.module(model)
    assert isinstance(module, TwoHeads)
    assert made.kept(module) is model
    images = batch()
    pixels = images.pixels.float() / 127.5 - 1
    by_label, by_teacher = module(pixels)
    model.eval()
    assert torch.allclose((by_label + by_teacher) / 2, model(pixels), atol=1e-6)
    predicted = teacher.bundle.model.eval()(TeacherImages(teacher, mixed=False)(images)).argmax(dim=1)
    loss, correct = made.loss((by_label, by_teacher), images)
    expected = 0.5 * F.cross_entropy(by_label, images.labels) + 0.5 * F.cross_entropy(by_teacher, predicted)
    assert torch.allclose(loss, expected)
    assert int(correct) == int((model(pixels).argmax(dim=1) == images.labels).sum())


def test_layer_decay_and_muon_know_the_blocks_inside_two_heads() -> None:
    model = ViT(ViTConfig(image_size=8, patch_size=4, width=16, depth=2, heads=2, distillation_token=True))
    for config in (Optimizer(lr=1e-3, layer_decay=0.5), Optimizer(kind="muon", lr=1e-3)):
        plain, inside = parameter_groups(model, config), parameter_groups(TwoHeads(model), config)
        assert [group["name"] for group in plain] == [group["name"] for group in inside]
        assert [len(group["params"]) for group in plain] == [len(group["params"]) for group in inside]


# ── the teacher's images and classes ──


@pytest.mark.parametrize(("student", "channels"), [(1, 3), (3, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_teacher_sees_the_same_image_through_its_own_preprocessing(
    student: int, channels: int, mixed: bool
) -> None:
    bundle = teacher_bundle(channels=channels)
    images = batch(student)
    seen = TeacherImages(Teacher(bundle, "teacher"), mixed=mixed)(images)
    pixels = images.pixels.double()
    if mixed:
        pixels = mix_pixels(pixels, images.lam, images.box)
    if student != channels:
        grey = (pixels * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)
        pixels = pixels.expand(-1, 3, -1, -1) if channels == 3 else grey
    pixels = F.interpolate(pixels, (12, 12), mode="bilinear")
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (bundle.preprocess.mean, bundle.preprocess.std))
    assert torch.allclose(seen.double(), (pixels / 255 - mean) / std, atol=1e-5)


def test_resizing_down_is_that_of_image_files() -> None:
    """Antialiased, as the preprocessing of the teacher resizes a file."""
    teacher = Teacher(teacher_bundle(), "teacher")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    stored = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    images = Batch(stored, torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, 4))
    seen, expected = TeacherImages(teacher, mixed=False)(images)[0], teacher.bundle.preprocess(Image.fromarray(pixels))
    assert torch.allclose(seen, expected, atol=1.1 / 255 / 0.2)  # files are rounded to 8 bits in each direction


def test_classes_are_matched_by_name() -> None:
    order = tuple("3120587694")
    one, other = teacher_bundle(), teacher_bundle(order)
    columns = [DIGITS.index(name) for name in order]
    with torch.no_grad():
        other.model.head.weight.copy_(one.model.head.weight[columns])
        other.model.head.bias.copy_(one.model.head.bias[columns])
    logits = [
        ClassTeacher(Teacher(bundle, "teacher"), DIGITS, CPU, "float32", mixed=False)(batch())
        for bundle in (one, other)
    ]
    assert torch.equal(*logits)
    assert class_columns(Teacher(other, "teacher"), DIGITS) == tuple(map(order.index, DIGITS))


def test_the_teacher_is_not_changed() -> None:
    bundle = teacher_bundle().model.train(), teacher_bundle()
    ClassTeacher(
        Teacher(Bundle(bundle[0], bundle[1].preprocess, DIGITS), "teacher"), DIGITS, CPU, "float32", mixed=False
    )
    assert bundle[0].training
    assert all(parameter.requires_grad for parameter in bundle[0].parameters())


# ── runs ──


@pytest.fixture(scope="module", params=["soft", "hard"])
def straight(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, trained(folder, tmp_path_factory.mktemp("run") / "run", f"teacher.targets={request.param}")


def test_what_a_run_records(straight: tuple[str, vitrail.Run], folder: Path) -> None:
    targets, run = straight
    recipe = read_recipe(run.folder / "recipe.toml")
    assert recipe.teacher is not None
    assert recipe.teacher.targets == targets
    digest = Teacher(teacher_bundle(), "").digest
    assert json.loads((run.folder / "origin.json").read_text())["teacher"] == digest
    assert vitrail.load(run.folder / "best").provenance["teacher"] == {"name": str(folder), "digest": digest}
    assert f"- Teacher: {folder} ({digest})" in (run.folder / "best" / "README.md").read_text()
    assert run.bundle.model.config.distillation_token is (targets == "hard")
    log = (run.folder / "log.txt").read_text()
    assert f"teacher {folder}: eager, float32" in log or f"teacher {folder}: packed" in log
    teacher = {name for name, tensor in state(run.folder).items() if tensor.shape[-1:] == (24,)}
    assert teacher == set()  # its width is in no training state


def test_inspect_shows_the_teacher(
    straight: tuple[str, vitrail.Run],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    done = run_command(monkeypatch, capsys, "inspect", straight[1].folder / "best")
    assert str(folder) in done.out


def test_resumed_exactly(
    straight: tuple[str, vitrail.Run], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, run = straight
    made, taken = Distillation.loss, []

    def stopping(self: Distillation, *arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 9:
            raise KeyboardInterrupt
        return made(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "loss", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(folder, tmp_path / "run", f"teacher.targets={targets}")
    trained(folder, tmp_path / "run", f"teacher.targets={targets}")  # from step 6, the last validation
    actual, expected = state(tmp_path / "run"), state(run.folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.slow
def test_reports_name_the_teacher(folder: Path, tmp_path: Path) -> None:
    short = [*SMALL, "steps=2", "evaluations=1"]
    runs = {
        name: vitrail.train(
            "digits", teacher=teacher, changes=short, folder=tmp_path / name, device="cpu", workers=0, quiet=True
        )
        for name, teacher in {"taught": folder, "alone": None}.items()
    }
    digest = Teacher(teacher_bundle(), "").digest
    page = (runs["taught"].folder / "report.html").read_text(encoding="utf-8")
    assert "--teacher TEACHER" in page
    assert f"<dt>Teacher</dt><dd>{folder}</dd>" in page
    assert f"TEACHER is the teacher ({folder}) with the checksum {digest}." in page
    assert "TEACHER" not in (runs["alone"].folder / "report.html").read_text(encoding="utf-8")
    both = vitrail.report(runs["taught"].folder, runs["alone"].folder).read_text(encoding="utf-8")
    assert f"{folder} ({digest[:8]})" in both


def test_another_teacher_is_refused(straight: tuple[str, vitrail.Run]) -> None:
    targets, run = straight
    other = teacher_bundle()
    other.preprocess = other.preprocess.replace(mean=(0.1, 0.2, 0.3))
    with pytest.raises(ConfigError, match="was trained with another teacher; choose another --run, or use the same"):
        trained(other, run.folder, f"teacher.targets={targets}")
    with pytest.raises(ConfigError, match="another recipe"):
        vitrail.train("digits", changes=SMALL, folder=run.folder, device="cpu", quiet=True)


@pytest.mark.slow
def test_gradient_accumulation_changes_nothing(straight: tuple[str, vitrail.Run], folder: Path, tmp_path: Path) -> None:
    targets, run = straight
    trained(folder, tmp_path / "run", "gradient_accumulation=2", f"teacher.targets={targets}")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(run.folder), atol=1e-4, rtol=0)


def test_mixed_images_and_averaging(folder: Path, tmp_path: Path) -> None:
    run = trained(folder, tmp_path / "run", "mixing.mixup=0.2", "mixing.cutmix=1.0", "averaging.kind=ema", "steps=4")
    assert len(losses(run.folder)) == 4


def test_the_same_command_finds_the_same_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = set()
    for teacher in (None, folder, teacher_bundle(), teacher_bundle(width=16)):
        run = vitrail.train(
            "digits", teacher=teacher, changes=[*SMALL, "steps=1", "evaluations=1"], device="cpu", workers=0,
            quiet=True, evaluate_on="val",
        )  # fmt: skip
        places.add(run.folder)
    assert len(places) == 3


def test_a_pretrained_student_learns_from_a_teacher(folder: Path, tmp_path: Path) -> None:
    """A model without a distillation token learns hard targets with its one head."""
    student = teacher_bundle(("a", "b"))
    run = vitrail.train(
        "digits", pretrained=student, teacher=folder, folder=tmp_path / "run", device="cpu", workers=0, quiet=True,
        changes=["steps=2", "batch=32", "evaluations=1", "teacher.targets=hard"], evaluate_on="val",
    )  # fmt: skip
    assert not run.bundle.model.config.distillation_token
    assert run.bundle.classes == DIGITS


def test_a_sweep_over_the_settings_of_a_teacher(folder: Path, tmp_path: Path) -> None:
    done = sweep(
        "digits", over={"teacher.weight": [0.2, 0.8]}, teacher=folder, changes=[*SMALL, "steps=2", "evaluations=1"],
        folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True,
    )  # fmt: skip
    assert len(done.runs) == 2
    assert done.best.bundle.provenance["teacher"]["name"] == str(folder)


@pytest.mark.slow
def test_a_sweep_in_several_processes(folder: Path, tmp_path: Path) -> None:
    done = sweep(
        "digits", over={"teacher.weight": [0.2, 0.8]}, teacher=folder, changes=[*SMALL, "steps=2", "evaluations=1"],
        folder=tmp_path / "sweep", device="cpu", workers=0, quiet=True, jobs=2,
    )  # fmt: skip
    assert done.best.bundle.provenance["teacher"]["name"] == str(folder)


@pytest.mark.slow
def test_a_student_learns_digits_from_a_teacher_alone(tmp_path: Path) -> None:
    """Without any weight on the labels, a small student becomes a good classifier."""
    teacher = vitrail.train("digits", changes=["epochs=10"], folder=tmp_path / "teacher", device="cpu", quiet=True)
    student = vitrail.train(
        "digits", teacher=teacher.bundle, changes=["epochs=10", "model.depth=2", "teacher.weight=1"],
        folder=tmp_path / "student", device="cpu", quiet=True,
    )  # fmt: skip
    assert student.metrics.top1 > 0.9  # type: ignore[attr-defined]


def words(folder: Path, run: Path, *changes: str) -> list[str]:
    settings = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return ["train", "digits", "--teacher", str(folder), "--run", str(run), "--device", "cpu", "--workers", "0",
            *settings]  # fmt: skip


@pytest.mark.slow
def test_killed_and_resumed(folder: Path, tmp_path: Path) -> None:
    """SIGKILL at any moment, also while a state is saved, leaves no trace."""

    def start(run: Path) -> forked_commands.Process:
        command = words(folder, run, "steps=40", "save_minutes=0", "teacher.targets=hard")
        return forked_commands.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "straight").wait() == 0
    run = tmp_path / "run"
    for seen in (5, 15, 25):
        process = start(run)
        while process.poll() is None and max((int(p.name) for p in run.glob("state/[0-9]*")), default=0) < seen:
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert start(run).wait() == 0
    actual, expected = state(run), state(tmp_path / "straight")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["soft", "hard"])
def test_two_ranks_train_like_one(targets: str, folder: Path, tmp_path: Path) -> None:
    runs = []
    for processes in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
        rest, run = ["--"] if processes == 2 else [], tmp_path / str(processes)
        command = words(folder, run, "precision=float32", f"teacher.targets={targets}")
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", *rest, "vitrail", *command],
            capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(losses(run))
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-4, rtol=0)


# ── what is refused ──


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Path,
    *words: object,
    command: str = "train",
) -> str:
    """Return the one sentence that a command with wrong input prints; it writes nothing."""
    done = run_command(monkeypatch, capsys, command, "digits", "--run", run, "--device", "cpu", *words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert not run.exists()
    return done.err


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (tuple("012345678"), {}, "has other classes than the data: it lacks '9'; use a teacher that was trained on"),
        (tuple("abcdefghij"), {}, "it lacks '0' (and 9 more) and the data lacks 'a' (and 9 more); use a teacher"),
        ((), {}, "has no head; use a classifier, or learn its features with vitrail pretrain"),
        (None, {}, "are unknown, so they cannot be matched with the data's; set bundle.classes and save it"),
        (DIGITS, {"pool": "none"}, "cannot be used"),
        (DIGITS, {"channels": 5}, "takes images of 5 channels, and the model 1; use a teacher with the same channels"),
    ],
)
def test_teachers_that_do_not_fit(
    classes: tuple[str, ...] | None,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = teacher_bundle(classes, **options).save(tmp_path / "teacher")
    assert message in refused(monkeypatch, capsys, tmp_path / "run", "--teacher", place)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "teacher.weight=0.3"], "has settings for a teacher ([teacher]); pass one with --teacher, or drop"),
        (["--teacher", "nowhere"], "nowhere does not exist; pass a folder or a weight file"),
        (["--teacher", "{}", "--set", "teacher.weight=2"], "teacher.weight"),
        (["--teacher", "{}", "--set", "teacher.temprature=2"], "did you mean"),
        (
            ["--teacher", "{}", "--set", "teacher.targets=hard", "--set", "teacher.temperature=2"],
            "teacher.temperature 2 has no effect with hard targets; leave it out (default 3)",
        ),
        (["--teacher", "{}", "--recipe", "mae"], "the recipe pretrains without labels (mae); use vitrail pretrain"),
        (["--set", "mae.mask_ratio=0.5"], "the recipe pretrains without labels (mae); use vitrail pretrain"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [word.format(folder) for word in options]
    assert message in refused(monkeypatch, capsys, tmp_path / "run", *made)


def test_a_teacher_is_a_bundle_or_a_place() -> None:
    with pytest.raises(ConfigError, match=r"teacher is 3; use a bundle, a path or a name"):
        opened_teacher(3)
    assert opened_teacher(None) is None
