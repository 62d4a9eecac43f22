// Curves of what is on screen: a small chart for each number, a line for each class or layer.

import { fill, h, loss, short, shortNames, stepText, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 134;
const LEFT = 36;
const BOTTOM = 18; // for the steps
const COLOURS = 8;

const TITLES = {
  "check/covered": "Check: loss that covering the place adds, above another place",
  "check/pasted": "Check: loss that pasting the place adds, above another part",
  hot_spot: "Lift: how many times stronger one place is than in the other classes",
  share_on_object_by_class: "Share of the signal on the object, by class",
  share_on_object: "Share of the signal on the object, by layer",
  part_of_signal: "Part of the training signal",
  border_share: "Share of the signal near the edges",
  concentration: "Area that holds half of the signal",
  drift: "Change of the probe's maps since the event before",
  energy: "Strength of the signal (log scale)",
  cost: "Cost: share of the training time",
  validation: "Validation",
};

const FIRST = ["check/covered", "check/pasted", "hot_spot", "share_on_object_by_class", "share_on_object", "cost", "validation"];
const OF_LAYERS = ["share_on_object", "border_share", "concentration", "drift", "energy"];
const LOGARITHMIC = new Set(["energy"]);
const SHARES = new Set(["share_on_object_by_class", "share_on_object", "part_of_signal", "border_share", "concentration", "cost"]);

/** The charts of one or two runs. */
export class Curves {
  /** @param {function(number)} onstep - is called with the step of the event that was clicked. */
  constructor(onstep) {
    this.onstep = onstep;
    this.element = h("section.curves", { "aria-label": "Curves" });
    this.drawn = null;
    this.reads = [];
  }

  /** Take the charts away unless they are of these runs. Their room stays, so that nothing on the page moves. */
  keepOnly(sources) {
    this.element.style.visibility = idsOf(sources) === this.ids ? "" : "hidden";
  }

  /**
   * @param {Array<{id: string, name: string, group: string, tags: object}>} runs - the curves of each by tag, points as [step, value].
   * @param {number[]} steps - of the events.
   * @param {number} step - the chosen one.
   * @param {"classes"|"layers"} focus - which charts come first.
   */
  update(runs, steps, step, focus) {
    const wanted = JSON.stringify([runs.map(({ name, version }) => [name, version]), steps, focus]);
    if (this.drawn !== wanted) {
      this.reads = [];
      const charts = chartsOf(runs);
      const places = placesOf(charts);
      const order = focus === "layers" ? [...OF_LAYERS, ...FIRST] : FIRST;
      const place = (key) => (order.includes(key) ? order.indexOf(key) : order.length);
      const keys = [...charts.keys()].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
      const boxes = keys.map((key) => this.chart(key, charts.get(key), steps, places));
      const first = boxes.slice(0, 6);
      const rest = boxes.slice(6);
      fill(
        this.element,
        boxes.length ? h("h2", {}, "Curves", h("small", {}, ` a click goes to that step${runs.length > 1 ? `; solid: ${runs[0].name}, dashed: ${runs[1].name}` : ""}`)) : null,
        h("div.charts", {}, first),
        rest.length ? h("details", {}, h("summary", {}, `${rest.length} more`), h("div.charts", {}, rest)) : null,
      );
      this.drawn = wanted;
    }
    this.ids = idsOf(runs);
    this.keepOnly(runs);
    this.step = step;
    for (const read of this.reads) read(step);
    for (const line of this.element.querySelectorAll("line.now")) {
      const x = placeOf(step, steps);
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
  }

  chart(key, lines, steps, places) {
    lines.sort((a, b) => places.get(a.id) - places.get(b.id));
    const log = LOGARITHMIC.has(key);
    const change = log ? (value) => Math.log10(Math.max(value, 1e-30)) : (value) => value;
    const values = lines.flatMap(({ points }) => points.map((point) => change(point[1]))).filter(Number.isFinite);
    let low = log ? Math.min(...values) : Math.min(0, ...values);
    let high = Math.max(...values);
    if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
    const y = (value) => HEIGHT - BOTTOM - ((change(value) - low) / (high - low)) * (HEIGHT - BOTTOM - 8);
    const bases = [...new Set(lines.map(({ base }) => base))];
    const colours = new Map(lines.map(({ base, id }) => [base, `s${places.get(id) % COLOURS}`]));
    const names = shortNames(bases);
    const title = TITLES[key] || key;
    const written = key.startsWith("check/") ? loss : short;
    const text = (value, digits = 2) => (SHARES.has(key) && Number.isFinite(value) ? `${short(100 * value, 1)} %` : written(value, digits));
    const back = log ? (value) => 10 ** value : (value) => value;
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${lines.length} curves` },
      [low, high].map((value) => [
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(back(value)), y2: y(back(value)) }),
        svg("text", { x: LEFT - 4, y: y(back(value)) + 4, "text-anchor": "end" }, text(back(value), 1)),
      ]),
      steps.length > 1 ? [svg("text", { x: LEFT, y: HEIGHT - 4 }, `step ${stepText(steps[0])}`), svg("text", { x: WIDTH - 2, y: HEIGHT - 4, "text-anchor": "end" }, stepText(steps[steps.length - 1]))] : [],
      svg("line", { class: "now", y1: 0, y2: HEIGHT - BOTTOM }),
      lines.map(({ points, base, isSecond }) => {
        const look = `curve ${colours.get(base)}${isSecond ? " second" : ""}`;
        const places = points.filter((point) => Number.isFinite(point[1])).map(([step, value]) => [placeOf(step, steps).toFixed(1), y(value).toFixed(1)]);
        return places.length === 1 ? svg("circle", { class: look, cx: places[0][0], cy: places[0][1], r: 2.5 }) : svg("polyline", { class: look, points: places.map((place) => place.join(",")).join(" ") });
      }),
    );
    const valuesOf = (base) => lines.flatMap((line, number) => (line.base === base ? [" ", h("b", { "data-line": number, class: line.isSecond ? "second" : null }, "")] : []));
    const legend = h("div.legend", {}, bases.map((base, number) => h(`span.key.${colours.get(base)}`, {}, h("i"), bases.length > 1 || names[0] ? names[number] || key : "", valuesOf(base))));
    const read = (step) => {
      for (const shown of legend.querySelectorAll("b")) fill(shown, text(valueNear(lines[Number(shown.dataset.line)].points, step)));
    };
    this.reads.push(read);
    const stepAt = (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      return steps.reduce((best, step) => (Math.abs(placeOf(step, steps) - x) < Math.abs(placeOf(best, steps) - x) ? step : best), steps[0]);
    };
    picture.addEventListener("mousemove", (event) => {
      read(stepAt(event));
      picture.setAttribute("data-step", stepAt(event));
    });
    picture.addEventListener("mouseleave", () => read(this.step));
    picture.addEventListener("click", (event) => this.onstep(stepAt(event)));
    return h("figure.chart", { "data-chart": key, title: steps.length ? `steps ${stepText(steps[0])} to ${stepText(steps[steps.length - 1])}` : "" }, h("figcaption", {}, title), picture, legend);
  }
}

/** Curves by chart: the part of their tag behind the group, without the class or layer. */
function chartsOf(runs) {
  const charts = new Map();
  runs.forEach(({ group, tags }, number) => {
    for (const [tag, points] of Object.entries(tags)) {
      const ours = [`${group}/`, `${group}_layers/`].find((start) => tag.startsWith(start));
      const parts = tag.slice(ours?.length || 0).split("/");
      const depth = parts[0] === "check" ? 2 : 1;
      const key = ours ? parts.slice(0, depth).join("/") : "validation";
      const name = ours ? parts.slice(depth).join("/").replace(/^\d\d_/, "") : tag;
      if (!charts.has(key)) charts.set(key, []);
      charts.get(key).push({ base: name, id: JSON.stringify([ours?.slice(group.length), ours ? parts.slice(depth).join("/") : tag]), points, isSecond: number > 0 });
    }
  });
  return charts;
}

/** The place of each class among all classes, and of each layer among all layers: it has one colour in all charts. */
function placesOf(charts) {
  const ids = [...new Set([...charts.values()].flat().map(({ id }) => id))].sort();
  const places = new Map();
  const count = {};
  for (const id of ids) {
    const [kind, name] = JSON.parse(id);
    places.set(id, name ? (count[kind] = (count[kind] ?? -1) + 1) : 0);
  }
  return places;
}

function idsOf(runs) {
  return JSON.stringify(runs.map(({ id }) => id));
}

/** Where a step is drawn: events are evenly spaced, as on the slider. */
function placeOf(step, steps) {
  const last = steps.length - 1;
  const place = (at) => LEFT + 4 + (last ? at / last : 0.5) * (WIDTH - LEFT - 8);
  if (last < 0 || step <= steps[0]) return place(0);
  for (let i = 1; i <= last; i++) if (step <= steps[i]) return place(i - 1 + (step - steps[i - 1]) / (steps[i] - steps[i - 1]));
  return place(last);
}

function valueNear(points, step) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
  return best ? best[1] : NaN;
}
