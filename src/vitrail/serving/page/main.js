// The page: the state (state.js), the panels that show it, and the controls that change it.

import { Failure, getModels, getModelSamples, getSamples, setHooks } from "./api.js";
import { comparison } from "./compare.js";
import { amount, byId, make, setMessage } from "./elements.js";
import { Panel } from "./panel.js";
import { defaultSample, loadSample, markSample, showSamples, watchForImages } from "./image.js";
import { Sequence } from "./sequence.js";
import { showStages } from "./stages.js";
import { askForToken } from "./token.js";
import { METHODS, OWN, readState, writeState } from "./state.js";
import { resolveQuery, translateQuery } from "./tokens.js";

const METHOD_TEXT = {
  attention: ["Attention", "The attention of one token in one layer. Move over the image, or use the arrow keys."],
  rollout: ["Rollout", "Attention multiplied through all layers: which patches a token is made of. Click a patch to select it."],
  relevance: ["Relevance", "Which patches support a class: attention weighted by its gradient. Click a class to explain it."],
  gradcam: ["Grad-CAM", "Where the features of one layer support a class. Click a class to explain it."],
  pca: ["PCA", "Which patches have similar features: the first three principal components as colours."],
};

const RESNET_HELP = {
  gradcam: "Where the last feature map supports a class. Click a class to explain it.",
  pca: "Which regions have similar features: the first three principal components as colours.",
};

const MAX_ATTENTION_BYTES = 64 * 2 ** 20; // as in serving/operations.py

let state = readState(location.hash);
let models = [];
let samples = []; // built-in samples
const modelSamples = new Map(); // training samples by model
let image = null;
let pending = null; // the image being loaded
let imageRequest = 0; // counts requested images, so that a slow one does not replace a later one
const panels = [];

const app = {
  /** Return the view state of a panel. */
  viewOf(panel) {
    if (panel === panels[0]) return state;
    const query = state.query === null ? null : translateQuery(resolveQuery(state.query, panels[0].model), panels[0].model, panel.model);
    return { ...state, query, layer: state.otherLayer, head: state.otherHead, target: targetIn(panel.model) };
  },
  change(panel, changes) {
    const next = { ...changes };
    if (next.query) next.query = resolveQuery(translateQuery(next.query, panel.model, panels[0].model), panels[0].model);
    if ("target" in next && panel !== panels[0]) next.target = targetIn(panels[0].model, panel.model.classes?.[next.target]);
    if (next.target !== undefined && !["relevance", "gradcam"].includes(state.method)) {
      next.method = panels[0].model.methods.relevance ? "relevance" : "gradcam";
    }
    if (panel !== panels[0]) {
      const second = { model: "other", layer: "otherLayer", head: "otherHead" };
      return setState(Object.fromEntries(Object.entries(next).map(([key, value]) => [second[key] ?? key, value])));
    }
    return setState(next);
  },
  hover(panel, query) {
    for (const each of panels) {
      each.preview(query === null || each === panel ? query : translateQuery(query, panel.model, each.model));
    }
  },
  drawn(panel, query) {
    if (panels.length === 2) showComparison();
    if (panel !== panels[0]) return;
    sequence.draw(panel.weights, query);
    byId("sequence-help").hidden = !panel.weights;
  },
};

const sequence = new Sequence(byId("sequence"), {
  hover: (query) => app.hover(panels[0], query),
  pick: (query) => app.change(panels[0], { query }),
});

/** Return the index of the target class in a model, by name; null means the top class. */
function targetIn(model, name = panels[0].model.classes?.[state.target]) {
  const index = model.classes?.indexOf(name) ?? -1;
  return index >= 0 ? index : null;
}

/** Disable attention for a model if one layer exceeds what the server sends. */
function limitAttention(model) {
  const tokens = model.tokens.length + model.grid[0] * model.grid[1];
  if (2 * model.heads * tokens ** 2 <= MAX_ATTENTION_BYTES) return model;
  const why = { ...model.why_not, attention: "one layer is too large to send" };
  return { ...model, methods: { ...model.methods, attention: false }, why_not: why };
}

const modelNamed = (name) => models.find((model) => model.name === name);

