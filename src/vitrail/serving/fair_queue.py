"""A queue whose clients take turns, and of each client its requests."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """Queued jobs by client and request."""

    def __init__(self) -> None:
        self._clients: OrderedDict[Hashable, OrderedDict[Hashable, deque[Job]]] = OrderedDict()

    def __iter__(self) -> Iterator[Job]:
        return (job for requests in self._clients.values() for jobs in requests.values() for job in jobs)

    def add(self, client: Hashable, request: Hashable, job: Job) -> None:
        """Append a job to its request."""
        self._clients.setdefault(client, OrderedDict()).setdefault(request, deque()).append(job)

    def take(self, may: Callable[[Hashable], bool]) -> tuple[Hashable, Job] | None:
        """Take a job of the least recently served client for which `may` returns True."""
        for client in self._clients:
            if may(client):
                return client, self._pop(client)
        return None

    def _pop(self, client: Hashable) -> Job:
        requests = self._clients[client]
        request = next(iter(requests))
        jobs = requests[request]
        job = jobs.popleft()
        requests.move_to_end(request)
        self._clients.move_to_end(client)
        if not jobs:
            del requests[request]
        if not requests:
            del self._clients[client]
        return job
