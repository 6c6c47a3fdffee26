"""What two ranks execute: each checks what it receives from the other.

The argument is a folder; its folder `data` has splits and bad images.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from tests.support.plain_loss import plain_loss
from tests.support.reference_training import batches, tiny

from vitrail.data.batches import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.opening import open_data
from vitrail.data.stream import WHOLE_BATCH, Stream
from vitrail.errors import DataError
from vitrail.models.config import ConvLayer
from vitrail.models.vit import ViT
from vitrail.runtime import Processes, process_group
from vitrail.training.distributed import Ranks
from vitrail.training.optimizers import Optimizer, make_optimizer
from vitrail.training.recipe import Recipe
from vitrail.training.sessions import Stopped
from vitrail.training.state import Progress, State
from vitrail.training.step import Stepper
from vitrail.training.train import train

CPU = torch.device("cpu")
EXACT = Preprocess(size=(8, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3)
SMALL = ["batch=8", "evaluations=1", "save_minutes=0", "precision=float32", "model.image_size=8"]
SMALL += [f"model.{field}" for field in ("patch_size=4", "stem=conv", "width=16", "depth=1", "heads=2")]


def check(true: bool, words: str) -> None:
    if not true:
        raise SystemExit(f"wrong: {words}")


def messages(ranks: Ranks) -> None:
    received = ranks.tensors_from_main({"a": torch.arange(3), "b": torch.tensor(2.5)} if ranks.is_main else None)
    check(received["a"].tolist() == [0, 1, 2] and float(received["b"]) == 2.5, "the main process's tensors")
    rank = ranks.processes.rank
    numbers = torch.tensor([1.5 + rank, rank])
    ranks.all_reduce_sum(numbers)
    check(numbers.tolist() == [4.0, 1.0], "sums")
    check(ranks.all_reduce_max(3 + rank, 3 - rank, rank == 1) == [4, 3, 1], "the largest")
    check(ranks.all_gather(rank) == [0, 1] and ranks.from_main(rank) == 0, "what the others have")
    try:
        with ranks.together():
            if rank == 1:
                raise DataError("only here")
    except DataError as error:
        check(str(error) == "only here" and error.everywhere, "an error of one process")
    else:
        raise SystemExit("wrong: the other process did not fail")


def half_of(batch: Batch, rank: int) -> Batch:
    return batch._each(lambda tensor: tensor[4 * rank : 4 * rank + 4])


def begin(stem: str) -> tuple[ViT, State, Recipe]:
    layers = (ConvLayer(channels=4), ConvLayer(channels=8))
    model = tiny(**({"stem": "conv_stem", "conv_stem": layers} if stem == "conv_stem" else {}))
    recipe = Recipe(optimizer=Optimizer(kind="sgd", lr=0.01))
    return model, State(model, make_optimizer(model, recipe.optimizer), None, Progress()), recipe


def a_step(ranks: Ranks) -> None:
    """A step of two ranks equals the step of one rank with all images."""
    (batch,), alone = batches(1), Ranks(Processes(), CPU)
    model, state, recipe = begin("conv")
    with torch.no_grad():
        predictions = model(EXACT.normalise(batch.pixels)).argmax(dim=1)
    wrong = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1])  # rank 0 has three correct predictions, rank 1 has one
    batch = batch._replace(labels=(predictions + wrong) % model.config.classes)
    expected = Stepper(recipe, EXACT, CPU, "float32", plain_loss(recipe), alone).step(state, model, batch, 0.01)
    shared, state, _ = begin("conv")
    share = half_of(batch, ranks.processes.rank)
    pending = Stepper(recipe, EXACT, CPU, "float32", plain_loss(recipe), ranks).launch(
        state, ranks.wrap(shared), share, 0.01
    )
    stepped = pending.read()
    if ranks.is_main:  # reading again must not communicate
        check(pending.read() == stepped, "numbers that are read twice")
    check(stepped.total == expected.total == 4, f"{stepped.total} correct predictions instead of {expected.total}")
    check(abs(stepped.loss - expected.loss) < 1e-5, "the loss of both")
    check(abs(stepped.gradient_norm - expected.gradient_norm) < 1e-4, "the gradient of both")
    check(all(torch.allclose(p, shared.get_parameter(n), atol=1e-6) for n, p in model.named_parameters()), "weights")


def statistics(ranks: Ranks) -> None:
    """BatchNorm statistics become the mean of both ranks at the end of every step."""
    (batch,) = batches(1)
    share = half_of(batch, ranks.processes.rank)
    own, state, recipe = begin("conv_stem")
    Stepper(recipe, EXACT, CPU, "float32", plain_loss(recipe), Ranks(Processes(), CPU)).step(state, own, share, 0.01)
    shared, state, _ = begin("conv_stem")
    Stepper(recipe, EXACT, CPU, "float32", plain_loss(recipe), ranks).step(state, ranks.wrap(shared), share, 0.01)
    name = next(name for name, _ in own.named_buffers() if name.endswith("running_mean"))
    before, after = (ranks.all_gather(model.get_buffer(name).clone()) for model in (own, shared))
    check(not torch.equal(before[0], before[1]), "images that differ")
    check(torch.equal(after[0], after[1]), "the same statistics everywhere")
    check(torch.allclose(after[0], (before[0] + before[1]) / 2, atol=1e-6), "their mean")


def bad_files(folder: Path, step: int) -> set[str]:
    content = json.loads((folder / "state" / f"{step:08d}" / "state.json").read_text())
    return set(content["bad_files"])


def met(data: Path, steps: int) -> set[str]:
    """Return the unreadable images that these steps contain."""
    source = open_data(data).train
    stream = Stream(len(source), 8, seed=0)
    seen = (int(index) for step in range(steps) for index in stream.images_at(stream.positions(step, WHOLE_BATCH)))
    return {name for index in seen if "bad" in (name := source.name(index))}


def runs(folder: Path, rank: int) -> None:
    """Unreadable images of one rank are known to both, even if only one rank gets the signal."""

    def go(name: str, steps: int) -> None:
        changes = [*SMALL, f"steps={steps}"]
        train(folder / "data", changes=changes, folder=folder / name, device="cpu", workers=0, quiet=True)

    go("whole", 10)
    if rank == 0:  # rank 0 writes the state; the other may get here first
        check(bad_files(folder / "whole", 10) == met(folder / "data", 10), "all bad files at the end")

    def saved() -> int:
        return max((int(place.name) for place in (folder / "stopped" / "state").glob("[0-9]*")), default=0)

    def ask_to_stop() -> None:
        while saved() < 3:  # not step 3 itself, whose state is deleted two steps later
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 1:
        threading.Thread(target=ask_to_stop, daemon=True).start()
    try:
        go("stopped", 500)
    except Stopped as stopped:
        check(stopped.number == signal.SIGTERM, "the signal")
    else:
        raise SystemExit("wrong: the run was not stopped")
    if rank == 1:
        return
    last = saved()
    check(3 <= last < 500, "the step it was stopped at")
    check(bad_files(folder / "stopped", last) == met(folder / "data", last), "all bad files where it was stopped")


def main() -> None:
    with process_group(CPU) as processes:
        ranks = Ranks(processes, CPU)
        for checked in (messages, a_step, statistics):
            checked(ranks)
    runs(Path(sys.argv[1]), processes.rank)
    print("well")
