"""Batches are a pure function of step, seed and files, whatever process makes them and wherever a run resumes."""

import contextlib
import io
import os
import pickle
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support import forked_commands
from tests.support.jpeg_source import JpegSource
from torch.utils.data import Dataset

from vitrail.data.augmentation.augment import Augmentation, preset
from vitrail.data.augmentation.mixing import Mixing
from vitrail.data.batches import (
    Batch,
    Evaluation,
    Training,
    default_workers,
    evaluation_batches,
    prefetch,
    training_batches,
)
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Arrays, Pixels
from vitrail.data.stream import RankSlice, Stream
from vitrail.errors import ConfigError, DataError

SIZE = (16, 24)
PRE = Preprocess(size=SIZE)


def training(files: JpegSource, batch: int = 8, **fields: Any) -> Training:
    stream = Stream(len(files), batch, seed=3)
    settings = {"augmentation": preset("augreg_medium1"), "mixing": Mixing(mixup=0.2, cutmix=1.0), **fields}
    return Training(files, stream, PRE, **settings)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:5], other[:5], strict=True)) and one.bad == other.bad


FILES = JpegSource(20, corrupt=(7,))
STRAIGHT = [training(FILES)[step] for step in range(6)]


@given(start=st.integers(0, 5), world_size=st.sampled_from([1, 2, 4]), micros=st.sampled_from([1, 2]))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_any_start_and_any_slicing(start: int, world_size: int, micros: int) -> None:
    for step in range(start, 6):
        slices = [training(FILES, rank_slice=RankSlice(rank, world_size))[step] for rank in range(world_size)]
        if len(slices[0].labels) % micros == 0:
            slices = [batch.micro(micro, micros) for batch in slices for micro in range(micros)]
        for number in range(5):
            assert torch.equal(torch.cat([batch[number] for batch in slices]), STRAIGHT[step][number])


@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "fork"), (2, "fork"), (2, "spawn")])
def test_any_number_of_workers(workers: int, method: str | None) -> None:
    made = list(training_batches(training(FILES), 2, 6, workers=workers, method=method))
    assert len(made) == 4
    assert all(same(one, other) for one, other in zip(made, STRAIGHT[2:], strict=True))


def test_batch_shapes_and_dtypes() -> None:
    batch = STRAIGHT[0]
    assert batch.pixels.shape == (8, 3, *SIZE)
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.labels, torch.from_numpy(FILES.labels)[batch.indices])
    moved = batch.to(torch.device("cpu"))
    assert same(moved, batch)
    assert PRE.normalise(batch.pixels).dtype == torch.float32


def test_pixels_are_the_images() -> None:
    """Without augmentation, training and evaluation batches hold what Pillow makes of the files."""
    plain = training(JpegSource(20), augmentation=preset("none"), mixing=Mixing())
    for step in range(3):
        batch = plain[step]
        for pixels, index in zip(batch.pixels, batch.indices, strict=True):
            assert torch.equal(pixels, PRE.pixels(Image.open(io.BytesIO(plain.source.read(int(index))))))
    seen = list(evaluation_batches(Evaluation(JpegSource(20), PRE, 6), workers=0))
    assert [len(batch.labels) for batch in seen] == [6, 6, 6, 2]
    pixels = torch.cat([batch.pixels for batch in seen])
    assert torch.equal(pixels, torch.stack([PRE.pixels(Image.open(io.BytesIO(c))) for c in JpegSource(20).contents]))


def test_augmentation_differs_by_position() -> None:
    one = Training(JpegSource(1), Stream(1, 6), PRE, Augmentation())
    assert len({batch.numpy().tobytes() for batch in one[0].pixels}) == 6


@given(images=st.integers(1, 20), batch=st.integers(1, 9), world_size=st.integers(1, 4))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_evaluation_sees_every_image_once(images: int, batch: int, world_size: int) -> None:
    source = Arrays(np.arange(images, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8),
                    np.zeros(images, np.int64), ("x",))  # fmt: skip
    pre = Preprocess(size=4, channels=1, mean=(0.5,), std=(0.5,))
    seen = [
        int(row)
        for rank in range(world_size)
        for made in evaluation_batches(Evaluation(source, pre, batch, RankSlice(rank, world_size)), workers=0)
        for row in made.pixels[:, 0, 0, 0]
    ]
    assert seen == list(range(images))


def test_fast_decoding_is_opt_in_and_close() -> None:
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8)).resize((800, 600)).save(file, "JPEG", quality=95)
    files = JpegSource(1)
    files.contents = [file.getvalue()]
    exact, fast = (Evaluation(files, PRE, 1, fast_decode=fast)[0].pixels.int() for fast in (False, True))
    assert torch.equal(exact[0], PRE.pixels(Image.open(io.BytesIO(file.getvalue()))).int())
    assert 0 < (exact - fast).abs().float().mean() < 2


# ── unreadable images ──


