r"""Take the screenshots of the documentation, report.png and explorer.png, in an installed Chromium:

    vitrail train sign-language-digits --run runs/sign-language-digits --device cpu \
        --set model.image_size=64 --set model.patch_size=8 --set model.depth=4 --set epochs=25
    python -m docs.drawings.screenshots runs/sign-language-digits sign-language-digits/3/IMG_4092.JPG

`scripts/install-chromium` installs the browser, `make .venv/.installed-all` the other dependencies. The images are the
Sign Language Digits Dataset of Ayrancı Anadolu High School, Ankara (Arda Mavi and Zeynep Dikle, arXiv 2011.08927,
Apache-2.0): 2,062 photos in one folder per class. `--dark` and `--width 400` show the same pages in dark mode and on a
phone; use `--out` to keep them out of the documentation.
"""

import argparse
import io
from pathlib import Path
from typing import Any

from PIL import Image
from tests.support.browser import chromium
from tests.support.page_visit import WAIT, Visit, service

HERE = Path(__file__).parent
VIEW = "#layer=3&head=1&query=5,3"
"""What the explorer shows: a patch of the palm that attends to the middle finger."""
LEFT_OUT = "#mistakes, #classes, #confusion, #calibration"
"""Sections left out of the screenshot of the report, so that the training curves follow the result."""
SCALE = 1.5
MARGIN = 16


def main() -> None:
    """Read the command line and write both screenshots."""
    parser = argparse.ArgumentParser(description="Take the screenshots of the documentation.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("image", type=Path, help="image for the explorer")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the screenshots")
    parser.add_argument("--width", type=int, default=1280, help="width of the window, in CSS pixels")
    parser.add_argument("--dark", action="store_true", help="in dark mode")
    parser.add_argument("--view", default=VIEW, help="view of the explorer, as in its URL")
    given = parser.parse_args()
    with chromium() as browser:
        context = browser.new_context(
            viewport={"width": given.width, "height": 900},
            device_scale_factor=SCALE,
            color_scheme="dark" if given.dark else "light",
        )
        page = context.new_page()
        page.goto((given.run / "report.html").resolve().as_uri())
        page.evaluate("sections => document.querySelectorAll(sections).forEach((one) => one.remove())", LEFT_OUT)
        keep(page, given.out / "report.png", "#curves figure")
        with service({given.run.name: given.run / "best"}) as address:
            explore(Visit(page, [], []), f"{address}{given.view}", given.image)
            keep(page, given.out / "explorer.png", ".panel .tokens")
            context.close()


def explore(seen: Visit, address: str, image: Path) -> None:
    """Open a view of the explorer with an image of your own."""
    seen.open(address)
    seen.page.set_input_files("#file", image)
    seen.page.wait_for_selector("body[data-ready]", timeout=WAIT)
    seen.settle()


def keep(page: Any, path: Path, last: str) -> None:
    """Save the page down to an element, with a palette, which makes the file several times smaller."""
    box = page.locator(last).first.bounding_box()
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": box["y"] + box["height"] + MARGIN}
    content = page.screenshot(full_page=True, clip=clip, animations="disabled")
    pixels = Image.open(io.BytesIO(content)).convert("RGB")
    # The median cut would spend all colours on the photos and leave few for the strip at the top.
    pixels.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=3).save(path, "PNG", optimize=True)
    print(f"{path}: {pixels.width}x{pixels.height}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
