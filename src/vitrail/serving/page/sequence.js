// The tokens in the order the encoder has them, with a bar under each: how much it is looked at.

import { heatColour, range } from "./colours.js";
import { places, tokenAt } from "./tokens.js";

const MOST = 600;
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
      const column = Math.floor((event.clientX - box.left) / this.across);
      const row = Math.floor((event.clientY - box.top) / this.down);
      const place = row * this.columns + column;
      return column < this.columns && place < this.count ? tokenAt(place, this.model) : null;
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
    new ResizeObserver(() => this.model && this.#lay()).observe(canvas);
  }

  /** Take the image and cut it. */
  show(image, model) {
    this.image = image;
    this.model = model;
    this.#lay();
  }

  #lay() {
    const { model, image } = this;
    const [rows, columns] = model.grid;
    const wide = this.canvas.clientWidth;
    this.count = Math.min(MOST, model.tokens.length + rows * columns);
    this.side = this.count > 100 ? 20 : 34;
    this.across = this.side + GAP;
    this.down = this.side + BAR + GAP * 2;
    this.columns = Math.max(1, Math.floor((wide + GAP) / this.across));
    const scale = Math.min(2, devicePixelRatio || 1);
    this.scale = scale;
    this.canvas.width = wide * scale;
    const tall = Math.ceil(this.count / this.columns) * this.down;
    this.canvas.height = tall * scale;
    this.canvas.style.setProperty("block-size", `${tall}px`);
    this.still = Object.assign(document.createElement("canvas"), { width: this.canvas.width, height: this.canvas.height });
    const context = this.still.getContext("2d");
    context.scale(scale, scale);
    const [w, h] = [image.naturalWidth / columns, image.naturalHeight / rows];
    context.imageSmoothingEnabled = w > this.side;
    context.strokeStyle = "rgb(128 132 140 / 0.5)"; // black patches on a black page are patches, too
    for (let place = 0; place < this.count; place++) {
      const [x, y] = this.#corner(place);
      const number = place - model.patch_start;
      if (model.tokens.some(({ index }) => index === place)) {
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
    this.draw(this.weights, this.asked);
  }

  #corner(place) {
    return [(place % this.columns) * this.across, Math.floor(place / this.columns) * this.down + 2];
  }

  /** Draw what a token looks at, a weight for each token, or none. */
  draw(weights, asked) {
    this.weights = weights;
    this.asked = asked;
    if (!this.still) return;
    const { context, scale } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.still, 0, 0);
    context.scale(scale, scale);
    if (!weights) return;
    const { most } = range(weights);
    for (let place = 0; place < this.count; place++) {
      const [x, y] = this.#corner(place);
      const share = most > 0 ? weights[place] / most : 0;
      context.fillStyle = heatColour(0.15 + 0.75 * share);
      context.fillRect(x, y + this.side + 3, this.side, Math.max(1, BAR * share));
    }
    const places_ = asked ? places(asked, this.model) : [];
    if (places_.length !== 1 || places_[0] >= this.count) return;
    const [x, y] = this.#corner(places_[0]);
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 2.5;
    context.strokeRect(x, y, this.side, this.side);
  }
}
