// Image input: file dialog, drag and drop, paste, or a sample.

import { getImage } from "./api.js";
import { byId, make } from "./elements.js";
import { OWN } from "./state.js";

/** Listen for images. Calls `take({ blob, name })` with an image, or `refuse(message)`. */
export function watchForImages(take, refuse) {
  const offer = (files) => {
    const [file] = files;
    if (!file) return refuse("No image found.");
    if (!file.size) return refuse(`“${file.name}” is empty; choose another file.`);
    // A file without a type is left to the server, which checks its content.
    if (file.type && !file.type.startsWith("image/")) {
      return refuse(`“${file.name}” is not an image; choose a file such as a PNG, a JPEG or a WebP.`);
    }
    take({ blob: file, name: OWN, title: file.name });
  };
  const input = byId("file");
  input.addEventListener("change", () => {
    if (input.files.length) offer(input.files);
    input.value = ""; // allow choosing the same file again
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

/** Return the display name of a sample. */
const titleOf = (name) => name.replaceAll("-", " ");

/** List the samples as buttons; training samples show their labels. */
export function showSamples(samples, pick) {
  byId("samples").replaceChildren(
    ...samples.map((sample) => {
      const title = sample.title ?? titleOf(sample.name);
      const image = make("img", { alt: title, width: 64, height: 64 });
      const label = sample.training ? [make("span", { "aria-hidden": "true" }, title)] : [];
      const tooltip = sample.training ? `${title} (a training image of this model)` : title;
      const button = make("button", { type: "button", className: "sample", title: tooltip }, image, ...label);
      button.dataset.name = sample.name;
      button.addEventListener("click", () => pick(sample));
      if (sample.training) showThumbnail(image, sample);
      else image.src = sample.url;
      return button;
    }),
  );
}

/** Fetch a thumbnail with the token, if there is one. */
async function showThumbnail(image, sample) {
  sample.blob ??= getImage(sample.url);
  const url = URL.createObjectURL(await sample.blob.catch(() => new Blob()));
  image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
  image.src = url;
}

/** Mark the displayed sample; an uploaded image marks none. */
export function markSample(name) {
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
}

export async function loadSample(sample) {
  const blob = await (sample.blob ?? getImage(sample.url));
  return { blob, name: sample.name, title: sample.title ?? titleOf(sample.name) };
}

/** Return the first sample to show: a training sample, a digit for a digits model, or else a scene. */
export function defaultSample(samples, model) {
  const training = samples.find((sample) => sample.training && sample.name.startsWith(`${model.name}/`));
  if (training) return training;
  const isDigits = model.classes?.length === 10 && model.classes.every((name, i) => name === String(i));
  return samples.find((sample) => sample.name.startsWith("digit") === isDigits) ?? samples[0];
}
