// Labelled controls that are bound to a choice.

import { fill, h } from "./dom.js";

/** A select. `options` are [value, text] pairs, or give them later with `setOptions`. */
export function select(state, name, label, options = []) {
  const element = h("select", { name, "aria-label": label, onchange: () => state.set({ [name]: element.value }) });
  const holder = h("label.control", {}, h("span", {}, label), element);
  holder.setOptions = (pairs, value = state.get(name)) => {
    const wanted = JSON.stringify(pairs);
    if (element.dataset.options !== wanted) {
      fill(element, pairs.map(([key, text]) => h("option", { value: key }, text)));
      element.dataset.options = wanted;
    }
    element.value = value;
    holder.hidden = pairs.length < 2;
  };
  holder.setOptions(options);
  return holder;
}

/** A slider with its value beside it. */
export function slider(state, name, label, { min, max, step, text = (value) => value }) {
  const shown = h("output", {}, "");
  const element = h("input", {
    type: "range",
    name,
    min,
    max,
    step,
    "aria-label": label,
    oninput: () => state.set({ [name]: element.value }),
  });
  const holder = h("label.control", {}, h("span", {}, label), element, shown);
  holder.update = () => {
    element.value = state.number(name);
    fill(shown, text(element.value));
    element.setAttribute("aria-valuetext", text(element.value));
  };
  holder.update();
  return holder;
}

/** A switch. */
export function toggle(state, name, label) {
  const element = h("input", { type: "checkbox", name, onchange: () => state.set({ [name]: element.checked ? 1 : 0 }) });
  const holder = h("label.control", {}, element, h("span", {}, label));
  holder.update = () => (element.checked = state.isOn(name));
  holder.update();
  return holder;
}

/** Buttons of which one is chosen. */
export function choice(state, name, label, options) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "data-value": value, onclick: () => state.set({ [name]: value }) }, text),
  );
  const holder = h("div.choice", { role: "group", "aria-label": label }, buttons);
  holder.update = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === state.get(name)));
  };
  holder.update();
  return holder;
}
