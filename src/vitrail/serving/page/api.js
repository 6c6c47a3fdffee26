// API client. Every failure is thrown as a Failure with a message to display.

const KEY = "vitrail-token";
const MAX_ATTEMPTS = 4;
const MAX_WAIT_SECONDS = 5;

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const hooks = { token: async () => null, waiting: () => {} };

/** Set the hooks that ask for a token and report that the server is busy. */
export function setHooks({ token, waiting }) {
  Object.assign(hooks, { token, waiting });
}

export const getModels = async () => (await fetchJson("v1/models")).models;
export const getSamples = async () => (await fetchJson("samples")).samples;

/** Return the sample images saved by a model's training run. */
export async function getModelSamples(model) {
  const { samples } = await fetchJson(`v1/samples?${new URLSearchParams({ model })}`);
  return samples.map(({ name, number }) => ({
    name: `${model}/${number}`,
    title: name,
    training: true,
    url: `v1/samples/image?${new URLSearchParams({ model, number })}`,
  }));
}

export async function getImage(url) {
  const response = await send(url, {});
  return response.blob();
}

/**
 * Return what the model says of an image: its top classes or labels, or its numbers, and of a segmentation model the
 * mask as a PNG in base64. Each class has a name, an index, and a probability, a fraction of the image or a value; of a
 * label also whether it is predicted.
 */
export async function predict(image, model, top, signal) {
  const response = await fetchJson(`v1/predict?${new URLSearchParams({ model, top })}`, post(image, signal));
  const { classes, labels, top_labels: topLabels, values, mask } = onlyResult(response);
  if (topLabels) return { classes: topLabels.map((label) => ({ ...label, predicted: labels.includes(label.name) })) };
  if (values) return { classes: values.map((column, index) => ({ ...column, index })) };
  return { classes: classes ?? [], mask };
}

/** Return the `/v1/explain` result of an image; null options are omitted. */
export async function explain(image, options, signal) {
  const parameters = Object.entries(options).filter(([, value]) => value !== null && value !== undefined);
  return onlyResult(await fetchJson(`v1/explain?${new URLSearchParams(parameters)}`, post(image, signal)));
}

function onlyResult(response) {
  const [result] = response.results;
  if (result.error) throw new Failure(asSentence(result.error));
  return result;
}

function post(image, signal) {
  // A file of unknown type may still be an image; the server checks its content.
  const type = image.type || "image/unknown";
  return { method: "POST", body: image, headers: { "Content-Type": type }, signal };
}

async function fetchJson(url, options = {}) {
  return (await send(url, options)).json();
}

async function send(url, options) {
  for (let attempt = 1; ; attempt++) {
    const tokenSent = sessionStorage.getItem(KEY);
    const response = await fetchOnce(url, options, tokenSent);
    if (response.ok) return response;
    if (response.status === 401) {
      if (tokenSent !== null && tokenSent === sessionStorage.getItem(KEY)) sessionStorage.removeItem(KEY);
      const token = sessionStorage.getItem(KEY) || (await hooks.token(tokenSent !== null));
      if (!token) throw new Failure("This server requires a token; reload the page to enter it.", 401);
      // A header cannot hold other characters, so send no token; the server then rejects the request.
      sessionStorage.setItem(KEY, /^[\x21-\x7e]+$/.test(token) ? token : "");
    } else if (response.status === 503 && attempt < MAX_ATTEMPTS) {
      hooks.waiting("The server is busy; retrying.");
      const seconds = Math.min(Number(response.headers.get("Retry-After")) || 1, MAX_WAIT_SECONDS);
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      options.signal?.throwIfAborted();
    } else {
      throw new Failure(await errorMessage(response), response.status);
    }
  }
}

async function fetchOnce(url, options, token) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  try {
    return await fetch(url, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const size = options.body?.size ?? 0;
    // A server that refuses a large body may close the connection before the browser has read its response.
    if (size > 2 ** 20) {
      const megabytes = (size / 2 ** 20).toFixed(0);
      throw new Failure(`The connection was closed: the upload (${megabytes} MB) may be too large, or the server has stopped.`);
    }
    throw new Failure("The server does not respond; it may have stopped.");
  }
}

async function errorMessage(response) {
  const error = await response.json().then((body) => body.error, () => null);
  if (error) return asSentence(error);
  if (response.status === 413) return "The image is too large for this server.";
  if (response.status === 503) return "The server is busy; try again in a moment.";
  return `The server returned an error (${response.status}).`;
}

/** Capitalise an error message and end it with a full stop. */
function asSentence(text) {
  const capitalised = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(capitalised) ? capitalised : `${capitalised}.`;
}
