// One model looking at the image: its answer, its map, and what can be chosen of it.

import { explain, Failure, predict } from "./api.js";
import { Attention, readMap } from "./arrays.js";
import { PatchView } from "./attention.js";
import { markBar, showBars } from "./bars.js";
import { paintHeat } from "./colours.js";
import { counted, make, percent, rounded, say } from "./elements.js";
import { Heads } from "./heads.js";
import { Memory } from "./memory.js";
import { defaultQuery, inWords, isPatch, known, patchOf, places, specials, tokenAt } from "./tokens.js";

const TOP = 5;
const PATIENCE = 200; // milliseconds before "Looking…" shows
const MOST_DRAWN = 600; // patches
const LAYERED = ["attention", "gradcam", "pca"];
const TARGETED = ["relevance", "gradcam"];

export class Panel {
  /** `app` has wanted(panel), change(panel, changes), hover(panel, query), drawn(panel, query). */
  constructor(app) {
    this.app = app;
    this.element = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.parts = {};
    for (const part of this.element.querySelectorAll("[data-part]")) this.parts[part.dataset.part] = part;
    this.memory = new Memory();
    this.hovered = null;
    this.view = new PatchView(this.parts.canvas, {
      hover: (patch) => app.hover(this, patch),
      pick: (patch) => app.change(this, { query: patch }),
      home: () => app.change(this, { query: null }),
    });
    this.heads = new Heads(this.parts["head-list"], (head) => app.change(this, { head }));
    this.parts.models.addEventListener("change", (event) => app.change(this, { model: event.target.value }));
    this.parts.layer.addEventListener("input", (event) => app.change(this, { layer: Number(event.target.value) }));
    this.#drawRamp();
  }

  /** Offer models to choose from. */
  offer(models) {
    this.parts.models.replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
    this.parts.models.disabled = models.length < 2;
  }

