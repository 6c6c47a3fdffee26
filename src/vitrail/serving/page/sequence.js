// The tokens in sequence order, with a bar under each for the attention it receives.

import { heatColour, range } from "./colours.js";
import { tokenIndices, tokenAt } from "./tokens.js";

const MAX_TOKENS = 600;
const GAP = 3;
const BAR = 16;

export class Sequence {
  /** `hover` is called with a token's name or null. */
  constructor(canvas, { hover, pick }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    let last = null;
    const at = (event) => {
      if (!this.model) return null;
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / this.cellWidth);
      const row = Math.floor((event.clientY - box.top) / this.cellHeight);
      const index = row * this.columns + column;
      return column < this.columns && index < this.count ? tokenAt(index, this.model) : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const token = at(event);
      if (token !== last) hover((last = token));
    });
    canvas.addEventListener("pointerleave", () => hover((last = null)));
    canvas.addEventListener("click", (event) => {
      const token = at(event);
      if (token) pick(token);
    });
    new ResizeObserver(() => this.model && this.#layOut()).observe(canvas);
  }

  /** Set the image and draw its patches. */
  show(image, model) {
    this.image = image;
    this.model = model;
    this.#layOut();
  }

  #layOut() {
    const { model, image } = this;
    const [rows, columns] = model.grid;
    const width = this.canvas.clientWidth;
    if (!width) return; // hidden
    this.count = Math.min(MAX_TOKENS, model.tokens.length + rows * columns);
    this.side = this.count > 100 ? 20 : 34;
    this.cellWidth = this.side + GAP;
    this.cellHeight = this.side + BAR + GAP * 2;
    this.columns = Math.max(1, Math.floor((width + GAP) / this.cellWidth));
    const scale = Math.min(2, devicePixelRatio || 1);
    this.scale = scale;
    this.canvas.width = width * scale;
    const height = Math.ceil(this.count / this.columns) * this.cellHeight;
    this.canvas.height = height * scale;
    this.canvas.style.setProperty("block-size", `${height}px`);
    this.background = Object.assign(document.createElement("canvas"), { width: this.canvas.width, height: this.canvas.height });
    const context = this.background.getContext("2d");
    context.scale(scale, scale);
    const [w, h] = [image.naturalWidth / columns, image.naturalHeight / rows];
    context.imageSmoothingEnabled = w > this.side;
    context.strokeStyle = "rgb(128 132 140 / 0.5)"; // keeps dark patches visible on a dark page
    for (let index = 0; index < this.count; index++) {
      const [x, y] = this.#corner(index);
      const number = index - model.patch_start;
      if (model.tokens.some((token) => token.index === index)) {
        context.fillStyle = "#d9a400";
        context.beginPath();
        context.roundRect(x, y, this.side, this.side, 4);
        context.fill();
      } else {
        const [row, column] = [Math.floor(number / columns), number % columns];
        context.drawImage(image, column * w, row * h, w, h, x, y, this.side, this.side);
        context.strokeRect(x + 0.5, y + 0.5, this.side - 1, this.side - 1);
      }
    }
    this.draw(this.weights, this.query);
  }

  #corner(index) {
    return [(index % this.columns) * this.cellWidth, Math.floor(index / this.columns) * this.cellHeight + 2];
  }

  /** Draw the attention of a token, one weight per token; null draws none. */
  draw(weights, query) {
    this.weights = weights;
    this.query = query;
    if (!this.background) return;
    const { context, scale } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.background, 0, 0);
    context.scale(scale, scale);
    if (!weights) return;
    const { max } = range(weights);
    for (let index = 0; index < this.count; index++) {
      const [x, y] = this.#corner(index);
      const fraction = max > 0 ? weights[index] / max : 0;
      context.fillStyle = heatColour(0.15 + 0.75 * fraction);
      context.fillRect(x, y + this.side + 3, this.side, Math.max(1, BAR * fraction));
    }
    const indices = query ? tokenIndices(query, this.model) : [];
    if (indices.length !== 1 || indices[0] >= this.count) return;
    const [x, y] = this.#corner(indices[0]);
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 2.5;
    context.strokeRect(x, y, this.side, this.side);
  }
}
