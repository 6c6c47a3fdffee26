// What is shown, as one flat value, and as the part of the address behind "#": a link restores a view.

export const METHODS = ["attention", "rollout", "relevance", "gradcam", "pca"];
export const OWN = "own";

export const DEFAULTS = {
  image: null, // a sample's name, or OWN
  model: null,
  layer: null, // null: the last
  head: null, // null: the mean of all
  query: null, // "class", "register:0", "mean", or a patch "row,column"; null: what the head reads
  method: "attention",
  target: null, // a class's number; null: the likeliest
  opacity: 0.6,
  grid: true,
  other: null, // the model to compare with
  otherLayer: null,
  otherHead: null,
};

const READERS = {
  image: text,
  model: text,
  layer: whole,
  head: whole,
  query: (value) => (/^(class|distillation|mean|register:\d{1,4}|\d{1,4},\d{1,4})$/.test(value) ? value : null),
  method: (value) => (METHODS.includes(value) ? value : null),
  target: whole,
  opacity: (value) => (/^(0|1|0?\.\d{1,2})$/.test(value) ? Number(value) : null),
  grid: (value) => (value === "0" ? false : null),
  other: text,
  otherLayer: whole,
  otherHead: whole,
};

function text(value) {
  return value.length <= 200 ? value : null;
}

function whole(value) {
  return /^\d{1,6}$/.test(value) ? Number(value) : null;
}

/** Read a view from an address; what cannot be read is as if it were not there. */
export function readState(hash) {
  const state = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (Object.hasOwn(READERS, key)) state[key] = READERS[key](value) ?? DEFAULTS[key];
  }
  return state;
}

/** Write a view as an address; what is as at first is left out. */
export function writeState(state) {
  const parts = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) {
    if (state[key] === DEFAULTS[key]) continue;
    parts.set(key, typeof state[key] === "boolean" ? Number(state[key]) : state[key]);
  }
  return `#${parts.toString().replaceAll("%2C", ",").replaceAll("%3A", ":")}`;
}
