// The page: what is wanted (state.js), who shows it (panels), and the controls that change it.

import { Failure, getModels, getOwnSamples, getSamples, onNeed } from "./api.js";
import { result } from "./compare.js";
import { byId, make, percent, say } from "./elements.js";
import { Panel } from "./panel.js";
import { fittingSample, loadSample, markSample, showSamples, watchForImages } from "./image.js";
import { Sequence } from "./sequence.js";
import { showStages } from "./stages.js";
import { askForToken } from "./token.js";
import { METHODS, OWN, readState, writeState } from "./state.js";
import { known, translated } from "./tokens.js";

const WORDS = {
  attention: ["Attention", "Where one token looks, in one layer. Move over the image, or go through it with the arrow keys."],
  rollout: ["Rollout", "What one token is made of after all layers: their attention multiplied. Click a patch to ask it."],
  relevance: ["Relevance", "Which patches speak for a class: attention weighted by its gradient. Click an answer to ask for it."],
  gradcam: ["Grad-CAM", "Where one layer has the features that speak for a class. Click an answer to ask for it."],
  pca: ["PCA", "Which patches are alike to the model: the three main directions of their features as colours."],
};

const LARGEST_ATTENTION = 64 * 2 ** 20; // bytes, as in serving/questions.py

let state = readState(location.hash);
let models = [];
let samples = []; // those of the page
const ownSamples = new Map(); // those of each model
let image = null;
let coming = null; // the image that is being looked at for the first time
let turn = 0; // counts the images that were asked for, so that one that loads slowly does not replace a later one
const panels = [];

const app = {
  /** What is wanted of a panel: the first one's part of the state, or the second's. */
  wanted(panel) {
    if (panel === panels[0]) return state;
    const query = state.query === null ? null : translated(known(state.query, panels[0].model), panels[0].model, panel.model);
    return { ...state, query, layer: state.otherLayer, head: state.otherHead, target: targetIn(panel.model) };
  },
  change(panel, changes) {
    const next = { ...changes };
    if (next.query) next.query = known(translated(next.query, panel.model, panels[0].model), panels[0].model);
    if ("target" in next && panel !== panels[0]) next.target = targetIn(panels[0].model, panel.model.classes?.[next.target]);
    if (next.target !== undefined && !["relevance", "gradcam"].includes(state.method)) next.method = "relevance";
    if (panel !== panels[0]) {
      const second = { model: "other", layer: "otherLayer", head: "otherHead" };
      return move(Object.fromEntries(Object.entries(next).map(([key, value]) => [second[key] ?? key, value])));
    }
    return move(next);
  },
  hover(panel, query) {
    for (const each of panels) {
      each.preview(query === null || each === panel ? query : translated(query, panel.model, each.model));
    }
  },
  drawn(panel, asked) {
    if (panels.length === 2) showResult();
    if (panel !== panels[0]) return;
    sequence.draw(panel.weights, asked);
    byId("sequence-says").hidden = !panel.weights;
  },
};

const sequence = new Sequence(byId("sequence"), {
  hover: (query) => app.hover(panels[0], query),
  pick: (query) => app.change(panels[0], { query }),
});

/** Return the number in a model of the class that is wanted, by its name; null for the likeliest. */
function targetIn(model, name = panels[0].model.classes?.[state.target]) {
  const index = model.classes?.indexOf(name) ?? -1;
  return index >= 0 ? index : null;
}

/** Take attention out of what a model offers where a layer of it is more than the server sends at once. */
function withinReason(model) {
  const tokens = model.tokens.length + model.grid[0] * model.grid[1];
  if (2 * model.heads * tokens ** 2 <= LARGEST_ATTENTION) return model;
  const why = { ...model.why_not, attention: "a layer of it is too large to be sent at once" };
  return { ...model, methods: { ...model.methods, attention: false }, why_not: why };
}

const modelNamed = (name) => models.find((model) => model.name === name);

