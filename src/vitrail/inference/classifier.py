"""`Predictor`: a bundle ready to predict; `Classifier`, the one for classification."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, overload

import numpy as np
import torch
from torch import Tensor

from vitrail.acceleration.engine import Engine, open_engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import ready_bundle
from vitrail.data.batches import default_workers
from vitrail.data.inputs import ImageInput, fitted, is_one, item_of, name_of, no_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.errors import ConfigError, Diverged, StorageError, VitrailError
from vitrail.inference.windows import as_canvas, windows_for
from vitrail.models.checks import as_int
from vitrail.runtime import Precision, autocast, choose_device
from vitrail.tasks.classification import ClassPrediction
from vitrail.tasks.lookup import CLASSIFICATION, task_of
from vitrail.tasks.task import Prediction, Task

Errors = Literal["raise", "keep"]
BATCH = 64
P = TypeVar("P", bound=Prediction)


class Predictor(Generic[P]):
    """Predict images with a model of any task.

    `bundle` is a loaded bundle or anything that `vitrail.load` opens; its model is moved to the device. `engine` is the
    name of an engine or an open one. With `precision="float32"` the outputs match those of the library that the weights
    come from. With `window`, a segmentation model sees an image in overlapping windows, at this scale of the image.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        engine: str | Engine = "torch",
        precision: Precision = "float32",
        device: str = "auto",
        window: float | None = None,
    ) -> None:
        place = choose_device(device)
        autocast(place, precision)  # raises for an invalid precision before anything is read
        opened = ready_bundle(bundle)
        self.task = self._task(opened)
        self.preprocess: Preprocess = opened.preprocess
        self.names = opened.classes
        self.windows = None if window is None else windows_for(opened, window)
        self.device = place
        self.engine: Engine = (
            open_engine(opened.model, opened.preprocess, kind=engine, precision=precision, device=place)
            if isinstance(engine, str)
            else engine
        )
        opened.announce()

    def _task(self, bundle: Bundle) -> Task:
        return task_of(bundle)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a path, not a sequence
        self, images: ImageInput, *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> P: ...

    @overload
    def predict(
        self, images: Iterable[ImageInput], *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> list[P]: ...

    def predict(
        self, images: ImageInput | Iterable[ImageInput], *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> P | list[P]:
        """Return the prediction for one image, or a list of predictions for several.

        `top` is the largest number of classes in a prediction. An unreadable image raises an error that names it; with
        `errors="keep"` the error is stored in its prediction.
        """
        check_counts(top, batch)
        if errors not in get_args(Errors):
            raise ConfigError(f"errors is {errors!r}; choose 'raise' or 'keep'")
        if is_one(images):
            return self._predict([images], [name_of(images, None)], top, errors, map)[0]
        if not isinstance(images, Iterable):
            raise no_image(images)
        predictions: list[P] = []
        remaining = iter(images)
        with ThreadPoolExecutor(default_workers()) as pool:
            while some := list(islice(remaining, batch)):
                names = [name_of(image, len(predictions) + number) for number, image in enumerate(some)]
                predictions += self._predict(some, names, top, errors, pool.map)
        return predictions

    __call__ = predict

    def predict_pixels(self, pixels: Tensor, top: int, name: Callable[[int], str] = "image {}".format) -> list[P]:
        """Return the predictions for pixels (B, C, H, W) as returned by `fitted`; `name` is for messages."""
        return self.predict_outputs(self.engine(pixels), top, name) if len(pixels) else []

    def predict_outputs(self, outputs: Tensor, top: int, name: Callable[[int], str]) -> list[P]:
        """Return the predictions for the engine's outputs."""
        if not all(edge.isfinite() for edge in outputs.aminmax()):
            wrong = int((~outputs.flatten(1).isfinite().all(dim=1)).int().argmax())
            help = "the weights are corrupt" if self.engine.precision == "float32" else "use float32"
            raise Diverged(f"the logits for {name(wrong)} are not finite; {help}")
        return self.task.predict(outputs, self.names, top)

    def _predict(
        self, images: Sequence[object], names: Sequence[str], top: int, errors: Errors, run: Callable[..., Any]
    ) -> list[P]:
        # Read an image that is passed twice only once: two threads must not decode the same Pillow image.
        different = {id(image): image for image in images}
        loaded = dict(zip(different, run(self._load, different.values()), strict=True))
        ready: list[Pixels | VitrailError] = [loaded[id(image)] for image in images]
        good: list[Pixels] = []
        readable: list[str] = []
        for name, made in zip(names, ready, strict=True):
            if not isinstance(made, VitrailError):
                good.append(made)
                readable.append(name)
            elif isinstance(made, StorageError):  # the image may be fine
                raise made
            elif errors == "raise":
                raise type(made)(f"{name}: {made}")
        predictions = iter(self._predict_loaded(good, readable, top))
        return [self.task.unread(str(made)) if isinstance(made, VitrailError) else next(predictions) for made in ready]

    def _predict_loaded(self, images: Sequence[Pixels], names: Sequence[str], top: int) -> list[P]:
        if self.windows is None:
            pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) if images else torch.empty(0)
            return self.predict_pixels(pixels, top, names.__getitem__)
        made = []
        for image, name in zip(images, names, strict=True):  # grids of different sizes
            outputs = self.windows.outputs(self.engine, as_canvas(image), BATCH)
            made += self.predict_outputs(outputs, top, lambda _, name=name: name)  # type: ignore[misc]
        return made

    def _load(self, image: object) -> Pixels | VitrailError:
        try:
            item = item_of(image, self.preprocess.channels)
            return fitted(item, self.preprocess) if self.windows is None else self.windows.canvas(item)
        except VitrailError as error:
            return error


class Classifier(Predictor[ClassPrediction]):
    """Classify images: `Classifier("runs/pets/best")("cat.jpg")`."""

    def _task(self, bundle: Bundle) -> Task:
        task = task_of(bundle)
        if task is not CLASSIFICATION:
            raise ConfigError(f"the model's task is {task.name}, not classification; use vitrail.predict")
        return task


def check_counts(top: int, batch: int) -> None:
    """Raise unless `top` and `batch` are positive."""
    for what, number in (("top", top), ("batch", batch)):
        if as_int(number) is None or number < 1:
            raise ConfigError(f"{what} is {number!r}; it should be a whole number, 1 or more")


def check_precision(precision: str) -> Precision:
    """Validate a precision; "auto" is resolved later and counts as float32 here."""
    if precision not in (*get_args(Precision), "auto"):
        raise ConfigError(f"unknown precision {precision!r}; choose float32, bf16, fp16 or auto")
    return "float32" if precision == "auto" else precision  # type: ignore[return-value]
