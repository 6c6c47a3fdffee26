"""Where JPEGs are decoded, and why."""

from pathlib import Path

import pytest
import torch
from tests.support.jpeg_files import MixedFiles, jpeg, photo

from vitrail.data import decoder_choice, gpu_decoding
from vitrail.data.augmentation.augment import Augmentation, preset
from vitrail.data.decoder_choice import Decoder, choose_decoder, choose_for_source
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError

CPU = torch.device("cpu")
LARGE = [jpeg(photo(375, 500))] * 8


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device that decodes."""
    monkeypatch.setattr(decoder_choice, "DEVICES", ("cuda", "cpu"))


def choose(decode: str, images: list[object], count: int | None = None, **more: object) -> Decoder:
    preprocess = Preprocess(**more.pop("preprocess", {}))
    return choose_decoder(decode, CPU, preprocess, images, count=count, **{"workers": 16, **more})


def test_without_a_gpu_there_is_no_choice_and_no_line() -> None:
    lines: list[str] = []
    for decode in ("auto", "cpu"):
        decoder = choose(decode, LARGE)
        decoder.announce(lines.append)
        assert decoder.name == "cpu"
    assert lines == []
    with pytest.raises(ConfigError, match="the device is cpu, and only a CUDA device decodes"):
        choose("gpu", LARGE)


@pytest.mark.usefixtures("decodes")
def test_large_jpegs_are_decoded_on_the_gpu_and_small_ones_by_many_cores() -> None:
    lines: list[str] = []
    for decoder in (choose("auto", LARGE), choose("auto", [jpeg(photo(40, 40))] * 8), choose("gpu", [])):
        decoder.announce(lines.append)
    assert lines == [
        "decoding on the GPU: faster for JPEGs of about 0.19 megapixels with 16 workers",
        "decoding on the CPU: faster than the GPU for JPEGs of about 0.00 megapixels with 16 workers",
        "decoding on the GPU: as asked",
    ]
    assert choose("auto", LARGE, workers=500).name == "cpu"


@pytest.mark.usefixtures("decodes")
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"count": 100}, "100 images are too few"),
        ({"preprocess": {"interpolation": "nearest"}}, "interpolation = nearest is not implemented there"),
        ({"preprocess": {"channels": 4, "mean": (0.5,) * 4, "std": (0.5,) * 4}}, "takes 4 channels"),
        ({"augmentation": Augmentation(crop="padded")}, 'augmentation.crop = "padded" is not implemented there'),
        ({"augmentation": preset("three_augment")}, 'augmentation.crop = "simple"'),
        ({"augmentation": Augmentation(blur=0.1)}, "augmentation.blur is not implemented there"),
    ],
)
def test_reasons_for_the_cpu(more: dict[str, object], reason: str) -> None:
    decoder = choose("auto", LARGE, **more)
    assert decoder.name == "cpu"
    assert reason in decoder.reason
    if "count" not in more:
        with pytest.raises(ConfigError, match=r"decode is gpu, but .*; use decode = cpu or auto"):
            choose("gpu", LARGE, **more)


@pytest.mark.usefixtures("decodes")
def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_choice, "is_installed", lambda: False)
    assert choose("auto", LARGE).reason == "nvImageCodec is not installed (pip install 'vitrail[gpu]')"
    with pytest.raises(ConfigError, match="nvImageCodec is not installed"):
        choose("gpu", LARGE)


@pytest.mark.usefixtures("decodes")
def test_nvimagecodec_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without nvJPEG on a GPU."""
    gpu_decoding.why_not.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_decoding.GpuDecoder, "decode", lambda self, jpegs: [None] * len(jpegs))
        assert "nvImageCodec decodes no JPEG here" in choose("auto", LARGE).reason
        with pytest.raises(ConfigError, match="decode is gpu, but nvImageCodec decodes no JPEG here"):
            choose("gpu", [])
    gpu_decoding.why_not.cache_clear()
    assert choose("gpu", []).name == "gpu"


@pytest.mark.usefixtures("decodes")
def test_most_images_must_be_jpegs_that_it_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_choice, "FEWEST", 1)
    source = MixedFiles(tmp_path, 2)  # half of them
    assert choose_for_source("auto", CPU, Preprocess(), source, workers=1).name == "gpu"
    images = [source.read(index) for index in range(10) if not source.name(index).endswith("plain.jpg")]
    assert choose("auto", images).reason == "4 of the first 9 images are JPEGs that the GPU decodes"


def test_unknown_choices() -> None:
    with pytest.raises(ConfigError, match="decode is 'cuda'; choose one of 'auto', 'cpu', 'gpu'"):
        choose("cuda", LARGE)
