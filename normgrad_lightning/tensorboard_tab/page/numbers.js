// Maps as numbers: {values, height, width}. Everything is interpolated and scaled here, before it has a colour.

const COARSEST = 12; // cells of a side that is smoothed
const FINEST = 64; // cells that smoothing leaves detail for
const LONGEST = 256;
const FLOOR = 1e-6; // of a map's mean, in the combined map
const KEPT = 0.1; // of the typical map's mean, so that nothing is divided by zero

/** A map on another grid: bilinear where it grows, averaged with a triangle where it shrinks. */
export function resized(map, height, width) {
  const wide = alongRows(map, width);
  return map.height === height ? wide : transposed(alongRows(transposed(wide), height));
}

function alongRows(map, wanted) {
  if (map.width === wanted) return map;
  const { first, weights, reach } = taps(map.width, wanted);
  const values = new Float32Array(map.height * wanted);
  for (let row = 0; row < map.height; row++) {
    for (let column = 0; column < wanted; column++) {
      let total = 0;
      for (let tap = 0; tap < reach; tap++) {
        const from = Math.min(Math.max(first[column] + tap, 0), map.width - 1);
        total += map.values[row * map.width + from] * weights[column * reach + tap];
      }
      values[row * wanted + column] = total;
    }
  }
  return { values, height: map.height, width: wanted };
}

const knownTaps = new Map();

function taps(size, wanted) {
  const key = size * 65536 + wanted;
  if (!knownTaps.has(key)) knownTaps.set(key, makeTaps(size, wanted));
  return knownTaps.get(key);
}

function makeTaps(size, wanted) {
  const step = size / wanted;
  const radius = Math.max(step, 1);
  const reach = Math.ceil(2 * radius);
  const first = new Int32Array(wanted);
  const weights = new Float32Array(wanted * reach);
  for (let place = 0; place < wanted; place++) {
    const centre = (place + 0.5) * step - 0.5;
    first[place] = Math.ceil(centre - radius);
    let total = 0;
    for (let tap = 0; tap < reach; tap++) {
      const from = first[place] + tap;
      const weight = from < 0 || from >= size ? 0 : Math.max(1 - Math.abs(from - centre) / radius, 0);
      weights[place * reach + tap] = weight;
      total += weight;
    }
    for (let tap = 0; tap < reach; tap++) weights[place * reach + tap] /= total;
  }
  return { first, weights, reach };
}

function transposed(map) {
  const values = new Float32Array(map.values.length);
  for (let row = 0; row < map.height; row++)
    for (let column = 0; column < map.width; column++) values[column * map.height + row] = map.values[row * map.width + column];
  return { values, height: map.width, width: map.height };
}

/** The mean of a map. */
export function mean(map) {
  let total = 0;
  for (const value of map.values) total += value;
  return total / map.values.length;
}

/** A map with this applied to each value. */
export function mapped(map, change) {
  const values = new Float32Array(map.values.length);
  for (let i = 0; i < values.length; i++) values[i] = change(map.values[i], i);
  return { values, height: map.height, width: map.width };
}

/** Whether a map is zero everywhere. */
export function isZero(map) {
  return map.values.every((value) => value === 0);
}

/** What is this image's own: the map, divided by its mean and by the layer's typical map. */
export function withoutTypical(map, typical) {
  const own = mean(map);
  if (!typical || !(own > 0)) return map;
  const pattern = resized(typical, map.height, map.width);
  const level = mean(pattern);
  if (!(level > 0)) return map;
  return mapped(map, (value, i) => value / own / (pattern.values[i] / level + KEPT));
}

/** The geometric mean of the layers' maps of one image, each divided by its own mean; null if all are zero. */
export function combined(maps, aspect) {
  const height = Math.max(1, Math.round(aspect > 1 ? FINEST / aspect : FINEST));
  const width = Math.max(1, Math.round(aspect > 1 ? FINEST : FINEST * aspect));
  const total = new Float64Array(height * width);
  let count = 0;
  for (const map of maps) {
    const small = shrunk(map);
    const level = mean(small);
    if (!(level > 0)) continue;
    const at = resized(small, height, width);
    for (let i = 0; i < total.length; i++) total[i] += Math.log(Math.max(at.values[i] / level, FLOOR));
    count++;
  }
  if (!count) return null;
  return { values: Float32Array.from(total, (value) => Math.exp(value / count)), height, width };
}

