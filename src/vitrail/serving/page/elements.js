// DOM helpers.

/** Make an element: `make("p", { className: "quiet" }, "text", other)`. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Show a message in an element, or hide the element if it is null. */
export function setMessage(element, message) {
  element.hidden = !message;
  element.textContent = message ?? "";
}

export const byId = (id) => document.getElementById(id);

/** Format a fraction as a percentage, with a sensible number of digits. */
export function percent(fraction) {
  const number = 100 * fraction;
  if (number > 0 && number < 0.1) return "< 0.1%";
  return `${number.toFixed(number < 10 || (number > 99 && number < 100) ? 1 : 0)}%`;
}

/** Format a number with four significant digits: 37.52. */
export const formatNumber = (value) => String(Number(value.toPrecision(4)));

/** Return the fraction that a model gives one output: a probability, or how much of the image it covers; or undefined. */
export const fractionOf = ({ probability, fraction }) => probability ?? fraction;

/** Format what a model says of one output: a fraction, or a number. */
export function amount(prediction) {
  const part = fractionOf(prediction);
  return part === undefined ? formatNumber(prediction.value) : percent(part);
}

export const formatCount = (number) => number.toLocaleString("en");

/** Abbreviate a large number: 5.7 million. */
export function abbreviated(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(number < 1e8 ? 1 : 0)} million`;
  return number >= 1e4 ? `${Math.round(number / 1000)} thousand` : formatCount(number);
}