def test_a_bad_image_is_replaced_deterministically_and_reported() -> None:
    bad = {bad for batch in STRAIGHT for bad in batch.bad}
    assert {name for name, _ in bad} == {"images/7.jpg"}
    assert all("JPEG" in reason for _, reason in bad)
    assert not any((batch.indices == 7).any() for batch in STRAIGHT)
    stream = Stream(20, 8, seed=3)
    for step, batch in enumerate(STRAIGHT):
        expected = stream.images_at(stream.positions(step))
        expected[expected == 7] = 8
        assert np.array_equal(batch.indices.numpy(), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_stops_the_run_with_refuse(workers: int) -> None:
    with pytest.raises(DataError, match=r"^images/7\.jpg: a corrupt JPEG: [^\n]*$"):
        list(training_batches(training(FILES, bad_files="refuse"), 0, 6, workers=workers))
    with pytest.raises(DataError, match=r"^images/7\.jpg: a corrupt JPEG"):
        list(evaluation_batches(Evaluation(FILES, PRE, 8), workers=workers))
    seen = list(evaluation_batches(Evaluation(FILES, PRE, 8, bad_files="skip"), workers=workers))
    assert [len(batch.labels) for batch in seen] == [7, 8, 4]
    assert [bad.name for batch in seen for bad in batch.bad] == ["images/7.jpg"]


def test_nothing_but_bad_images() -> None:
    with pytest.raises(DataError, match=r"4 consecutive images cannot be read, the first is images/\d\.jpg"):
        list(training_batches(training(JpegSource(4, corrupt=(0, 1, 2, 3)), batch=2), 0, 1, workers=0))


def test_odd_slices_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="each of the 2 processes would get 3 images; use a batch that is a multiple"):
        training(FILES, batch=6, rank_slice=RankSlice(0, 2))


def test_a_bug_in_a_worker_is_not_hidden() -> None:
    class Faulty(JpegSource):
        def read(self, index: int) -> bytes | Pixels:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        list(evaluation_batches(Evaluation(Faulty(4), PRE, 4), workers=1, method="fork"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: RankSlice(2, 2), "rank 2 does not exist in a world of size 2"),
        (lambda: Stream(10, 4, repeats=0), "repeats is 0"),
        (lambda: Stream(10, 4, seed=-1), "seed is -1"),
        (lambda: Evaluation(FILES, PRE, 0), "batch is 0"),
        (lambda: training(FILES, bad_files="skp"), "bad_files is 'skp'; choose one of 'skip', 'refuse'"),
        (lambda: list(evaluation_batches(Evaluation(FILES, PRE, 8), workers=-1)), "workers is -1"),
        (lambda: list(evaluation_batches(Evaluation(FILES, PRE, 8), workers=1, method="frok")), "is 'frok'; choose"),
        (lambda: STRAIGHT[0].micro(0, 3), "a batch of 8 cannot be split into 3 equal micro-batches"),
    ],
)
def test_invalid_settings(fault: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fault()


# ── processes ──


# torch may notice a second time, while it shuts its workers down.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_explained() -> None:
    class Deadly(JpegSource):
        def read(self, index: int) -> bytes | Pixels:
            if index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(index)

    with pytest.raises(DataError, match=r"a data loading worker died .*, most often because memory ran out"):
        list(evaluation_batches(Evaluation(Deadly(20), PRE, 4), workers=1, method="fork"))


def test_training_data_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(training(FILES)))
    assert same(again[1], STRAIGHT[1])


def test_workers_exit_when_their_parent_is_killed() -> None:
    """Even before they start, when they see another parent from the beginning."""
    code = """
        import os, signal, time, numpy as np
        from vitrail.data import batches
        from vitrail.data.preprocess import Preprocess
        from vitrail.data.sources.source import Arrays

        def begin_alone(number):
            try:
                os.kill(caller, signal.SIGKILL)
            except ProcessLookupError:  # the other worker was first
                pass
            while os.getppid() == caller:
                time.sleep(0.01)
            begin(number)

        caller, begin, batches._init_worker = os.getpid(), batches._init_worker, begin_alone
        data = Arrays(np.zeros((100, 8, 8), np.uint8), np.zeros(100, np.int64), ("x",))
        pre = Preprocess(size=8, channels=1, mean=(0.5,), std=(0.5,))
        for _ in batches.evaluation_batches(batches.Evaluation(data, pre, 2), workers=2, method="fork"):
            pass
    """
    process = forked_commands.start(code=textwrap.dedent(code), new_session=True)
    try:
        process.communicate(timeout=60)  # until no process holds the pipe
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_ctrl_c_prints_no_tracebacks_of_workers(tmp_path: Path) -> None:
    code = """
        import sys, numpy as np
        from vitrail.data.batches import Evaluation, evaluation_batches
        from vitrail.data.preprocess import Preprocess
        from vitrail.data.sources.source import Arrays
        data = Arrays(np.zeros((100000, 8, 8), np.uint8), np.zeros(100000, np.int64), ("x",))
        pre = Preprocess(size=8, channels=1, mean=(0.5,), std=(0.5,))
        try:
            for number, batch in enumerate(evaluation_batches(Evaluation(data, pre, 2), workers=2)):
                if number == 5:
                    print("go", flush=True)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    process = forked_commands.start(code=textwrap.dedent(code), new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_default_workers() -> None:
    assert 1 <= default_workers() <= 16


class Interval(Dataset[float]):
    """Returns the switch interval of the process."""

    def __getitem__(self, _: int) -> float:
        return sys.getswitchinterval()


def test_a_busy_worker_sends_its_batches_promptly() -> None:
    """A thread of the worker sends them, and it waits for the GIL several times."""
    here = sys.getswitchinterval()
    assert list(prefetch(Interval(), range(2), workers=1)) == pytest.approx([1e-4] * 2)
    assert sys.getswitchinterval() == here