/** Change the state, update the URL and redraw what changed. */
async function setState(changes) {
  const before = state;
  state = { ...state, ...changes };
  const changed = (...keys) => keys.some((key) => state[key] !== before[key]);
  if (changed("model")) state = validState({ ...state, layer: null, head: null, target: null });
  if (changed("other")) state = validState({ ...state, otherLayer: null, otherHead: null });
  showControls();
  if (changed("model", "other")) return arrange();
  if (changed("opacity", "grid")) {
    for (const panel of panels) panel.setStyle(state.opacity, state.grid);
    return undefined;
  }
  const done = await Promise.all(panels.map((panel) => attempt(panel, () => panel.showMap())));
  settlePending(); // a pending image was requested again for the new view
  if (done[0] && panels[0].explanation) byId("live").textContent = panels[0].readout();
  return showShared();
}

/** Run something for a panel; show failures in that panel. */
async function attempt(panel, work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    setMessage(panel.parts.problem, error.message);
    return false;
  }
}

/** Create one panel per selected model. */
async function arrange() {
  const selected = [modelNamed(state.model), modelNamed(state.other)].filter(Boolean);
  while (panels.length > selected.length) panels.pop().element.remove();
  selected.forEach((model, i) => {
    if (!panels[i]) {
      panels.push(new Panel(app));
      panels[i].offer(models);
      byId("panels").append(panels[i].element);
    }
    panels[i].setStyle(state.opacity, state.grid);
    if (panels[i].model !== model) panels[i].setModel(model);
  });
  byId("panels").classList.toggle("two", panels.length === 2);
  await offerSamples();
  const next = pending ?? image;
  if (next) await showImage(next);
}

/** Offer the first model's training samples if it has some, or else the built-in ones. */
async function offerSamples() {
  const name = state.model;
  if (!modelSamples.has(name)) modelSamples.set(name, await getModelSamples(name).catch(() => []));
  const own = modelSamples.get(name);
  if (name !== state.model || offered === (own.length ? own : samples)) return;
  offered = own.length ? own : samples;
  showSamples(offered, (sample) => attemptAll(() => takeSample(sample)));
  markSample(state.image);
}
let offered = null;

/** Show an image in every panel. If the first panel fails, the previous image stays. */
async function showImage(next) {
  const others = panels.slice(1).map((panel) => attempt(panel, () => panel.show(next)));
  byId("pipeline").ariaBusy = "true";
  try {
    if (!(await panels[0].show(next))) return; // superseded
  } catch (error) {
    byId("pipeline").ariaBusy = "false";
    if (!(error instanceof Failure)) throw error;
    setMessage(byId("problem"), error.message);
    settlePending();
    return;
  }
  settlePending();
  const best = panels[0].classes?.[0];
  byId("live").textContent = best ? `${panels[0].model.name} ${best.fraction === undefined ? "predicts" : "finds most of"} ${best.name}, ${amount(best)}.` : "";
  await Promise.all(others);
  setTimeout(showShared); // draw the stages after the image is usable
}

/** Record the outcome of the pending image once the first panel is idle. */
function settlePending() {
  if (!pending || panels[0].pending) return;
  if (panels[0].image === pending) image = pending;
  else state = { ...state, image: image?.name ?? null };
  pending = null;
}

/** Load and show a sample, unless another image is requested meanwhile. */
async function takeSample(sample, changes) {
  const request = ++imageRequest;
  const next = await loadSample(sample);
  if (request === imageRequest) await take(next, changes);
}

/** Show a new image. */
async function take(next, changes = { target: null }) {
  imageRequest++;
  pending = next;
  setMessage(byId("problem"), null);
  setMessage(byId("notice"), null);
  state = { ...state, ...changes, image: next.name };
  showControls();
  await showImage(next);
  showControls();
}

/** Run something; show failures at the top of the page. */
async function attemptAll(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    setMessage(byId("problem"), error.message);
  }
}

/** Write the state to the URL, debounced: browsers limit how often it may change. */
function updateUrl() {
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", writeState(state)), 150);
}
let writing;

function showControls() {
  const model = modelNamed(state.model);
  const isResnet = model?.depth === 0;
  for (const element of document.querySelectorAll("[data-for]")) element.hidden = (element.dataset.for === "resnet") !== isResnet;
  for (const input of byId("methods").querySelectorAll("input")) {
    input.checked = input.value === state.method;
    input.disabled = model ? !model.methods[input.value] : false;
    input.parentElement.title = input.disabled ? (model.why_not?.[input.value] ?? "not supported by this model") : "";
  }
  byId("method-help").textContent = (isResnet && RESNET_HELP[state.method]) || METHOD_TEXT[state.method][1];
  byId("opacity").value = Math.round(100 * state.opacity);
  byId("opacity-value").textContent = `${Math.round(100 * state.opacity)}%`;
  byId("grid").checked = state.grid;
  byId("compare").value = state.other ?? "";
  markSample(state.image);
  updateUrl();
}

