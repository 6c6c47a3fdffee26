// Compare two models on one image: their predictions, and the correlation of their maps.

import { amount } from "./elements.js";

/** Describe how two panels agree; null while one has no predictions yet. */
export function comparison(one, other) {
  const [first, second] = [one.classes?.[0], other.classes?.[0]];
  if (!first || !second) return null;
  const predictions =
    first.name === second.name
      ? `Both predict ${first.name}: ${amount(first)} and ${amount(second)}.`
      : `${one.model.name} predicts ${first.name} (${amount(first)}), ` +
        `${other.model.name} predicts ${second.name} (${amount(second)}).`;
  const similarity = correlation(one.shown, other.shown);
  return similarity === null ? predictions : `${predictions} Their maps correlate at ${similarity.toFixed(2)}.`;
}

/** Return the Pearson correlation of two maps; null if they cannot be compared. */
function correlation(a, b) {
  if (!a || !b || a.length !== b.length) return null;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const [meanA, meanB] = [mean(a), mean(b)];
  let [covariance, varianceA, varianceB] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    covariance += (a[i] - meanA) * (b[i] - meanB);
    varianceA += (a[i] - meanA) ** 2;
    varianceB += (b[i] - meanB) ** 2;
  }
  return varianceA > 0 && varianceB > 0 ? covariance / Math.sqrt(varianceA * varianceB) : null;
}
