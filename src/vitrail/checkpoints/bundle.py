"""The bundle: a folder with everything needed to use a model: weights, architecture, task, preprocessing, class names.

model.safetensors   the weights, under our names (timm's)
config.json         under "vitrail": format_version, weights_sha256, vit, task, preprocess, classes, provenance, and
                    task_constants if the task has any; and, if timm supports the model, the keys that timm needs
                    to open the folder
README.md           a model card
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from vitrail._version import __version__
from vitrail.checkpoints.assumptions import Assumption, announce
from vitrail.checkpoints.files import read_json, read_weights
from vitrail.checkpoints.tensors import Dtype, check_dtypes, in_dtype, loaded_model
from vitrail.checkpoints.timm_config import timm_config
from vitrail.checkpoints.writing import atomic_folder, write_safetensors
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.io import atomic_write, file_digest
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.text import short_repr

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
WEIGHTS_DIGEST = "weights_sha256"
"""The key in config.json for the digest of the weights, as printed by `sha256sum model.safetensors`."""
CLASSIFICATION = "classification"
"""The task of a model whose file does not name one: other libraries' checkpoints are classifiers."""
OF_CLASSES = (CLASSIFICATION, "segmentation")
"""The tasks whose outputs are classes."""
TAGS = {
    CLASSIFICATION: ("image-classification",),
    "multilabel": ("image-classification", "multi-label"),
    "regression": ("image-regression",),
    "segmentation": ("image-segmentation",),
}
"""The tags of a task on the Hugging Face Hub, for the model card; a task without a row has none of its own.
`tasks` cannot have this table, because it is a higher layer."""
METRICS = "metrics"
"""The key in the provenance for the model's metrics, as shown in the model card."""
TEACHER = "teacher"
"""The key in the provenance for the name and digest of the model's teacher."""


