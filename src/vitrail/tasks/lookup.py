"""The tasks by name."""

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.models.checks import per_token
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import Task

CLASSIFICATION = Classification()
TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFICATION,)}


def task_named(name: str) -> Task:
    """Return the task of a recipe."""
    if name not in TASKS:
        raise ConfigError(f"no task is called {name!r}{suggest(name, TASKS)}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def task_of(bundle: Bundle) -> Task:
    """Return the task of a bundle; raise if its model has no head, or one per token."""
    if not bundle.model.config.classes:
        raise CheckpointError("the model has no head, so it makes no predictions; train one first")
    if error := per_token(bundle.model.config):
        raise CheckpointError(error)
    if bundle.task not in TASKS:
        raise CheckpointError(
            f"the bundle was trained for the task {bundle.task!r}, which this version of vitrail does not have; update "
            "vitrail"
        )
    return TASKS[bundle.task]
