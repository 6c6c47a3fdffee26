"""`Recipe`: everything that decides what a training run computes, as one typed value read from TOML.

A field that is None is resolved from the data and the model when the run starts (`defaults.py`), printed with the
reason, and written into the run's recipe.toml.
"""

import hashlib
import operator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import BadFiles
from vitrail.data.decoder_choice import Decode
from vitrail.data.sources.targets import Labelling
from vitrail.errors import ConfigError, suggest
from vitrail.models.lora import LoRA
from vitrail.schema import LIMIT, Count, Frozen, Integers, Names, Positive
from vitrail.tasks.lookup import CLASSIFICATION, TASKS, task_named
from vitrail.tasks.objective import Objective
from vitrail.tasks.task import Task
from vitrail.training.averaging import Averaging
from vitrail.training.distributed import Distributed
from vitrail.training.finetune_init import FinetuneInit
from vitrail.training.optimizers import Optimizer, Schedule
from vitrail.training.pretraining.dino import DinoSettings
from vitrail.training.pretraining.distill import DistillSettings
from vitrail.training.pretraining.mae import MaeSettings
from vitrail.training.pretraining.masked_patches import MaskedPatchesSettings
from vitrail.training.teacher import TeacherSettings

METHODS = ("mae", "masked_patches", "dino", "distill")
"""The tables of a recipe for pretraining, one per method."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
_MODEL_HAS = {"size": "image_size", "channels": "channels"}


def _as_batch(value: Any) -> Any:
    """Validate the whole field at once, so that an error is one sentence and not one per member of the union."""
    if hasattr(value, "__index__") and not isinstance(value, bool) and 0 < operator.index(value) <= LIMIT:
        return operator.index(value)
    if value is None or value == "auto":
        return value
    raise PydanticCustomError("batch", f"it should be an integer from 1 to {LIMIT:,}, or 'auto'")


class DataSettings(Frozen):
    """The training data and how it is read."""

    labels: Annotated[tuple[str, ...], Names] = ()
    """The columns of a manifest that hold the labels; empty: by their names."""
    ignore: Annotated[tuple[Count, ...], Integers] = ()
    """The values in masks of pixels that count nowhere; 255 never counts."""
    val: Fraction = 0.1
    """Fraction of every class for the validation split, if the data does not define one."""
    test: Fraction = 0.2
    """Fraction of every class for the test split, if the data does not define one."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train on this fraction of every class in the training split, drawn by the seed; validation and test stay whole.
    With the same seed, a smaller fraction is contained in a larger one."""
    per_class: Positive | None = None
    """Train on at most this many images per class, drawn in the same order as `fraction`. None: no limit."""
    balance: bool = False
    """Sample every class equally often."""
    repeats: Positive = 1
    """Repeated augmentation: how often a batch contains the same image, each time augmented anew."""
    cache: Positive | None = None
    """Cache decoded images with this shorter side in pixels. None: decode the files every time."""
    on_device: bool = False
    """Keep all training images on the device and augment them there, where loading is slower than the model; the
    validation split, too, if it fits."""
    decode: Decode = "auto"
    """Where JPEGs are decoded: `cpu`, `gpu` (nvImageCodec), or `auto`, which picks the faster one."""
    bad_files: BadFiles = "skip"
    """`skip` replaces an image that cannot be read by another one and records it; `refuse` stops the run."""

    @model_validator(mode="after")
    def _check_subset(self) -> Self:
        if self.fraction < 1 and self.per_class is not None:
            raise ConfigError(
                f"data.fraction is {self.fraction} and data.per_class is {self.per_class}; leave one of them out, or "
                f"unset it with data.fraction=1 or data.per_class=none"
            )
        return self

    @property
    def subset(self) -> str | None:
        """The setting that reduces the training split, as on the command line; None if it stays whole."""
        if self.per_class is not None:
            return f"data.per_class={self.per_class}"
        return f"data.fraction={self.fraction}" if self.fraction < 1 else None


class Recipe(Frozen):
    """A training run."""

    task: str | None = None
    """What the model learns: `classification` (one class per image), `multilabel` (any number of labels), `regression`
    (numbers) or `segmentation` (a class for every pixel). None: what the labels are."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed. Shuffling, augmentation, initialisation and dropout derive from it."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Number of passes over the training split."""
    steps: Positive | None = None
    """The length of the run in steps, instead of `epochs`."""
    batch: Annotated[int | Literal["auto"] | None, BeforeValidator(_as_batch)] = None
    """Images per step, over all ranks; "auto" halves the default until it fits in memory."""
    gradient_accumulation: Positive = 1
    """Micro-batches per step and rank; more of them save memory."""
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 where the device is clearly faster with it, otherwise float32."""
    compile: bool | Literal["auto"] = False
    """Use `torch.compile`; on a GPU in bf16 also the fused training path. `auto`: on a GPU, but not on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = False
    """On CUDA: use deterministic algorithms, which are slower."""
    evaluations: Positive = 20
    """Number of validations, spread evenly over the run."""
    patience: Count = 0
    """Stop early after this many validations without improvement; 0 disables early stopping."""
    criterion: str | None = None
    """The validation metric that selects the best checkpoint. Classification: `accuracy`, `balanced_accuracy`,
    `macro_f1` or `loss`; multilabel: `map`, `macro_f1`, `exact_match` or `loss`; regression: `mae`, `rmse`, `r2` or
    `loss`; segmentation: `mean_iou`, `pixel_accuracy` or `loss`. None: the first one; for classification
    balanced_accuracy if classes are balanced or weighted."""
    save_minutes: Annotated[float, Field(ge=0, le=1e5)] = 5.0
    """Minutes between saved training states; every validation saves one, too."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ViTConfig`; `name` selects a named model ("S/16"), `paper = true` the ViT paper's options."""
    preprocess: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Preprocess`, such as `resize_to`; size and channels follow from the model."""
    pretrained: FinetuneInit | None = None
    """How to adapt the model of --from to the data. A recipe with this table requires --from."""
    teacher: TeacherSettings | None = None
    """How to learn from the model of --teacher. A recipe with this table requires --teacher."""
    freeze: Annotated[tuple[str, ...], Names] = ()
    """Patterns of parameters to freeze: "blocks.*"."""
    lora: LoRA = LoRA()
    data: DataSettings = DataSettings()
    distributed: Distributed = Distributed()
    augmentation: Augmentation | None = None
    mixing: Mixing | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    averaging: Averaging = Averaging()
    objective: Objective = Objective()
    mae: MaeSettings | None = None
    """Pretrain a masked autoencoder, without labels; `vitrail pretrain`."""
    masked_patches: MaskedPatchesSettings | None = None
    """Pretrain by masked patch prediction, without labels; `vitrail pretrain --method masked-patches`."""
    distill: DistillSettings | None = None
    """Learn the features of a teacher, without labels; `vitrail pretrain --method distill --teacher MODEL`."""

    dino: DinoSettings | None = None
    """Pretrain by self-distillation between views, without labels; `vitrail pretrain --method dino`."""

    @property
    def method(self) -> str | None:
        """The pretraining method; None if the run learns from labels."""
        return next((name for name in METHODS if getattr(self, name) is not None), None)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"epochs is {self.epochs:g} and steps is {self.steps}; leave one of them out, or unset it with "
                f"epochs=none or steps=none"
            )
        if len(methods := [name for name in METHODS if getattr(self, name) is not None]) > 1:
            raise ConfigError(f"the recipe has tables of several methods, {' and '.join(methods)}; keep one")
        if methods and self.teacher is not None:
            raise ConfigError(
                f"[teacher] is for training with labels, and {methods[0]} has none; leave one of them out"
            )
        tasks = list(TASKS.values()) if self.task is None else [task_named(self.task)]
        criteria = list(dict.fromkeys(name for task in tasks for name in task.criteria))
        if self.criterion is not None and self.criterion not in criteria:
            raise ConfigError(
                f"criterion is {self.criterion!r}; choose from {', '.join(criteria)}{suggest(self.criterion, criteria)}"
            )
        for name in ("size", "channels"):
            if name in self.preprocess:
                raise ConfigError(f"preprocess.{name} follows from the model; set model.{_MODEL_HAS[name]} instead")
        if isinstance(self.batch, int) and self.batch % (self.data.repeats * self.gradient_accumulation):
            raise ConfigError(
                f"a batch of {self.batch} is not a multiple of data.repeats {self.data.repeats} × "
                f"gradient_accumulation {self.gradient_accumulation}; change one of them"
            )
        if self.lora.rank and self.freeze:
            raise ConfigError(
                f"lora.rank is {self.lora.rank} and freeze is {list(self.freeze)}, but LoRA already freezes everything "
                f"except its adapters and the head; leave one of them out, or unset it with lora.rank=0 or freeze=[]"
            )
        # Without a pretrained model, which `check_pretrained` asks for, the optimizer is not what has to change.
        if self.lora.rank and self.optimizer.kind == "muon" and self.pretrained is not None:
            raise ConfigError(
                f"lora.rank is {self.lora.rank} and optimizer.kind is 'muon', but Muon trains the matrices that LoRA "
                f"freezes; set optimizer.kind=adamw"
            )
        return self

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of what is not trained: `freeze`; with LoRA, everything but the adapters and the head."""
        return ("*", "!*.lora_[AB]", "!head*") if self.lora.rank else self.freeze

    def check_pretrained(self, pretrained: object) -> None:
        """Raise if this recipe fine-tunes but no pretrained model is given."""
        if self.pretrained is not None and pretrained is None:
            raise ConfigError("this recipe fine-tunes a pretrained model; pass one with --from, or use another recipe")
        if self.lora.rank and self.method is not None:
            raise ConfigError(f"lora.rank is {self.lora.rank}, but pretraining trains all weights; set lora.rank=0")
        if self.lora.rank and pretrained is None:
            raise ConfigError(
                f"lora.rank is {self.lora.rank}, but LoRA freezes the weights, and without --from they are random; "
                f"pass a pretrained model with --from, or set lora.rank=0"
            )

    def check_teacher(self, teacher: object) -> None:
        """Raise if this recipe needs a teacher and none is given, or the other way round."""
        if teacher is None and self.teacher is not None:
            raise ConfigError(
                "this recipe has settings for a teacher ([teacher]); pass one with --teacher, or drop them"
            )
        if teacher is None and self.distill is not None:
            raise ConfigError("distill learns the features of a teacher; pass one with --teacher")
        if teacher is not None and self.method not in (None, "distill"):
            raise ConfigError(f"{self.method} learns without --teacher; leave it out, or use --method distill")
        if teacher is not None and self.task not in (None, CLASSIFICATION.name):
            raise ConfigError(f"the task {self.task} cannot learn from a teacher; leave out --teacher")

    def resolved_criterion(self) -> str:
        """Return the criterion, or its default given the class weights. Pretraining validates its loss."""
        if self.method is not None:
            return "loss"
        balanced = self.data.balance or self.objective.class_weights != "none"
        return self.criterion or self.known_task.default_criterion(class_balanced=balanced)

    @property
    def known_task(self) -> Task:
        """The task; classification if the data has not decided it yet."""
        return task_named(self.task or CLASSIFICATION.name)

    @property
    def labelling(self) -> Labelling:
        """How to read the labels of the data."""
        return Labelling(
            None if self.task is None else task_named(self.task).kind, self.data.labels, None, self.data.ignore
        )

    def identity(self) -> "Recipe":
        """Return the settings that the result depends on; the others are the defaults."""
        return self.replace(distributed=Distributed())

    def fingerprint(self) -> str:
        """Return a short hash of the settings that the result depends on."""
        return hashlib.blake2b(self.identity().to_json().encode(), digest_size=3).hexdigest()
