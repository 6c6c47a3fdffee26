// An image comes in: chosen, dropped anywhere, pasted, or one of the samples.

import { getImage } from "./api.js";
import { byId, make } from "./elements.js";
import { OWN } from "./state.js";

/** Watch all the ways in. `take({ blob, name })` gets an image, `refuse(sentence)` the reason for none. */
export function watchForImages(take, refuse) {
  const offer = (files) => {
    const [file] = files;
    if (!file) return refuse("That does not hold an image.");
    if (!file.size) return refuse(`“${file.name}” is empty; choose another.`);
    // What has no type is left to the server, which looks into it.
    if (file.type && !file.type.startsWith("image/")) {
      return refuse(`“${file.name}” is not an image; choose a file such as a PNG, a JPEG or a WebP.`);
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

/** List the samples as buttons; those of the model's own classes have their names below them. */
export function showSamples(samples, pick) {
  byId("samples").replaceChildren(
    ...samples.map((sample) => {
      const title = sample.title ?? titleOf(sample.name);
      const image = make("img", { alt: title, width: 64, height: 64 });
      const words = sample.own ? [make("span", { "aria-hidden": "true" }, title)] : [];
      const said = sample.own ? `${title} (a training image of this model)` : title;
      const button = make("button", { type: "button", className: "sample", title: said }, image, ...words);
      button.dataset.name = sample.name;
      button.addEventListener("click", () => pick(sample));
      if (sample.own) showThumbnail(image, sample);
      else image.src = sample.url;
      return button;
    }),
  );
}

/** Fetch a thumbnail as all else of the models is fetched: with the token, where there is one. */
async function showThumbnail(image, sample) {
  sample.blob ??= getImage(sample.url);
  const address = URL.createObjectURL(await sample.blob.catch(() => new Blob()));
  image.addEventListener("load", () => URL.revokeObjectURL(address), { once: true });
  image.src = address;
}

/** Mark the sample that is shown; an image of one's own marks none. */
export function markSample(name) {
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
}

export async function loadSample(sample) {
  const blob = await (sample.blob ?? getImage(sample.url));
  return { blob, name: sample.name, title: sample.title ?? titleOf(sample.name) };
}

/** Return the sample to begin with: one of the model's own classes, a digit for a model of digits, else a scene. */
export function fittingSample(samples, model) {
  const own = samples.find((sample) => sample.own && sample.name.startsWith(`${model.name}/`));
  if (own) return own;
  const ofDigits = model.classes?.length === 10 && model.classes.every((name, i) => name === String(i));
  return samples.find((sample) => sample.name.startsWith("digit") === ofDigits) ?? samples[0];
}
