// Predictions as a list: probabilities of classes or labels with bars, or numbers. Each is a button that explains it.

import { amount, make } from "./elements.js";

/** Fill a list with predictions; `chosen` is the index of the explained one, or null. */
export function showBars(list, predictions, chosen, pick) {
  list.replaceChildren(
    ...predictions.map((prediction) => {
      const { name, index, probability, predicted } = prediction;
      const button = make(
        "button",
        { type: "button", title: `Show the evidence for ${name}`, "aria-pressed": String(index === chosen) },
        make("span", { className: "name" }, predicted ? `✓ ${name}` : name),
        make("span", { className: "probability" }, amount(prediction)),
      );
      if (probability !== undefined) {
        const fill = make("span", { className: "fill" });
        fill.style.setProperty("inline-size", `${100 * probability}%`);
        button.append(make("span", { className: "bar", "aria-hidden": "true" }, fill));
      }
      button.addEventListener("click", () => pick(index));
      return make("li", {}, button);
    }),
  );
}

/** Mark the explained one. */
export function markBar(list, classes, chosen) {
  classes.forEach(({ index }, i) => {
    list.children[i]?.firstElementChild.setAttribute("aria-pressed", String(index === chosen));
  });
}
