// Predictions as a list: probabilities of classes or labels with bars, fractions of the image, or numbers. Each is a button
// that explains it.

import { amount, fractionOf, make } from "./elements.js";

/**
 * Fill a list with predictions; `chosen` is the index of the explained one, or null. Without `pick`, none can be
 * explained. A prediction with a colour gets a swatch: the list is then the legend of a mask.
 */
export function showBars(list, predictions, chosen, pick) {
  list.replaceChildren(
    ...predictions.map((prediction) => {
      const { name, index, predicted, colour } = prediction;
      const part = fractionOf(prediction);
      const button = make(
        "button",
        pick
          ? { type: "button", title: `Show the evidence for ${name}`, "aria-pressed": String(index === chosen) }
          : { type: "button", disabled: true },
        make("span", { className: "name" }, ...swatch(colour), predicted ? `✓ ${name}` : name),
        make("span", { className: "probability" }, amount(prediction)),
      );
      if (part !== undefined) {
        const fill = make("span", { className: "fill" });
        fill.style.setProperty("inline-size", `${100 * part}%`);
        if (colour) fill.style.setProperty("background-color", colour);
        button.append(make("span", { className: "bar", "aria-hidden": "true" }, fill));
      }
      if (pick) button.addEventListener("click", () => pick(index));
      return make("li", {}, button);
    }),
  );
}

function swatch(colour) {
  if (!colour) return [];
  const square = make("span", { className: "swatch", "aria-hidden": "true" });
  square.style.setProperty("background-color", colour);
  return [square];
}

/** Mark the explained one. */
export function markBar(list, classes, chosen) {
  classes.forEach(({ index }, i) => {
    const button = list.children[i]?.firstElementChild;
    if (button && !button.disabled) button.setAttribute("aria-pressed", String(index === chosen));
  });
}
