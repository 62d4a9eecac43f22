// One image, large, in a dialog.

import { fill, h } from "./dom.js";
import { sized, tileSize } from "./paint.js";

/** A dialog that shows one of a list of pictures; arrow keys and buttons go to its neighbours. */
export class Closeup {
  constructor() {
    this.title = h("h2", {});
    this.facts = h("dl", {});
    this.views = h("div.views", {});
    this.row = h("div.neighbours", {});
    this.opacity = h("input", { type: "range", min: 0, max: 1, step: 0.05, "aria-label": "Opacity of the map", oninput: () => this.draw() });
    const button = (label, text, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.element = h(
      "dialog.closeup",
      { "aria-label": "Close-up" },
      h("header", {}, this.title, button("Image before", "‹", () => this.move(-1)), button("Next image", "›", () => this.move(1)), button("Close", "×", () => this.element.close())),
      h("div.content", {}, this.views, h("aside", {}, this.facts, h("label.control", {}, h("span", {}, "Opacity"), this.opacity))),
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
   * @param {Array<{title: string, facts: Array, aspect: number, views: Array<{label: string, draw: function}>, thumbnail: function}>} items
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
    const { title, facts, views, aspect } = this.items[at];
    fill(this.title, title);
    fill(this.facts, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const room = Math.min(window.innerWidth - 360, window.innerHeight * 1.4);
    const side = Math.max(160, Math.min(views.length > 1 ? room / Math.min(views.length, 3) : room, 560, window.innerHeight - 260));
    this.canvases = views.map(() => sized(h("canvas"), tileSize(aspect, Math.round(side))));
    fill(this.views, views.map(({ label }, number) => h("figure", {}, this.canvases[number], h("figcaption", {}, label))));
    [...this.row.children].forEach((child, number) => child.setAttribute("aria-current", String(number === at)));
    this.row.children[at]?.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.draw();
  }

  draw() {
    this.items[this.at].views.forEach(({ draw }, number) => draw(this.canvases[number], Number(this.opacity.value)));
  }
}