/** Show what is shared by the panels: the comparison, the stages, the sequence. */
async function showShared() {
  showComparison();
  const [panel] = panels;
  const { preprocessed, model, classes } = panel;
  if (!preprocessed || drawnImage === preprocessed) {
    byId("pipeline").ariaBusy = "false";
    return;
  }
  drawnImage = preprocessed;
  sequence.show(preprocessed, model);
  showStages(byId("stages"), model, { image: preprocessed, classes });
  const attention = await panel.firstAttention().catch(() => null); // skip this drawing on failure
  if (drawnImage !== preprocessed) return; // superseded
  if (attention) showStages(byId("stages"), model, { image: preprocessed, classes, attention });
  byId("pipeline").ariaBusy = "false";
}
let drawnImage = null;

function showComparison() {
  setMessage(byId("result"), panels.length === 2 ? comparison(...panels) : null);
}

function buildControls() {
  byId("methods").append(
    ...METHODS.map((method) => {
      const input = make("input", { type: "radio", name: "method", value: method });
      input.addEventListener("change", () => setState({ method }));
      return make("label", {}, input, make("span", {}, METHOD_TEXT[method][0]));
    }),
  );
  byId("opacity").addEventListener("input", (event) => setState({ opacity: Number(event.target.value) / 100 }));
  byId("grid").addEventListener("change", (event) => setState({ grid: event.target.checked }));
  byId("compare").addEventListener("change", (event) => setState({ other: event.target.value || null }));
  byId("copy").addEventListener("click", copyLink);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the URL hash holds the state
    panels[0]?.parts.canvas.focus();
    byId("explore").scrollIntoView();
  });
  // Use the URL of the event: location may have been overwritten already.
  addEventListener("hashchange", ({ newURL }) => open(readState(new URL(newURL).hash)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawnImage = null; // the drawings use the page's colours
    if (panels.length) showShared();
  });
  addEventListener("unhandledrejection", () => setMessage(byId("problem"), "Something went wrong; reload the page."));
}

async function copyLink() {
  history.replaceState(null, "", writeState(state));
  const note = state.image === OWN ? " The link does not include your image." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copied").textContent = `Copied.${note}`;
  } catch {
    byId("copied").textContent = `Copy the address of this page.${note}`;
  }
}

function offerComparison() {
  const none = make("option", { value: "" }, "none");
  byId("compare").replaceChildren(none, ...models.map(({ name }) => make("option", { value: name }, name)));
  byId("compare-field").hidden = models.length < 2;
}

/** Return a valid state: only models that exist, and a method of both of them if there is one. */
function validState(requested) {
  const model = modelNamed(requested.model) ?? models.find((model) => model.default) ?? models[0];
  const other = modelNamed(requested.other);
  const methods = [requested.method, ...METHODS].filter((each) => model.methods[each]);
  const method = methods.find((each) => !other || other.methods[each]) ?? methods[0];
  const target = requested.target !== null && requested.target < model.class_count ? requested.target : null;
  return { ...requested, model: model.name, other: other ? other.name : null, method: method ?? requested.method, target };
}

/** Restore the view of a URL. */
async function restore(requested) {
  state = validState(requested);
  showControls();
  await arrange();
  if (state.image === OWN && image?.name === OWN) return;
  const all = [...[...modelSamples.values()].flat(), ...samples];
  const sample = all.find(({ name }) => name === requested.image) ?? defaultSample(all, modelNamed(state.model));
  if (!sample) return setMessage(byId("notice"), "Choose an image to start.");
  await takeSample(sample, {});
  if (requested.image === OWN) {
    setMessage(byId("notice"), "This link was made with an uploaded image, which a link cannot contain. A sample is shown instead; "
      + "choose the original image to restore the view.");
  }
}

/** Open a view and mark the page as ready. */
async function open(requested) {
  clearTimeout(writing);
  delete document.body.dataset.ready;
  await attemptAll(() => restore(requested));
  document.body.dataset.ready = "";
}

async function start() {
  setHooks({ token: askForToken, waiting: (message) => (byId("live").textContent = message) });
  buildControls();
  watchForImages(
    (next) => take(next),
    (message) => setMessage(byId("problem"), message),
  );
  await attemptAll(async () => {
    [models, samples] = await Promise.all([getModels(), getSamples()]);
    models = models.map(limitAttention);
    offerComparison();
    await open(state);
  });
}

await start();
