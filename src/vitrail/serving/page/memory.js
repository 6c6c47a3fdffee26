// A cache of server responses, limited by size; the oldest are evicted first.

const MAX_BYTES = 200e6;

export class ResponseCache {
  #entries = new Map();
  #bytes = 0;

  get(key) {
    return this.#entries.get(key)?.value;
  }

  set(key, value, bytes) {
    this.#bytes += bytes - (this.#entries.get(key)?.bytes ?? 0);
    this.#entries.set(key, { value, bytes });
    for (const [old, { bytes: freed }] of this.#entries) {
      if (this.#bytes <= MAX_BYTES || old === key) break;
      this.#entries.delete(old);
      this.#bytes -= freed;
    }
  }
}
