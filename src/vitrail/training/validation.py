"""Evaluation of a run's models: the current one on the validation split, and at the end the best one."""

from vitrail.checkpoints.bundle import METRICS, Bundle
from vitrail.errors import Diverged
from vitrail.tasks.metrics import Metrics
from vitrail.training.criterion import as_good, score
from vitrail.training.run import TrainingRun
from vitrail.training.run_folder import METRICS as METRICS_FILE
from vitrail.training.run_folder import RESULT, write_json
from vitrail.training.state import Score


def validate(run: TrainingRun) -> None:
    """Validate the current model, log its metrics, and keep it if it is the best."""
    progress, criterion = run.progress, run.plan.recipe.resolved_criterion()
    with run.state.averaged(), run.state.unsharded():
        metrics, images, constants = run.learner.validate(run)
        reached = score(metrics, run.shown.criteria[criterion])
        is_highest = progress.reach(reached)
        if is_highest or run.learner.keeps_last or _is_as_good(run, criterion, reached, images):
            progress.best_step = progress.step
            if run.ranks.is_main:
                run.best.save(run.bundle_now(constants))
    row = {"step": progress.step, **metrics, "best": progress.best_step}
    if run.logger is not None:
        run.logger.validation(row)
    chosen = None if run.learner.keeps_last else is_highest
    run.observer.validation({**row, "criterion": criterion, "highest": chosen})


def _is_as_good(run: TrainingRun, criterion: str, reached: Score, images: int) -> bool:
    """Whether a checkpoint that is not the highest is as good, within the standard error of the highest."""
    highest = run.progress.highest_score
    if highest is None or not reached.known:
        return False
    value = -highest.value if run.shown.criteria[criterion].lower_is_better else highest.value
    return as_good(reached, highest, run.learner.standard_error(criterion, value, images))


def check_best(run: TrainingRun) -> None:
    """Check best/ against the training state; if it is lost, the current model takes its place."""
    status = run.best.check()
    if status == "lost":
        run.best_replaced = True
        validate(run)
    if status != "intact":
        run.save()  # with the new digest of best/


def evaluate_best(run: TrainingRun, *, final: bool) -> tuple[Bundle, Metrics]:
    """Evaluate the best model on the test split, once; without one, on the split that selected it.

    `final`: the result is final and is written to the run folder.
    """
    check_best(run)
    if not run.progress.best_step:
        criterion = run.shown.criteria[run.plan.recipe.resolved_criterion()]
        raise Diverged(
            f"the {criterion.name} on the validation split was never finite, so no checkpoint is the best; see "
            f"{criterion.key} in {run.folder / METRICS_FILE}"
        )
    best = run.best.load()
    metrics = run.learner.evaluate(run, best, final=final)
    if final:
        best.provenance[METRICS] = metrics.card(tested=run.splits.test is not None)
    if final and run.logger is not None:
        run.best.write_card(best)
        if run.best_replaced or not (run.folder / RESULT).exists():
            write_json(run.folder / RESULT, metrics.as_dict())
    return best, metrics
