// Class probabilities as bars. Each is a button that explains its class.

import { make, percent } from "./elements.js";

/** Fill a list with the top classes; `chosen` is the index of the explained class, or null. */
export function showBars(list, classes, chosen, pick) {
  list.replaceChildren(
    ...classes.map(({ name, index, probability }) => {
      const fill = make("span", { className: "fill" });
      fill.style.setProperty("inline-size", `${100 * probability}%`);
      const button = make(
        "button",
        { type: "button", title: `Show the evidence for ${name}`, "aria-pressed": String(index === chosen) },
        make("span", { className: "name" }, name),
        make("span", { className: "probability" }, percent(probability)),
        make("span", { className: "bar", "aria-hidden": "true" }, fill),
      );
      button.addEventListener("click", () => pick(index));
      return make("li", {}, button);
    }),
  );
}

/** Mark the explained class. */
export function markBar(list, classes, chosen) {
  classes.forEach(({ index }, i) => {
    list.children[i]?.firstElementChild.setAttribute("aria-pressed", String(index === chosen));
  });
}
