// Small help with the document.

/** Make an element: `make("p", { className: "quiet" }, "words", other)`. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Show a sentence in an element, or hide the element for null. */
export function say(element, sentence) {
  element.hidden = !sentence;
  element.textContent = sentence ?? "";
}

export const byId = (id) => document.getElementById(id);

/** Write a share from 0 to 1 in percent, with as many digits as mean something. */
export function percent(share) {
  const number = 100 * share;
  if (number > 0 && number < 0.1) return "< 0.1 %";
  return `${number.toFixed(number < 10 || (number > 99 && number < 100) ? 1 : 0)} %`;
}

export const counted = (number) => number.toLocaleString("en");

/** Write a large number short: 5.7 million. */
export function rounded(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(number < 1e8 ? 1 : 0)} million`;
  return number >= 1e4 ? `${Math.round(number / 1000)} thousand` : counted(number);
}
