"""Where JPEGs are decoded: on the CPU, or on the GPU by nvImageCodec. It is decided here only, with the reason."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal, NamedTuple, get_args

import torch

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.on_device import not_on_device
from vitrail.data.batches import Batch, Evaluation, check_choice, default_workers, evaluation_batches
from vitrail.data.decode import Jpeg, open_image
from vitrail.data.device_resize import FILTERS
from vitrail.data.encoded import COLOURS, end_of_baseline
from vitrail.data.gpu_batches import gpu_evaluation_batches
from vitrail.data.gpu_decoding import is_installed, why_not
from vitrail.data.inputs import Item
from vitrail.data.preprocess import Interpolation, Preprocess
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import kind_of_labels
from vitrail.errors import ConfigError, DataError, StorageError

Decode = Literal["auto", "cpu", "gpu"]
"""`auto`: the GPU if nvImageCodec is installed and it is faster than the CPU cores, else the CPU."""
DEVICES: tuple[str, ...] = ("cuda",)
"""Devices that decode; the tests add the CPU, on which nvImageCodec also runs."""
SAMPLE = 64
"""Images whose headers decide."""
FEWEST = 2048
"""Fewest images for which starting the decoders, which takes seconds, may pay."""
MASKS = "masks are cropped and moved with their images on the CPU"
CROPS = ("inception", "inception_tf", "none")
"""Crops that are inside the image."""
CORE_SPEED, GPU_SPEED, GPU_MOST = 30e6, 1.8e9, 9_000
"""Pixels/s that a CPU core and a GPU decode and resize, and most images/s of a GPU (docs/guides/performance.md)."""


class Decoder(NamedTuple):
    """Where JPEGs are decoded, and why."""

    device: torch.device | None
    """The device that decodes; None: the CPU."""
    reason: str
    """Empty where there is nothing to choose."""

    @property
    def name(self) -> Literal["cpu", "gpu"]:
        """The choice as `--decode` spells it."""
        return "cpu" if self.device is None else "gpu"

    def __str__(self) -> str:
        return f"decoding on the {self.name.upper()}: {self.reason}"

    def announce(self, on_plan: Callable[[str], None] | None) -> None:
        """Report the choice, if there was one."""
        if on_plan is not None and self.reason:
            on_plan(str(self))

    def batches(self, data: Evaluation, device: torch.device, workers: int | None) -> Iterator[Batch]:
        """Yield every image of a split once, for a model on `device`."""
        if self.device is not None:
            return gpu_evaluation_batches(data, self.device, workers=workers)
        return evaluation_batches(data, workers=workers, pin=device.type == "cuda")


ON_CPU = Decoder(None, "")
"""The decoder where nothing was chosen."""


def check_decode(decode: str, *, on_ray: bool = False) -> None:
    """Raise for an unknown choice, and for one that Ray's workers do not have."""
    check_choice("decode", decode, get_args(Decode))
    if on_ray and decode == "gpu":
        raise ConfigError("decode is gpu, but with Ray images are decoded on the CPU; use decode = cpu or auto")


def samples(decode: str, device: torch.device) -> int:
    """Return how many images `choose_decoder` needs."""
    return SAMPLE if decode == "auto" and device.type in DEVICES else 0


def choose_decoder(
    decode: str,
    device: torch.device,
    preprocess: Preprocess,
    images: Iterable[Item | bytes | object],
    *,
    count: int | None,
    workers: int | None = None,
    augmentation: Augmentation | None = None,
    masks: bool = False,
) -> Decoder:
    """Choose where JPEGs are decoded for a model on a device.

    `images` are read for `auto` only: the stored images, of which the first ones decide. `count` is their number, if
    known. `masks` tells whether they have some. For `gpu`, whatever makes it impossible is an error.
    """
    check_decode(decode)
    if decode == "cpu":
        return Decoder(None, "as asked" if device.type in DEVICES else "")
    problem = MASKS if masks and device.type in DEVICES else _problem(device, preprocess, augmentation)
    if decode == "gpu":
        problem = why_not(device) if problem is None else problem
        if problem is not None:
            raise ConfigError(f"decode is gpu, but {problem}; use decode = cpu or auto")
        return Decoder(device, "as asked")
    if device.type not in DEVICES:
        return ON_CPU
    if problem is not None:
        return Decoder(None, problem)
    if count is not None and count < FEWEST:
        return Decoder(None, f"{count:,} images are too few to start decoders on the GPU")
    chosen = _faster(device, images, default_workers() if workers is None else max(1, workers))
    problem = None if chosen.device is None else why_not(device)
    return chosen if problem is None else Decoder(None, problem)


