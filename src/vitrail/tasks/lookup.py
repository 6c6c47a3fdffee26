"""The tasks by name."""

from vitrail.acceleration.agreement import Compare, compare_outputs
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.sources.targets import Kind
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.models.checks import per_token
from vitrail.models.config import ViTConfig
from vitrail.tasks.classification import Classification
from vitrail.tasks.multilabel import Multilabel
from vitrail.tasks.regression import Regression
from vitrail.tasks.segmentation import Segmentation
from vitrail.tasks.task import Task

CLASSIFICATION = Classification()
TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFICATION, Multilabel(), Regression(), Segmentation())}


def task_named(name: str) -> Task:
    """Return the task of a recipe."""
    if name not in TASKS:
        raise ConfigError(f"no task is called {name!r}{suggest(name, TASKS)}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def task_of_kind(kind: Kind) -> Task:
    """Return the task for images that are labelled with classes, labels, values or masks."""
    return next(task for task in TASKS.values() if task.kind == kind)


def task_of(bundle: Bundle) -> Task:
    """Return the task of a bundle; raise if its model has no head, or one that does not suit the task."""
    task = task_of_head(bundle)
    if task is None:
        raise CheckpointError("the model has no head, so it makes no predictions; train one first")
    if error := unsuited_head(task, bundle.model.config):
        raise CheckpointError(error)
    return task


def unsuited_head(task: Task, config: ViTConfig) -> str:
    """Return why a model with this config cannot have the task, and what to do; "" if it can."""
    if not task.is_dense:
        return per_token(config)
    if config.pool == "patches" or not config.classes:
        return ""
    return (
        f"the task {task.name} needs logits per patch, but the model has pool = {config.pool!r}; set model.pool=patches"
    )


def task_of_head(bundle: Bundle) -> Task | None:
    """Return the task of a bundle's head, also of one per token; None without a head."""
    if not bundle.model.config.classes:
        return None
    if bundle.task not in TASKS:
        raise CheckpointError(
            f"the bundle was trained for the task {bundle.task!r}, which this version of vitrail does not have; update "
            "vitrail"
        )
    return TASKS[bundle.task].with_constants(bundle.task_constants, bundle.model.config.classes)


def compare_for(bundle: Bundle) -> Compare:
    """Return how to compare the outputs of a bundle's model with exact ones: as its task does, if it suits the head."""
    task = task_of_head(bundle)
    dense = bundle.model.config.pool == "patches"
    return task.agreement if task is not None and task.is_dense == dense else compare_outputs
