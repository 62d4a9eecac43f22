// Maps and images on canvases.

import { paintTable } from "./colours.js";
import { resized } from "./numbers.js";

/** The size of a tile whose longer side is `side`; no side is shorter than a quarter of the other. */
export function tileSize(aspect, side) {
  const bounded = Math.min(Math.max(aspect, 0.25), 4);
  const [width, height] = bounded > 1 ? [side, side / bounded] : [side * bounded, side];
  return { width: Math.max(1, Math.round(width)), height: Math.max(1, Math.round(height)) };
}

/** A canvas of this size in CSS pixels, as fine as the screen. */
export function sized(canvas, { width, height }) {
  const zoom = Math.max(1, Math.min(window.devicePixelRatio || 1, 2));
  const [across, down] = [Math.round(width * zoom), Math.round(height * zoom)];
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  return canvas;
}

/** Draw an image, or a part of it given in its own pixels. */
export function drawImage(canvas, bitmap, part = null) {
  const context = canvas.getContext("2d");
  if (!bitmap) return drawNothing(canvas, "no image");
  const { left, top, width, height } = part || { left: 0, top: 0, width: bitmap.width, height: bitmap.height };
  context.imageSmoothingEnabled = canvas.width < 4 * width; // small pixels stay pixels
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, left, top, width, height, 0, 0, canvas.width, canvas.height);
}

const knownGreys = new WeakMap();

/** The greys of an image in this size; mid grey without one. */
export function greysOf(bitmap, width, height) {
  if (!bitmap) return new Uint8Array(width * height).fill(128);
  const key = `${width} ${height}`;
  const known = knownGreys.get(bitmap);
  if (known && known.key === key) return known.greys;
  const greys = readGreys(bitmap, width, height);
  knownGreys.set(bitmap, { key, greys });
  return greys;
}

function readGreys(bitmap, width, height) {
  const greys = new Uint8Array(width * height);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = width < 4 * bitmap.width;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height).data;
  for (let i = 0; i < greys.length; i++)
    greys[i] = (19595 * pixels[4 * i] + 38470 * pixels[4 * i + 1] + 7471 * pixels[4 * i + 2] + 32768) >> 16;
  return greys;
}

/** Draw a map of values from 0 to 1 in colour over greys of the canvas's size. */
export function drawMap(canvas, map, greys, look, signed) {
  const context = canvas.getContext("2d");
  const at = resized(map, canvas.height, canvas.width);
  const table = paintTable(look.colormap, look.opacity, signed);
  const pixels = new Uint32Array(canvas.width * canvas.height);
  for (let i = 0; i < pixels.length; i++) pixels[i] = table[(Math.floor(255 * at.values[i] + 0.5) << 8) | greys[i]];
  context.putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), canvas.width, canvas.height), 0, 0);
}

/** Draw stripes with words: there is nothing to show. */
export function drawNothing(canvas, words) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.fillStyle = "#8883";
  context.clearRect(0, 0, width, height);
  context.fillRect(0, 0, width, height);
  context.strokeStyle = "#8884";
  context.lineWidth = 3;
  context.beginPath();
  for (let x = -height; x < width; x += 10) context.moveTo(x, height), context.lineTo(x + height, 0);
  context.stroke();
  context.fillStyle = "#888";
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "center";
  context.fillText(words, width / 2, height / 2 + 4, width - 4);
}

/** Outline a box, given as shares of the canvas's sides. */
export function outline(canvas, [top, left, height, width]) {
  const context = canvas.getContext("2d");
  const box = [left * canvas.width, top * canvas.height, width * canvas.width, height * canvas.height];
  context.lineWidth = Math.max(2, canvas.width / 160);
  context.strokeStyle = "#000c";
  context.strokeRect(...box);
  context.lineWidth /= 2;
  context.strokeStyle = "#fff";
  context.strokeRect(...box);
}