  setModel(model) {
    this.running?.abort(); // what comes now is the other model's
    this.model = model;
    this.classes = null;
    this.seen = null;
    this.memory = new Memory();
    this.parts.models.value = model.name;
    this.parts.layer.max = model.depth - 1;
    const [rows, columns] = model.grid;
    const patch = model.patch_size.join("×");
    this.parts.facts.textContent =
      `${rounded(model.parameters)} parameters, ${model.depth} layers of ${model.heads} heads, ` +
      `${rows}×${columns} patches of ${patch} pixels`;
    this.parts.tokens.replaceChildren(...specials(model).map((name) => this.#tokenButton(name)));
    this.heads.setModel(model);
  }

  /**
   * Let the model look at an image. What was shown stays until all is there; a failure leaves it. Whether it was shown:
   * not where something else is wanted by now.
   */
  async show(image) {
    this.coming = image;
    return this.#busy(async (signal) => {
      const [options, memory] = [this.#wantedOptions(), new Memory()];
      const [classes, found] = await Promise.all([
        this.#predicted(image, signal),
        this.#explained(image, signal, options, memory),
      ]);
      const seen = new Image();
      seen.src = found.source;
      await seen.decode();
      signal.throwIfAborted();
      Object.assign(this, { image, classes, memory, seen });
      this.view.setImage(seen, this.model.grid);
      this.#showPlain();
      this.#take(found);
      this.#showAnswers();
    });
  }

  /** Show what is wanted now of the image that is there, or of the one that is about to be. */
  async showMap() {
    this.#mark();
    if (this.coming) return this.show(this.coming);
    if (!this.image) return false;
    if (!this.seen) return this.show(this.image);
    return this.#busy(async (signal) => {
      const found = await this.#explained(this.image, signal, this.#wantedOptions(), this.memory);
      signal.throwIfAborted(); // what is remembered comes at once, but not in between
      this.#take(found);
    });
  }

  /** Return the first layer's attention for a drawing of it; null where it would be too large for that. */
  async firstAttention() {
    const [rows, columns] = this.model.grid;
    if (!this.model.methods.attention || rows * columns > MOST_DRAWN) return null;
    const options = { model: this.model.name, method: "attention", layer: 0, target: null, query: "all" };
    return (await this.#explained(this.image, undefined, options, this.memory)).attention;
  }

  setLook(opacity, lines) {
    this.view.setLook(opacity, lines);
    this.view.draw();
  }

  /** Show another token for as long as the pointer is there; null goes back. */
  preview(query) {
    this.hovered = query;
    this.draw();
  }

  /** Whether the model says what is in the image, rather than in each token or nothing at all. */
  get answers() {
    return this.model.class_count !== 0 && this.model.pool !== "none";
  }

  /** The token whose attention is shown. */
  get asked() {
    return this.hovered ?? known(this.app.wanted(this).query, this.model);
  }

  get layer() {
    return Math.min(this.app.wanted(this).layer ?? this.model.depth - 1, this.model.depth - 1);
  }

  get head() {
    const { head } = this.app.wanted(this);
    return head !== null && head < this.model.heads ? head : null;
  }

  /** The number of the class that is explained, where the method explains one. */
  get target() {
    const { method, target } = this.app.wanted(this);
    if (!TARGETED.includes(method)) return null;
    return target ?? this.classes?.[0]?.index ?? null;
  }

  async #predicted(image, signal) {
    if (!this.answers) return [];
    return predict(image.blob, this.model.name, TOP, signal);
  }

  /** Say what is wanted in the server's words. */
  #wantedOptions() {
    const { method, query, target } = this.app.wanted(this);
    if (!this.model.methods[method]) {
      throw new Failure(`No ${method} map: ${this.model.why_not?.[method] ?? "this model does not allow it"}.`);
    }
    return {
      model: this.model.name,
      method,
      layer: LAYERED.includes(method) ? this.layer : null,
      // By its name where it has one, because a number may be another class's name.
      target: TARGETED.includes(method) && target !== null ? (this.model.classes?.[target] ?? target) : null,
      query: method === "attention" ? "all" : method === "rollout" && query !== null ? known(query, this.model) : null,
    };
  }

  /** Ask the server, or remember what it said. */
  async #explained(image, signal, options, memory) {
    const key = JSON.stringify(options);
    const kept = memory.get(key);
    if (kept) return kept;
    const { model } = this;
    const result = await explain(image.blob, options, signal);
    if (!fits(result, model)) throw new Failure(`The server has another model as “${model.name}” by now; reload the page.`);
    const { method, layer } = options;
    const found = { method, layer, target: result.target, source: result.image };
    if (result.attention) found.attention = new Attention(result.attention);
    else found.values = readMap(result.map).values;
    memory.set(key, found, found.attention?.bits.byteLength ?? found.values.byteLength);
    return found;
  }

  #take(found) {
    found.source = null; // as large as the image, and the same each time
    this.found = found;
    this.#mark();
    this.draw();
  }

  /** Run something that takes time; what was running is given up. Whether it came to its end. */
  async #busy(work) {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { signal } = running;
    const timer = setTimeout(() => this.element.classList.add("busy"), PATIENCE);
    this.element.setAttribute("aria-busy", "true");
    say(this.parts.problem, null);
    try {
      await work(signal);
      return true;
    } catch (error) {
      if (signal.aborted) return false;
      throw error;
    } finally {
      clearTimeout(timer);
      if (this.running === running) {
        this.coming = null;
        this.element.classList.remove("busy");
        this.element.setAttribute("aria-busy", "false");
      }
    }
  }

  /** Draw the map of the token that is asked, from what is at hand. */
  draw() {
    const { found, model, parts } = this;
    if (!found || !this.seen) return;
    const { asked } = this;
    const isAttention = Boolean(found.attention);
    let limits;
    this.weights = null;
    if (isAttention) {
      const at = places(asked, model);
      const [rows, columns] = model.grid;
      this.weights = found.attention.row(this.head, at);
      this.shown = this.weights.subarray(model.patch_start, model.patch_start + rows * columns);
      limits = this.view.setMap(this.shown);
      this.heads.draw(found.attention, at, model.patch_start);
    } else {
      limits = this.view.setMap(found.values);
      this.shown = found.method === "pca" ? null : found.values;
    }
    this.view.asked = isAttention || found.method === "rollout" || this.hovered ? asked : null;
    this.view.draw();
    parts.legend.classList.toggle("unused", found.method === "pca");
    parts.least.textContent = isAttention ? percent(limits.least) : "least";
    parts.most.textContent = isAttention ? percent(limits.most) : "most";
    parts.readout.textContent = this.readout();
    this.app.drawn(this, asked);
  }

  /** Say in a sentence what is shown. */
  readout() {
    const { found, model, asked } = this;
    if (found.attention) {
      let best = 0;
      this.weights.forEach((weight, i) => {
        if (weight > this.weights[best]) best = i;
      });
      const to = tokenAt(best, model);
      const whom = to === asked ? "itself" : inWords(to);
      const most = `${capital(inWords(asked))} looks most at ${whom}: ${percent(this.weights[best])}.`;
      if (!model.tokens.length) return most;
      const elsewhere = model.tokens.reduce((sum, { index }) => sum + this.weights[index], 0);
      return `${most} ${percent(elsewhere)} goes to tokens that are no patches.`;
    }
    if (this.hovered && isPatch(this.hovered) && found.method !== "pca") {
      const [row, column] = patchOf(this.hovered);
      const value = found.values[row * model.grid[1] + column];
      const most = Math.max(...found.values);
      return `Patch ${this.hovered}: ${percent(most > 0 ? value / most : 0)} of the most.`;
    }
    if (found.method === "rollout") {
      const query = known(this.app.wanted(this).query, model);
      return `What ${isPatch(query) ? "" : "the "}${inWords(query)} is made of.`;
    }
    if (found.method === "pca") return `Patches of one colour have similar features after layer ${found.layer}.`;
    if (!found.target) return "";
    return `What speaks for ${found.target.name}, to which the model gives ${percent(found.target.probability)}.`;
  }

  /** Show in the controls what is wanted. */
  #mark() {
    const { parts, model } = this;
    const { method } = this.app.wanted(this);
    parts.layer.value = this.layer;
    parts["layer-value"].textContent = `${this.layer}`;
    parts.layer.setAttribute("aria-valuetext", `Layer ${this.layer} of 0 to ${model.depth - 1}`);
    parts.layers.hidden = !LAYERED.includes(method);
    parts.heads.hidden = method !== "attention";
    this.heads.mark(this.head);
    const asks = method === "attention" || method === "rollout";
    const query = known(this.app.wanted(this).query, model);
    parts.tokens.hidden = !asks;
    for (const button of parts.tokens.children) {
      button.setAttribute("aria-pressed", String(button.dataset.query === query));
    }
    const where = asks ? `, ${inWords(query)} asked` : "";
    parts.canvas.setAttribute("aria-label", `The image as ${model.name} sees it, ${model.grid.join(" by ")} patches${where}`);
    if (this.classes) markBar(parts.bars, this.classes, this.target);
  }

  /** Show the image without a map over it, as the model sees it. */
  #showPlain() {
    const { parts, seen, image } = this;
    parts.plain.src = seen.src;
    parts.plain.alt = image.title ?? "";
    parts.plain.hidden = false;
    parts.plain.classList.toggle("pixelated", seen.naturalWidth < 64);
    parts["plain-says"].textContent =
      `The image alone, as the model sees it: ${seen.naturalHeight}×${seen.naturalWidth} pixels.`;
  }

  #showAnswers() {
    const { parts, classes, model } = this;
    showBars(parts.bars, classes, this.target, (index) => this.app.change(this, { target: index }));
    const count = model.class_count ?? model.classes?.length ?? 0;
    if (!classes.length) parts["answers-say"].textContent = "This model does not answer for a whole image.";
    else parts["answers-say"].textContent = count > TOP ? `The likeliest of ${counted(count)} classes` : "";
  }

  #tokenButton(name) {
    const button = make("button", { type: "button", className: "chip" }, capital(inWords(name)));
    button.dataset.query = name;
    button.addEventListener("click", () =>
      this.app.change(this, { query: name === defaultQuery(this.model) ? null : name }),
    );
    button.addEventListener("pointerenter", () => this.found?.attention && this.app.hover(this, name));
    button.addEventListener("pointerleave", () => this.found?.attention && this.app.hover(this, null));
    return button;
  }

  #drawRamp() {
    const context = this.parts.ramp.getContext("2d");
    const pixels = context.createImageData(128, 1);
    paintHeat(pixels, Float32Array.from({ length: 128 }, (_, i) => i / 127), { least: 0, most: 1 });
    context.putImageData(pixels, 0, 0);
  }
}

/** Whether an answer is of the model that is shown: a bundle may have been replaced after the page was opened. */
function fits({ attention, map }, { heads, token_count: tokens, grid }) {
  const wanted = attention ? [heads, tokens, tokens] : grid;
  const { shape } = attention ?? map;
  return wanted.every((size, axis) => size === shape[axis]);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
