// Images: each in a row, with its map of all layers combined and of each layer.

import { select, slider, toggle } from "./controls.js";
import { coloursOf, UNSIGNED } from "./colours.js";
import { fill, h, short, shortNames, stepText } from "./dom.js";
import { help } from "./help.js";
import { Painter } from "./lazy.js";
import { combined, isZero, mean, scaled, valueAt, withoutTypical } from "./numbers.js";
import { drawImage, drawMap, drawNothing, greysOf, sized, tileSize } from "./paint.js";

export const COMBINED = "combined";
const NOTHING = { values: new Float32Array(1), height: 1, width: 1 };

const SCALES = [
  ["robust", "robust"],
  ["image", "each image"],
  ["shared", "shared"],
];
const PREPARED = 4; // images of the next step that are computed ahead
const COLOURS = { true: "true colours", stretched: "each stretched to its full range" };

/** The controls of how maps look, which two modes share. */
export class Look {
  constructor(state) {
    this.state = state;
    this.opacity = slider(state, "opacity", "Opacity", { min: 0, max: 1, step: 0.05 });
    this.colors = select(state, "colors", "Colours", UNSIGNED.map((name) => [name, name]));
    this.scale = select(state, "scale", "Scale", SCALES);
    this.typical = toggle(state, "typical", "Typical map removed");
    this.typical.title = "Divide each map by what all images have in common at this layer";
    this.size = slider(state, "tile", "Size", { min: 0, max: 400, step: 16, text: (value) => (Number(value) ? value : "fit") });
    this.controls = [this.opacity, this.colors, this.scale, this.typical, this.size];
  }

  update(sets) {
    for (const control of [this.opacity, this.typical, this.size]) control.update();
    this.colors.setOptions(UNSIGNED.map((name) => [name, name]));
    this.scale.setOptions(SCALES);
    this.typical.hidden = !sets.some((set) => set.layers.some((layer) => layer.typical));
  }

  get paint() {
    return { colormap: this.state.get("colors"), opacity: this.state.number("opacity") };
  }

  /** The size of a tile: as chosen, or so that this many columns fill the page. */
  tile(aspect, columns) {
    const room = (document.documentElement.clientWidth - 170) / columns - 4;
    const width = Math.min(Math.max(room, 96), 256);
    return tileSize(aspect, this.state.number("tile") || width / Math.min(aspect, 1));
  }
}

/** The set of maps to show: the one that was chosen, else order 0 of a probe, else the first. */
export function chosenSet(event, name) {
  const sets = event.header.sets;
  return sets.find((set) => set.name === name) || sets.find((set) => set.name === "probe_order0") || sets[0];
}

/** What a select offers for the kinds of maps of these events. */
export function kindOptions(...events) {
  const sets = [...new Map(events.flatMap((event) => event.header?.sets || []).map((set) => [set.name, set])).values()];
  const several = new Set(sets.map(({ source }) => source)).size > 1;
  return sets.map(({ name, kind, meaning, source }) => [
    name,
    `${kind.replace("_", " ").replace("order0", "order 0").replace("order1", "order 1")}${several ? `, ${source}` : ""}: ${meaning}`,
  ]);
}

/** The maps of a layer, or of all layers combined: what is asked for is computed, and kept. */
class Column {
  /**
   * @param {string} name - of the layer.
   * @param {number} count - of maps.
   * @param {function(number)} make - the map of an image.
   */
  constructor(name, count, make, scale, signed) {
    Object.assign(this, { name, count, make, scale, signed, maps: [], planes: [] });
  }

  map(number) {
    if (number < this.count) return (this.maps[number] ||= this.make(number));
  }

  /** The map brought to [0, 1]. */
  plane(number) {
    if (this.scale === "shared" && !this.planes.length)
      this.planes = scaled(Array.from({ length: this.count }, (_, one) => this.map(one)), this.scale, this.signed);
    return (this.planes[number] ||= scaled([this.map(number)], this.scale, this.signed)[0]);
  }
}

