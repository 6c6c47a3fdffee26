"""Resolve what a recipe leaves unset from the data and the model, each with a reason; warnings before a weak run."""

import json
import math
from typing import Any

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.augmentation.augment import Affine, Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.augmentation.on_device import check_on_device
from vitrail.data.augmentation.randaugment import RandAugment
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.metrics.baselines import PRETRAINED
from vitrail.models.config import ConvLayer, ViTConfig
from vitrail.models.lora import check_lora
from vitrail.models.variants import PAPER, variant_config
from vitrail.tasks.lookup import CLASSIFICATION, task_of_kind, unsuited_head
from vitrail.tasks.task import Task
from vitrail.training.finetune_init import FinetuneInit, for_task, planned_config
from vitrail.training.optimizers import learning_rate
from vitrail.training.plan import (
    SMALL_SIDE,
    TINY_SIDE,
    DataFacts,
    ResolvedDefault,
    TrainingPlan,
    compiles,
    steps_of,
    steps_per_epoch_text,
    written_model,
)
from vitrail.training.pretraining.defaults import resolve_pretraining
from vitrail.training.recipe import Recipe
from vitrail.training.recipe_files import drop
from vitrail.training.small_models import heads_for, image_size_for, patch_of, width_of
from vitrail.training.teacher import Teacher, TeacherSettings, check_channels, class_columns

FEW_PHOTOS = 2_000
"""With fewer photos, two blocks learn as much as four in three quarters of the time, at half the learning rate; on a
CPU the time saved goes into more steps (benchmarks/LOG.md)."""
FEW = 5_000
"""With fewer photos than this, a Vision Transformer trained from scratch stays weak."""
NARROW, SMALL_WIDTH = 128, 256
"""Models up to these widths (from scratch, pretrained) tolerate a higher learning rate."""
MUON_LR_FACTOR = 2.5
"""Muon's learning rate relative to AdamW's: on CIFAR-10, from scratch, width 128 trained better at 0.005 than at 0.002,
and width 384 better at 0.0025 than at 0.005."""
LORA_LR = 1e-3
"""For adapters in models of any width: ten times that of fine-tuning a large model, as language models need (arXiv
2405.09673)."""


def resolve_defaults(
    recipe: Recipe, facts: DataFacts, pretrained: Bundle | None, teacher: Teacher | None = None
) -> TrainingPlan:
    """Resolve every field that a recipe leaves unset."""
    recipe.check_teacher(teacher)
    if recipe.method is not None:
        return resolve_pretraining(recipe, facts, pretrained, teacher)
    defaults: list[ResolvedDefault] = []
    recipe = with_task(recipe, facts, defaults)
    recipe.check_teacher(teacher)
    task = recipe.known_task
    recipe = recipe.replace(objective=task.resolved(recipe.objective))
    if faults := task.check(recipe.objective, recipe.mixing, balance=recipe.data.balance):
        raise ConfigError("; ".join(faults))
    if pretrained is not None:
        recipe = recipe.replace(pretrained=for_task(pretrained, recipe.pretrained, task.name))
    if teacher is not None:
        class_columns(teacher, facts.classes)  # raises for other classes, before anything is written
        recipe = recipe.replace(teacher=recipe.teacher or TeacherSettings())
    model = _model(recipe, facts, pretrained, defaults)
    if teacher is not None:
        check_channels(teacher, model.channels)
    check_lora(recipe.lora, model)
    if fault := unsuited_head(task, model):
        raise ConfigError(fault)
    preprocess = _preprocess(recipe, model, pretrained, whole=task.is_dense)
    batch = recipe.batch if isinstance(recipe.batch, int) else _batch(recipe, facts, defaults)
    epochs = recipe.epochs
    if epochs is None and recipe.steps is None:
        epochs = _epochs(facts, pretrained, defaults)
    lr = _lr(recipe, facts, model, pretrained, defaults) if recipe.optimizer.lr is None else recipe.optimizer.lr
    augmentation = _augmentation(facts, defaults) if recipe.augmentation is None else recipe.augmentation
    mixing = _mixing(facts, task, defaults) if recipe.mixing is None else recipe.mixing
    if recipe.data.on_device:
        check_on_device(augmentation)
    resolved = recipe.replace(
        model=written_model(model),
        batch="auto" if recipe.batch == "auto" else batch,
        epochs=epochs,
        compile=compiles(recipe, facts, defaults),
        optimizer=recipe.optimizer.replace(lr=lr),
        augmentation=augmentation,
        mixing=mixing,
        criterion=_criterion(recipe, defaults),
    )
    steps = steps_of(resolved, facts.images, batch)
    learning_rate(resolved.schedule, 0, steps, lr)  # raises if the schedule does not fit, before anything is written
    return TrainingPlan(
        resolved, model, preprocess, facts.classes, batch, steps, lr, augmentation, mixing, defaults, teacher, task
    )  # fmt: skip


