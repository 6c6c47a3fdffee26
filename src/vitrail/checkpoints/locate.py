"""Locate a checkpoint's weights: one file, several shards, a folder with configs, or a model on a hub.

huggingface_hub's cache, offline mode (`HF_HUB_OFFLINE`) and mirrors (`HF_ENDPOINT`) work as usual.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.config_files import FolderInfo, read_folder_info
from vitrail.checkpoints.files import SUFFIXES, read_json
from vitrail.errors import CheckpointError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""The weight files of transformers and timm; other files in the folder belong to training."""


class Source(NamedTuple):
    """The weight files of a checkpoint, and the configs next to them."""

    files: tuple[Path, ...]
    info: FolderInfo


def find(path: Path) -> Source:
    """Find the weights in a folder, and read the configs next to them."""
    if path.is_file():
        return Source((path,), read_folder_info(path.parent))
    if index := sorted(path.glob("*.index.json")):
        return Source(_shards(index[0]), read_folder_info(path))
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files and (path / "best").is_dir():
        raise CheckpointError(f"{path} is a run folder; its best model is {path / 'best'}")
    if not files:
        raise CheckpointError(f"{path} has no weight file ({', '.join(SUFFIXES)})")
    preferred = [file for name in WEIGHTS for file in files if file.name == name]
    # The same weights are often there twice, also in an older format.
    best = preferred[:1] or [file for file in files if file.suffix == ".safetensors"] or files
    if len(best) > 1:
        raise CheckpointError(f"{path} has several weight files ({', '.join(f.name for f in best)}); pass one of them")
    return Source((best[0],), read_folder_info(path))


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the shards of a large checkpoint."""
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(name, str) for name in shard_of.values()):
        raise CheckpointError(f"{index} has no valid weight_map")
    files = tuple(index.parent / Path(name).name for name in sorted(set(shard_of.values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index.parent} lacks {', '.join(missing)}, which {index.name} lists; download it too")
    return files


# ── hub ──


class HubName(NamedTuple):
    """A model on a hub."""

    repository: str
    revision: str | None


def parse(source: str) -> HubName | None:
    """Parse "hf:org/name[@revision]" or "timm:name.tag"; None for a path."""
    match = re.fullmatch(r"(hf|timm):([^@]+)(?:@(.+))?", source)
    if match is None:
        return None
    kind, name, revision = match.groups()
    repository = f"timm/{name}" if kind == "timm" else name
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise CheckpointError(
            f"{source!r} is not the name of a model on a hub; write hf:organisation/name, or timm:name.tag"
        )
    return HubName(repository, revision)


def fetch(name: HubName) -> Path:
    """Download a model's config and weights, unless cached, and return their folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    unreachable: list[Exception] = []

    def get(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name.repository, file, revision=name.revision))
        except LocalEntryNotFoundError as error:  # offline and not cached; the file may not exist
            unreachable.append(error)
            return None
        except EntryNotFoundError:
            return None

    where = name.repository + (f" at {name.revision}" if name.revision else "")
    try:
        with _quiet():
            get("config.json")
            if not unreachable:
                get("preprocessor_config.json")
                unreachable.clear()  # optional, and the cache does not record that it is absent
            weights = None if unreachable else next((path for file in WEIGHTS if (path := get(file)) is not None), None)
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub has {name.repository}, but not its revision {name.revision!r}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"the hub has no model {name.repository}, or it is private; check the name, or log in with hf auth login"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        weights = None
        unreachable.append(error)
    except HFValidationError as error:
        raise CheckpointError(f"{where} is not a valid model name ({str(error).splitlines()[0]})") from None
    except Exception as error:  # for example a wrong endpoint, which raises an error of the HTTP client
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        weights = None
        unreachable.append(error)
    # Without their config, the weights could be mistaken for another model.
    if unreachable:
        raise CheckpointError(
            f"the hub could not be reached for {where}, and {_cached()}; on a machine with a connection, download "
            f"config.json and model.safetensors from {_page(name)} into a folder, copy it here, and pass the folder "
            f"instead of the name"
        )
    if weights is None:
        raise CheckpointError(f"{where} has no supported weights ({', '.join(WEIGHTS)})")
    return weights.parent


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence huggingface_hub's log of retries; the outcome is one error message."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _page(name: HubName) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.repository}" + (f"/tree/{name.revision}" if name.revision else "")


def _cached() -> str:
    """Describe which models are in the cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        names = sorted(repository.repo_id for repository in scan_cache_dir().repos if repository.repo_type == "model")
    except CacheNotFound:
        names = []
    return f"the cache has {', '.join(names[:10])}" if names else "the cache is empty"
