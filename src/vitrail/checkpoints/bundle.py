"""The bundle: a model as one folder, with everything it needs to be used: weights, architecture, preprocessing, names.

model.safetensors   the weights, under our names (timm's)
config.json         under "vitrail": format_version, weights_sha256, vit, preprocess, classes, provenance;
                    beside it, where timm can express the model, what timm needs to open the folder
README.md           a model card
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail._version import __version__
from vitrail.checkpoints.assumptions import Assumption, announce
from vitrail.checkpoints.dtypes import Dtype, check_numbers, in_dtype
from vitrail.checkpoints.files import read_json, read_weights
from vitrail.checkpoints.strict import loaded_model
from vitrail.checkpoints.timm_config import timm_config
from vitrail.checkpoints.writing import whole_folder, write_safetensors
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.io import file_digest, whole
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.schema import MAX_SHOWN

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
WEIGHTS_DIGEST = "weights_sha256"
"""What config.json calls the digest of the weights, as `sha256sum model.safetensors` prints it."""
METRICS = "metrics"
"""Under this name provenance has what the model was measured at, as a card shows it."""


@dataclass
class Bundle:
    """A model that can be used: what `vitrail.load` returns."""

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...] | None = None
    """The names of the classes in the order of the head's outputs; None where nobody knows them."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the weights come from and what was done to them."""
    origin: Path | None = None
    """Where it was opened; not saved."""
    assumptions: tuple[Assumption, ...] = ()
    """What its file did not say and was taken for granted; kept, as sentences, in the provenance of what is saved."""
    announced: bool = False
    """Whether its assumptions have been said; not saved."""

    def __post_init__(self) -> None:
        outputs = self.model.config.classes
        if self.classes is not None and len(self.classes) != outputs:
            raise CheckpointError(f"{len(self.classes)} class names for a head of {outputs} outputs; give one for each")

    def announce(self) -> None:
        """Say once what was assumed. Whoever opens a file does it when the file is accepted: a refusal stands alone."""
        if not self.announced:
            announce(self.assumptions)
        self.announced = True

    @property
    def coverage(self) -> str:
        """What was found in the file and done to it, in one line."""
        fresh = self.provenance.get("fresh") or []
        tensors, count = len(self.model.state_dict()), sum(p.numel() for p in self.model.parameters())
        return ", ".join(
            [
                str(self.provenance.get("coverage") or f"{tensors} tensors, {count / 1e6:.2f} M parameters"),
                *([f"fresh: {' '.join(map(str, fresh))}"] if fresh else []),
                *map(str, self.provenance.get("adapted") or []),
            ]
        )

    def in_dtype(self, dtype: Dtype) -> "Bundle":
        """Return the bundle in other numbers, or itself where it has them already; it stays as it is."""
        state = self.model.state_dict()
        changed = in_dtype(dict(state), dtype)
        if all(changed[name].dtype == tensor.dtype for name, tensor in state.items()):
            return self
        return replace(self, model=loaded_model(self.model.config, changed)[0])

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the bundle as a folder. It is there whole or not at all."""
        target = Path(folder)
        with whole_folder(target, overwrite=overwrite) as temporary:
            self.write(temporary)
        return target

    def write(self, folder: Path) -> None:
        """Write the bundle's files into a folder that is there. `save` is the safe way."""
        if misfit := _misfit(self.preprocess, self.model.config):  # it could not be opened again
            raise CheckpointError(f"the bundle {misfit}; make them agree before you save it")
        weights = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        write_safetensors(folder / WEIGHTS, weights, {"format": "pt"})
        config = self._config(file_digest(folder / WEIGHTS))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(self._card(), encoding="utf-8")

    def write_card(self, folder: Path) -> None:
        """Write the model card anew, where more is known of the model than when its weights were written."""
        with whole(folder / CARD) as temporary:
            temporary.write_text(self._card(), encoding="utf-8")

    def _config(self, digest: str) -> dict[str, Any]:
        ours = {
            "format_version": FORMAT_VERSION,
            WEIGHTS_DIGEST: digest,  # not the last, so that what is left is JSON when somebody removes the line
            "vit": json.loads(self.model.config.resolved().to_json()),
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
            "tags: [image-classification, vision-transformer]",
            "---",
            "",
            "# Vision Transformer",
            "",
            f"{parameters:,} parameters; {config.depth} blocks of width {config.width} with {config.heads} heads; "
            f"images of {height}×{width} pixels in patches of {config.patch_size[0]}×{config.patch_size[1]}.",
            "",
            "```python",
            "import vitrail",
            "",
            'bundle = vitrail.load("path/to/this/folder")',
            "```",
            "",
            f"- Classes: {_names(self.classes, config.classes)}",
            f"- Preprocessing: {self.preprocess.resize} to {height}×{width}, {self.preprocess.interpolation}, mean "
            f"{list(self.preprocess.mean)}, std {list(self.preprocess.std)}",
            *(f"- {key}: {value}" for key, value in self.provenance.items() if key != METRICS),
            *_metrics(self.provenance.get(METRICS)),
        ]
        return "\n".join(lines) + "\n"