/** The columns of a set. An event keeps those of the latest look. */
export function columnsOf(event, set, look, aspect) {
  const removed = look.state.isOn("typical") && !set.signed;
  const scale = look.state.get("scale");
  return event.latest(`columns ${set.name}`, `${removed} ${scale} ${aspect.toFixed(3)}`, () => {
    const layers = set.layers.map((layer) => {
      const [typical] = event.maps(layer.typical);
      const maps = event.maps(layer.maps);
      return new Column(layer.name, maps.length, (number) => (removed ? withoutTypical(maps[number], typical) : maps[number]), scale, set.signed);
    });
    if (layers.length < 2 || set.signed) return layers;
    const ofAll = (number) => combined(layers.map((layer) => layer.map(number)).filter(Boolean), aspect) || NOTHING;
    return [new Column(COMBINED, Math.max(...layers.map(({ count }) => count)), ofAll, scale, false), ...layers];
  });
}

/** Width by height of the images. */
export function aspectOf(event, set, pictures) {
  const picture = pictures.find(Boolean);
  if (picture) return picture.width / picture.height;
  const [map] = event.maps(set.layers[0]?.maps);
  return map ? map.width / map.height : 1;
}

/** Draw a map over a picture, or that there is none. */
export function paintCell(canvas, column, number, picture, look, signed) {
  const map = column.map(number);
  if (!map || isZero(map)) return drawNothing(canvas, "no gradient here");
  drawMap(canvas, column.plane(number), greysOf(picture, canvas.width, canvas.height), look, signed);
}

/** How strong a map is at a place, in words. */
export function readout(map, signed, down, across) {
  if (!map) return "";
  const value = valueAt(map, down, across);
  if (signed) return short(value / Math.max(...map.values.map(Math.abs), 1e-38), 2);
  const level = mean(map);
  return level > 0 ? `${short(value / level, 1)} × mean` : "0";
}

/** Cells of a row that show the same place: a cross in each, and its value. */
export function linked(cells) {
  const point = (event) => {
    const box = event.currentTarget.querySelector("canvas").getBoundingClientRect();
    const [across, down] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const isInside = across >= 0 && across < 1 && down >= 0 && down < 1;
    for (const { element, value } of cells) {
      const cross = element.querySelector(".cross");
      cross.hidden = !isInside;
      cross.style.left = `${100 * across}%`;
      cross.style.top = `${100 * down}%`;
      fill(element.querySelector(".value"), isInside && value ? value(down, across) : "");
    }
  };
  const leave = () => {
    for (const { element } of cells) {
      element.querySelector(".cross").hidden = true;
      fill(element.querySelector(".value"), "");
    }
  };
  for (const { element } of cells) {
    element.addEventListener("mousemove", point);
    element.addEventListener("mouseleave", leave);
  }
}

/** A cell with a canvas. */
export function cell(size, label, onclick) {
  const canvas = sized(h("canvas"), size);
  const element = h("button.cell", { type: "button", "aria-label": label, onclick }, canvas, h("i.cross", { hidden: true }), h("span.value"));
  return { element, canvas };
}

/** The colours of a map from weak to strong. */
function legend(name) {
  const colours = coloursOf(name);
  const stops = Array.from({ length: 9 }, (_, i) => colours.slice(3 * Math.round((255 * i) / 8)).slice(0, 3).join(" "));
  return h("i.legend-bar", { style: { background: `linear-gradient(90deg, ${stops.map((stop) => `rgb(${stop})`).join(", ")})` } });
}

/** The mode for images. */
export class ImagesMode {
  constructor(state, closeup, look) {
    this.state = state;
    this.closeup = closeup;
    this.look = look;
    this.kind = select(state, "kind", "Maps");
    this.toolbar = [this.kind, ...look.controls];
    this.note = h("div.note");
    this.help = help(["maps", "typical", "dots", "colours"]);
    this.table = h("div.grid");
    this.element = h("div.mode", {}, this.note, h("div.scroll", {}, this.table));
    this.painter = new Painter();
  }

  async draw({ store, source, step, isCurrent }) {
    const event = await store.eventWith(source, step, this.state.get("kind"));
    if (!isCurrent()) return;
    if (event instanceof Error) throw event;
    const here = await store.event(source, step);
    this.look.update(event.header.sets);
    const set = chosenSet(event, this.state.get("kind"));
    if (!set) return void fill(this.table, h("p.empty", {}, "This event has no maps."));
    this.kind.setOptions(kindOptions(event, here), set.name);
    const pictures = await store.pictures(source, event, set);
    if (!isCurrent()) return;
    this.show(event, set, pictures, step);
  }

