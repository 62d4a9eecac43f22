// A stored event: the header, and parts that are JPEGs or maps. See `stored.py` for the layout.

const MAGIC = 0x4254474e; // "NGTB"
const VERSION = 1;

/** The decoded event, or an Error that says in a sentence why these bytes are not one. */
export function decodeEvent(buffer) {
  try {
    return new StoredEvent(buffer);
  } catch (error) {
    return error instanceof Error ? error : new Error(String(error));
  }
}

class StoredEvent {
  constructor(buffer) {
    const view = new DataView(buffer);
    if (buffer.byteLength < 12 || view.getUint32(0, true) !== MAGIC) throw new Error("This is not data of the NormGrad tab.");
    if (view.getUint32(4, true) !== VERSION) throw new Error("This data is of another version of normgrad-lightning.");
    const length = view.getUint32(8, true);
    if (12 + length > buffer.byteLength) throw new Error("The data is cut off.");
    this.header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 12, length)));
    this.header.sets = this.header.sets.filter(({ layers }) => layers.length);
    this.size = buffer.byteLength;
    this.parts = [];
    let start = 12 + length;
    for (const size of this.header.parts) {
      if (start + size > buffer.byteLength) throw new Error("The data is cut off.");
      this.parts.push(new Uint8Array(buffer, start, size));
      start += size + ((8 - (size % 8)) % 8);
    }
    this.cache = new Map();
  }

  get step() {
    return this.header.step;
  }

  /** The maps that a part of the header refers to: a list of {values, height, width}; empty if they do not fit. */
  maps(reference) {
    if (!reference) return [];
    return this.once(`maps ${reference.part}`, () => {
      const [count, height, width] = reference.shape;
      const bytes = this.parts[reference.part];
      if (!bytes || bytes.length !== 2 * count * height * width) return [];
      const halves = new Uint16Array(bytes.slice().buffer);
      const planes = [];
      for (let number = 0; number < count; number++) {
        const values = new Float32Array(height * width);
        const largest = reference.max[number];
        for (let i = 0; i < values.length; i++) values[i] = HALF[halves[number * values.length + i]] * largest;
        planes.push({ values, height, width });
      }
      return planes;
    });
  }

  /** A promise of the picture of a JPEG part; of null if it cannot be decoded. */
  picture(part) {
    return this.once(`picture ${part}`, () =>
      createImageBitmap(new Blob([this.parts[part]], { type: "image/jpeg" })).catch(() => null),
    );
  }

  /** What `make` returns for these circumstances; of others than the latest nothing is kept. */
  latest(key, circumstances, make) {
    if (this.cache.get(key)?.circumstances !== circumstances) this.cache.set(key, { circumstances, value: make() });
    return this.cache.get(key).value;
  }

  /** What `make` returns, computed the first time that this key is asked for. */
  once(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return this.cache.get(key);
  }
}

/** The value of each float16. */
const HALF = (() => {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) table[bits] = 0;
    else table[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return table;
})();
