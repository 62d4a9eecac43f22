// The page: runs, modes and the step slider, and what they show together.

import { Classes } from "./classes.js";
import { Closeup } from "./closeup.js";
import { Compare } from "./compare.js";
import { choice, select } from "./controls.js";
import { Curves } from "./curves.js";
import { chosenSource, sourcesOf, Store } from "./data.js";
import { fill, h, short } from "./dom.js";
import { ImagesMode, Look } from "./images.js";
import { State } from "./state.js";
import { StepSlider } from "./steps.js";

const POLL = 3000; // milliseconds between looks for new events
const MODES = [
  ["classes", "Classes"],
  ["images", "Images"],
  ["compare", "Compare"],
];

/**
 * Show the page.
 * @param {Element} root - what it is put into.
 * @param {object} data - `ServedData` or `EmbeddedData`.
 * @param {Window} frame - the window whose address keeps what is chosen.
 * @param {string} tab - what TensorBoard's address begins with for this tab.
 */
export function start(root, data, frame = window, tab = "") {
  const app = new App(data, new State(frame, tab));
  root.classList.add("normgrad");
  fill(root, app.element);
  app.refresh();
  return app;
}

class App {
  constructor(data, state) {
    this.store = new Store(data);
    this.state = state;
    this.turn = 0;
    this.sources = [];
    const closeup = new Closeup();
    const look = new Look(state);
    this.modes = { classes: new Classes(state, closeup), images: new ImagesMode(state, closeup, look), compare: new Compare(state, look) };
    this.tabs = choice(state, "mode", "What to show", MODES);
    this.run = select(state, "run", "Run");
    this.metrics = h("div.metrics", { "aria-label": "Last validation metrics" });
    this.slider = new StepSlider((step, isLast) => state.set({ step: isLast ? "last" : step }));
    this.curves = new Curves((step) => state.set({ step }));
    this.toolbar = h("div.toolbar");
    this.message = h("div.message", { role: "status" });
    this.main = h("main");
    this.element = h("div.page", {}, h("header.top", {}, h("div.bar", {}, this.tabs, this.run, this.metrics), this.slider.element, this.toolbar), this.message, this.main, this.curves.element, closeup.element);
    state.onchange = () => this.draw();
    if (this.store.data.isLive) window.addEventListener("focus", () => this.refresh());
  }

  /** Ask for the runs, draw, and do so again after a while if the data is live, and when somebody comes back. */
  async refresh() {
    clearTimeout(this.timer);
    try {
      if (!document.hidden) {
        const index = await this.store.data.index();
        const text = JSON.stringify(index);
        if (text !== this.seen) {
          this.seen = text;
          this.sources = sourcesOf(index);
          await this.draw();
        }
      }
    } catch (error) {
      this.say("TensorBoard does not answer. The page goes on when it does.", String(error.message || error));
      this.seen = null;
    }
    clearTimeout(this.timer);
    if (this.store.data.isLive) this.timer = setTimeout(() => this.refresh(), POLL);
  }

  /** The mode, and the run or both runs that it shows; what is on screen stays there when runs are added. */
  choose() {
    const name = this.modes[this.state.get("mode")] ? this.state.get("mode") : "classes";
    const source = chosenSource(this.sources, this.state.get("run"), this.pinned);
    if (!source) return { name, sources: [] };
    this.pinned = source.id;
    const other = name === "compare" ? this.modes.compare.otherSource(source, this.sources) : null;
    return { name, sources: other ? [source, other] : [source] };
  }

  /** The index of the chosen step: the latest event that is not after it. */
  indexOf(steps) {
    const wanted = this.state.get("step");
    if (wanted === "last") return steps.length - 1;
    const at = steps.findLastIndex((step) => step <= Number(wanted));
    return Math.max(at, 0);
  }

  /** Draw what is chosen. One at a time: what changes meanwhile is drawn next, and what lies between is not. */
  draw() {
    this.turn++;
    this.curves.keepOnly(this.choose().sources);
    this.drawing ||= this.drawLatest().finally(() => (this.drawing = null));
    return this.drawing;
  }

  async drawLatest() {
    let turn = 0;
    while (turn !== this.turn) {
      turn = this.turn;
      await this.drawOnce(() => turn === this.turn);
    }
  }

  async drawOnce(isCurrent) {
    const { name, sources } = this.choose();
    const [source] = sources;
    this.tabs.update();
    if (!source || !source.steps.length) return this.showEmpty();
    const at = this.indexOf(source.steps);
    const step = source.steps[at];
    this.run.setOptions(this.sources.map(({ id, name }) => [id, name]), source.id);
    this.slider.update(source.steps, at);
    const mode = this.modes[name];
    fill(this.metrics, sources.map((one) => metricsOf(one, sources.length > 1 ? `${one.name}: ` : "")));
    if (this.shown !== mode) {
      this.shown = mode;
      fill(this.toolbar, mode.toolbar);
      fill(this.main, mode.element);
    }
    try {
      await Promise.all([mode.draw({ store: this.store, source, sources: this.sources, step, isCurrent }), this.drawCurves(name, sources, step, isCurrent)]);
      if (!isCurrent()) return;
      this.say();
    } catch (error) {
      if (!isCurrent()) return;
      this.say("This step cannot be shown.", String(error.message || error));
    }
    if (!isCurrent()) return;
    this.element.dataset.drawn = `${name} ${source.run} ${step}`;
    for (const near of [at + 1, at - 1]) {
      if (near in source.steps) this.store.event(source, source.steps[near]).then((event) => event instanceof Error || mode.prepare?.(event));
    }
  }

  async drawCurves(name, sources, step, isCurrent) {
    const runs = await Promise.all(sources.map(async (one) => ({ id: one.id, name: one.name, group: one.group, version: one.version, tags: await this.store.curves(one) })));
    if (isCurrent()) this.curves.update(runs, sources[0].steps, step, name === "images" ? "layers" : "classes");
  }

  say(title = "", more = "") {
    this.message.hidden = !title;
    this.main.hidden = Boolean(title);
    fill(this.message, title ? [h("h2", {}, title), h("p", {}, more)] : []);
  }

  showEmpty() {
    this.say("No run has data for this tab yet.", "");
    this.message.append(
      h("p", {}, "Train with the callback and a TensorBoard logger; the first event is stored at step 0:"),
      h("pre", {}, "from normgrad_lightning import NormGradCallback\n\ntrainer = Trainer(callbacks=[NormGradCallback()])\ntrainer.fit(module, data)"),
      h("p", {}, "This page looks for new data every few seconds. TensorBoard must look at the folder that the logger writes to (--logdir)."),
    );
    this.slider.update([], 0);
    this.run.setOptions([]);
    fill(this.metrics);
    fill(this.toolbar);
    this.shown = null;
    this.element.dataset.drawn = "empty";
  }
}

/** The last validation metrics of a run, if there are any. */
function metricsOf({ metrics }, whose) {
  const found = Object.entries(metrics).slice(0, 6);
  return found.length ? h("span", {}, whose, found.map(([tag, value]) => h("span", {}, `${tag} `, h("b", {}, short(value))))) : null;
}
