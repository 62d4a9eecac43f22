// Compare: two steps, two runs or two kinds, image by image, with their difference.

import { choice, select } from "./controls.js";
import { chosenSource } from "./data.js";
import { fill, h, stepText } from "./dom.js";
import { aspectOf, cell, chosenSet, columnsOf, COMBINED, kindOptions, linked, paintCell, readout } from "./images.js";
import { Painter } from "./lazy.js";
import { difference, scaled } from "./numbers.js";
import { drawImage, drawMap, drawNothing, greysOf } from "./paint.js";

/** The mode for comparisons. */
export class Compare {
  constructor(state, look) {
    this.state = state;
    this.look = look;
    this.by = choice(state, "by", "What to compare", [["step", "Two steps"], ["run", "Two runs"], ["kind", "Two kinds"]]);
    this.kind = select(state, "kind", "Maps");
    this.layer = select(state, "layer", "Layer");
    this.step2 = select(state, "step2", "with step");
    this.run2 = select(state, "run2", "with run");
    this.kind2 = select(state, "kind2", "with maps");
    this.toolbar = [this.by, this.kind, this.step2, this.run2, this.kind2, this.layer, ...look.controls];
    this.note = h("p.note");
    this.table = h("div.grid");
    this.element = h("div.mode", {}, this.note, h("div.scroll", {}, this.table));
    this.painter = new Painter();
  }

  /** The run that is compared with, if runs are compared. */
  otherSource(source, sources) {
    if (this.state.get("by") !== "run") return null;
    const others = sources.filter((one) => one.id !== source.id);
    const other = chosenSource(others, this.state.get("run2"), this.pinned);
    if (other) this.pinned = other.id;
    return other || null;
  }

  async draw({ store, source, sources, step, isCurrent }) {
    const by = this.state.get("by");
    this.by.update();
    const other = this.otherSource(source, sources) || source;
    const kind = this.state.get("kind");
    const event = await store.eventWith(source, step, kind);
    const step2 = by === "step" ? this.stepBeside(source) : nearest(other.steps, step);
    const event2 = await store.eventWith(other, step2, kind);
    if (!isCurrent()) return;
    for (const one of [event, event2]) if (one instanceof Error) throw one;
    this.look.update([...event.header.sets, ...event2.header.sets]);
    const set = chosenSet(event, kind);
    if (!set) return void fill(this.table, h("p.empty", {}, "This event has no maps."));
    const sets2 = by === "kind" ? event.header.sets.filter((one) => one.source === set.source && one.name !== set.name) : [];
    const set2 = by === "kind" ? sets2.find((one) => one.name === this.state.get("kind2")) || sets2[0] : event2.header.sets.find((one) => one.name === set.name);
    this.showControls(by, event, source, sources, other, set, sets2, set2, step2);
    const same = { event, set, source };
    if (!set2 || (by === "run" && other === source)) return void fill(this.table, h("p.empty", {}, NOTHING[by]));
    const sides = [
      { ...same, name: { step: `step ${stepText(stepOf(event))}`, run: source.name, kind: set.name }[by] },
      { event: event2, set: set2, source: other, name: { step: `step ${stepText(stepOf(event2))}`, run: other.name, kind: set2.name }[by] },
    ];
    if (by === "step" && step2 < step) sides.reverse(); // time goes from left to right
    for (const side of sides) {
      side.jpegs = await store.jpegs(side.source, side.event, side.set);
      side.pictures = await Promise.all(side.jpegs.map(({ picture }) => picture()));
    }
    if (!isCurrent()) return;
    const steps = sides.map(({ event: one }) => stepOf(one));
    const remark = steps.every((one) => one === step) ? "" : ` Maps of ${steps.map((one) => `step ${stepText(one)}`).join(" and ")}.`;
    this.show(sides, by === "run" ? remark : "");
  }

  stepBeside(source) {
    const wanted = this.state.get("step2");
    if (wanted === "first") return source.steps[0];
    if (wanted === "last") return source.steps[source.steps.length - 1];
    return nearest(source.steps, Number(wanted) || 0);
  }

