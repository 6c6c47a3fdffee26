"""Draw the images of the documentation: `make drawings`.

Every shape written in a drawing is read from the code, by running a real model on the image. Each drawing brings its
own background and follows the reader's light or dark mode; no font, script or file is fetched.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args
from xml.sax.saxutils import escape

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from vitrail.models.config import ViTConfig
from vitrail.models.stages import Stage, cost, stages
from vitrail.models.variants import SIZES, VARIANTS, variant_config
from vitrail.models.vit import ViT

HERE = Path(__file__).parent
WIDTH = 700

Colour = tuple[int, int, int]
Point = tuple[float, float]
Pixels = NDArray[np.uint8]

# ── the image: a boat at sunset, in glass ──

LEAD: Colour = (30, 27, 36)


def scene() -> list[tuple[list[Point], Colour]]:
    """Return the image as coloured polygons in a unit square, the farthest first."""

    def disc(x: float, y: float, radius: float) -> list[Point]:
        turns = [2 * math.pi * i / 48 for i in range(48)]
        return [(x + radius * math.cos(t), y + radius * math.sin(t)) for t in turns]

    def below(y: float, swell: float, phase: float) -> list[Point]:
        wave = [(i / 40, y + swell * math.sin(i / 40 * 9 + phase)) for i in range(41)]
        return [*wave, (1.0, 1.0), (0.0, 1.0)]

    return [
        (below(0.0, 0.0, 0.0), (38, 84, 158)),
        (below(0.17, 0.03, 0.4), (84, 132, 190)),
        (below(0.34, 0.03, 1.6), (232, 158, 116)),
        (below(0.50, 0.02, 2.9), (244, 190, 110)),
        (disc(0.74, 0.30, 0.19), (250, 180, 86)),
        (disc(0.74, 0.30, 0.115), (255, 221, 110)),
        (below(0.655, 0.012, 0.0), (62, 156, 164)),
        ([(0.485, 0.10), (0.485, 0.66), (0.20, 0.66), (0.32, 0.42)], (196, 52, 60)),
        ([(0.515, 0.16), (0.515, 0.66), (0.73, 0.66), (0.66, 0.46)], (246, 236, 214)),
        ([(0.17, 0.70), (0.80, 0.70), (0.71, 0.82), (0.27, 0.82)], (122, 66, 44)),
        (below(0.79, 0.016, 1.1), (36, 116, 146)),
        (below(0.90, 0.016, 3.3), (26, 74, 118)),
    ]


def paint(size: int = 224, fine: int = 3) -> Pixels:
    """Paint the scene as stained glass, (size, size, 3): each region broken into panes, with lead between them."""
    side = size * fine
    regions = Image.new("L", (side, side))
    brush = ImageDraw.Draw(regions)
    for index, (polygon, _) in enumerate(scene()):
        brush.polygon([(x * side, y * side) for x, y in polygon], fill=index)
    region = np.asarray(regions).astype(np.int64)
    random = np.random.default_rng(11)
    cells = 10
    seeds = (np.stack(np.meshgrid(*[np.arange(cells)] * 2), -1).reshape(-1, 2) + random.random((cells**2, 2))) / cells
    y, x = np.mgrid[:side, :side].astype(np.float32) / side
    pane = np.zeros((side, side), dtype=np.int64)
    nearest = np.full((side, side), np.inf, dtype=np.float32)
    seed_region = region[(seeds[:, 1] * side).astype(int), (seeds[:, 0] * side).astype(int)]
    for number, ((sx, sy), owner) in enumerate(zip(seeds, seed_region, strict=True), start=1):
        far = (x - np.float32(sx)) ** 2 + (y - np.float32(sy)) ** 2
        closer = (far < nearest) & (region == owner)
        pane[closer], nearest[closer] = number, far[closer]
    shade = 1 + 0.34 * (random.random(cells**2 + 1) - 0.5)
    colours = np.array([colour for _, colour in scene()], dtype=np.float32)
    light = 1.06 - 0.16 * np.hypot(x - 0.6, y - 0.35)
    glass = colours[region] * (shade[pane] * light)[..., None]
    key = region * 1000 + pane
    seam = np.zeros((side, side), dtype=bool)
    seam[:, 1:] |= key[:, 1:] != key[:, :-1]
    seam[1:] |= key[1:] != key[:-1]
    lead = np.asarray(Image.fromarray(seam.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(2 * fine - 1)))
    glass[lead > 0] = LEAD
    whole = Image.fromarray(glass.clip(0, 255).astype(np.uint8))
    return np.asarray(whole.resize((size, size), Image.Resampling.LANCZOS))


def as_uri(pixels: Pixels, colours: int = 96, gaps: NDArray[np.bool_] | None = None) -> str:
    """Return pixels as a PNG data URI with a palette; where `gaps` holds, the image is transparent."""
    small = Image.fromarray(pixels).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    options = {}
    if gaps is not None:
        small.putpalette([*(small.getpalette() or []), *[0] * 768][:768])
        small.paste(255, mask=Image.fromarray(gaps.astype(np.uint8) * 255))
        options["transparency"] = 255
    file = io.BytesIO()
    small.save(file, "PNG", optimize=gaps is None, **options)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# ── an SVG, as a list of elements ──

LIGHT = {
    "paper": "fill:#fbfaf6;stroke:#ddd7c9",
    "card": "fill:#ffffff;stroke:#c9c3b6",
    "text": "fill:#22242a",
    "soft": "fill:#5a5f69",
    "shape": "fill:#1d4f9e",
    "number": "fill:#ffffff",
    "gold": "fill:#d79a12;stroke:#8a6105",
    "line": "fill:none;stroke:#6a6f7a",
    "tip": "fill:#6a6f7a;stroke:none",
    "ink": "fill:#2d6cc0;stroke:none",
}
DARK = {
    "paper": "fill:#16181e;stroke:#343841",
    "card": "fill:#20242c;stroke:#474d59",
    "text": "fill:#eceef2",
    "soft": "fill:#adb3be",
    "shape": "fill:#8fb8ff",
    "number": "fill:#16181e",
    "gold": "fill:#ffcb52;stroke:#b98a1d",
    "line": "fill:none;stroke:#8d94a1",
    "tip": "fill:#8d94a1;stroke:none",
    "ink": "fill:#7fb0ff;stroke:none",
}


class Drawing:
    """An SVG that grows element by element, `WIDTH` units wide."""

    def __init__(self, height: float, title: str, description: str) -> None:
        rules = "".join(f".{name}{{{rule}}}" for name, rule in LIGHT.items())
        dark = "".join(f".{name}{{{rule}}}" for name, rule in DARK.items())
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'aria-labelledby="title description" font-size="15" '
            f'font-family="system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif">',
            f'<title id="title">{escape(title)}</title><desc id="description">{escape(description)}</desc>',
            f"<style>{rules}.pixels{{image-rendering:pixelated}}@media (prefers-color-scheme:dark){{{dark}}}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="14"/>',
        ]

    def add(self, element: str) -> None:
        """Add any element."""
        self.parts.append(element)

    def text(self, x: float, y: float, words: str, look: str = "text", *, size: float = 15, more: str = "") -> None:
        """Write words whose baseline starts at (x, y)."""
        self.add(f'<text class="{look}" x="{x:g}" y="{y:g}" font-size="{size:g}" {more}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, look: str = "card", radius: float = 8) -> None:
        """Draw a rounded box."""
        self.add(
            f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'stroke-width="1.3"/>'
        )

    def image(self, x: float, y: float, size: tuple[float, float], uri: str) -> None:
        """Place an image, its pixels left sharp."""
        width, height = size
        self.add(
            f'<image class="pixels" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'preserveAspectRatio="none" href="{uri}"/>'
        )

    def arrow(self, points: Sequence[Point], look: str = "line") -> None:
        """Draw a line through the points that ends in a tip."""
        (x0, y0), (x1, y1) = points[-2:]
        turn = math.degrees(math.atan2(y1 - y0, x1 - x0))
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.add(f'<polyline class="{look}" stroke-width="1.6" points="{way}"/>')
        self.add(f'<path class="tip" d="M1,0L-8,-4.5V4.5z" transform="translate({x1:g},{y1:g}) rotate({turn:g})"/>')

    def bars(self, x: float, y: float, step: float, height: float, colours: Iterable[Sequence[int]]) -> None:
        """Draw one upright bar for each colour, side by side."""
        for i, colour in enumerate(colours):
            fill = "#" + "".join(f"{part:02x}" for part in colour)
            self.add(
                f'<rect x="{x + i * step:.1f}" y="{y:g}" width="{step - 0.6:.1f}" height="{height:g}" fill="{fill}"/>'
            )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")


def times(numbers: Iterable[int]) -> str:
    """Write a shape the way people say it: 3 × 224 × 224."""
    return " × ".join(map(str, numbers))


# ── how a ViT sees ──

MARGIN = 34
CHOSEN = (6, 4)
"""Row and column of the patch that is shown large: the edge of the red sail."""


def draw_how_a_vit_sees(folder: Path = HERE) -> None:
    """Follow the image through a B/16 of random weights."""
    config = variant_config("B/16").replace(stem="linear")
    torch.manual_seed(0)
    model = ViT(config).eval()
    torch.nn.init.normal_(
        model.head.get_parameter("weight"), std=0.02
    )  # zero-initialised: there would be no logits to show
    pixels = paint(config.image_size[0])
    batch = (torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 127.5) - 1
    shape = {stage.name: stage for stage in stages(model, batch)}
    with torch.no_grad():
        traced = model.trace(batch, attention=(0,))

    drawing = Drawing(
        1235,
        "How a ViT sees",
        "One image in a ViT-B/16: divided into patches, each patch embedded as a token, a class token added, twelve "
        "blocks of attention and MLP, and one score per class.",
    )
    _image_and_patches(drawing, config, pixels, shape)
    _one_patch(drawing, config, pixels, shape)
    _tokens(drawing, config, pixels, shape)
    _encoder(drawing, config, traced.attention[0][0], shape)
    _logits(drawing, config, traced.logits[0], shape)
    drawing.save(folder / "how-a-vit-sees.svg")


def _heading(drawing: Drawing, y: float, number: int, words: str, stage: Stage | None = None) -> None:
    """Write a numbered heading, and at the right the shape of its tensor for one image."""
    drawing.add(f'<circle class="ink" cx="{MARGIN + 11}" cy="{y - 5.5:g}" r="12"/>')
    drawing.text(MARGIN + 11, y, str(number), "number", size=15, more='text-anchor="middle" font-weight="700"')
    drawing.text(MARGIN + 32, y, words, size=17, more='font-weight="600"')
    if stage is not None:
        _shape(drawing, WIDTH - MARGIN, y, stage.shape[1:], 'text-anchor="end"')


def _shape(drawing: Drawing, x: float, y: float, numbers: Iterable[int], more: str = "") -> None:
    drawing.text(x, y, times(numbers), "shape", size=17, more=f'font-weight="700" {more}')


def _image_and_patches(drawing: Drawing, config: ViTConfig, pixels: Pixels, shape: dict[str, Stage]) -> None:
    """Draw steps 1 and 2: the image whole, and cut."""
    (rows, columns), (h, w), gap = config.grid, config.patch_size, 5
    _heading(drawing, 46, 1, "an image")
    drawing.image(MARGIN, 66, (pixels.shape[1], pixels.shape[0]), as_uri(pixels))
    _shape(drawing, MARGIN, 316, shape["image"].shape[1:])
    drawing.text(MARGIN, 338, f"{math.prod(shape['image'].shape):,} numbers", "soft")

    apart = np.zeros((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), dtype=np.uint8)
    empty = np.ones(apart.shape[:2], dtype=np.bool_)
    for row in range(rows):
        for column in range(columns):
            here = np.s_[row * (h + gap) : row * (h + gap) + h, column * (w + gap) : column * (w + gap) + w]
            apart[here] = pixels[row * h : (row + 1) * h, column * w : (column + 1) * w]
            empty[here] = False
    left, top = WIDTH - MARGIN - apart.shape[1], 66
    drawing.arrow([(MARGIN + 224 + 20, 178), (left - 20, 178)])
    drawing.add(f'<g transform="translate({left - MARGIN},0)">')
    _heading(drawing, 46, 2, f"cut into {rows} × {columns} patches")
    drawing.add("</g>")
    drawing.image(left, top, (apart.shape[1], apart.shape[0]), as_uri(apart, gaps=empty))
    x, y = left + CHOSEN[1] * (w + gap), top + CHOSEN[0] * (h + gap)
    drawing.add(
        f'<rect x="{x - 2}" y="{y - 2}" width="{w + 4}" height="{h + 4}" fill="none" stroke="#fff" stroke-width="5"/>'
        f'<rect x="{x - 2}" y="{y - 2}" width="{w + 4}" height="{h + 4}" fill="none" stroke="#d6006c" '
        f'stroke-width="2.5"/>'
    )


def _one_patch(drawing: Drawing, config: ViTConfig, pixels: Pixels, shape: dict[str, Stage]) -> None:
    """Draw step 3: what a patch is made of."""
    (h, w), top = config.patch_size, 418
    row, column = CHOSEN
    patch = pixels[row * h : (row + 1) * h, column * w : (column + 1) * w]
    _heading(drawing, 398, 3, "each patch is a row of numbers", shape["patches"])
    drawing.image(MARGIN, top, (112, 112), as_uri(patch, 256))
    drawing.add(
        f'<rect x="{MARGIN}" y="{top}" width="112" height="112" fill="none" stroke="#d6006c" stroke-width="2.5"/>'
    )
    drawing.arrow([(MARGIN + 122, top + 56), (MARGIN + 146, top + 56)])
    for channel, name in enumerate(("red", "green", "blue")):
        plane = np.zeros_like(patch)
        plane[..., channel] = patch[..., channel]
        x = MARGIN + 156 + channel * 90
        drawing.image(x, top, (82, 82), as_uri(plane, 256))
        drawing.text(x + 41, top + 104, name, "soft", more='text-anchor="middle"')
    drawing.arrow([(MARGIN + 428, top + 56), (MARGIN + 452, top + 56)])
    values = (patch.astype(float) / 127.5 - 1).transpose(2, 0, 1).ravel()
    for line, part in enumerate((values[:3], values[3:6])):
        numbers = ", ".join(f"{value:.2f}".replace("-", "−") for value in part)
        drawing.text(MARGIN + 462, top + 28 + 22 * line, f"{numbers}, …", "soft", size=14.5)
    drawing.text(MARGIN + 462, top + 80, f"{times((h, w))} pixels × {config.channels}", size=15)
    drawing.text(MARGIN + 462, top + 102, f"= {values.size} numbers", size=15, more='font-weight="700"')


def _tokens(drawing: Drawing, config: ViTConfig, pixels: Pixels, shape: dict[str, Stage]) -> None:
    """Draw steps 4 and 5: the embeddings, then the whole sequence with its positions."""
    (rows, columns), (h, w) = config.grid, config.patch_size
    means = pixels.reshape(rows, h, columns, w, 3).mean(axis=(1, 3)).reshape(-1, 3).round().astype(int).tolist()
    start, step = MARGIN + 20, (WIDTH - 2 * MARGIN - 20) / config.patches
    kernel = config.channels * h * w
    _heading(drawing, 586, 4, "one learned layer embeds each patch", shape["patch embeddings"])
    drawing.bars(start, 602, step, 44, means)
    drawing.text(start, 668, f"{kernel} numbers → {config.width} features, the same layer for every patch", "soft")

    _heading(drawing, 716, 5, "add the class token and positions", shape["tokens"])
    drawing.box(MARGIN, 728, 12, 52, "gold", 3)
    drawing.bars(start, 732, step, 44, means)
    # A position is a vector too; neighbours in a row get neighbouring shades, and each row starts anew.
    shades = [
        (90 + 150 * c // columns, 70 + 110 * r // rows, 190 - 60 * c // columns)
        for r in range(rows)
        for c in range(columns)
    ]
    drawing.box(MARGIN, 790, 12, 14, "gold", 2)
    drawing.bars(start, 790, step, 14, shades)
    drawing.text(MARGIN, 825, "class token", "soft")
    drawing.text(
        WIDTH - MARGIN,
        825,
        f"{config.patches} patches, each with its learned position",
        "soft",
        more='text-anchor="end"',
    )


def _encoder(drawing: Drawing, config: ViTConfig, attention: torch.Tensor, shape: dict[str, Stage]) -> None:
    """Draw step 6: the blocks, with the attention maps of the first one."""
    last = f"tokens after layer {config.depth - 1}"
    _heading(drawing, 876, 6, f"{config.depth} blocks, each attention and MLP", shape[last])
    top, high = 892, 168
    for card in (2, 1, 0):
        drawing.box(MARGIN + 5 * card, top + 5 * (2 - card), WIDTH - 2 * MARGIN - 10, high)
    top += 10
    for head in range(config.heads):
        x, y = MARGIN + 16 + 50 * (head % 6), top + 14 + 50 * (head // 6)
        drawing.image(x, y, (46, 46), _attention_map(attention[head]))
    drawing.text(MARGIN + 16, top + 134, "attention")
    _shape(drawing, MARGIN + 92, top + 134, shape["attention, layer 0"].shape[1:])
    drawing.text(MARGIN + 16, top + 155, f"{config.heads} heads: where tokens attend", "soft")

    middle, x = top + 62, MARGIN + 350
    narrow, wide = 13.0, 13.0 * config.mlp_hidden / config.width
    drawing.arrow([(x - 28, middle), (x - 6, middle)])
    drawing.add(
        f'<path class="ink" opacity="0.85" d="M{x},{middle - narrow}L{x + 100},{middle - wide}V{middle + wide}'
        f"L{x},{middle + narrow}z M{x + 106},{middle - wide}L{x + 206},{middle - narrow}V{middle + narrow}"
        f'L{x + 106},{middle + wide}z"/>'
    )
    drawing.arrow([(x + 212, middle), (x + 240, middle)])
    drawing.text(x, top + 134, "MLP")
    drawing.text(
        x + 40,
        top + 134,
        f"{config.width} → {config.mlp_hidden} → {config.width}",
        "shape",
        size=17,
        more='font-weight="700"',
    )
    drawing.text(x, top + 155, "each token on its own", "soft")


def _attention_map(weights: torch.Tensor, cells: int = 66) -> str:
    """Draw the attention weights of one head, light where they are high, scaled per head: untrained weights differ
    little."""
    low, high = torch.quantile(weights, torch.tensor([0.02, 0.98]))
    level = ((weights - low) / (high - low)).clamp(0, 1)[None, None]
    level = torch.nn.functional.interpolate(level, (cells, cells), mode="area")[0, 0]
    dark, light = torch.tensor([24.0, 28, 60]), torch.tensor([255.0, 214, 120])
    return as_uri((dark + level[..., None] * (light - dark)).byte().numpy(), 24)


def _logits(drawing: Drawing, config: ViTConfig, logits: torch.Tensor, shape: dict[str, Stage]) -> None:
    """Draw step 7: the class token is read, and every class gets a score."""
    _heading(drawing, 1126, 7, "the head reads the class token")
    drawing.box(MARGIN, 1146, 12, 52, "gold", 3)
    _shape(drawing, MARGIN + 22, 1169, shape["pooled"].shape[1:])
    drawing.text(MARGIN + 22, 1190, "features", "soft")
    drawing.arrow([(MARGIN + 92, 1172), (MARGIN + 122, 1172)])
    start, step = MARGIN + 134, 410 / config.classes
    scale = 26 / float(logits.abs().max())
    way = "".join(f"M{start + i * step:.1f},1172v{-scale * float(v):.1f}" for i, v in enumerate(logits))
    drawing.add(f'<path stroke="#2f9aa0" stroke-width="0.9" fill="none" d="{way}"/>')
    _shape(drawing, WIDTH - MARGIN, 1169, shape["logits"].shape[1:], 'text-anchor="end"')
    drawing.text(WIDTH - MARGIN, 1190, "logits", "soft", more='text-anchor="end"')
    drawing.text(MARGIN + 134, 1218, "The model is untrained: these scores mean nothing yet.", "soft", size=14)


# ── the project ──

CARD = 176
Card = tuple[float, str, tuple[str, ...]]
"""Top, title and lines."""


def options(field: str) -> int:
    """Count the choices of a config field."""
    return len(get_args(ViTConfig.model_fields[field].annotation))


def draw_project(folder: Path = HERE) -> None:
    """Draw the inputs, a stained-glass window, and the outputs."""
    drawing = Drawing(
        470,
        "Vitrail",
        "Images, checkpoints, names and configs go in. In the middle is a ViT made of pieces. Out come predictions, "
        "features and attention, explanations, reports, exported models and an HTTP API.",
    )
    drawing.text(24, 42, "input", size=17, more='font-weight="600"')
    drawing.text(WIDTH / 2, 42, "a ViT made of pieces", size=17, more='font-weight="600" text-anchor="middle"')
    drawing.text(WIDTH - 24, 42, "output", size=17, more='font-weight="600" text-anchor="end"')
    _window(drawing, 253, 62, 194, 262)

    right = WIDTH - 24 - CARD
    inputs: tuple[Card, ...] = (
        (76, "images", ("folders, manifests,", "shards, Parquet")),
        (176, "checkpoints", ("of six libraries",)),
        (256, "a name", ("B/16, S/32, …", f"{len(VARIANTS)} named models")),
        (356, "a config", ("every option is a", "validated field")),
    )
    outputs: tuple[Card, ...] = (
        (76, "a trained model", ("with metrics", "and a report")),
        (176, "predictions", ()),
        (222, "features", ("tokens, attention", "of any layer")),
        (322, "explanations", ()),
        (368, "exported models", ()),
        (414, "an HTTP API", ()),
    )
    level = 216  # where all arrows meet the window
    for top, title, lines in inputs:
        middle = _card(drawing, 24, top, title, lines)
        drawing.arrow([(24 + CARD, middle), (222, middle), (222, level), (245, level)], "line")
    for top, title, lines in outputs:
        middle = _card(drawing, right, top, title, lines)
        drawing.arrow([(455, level), (478, level), (478, middle), (right - 3, middle)], "line")

    widths = {variant.paper: SIZES[variant.size].width for variant in VARIANTS if variant.size is not None}
    biggest = cost(variant_config(max(widths, key=widths.__getitem__))).parameters
    for line, words in enumerate(
        (
            f"{options('stem')} stems · {options('position')} kinds of position",
            f"{options('pool')} ways to pool · {options('init')} initialisations",
            f"up to {biggest / 1e9:.1f} billion parameters",
        )
    ):
        drawing.text(WIDTH / 2, 352 + 22 * line, words, "soft", size=14, more='text-anchor="middle"')
    drawing.save(folder / "vitrail.svg")


def _card(drawing: Drawing, x: float, y: float, title: str, lines: Sequence[str]) -> float:
    """Draw a card and return the height of its middle."""
    height = 34 if not lines else 38 + 21 * len(lines)
    drawing.box(x, y, CARD, height, "card")
    drawing.text(x + 12, y + (22 if not lines else 25), title, more='font-weight="600"')
    for i, line in enumerate(lines):
        drawing.text(x + 12, y + 47 + 21 * i, line, "soft", size=14.5)
    return y + height / 2


def _window(drawing: Drawing, x: float, y: float, width: float, height: float) -> None:
    """Draw the scene as a stained-glass window: its shapes, panes of different thickness, and lead between them."""
    lead = "#" + "".join(f"{part:02x}" for part in LEAD)
    half, right, foot = width / 2, x + width, y + height
    arch = (
        f"M{x},{foot}V{y + half}C{x},{y + 0.45 * half} {x + 0.55 * half},{y + 0.2 * half} {x + half},{y}"
        f"C{right - 0.55 * half},{y + 0.2 * half} {right},{y + 0.45 * half} {right},{y + half}V{foot}z"
    )
    drawing.add(f'<clipPath id="arch"><path d="{arch}"/></clipPath><g clip-path="url(#arch)">')
    # The square scene is as high as the window; what sticks out at the sides is cut off by the arch.
    left = x - (height - width) / 2
    for polygon, colour in scene():
        points = " ".join(f"{left + px * height:.1f},{y + py * height:.1f}" for px, py in polygon)
        fill = "#" + "".join(f"{part:02x}" for part in colour)
        drawing.add(f'<polygon points="{points}" fill="{fill}" stroke="{lead}" stroke-width="2.6"/>')
    random = np.random.default_rng(3)
    columns, rows = 6, 8
    for row in range(rows):
        for column in range(columns):
            shade = random.uniform(-0.2, 0.2)
            drawing.add(
                f'<rect x="{x + column * width / columns:.1f}" y="{y + row * height / rows:.1f}" '
                f'width="{width / columns:.1f}" height="{height / rows:.1f}" '
                f'fill="{"#fff" if shade > 0 else "#000"}" fill-opacity="{abs(shade):.2f}" '
                f'stroke="{lead}" stroke-opacity="0.75" stroke-width="1.4"/>'
            )
    drawing.add(f'</g><path d="{arch}" fill="none" stroke="{lead}" stroke-width="6"/>')
    drawing.add(f'<path class="line" stroke-width="1.2" d="{arch}"/>')


if __name__ == "__main__":
    draw_how_a_vit_sees()
    draw_project()
