// Answers of the server that may be wanted again: the oldest are let go when they take too much room.

const MOST_BYTES = 200e6;

export class Memory {
  #kept = new Map();
  #bytes = 0;

  get(key) {
    return this.#kept.get(key)?.value;
  }

  set(key, value, bytes) {
    this.#bytes += bytes - (this.#kept.get(key)?.bytes ?? 0);
    this.#kept.set(key, { value, bytes });
    for (const [old, { bytes: freed }] of this.#kept) {
      if (this.#bytes <= MOST_BYTES || old === key) break;
      this.#kept.delete(old);
      this.#bytes -= freed;
    }
  }
}