  showControls(by, event, source, sources, other, set, sets2, set2, step2) {
    this.kind.setOptions(kindOptions(event), set.name);
    this.kind2.setOptions(by === "kind" ? kindOptions(event).filter(([name]) => sets2.some((one) => one.name === name)) : [], set2?.name);
    const steps = source.steps.map((one) => [String(one), `step ${stepText(one)}`]);
    this.step2.setOptions(by === "step" ? [["first", "first step"], ["last", "last step"], ...steps] : []);
    this.run2.setOptions(by === "run" ? sources.filter((one) => one.id !== source.id).map((one) => [one.id, one.name]) : [], other.id);
    if (by === "run") this.run2.hidden = sources.length < 2;
    if (by === "kind") this.kind2.hidden = sets2.length < 1;
    const layers = set.layers.map(({ name }) => [name, name]);
    const options = layers.length > 1 && !set.signed ? [[COMBINED, "all layers combined"], ...layers] : layers;
    const chosen = options.some(([name]) => name === this.state.get("layer")) ? this.state.get("layer") : options[0]?.[0];
    this.layer.setOptions(options, chosen);
  }

  show(sides, remark) {
    const [one, two] = sides;
    for (const side of sides) {
      side.aspect = aspectOf(side.event, side.set, side.pictures);
      const columns = columnsOf(side.event, side.set, this.look, side.aspect);
      side.column = columns.find(({ name }) => name === this.state.get("layer")) || columns[0];
    }
    const count = Math.max(one.column.count, two.column.count);
    const same = Array.from({ length: count }, (_, number) => areEqual(one.jpegs[number]?.bytes, two.jpegs[number]?.bytes));
    const [all, some] = [same.every(Boolean), same.some(Boolean)];
    const heads = ["image", one.name, ...(all ? [] : ["image"]), two.name, ...(some ? ["difference"] : [])];
    const size = this.look.tile(one.aspect, heads.length);
    const colours = `Difference: red where ${two.name} is stronger, blue where ${one.name} is.`;
    const word = all ? `The same images. ${colours}` : some ? `Some images differ. ${colours}` : "The two show different images, so there is no difference to draw.";
    fill(this.note, word + remark);
    this.table.style.gridTemplateColumns = `minmax(72px, max-content) repeat(${heads.length}, ${size.width}px)`;
    this.jobs = [];
    fill(
      this.table,
      h("div.head"),
      heads.map((name) => h("div.head", { title: name }, name)),
      Array.from({ length: count }, (_, number) => this.row(sides, number, { all, some, here: same[number] }, size)),
    );
    this.painter.paint(this.jobs);
  }

  row(sides, number, same, size) {
    const label = sides[0].set.labels?.[number] || `image ${number + 1}`;
    const cells = [];
    const paints = [];
    const look = this.look.paint;
    sides.forEach((side, place) => {
      const picture = side.pictures[number];
      if (place === 0 || !same.all) {
        const image = cell(size, `Image ${number + 1}`);
        paints.push(() => drawImage(image.canvas, picture));
        cells.push(image);
      }
      const one = cell(size, `${label}, ${side.name}`);
      paints.push(() => paintCell(one.canvas, side.column, number, picture, look, side.set.signed));
      cells.push({ ...one, value: (down, across) => readout(side.column.map(number), side.set.signed, down, across) });
    });
    if (same.some) {
      const place = cell(size, `${label}, difference`);
      paints.push(() => (same.here ? this.drawDifference(place.canvas, sides, number) : drawNothing(place.canvas, "other image")));
      cells.push(place);
    }
    this.jobs.push([cells[0].element, () => paints.forEach((paint) => paint())]);
    linked(cells);
    return [h("div.caption", {}, h("b", {}, label)), cells.map(({ element }) => element)];
  }

  drawDifference(canvas, [one, two], number) {
    const [map, map2] = [one.column.map(number), two.column.map(number)];
    if (!map || !map2) return drawNothing(canvas, "no map");
    const greys = greysOf(one.pictures[number], canvas.width, canvas.height);
    const [scaledDifference] = scaled([difference(map2, map)], this.state.get("scale"), true);
    drawMap(canvas, scaledDifference, greys, this.look.paint, true);
  }
}

const NOTHING = {
  step: "The other step has no maps of this kind.",
  run: "There is no second run with maps of this kind. Put several runs below TensorBoard's --logdir.",
  kind: "This event has no second kind of maps of these images. Order 1, contrast and Grad-CAM are flags of the callback.",
};

/** The step that the maps of an event are of. */
function stepOf(event) {
  return event.header.maps_step ?? event.step;
}

function areEqual(bytes, others) {
  return Boolean(bytes && others && bytes.length === others.length && bytes.every((value, i) => value === others[i]));
}

function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
}
