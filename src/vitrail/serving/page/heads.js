// The heads of a layer as a row of thumbnails to choose from, "mean" first.

import { paintHeat, range } from "./colours.js";
import { make } from "./elements.js";

let groups = 0;

export class Heads {
  constructor(list, pick) {
    this.list = list;
    this.pick = pick;
    this.name = `heads-${groups++}`;
  }

  setModel(model) {
    [this.rows, this.columns] = model.grid;
    const options = [null, ...Array(model.heads).keys()];
    this.list.replaceChildren(...options.map((head) => this.#option(head)));
    this.maps = [...this.list.querySelectorAll("canvas")].map((canvas) => canvas.getContext("2d"));
    this.inputs = [...this.list.querySelectorAll("input")];
  }

  #option(head) {
    const text = head === null ? "mean" : String(head);
    const input = make("input", { type: "radio", name: this.name, value: text });
    input.setAttribute("aria-label", head === null ? "Mean of all heads" : `Head ${head}`);
    input.addEventListener("change", () => this.pick(head));
    const canvas = make("canvas", { width: this.columns, height: this.rows, "aria-hidden": "true" });
    return make("label", {}, input, canvas, make("span", { "aria-hidden": "true" }, text));
  }

  /** Select a head; null selects the mean. */
  mark(head) {
    this.inputs[head === null ? 0 : head + 1].checked = true;
  }

  /** Draw the attention of the query tokens in each head. */
  draw(attention, queries, start) {
    this.maps.forEach((context, i) => {
      const row = attention.row(i === 0 ? null : i - 1, queries);
      const patches = row.subarray(start, start + this.rows * this.columns);
      const pixels = context.createImageData(this.columns, this.rows);
      paintHeat(pixels, patches, range(patches));
      context.putImageData(pixels, 0, 0);
    });
  }
}