def with_task(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> Recipe:
    """Return the recipe with the task that the labels call for, if it names none; without settings of other tasks."""
    if recipe.task is not None or recipe.method is not None:
        return recipe
    task = task_of_kind(facts.kind)
    defaults.append(ResolvedDefault("task", task.name, facts.kind_reason))
    if task.name == CLASSIFICATION.name:
        return recipe.replace(task=task.name)
    known = json.loads(recipe.model_dump_json(exclude_unset=True)) | {"task": task.name}
    for name in task.unsupported(recipe.objective, recipe.mixing, balance=recipe.data.balance):
        defaults.append(ResolvedDefault(name, "off", f"the task {task.name} does not support it"))
        drop(known, [name])
    return Recipe.from_json(json.dumps(known))


def before_training(facts: DataFacts, model: ViTConfig, *, fresh: bool) -> list[str]:
    """Return warnings about training from scratch on few photos, with what to do instead; usually empty."""
    if not fresh or facts.images >= FEW or facts.side <= SMALL_SIDE:
        return []
    repository = PRETRAINED.removeprefix("timm:")
    why = "a Vision Transformer has no built-in knowledge of images and" if model.depth else "the model"
    return [
        f"few photos: training from scratch on {facts.images:,} images. Expect much lower accuracy than with a "
        f"pretrained model: {why} must learn edges, textures and shapes from these images alone",
        f"better: start from a pretrained model, --from {PRETRAINED} (on a CPU add --recipe linear-probe). Without a "
        f"network: run hf download timm/{repository} --local-dir vit-small elsewhere, copy the folder here and use "
        "--from vit-small",
    ]


def _model(recipe: Recipe, facts: DataFacts, pretrained: Bundle | None, defaults: list[ResolvedDefault]) -> ViTConfig:
    fields = dict(recipe.model)
    classes = recipe.known_task.outputs(facts.classes)
    paper = fields.pop("paper", False)
    if not isinstance(paper, bool) or (paper and pretrained is not None):
        raise ConfigError(
            f"model.paper is {paper!r}; set it to true to train the ViT paper's model from scratch, or leave it out"
        )
    if paper and "name" not in fields:  # named models already follow the paper
        fields = {**PAPER, **fields}
    if fields.get("classes", classes) != classes:
        raise ConfigError(f"model.classes is {fields['classes']}, but the data has {classes} classes; leave it out")
    _set_pool(recipe.known_task, fields, pretrained, defaults)
    if pretrained is not None:
        if "name" in fields:
            raise ConfigError("model.name cannot be combined with a pretrained model; leave one of them out")
        return planned_config(pretrained, recipe.pretrained or FinetuneInit(), fields, classes)
    name = fields.pop("name", None)
    token = _distillation_token(recipe, fields, defaults)
    if name is not None:
        variant = variant_config(name)
        token = token if variant.depth and variant.pool == "cls" else {}
        config = variant.replace(**{**token, **fields, "classes": classes})
        if paper and not config.depth:
            raise ConfigError(
                f"model.paper asks for the ViT paper's model, but {name} is a ResNet; leave one of them out"
            )
        return config
    small = _small_model(facts, fields, defaults, dense=recipe.known_task.is_dense)
    return ViTConfig.model_validate({**small, **token, **fields, "classes": classes})


def _set_pool(task: Task, fields: dict[str, Any], pretrained: Bundle | None, defaults: list[ResolvedDefault]) -> None:
    """Add the pool that the task needs, if the recipe names none."""
    if "pool" in fields:
        return
    if task.is_dense:
        fields["pool"] = "patches"
        defaults.append(ResolvedDefault("model.pool", "patches", "every patch needs logits of its own"))
    elif pretrained is not None and pretrained.model.config.pool == "patches":
        own = pretrained.model.config
        fields |= {"pool": "mean" if own.class_token == "none" else "cls", "head_layers": ()}
        defaults.append(
            ResolvedDefault("model.pool", fields["pool"], "the image needs one prediction, not every patch")
        )


def _distillation_token(recipe: Recipe, fields: dict[str, Any], defaults: list[ResolvedDefault]) -> dict[str, Any]:
    """Return the fields of a model that learns hard targets with a second head; none if the recipe decides it."""
    hard = recipe.teacher is not None and recipe.teacher.targets == "hard"
    if not hard or fields.keys() & {"distillation_token", "class_token", "pool", "final_norm"}:
        return {}
    defaults.append(ResolvedDefault("model.distillation_token", True, "its own head learns the teacher's classes"))
    return {"class_token": "first", "pool": "cls", "final_norm": "before_pool", "distillation_token": True}


def _small_model(
    facts: DataFacts, fields: dict[str, Any], defaults: list[ResolvedDefault], *, dense: bool
) -> dict[str, Any]:
    """Return a model that trains quickly on little data; `fields` are those already set.

    If it has to be `dense`, its patches are half as large, because the edges in a mask are only as fine as its patches.
    """
    tiny, small, on_cpu = facts.side <= TINY_SIDE, facts.side <= SMALL_SIDE, facts.device == "cpu"
    usual = 2 if tiny else 4 if small else 8
    patch = patch_of(fields, usual // 2 if dense else usual)
    largest = 64 if on_cpu else 96
    size = image_size_for(patch, facts.side, largest)
    few = _few_photos(facts)
    width, depth = (64, 4) if tiny else (96, 2 if few else 4) if on_cpu else (256, 8)
    width = width_of(fields, width)
    stem = () if "stem" in fields else _early_convolutions(patch, width, small, again=1 if on_cpu else 2)
    model: dict[str, Any] = {
        "image_size": size,
        "patch_size": patch,
        **({"stem": "conv_stem", "conv_stem": stem} if stem else {}),
        "width": width,
        "depth": depth,
        "heads": heads_for(width, 32),
        "activation": "relu" if on_cpu else "gelu",
        "channels": 1 if facts.grey else 3,
        "pool": "mean",
        "final_norm": "after_pool",
        "class_token": "none",
        "stochastic_depth": 0.0 if tiny else 0.1,
        "init": "timm",
    }
    cap = f", and {largest} is enough for a small model" if facts.side > largest else ""
    reasons = {
        "image_size": f"the shorter sides are about {facts.side} pixels{cap}",
        "patch_size": f"gives {math.prod(s // p for s, p in zip(size, patch, strict=True))} patches",
        "stem": "early convolutions learn faster from little data than a plain patch projection",
        "width": "small enough for a CPU" if on_cpu else f"large enough for {facts.images:,} images",
        "depth": f"more blocks do not help with {facts.images:,} images" if on_cpu and few else "same reason as width",
        "activation": "as accurate in a small model, and faster on a CPU" if on_cpu else "the usual choice",
        "channels": "the images are greyscale" if facts.grey else "the images are in colour",
    }
    defaults += [
        ResolvedDefault(f"model.{name}", model[name], why)
        for name, why in reasons.items()
        if name in model and name not in fields
    ]
    return model


def _few_photos(facts: DataFacts) -> bool:
    return facts.side > SMALL_SIDE and facts.images < FEW_PHOTOS


def _early_convolutions(patch: tuple[int, int], width: int, small: bool, again: int) -> tuple[ConvLayer, ...]:
    """Return stride-2 convolutions that reduce a patch to one pixel; () if the patch size is not a power of two.

    Each is followed by `again` stride-1 convolutions, except that a single last one is omitted: it would cost the most
    and help the least. For small images a stride-1 convolution comes first, to keep their resolution.
    """
    halvings = patch[0].bit_length() - 1
    if patch[0] != patch[1] or patch[0] != 1 << halvings or not halvings or width % patch[0]:
        return ()
    layers = [ConvLayer(channels=width >> halvings, stride=1)] if small else []
    for left in reversed(range(halvings)):
        layers.append(ConvLayer(channels=width >> left))
        layers += [ConvLayer(channels=width >> left, stride=1)] * (again if left else again // 2 * 2)
    return tuple(layers)


def _preprocess(recipe: Recipe, model: ViTConfig, pretrained: Bundle | None, *, whole: bool) -> Preprocess:
    """Return how images are prepared; `whole` if the model has to see all of an image, because every pixel counts."""
    if pretrained is not None:
        own = pretrained.preprocess.resized(model.image_size).with_channels(model.channels)
    else:
        half = (0.5,) * model.channels
        own = Preprocess(size=model.image_size, channels=model.channels, mean=half, std=half, resize="cover")
    if whole:
        own = own.replace(resize="squash", resize_to=None)
    chosen = own.replace(**recipe.preprocess)
    if whole and not chosen.sees_whole:
        raise ConfigError(
            f"preprocess.resize is {chosen.resize} and preprocess.resize_to is {chosen.resize_to}, but every pixel of "
            "an image needs a class; leave them out, so that the whole image is resized"
        )
    return chosen


def _batch(recipe: Recipe, facts: DataFacts, defaults: list[ResolvedDefault]) -> int:
    power = 1 << max(5, min(9, round(math.log2(max(1, facts.images / 24)))))
    needed = 2 * recipe.data.repeats * recipe.gradient_accumulation
    batch = -(-power // needed) * needed
    if recipe.batch is None:
        defaults.append(ResolvedDefault("batch", batch, steps_per_epoch_text(facts.images, batch)))
    return batch


def _epochs(facts: DataFacts, pretrained: Bundle | None, defaults: list[ResolvedDefault]) -> float:
    if facts.device != "cpu":
        samples, most = (300_000, 50) if pretrained is not None else (6_000_000, 300)
    elif pretrained is not None:
        samples, most = 30_000, 50
    else:
        samples, most = (57_000, 150) if facts.side <= TINY_SIDE else (80_000, 225)
    epochs = float(max(10, min(most, round(samples / facts.images))))
    defaults.append(
        ResolvedDefault("epochs", epochs, f"about {round(int(epochs) * facts.images, -3):,} training samples in total")
    )
    return epochs


def _lr(
    recipe: Recipe, facts: DataFacts, model: ViTConfig, pretrained: Bundle | None, defaults: list[ResolvedDefault]
) -> float:
    kind = recipe.optimizer.kind
    if kind == "sgd":
        lr, why = 0.01, "usual for sgd"
    elif pretrained is None:
        gently = model.width > NARROW or _few_photos(facts)
        lr, why = (1e-3, "a model from scratch") if gently else (2e-3, "a narrow model from scratch")
        lr, why = lr * (MUON_LR_FACTOR if kind == "muon" else 1), f"for {kind} and {why}"
        why += f", on {facts.images:,} images" if _few_photos(facts) else ""
    elif recipe.lora.rank:
        lr, why = LORA_LR, f"for {kind} and LoRA, whose adapters start at zero"
    else:
        small = model.width <= SMALL_WIDTH
        lr = 1e-3 if small else 1e-4
        why = f"for {kind} and a {'small' if small else 'large'} pretrained model (width {model.width})"
    defaults.append(ResolvedDefault("optimizer.lr", lr, why))
    return lr


def _criterion(recipe: Recipe, defaults: list[ResolvedDefault]) -> str:
    criterion = recipe.resolved_criterion()
    if recipe.criterion is None and criterion != recipe.known_task.default_criterion(class_balanced=False):
        defaults.append(ResolvedDefault("criterion", criterion, "classes are weighted, so every class counts equally"))
    return criterion


def _augmentation(facts: DataFacts, defaults: list[ResolvedDefault]) -> Augmentation:
    if facts.side <= TINY_SIDE:
        affine = Affine(translate=(0.09, 0.09), scale=(0.95, 1.05), shear=3.0)
        augmentation = Augmentation(crop="none", flip=0.0, rotation=6.0, affine=affine)
        why = "tiny images: small rotations and shifts; no flips, because they may be letters or digits"
    elif facts.side <= SMALL_SIDE and facts.grey:
        augmentation = Augmentation(crop="padded", flip=0.0, erasing=0.25)
        why = "small greyscale images: padded crops, random erasing; no flips, because they may be letters"
    elif facts.side <= SMALL_SIDE:
        augmentation = Augmentation(crop="padded", randaugment=RandAugment(layers=2, magnitude=9))
        why = "small images: padded crops, flips, RandAugment"
    else:
        augmentation = Augmentation(crop_area=(0.6, 1.0), randaugment=RandAugment(layers=2, magnitude=7))
        why = "photos: random resized crops, flips, RandAugment"
    defaults.append(
        ResolvedDefault("augmentation", "affine" if augmentation.crop == "none" else augmentation.crop, why)
    )
    return augmentation


def _mixing(facts: DataFacts, task: Task, defaults: list[ResolvedDefault]) -> Mixing:
    if "mixing" not in task.settings:
        return Mixing()
    if facts.side <= TINY_SIDE or facts.device == "cpu":
        defaults.append(ResolvedDefault("mixing", "off", "the model is small and the run short, so it hardly overfits"))
        return Mixing()
    defaults.append(ResolvedDefault("mixing", "mixup and CutMix", "reduces overfitting"))
    often = facts.side <= SMALL_SIDE and not facts.grey
    return Mixing(mixup=0.2, cutmix=1.0, chance=0.7 if often else 0.5)