  /** Compute what the next step will show first, when there is time. */
  prepare(event) {
    const set = chosenSet(event, this.state.get("kind"));
    if (!set || !this.aspect) return;
    const columns = columnsOf(event, set, this.look, this.aspect);
    const ahead = (number) => {
      for (const column of columns) if (column.map(number)) column.plane(number);
      if (number < PREPARED) requestIdleCallback(() => ahead(number + 1));
    };
    requestIdleCallback(() => ahead(0));
  }

  show(event, set, pictures, step) {
    const aspect = aspectOf(event, set, pictures);
    this.aspect = aspect;
    const columns = columnsOf(event, set, this.look, aspect);
    const size = this.look.tile(aspect, columns.length + 1);
    const count = Math.max(pictures.length, ...columns.map((column) => column.count));
    const heads = ["image", ...shortHeads(columns)];
    const images = event.header.images[set.images];
    const stepOfMaps = event.header.maps_step ?? event.step;
    const when = stepOfMaps === step ? "this step" : `step ${stepText(stepOfMaps)} (step ${stepText(step)} has none of this kind)`;
    const where = set.source.startsWith("probe") ? `The same images at every step (probe)${stepOfMaps === step ? "" : `; maps of ${when}`}` : `Images of the training batch of ${when}`;
    fill(this.note, `${where}${images ? `, ${COLOURS[images.colours] || images.colours}` : ""}. ${(set.meaning[0] || "").toUpperCase()}${set.meaning.slice(1)}`, set.signed ? "." : [": weak ", legend(this.state.get("colors")), " strong."], this.help);
    this.table.style.gridTemplateColumns = `minmax(72px, max-content) repeat(${heads.length}, ${size.width}px)`;
    this.jobs = [];
    const items = Array.from({ length: count }, (_, number) => this.item(set, number, pictures, columns, aspect, heads));
    fill(
      this.table,
      h("div.head"),
      heads.map((name, number) => h("div.head", { title: number ? columns[number - 1].name : "" }, name)),
      items.map((item, number) => this.row(set, number, pictures[number], columns, size, items)),
    );
    this.painter.paint(this.jobs);
  }

  row(set, number, picture, columns, size, items) {
    const name = set.labels?.[number] ?? "";
    const open = () => this.closeup.open(items, number, this.state.number("opacity"));
    const first = cell(size, `Image ${number + 1} ${name}`, open);
    const cells = columns.map((column) => {
      const one = cell(size, `Image ${number + 1} ${name}, ${column.name}`, open);
      return { ...one, value: (down, across) => readout(column.map(number), set.signed, down, across) };
    });
    const paint = this.look.paint;
    const draw = () => {
      drawImage(first.canvas, picture);
      cells.forEach(({ canvas }, place) => paintCell(canvas, columns[place], number, picture, paint, set.signed));
    };
    this.jobs.push([first.element, draw]);
    linked([first, ...cells]);
    const caption = h("div.caption", {}, h("b", {}, name || `image ${number + 1}`));
    return [caption, first.element, cells.map(({ element }) => element)];
  }

  item(set, number, pictures, columns, aspect, heads) {
    const picture = pictures[number];
    const name = set.labels?.[number] ?? "";
    const paint = (column) => (canvas, opacity) => paintCell(canvas, column, number, picture, { ...this.look.paint, opacity }, set.signed);
    return {
      title: `Image ${number + 1}${name ? `: ${name}` : ""}`,
      aspect,
      thumbnail: (canvas) => drawImage(canvas, picture),
      facts: [
        ["Class", name || "not known"],
        ["Maps", set.meaning],
        ["Layers", columns.map((column) => column.name).join(", ")],
      ],
      views: [{ label: "image", draw: (canvas) => drawImage(canvas, picture) }, ...columns.map((column, place) => ({ label: heads[place + 1], draw: paint(column) }))],
    };
  }
}

/** Names of columns, without what all layers share. */
export function shortHeads(columns) {
  const layers = columns.filter(({ name }) => name !== COMBINED).map(({ name }) => name);
  const names = shortNames(layers);
  return columns.map(({ name }) => (name === COMBINED ? "all layers combined" : names[layers.indexOf(name)]));
}
