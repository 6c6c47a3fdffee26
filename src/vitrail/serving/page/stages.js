// The stages of the forward pass, each with a small drawing.

import { heatColour, paintHeat, range } from "./colours.js";
import { formatNumber, fractionOf, make } from "./elements.js";

const [WIDE, TALL] = [168, 112];
const GOLD = "#d9a400";
const LEAD = "#1e1b24";

/** Return the drawing of a stage, by the stage's name. */
function drawingOf(name) {
  if (/^(image|pixels)/.test(name)) return drawImage;
  if (/^patches/.test(name)) return drawPatches;
  if (/^patch embed/.test(name)) return drawEmbeddings;
  if (/^(feature map|convolution|ResNet)/.test(name)) return drawMaps;
  if (/^attention/.test(name)) return drawAttention;
  if (/^tokens after/.test(name)) return drawEncoded;
  if (/^tokens/.test(name)) return drawTokens;
  if (/^pooled/.test(name)) return drawPooled;
  return drawPrediction;
}

/** List a model's stages. `data` has the image, the first layer's attention and the classes. */
export function showStages(list, model, data) {
  const cards = model.stages.map(({ name, shape, meaning }, i) =>
    make(
      "li",
      {},
      make("canvas", { width: WIDE * 2, height: TALL * 2, "aria-hidden": "true" }),
      make("h3", {}, make("span", { className: "step", "aria-hidden": "true" }, String(i + 1)), name),
      make("code", { className: "shape" }, shape.join(" × ")),
      make("p", {}, meaning),
    ),
  );
  list.replaceChildren(...cards);
  // Draw after insertion, when the computed styles are available.
  const drawingData = { ...data, colours: patchColours(data.image, model.grid) };
  cards.forEach((card, i) => {
    const context = card.querySelector("canvas").getContext("2d");
    context.scale(2, 2);
    drawingOf(model.stages[i].name)(context, model, { ...drawingData, shape: model.stages[i].shape });
  });
}

/** Return the mean colour of every patch. */
function patchColours(image, [rows, columns]) {
  const small = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const context = small.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, columns, rows);
  const { data } = context.getImageData(0, 0, columns, rows);
  return Array.from({ length: rows * columns }, (_, i) => `rgb(${data[i * 4]} ${data[i * 4 + 1]} ${data[i * 4 + 2]})`);
}

function smoothFor(context, image, side) {
  context.imageSmoothingEnabled = image.naturalWidth * 3 > side;
  context.imageSmoothingQuality = "high";
}

/** Return the box of the image in a drawing. */
function boxOf(image, side = TALL) {
  const scale = side / Math.max(image.naturalWidth, image.naturalHeight);
  const [w, h] = [image.naturalWidth * scale, image.naturalHeight * scale];
  return { x: (WIDE - w) / 2, y: (TALL - h) / 2, w, h };
}

function drawImage(context, model, { image }) {
  const { x, y, w, h } = boxOf(image);
  smoothFor(context, image, h);
  context.drawImage(image, x, y, w, h);
}

function drawPatches(context, model, { image }) {
  const [rows, columns] = model.grid;
  const { x, y, w, h } = boxOf(image);
  const gap = Math.min(5, w / columns / 3.2);
  smoothFor(context, image, h);
  const [sw, sh] = [image.naturalWidth / columns, image.naturalHeight / rows];
  const [dw, dh] = [(w - gap * (columns - 1)) / columns, (h - gap * (rows - 1)) / rows];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const at = [x + column * (dw + gap), y + row * (dh + gap)];
      context.drawImage(image, column * sw, row * sh, sw, sh, ...at, dw, dh);
    }
  }
}

/** Draw a feature map (1, channels, rows, columns) as stacked sheets, at its resolution. */
function drawMaps(context, model, { image, shape }) {
  const [, , rows, columns] = shape;
  const [sheets, step] = [4, 9];
  const small = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  small.getContext("2d").drawImage(image, 0, 0, columns, rows);
  const { w, h } = boxOf(image, TALL - step * (sheets - 1));
  const [left, top] = [(WIDE - w - step * (sheets - 1)) / 2, (TALL - h - step * (sheets - 1)) / 2];
  context.imageSmoothingEnabled = columns > w;
  for (let i = sheets - 1; i >= 0; i--) {
    const at = [left + i * step, top + i * step, w, h];
    context.drawImage(small, ...at);
    // Each sheet stands for one channel; the values are not available here, so the tint is arbitrary.
    context.globalAlpha = 0.55;
    context.fillStyle = heatColour(0.2 + 0.2 * i);
    context.fillRect(...at);
    context.globalAlpha = 1;
    context.strokeStyle = LEAD;
    context.strokeRect(...at);
  }
}

