"""`Classifier`: a bundle made ready to say what is in images."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, overload

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
from vitrail.errors import CheckpointError, ConfigError, DataError, Diverged, VitrailError
from vitrail.evaluation import percent
from vitrail.models.checks import per_token
from vitrail.runtime import Precision, autocast, choose_device

Errors = Literal["raise", "keep"]
BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image: the likeliest classes, the likeliest first."""

    names: tuple[str, ...] = ()
    """The numbers of the classes, as text, where the bundle has no names."""
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    """Why there is no answer, where the image could not be read and errors are kept."""

    @property
    def name(self) -> str:
        """The likeliest class."""
        self._check()
        return self.names[0]

    @property
    def probability(self) -> float:
        """How likely it is, from 0 to 1."""
        self._check()
        return self.probabilities[0]

    def _check(self) -> None:
        if self.error is not None:
            raise DataError(f"there is no answer: {self.error}")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Give every class with its probability."""
        return zip(self.names, self.probabilities, strict=True)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Prediction(error: {self.error})"
        return "Prediction(" + ", ".join(f"{name} {percent(likely)}%" for name, likely in self) + ")"


class Classifier:
    """A model that says what is in images: `Classifier("runs/pets/best")("cat.jpg")`.

    `bundle` is one that is open, or whatever `vitrail.load` opens; its model goes to the device. `engine` says what
    computes, or is an open engine; `precision` says in which numbers: float32 gives what the library gives that the
    weights come from.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        engine: str | Engine = "torch",
        precision: Precision = "float32",
        device: str = "auto",
    ) -> None:
        place = choose_device(device)
        autocast(place, precision)  # refuses a wrong one before anything is read
        opened = ready_bundle(bundle)
        outputs = check_head(opened)
        self.preprocess: Preprocess = opened.preprocess
        self.names: tuple[str, ...] = opened.classes or tuple(map(str, range(outputs)))
        self.device = place
        self.engine: Engine = (
            open_engine(opened.model, opened.preprocess, kind=engine, precision=precision, device=place)
            if isinstance(engine, str)
            else engine
        )
        opened.announce()

    @overload
    def predict(  # type: ignore[overload-overlap]  # a text is a path, not several letters
        self, images: ImageInput, *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> Prediction: ...

    @overload
    def predict(
        self, images: Iterable[ImageInput], *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> list[Prediction]: ...

    def predict(
        self, images: ImageInput | Iterable[ImageInput], *, top: int = 5, errors: Errors = "raise", batch: int = BATCH
    ) -> Prediction | list[Prediction]:
        """Return the answer for one image, or the list of answers for many.

        `top` is how many classes an answer has, if there are so many. What cannot be read raises an error that says
        which image it is; with `errors="keep"` the error is in its answer.
        """
        check_counts(top, batch)
        if errors not in get_args(Errors):
            raise ConfigError(f"errors is {errors!r}; choose 'raise' or 'keep'")
        if is_one(images):
            return self._answer([images], [name_of(images, None)], top, errors, map)[0]
        if not isinstance(images, Iterable):
            raise no_image(images)
        answers: list[Prediction] = []
        given = iter(images)
        with ThreadPoolExecutor(default_workers()) as pool:
            while some := list(islice(given, batch)):
                names = [name_of(image, len(answers) + number) for number, image in enumerate(some)]
                answers += self._answer(some, names, top, errors, pool.map)
        return answers

    __call__ = predict

    def answers(self, pixels: Tensor, top: int, name: Callable[[int], str] = "image {}".format) -> list[Prediction]:
        """Return the answers for pixels (B, C, H, W) as `fitted` makes them; `name` is for messages."""
        if not len(pixels):
            return []
        logits = self.engine(pixels)
        wrong = ~logits.isfinite().all(dim=1)
        if wrong.any():
            help = "its weights are damaged" if self.engine.precision == "float32" else "use float32"
            raise Diverged(f"the model's answer to {name(int(wrong.int().argmax()))} is not a finite number; {help}")
        likely = logits.softmax(dim=1).topk(min(top, len(self.names)), dim=1)
        found = zip(likely.values.tolist(), likely.indices.tolist(), strict=True)
        return [
            Prediction(tuple(self.names[index] for index in indices), tuple(float(f"{p:.6g}") for p in values))
            for values, indices in found
        ]

    def _answer(
        self, images: Sequence[object], names: Sequence[str], top: int, errors: Errors, run: Callable[..., Any]
    ) -> list[Prediction]:
        # What is given twice is read once: Pillow's images must not be decoded by two threads at a time.
        different = {id(image): image for image in images}
        made_of = dict(zip(different, run(self._ready, different.values()), strict=True))
        ready: list[Pixels | VitrailError] = [made_of[id(image)] for image in images]
        good: list[Pixels] = []
        readable: list[str] = []
        for name, made in zip(names, ready, strict=True):
            if not isinstance(made, VitrailError):
                good.append(made)
                readable.append(name)
            elif errors == "raise":
                raise type(made)(f"{name}: {made}")
        pixels = torch.from_numpy(np.stack(good)).permute(0, 3, 1, 2) if good else torch.empty(0)
        found = iter(self.answers(pixels, top, readable.__getitem__))
        return [Prediction(error=str(made)) if isinstance(made, VitrailError) else next(found) for made in ready]

    def _ready(self, image: object) -> Pixels | VitrailError:
        try:
            return fitted(item_of(image, self.preprocess.channels), self.preprocess)
        except VitrailError as error:
            return error


def check_counts(top: int, batch: int) -> None:
    """Refuse numbers that mean nothing."""
    for what, number in (("top", top), ("batch", batch)):
        if number < 1:
            raise ConfigError(f"{what} is {number}; it should be 1 or more")


def check_head(bundle: Bundle) -> int:
    """See to it that a model can tell classes apart, and return how many."""
    outputs = bundle.model.config.classes
    if not outputs:
        raise CheckpointError("the model has no head, so it knows no classes; train one on it first")
    if refusal := per_token(bundle.model.config):
        raise CheckpointError(refusal)
    return outputs


def check_precision(wanted: str) -> Precision:
    """Refuse what is no precision; "auto", which is settled later, is float32 until then."""
    if wanted not in (*get_args(Precision), "auto"):
        raise ConfigError(f"no precision is called {wanted!r}; choose float32, bf16, fp16 or auto")
    return "float32" if wanted == "auto" else wanted  # type: ignore[return-value]
