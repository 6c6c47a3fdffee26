// Two models on one image: do they say the same, and do they look at the same places?

import { percent } from "./elements.js";

/** Say in a sentence how two panels agree; null while one of them does not know yet. */
export function result(one, other) {
  const [first, second] = [one.classes?.[0], other.classes?.[0]];
  if (!first || !second) return null;
  const said =
    first.name === second.name
      ? `Both say ${first.name}: ${percent(first.probability)} and ${percent(second.probability)}.`
      : `${one.model.name} says ${first.name} (${percent(first.probability)}), ` +
        `${other.model.name} says ${second.name} (${percent(second.probability)}).`;
  const alike = correlation(one.shown, other.shown);
  return alike === null ? said : `${said} The correlation of their maps is ${alike.toFixed(2)}.`;
}

/** Return how alike two maps of one shape are, from −1 to 1; null where they cannot be compared. */
function correlation(a, b) {
  if (!a || !b || a.length !== b.length) return null;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const [middleA, middleB] = [mean(a), mean(b)];
  let [both, ofA, ofB] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    both += (a[i] - middleA) * (b[i] - middleB);
    ofA += (a[i] - middleA) ** 2;
    ofB += (b[i] - middleB) ** 2;
  }
  return ofA > 0 && ofB > 0 ? both / Math.sqrt(ofA * ofB) : null;
}
