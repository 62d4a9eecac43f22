// One image, large, in a dialog.

import { fill, h } from "./dom.js";
import { sized, tileSize } from "./paint.js";

/** A dialog that shows one of a list of pictures; arrow keys and buttons go to its neighbours. */
export class Closeup {
  constructor() {
    this.title = h("h2", {});
    this.facts = h("dl", {});
    this.views = h("div.views", {});
    this.others = h("div.others", { role: "group", "aria-label": "Maps" });
    this.row = h("div.neighbours", { role: "group", "aria-label": "Neighbours" });
    this.beside = 1;
    this.opacity = h("input", { type: "range", min: 0, max: 1, step: 0.05, "aria-label": "Opacity of the map", oninput: () => this.draw() });
    this.control = h("label.control", {}, h("span", {}, "Opacity"), this.opacity);
    const button = (label, text, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.element = h(
      "dialog.closeup",
      { "aria-label": "Close-up" },
      h("header", {}, this.title, button("Image before", "‹", () => this.move(-1)), button("Next image", "›", () => this.move(1)), button("Close", "×", () => this.element.close())),
      h("div.content", {}, h("div", {}, this.views, this.others), h("aside", {}, this.facts, this.control)),
      this.row,
    );
    this.element.addEventListener("keydown", (event) => {
      if (event.target === this.opacity) return;
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) this.move(by);
    });
    this.element.addEventListener("click", (event) => event.target === this.element && this.element.close());
  }

  /**
   * @param {Array<{title: string, facts: Array, aspect: number, views: Array<{label: string, draw: function}>, thumbnail: function}>} items -
   *   the first view is the image, the others are its maps: one of them is large.
   * @param {number} at - which of them.
   * @param {number} opacity - of maps, at first.
   */
  open(items, at, opacity) {
    this.items = items;
    this.opacity.value = opacity;
    fill(
      this.row,
      items.map(({ thumbnail, title }, number) => {
        const canvas = sized(h("canvas"), { width: 48, height: 48 });
        thumbnail(canvas);
        return h("button", { type: "button", "aria-label": title, onclick: () => this.show(number) }, canvas);
      }),
    );
    this.show(at);
    if (!this.element.open) this.element.showModal();
  }

  move(by) {
    this.show((this.at + by + this.items.length) % this.items.length);
  }

  show(at) {
    this.at = at;
    const { title, facts } = this.items[at];
    fill(this.title, title);
    fill(this.facts, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.showViews();
    [...this.row.children].forEach((child, number) => child.setAttribute("aria-current", String(number === at)));
    this.row.children[at]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** The image with one of its maps, and below them all maps to choose from. */
  showViews() {
    const { views, aspect } = this.items[this.at];
    const beside = Math.min(this.beside, views.length - 1);
    const maps = views.length > 2 ? views.slice(1) : [];
    this.control.hidden = !beside;
    const aside = window.innerWidth < 900 ? 0 : 260; // else the facts are below
    const room = Math.min(window.innerWidth - 100 - aside, 2 * 560) / (beside ? 2 : 1);
    const side = Math.max(160, Math.min(room, 560, window.innerHeight - (maps.length ? 380 : 240)));
    const frame = (size) => sized(h("canvas"), tileSize(aspect, Math.round(size)));
    this.large = (beside ? [0, beside] : [0]).map((number) => ({ ...views[number], canvas: frame(side) }));
    this.small = maps.map((view) => ({ ...view, canvas: frame(Math.min(Math.max((2 * side) / maps.length - 8, 56), 112)) }));
    fill(this.views, this.large.map(({ canvas, label }) => h("figure", {}, canvas, h("figcaption", {}, label))));
    const choose = (number) => () => {
      this.beside = number;
      this.showViews();
      this.others.children[number - 1].focus();
    };
    fill(
      this.others,
      this.small.map(({ canvas, label }, number) =>
        h("button", { type: "button", "aria-pressed": String(number + 1 === beside), title: label, onclick: choose(number + 1) }, canvas, h("span", {}, label)),
      ),
    );
    this.draw();
  }

  draw() {
    for (const { canvas, draw } of [...this.large, ...this.small]) draw(canvas, Number(this.opacity.value));
  }
}
