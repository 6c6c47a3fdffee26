// The page: what is wanted (state.js), who shows it (panels), and the controls that change it.

import { Failure, getModels, getSamples, onNeed } from "./api.js";
import { verdict } from "./compare.js";
import { byId, make, percent, say } from "./elements.js";
import { Panel } from "./panel.js";
import { fittingSample, loadSample, markSample, showSamples, watchForPictures } from "./picture.js";
import { Sequence } from "./sequence.js";
import { showStages } from "./stages.js";
import { askForToken } from "./token.js";
import { METHODS, OWN, readState, writeState } from "./state.js";
import { known, translated } from "./tokens.js";

const WORDS = {
  attention: ["Attention", "Where one token looks, in one layer. Move over the picture, or go through it with the arrow keys."],
  rollout: ["Rollout", "What one token is made of after all layers: their attention multiplied. Click a patch to ask it."],
  relevance: ["Relevance", "Which patches speak for a class: attention weighted by its gradient. Click an answer to ask for it."],
  gradcam: ["Grad-CAM", "Where one layer has the features that speak for a class. Click an answer to ask for it."],
  pca: ["PCA", "Which patches are alike to the model: the three main directions of their features as colours."],
};

let state = readState(location.hash);
let models = [];
let samples = [];
let picture = null;
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
    if (panel === panels[0]) sequence.draw(panel.weights, asked);
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

const modelNamed = (name) => models.find((model) => model.name === name);

/** Go to another state: the address says so, and what has to be shown anew is. */
async function move(changes, { address = true } = {}) {
  const before = state;
  state = { ...state, ...changes };
  const changed = (...keys) => keys.some((key) => state[key] !== before[key]);
  if (changed("model")) Object.assign(state, { layer: changes.layer ?? null, head: changes.head ?? null, target: changes.target ?? null });
  if (changed("other")) Object.assign(state, { otherLayer: changes.otherLayer ?? null, otherHead: changes.otherHead ?? null });
  if (address) history.replaceState(null, "", writeState(state));
  showControls();
  if (changed("picture") && changes.picture !== OWN) return goTo(samples.find(({ name }) => name === state.picture));
  if (changed("model") || changed("other")) return arrange();
  if (changed("opacity", "grid")) for (const panel of panels) panel.setLook(state.opacity, state.grid);
  const shown = await Promise.all(panels.map((panel) => attempt(panel, () => panel.showMap())));
  if (shown[0]) {
    showWay(changed("layer", "method"));
    if (changed("query", "layer", "head", "method", "target")) byId("live").textContent = panels[0].readout();
  }
  showVerdict();
  return undefined;
}

/** Let a panel do something; what goes wrong is said in the panel. */
async function attempt(panel, work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof Failure) && !error.noMap) throw error;
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
  if (picture) await look(picture);
}

/** Let every panel look at a picture; whether the first could. */
async function look(next) {
  const others = panels.slice(1).map((panel) => attempt(panel, () => panel.show(next)));
  try {
    await panels[0].show(next);
  } catch (error) {
    if (!(error instanceof Failure) && !error.noMap) throw error;
    say(byId("problem"), error.message);
    return false;
  }
  showWay(true);
  const [best] = panels[0].classes;
  byId("live").textContent = best ? `${panels[0].model.name} says ${best.name}, ${percent(best.probability)}.` : "";
  await Promise.all(others);
  showVerdict();
  return true;
}

/** Take a new picture. If it cannot be shown, all stays as it was. */
async function take(next, changes = { target: null }) {
  say(byId("problem"), null);
  say(byId("notice"), null);
  const before = state;
  state = { ...state, ...changes, picture: next.name };
  if (await look(next)) picture = next;
  else state = before;
  history.replaceState(null, "", writeState(state));
  showControls();
}

async function goTo(sample) {
  if (!sample) return;
  try {
    await take(await loadSample(sample));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(byId("problem"), error.message);
  }
}

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
  markSample(state.picture);
}

/** Show the stages with what is known; drawn anew only where something in them has changed. */
function showWay(changed) {
  const [panel] = panels;
  if (!changed || !panel.seen) return;
  const { attention, layer } = panel.found;
  if (attention) seenAttention = { attention, layer, of: panel.model };
  const known_ = seenAttention.of === panel.model ? seenAttention : {};
  showStages(byId("stages"), panel.model, { picture: panel.seen, classes: panel.classes, ...known_ });
  sequence.show(panel.seen, panel.model);
}
let seenAttention = {};

function showVerdict() {
  say(byId("verdict"), panels.length === 2 ? verdict(...panels) : null);
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
  addEventListener("hashchange", () => restore(readState(location.hash)));
}

async function copyLink() {
  const own = state.picture === OWN ? " The picture itself is not in it." : "";
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
  return { ...wanted, model: fitting.name, other: other ? other.name : null, method: method ?? wanted.method };
}

/** Show the view of an address. */
async function restore(wanted) {
  state = possible(wanted);
  showControls();
  await arrange();
  if (state.picture === OWN && picture?.name === OWN) return;
  const sample = samples.find(({ name }) => name === wanted.picture) ?? fittingSample(samples, modelNamed(state.model));
  if (!sample) return say(byId("notice"), "Choose a picture to begin.");
  await take(await loadSample(sample), {});
  if (wanted.picture === OWN) {
    say(byId("notice"), "This link was made with a picture of someone's own, which it cannot hold. Here is a sample instead; "
      + "choose the picture to see the view as it was.");
  }
}

async function begin() {
  onNeed({ token: askForToken, waiting: (sentence) => (byId("live").textContent = sentence) });
  buildControls();
  watchForPictures(
    (next) => take(next),
    (sentence) => say(byId("problem"), sentence),
  );
  try {
    [models, samples] = await Promise.all([getModels(), getSamples()]);
    showSamples(samples, goTo);
    offerComparison();
    await restore(state);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(byId("problem"), error.message);
  }
  document.body.dataset.ready = "";
}

await begin();