/** Draw a few tokens as vertical strips. */
function strips(context, colours, { gold = 0, last = false, top = 0, height = TALL, cells = 9 } = {}) {
  const shown = 11 - gold;
  const picked = Array.from({ length: Math.min(shown, colours.length) }, (_, i) =>
    colours[Math.floor((i * colours.length) / Math.min(shown, colours.length))]);
  const special = Array(gold).fill(GOLD);
  const all = last ? [...picked, ...special] : [...special, ...picked];
  const pitch = WIDE / all.length;
  const cell = height / cells;
  all.forEach((colour, i) => {
    context.fillStyle = colour;
    for (let k = 0; k < cells; k++) {
      // Shades stand for features; the values are not available here.
      context.globalAlpha = 0.45 + (0.55 * ((i * 7 + k * 5) % 9)) / 8;
      context.fillRect(i * pitch + 1, top + k * cell + 0.5, pitch - 3, cell - 1);
    }
  });
  context.globalAlpha = 1;
  return { pitch, count: all.length };
}

function drawEmbeddings(context, model, { colours }) {
  strips(context, colours);
}

/** Return how many special tokens to draw, and on which side. */
const special = (model) => ({ gold: Math.min(3, model.tokens.length), last: model.patch_start === 0 });

function drawTokens(context, model, { colours }) {
  const { pitch, count } = strips(context, colours, { ...special(model), height: TALL - 18 });
  context.fillStyle = getComputedStyle(context.canvas).color;
  context.font = "600 9px system-ui, sans-serif";
  context.textAlign = "center";
  for (let i = 0; i < count; i++) context.fillText(String(i), (i + 0.5) * pitch - 0.5, TALL - 4);
}

function drawAttention(context, model, { attention }) {
  if (!attention) return;
  const small = Object.assign(document.createElement("canvas"), { width: attention.tokens, height: attention.tokens });
  const inner = small.getContext("2d");
  const shown = Math.min(4, attention.heads);
  const side = TALL - 10 * (shown - 1);
  context.imageSmoothingEnabled = attention.tokens > side;
  for (let i = shown - 1; i >= 0; i--) {
    const pixels = inner.createImageData(attention.tokens, attention.tokens);
    const values = new Float32Array(attention.tokens ** 2);
    for (let token = 0; token < attention.tokens; token++) values.set(attention.row(i, [token]), token * attention.tokens);
    const { min, max } = range(values);
    // Square root, because a few weights are far larger than the rest.
    const roots = values.map((value) => Math.sqrt((value - min) / (max - min || 1)));
    paintHeat(pixels, roots, { min: 0, max: 1 });
    inner.putImageData(pixels, 0, 0);
    const at = (WIDE - side) / 2 + (i - (shown - 1) / 2) * 10;
    context.drawImage(small, at, i * 10, side, side);
    context.strokeStyle = LEAD;
    context.strokeRect(at, i * 10, side, side);
  }
}

function drawEncoded(context, model, { colours }) {
  const shown = Math.min(model.depth, 6);
  const step = 26 / Math.max(1, shown - 1);
  for (let i = 0; i < shown; i++) {
    context.fillStyle = heatColour(0.15 + (0.6 * i) / shown);
    context.globalAlpha = 0.9;
    context.fillRect(1, i * step, WIDE - 5, Math.max(3, step - 2.5));
  }
  context.globalAlpha = 1;
  strips(context, colours, { ...special(model), top: 36, height: TALL - 36, cells: 6 });
}

function drawPooled(context) {
  const cells = 22;
  const pitch = WIDE / cells;
  for (let k = 0; k < cells; k++) {
    context.fillStyle = GOLD;
    context.globalAlpha = 0.4 + (0.6 * ((k * 5) % 9)) / 8;
    context.fillRect(k * pitch + 0.5, TALL / 2 - 12, pitch - 1, 24);
  }
  context.globalAlpha = 1;
}

function drawPrediction(context, model, { classes }) {
  if (!classes?.length) return;
  const style = getComputedStyle(context.canvas);
  context.font = "11px system-ui, sans-serif";
  classes.slice(0, 4).forEach((prediction, i) => {
    const { name, value, colour } = prediction;
    const part = fractionOf(prediction);
    const y = 8 + i * 26;
    const text = part === undefined ? `${name} ${formatNumber(value)}` : name;
    context.fillStyle = style.color;
    context.fillText(text.length > 24 ? `${text.slice(0, 23)}…` : text, 0, y + 5);
    if (part === undefined) return;
    context.fillStyle = style.borderColor;
    context.fillRect(0, y + 9, WIDE, 5);
    context.fillStyle = colour ?? (style.accentColor === "auto" ? GOLD : style.accentColor);
    context.fillRect(0, y + 9, Math.max(2, WIDE * part), 5);
  });
}
