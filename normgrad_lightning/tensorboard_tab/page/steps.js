// The step slider: one for everything on the page.

import { fill, h, stepText } from "./dom.js";

const PAUSE = 700; // milliseconds between the steps of "play"

/** A slider over the events of a run, with a mark for each; play and arrow keys. */
export class StepSlider {
  /** @param {function(number)} onstep - is called with the step that somebody chose. */
  constructor(onstep) {
    this.onstep = onstep;
    this.steps = [];
    this.at = 0;
    this.timer = null;
    this.range = h("input", { type: "range", min: 0, step: 1, "aria-label": "Training step", oninput: () => this.go(Number(this.range.value)) });
    this.marks = h("div.marks", { "aria-hidden": "true" });
    this.play = h("button.play", { type: "button", "aria-label": "Play", onclick: () => this.toggle() });
    this.now = h("output.step", { "aria-live": "polite" });
    const move = (by) => () => this.move(by);
    this.element = h(
      "div.steps",
      {},
      this.play,
      h("button", { type: "button", "aria-label": "Step before", onclick: move(-1) }, "‹"),
      h("button", { type: "button", "aria-label": "Next step", onclick: move(1) }, "›"),
      h("div.track", {}, this.marks, this.range),
      this.now,
    );
    document.addEventListener("keydown", (event) => this.key(event));
    this.showPlay();
  }

  /** Show these steps, with the one at this index chosen. */
  update(steps, at) {
    const last = Math.max(steps.length - 1, 0);
    if (this.steps.join() !== steps.join()) {
      fill(this.marks, steps.map((_, i) => h("i", { style: { left: `${last ? (100 * i) / last : 50}%` } })));
    }
    this.steps = steps;
    this.at = at;
    this.range.max = last;
    this.range.value = at;
    this.range.disabled = this.play.disabled = steps.length < 2;
    const text = steps.length ? `step ${stepText(steps[at])}` : "no step yet";
    this.range.setAttribute("aria-valuetext", text);
    fill(this.now, text, h("small", {}, steps.length ? ` ${at + 1} of ${steps.length}` : ""));
  }

  go(at) {
    const bounded = Math.min(Math.max(at, 0), this.steps.length - 1);
    if (bounded >= 0) this.onstep(this.steps[bounded], bounded === this.steps.length - 1);
  }

  move(by) {
    this.stop();
    this.go(this.at + by);
  }

  key(event) {
    const inControl = event.target.closest("input:not([type=checkbox]), select, textarea, dialog");
    if (inControl || event.altKey || event.ctrlKey || event.metaKey) return;
    const act = { ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1), Home: () => this.go(0), End: () => this.go(Infinity) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.at === this.steps.length - 1) this.go(0);
    this.timer = setInterval(() => {
      if (this.at >= this.steps.length - 1) this.stop();
      else this.go(this.at + 1);
    }, PAUSE);
    this.showPlay();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.showPlay();
  }

  showPlay() {
    fill(this.play, this.timer ? "❚❚" : "▶");
    this.play.setAttribute("aria-label", this.timer ? "Pause" : "Play");
  }
}