def choose_for_source(
    decode: str,
    device: torch.device,
    preprocess: Preprocess,
    source: Source,
    *,
    count: int | None = None,
    workers: int | None = None,
    augmentation: Augmentation | None = None,
) -> Decoder:
    """Choose where the JPEGs of a source are decoded; `count`: how many are decoded, by default all once."""
    count = len(source) if count is None else count
    return choose_decoder(
        decode, device, preprocess, _stored(source), count=count, workers=workers, augmentation=augmentation,
        masks=kind_of_labels(source) == "masks",
    )  # fmt: skip


def _problem(device: torch.device, preprocess: Preprocess, augmentation: Augmentation | None) -> str | None:
    """Return why the GPU cannot decode; None if it can."""
    if device.type not in DEVICES:
        return f"the device is {device.type}, and only a CUDA device decodes"
    if not is_installed():
        return "nvImageCodec is not installed (pip install 'vitrail[gpu]')"
    if preprocess.channels not in (1, 3):
        return f"the model takes {preprocess.channels} channels, which a JPEG does not have"
    if augmentation is not None and augmentation.crop not in CROPS:
        return f'augmentation.crop = "{augmentation.crop}" is not implemented there'
    missing = None if augmentation is None else not_on_device(augmentation)
    if missing is not None:
        return f"{missing} is not implemented there"
    filters: tuple[Interpolation, ...] = (preprocess.interpolation,)
    if augmentation is not None and augmentation.crop != "none":
        filters = (augmentation.interpolation, *filters)
    unknown = [name for name in filters if name not in FILTERS]
    return f"interpolation = {unknown[0]} is not implemented there" if unknown else None


def _faster(device: torch.device, images: Iterable[object], workers: int) -> Decoder:
    """Compare both on the sizes of the first images."""
    sizes, seen = list[int](), 0
    for stored in islice(images, SAMPLE):
        seen += 1
        pixels = _jpeg_pixels(stored)
        sizes += [] if pixels is None else [pixels]
    if 2 * len(sizes) < seen or not sizes:
        return Decoder(None, f"{len(sizes)} of the first {seen} images are JPEGs that the GPU decodes")
    mean = sum(sizes) / len(sizes)
    gpu = min(GPU_MOST, GPU_SPEED / mean)
    cpu = workers * CORE_SPEED / mean
    size = f"JPEGs of about {mean / 1e6:.2f} megapixels with {workers} {'worker' if workers == 1 else 'workers'}"
    if gpu > cpu:
        return Decoder(device, f"faster for {size}")
    return Decoder(None, f"faster than the GPU for {size}")


def _jpeg_pixels(stored: object) -> int | None:
    """Return the number of pixels of a JPEG that the GPU decodes; None for any other image."""
    try:
        content = stored.read() if isinstance(stored, Item) else stored
        image = open_image(content)  # type: ignore[arg-type]  # whatever a source stores
    except StorageError:
        raise
    except DataError:
        return None
    if not isinstance(image, Jpeg) or image.colours not in COLOURS or end_of_baseline(image.content) is None:
        return None
    return image.height * image.width


def _stored(source: Source) -> Iterator[object]:
    for index in range(min(SAMPLE, len(source))):
        try:
            yield source.read(index)
        except StorageError:
            raise
        except DataError:  # reported when it is read in its turn
            yield b""
