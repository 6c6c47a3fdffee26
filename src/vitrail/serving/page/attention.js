// The image on a canvas, with its patches and a map overlay. On pointer moves only the map is repainted; the other
// layers are cached, so it takes a few milliseconds.

import { paintColours, paintHeat, range } from "./colours.js";
import { isPatch, patchName, patchOf } from "./tokens.js";

const SIDE = 720;
const PIXELATED_FROM = 4;

const newCanvas = (width, height) => Object.assign(document.createElement("canvas"), { width, height });

export class PatchView {
  /** `hover` is called with a patch or null, `pick` with a patch, on click and on arrow keys. */
  constructor(canvas, { hover, pick, home }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { willReadFrequently: false });
    this.grid = [1, 1];
    this.opacity = 0.6;
    this.lines = true;
    this.query = null;
    this.map = null;
    this.#listen(hover, pick, home);
  }

  /** Set the preprocessed image and its patch grid. */
  setImage(image, grid) {
    this.image = image;
    this.grid = grid;
    const zoom = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
    this.canvas.width = Math.round(image.naturalWidth * zoom);
    this.canvas.height = Math.round(image.naturalHeight * zoom);
    this.pixelated = zoom >= PIXELATED_FROM;
    this.heat = newCanvas(grid[1], grid[0]);
    this.map = null;
    this.#prepare();
  }

  /** Set the opacity of the map, and whether to draw the patch grid. */
  setStyle(opacity, lines) {
    this.opacity = opacity;
    this.lines = lines;
    if (!this.image) return;
    this.#prepare();
    if (this.map) this.#paintMap();
  }

  /** Set one value per patch, or three colour channels; null removes the map. */
  setMap(values) {
    this.map = values;
    if (!values) return null;
    this.limits = range(values);
    this.#paintMap();
    return this.limits;
  }

  /** Paint the map, one pixel per patch. Low values are more transparent, so that the image stays visible. */
  #paintMap() {
    const { map, limits, opacity } = this;
    const [rows, columns] = this.grid;
    const context = this.heat.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    const isColours = map.length === rows * columns * 3;
    if (isColours) paintColours(pixels, map);
    else paintHeat(pixels, map, limits);
    const [min, span] = [limits.min, limits.max - limits.min || 1];
    const weakest = opacity ** 3; // at full opacity only the map is visible
    for (let patch = 0; patch < rows * columns; patch++) {
      const strength = isColours ? 1 : (map[patch] - min) / span;
      pixels.data[4 * patch + 3] = Math.round(255 * opacity * (weakest + (1 - weakest) * strength));
    }
    context.putImageData(pixels, 0, 0);
  }

  draw() {
    if (!this.image) return;
    const { context, canvas } = this;
    context.globalAlpha = 1;
    context.drawImage(this.map ? this.backdrop : this.plain, 0, 0);
    if (this.map) {
      context.imageSmoothingEnabled = !this.lines;
      context.imageSmoothingQuality = "high";
      context.drawImage(this.heat, 0, 0, canvas.width, canvas.height);
    }
    if (this.lines) context.drawImage(this.gridLines, 0, 0);
    if (this.query && isPatch(this.query)) this.#outline(...patchOf(this.query));
  }

  /** Render the static layers: the image, desaturated under the map, and the grid lines. */
  #prepare() {
    const { width, height } = this.canvas;
    this.plain = newCanvas(width, height);
    const plain = this.plain.getContext("2d");
    plain.imageSmoothingEnabled = !this.pixelated;
    plain.drawImage(this.image, 0, 0, width, height);
    this.backdrop = newCanvas(width, height);
    const backdrop = this.backdrop.getContext("2d");
    backdrop.drawImage(this.plain, 0, 0);
    backdrop.globalCompositeOperation = "saturation";
    backdrop.globalAlpha = this.opacity ** 2;
    backdrop.fillStyle = "#808080";
    backdrop.fillRect(0, 0, width, height);
    this.gridLines = newCanvas(width, height);
    const gridLines = this.gridLines.getContext("2d");
    const [rows, columns] = this.grid;
    gridLines.strokeStyle = "rgb(20 18 26 / 0.55)";
    gridLines.lineWidth = Math.max(1, Math.min(3, width / columns / 18));
    gridLines.beginPath();
    for (let column = 1; column < columns; column++) {
      gridLines.moveTo((column * width) / columns, 0);
      gridLines.lineTo((column * width) / columns, height);
    }
    for (let row = 1; row < rows; row++) {
      gridLines.moveTo(0, (row * height) / rows);
      gridLines.lineTo(width, (row * height) / rows);
    }
    gridLines.stroke();
  }

  #outline(row, column) {
    const [rows, columns] = this.grid;
    const { context, canvas } = this;
    const [width, height] = [canvas.width / columns, canvas.height / rows];
    for (const [colour, thick] of [["#14121a", 7], ["#ffffff", 3.5]]) {
      context.strokeStyle = colour;
      context.lineWidth = thick;
      context.strokeRect(column * width, row * height, width, height);
    }
  }

  #listen(hover, pick, home) {
    const { canvas } = this;
    let last = null;
    const patchAt = (event) => {
      const box = canvas.getBoundingClientRect();
      const [rows, columns] = this.grid;
      const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
      const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
      const inside = row >= 0 && column >= 0 && row < rows && column < columns;
      return inside ? patchName(row, column) : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const patch = patchAt(event);
      if (patch !== last) hover((last = patch));
    });
    canvas.addEventListener("pointerleave", () => hover((last = null)));
    canvas.addEventListener("click", (event) => {
      const patch = patchAt(event);
      if (patch) pick(patch);
    });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const patch = this.#moved(event.key);
      if (!patch && event.key !== "Escape") return;
      hover((last = null)); // ignore a resting pointer
      if (patch) pick(patch);
      else home();
      event.preventDefault();
    });
  }

  /** Return the patch that a key moves to. */
  #moved(key) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const [rows, columns] = this.grid;
    if (key === "Home") return patchName(0, 0);
    if (key === "End") return patchName(rows - 1, columns - 1);
    if (!steps[key]) return null;
    // From a special token, the first step moves to the centre.
    if (!this.query || !isPatch(this.query)) return patchName(Math.floor((rows - 1) / 2), Math.floor((columns - 1) / 2));
    const [row, column] = patchOf(this.query);
    const clamp = (index, count) => Math.max(0, Math.min(count - 1, index));
    return patchName(clamp(row + steps[key][0], rows), clamp(column + steps[key][1], columns));
  }
}
