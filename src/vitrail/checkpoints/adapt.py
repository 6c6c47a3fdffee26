"""Adapt a model to other classes, another image or patch size, or other channels."""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from vitrail.checkpoints.bundle import CLASSIFICATION, Bundle
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.position import Method, check_method

ChannelMethod = Literal["repeat", "mean"]
"""How to change the input channels of kernels: `repeat` cycles through the old channels (as timm does; for one channel
they are summed, so that a grey image gives the same features as in RGB), `mean` gives every new channel the mean of the
old ones. Both preserve the scale of the output."""


def adapt(
    bundle: Bundle,
    *,
    classes: int | tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    position_method: Method = "timm",
    channel_method: ChannelMethod = "repeat",
) -> Bundle:
    """Adapt the bundle's model and preprocessing in place, and record the changes in its provenance."""
    check_method(position_method)
    done = []
    if channels is not None and channels != bundle.model.config.channels:
        done.append(_change_channels(bundle, channels, channel_method))
    if image_size is not None or patch_size is not None:
        done += _change_size(bundle, image_size, patch_size, position_method)
    if classes is not None:
        done += _change_classes(bundle, classes)
    if done:
        bundle.provenance["adapted"] = [*bundle.provenance.get("adapted", []), *done]
    return bundle


def _change_classes(bundle: Bundle, classes: int | tuple[str, ...]) -> list[str]:
    if bundle.task != CLASSIFICATION:
        raise ConfigError(f"the model's task is {bundle.task}, so its outputs are not classes; leave classes out")
    if isinstance(classes, str) or (not isinstance(classes, int) and not all(isinstance(n, str) for n in classes)):
        raise ConfigError(f"classes is {classes!r}; pass their number, or a tuple of names")
    old, names = bundle.model.config.classes, None if isinstance(classes, int) else tuple(classes)
    new = classes if isinstance(classes, int) else len(classes)
    if new == old and names in (None, bundle.classes):
        return []
    if new == old and bundle.classes is None:
        bundle.classes = names  # keep the head; only the names are new
        return [f"{new} classes named"]
    bundle.model.reset_head(new)
    bundle.classes = names
    return [f"head reset {old} -> {new}"]


def _change_size(
    bundle: Bundle,
    image_size: int | tuple[int, int] | None,
    patch_size: int | tuple[int, int] | None,
    method: Method,
) -> list[str]:
    old = bundle.model.config
    bundle.model.resize(image_size, patch_size, method=method)
    new = bundle.model.config
    done = []
    if new.patch_size != old.patch_size:
        done.append(f"patch {_by(old.patch_size)} -> {_by(new.patch_size)} by pseudo-inverse")
    if new.grid != old.grid and old.position != "none":
        done.append(f"position {_by(old.grid)} -> {_by(new.grid)} by {method}")
    if new.image_size != bundle.preprocess.size:
        done.append(f"image {_by(bundle.preprocess.size)} -> {_by(new.image_size)}")
        bundle.preprocess = bundle.preprocess.resized(new.image_size)
    return done


def _change_channels(bundle: Bundle, channels: int, method: ChannelMethod) -> str:
    model, old = bundle.model, bundle.model.config.channels
    if model.config.stem == "linear_norm":
        raise CheckpointError(
            "the stem 'linear_norm' normalises whole patches, so its number of channels cannot change"
        )
    if method not in ("repeat", "mean"):
        raise CheckpointError(f"no channel method is called {method!r}; choose repeat or mean")
    changed = model.config.replace(channels=channels)  # validate before changing anything
    first = _first_convolution(model)
    kernel = changed_channels(first.weight.detach(), channels, method)
    first.weight = nn.Parameter(kernel, requires_grad=first.weight.requires_grad)
    first.in_channels = channels
    model.reconfigure(changed)
    bundle.preprocess = bundle.preprocess.with_channels(channels)
    return f"channels {old} -> {channels} by {method}"


def _first_convolution(model: nn.Module) -> nn.Conv2d:
    """Return the layer that takes the pixels."""
    stem = cast("nn.Module", model.patch_embed)
    return next(module for module in stem.modules() if isinstance(module, nn.Conv2d))


def changed_channels(kernel: Tensor, channels: int, method: ChannelMethod) -> Tensor:
    """Change the channels of kernels (D, C, h, w) so that their outputs for a grey image stay the same."""
    old = kernel.shape[1]
    if method == "mean":
        return kernel.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1) * (old / channels)
    exact = kernel.double()
    if channels == 1:
        return exact.sum(dim=1, keepdim=True).to(kernel.dtype)
    repeated = torch.cat([exact] * -(-channels // old), dim=1)[:, :channels]
    return (repeated * (old / channels)).to(kernel.dtype)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
