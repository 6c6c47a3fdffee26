"""Files at URLs through fsspec: size and version, range requests, listings. With retries, and errors in one sentence.

Filesystems are opened on first use in every process: their connections and threads do not survive a fork.
"""

import errno
import functools
import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from vitrail.errors import ConfigError, DataError, StorageError, VitrailError
from vitrail.text import first_line, printable_path

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}
"""URL schemes, and the package that each needs."""
ATTEMPTS = 7
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Seconds between two attempts: doubled each time."""
DEFAULT_TIMEOUT = 30.0
_LOGIN = re.compile(r"^(https?://)[^/?#]*@", re.IGNORECASE)
_REMOTE = re.compile(rb"(?:s3|gs|https?|hf)://", re.IGNORECASE)
_VERSION_FIELDS = (
    "ETag", "etag", "blob_id", "generation", "md5Hash", "Content-MD5", "Last-Modified", "LastModified", "mtime",
)  # fmt: skip
_WORTH_RETRYING = (408, 409, 425, 429)
"""HTTP status codes of temporary errors, besides 5xx."""
_NO_BUCKET = re.compile(r"bucket does not exist|NoSuchBucket")
_DENIED = re.compile(r"credential|access.?key|signature|token|forbidden|denied|unauthorized", re.IGNORECASE)


class MissingFileError(DataError):
    """A URL that does not exist."""


class Status(NamedTuple):
    """The version of a file."""

    size: int
    tag: int
    """Hash of what the server says about the version: ETag, generation, or time of the last change; 0 if nothing."""

    @property
    def known(self) -> bool:
        """Whether the server says something about the version, so that a change of equal size is noticed."""
        return self.tag != 0


def is_remote(place: str | bytes) -> bool:
    """Return whether a place is a URL with a supported scheme."""
    return _REMOTE.match(os.fsencode(place)) is not None


def path_in(url: str) -> str:
    """Return a URL without its query; for other schemes than HTTP, the URL itself: a "?" is then part of the name."""
    return url.partition("?")[0] if url.lower().startswith("http") else url


def public_url(url: str, *, hashed: bool = False) -> str:
    """Return a URL without what may be secret: its query, which may be replaced by a hash, and a login."""
    bare = _LOGIN.sub(r"\1", path_in(url))
    return f"{bare}?{_hash(url):014x}" if hashed and url != path_in(url) else bare


def differ_by_query(urls: Iterable[str]) -> bool:
    """Return whether some URLs differ only in their queries. Otherwise, new signatures do not change public URLs."""
    different = set(urls)
    return len({path_in(url) for url in different}) < len(different)


def request_timeout() -> float:
    """Return the seconds after which a connection without data fails: $VITRAIL_REMOTE_TIMEOUT, by default 30."""
    return positive_setting("VITRAIL_REMOTE_TIMEOUT", DEFAULT_TIMEOUT)


def positive_setting(name: str, default: float) -> float:
    """Return a number from an environment variable."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is {text!r}; set a number, 0 or more")
    return value


def status(url: str) -> Status:
    """Return size and version of a file, from the server."""

    def once() -> Status:
        filesystem = _filesystem(url)
        filesystem.invalidate_cache()
        info = _info(filesystem, url)
        if info.get("type") == "directory":
            raise MissingFileError(f"{printable_path(url)} is a folder; give its files with a pattern")
        if info.get("size") is None:
            raise DataError(f"the server does not say how large {printable_path(url)} is; download the file")
        version = [f"{name} {info[name]}" for name in _VERSION_FIELDS if info.get(name)]
        return Status(int(info["size"]), _hash("\n".join(version)) if version else 0)

    return _retried(url, once)


def _info(filesystem: Any, url: str) -> dict[str, Any]:
    try:
        info: dict[str, Any] = filesystem.info(url)
    except OSError as error:
        # S3 says why it refuses a GET request; the response to a HEAD request has no body.
        if url.lower().startswith("s3:") and (isinstance(error, PermissionError) or error.errno == errno.EINVAL):
            filesystem.cat_file(url, start=0, end=1)
        raise
    return info


def fetch(url: str, start: int, size: int) -> bytes:
    """Return a range of a file's bytes, from the server."""
    if size == 0:
        return b""

    def once() -> bytes:
        filesystem = _filesystem(url)
        if url.lower().startswith("http"):
            sync = importlib.import_module("fsspec.asyn").sync
            content: bytes = sync(filesystem.loop, _http_range, filesystem, url, start, size)
        else:
            content = filesystem.cat_file(url, start=start, end=start + size)
        if len(content) > size:
            raise DataError(
                f"the server of {printable_path(url)} ignores range requests; download the file, or use another server"
            )
        if len(content) < size:
            raise OSError(errno.EIO, f"only {len(content):,} of {size:,} bytes arrived")
        return content

    return _retried(url, once)


