"""What the service does not do, with the status that says whose fault it is."""

from vitrail.errors import CheckpointError, ConfigError, DataError, InputError, VitrailError


class HttpError(Exception):
    """An answer that is no result: a status and one sentence."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        retry_after: int | None = None,
        reason: str = "request",
        allow: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after = status, sentence, retry_after
        self.reason = reason
        """One word for the metrics."""
        self.allow = allow
        """The methods that the address does take."""


class ClientDisconnected(Exception):  # noqa: N818 - named for what happened
    """Nobody waits for the answer any more."""


def as_http_error(error: VitrailError) -> HttpError:
    """Say with a status what a person caused."""
    # A setting or an argument was understood and does not fit the model; anything else is the model's own fault.
    if isinstance(error, ConfigError | InputError | DataError | CheckpointError):
        return HttpError(422, str(error))
    return HttpError(500, str(error), reason="model")
