// Tokens of a model by name: "class", "distillation", "register:0", "mean" (of the patches), or a patch "row,column".

export const isPatch = (query) => query.includes(",");
export const patchName = (row, column) => `${row},${column}`;
export const patchOf = (query) => query.split(",").map(Number);

const nameOf = (token) => (token.kind === "register" ? `register:${token.number}` : token.kind);

/** Return the names of the special tokens; "mean" is included if the head reads it. */
export function specialTokens(model) {
  const names = model.tokens.map(nameOf);
  return model.pool === "cls" ? names : [...names, "mean"];
}

/** Return the token the head reads, or the closest equivalent. */
export function defaultQuery(model) {
  return model.pool !== "mean" && model.tokens.some((token) => token.kind === "class") ? "class" : "mean";
}

/** Return the query if the model has this token, or else the default query. */
export function resolveQuery(query, model) {
  if (query === null) return defaultQuery(model);
  if (!isPatch(query)) return specialTokens(model).includes(query) ? query : defaultQuery(model);
  const [row, column] = patchOf(query);
  return row < model.grid[0] && column < model.grid[1] ? query : defaultQuery(model);
}

/** Return the token of another model at the same image position, or with the same role. */
export function translateQuery(query, from, to) {
  if (!isPatch(query)) return resolveQuery(query, to);
  const [row, column] = patchOf(query);
  const at = (position, fromCount, toCount) => Math.min(toCount - 1, Math.floor(((position + 0.5) / fromCount) * toCount));
  return patchName(at(row, from.grid[0], to.grid[0]), at(column, from.grid[1], to.grid[1]));
}

/** Return the sequence indices of a query. */
export function tokenIndices(query, model) {
  const [rows, columns] = model.grid;
  if (query === "mean") return Array.from({ length: rows * columns }, (_, i) => model.patch_start + i);
  if (!isPatch(query)) return [model.tokens.find((token) => nameOf(token) === query).index];
  const [row, column] = patchOf(query);
  return [model.patch_start + row * columns + column];
}

/** Return the name of the patch or special token at a sequence index. */
export function tokenAt(index, model) {
  const special = model.tokens.find((token) => token.index === index);
  if (special) return nameOf(special);
  const number = index - model.patch_start;
  return patchName(Math.floor(number / model.grid[1]), number % model.grid[1]);
}

/** Return the display label of a token. */
export function tokenLabel(query) {
  if (isPatch(query)) return `patch ${query}`;
  if (query === "mean") return "mean of the patches";
  const [kind, number] = query.split(":");
  return number === undefined ? `${kind} token` : `register ${number}`;
}
