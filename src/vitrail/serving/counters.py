"""Prometheus metrics of the service."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Counters:
    """The metrics of one service, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        registry = self.registry
        self.requests = Counter("vitrail_requests", "HTTP requests", ("route", "status"), registry=registry)
        self.request_seconds = Histogram(
            "vitrail_request_seconds", "Request latency", ("route",), buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("vitrail_requests_in_flight", "Requests in progress", registry=registry)
        self.images = Counter("vitrail_images", "Images processed", ("model", "task"), registry=registry)
        self.refused = Counter("vitrail_refused", "Refused requests by reason", ("reason",), registry=registry)
        self.batch_size = Histogram(
            "vitrail_batch_size", "Images per batch", ("model",), buckets=_SIZES, registry=registry
        )
        self.compute_seconds = Histogram(
            "vitrail_compute_seconds", "Compute time per batch", ("model",), buckets=_SECONDS, registry=registry
        )
        self.waiting = Gauge("vitrail_queue_images", "Queued images", ("model",), registry=registry)
        self.cancelled = Counter(
            "vitrail_cancelled", "Images cancelled before their result", ("model",), registry=registry
        )
        self.reloads = Counter("vitrail_reloads", "Model reloads", ("outcome",), registry=registry)
        self.ready = Gauge("vitrail_ready", "1 if the service is ready", registry=registry)
