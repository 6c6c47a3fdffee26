// A picture comes in: chosen, dropped anywhere, pasted, or one of the samples.

import { getPicture } from "./api.js";
import { byId, make } from "./elements.js";
import { OWN } from "./state.js";

/** Watch all the ways in. `take({ blob, name })` gets a picture, `refuse(sentence)` the reason for none. */
export function watchForPictures(take, refuse) {
  const offer = (files) => {
    const [file] = files;
    if (!file) return refuse("There was no picture in that.");
    if (!file.size) return refuse(`“${file.name}” is empty; choose another.`);
    // What has no type is left to the server, which looks into it.
    if (file.type && !file.type.startsWith("image/")) {
      return refuse(`“${file.name}” is no picture; choose a file such as a PNG, a JPEG or a WebP.`);
    }
    take({ blob: file, name: OWN, title: file.name });
  };
  const input = byId("file");
  input.addEventListener("change", () => {
    if (input.files.length) offer(input.files);
    input.value = ""; // so that the same file can be chosen again
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dragging");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    offer(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    if (event.target.matches?.("input:not([type=file], [type=range]), textarea")) return;
    offer(event.clipboardData.files);
  });
}

/** Return the words for a sample's name. */
const titleOf = (name) => name.replaceAll("-", " ");

/** List the samples as buttons. */
export function showSamples(samples, pick) {
  byId("samples").replaceChildren(
    ...samples.map((sample) => {
      const image = make("img", { src: sample.url, alt: titleOf(sample.name), width: 64, height: 64 });
      const button = make("button", { type: "button", className: "sample", title: titleOf(sample.name) }, image);
      button.dataset.name = sample.name;
      button.addEventListener("click", () => pick(sample));
      return button;
    }),
  );
}

/** Mark the sample that is shown; a picture of one's own marks none. */
export function markSample(name) {
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
}

export async function loadSample(sample) {
  return { blob: await getPicture(sample.url), name: sample.name, title: titleOf(sample.name) };
}

/** Return the sample to begin with: a digit for a model of digits, else a scene. */
export function fittingSample(samples, model) {
  const ofDigits = model.classes?.length === 10 && model.classes.every((name, i) => name === String(i));
  return samples.find((sample) => sample.name.startsWith("digit") === ofDigits) ?? samples[0];
}
