"""Errors with an HTTP status."""

from vitrail.errors import CheckpointError, ConfigError, DataError, InputError, VitrailError


class HttpError(Exception):
    """An error response: a status and a one-line message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after: int | None = None,
        reason: str = "request",
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        self.reason = reason
        """Label for the metrics."""
        self.allow = allow
        """The HTTP methods this path supports."""


def method_not_allowed(allow: str) -> HttpError:
    """Return the error for another method than those in `allow`, the value of the Allow header."""
    methods = " or ".join(sorted(method.strip() for method in allow.split(",")))
    return HttpError(405, f"method not allowed; use {methods}", allow=allow)


class ClientDisconnected(Exception):  # noqa: N818 - named for what happened
    """The client closed the connection before the response."""


def as_http_error(error: VitrailError) -> HttpError:
    """Map a `VitrailError` to an HTTP status."""
    # 422: the request was understood but does not fit the model. Anything else is a fault of the model.
    if isinstance(error, ConfigError | InputError | DataError | CheckpointError):
        return HttpError(422, str(error))
    return HttpError(500, str(error), reason="model")