@dataclass
class Bundle:
    """A ready-to-use model, as returned by `vitrail.load`."""

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...] | None = None
    """The class names in the order of the head's outputs; None if unknown."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The source of the weights, and how they were changed."""
    origin: Path | None = None
    """The path it was opened from; not saved."""
    assumptions: tuple[Assumption, ...] = ()
    """Fields that its file does not record and that were assumed; saved as sentences in the provenance."""
    announced: bool = False
    """Whether its assumptions were logged; not saved."""
    task: str = CLASSIFICATION
    """The name of the task that the head was trained for; without a head it has no meaning, and is not saved."""
    task_constants: dict[str, Any] = field(default_factory=dict)
    """What the task took from the training data, such as the mean of a regression target."""

    def __post_init__(self) -> None:
        outputs = self.model.config.classes
        if self.classes is not None and len(self.classes) != outputs:
            raise CheckpointError(
                f"{len(self.classes)} class names for a head of {outputs} outputs; pass one per output"
            )

    def announce(self) -> None:
        """Log the assumptions once. Call it after all checks, so that an error is not preceded by warnings."""
        if not self.announced:
            announce(self.assumptions)
        self.announced = True

    @property
    def coverage(self) -> str:
        """The tensors loaded and the changes made, in one line."""
        fresh = self.provenance.get("fresh") or []
        tensors, count = len(self.model.state_dict()), sum(p.numel() for p in self.model.parameters())
        return ", ".join(
            [
                str(self.provenance.get("coverage") or f"{tensors} tensors, {count / 1e6:.2f} M parameters"),
                *([f"fresh: {' '.join(map(str, fresh))}"] if fresh else []),
                *map(str, self.provenance.get("adapted") or []),
            ]
        )

    @property
    def taught_by(self) -> str | None:
        """The name and digest of the model that it learned from; None without a teacher."""
        teacher = self.provenance.get(TEACHER)
        return f"{teacher.get('name')} ({teacher.get('digest')})" if isinstance(teacher, Mapping) else None

    def in_dtype(self, dtype: Dtype) -> "Bundle":
        """Return the bundle in another dtype, or itself if it has that dtype."""
        state = self.model.state_dict()
        changed = in_dtype(dict(state), dtype)
        if all(changed[name].dtype == tensor.dtype for name, tensor in state.items()):
            return self
        return replace(self, model=loaded_model(self.model.config, changed)[0])

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the bundle to a folder, atomically."""
        target = Path(folder)
        with atomic_folder(target, overwrite=overwrite) as temporary:
            self.write(temporary)
        return target

    def write(self, folder: Path) -> None:
        """Write the bundle's files into an existing folder; `save` is atomic."""
        if misfit := _misfit(self.preprocess, self.model.config):  # it could not be loaded again
            raise CheckpointError(f"the bundle {misfit}; make them agree before you save it")
        weights = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        write_safetensors(folder / WEIGHTS, weights, {"format": "pt"})
        config = self._config(file_digest(folder / WEIGHTS))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(self._card(), encoding="utf-8")

    def write_card(self, folder: Path) -> None:
        """Rewrite the model card, for example when the metrics are known."""
        with atomic_write(folder / CARD) as temporary:
            temporary.write_text(self._card(), encoding="utf-8")

    def _config(self, digest: str) -> dict[str, Any]:
        ours = {
            "format_version": FORMAT_VERSION,
            WEIGHTS_DIGEST: digest,  # not the last key, so that removing the line leaves valid JSON
            "vit": json.loads(self.model.config.resolved().to_json()),
            "task": self.task if self.model.config.classes else None,
            **({"task_constants": self.task_constants} if self.task_constants and self.model.config.classes else {}),
            "preprocess": json.loads(self.preprocess.to_json()),
            "classes": None if self.classes is None else list(self.classes),
            "provenance": {"written_by": f"vitrail {__version__}", **self.provenance},
        }
        return {"vitrail": ours, **timm_config(self.model.config, self.preprocess, self.classes)}

    def _card(self) -> str:
        config = self.model.config
        parameters = sum(p.numel() for p in self.model.parameters())
        height, width = config.image_size
        lines = [
            "---",
            "library_name: vitrail",
            f"tags: [{', '.join([*TAGS.get(self.task, ()), 'vision-transformer'])}]",
            "---",
            "",
            "# Vision Transformer" if config.depth else "# ResNet",
            "",
            f"{parameters:,} parameters; {config.encoder_text}; "
            f"images of {height}×{width} pixels in patches of {config.patch_size[0]}×{config.patch_size[1]}.",
            "",
            "```python",
            "import vitrail",
            "",
            'bundle = vitrail.load("path/to/this/folder")',
            "```",
            "",
            *([] if self.task == CLASSIFICATION else [f"- Task: {self.task}"]),
            f"- {'Classes' if self.task in OF_CLASSES else 'Outputs'}: {_names(self.classes, config.classes)}",
            f"- Preprocessing: {self.preprocess.resize} to {height}×{width}, {self.preprocess.interpolation}, mean "
            f"{list(self.preprocess.mean)}, std {list(self.preprocess.std)}",
            *(f"- {key}: {value}" for key, value in self.provenance.items() if key not in (METRICS, TEACHER)),
            *([f"- Teacher: {taught_by}"] if (taught_by := self.taught_by) else []),
            *_metrics(self.provenance.get(METRICS)),
        ]
        return "\n".join(lines) + "\n"