async def _http_range(filesystem: Any, url: str, start: int, size: int) -> bytes:
    """Return a range; a few more bytes if the server ignores ranges: the whole file may not fit into memory."""
    session = await filesystem.set_session()
    headers = {**filesystem.kwargs.get("headers", {}), "Range": f"bytes={start}-{start + size - 1}"}
    chunks, received = list[bytes](), 0
    async with session.get(filesystem.encode_url(url), **{**filesystem.kwargs, "headers": headers}) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            received += len(chunk)
            if received > size:
                response.close()
                break
    return b"".join(chunks)


def matches(pattern: str) -> list[str]:
    """Return the URLs that match a pattern with * or [...], in order; a pattern that ends in / matches all files."""

    def once() -> list[str]:
        filesystem = _filesystem(pattern)
        filesystem.invalidate_cache()
        if pattern.endswith("/"):
            rows = filesystem.ls(pattern.rstrip("/"), detail=True)
            found = [row["name"] for row in rows if row.get("type") != "directory"]
        else:
            found = list(filesystem.glob(pattern))
        return sorted(str(filesystem.unstrip_protocol(name)) for name in found)

    try:
        return _retried(pattern, once)
    except MissingFileError:
        return []


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


# ── filesystems ──


def _filesystem(url: str) -> Any:
    return _opened(os.getpid(), urlsplit(url).scheme.lower(), request_timeout())


@functools.cache
def _opened(process: int, scheme: str, timeout: float) -> Any:  # noqa: ARG001 - one for every process
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(PACKAGES[scheme])
    except ImportError:
        raise DataError(f"{scheme}:// URLs need {PACKAGES[scheme]}: pip install 'vitrail[remote]'") from None
    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        limits = importlib.import_module("aiohttp").ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        # A compressed response would have other offsets.
        options = {"client_kwargs": {"timeout": limits}, "headers": {"Accept-Encoding": "identity"}}
    elif scheme == "s3":
        limits = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 0}}
        options = {"config_kwargs": limits}
    filesystem = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    if scheme == "s3":
        filesystem.retries = 1  # retried here, for all schemes alike
    return filesystem


# ── retries and errors ──


def _retried(url: str, request: Callable[[], T]) -> T:
    """Return what a request returns; repeat it after temporary errors, with increasing delays."""
    delay = FIRST_DELAY
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except (VitrailError, ImportError, TypeError, AttributeError):
            raise
        except Exception as error:  # every filesystem has its own exceptions
            cause = _cause(error)
            if (final := _permanent(url, cause)) is not None:
                raise final from None
            if attempt == ATTEMPTS:
                raise StorageError(
                    f"{printable_path(url)} cannot be read: {_reason(cause)} ({ATTEMPTS} attempts); check the server "
                    "and the network, then rerun the same command"
                ) from None
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)
    raise AssertionError("unreachable")


def _cause(error: BaseException) -> BaseException:
    """Return the error behind a FileNotFoundError: fsspec raises one for every failed HTTP request."""
    behind = error.__cause__
    if not isinstance(error, FileNotFoundError) or behind is None or isinstance(behind, FileNotFoundError):
        return error
    return error if _code(behind) == 404 else behind


def _code(error: BaseException | None) -> int | None:
    """Return the HTTP status code of an error, if it has one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        code = getattr(error, "status", None) or getattr(response, "status_code", None)
    return code if isinstance(code, int) else None


def _permanent(url: str, error: BaseException) -> VitrailError | None:
    """Return what to raise for an error that another attempt would not change; None for any other error."""
    shown, code = printable_path(url), _code(error)
    if code is None and isinstance(error, OSError) and not isinstance(error, TimeoutError):
        code = _code(error.__cause__)  # s3fs translates the errors of botocore
    if code in (404, 410) or isinstance(error, FileNotFoundError):
        if _NO_BUCKET.search(str(error)):  # then no other file can be read either
            return StorageError(f"{shown} does not exist ({first_line(error)}); correct the URL")
        return MissingFileError(f"{shown} does not exist; correct the URL")
    denied = isinstance(error, PermissionError) or code in (401, 403) or "NoCredentials" in type(error).__name__
    if denied or (isinstance(error, OSError) and code in (None, 400) and _DENIED.search(str(error))):
        return StorageError(f"access to {shown} is denied: {_reason(error)}; check the credentials and permissions")
    if code is not None and 400 <= code < 500 and code not in _WORTH_RETRYING:
        return StorageError(f"{shown} cannot be read: {_reason(error)}; correct the URL")
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no data arrived in time"
    # Some messages of aiohttp quote the URL.
    code, text = _code(error), re.sub(r"https?://\S+", lambda url: printable_path(url[0]), first_line(error))
    if code is not None and not text.startswith("[Errno"):
        return f"HTTP status {code}"
    return re.sub(r"^\[Errno \d+\] | ssl:\w+", "", text)[:200]
