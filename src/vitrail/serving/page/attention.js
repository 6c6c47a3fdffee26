// The image on a canvas, with its patches and a map over it. A move of the pointer paints a few hundred numbers and
// copies two finished layers, so it takes a few milliseconds.

import { paintColours, paintHeat, range } from "./colours.js";
import { isPatch, patchName, patchOf } from "./tokens.js";

const SIDE = 720;
const PIXELATED_FROM = 4;

const fresh = (width, height) => Object.assign(document.createElement("canvas"), { width, height });

export class PatchView {
  /** `hover` is called with a patch or null, `pick` with a patch; a click and the arrow keys pick. */
  constructor(canvas, { hover, pick, home }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { willReadFrequently: false });
    this.grid = [1, 1];
    this.opacity = 0.6;
    this.lines = true;
    this.asked = null;
    this.map = null;
    this.#listen(hover, pick, home);
  }

  /** Take the image that the model saw, and the grid it is cut by. */
  setImage(image, grid) {
    this.image = image;
    this.grid = grid;
    const larger = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
    this.canvas.width = Math.round(image.naturalWidth * larger);
    this.canvas.height = Math.round(image.naturalHeight * larger);
    this.pixelated = larger >= PIXELATED_FROM;
    this.heat = fresh(grid[1], grid[0]);
    this.map = null;
    this.#prepare();
  }

  /** Say how much of the map is seen, and whether patches are told apart. */
  setLook(opacity, lines) {
    this.opacity = opacity;
    this.lines = lines;
    if (!this.image) return;
    this.#prepare();
    if (this.map) this.#paintMap();
  }

  /** Take a number for each patch, or three colours; null takes the map away. */
  setMap(values) {
    this.map = values;
    if (!values) return null;
    this.limits = range(values);
    this.#paintMap();
    return this.limits;
  }

  /** Paint the map, a pixel for each patch. Where it has little to show it covers little, so that the image stays clear. */
  #paintMap() {
    const { map, limits, opacity } = this;
    const [rows, columns] = this.grid;
    const context = this.heat.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    const isColours = map.length === rows * columns * 3;
    if (isColours) paintColours(pixels, map);
    else paintHeat(pixels, map, limits);
    const [least, span] = [limits.least, limits.most - limits.least || 1];
    const weakest = opacity ** 3; // at full opacity the map alone is seen
    for (let patch = 0; patch < rows * columns; patch++) {
      const strength = isColours ? 1 : (map[patch] - least) / span;
      pixels.data[4 * patch + 3] = Math.round(255 * opacity * (weakest + (1 - weakest) * strength));
    }
    context.putImageData(pixels, 0, 0);
  }

  draw() {
    if (!this.image) return;
    const { context, canvas } = this;
    context.globalAlpha = 1;
    context.drawImage(this.map ? this.ground : this.plain, 0, 0);
    if (this.map) {
      context.imageSmoothingEnabled = !this.lines;
      context.imageSmoothingQuality = "high";
      context.drawImage(this.heat, 0, 0, canvas.width, canvas.height);
    }
    if (this.lines) context.drawImage(this.lead, 0, 0);
    if (this.asked && isPatch(this.asked)) this.#outline(...patchOf(this.asked));
  }

  /** Paint what does not change while the pointer moves: the image, greyer the more the map covers it, and the lead. */
  #prepare() {
    const { width, height } = this.canvas;
    this.plain = fresh(width, height);
    const plain = this.plain.getContext("2d");
    plain.imageSmoothingEnabled = !this.pixelated;
    plain.drawImage(this.image, 0, 0, width, height);
    this.ground = fresh(width, height);
    const ground = this.ground.getContext("2d");
    ground.drawImage(this.plain, 0, 0);
    ground.globalCompositeOperation = "saturation";
    ground.globalAlpha = this.opacity ** 2;
    ground.fillStyle = "#808080";
    ground.fillRect(0, 0, width, height);
    this.lead = fresh(width, height);
    const lead = this.lead.getContext("2d");
    const [rows, columns] = this.grid;
    lead.strokeStyle = "rgb(20 18 26 / 0.55)";
    lead.lineWidth = Math.max(1, Math.min(3, width / columns / 18));
    lead.beginPath();
    for (let column = 1; column < columns; column++) {
      lead.moveTo((column * width) / columns, 0);
      lead.lineTo((column * width) / columns, height);
    }
    for (let row = 1; row < rows; row++) {
      lead.moveTo(0, (row * height) / rows);
      lead.lineTo(width, (row * height) / rows);
    }
    lead.stroke();
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
      const patch = this.#stepped(event.key);
      if (!patch && event.key !== "Escape") return;
      hover((last = null)); // a pointer that rests on the image has nothing to say now
      if (patch) pick(patch);
      else home();
      event.preventDefault();
    });
  }

  /** Return the patch that a key leads to. */
  #stepped(key) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const [rows, columns] = this.grid;
    if (key === "Home") return patchName(0, 0);
    if (key === "End") return patchName(rows - 1, columns - 1);
    if (!steps[key]) return null;
    // From a token that is no patch, the first step leads to the middle.
    if (!this.asked || !isPatch(this.asked)) return patchName(Math.floor((rows - 1) / 2), Math.floor((columns - 1) / 2));
    const [row, column] = patchOf(this.asked);
    const within = (place, count) => Math.max(0, Math.min(count - 1, place));
    return patchName(within(row + steps[key][0], rows), within(column + steps[key][1], columns));
  }
}