/** Go to another state: the address says so, and what has to be shown anew is. */
async function move(changes) {
  const before = state;
  state = { ...state, ...changes };
  const changed = (...keys) => keys.some((key) => state[key] !== before[key]);
  if (changed("model")) state = possible({ ...state, layer: null, head: null, target: null });
  if (changed("other")) Object.assign(state, { otherLayer: null, otherHead: null });
  showControls();
  if (changed("model", "other")) return arrange();
  if (changed("opacity", "grid")) {
    for (const panel of panels) panel.setLook(state.opacity, state.grid);
    return undefined;
  }
  const shown = await Promise.all(panels.map((panel) => attempt(panel, () => panel.showMap())));
  conclude(); // an image that was coming has been asked for anew, in the new view
  if (shown[0] && panels[0].found) byId("live").textContent = panels[0].readout();
  return showWhole();
}

/** Let a panel do something; what goes wrong is said in the panel. */
async function attempt(panel, work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(panel.parts.problem, error.message);
    return false;
  }
}

/** Make as many panels as are wanted, each with its model. */
async function arrange() {
  const wanted = [modelNamed(state.model), modelNamed(state.other)].filter(Boolean);
  while (panels.length > wanted.length) panels.pop().element.remove();
  wanted.forEach((model, i) => {
    if (!panels[i]) {
      panels.push(new Panel(app));
      panels[i].offer(models);
      byId("panels").append(panels[i].element);
    }
    panels[i].setLook(state.opacity, state.grid);
    if (panels[i].model !== model) panels[i].setModel(model);
  });
  byId("panels").classList.toggle("two", panels.length === 2);
  await offerSamples();
  const next = coming ?? image;
  if (next) await look(next);
}

/** Offer images of the first model's own classes where its run kept some; else those of the page. */
async function offerSamples() {
  const name = state.model;
  if (!ownSamples.has(name)) ownSamples.set(name, await getOwnSamples(name).catch(() => []));
  const own = ownSamples.get(name);
  if (name !== state.model || offered === (own.length ? own : samples)) return;
  offered = own.length ? own : samples;
  showSamples(offered, (sample) => attemptAll(() => takeSample(sample)));
  markSample(state.image);
}
let offered = null;

/** Let every panel look at an image. If the first cannot, the image before stays. */
async function look(next) {
  const others = panels.slice(1).map((panel) => attempt(panel, () => panel.show(next)));
  byId("way").ariaBusy = "true";
  try {
    if (!(await panels[0].show(next))) return; // something else is looked at by now
  } catch (error) {
    byId("way").ariaBusy = "false";
    if (!(error instanceof Failure)) throw error;
    say(byId("problem"), error.message);
    conclude();
    return;
  }
  conclude();
  const best = panels[0].classes?.[0];
  byId("live").textContent = best ? `${panels[0].model.name} says ${best.name}, ${percent(best.probability)}.` : "";
  await Promise.all(others);
  setTimeout(showWhole); // the image can be used before the drawings further down are made
}

/** Note what became of the image that was coming, once the first panel is at rest. */
function conclude() {
  if (!coming || panels[0].coming) return;
  if (panels[0].image === coming) image = coming;
  else state = { ...state, image: image?.name ?? null };
  coming = null;
}

/** Take a sample, unless another image is asked for while it loads. */
async function takeSample(sample, changes) {
  const mine = ++turn;
  const next = await loadSample(sample);
  if (mine === turn) await take(next, changes);
}

/** Take a new image. */
async function take(next, changes = { target: null }) {
  turn++;
  coming = next;
  say(byId("problem"), null);
  say(byId("notice"), null);
  state = { ...state, ...changes, image: next.name };
  showControls();
  await look(next);
  showControls();
}

/** Do something; what goes wrong is said at the top. */
async function attemptAll(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(byId("problem"), error.message);
  }
}

/** Write the view into the address. Browsers refuse to do that many times a second. */
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", writeState(state)), 150);
}
let writing;

function showControls() {
  for (const input of byId("methods").querySelectorAll("input")) {
    const model = panels[0]?.model ?? modelNamed(state.model);
    input.checked = input.value === state.method;
    input.disabled = model ? !model.methods[input.value] : false;
    input.parentElement.title = input.disabled ? (model.why_not?.[input.value] ?? "not for this model") : "";
  }
  byId("method-says").textContent = WORDS[state.method][1];
  byId("opacity").value = Math.round(100 * state.opacity);
  byId("opacity-value").textContent = `${Math.round(100 * state.opacity)} %`;
  byId("grid").checked = state.grid;
  byId("compare").value = state.other ?? "";
  markSample(state.image);
  writeAddress();
}

