// Colour maps, and the tables that paint a map over a grey image.

import { COLORMAPS } from "./colormaps.js";

export const UNSIGNED = ["inferno", "viridis", "magma", "turbo", "gray"];
const SIGNED = "coolwarm";
const PALE = 90; // of the 128 colours on each side of a signed map's middle
const decoded = new Map();
const tables = new Map();

/** The 256 colours of a map, three bytes each. */
export function coloursOf(name) {
  if (!decoded.has(name)) {
    const text = atob(COLORMAPS[name] || COLORMAPS.inferno);
    decoded.set(name, Uint8Array.from(text, (letter) => letter.charCodeAt(0)));
  }
  return decoded.get(name);
}

/**
 * The colour, as a 32-bit pixel, of each of 256 values over each of 256 greys: at 256 * value + grey.
 *
 * alpha = opacity ** (2 - v): the image shows through where the map is weak, and yields where it is strong. A signed map
 * is strong at both ends and clear in its middle.
 */
export function paintTable(name, opacity, signed) {
  const key = `${signed ? SIGNED : name} ${opacity} ${signed}`;
  if (!tables.has(key)) {
    if (tables.size > 16) tables.clear();
    tables.set(key, makeTable(coloursOf(signed ? SIGNED : name), opacity, signed));
  }
  return tables.get(key);
}

function makeTable(colours, opacity, signed) {
  const table = new Uint32Array(65536);
  for (let step = 0; step < 256; step++) {
    const v = step / 255;
    const strength = Math.abs(2 * v - 1);
    const index = signed ? Math.round(127.5 + Math.sign(v - 0.5) * (PALE + (127.5 - PALE) * strength)) : step;
    const alpha = signed ? opacity * (2 - opacity) * strength ** 0.75 : opacity ** (2 - v);
    for (let grey = 0; grey < 256; grey++) {
      let pixel = 0xff000000;
      for (let channel = 0; channel < 3; channel++) {
        const mixed = (1 - alpha) * grey + alpha * colours[3 * index + channel];
        pixel |= Math.floor(mixed + 0.5) << (8 * channel);
      }
      table[256 * step + grey] = pixel;
    }
  }
  return table;
}
