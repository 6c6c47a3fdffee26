// Decode the server's arrays: base64, little-endian, float32 or float16.

let halves = null;

/** Return a table of all float16 values by their bits; not every browser has Float16Array. */
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

/** Decode base64. */
export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Decode a map: its shape and values. */
export function readMap({ shape, dtype, data }) {
  if (dtype !== "float32") throw new Error(`cannot read a map of dtype ${dtype}`);
  return { shape, values: new Float32Array(bytesOf(data).buffer) };
}

/** The attention of one layer, (heads, tokens, tokens). Stored as float16; rows are decoded on demand. */
export class Attention {
  constructor({ shape, dtype, data }) {
    if (dtype !== "float16") throw new Error(`cannot read attention of dtype ${dtype}`);
    [this.heads, this.tokens] = shape;
    this.bits = new Uint16Array(bytesOf(data).buffer);
  }

  /** Return the mean attention row of the query tokens, in one head or averaged over all heads (null). */
  row(head, queries) {
    const table = halfTable();
    const sum = new Float32Array(this.tokens);
    const heads = head === null ? [...Array(this.heads).keys()] : [head];
    for (const index of heads) {
      for (const token of queries) {
        const start = (index * this.tokens + token) * this.tokens;
        for (let i = 0; i < this.tokens; i++) sum[i] += table[this.bits[start + i]];
      }
    }
    const weight = 1 / (heads.length * queries.length);
    for (let i = 0; i < this.tokens; i++) sum[i] *= weight;
    return sum;
  }
}