def digest_model(bundle: Bundle) -> str:
    """Return a digest of a model: equal digests give equal predictions."""
    words = [
        bundle.model.config.model_dump_json(),
        bundle.preprocess.model_dump_json(),
        json.dumps(bundle.classes),
        bundle.task,
        *([json.dumps(bundle.task_constants, sort_keys=True)] if bundle.task_constants else []),
    ]
    digest = hashlib.sha256("\0".join(words).encode())
    for name, tensor in bundle.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def read_bundle(folder: Path, *, fresh: Sequence[str] = (), dtype: Dtype = "float32") -> Bundle:
    """Read a bundle from its folder."""
    ours = read_json(folder / CONFIG)["vitrail"]
    version = ours.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} is a bundle of format {short_repr(version)}, and this version of vitrail reads format "
            f"{FORMAT_VERSION}; update vitrail"
        )
    missing = [key for key in ("vit", "task", "preprocess", "classes", "provenance") if key not in ours]
    if missing:
        raise CheckpointError(f"{folder / CONFIG} lacks {', '.join(missing)} under 'vitrail'; was it edited?")
    config = ViTConfig.from_json(json.dumps(ours["vit"]))
    check_weights(folder, ours)
    weights = read_weights(folder / WEIGHTS)
    if config.depth > len(weights):
        raise CheckpointError(
            f"{folder} says {config.depth} layers, but has only {len(weights)} tensors; was it edited?"
        )
    check_dtypes(weights, folder / WEIGHTS)
    model, initialised = loaded_model(config, in_dtype(weights, dtype), fresh=fresh)
    preprocess = Preprocess.from_json(json.dumps(ours["preprocess"]))
    if misfit := _misfit(preprocess, config):
        raise CheckpointError(f"{folder / CONFIG} {misfit}; was it edited?")
    names = ours["classes"]
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        actual = short_repr(names)
        raise CheckpointError(f"{folder / CONFIG} should have a list of names as classes, found {actual}")
    task = ours["task"] if ours["task"] is not None else CLASSIFICATION
    if not isinstance(task, str):
        raise CheckpointError(f"{folder / CONFIG} should have the name of a task, found {short_repr(task)}")
    constants = ours.get("task_constants", {})
    if not isinstance(constants, dict):
        raise CheckpointError(
            f"{folder / CONFIG} should have an object as task_constants, found {short_repr(constants)}"
        )
    if not isinstance(ours["provenance"], dict):
        actual = short_repr(ours["provenance"])
        raise CheckpointError(f"{folder / CONFIG} should have an object as provenance, found {actual}")
    classes = None if names is None else tuple(names)
    provenance = {**ours["provenance"], **({"fresh": initialised} if initialised else {})}
    return Bundle(model, preprocess, classes, provenance, task=task, task_constants=constants)


def is_bundle(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a bundle."""
    return isinstance(config.get("vitrail"), dict)


def check_weights(folder: Path, ours: Mapping[str, Any]) -> None:
    """Raise if the weights do not match the recorded digest; a bundle without a digest passes."""
    expected = ours.get(WEIGHTS_DIGEST)
    if expected is None:
        return
    file = folder / WEIGHTS
    try:
        digest = file_digest(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if digest != expected:
        raise CheckpointError(
            f"{file} is corrupt: its digest is not the {WEIGHTS_DIGEST} in {folder / CONFIG}; copy it again, or remove "
            f"that line if you changed the weights yourself"
        )


def imagenet_names() -> tuple[str, ...]:
    """Return the class names of ImageNet-1k in the usual order: by WordNet ID, "tench" first."""
    text = (resources.files("vitrail.checkpoints") / "imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def _metrics(metrics: Any) -> list[str]:
    """Return the metrics as a Markdown table; nothing if there are none."""
    if not isinstance(metrics, Mapping) or not metrics:
        return []
    rows = [f"| {name} | {value} |" for name, value in metrics.items()]
    return ["", "## Metrics", "", "| metric | value |", "|---|---|", *rows]


def _names(classes: tuple[str, ...] | None, outputs: int) -> str:
    if classes is None:
        return f"{outputs}, without names" if outputs else "none, a backbone"
    shown = ", ".join(classes[:10])
    return f"{len(classes)} ({shown}{', …' if len(classes) > 10 else ''})"


def _misfit(preprocess: Preprocess, config: ViTConfig) -> str | None:
    """Return how the preprocessing does not match the model's input; None if it matches."""
    if (preprocess.size, preprocess.channels) == (config.image_size, config.channels):
        return None
    prepared, expected = _sides(preprocess.size, preprocess.channels), _sides(config.image_size, config.channels)
    return f"prepares images of {prepared} for a model that takes {expected}"


def _sides(size: tuple[int, int], channels: int) -> str:
    return f"{size[0]}×{size[1]} pixels in {channels} channels"