/** Show what belongs to all panels, or to the first: how they agree, the stages, the sequence. */
async function showWhole() {
  showResult();
  const [panel] = panels;
  const { seen, model, classes } = panel;
  if (!seen || drawnOf === seen) {
    byId("way").ariaBusy = "false";
    return;
  }
  drawnOf = seen;
  sequence.show(seen, model);
  showStages(byId("stages"), model, { image: seen, classes });
  const attention = await panel.firstAttention().catch(() => null); // one drawing less, and no more
  if (drawnOf !== seen) return; // there is another image by now
  if (attention) showStages(byId("stages"), model, { image: seen, classes, attention });
  byId("way").ariaBusy = "false";
}
let drawnOf = null;

function showResult() {
  say(byId("result"), panels.length === 2 ? result(...panels) : null);
}

function buildControls() {
  byId("methods").append(
    ...METHODS.map((method) => {
      const input = make("input", { type: "radio", name: "method", value: method });
      input.addEventListener("change", () => move({ method }));
      return make("label", {}, input, make("span", {}, WORDS[method][0]));
    }),
  );
  byId("opacity").addEventListener("input", (event) => move({ opacity: Number(event.target.value) / 100 }));
  byId("grid").addEventListener("change", (event) => move({ grid: event.target.checked }));
  byId("compare").addEventListener("change", (event) => move({ other: event.target.value || null }));
  byId("copy").addEventListener("click", copyLink);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is the view's
    panels[0]?.parts.canvas.focus();
    byId("explore").scrollIntoView();
  });
  // The address as it was asked for: by now it may have been written over.
  addEventListener("hashchange", ({ newURL }) => begin(readState(new URL(newURL).hash)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawnOf = null; // the drawings have the colours of the page
    if (panels.length) showWhole();
  });
  addEventListener("unhandledrejection", () => say(byId("problem"), "Something went wrong on this page; reload it."));
}

async function copyLink() {
  history.replaceState(null, "", writeState(state));
  const own = state.image === OWN ? " The image itself is not in it." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copied").textContent = `Copied.${own}`;
  } catch {
    byId("copied").textContent = `The address of this page is the link.${own}`;
  }
}

function offerComparison() {
  const none = make("option", { value: "" }, "no other model");
  byId("compare").replaceChildren(none, ...models.map(({ name }) => make("option", { value: name }, name)));
  byId("compare-field").hidden = models.length < 2;
}

/** Return a state that can be shown: with models and a sample that exist. */
function possible(wanted) {
  const fitting = modelNamed(wanted.model) ?? models.find((model) => model.default) ?? models[0];
  const other = modelNamed(wanted.other);
  const method = fitting.methods[wanted.method] ? wanted.method : METHODS.find((each) => fitting.methods[each]);
  const target = wanted.target !== null && wanted.target < fitting.class_count ? wanted.target : null;
  return { ...wanted, model: fitting.name, other: other ? other.name : null, method: method ?? wanted.method, target };
}

/** Show the view of an address. */
async function restore(wanted) {
  state = possible(wanted);
  showControls();
  await arrange();
  if (state.image === OWN && image?.name === OWN) return;
  const all = [...[...ownSamples.values()].flat(), ...samples];
  const sample = all.find(({ name }) => name === wanted.image) ?? fittingSample(all, modelNamed(state.model));
  if (!sample) return say(byId("notice"), "Choose an image to begin.");
  await takeSample(sample, {});
  if (wanted.image === OWN) {
    say(byId("notice"), "This link was made with an image of someone's own, which it cannot hold. Here is a sample instead; "
      + "choose the image to see the view as it was.");
  }
}

/** Show a view, and say when it is there. */
async function begin(wanted) {
  clearTimeout(writing);
  delete document.body.dataset.ready;
  await attemptAll(() => restore(wanted));
  document.body.dataset.ready = "";
}

async function start() {
  onNeed({ token: askForToken, waiting: (sentence) => (byId("live").textContent = sentence) });
  buildControls();
  watchForImages(
    (next) => take(next),
    (sentence) => say(byId("problem"), sentence),
  );
  await attemptAll(async () => {
    [models, samples] = await Promise.all([getModels(), getSamples()]);
    models = models.map(withinReason);
    offerComparison();
    await begin(state);
  });
}

await start();
