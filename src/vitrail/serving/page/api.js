// The server, as functions. Every failure becomes a Failure with one sentence that can be shown.

const KEY = "vitrail-token";
const TRIES = 4;
const LONGEST_WAIT = 5;

export class Failure extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

const asking = { token: async () => null, waiting: () => {} };

/** Say how to ask for a token, and what to do while the server is busy. */
export function onNeed({ token, waiting }) {
  Object.assign(asking, { token, waiting });
}

export const getModels = async () => (await ask("v1/models")).models;
export const getSamples = async () => (await ask("samples")).samples;


/** Return the images that the run of a model kept of its classes; an older server has none. */
export async function getOwnSamples(model) {
  const { samples } = await ask(`v1/samples?${new URLSearchParams({ model })}`);
  return samples.map(({ name, number }) => ({
    name: `${model}/${number}`,
    title: name,
    own: true,
    url: `v1/samples/image?${new URLSearchParams({ model, number })}`,
  }));
}

export async function getImage(url) {
  const reply = await send(url, {});
  return reply.blob();
}

/** Return the likeliest classes of an image. */
export async function predict(image, model, top, signal) {
  const reply = await ask(`v1/predict?${new URLSearchParams({ model, top })}`, post(image, signal));
  return only(reply).classes;
}

/** Return what `/v1/explain` says of an image; options that are null are left out. */
export async function explain(image, options, signal) {
  const given = Object.entries(options).filter(([, value]) => value !== null && value !== undefined);
  return only(await ask(`v1/explain?${new URLSearchParams(given)}`, post(image, signal)));
}

function only(reply) {
  const [result] = reply.results;
  if (result.error) throw new Failure(sentence(result.error));
  return result;
}

function post(image, signal) {
  // A file whose type nobody knows may be an image all the same; the server looks into it.
  const type = image.type || "image/unknown";
  return { method: "POST", body: image, headers: { "Content-Type": type }, signal };
}

async function ask(url, options = {}) {
  return (await send(url, options)).json();
}

async function send(url, options) {
  for (let attempt = 1; ; attempt++) {
    const used = sessionStorage.getItem(KEY);
    const reply = await reach(url, options, used);
    if (reply.ok) return reply;
    if (reply.status === 401) {
      if (used !== null && used === sessionStorage.getItem(KEY)) sessionStorage.removeItem(KEY);
      const token = sessionStorage.getItem(KEY) || (await asking.token(used !== null));
      if (!token) throw new Failure("This server wants a token; reload the page to give it one.", 401);
      // What no header can hold is nobody's token. Nothing is sent then, and the server says no.
      sessionStorage.setItem(KEY, /^[\x21-\x7e]+$/.test(token) ? token : "");
    } else if (reply.status === 503 && attempt < TRIES) {
      asking.waiting("The server is busy; trying again.");
      const seconds = Math.min(Number(reply.headers.get("Retry-After")) || 1, LONGEST_WAIT);
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      options.signal?.throwIfAborted();
    } else {
      throw new Failure(await reason(reply), reply.status);
    }
  }
}

async function reach(url, options, token) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  try {
    return await fetch(url, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const size = options.body?.size ?? 0;
    // A server that refuses a large body may hang up before the browser has read its answer.
    if (size > 2 ** 20) {
      const megabytes = (size / 2 ** 20).toFixed(0);
      throw new Failure(`The server broke off: ${megabytes} MB may be too large for it, or it has stopped.`);
    }
    throw new Failure("The server does not answer; it may have stopped.");
  }
}

async function reason(reply) {
  const said = await reply.json().then((body) => body.error, () => null);
  if (said) return sentence(said);
  if (reply.status === 413) return "The image is too large for this server.";
  if (reply.status === 503) return "The server is busy; try again in a moment.";
  return `The server answered with an error (${reply.status}).`;
}

/** Write what a program said as a sentence. */
function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
