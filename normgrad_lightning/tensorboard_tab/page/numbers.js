// Maps as numbers: {values, height, width}. Everything is interpolated and scaled here, before it has a colour.

const COARSEST = 12; // cells of a side that is smoothed
const FINEST = 64; // cells that smoothing leaves detail for
const LONGEST = 256;
const FLOOR = 1e-6; // of a map's mean, in the combined map
const KEPT = 0.1; // of the typical map's mean, so that nothing is divided by zero

/** A map on another grid: bilinear where it grows, averaged with a triangle where it shrinks. */
export function resized(map, height, width) {
  const wide = map.width === width ? map : alongRows(map, triangles(map.width, width));
  return map.height === height ? wide : alongColumns(wide, triangles(map.height, height));
}

/** A map whose rows are sums over their own values: `{size, reach, from, weights}`, `reach` of them for each of `size`. */
function alongRows(map, { size, reach, from, weights }) {
  const values = new Float32Array(map.height * size);
  for (let row = 0; row < map.height; row++) {
    const start = row * map.width;
    for (let column = 0, tap = 0; column < size; column++) {
      let total = 0;
      for (const end = tap + reach; tap < end; tap++) total += map.values[start + from[tap]] * weights[tap];
      values[row * size + column] = total;
    }
  }
  return { values, height: map.height, width: size };
}

/** The same for columns. */
function alongColumns(map, { size, reach, from, weights }) {
  const { width } = map;
  const values = new Float32Array(size * width);
  const totals = new Float64Array(width);
  for (let row = 0, tap = 0; row < size; row++) {
    totals.fill(0);
    for (const end = tap + reach; tap < end; tap++) {
      const start = from[tap] * width;
      const weight = weights[tap];
      if (weight) for (let column = 0; column < width; column++) totals[column] += map.values[start + column] * weight;
    }
    values.set(totals, row * width);
  }
  return { values, height: size, width };
}

const known = new Map();

function once(key, make) {
  if (!known.has(key)) known.set(key, make());
  return known.get(key);
}

/** What each of `wanted` values is made of, from `size`. */
function triangles(size, wanted) {
  return once(`${size} to ${wanted}`, () => {
    const step = size / wanted;
    const radius = Math.max(step, 1);
    const reach = Math.ceil(2 * radius);
    const from = new Int32Array(wanted * reach);
    const weights = new Float32Array(wanted * reach);
    for (let place = 0; place < wanted; place++) {
      const centre = (place + 0.5) * step - 0.5;
      const first = Math.ceil(centre - radius);
      const weight = (at) => (at < 0 || at >= size ? 0 : Math.max(1 - Math.abs(at - centre) / radius, 0));
      let total = 0;
      for (let tap = 0; tap < reach; tap++) total += weight(first + tap);
      for (let tap = 0; tap < reach; tap++) {
        from[place * reach + tap] = Math.min(Math.max(first + tap, 0), size - 1);
        weights[place * reach + tap] = weight(first + tap) / total;
      }
    }
    return { size: wanted, reach, from, weights };
  });
}

/** A Gaussian over `size` values, which are mirrored at both ends. */
function gaussians(size, sigma) {
  return once(`${size} by ${sigma}`, () => {
    const most = Math.ceil(3 * sigma);
    const reach = 2 * most + 1;
    const bell = Array.from({ length: reach }, (_, tap) => Math.exp(-0.5 * ((tap - most) / sigma) ** 2));
    const sum = bell.reduce((a, b) => a + b);
    const mirror = (place) => {
      const round = ((place % (2 * size)) + 2 * size) % (2 * size);
      return Math.min(round, 2 * size - 1 - round);
    };
    const from = Int32Array.from({ length: size * reach }, (_, i) => mirror(Math.floor(i / reach) + (i % reach) - most));
    return { size, reach, from, weights: Float32Array.from(from, (_, i) => bell[i % reach] / sum) };
  });
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
  const wide = map.width < COARSEST ? map : alongRows(map, gaussians(map.width, sigma));
  return map.height < COARSEST ? wide : alongColumns(wide, gaussians(map.height, sigma));
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
  const [least, largest] = rangeOf(map);
  const above = map.values.length - 1 - Math.ceil(0.995 * (map.values.length - 1)); // so many values are not below it
  let top = [];
  for (let share = 0.1; top.length <= above; share *= 2) {
    // only a few of the largest values are sorted
    top = share > 1 ? map.values.slice() : map.values.filter((value) => value >= largest - share * (largest - least));
  }
  const limit = top.sort()[top.length - 1 - above];
  return limit > low ? limit : largest;
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