/** A map with no more than 64 cells along its shorter side. */
export function shrunk(map) {
  const fine = shortestFine(map);
  const zoom = Math.min(1, FINEST / Math.max(fine, 1));
  const size = (side) => Math.min(Math.max(Math.round(side * zoom), Math.min(side, COARSEST)), LONGEST);
  return resized(map, Math.min(size(map.height), map.height), Math.min(size(map.width), map.width));
}

/** The shortest side that is smoothed; 0 if there is none. */
function shortestFine(map) {
  const fine = [map.height, map.width].filter((side) => side >= COARSEST);
  return fine.length ? Math.min(...fine) : 0;
}

/** A map smoothed with a Gaussian of max(1, side / 32) cells; it is mirrored at its edges. */
export function smoothed(map) {
  const sigma = Math.max(1, shortestFine(map) / 32);
  let smooth = map;
  if (map.width >= COARSEST) smooth = smoothedRows(smooth, sigma);
  if (map.height >= COARSEST) smooth = transposed(smoothedRows(transposed(smooth), sigma));
  return smooth;
}

function smoothedRows(map, sigma) {
  const reach = Math.ceil(3 * sigma);
  const half = Array.from({ length: reach + 1 }, (_, i) => Math.exp(-0.5 * (i / sigma) ** 2));
  const sum = 2 * half.reduce((a, b) => a + b) - half[0];
  const values = new Float32Array(map.values.length);
  const mirror = (place) => {
    const round = ((place % (2 * map.width)) + 2 * map.width) % (2 * map.width);
    return Math.min(round, 2 * map.width - 1 - round);
  };
  const padded = Int32Array.from({ length: map.width + 2 * reach }, (_, place) => mirror(place - reach));
  for (let row = 0; row < map.height; row++) {
    const start = row * map.width;
    for (let column = 0; column < map.width; column++) {
      let total = 0;
      for (let by = -reach; by <= reach; by++) total += half[Math.abs(by)] * map.values[start + padded[column + by + reach]];
      values[start + column] = total / sum;
    }
  }
  return { values, height: map.height, width: map.width };
}

/**
 * Maps brought to [0, 1]; signed ones with zero at 0.5.
 * @param {"robust"|"image"|"shared"} scale - each smoothed and without its most extreme values; each from its minimum to
 *   its maximum; all on one range.
 */
export function scaled(maps, scale, signed) {
  if (scale === "robust") return maps.map((map) => robust(map, signed));
  const ranges = maps.map((map) => rangeOf(map));
  const low = Math.min(...ranges.map((range) => range[0]));
  const high = Math.max(...ranges.map((range) => range[1]));
  return maps.map((map, number) => toUnit(map, ...(scale === "shared" ? [low, high] : ranges[number]), signed));
}

function robust(map, signed) {
  const small = shrunk(map);
  const smooth = smoothed(small);
  const before = rangeOf(small);
  if (signed) {
    const limit = percentile(mapped(smooth, Math.abs), 0);
    return toUnit(smooth, -limit, limit, true);
  }
  if (before[0] === before[1]) return mapped(smooth, () => 0);
  const low = rangeOf(smooth)[0];
  return toUnit(smooth, low, percentile(smooth, low), false);
}

function toUnit(map, low, high, signed) {
  if (signed) {
    const largest = Math.max(-low, high);
    return mapped(map, (value) => (largest > 0 ? Math.min(Math.max(value / largest / 2 + 0.5, 0), 1) : 0.5));
  }
  return mapped(map, (value) => (high > low ? Math.min(Math.max((value - low) / (high - low), 0), 1) : 0));
}

function rangeOf(map) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of map.values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** The 99.5th percentile: one of the values; the maximum if that is not above `low`. */
function percentile(map, low) {
  const sorted = Float32Array.from(map.values).sort();
  const limit = sorted[Math.ceil(0.995 * (sorted.length - 1))];
  return limit > low ? limit : sorted[sorted.length - 1];
}

/** How two maps differ, each divided by its own mean: above zero where the first is stronger. */
export function difference(one, other) {
  const height = Math.max(one.height, other.height);
  const width = Math.max(one.width, other.width);
  const [a, b] = [one, other].map((map) => {
    const at = resized(shrunk(map), height, width);
    const level = mean(mapped(at, Math.abs));
    return level > 0 ? mapped(at, (value) => value / level) : at;
  });
  return mapped(a, (value, i) => value - b.values[i]);
}

/** The value of a map at a place given as shares of its sides: that of the cell there. */
export function valueAt(map, down, across) {
  const row = Math.min(Math.floor(down * map.height), map.height - 1);
  const column = Math.min(Math.floor(across * map.width), map.width - 1);
  return map.values[row * map.width + column];
}
