// Elements. What comes from a log becomes text, never markup.

/**
 * A new element.
 * @param {string} name - its tag, with classes after dots: "div.row.wide".
 * @param {object} attributes - `on…` are listeners, `style` is an object, all others are attributes; null: none.
 * @param {...(Node|string|number|null|Array)} children - strings become text.
 */
export function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [property, of] of Object.entries(value)) element.style.setProperty(property, of);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(String_));
  return element;
}

function String_(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(String_));
  return element;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(String_));
  return element;
}

/** A number for people. */
export function short(value, digits = 2) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? Math.min(digits, 1) : size < 0.095 && size > 0 ? digits + 1 : digits);
}

/** A loss, with as many digits as sentences say. */
export function loss(value) {
  return Math.abs(value) < 1e4 ? value.toFixed(2) : short(value);
}

/** A share as a percentage. */
export function percent(share) {
  return typeof share === "number" ? `${Math.round(100 * share)} %` : "–";
}

/** A step with its thousands apart. */
export function stepText(step) {
  return String(step).replace(/\B(?=(\d{3})+(?!\d))/g, " ");
}

/** A layer's name without the modules that all layers are in. */
export function shortNames(names) {
  const parts = names.map((name) => name.split("."));
  let shared = 0;
  const same = (depth) => new Set(parts.map((part) => part.slice(0, depth).join("."))).size === 1;
  while (names.length > 1 && parts.every((part) => part.length > shared + 1) && same(shared + 1)) shared++;
  if (shared && parts.some((part) => /^\d+$/.test(part[shared]))) shared--;
  return parts.map((part) => part.slice(shared).join("."));
}
