// Arrays as the server sends them: base64, little-endian, float32 or float16.

let halves = null;

/** Return the value of every 16-bit float, by its bits; browsers do not all know the type yet. */
function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) halves[bits] = fraction ? NaN : sign * Infinity;
    else if (exponent === 0) halves[bits] = sign * fraction * 2 ** -24;
    else halves[bits] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return halves;
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Read a map: its shape and its numbers. */
export function readMap({ shape, dtype, data }) {
  if (dtype !== "float32") throw new Error(`a map of ${dtype} cannot be read`);
  return { shape, values: new Float32Array(bytesOf(data).buffer) };
}

/** The attention of one layer, (heads, tokens, tokens). It stays in 16 bits; a row is opened when it is asked for. */
export class Attention {
  constructor({ shape, dtype, data }) {
    if (dtype !== "float16") throw new Error(`attention of ${dtype} cannot be read`);
    [this.heads, this.tokens] = shape;
    this.bits = new Uint16Array(bytesOf(data).buffer);
  }

  /** Where some tokens look on the average, in one head, or in the mean of all heads (null). */
  row(head, asked) {
    const table = halfTable();
    const sum = new Float32Array(this.tokens);
    const heads = head === null ? [...Array(this.heads).keys()] : [head];
    for (const one of heads) {
      for (const token of asked) {
        const start = (one * this.tokens + token) * this.tokens;
        for (let i = 0; i < this.tokens; i++) sum[i] += table[this.bits[start + i]];
      }
    }
    const share = 1 / (heads.length * asked.length);
    for (let i = 0; i < this.tokens; i++) sum[i] *= share;
    return sum;
  }
}
