"""Learning from images alone: a method's module, its loss, and how features are watched while it trains."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Batch
from vitrail.data.views import AnyBatch
from vitrail.errors import DataError, Diverged
from vitrail.metrics.features import feature_diversity
from vitrail.metrics.neighbours import leave_one_out
from vitrail.models.vit import ViT
from vitrail.runtime import autocast, eval_mode
from vitrail.tasks.metrics import HELD_OUT, TRAINING, Metrics
from vitrail.training.learner import Learner, Validation
from vitrail.training.plan import TrainingPlan
from vitrail.training.pretraining.draws import uniform
from vitrail.training.pretraining.methods import METHODS, Method
from vitrail.training.pretraining.metrics import PretrainingMetrics
from vitrail.training.pretraining.previews import Reconstructs, Rows, patch_features, reconstructions, write_preview

if TYPE_CHECKING:
    from vitrail.training.run import TrainingRun

NEIGHBOURS = 20
"""Neighbours that vote for a class; fewer if there are few images."""
LEAST_SPREAD = 0.01
"""Features whose spread, times the root of their width, is below this have collapsed: it is 1 if they are random."""


@dataclass(frozen=True)
class Pretraining(Learner):
    """Pretrains a model: the module has a decoder or a teacher, which is thrown away."""

    keeps_last: ClassVar[bool] = True
    plan: TrainingPlan
    labelled: bool
    """Whether classes are known; they only serve to watch the features."""

    def module(self, model: ViT) -> nn.Module:
        """Return the model with what the method adds."""
        return self._method.module(model, self.plan)

    def kept(self, module: nn.Module) -> ViT:
        """Return the encoder."""
        return cast("ViT", module.encoder)

    def inputs(self, pixels: Tensor, first: int) -> tuple[Tensor, ...]:
        """Return images and noise, which chooses the masked patches."""
        return pixels, self._noise(first, pixels, "masks")

    def loss(self, outputs: Any, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Return the module's loss."""
        return outputs, outputs.detach() * len(batch.indices)

    def validate(self, run: "TrainingRun") -> Validation:
        """Compute loss and features on the validation split; raise if the features have collapsed."""
        metrics, images = self._measured(run, run.state.plain)
        width = run.plan.model.width
        if images > 1 and metrics["val_spread"] * width**0.5 < LEAST_SPREAD:  # one image has no spread
            raise Diverged(
                f"the features have collapsed after step {run.progress.step:,}: they are nearly the same for all "
                f"images (spread {metrics['val_spread']:.1g}); use a smaller optimizer.lr, a longer warm-up or a "
                f"larger batch, in a new run"
            )
        self._preview(run)
        return Validation(metrics, images)

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:  # noqa: ARG002
        """Return None: the last checkpoint is kept in any case."""
        return None

    def evaluate(self, run: "TrainingRun", best: Bundle, *, final: bool) -> Metrics:  # noqa: ARG002
        """Return the metrics of the kept model on the validation split; it is that of the last step."""
        with run.state.averaged(), run.state.unsharded():
            metrics, images = self._measured(run, run.state.plain)
        kind, knn = HELD_OUT if run.splits.val is not None else TRAINING, metrics.get("val_knn", math.nan)
        return PretrainingMetrics(
            images=images,
            kind=kind,
            loss=metrics["val_loss"],
            knn=None if math.isnan(knn) else knn,
            rank=metrics["val_rank"],
            spread=metrics["val_spread"],
        )

    def _preview(self, run: "TrainingRun") -> None:
        """Show a few validation images: reconstructed, or if the method does not do so, their patch features."""
        module, preprocess = run.state.plain, run.plan.preprocess

        def draw(pixels: Tensor) -> Rows:
            if not self._method.reconstructs:
                return patch_features(self.kept(module), pixels, preprocess)
            noise = self._noise(0, pixels, "preview masks")
            return reconstructions(cast("Reconstructs", module), pixels, noise, preprocess)

        write_preview(run, draw)

    def _noise(self, first: int, pixels: Tensor, purpose: str) -> Tensor:
        shape = (self.plan.model.patches, *self._method.draws)
        drawn = uniform(self.plan.recipe.seed, purpose, first, len(pixels), math.prod(shape), pixels.device)
        return drawn.view(len(pixels), *shape)

    def _validation(self, run: "TrainingRun", module: nn.Module, pixels: Tensor, batch: Batch) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the mean metrics of a validation batch by key; `pixels`: its normalised images."""
        return {"val_loss": module(pixels, self._noise(int(batch.indices[0]), pixels, "validation masks"))}

    @property
    def _method(self) -> Method:
        return METHODS[self.plan.recipe.method or ""]

    @torch.no_grad()
    def _measured(self, run: "TrainingRun", module: nn.Module) -> tuple[dict[str, float], int]:
        """Return the loss on the validation split, with the same masks every time, and properties of the features."""
        context, preprocess = run.job.context, run.plan.preprocess
        sums: list[dict[str, Tensor]] = []
        features: list[Tensor] = []
        labels: list[Tensor] = []
        with eval_mode(module):
            for batch in run.predict.batches(run.validation_source):
                if not len(batch.labels):
                    continue
                moved = batch.to(context.device)
                pixels = preprocess.normalise(moved.pixels)
                with autocast(context.device, context.precision):
                    found = self._validation(run, module, pixels, moved)
                    sums.append({name: value.float() * len(pixels) for name, value in found.items()})
                    features.append(self.kept(module)(pixels).float())
                labels.append(batch.labels)
        # With few images, a rank may have none.
        own = (torch.cat(features).cpu(), torch.cat(labels).cpu(), _added(sums)) if features else None
        gathered = [part for part in context.ranks.all_gather(own) if part is not None]
        if not gathered:
            raise DataError("none of the validation images can be read; run vitrail check to see why")
        pooled, known = torch.cat([part[0] for part in gathered]), torch.cat([part[1] for part in gathered])
        means = {name: total / len(pooled) for name, total in _added([part[2] for part in gathered]).items()}
        diversity = feature_diversity(pooled)
        metrics = {
            **{name: float(mean) for name, mean in means.items()},
            "val_rank": diversity.rank,
            "val_spread": diversity.spread,
        }
        if self.labelled:
            classes = len(run.validation_source.classes)
            # With more neighbours than images of a class, most votes would be for other classes.
            neighbours = min(NEIGHBOURS, max(1, len(pooled) // (2 * classes)))
            alone = len(pooled) == 1  # the others could not be read
            metrics["val_knn"] = math.nan if alone else leave_one_out(pooled, known, classes, k=neighbours)
        return metrics, len(pooled)


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up the values of each key."""
    return {name: torch.stack([part[name].cpu() for part in parts]).sum() for name in parts[0]}
