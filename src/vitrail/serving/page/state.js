// The view state as a flat object, and as the URL hash: a link restores a view.

export const METHODS = ["attention", "rollout", "relevance", "gradcam", "pca"];
export const OWN = "own";

export const DEFAULTS = {
  image: null, // a sample's name, or OWN
  model: null,
  layer: null, // null: the last layer
  head: null, // null: the mean of all heads
  query: null, // "class", "register:0", "mean", or a patch "row,column"; null: the token the head reads
  method: "attention",
  target: null, // class index; null: the top class
  opacity: 0.6,
  grid: true,
  other: null, // the model to compare with
  otherLayer: null,
  otherHead: null,
};

const READERS = {
  image: text,
  model: text,
  layer: integer,
  head: integer,
  query: (value) => (/^(class|distillation|mean|register:\d{1,4}|\d{1,4},\d{1,4})$/.test(value) ? value : null),
  method: (value) => (METHODS.includes(value) ? value : null),
  target: integer,
  opacity: (value) => (/^(0|1|0?\.\d{1,2})$/.test(value) ? Number(value) : null),
  grid: (value) => (value === "0" ? false : null),
  other: text,
  otherLayer: integer,
  otherHead: integer,
};

function text(value) {
  return value.length <= 200 ? value : null;
}

function integer(value) {
  return /^\d{1,6}$/.test(value) ? Number(value) : null;
}

/** Parse a view from a URL hash; invalid values are ignored. */
export function readState(hash) {
  const state = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (Object.hasOwn(READERS, key)) state[key] = READERS[key](value) ?? DEFAULTS[key];
  }
  return state;
}

/** Format a view as a URL hash; defaults are omitted. */
export function writeState(state) {
  const parameters = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) {
    if (state[key] === DEFAULTS[key]) continue;
    parameters.set(key, typeof state[key] === "boolean" ? Number(state[key]) : state[key]);
  }
  return `#${parameters.toString().replaceAll("%2C", ",").replaceAll("%3A", ":")}`;
}
