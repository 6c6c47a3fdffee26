"""The options of commands that can run on a Ray cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

import vitrail

if TYPE_CHECKING:
    from vitrail.inference.ray_cluster import RayOptions

Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on a Ray cluster and write a folder of Parquet files: local (start one on this machine), auto "
        "(the running one), host:6379 or ray://host:10001.",
    ),
]
RayWorkers = Annotated[
    int | None,
    typer.Option(min=1, help="With --ray: number of workers. By default one per GPU, or one per eight CPUs."),
]
Chunk = Annotated[int | None, typer.Option(min=1, help="With --ray: images per file of the output; by default 4096.")]


def ray_options(address: str | None, workers: int | None, chunk: int | None) -> "RayOptions | None":
    """Return the options of a job on Ray, or None for a job in this process."""
    if address is None and (workers is not None or chunk is not None):
        raise typer.BadParameter("--ray-workers and --chunk need a cluster; add --ray local or its address")
    return None if address is None else vitrail.RayOptions(address, workers, chunk)
