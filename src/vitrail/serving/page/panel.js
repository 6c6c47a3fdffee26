// One model's panel: its predictions, its map and its controls.

import { explain, Failure, predict } from "./api.js";
import { Attention, readMap } from "./arrays.js";
import { PatchView } from "./attention.js";
import { markBar, showBars } from "./bars.js";
import { paintHeat } from "./colours.js";
import { abbreviated, formatCount, formatNumber, make, percent, setMessage } from "./elements.js";
import { Heads } from "./heads.js";
import { drawMask, readMask } from "./mask.js";
import { ResponseCache } from "./memory.js";
import { defaultQuery, tokenLabel, isPatch, resolveQuery, patchOf, tokenIndices, specialTokens, tokenAt } from "./tokens.js";

const TOP = 5;
const BUSY_DELAY = 200; // milliseconds before "Computing…" is shown
const MAX_DRAWN_PATCHES = 600;
const LAYERED = ["attention", "gradcam", "pca"];
const TARGETED = ["relevance", "gradcam"];

export class Panel {
  /** `app` has viewOf(panel), change(panel, changes), hover(panel, query), drawn(panel, query). */
  constructor(app) {
    this.app = app;
    this.element = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.parts = {};
    for (const part of this.element.querySelectorAll("[data-part]")) this.parts[part.dataset.part] = part;
    this.cache = new ResponseCache();
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
    this.running?.abort(); // the old model's results are no longer needed
    this.model = model;
    this.classes = null;
    this.preprocessed = null;
    this.mask = null;
    this.cache = new ResponseCache();
    this.parts.models.value = model.name;
    this.parts.layer.max = Math.max(0, model.depth - 1);
    const [rows, columns] = model.grid;
    const patch = model.patch_size.join("×");
    const facts = model.depth
      ? `${model.depth} layers of ${model.heads} heads, ${rows}×${columns} patches of ${patch} pixels`
      : `a last feature map of ${rows}×${columns}, one position per ${patch} pixels`;
    this.parts.facts.textContent = `${abbreviated(model.parameters)} parameters, ${facts}`;
    this.parts.tokens.replaceChildren(...specialTokens(model).map((name) => this.#tokenButton(name)));
    this.heads.setModel(model);
    this.#mark();
  }

  /**
   * Show an image. The previous view stays until everything has arrived, or on failure. Returns whether it was
   * shown, which is false if it was superseded.
   */
  async show(image) {
    this.pending = image;
    return this.#busy(async (signal) => {
      const [options, cache] = [this.#requestOptions(), new ResponseCache()];
      const [{ classes, mask: png }, explanation] = await Promise.all([
        this.#predict(image, signal),
        this.#explain(image, signal, options, cache),
      ]);
      const preprocessed = new Image();
      preprocessed.src = explanation.source;
      await preprocessed.decode();
      const mask = png ? await readMask(png, image.blob, preprocessed) : null;
      signal.throwIfAborted();
      if (mask) for (const each of classes) each.colour = mask.colours[each.index];
      Object.assign(this, { image, classes, cache, preprocessed, mask });
      this.view.setImage(preprocessed, this.model.grid);
      this.#showPlain();
      this.#take(explanation);
      this.#showPredictions();
    });
  }

  /** Show the current view of the image, or of the pending one. */
  async showMap() {
    this.#mark();
    if (this.pending) return this.show(this.pending);
    if (!this.image) return false;
    if (!this.preprocessed) return this.show(this.image);
    return this.#busy(async (signal) => {
      const explanation = await this.#explain(this.image, signal, this.#requestOptions(), this.cache);
      signal.throwIfAborted(); // cached results arrive at once, but may be superseded
      this.#take(explanation);
    });
  }

  /** Return the first layer's attention for its drawing; null if it is too large. */
  async firstAttention() {
    const [rows, columns] = this.model.grid;
    if (!this.model.methods.attention || rows * columns > MAX_DRAWN_PATCHES) return null;
    const options = { model: this.model.name, method: "attention", layer: 0, target: null, query: "all" };
    return (await this.#explain(this.image, undefined, options, this.cache)).attention;
  }

  setStyle(opacity, lines) {
    this.view.setStyle(opacity, lines);
    this.view.draw();
    this.#showMask();
  }

  /** Show another token while the pointer is over it; null resets. */
  preview(query) {
    this.hovered = query;
    this.draw();
  }

  /** Whether the model predicts something about whole images, or a mask. */
  get predicts() {
    const { task, pool } = this.model;
    return task === "segmentation" ? pool === "patches" : task !== null && !["none", "patches"].includes(pool);
  }

  /** Whether a class can be explained. */
  get explainsClasses() {
    return TARGETED.some((method) => this.model.methods[method]);
  }

  /** The query token. */
  get query() {
    return this.hovered ?? resolveQuery(this.app.viewOf(this).query, this.model);
  }

  /** The layer; null if the model has none. */
  get layer() {
    if (!this.model.depth) return null;
    return Math.min(this.app.viewOf(this).layer ?? this.model.depth - 1, this.model.depth - 1);
  }

  get head() {
    const { head } = this.app.viewOf(this);
    return head !== null && head < this.model.heads ? head : null;
  }

  /** The index of the explained class, if the method explains one. */
  get target() {
    const { method, target } = this.app.viewOf(this);
    if (!TARGETED.includes(method)) return null;
    return target ?? this.classes?.[0]?.index ?? null;
  }

  async #predict(image, signal) {
    if (!this.predicts) return { classes: [] };
    return predict(image.blob, this.model.name, TOP, signal);
  }

  /** Return the request options for the server. */
  #requestOptions() {
    const { method, query, target } = this.app.viewOf(this);
    if (!this.model.methods[method]) {
      throw new Failure(`No ${method} map: ${this.model.why_not?.[method] ?? "not supported by this model"}.`);
    }
    return {
      model: this.model.name,
      method,
      layer: LAYERED.includes(method) ? this.layer : null,
      // By name if it has one, because a number may be the name of another class.
      target: TARGETED.includes(method) && target !== null ? (this.model.classes?.[target] ?? target) : null,
      query: method === "attention" ? "all" : method === "rollout" && query !== null ? resolveQuery(query, this.model) : null,
    };
  }

  /** Return the explanation from the server or the cache. */
  async #explain(image, signal, options, cache) {
    const key = JSON.stringify(options);
    const cached = cache.get(key);
    if (cached) return cached;
    const { model } = this;
    const result = await explain(image.blob, options, signal);
    if (!fits(result, model)) throw new Failure(`The model “${model.name}” has changed on the server; reload the page.`);
    const { method, layer } = options;
    const explanation = { method, layer, target: result.target, source: result.image };
    if (result.attention) explanation.attention = new Attention(result.attention);
    else explanation.values = readMap(result.map).values;
    cache.set(key, explanation, explanation.attention?.bits.byteLength ?? explanation.values.byteLength);
    return explanation;
  }

  #take(explanation) {
    explanation.source = null; // free it: as large as the image, and always the same
    this.explanation = explanation;
    this.#mark();
    this.draw();
  }

  /** Run something slow, aborting what is running. Returns whether it finished. */
  async #busy(work) {
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { signal } = running;
    const timer = setTimeout(() => this.element.classList.add("busy"), BUSY_DELAY);
    this.element.setAttribute("aria-busy", "true");
    setMessage(this.parts.problem, null);
    try {
      await work(signal);
      return true;
    } catch (error) {
      if (signal.aborted) return false;
      throw error;
    } finally {
      clearTimeout(timer);
      if (this.running === running) {
        this.pending = null;
        this.element.classList.remove("busy");
        this.element.setAttribute("aria-busy", "false");
      }
    }
  }

  /** Draw the map of the query token from the loaded data. */
  draw() {
    const { explanation, model, parts } = this;
    if (!explanation || !this.preprocessed) return;
    const { query } = this;
    const isAttention = Boolean(explanation.attention);
    let limits;
    this.weights = null;
    if (isAttention) {
      const at = tokenIndices(query, model);
      const [rows, columns] = model.grid;
      this.weights = explanation.attention.row(this.head, at);
      this.shown = this.weights.subarray(model.patch_start, model.patch_start + rows * columns);
      limits = this.view.setMap(this.shown);
      this.heads.draw(explanation.attention, at, model.patch_start);
    } else {
      limits = this.view.setMap(explanation.values);
      this.shown = explanation.method === "pca" ? null : explanation.values;
    }
    this.view.query = isAttention || explanation.method === "rollout" || this.hovered ? query : null;
    this.view.draw();
    parts.legend.classList.toggle("unused", explanation.method === "pca");
    parts.min.textContent = isAttention ? percent(limits.min) : "min";
    parts.max.textContent = isAttention ? percent(limits.max) : "max";
    parts.readout.textContent = this.readout();
    this.app.drawn(this, query);
  }

  /** Describe the map in one sentence. */
  readout() {
    const { explanation, model, query } = this;
    if (explanation.attention) {
      let best = 0;
      this.weights.forEach((weight, i) => {
        if (weight > this.weights[best]) best = i;
      });
      const to = tokenAt(best, model);
      const attended = to === query ? "itself" : tokenLabel(to);
      const readout = `${capitalise(tokenLabel(query))} attends most to ${attended}: ${percent(this.weights[best])}.`;
      if (!model.tokens.length) return readout;
      const toSpecial = model.tokens.reduce((sum, { index }) => sum + this.weights[index], 0);
      return `${readout} ${percent(toSpecial)} goes to special tokens.`;
    }
    if (this.hovered && isPatch(this.hovered) && explanation.method !== "pca") {
      const [row, column] = patchOf(this.hovered);
      const value = explanation.values[row * model.grid[1] + column];
      const max = Math.max(...explanation.values);
      return `${model.depth ? "Patch" : "Position"} ${this.hovered}: ${percent(max > 0 ? value / max : 0)} of the maximum.`;
    }
    if (explanation.method === "rollout") {
      const query = resolveQuery(this.app.viewOf(this).query, model);
      return `Contribution of each patch to ${isPatch(query) ? "" : "the "}${tokenLabel(query)}.`;
    }
    if (explanation.method === "pca") {
      if (explanation.layer === null) return "Regions of the same colour have similar features in the last feature map.";
      return `Patches of the same colour have similar features after layer ${explanation.layer}.`;
    }
    if (!explanation.target) return "";
    const { name, probability, value } = explanation.target;
    if (probability === undefined) return `Evidence for ${name}: ${formatNumber(value)}.`;
    return `Evidence for ${name}, predicted with ${percent(probability)}.`;
  }

  /** Update the controls. */
  #mark() {
    const { parts, model } = this;
    const { method } = this.app.viewOf(this);
    parts.layer.value = this.layer;
    parts["layer-value"].textContent = `${this.layer}`;
    parts.layer.setAttribute("aria-valuetext", `Layer ${this.layer} of 0 to ${model.depth - 1}`);
    parts.layers.hidden = !model.depth || !LAYERED.includes(method);
    parts.heads.hidden = !model.depth || method !== "attention";
    this.heads.mark(this.head);
    const usesQuery = Boolean(model.depth) && (method === "attention" || method === "rollout");
    const query = resolveQuery(this.app.viewOf(this).query, model);
    parts.tokens.hidden = !usesQuery;
    for (const button of parts.tokens.children) {
      button.setAttribute("aria-pressed", String(button.dataset.query === query));
    }
    const queryLabel = usesQuery ? `, query: ${tokenLabel(query)}` : "";
    parts.canvas.setAttribute("aria-label", `The image as ${model.name} sees it, ${model.grid.join(" by ")} ${model.depth ? "patches" : "positions"}${queryLabel}`);
    if (this.classes) markBar(parts.bars, this.classes, this.target);
  }

  /** Show the preprocessed image without a map. */
  #showPlain() {
    const { parts, preprocessed, image } = this;
    parts.plain.src = preprocessed.src;
    parts.plain.alt = image.title ?? "";
    parts.plain.hidden = false;
    parts.plain.classList.toggle("pixelated", preprocessed.naturalWidth < 64);
    parts["plain-note"].textContent =
      `The preprocessed image: ${preprocessed.naturalHeight}×${preprocessed.naturalWidth} pixels.`;
  }

  #showPredictions() {
    const { parts, classes, model } = this;
    const pick = (index) => this.app.change(this, { target: index });
    showBars(parts.bars, classes, this.target, this.explainsClasses ? pick : null);
    this.#showMask();
    const count = model.class_count ?? model.classes?.length ?? 0;
    const noun = model.task === "multilabel" ? "labels; ✓: predicted" : "classes";
    if (!classes.length) parts["predictions-note"].textContent = "This model does not classify whole images.";
    else if (this.mask) parts["predictions-note"].textContent = `Fractions of the image${count > TOP ? `; the ${TOP} largest classes` : ""}`;
    else if (classes[0].probability === undefined) parts["predictions-note"].textContent = "";
    else if (count > TOP) parts["predictions-note"].textContent = `Top ${TOP} of ${formatCount(count)} ${noun}`;
    else parts["predictions-note"].textContent = model.task === "multilabel" ? "✓: predicted" : "";
  }

  /** Draw the mask of a segmentation model; its legend is the list of classes. */
  #showMask() {
    const canvas = this.parts["mask"];
    canvas.hidden = !this.mask;
    if (!this.mask) return;
    drawMask(canvas, this.mask, this.view.opacity);
    const listed = this.classes.map(({ name, fraction }) => `${name} ${percent(fraction)}`).join(", ");
    canvas.setAttribute("aria-label", `The image in the colours of its mask: ${listed}`);
  }

  #tokenButton(name) {
    const button = make("button", { type: "button", className: "chip" }, capitalise(tokenLabel(name)));
    button.dataset.query = name;
    button.addEventListener("click", () =>
      this.app.change(this, { query: name === defaultQuery(this.model) ? null : name }),
    );
    button.addEventListener("pointerenter", () => this.explanation?.attention && this.app.hover(this, name));
    button.addEventListener("pointerleave", () => this.explanation?.attention && this.app.hover(this, null));
    return button;
  }

  #drawRamp() {
    const context = this.parts.ramp.getContext("2d");
    const pixels = context.createImageData(128, 1);
    paintHeat(pixels, Float32Array.from({ length: 128 }, (_, i) => i / 127), { min: 0, max: 1 });
    context.putImageData(pixels, 0, 0);
  }
}

/** Whether a result matches the displayed model: the bundle may have been reloaded since the page was opened. */
function fits({ attention, map }, { heads, token_count: tokens, grid }) {
  const expected = attention ? [heads, tokens, tokens] : grid;
  const { shape } = attention ?? map;
  return expected.every((size, axis) => size === shape[axis]);
}

const capitalise = (text) => text.charAt(0).toUpperCase() + text.slice(1);
