// Tokens of a model by name: "class", "distillation", "register:0", "mean" (of the patches), or a patch "row,column".

export const isPatch = (query) => query.includes(",");
export const patchName = (row, column) => `${row},${column}`;
export const patchOf = (query) => query.split(",").map(Number);

const nameOf = (token) => (token.kind === "register" ? `register:${token.number}` : token.kind);

/** Return the names of the tokens that are no patches; "mean" belongs to models whose head reads it. */
export function specials(model) {
  const names = model.tokens.map(nameOf);
  return model.pool === "cls" ? names : [...names, "mean"];
}

/** Return what the head reads, or the nearest to it that a layer has. */
export function defaultQuery(model) {
  return model.pool !== "mean" && model.tokens.some((token) => token.kind === "class") ? "class" : "mean";
}

/** Return a token that the model has: the one that is named if it can be. */
export function known(query, model) {
  if (query === null) return defaultQuery(model);
  if (!isPatch(query)) return specials(model).includes(query) ? query : defaultQuery(model);
  const [row, column] = patchOf(query);
  return row < model.grid[0] && column < model.grid[1] ? query : defaultQuery(model);
}

/** Return the token of another model that stands at the same place of the image, or has the same part. */
export function translated(query, from, to) {
  if (!isPatch(query)) return known(query, to);
  const [row, column] = patchOf(query);
  const at = (place, have, want) => Math.min(want - 1, Math.floor(((place + 0.5) / have) * want));
  return patchName(at(row, from.grid[0], to.grid[0]), at(column, from.grid[1], to.grid[1]));
}

/** Return the places in the sequence that are meant. */
export function places(query, model) {
  const [rows, columns] = model.grid;
  if (query === "mean") return Array.from({ length: rows * columns }, (_, i) => model.patch_start + i);
  if (!isPatch(query)) return [model.tokens.find((token) => nameOf(token) === query).index];
  const [row, column] = patchOf(query);
  return [model.patch_start + row * columns + column];
}

/** Return the patch at a place in the sequence, or the token that stands there. */
export function tokenAt(place, model) {
  const special = model.tokens.find((token) => token.index === place);
  if (special) return nameOf(special);
  const number = place - model.patch_start;
  return patchName(Math.floor(number / model.grid[1]), number % model.grid[1]);
}

/** Say a token's name in words. */
export function inWords(query) {
  if (isPatch(query)) return `patch ${query}`;
  if (query === "mean") return "mean of the patches";
  const [kind, number] = query.split(":");
  return number === undefined ? `${kind} token` : `register ${number}`;
}