def _metrics(metrics: Any) -> list[str]:
    """Return what a model was measured at as a table; nothing where it was not."""
    if not isinstance(metrics, Mapping) or not metrics:
        return []
    rows = [f"| {name} | {value} |" for name, value in metrics.items()]
    return ["", "## Metrics", "", "| metric | value |", "|---|---|", *rows]


def _names(classes: tuple[str, ...] | None, outputs: int) -> str:
    if classes is None:
        return f"{outputs}, without names" if outputs else "none, a backbone"
    shown = ", ".join(classes[:10])
    return f"{len(classes)} ({shown}{', …' if len(classes) > 10 else ''})"


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _misfit(preprocess: Preprocess, config: ViTConfig) -> str | None:
    """Say where the preprocessing makes other images than the model takes; None where it does not."""
    if (preprocess.size, preprocess.channels) == (config.image_size, config.channels):
        return None
    made, taken = _sides(preprocess.size, preprocess.channels), _sides(config.image_size, config.channels)
    return f"prepares images of {made} for a model that takes {taken}"


def _sides(size: tuple[int, int], channels: int) -> str:
    return f"{size[0]}×{size[1]} pixels in {channels} channels"


def is_bundle(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json is that of a bundle."""
    return isinstance(config.get("vitrail"), dict)


def check_weights(folder: Path, ours: Mapping[str, Any]) -> None:
    """Refuse weights that are not those that the bundle was written with; one without a digest is taken as it is."""
    wanted = ours.get(WEIGHTS_DIGEST)
    if wanted is None:
        return
    file = folder / WEIGHTS
    try:
        found = file_digest(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    if found != wanted:
        raise CheckpointError(
            f"{file} is corrupt: its digest is not the {WEIGHTS_DIGEST} in {folder / CONFIG}; copy it again, or remove "
            f"that line where you have changed the weights yourself"
        )


def read_bundle(folder: Path, *, fresh: Sequence[str] = (), dtype: Dtype = "float32") -> Bundle:
    """Read a bundle's folder."""
    ours = read_json(folder / CONFIG)["vitrail"]
    version = ours.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} is a bundle of format {_short(version)}, and this version of vitrail reads format "
            f"{FORMAT_VERSION}; update vitrail"
        )
    missing = [key for key in ("vit", "preprocess", "classes", "provenance") if key not in ours]
    if missing:
        raise CheckpointError(f"{folder / CONFIG} lacks {', '.join(missing)} under 'vitrail'; was it edited?")
    config = ViTConfig.from_json(json.dumps(ours["vit"]))
    check_weights(folder, ours)
    weights = read_weights(folder / WEIGHTS)
    if config.depth > len(weights):
        raise CheckpointError(
            f"{folder} says {config.depth} layers, but has only {len(weights)} tensors; was it edited?"
        )
    check_numbers(weights, folder / WEIGHTS)
    model, started_fresh = loaded_model(config, in_dtype(weights, dtype), fresh=fresh)
    preprocess = Preprocess.from_json(json.dumps(ours["preprocess"]))
    if misfit := _misfit(preprocess, config):
        raise CheckpointError(f"{folder / CONFIG} {misfit}; was it edited?")
    names = ours["classes"]
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        found = _short(names)
        raise CheckpointError(f"{folder / CONFIG} should have a list of names as classes, found {found}")
    if not isinstance(ours["provenance"], dict):
        found = _short(ours["provenance"])
        raise CheckpointError(f"{folder / CONFIG} should have an object as provenance, found {found}")
    classes = None if names is None else tuple(names)
    provenance = {**ours["provenance"], **({"fresh": started_fresh} if started_fresh else {})}
    return Bundle(model, preprocess, classes, provenance)
