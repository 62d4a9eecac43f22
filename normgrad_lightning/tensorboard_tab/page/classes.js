// Classes: what each class is learned from, and what the check says of it.

import { select, slider, toggle } from "./controls.js";
import { fill, h, loss, percent, short, shortNames, stepText } from "./dom.js";
import { help, LIFT } from "./help.js";
import { Painter } from "./lazy.js";
import { mapped, scaled } from "./numbers.js";
import { drawImage, drawMap, drawNothing, greysOf, outline, sized, tileSize } from "./paint.js";

const MAP_NAMES = { combined: "all layers combined", last: "last layer" };
const BRIGHTEST = 4; // of a mean map, in units of its mean
const LARGEST_LIFT = 8;
const HOT = 3; // a lift that is printed bold
const CLASS_TERMS = ["patches", "strength", "typical", "check", "lift", "colours", "dots"];

/** The mode for classes. */
export class Classes {
  constructor(state, closeup) {
    this.state = state;
    this.closeup = closeup;
    this.map = select(state, "map", "Patches from");
    this.size = slider(state, "patch", "Size", { min: 48, max: 192, step: 12 });
    this.beside = toggle(state, "beside", "First and last step beside");
    this.order = select(state, "order", "Order", [["check", "by the check"], ["name", "as numbered"]]);
    this.toolbar = [this.map, this.beside, this.order, this.size];
    this.verdict = h("p.verdict", {});
    this.list = h("div.classes", {});
    this.note = h("div.note", {});
    this.help = help(CLASS_TERMS);
    this.element = h("div.mode", {}, this.verdict, this.note, this.list);
    this.painter = new Painter();
  }

  /** Decode what the next step will show. */
  prepare(event) {
    return spritesOf(event, this.state.get("map"));
  }

  async draw({ store, source, step, isCurrent }) {
    for (const control of [this.size, this.beside]) control.update();
    const steps = this.state.isOn("beside") ? [...new Set([source.steps[0], step, source.steps[source.steps.length - 1]])] : [step];
    const events = await Promise.all(steps.map((one) => store.event(source, one)));
    const event = events[steps.indexOf(step)];
    if (!isCurrent()) return;
    if (event instanceof Error) throw event;
    const names = [...new Set(event.header.classes.flatMap(({ patches }) => patches.map(({ map }) => map)))];
    this.map.setOptions(names.map((name) => [name, nameOfMap(name)]));
    const map = names.includes(this.state.get("map")) ? this.state.get("map") : names[0];
    const checks = new Map((event.header.check?.classes || []).map((one) => [one.name, one]));
    const classes = this.ordered(event.header.classes, checks);
    const columns = events.map((one, number) => ({ step: steps[number], event: one instanceof Error ? null : one }));
    const pictures = await Promise.all(columns.map(({ event: one }) => spritesOf(one, map)));
    if (!isCurrent()) return;
    this.showVerdict(event.header.check, step);
    const largest = Math.max(0.5, ...[...checks.values()].flatMap((one) => LOSSES.map(([key]) => (one[key] ? Math.max(one[key][0] + one[key][1], askedOf(one, key) || 0) : 0))));
    fill(this.note, map ? [`What each class is learned from: parts of its images around the place with the strongest training signal (${nameOfMap(map)}). A click shows the whole image.`, this.help] : "");
    this.jobs = [];
    const cards = classes.map((one) => {
      const rows = columns.map(({ step: at, event: of }, number) => ({ step: at, event: of, patches: patchesOf(of, one.name, map), sprite: pictures[number].get(one.name) }));
      return this.card(one, checks.get(one.name), largest, map, event, rows, step);
    });
    fill(this.list, cards.length ? cards : h("p.empty", {}, "This event has no classes. Patches come with the first batch after the views `patches` and `atlas` are on and images were recognised."));
    this.painter.paint(this.jobs);
  }

  ordered(classes, checks) {
    if (this.state.get("order") !== "check") return classes;
    const evidence = new Map(classes.map(({ name }) => [name, evidenceOf(checks.get(name))]));
    return [...classes].sort((a, b) => evidence.get(b.name) - evidence.get(a.name) || 0);
  }

  showVerdict(check, step) {
    if (!check) {
      this.verdict.className = "verdict";
      return void fill(this.verdict, "Nothing is checked at this step yet. The check begins at step 50, in a run of fewer than 500 steps at a tenth of them, where the loss is the cross-entropy of class scores; elsewhere with ", h("code", {}, "check=True"), ".");
    }
    const isSure = check.classes.some(({ sure }) => sure);
    this.verdict.className = `verdict${isSure ? " sure" : ""}`;
    const age = check.step === step || check.sentence?.includes(`step ${check.step}`) ? "" : ` Checked at step ${stepText(check.step)}.`;
    fill(this.verdict, h("strong", {}, check.sentence || "The check has nothing to say yet."), h("small", {}, age));
  }

  card(one, checked, largest, map, event, rows, step) {
    const isBeside = rows.length > 1;
    const count = rows.find((row) => row.step === step)?.patches;
    const about = count ? `${count.items.length} ${count.items.length === 1 ? "patch" : "patches"} of ${seenText(one)}` : "";
    return h(
      `section.class${checked?.sure ? ".sure" : ""}`,
      { "data-class": one.name, "aria-label": `Class ${one.name}` },
      h("header", {}, h("h2", {}, one.name), checked ? h(`span.badge${checked.sure ? "" : ".none"}`, {}, verdictOf(checked)) : null, h("small", {}, about)),
      h("div.facts", {}, checked ? checkOf(checked, largest, checked.sentence === event.header.check.sentence, opposite(one, event)) : null, isBeside ? null : this.atlas(one.name, map, event)),
      h(
        `div.rows${isBeside ? ".beside" : ""}`,
        {},
        checked && !isBeside ? this.proof(checked, event) : null,
        rows.map((row) => h("div.row", {}, isBeside ? [h(`h3${row.step === step ? ".now" : ""}`, {}, `step ${stepText(row.step)}`), this.atlas(one.name, map, row.event)] : null, this.patches(one, row, map, isBeside))),
      ),
    );
  }

  /** The check's pictures of one image: as it is, covered, pasted. */
  proof(checked, event) {
    if (!checked.pictures.length) return null;
    const items = checked.pictures.map(({ label, image }) => {
      const draw = (canvas) => event.picture(image).then((bitmap) => drawImage(canvas, bitmap));
      return { title: `${checked.name}: ${label}`, aspect: 1, thumbnail: draw, facts: [["Class", checked.name], ["Picture", label]], views: [{ label, draw }] };
    });
    const side = Math.round(1.5 * this.state.number("patch"));
    const open = (number) => async () => {
      const bitmaps = await Promise.all(checked.pictures.map(({ image }) => event.picture(image)));
      this.closeup.open(items.map((item, i) => ({ ...item, aspect: bitmaps[i] ? bitmaps[i].width / bitmaps[i].height : 1 })), number, 0.6);
    };
    return h(
      "div.proof",
      {},
      items.map((item, number) => {
        const canvas = h("canvas");
        event.picture(checked.pictures[number].image).then((bitmap) => drawImage(sized(canvas, tileSize(bitmap ? bitmap.width / bitmap.height : 1, side)), bitmap));
        return h("figure", {}, h("button.patch", { type: "button", "aria-label": item.title, onclick: open(number) }, sized(canvas, { width: side, height: side })), h("figcaption", {}, item.views[0].label));
      }),
    );
  }

  patches(one, { patches, sprite, event }, map, isBeside) {
    if (!patches) return h("p.empty", {}, "No patches at this step.");
    const [height, width] = patches.tile;
    const size = tileSize(width / height, isBeside ? Math.min(this.state.number("patch"), 72) : this.state.number("patch"));
    const pitch = width + ((8 - (width % 8)) % 8);
    const drawTile = (number) => (canvas) => drawImage(canvas, sprite, { left: number * pitch, top: 0, width, height });
    const items = patches.items.map((item, number) => this.item(one, item, number, patches, map, event, drawTile(number)));
    const canvases = patches.items.map(() => sized(h("canvas"), size));
    const holder = h(
      "div.patches",
      {},
      patches.items.map((item, number) => {
        const label = `${one.name}, patch ${number + 1}: ${short(item.strength, 1)} times the mean, step ${stepText(item.step)}`;
        return h("button.patch", { type: "button", "aria-label": label, title: `${short(item.strength, 1)} × mean`, onclick: () => this.open(items, number) }, canvases[number]);
      }),
    );
    this.jobs.push([holder, () => canvases.forEach((canvas, number) => drawTile(number)(canvas))]);
    return holder;
  }

  /** The mean map of a class at an event, and how it compares with all classes. */
  atlas(name, map, event) {
    const known = event?.header.classes.find((one) => one.name === name)?.atlas || [];
    const atlas = known.find((candidate) => candidate.map === map) || known[0];
    if (!atlas) return null;
    const tile = (map, change, colormap, label, title) => {
      const canvas = sized(h("canvas"), tileSize(map.width / map.height, 88));
      const paint = () => drawMap(canvas, mapped(map, change), new Uint8Array(canvas.width * canvas.height), { colormap, opacity: 1 }, false);
      this.jobs.push([canvas, paint]);
      return h("figure", { title }, canvas, h("figcaption", {}, label));
    };
    const [mean] = event.maps(atlas.mean);
    const [lift] = event.maps(atlas.lift);
    const bright = (value) => Math.min(Math.max(value / BRIGHTEST, 0), 1);
    const lifted = (value) => Math.min(Math.max(0.5 + Math.log(Math.max(value, 1e-6)) / (2 * Math.log(LARGEST_LIFT)), 0), 1);
    return h(
      "div.atlas",
      {},
      mean ? tile(mean, bright, "inferno", "mean map", "Where its images have their signal, on average") : null,
      lift ? tile(lift, lifted, "coolwarm", typeof atlas.spot === "number" ? h(atlas.spot >= HOT ? "b" : "span", {}, `lift: up to ${short(atlas.spot, 1)} ×`) : "lift", `${LIFT}. A mark at a fixed place is a red spot`) : null,
    );
  }

  item(one, patch, number, patches, map, event, thumbnail) {
    return {
      title: `${one.name}: patch ${number + 1} of ${patches.items.length}`,
      patch,
      map,
      event,
      thumbnail,
      facts: [
        ["Class", one.name],
        ["Map", nameOfMap(map)],
        ["Strength", `${short(patch.strength, 1)} times the mean of its map`],
        ["Seen at step", stepText(patch.step)],
        ["Patches", `the ${patches.items.length} strongest of ${seenText(one)}`],
      ],
    };
  }

  /** Decode the whole images, and show one of them. */
  async open(items, at) {
    const look = () => ({ colormap: this.state.get("colors") });
    const whole = await Promise.all(items.map(({ patch, event }) => (patch.image === null || patch.image === undefined ? null : event.picture(patch.image))));
    const ready = items.map((item, number) => {
      const bitmap = whole[number];
      const drawWhole = (canvas) => {
        if (bitmap) drawImage(canvas, bitmap);
        else item.thumbnail(canvas);
        if (bitmap) outline(canvas, item.patch.box);
      };
      const over = (map) => {
        let plane = null;
        return (canvas, opacity) => {
          plane ||= scaled([map], "robust", false)[0];
          drawMap(canvas, plane, greysOf(bitmap, canvas.width, canvas.height), { ...look(), opacity }, false);
          outline(canvas, item.patch.box);
        };
      };
      const maps = mapsOf(item).map(({ label, map }) => ({ label, draw: over(map) }));
      const views = [{ label: bitmap ? "the whole image" : "the whole image was not kept", draw: drawWhole }, ...maps];
      return { ...item, views, aspect: bitmap ? bitmap.width / bitmap.height : 1 };
    });
    this.closeup.open(ready, at, this.state.number("opacity"));
  }
}

/** How many images patches were chosen from, and at which steps these were seen. */
function seenText({ seen, steps }) {
  const [first, last] = (steps || []).map(stepText);
  return `${seen} ${seen === 1 ? "image" : "images"}${!steps ? "" : first === last ? `, step ${first}` : `, steps ${first} to ${last}`}`;
}

/** The map that a patch was found in, and those of the layers. */
function mapsOf({ event, patch, map }) {
  const layers = (patch.layers || []).filter(({ name }) => name !== map);
  const names = shortNames(layers.map(({ name }) => nameOfMap(name)));
  const found = [{ label: nameOfMap(map), maps: patch.map }, ...layers.map(({ maps }, number) => ({ label: names[number], maps }))];
  return found.map(({ label, maps }) => ({ label, map: event.maps(maps)[0] })).filter((one) => one.map);
}

function nameOfMap(name) {
  return MAP_NAMES[name] || name.replace(/^\d\d_/, "");
}

function patchesOf(event, name, map) {
  const found = event?.header.classes.find((one) => one.name === name);
  return found?.patches.find((one) => one.map === map) || null;
}

/** The sheets of patches of each class, decoded. */
async function spritesOf(event, map) {
  const rows = (event?.header.classes || []).map(({ name }) => [name, patchesOf(event, name, map)]).filter(([, row]) => row);
  return new Map(await Promise.all(rows.map(async ([name, row]) => [name, await event.picture(row.sprite)])));
}

const LOSSES = [
  ["plain", "as they are", "plain", "own"],
  ["covered", "the place covered", "measured", "own"],
  ["covered_control", "another place covered", "control", "own"],
  ["donors", "as they are", "plain", "others"],
  ["pasted", "the place pasted in", "measured", "others"],
  ["pasted_control", "another part pasted in", "control", "others"],
];

/** How much speaks for a class resting on one place: the smaller of what covering and pasting add to the loss. */
function evidenceOf(checked) {
  if (!checked) return -Infinity;
  if (checked.sure) return Infinity;
  const more = (key) => (checked[key] && checked[`${key}_control`] ? checked[key][0] - checked[`${key}_control`][0] : Infinity);
  const least = Math.min(more("covered"), more("pasted"));
  return least === Infinity ? -Infinity : least;
}

function verdictOf({ sure, verdict, region }) {
  return verdict || (sure ? `rests on ${region || "a small part of its images"}` : "not found to rest on one small place");
}

/** The other class of two, if the check has found that one alone to rest on a place; else null. */
function opposite(one, { header }) {
  const sure = (header.check?.classes || []).filter((checked) => checked.sure);
  return header.classes.length === 2 && sure.length === 1 && sure[0].name !== one.name ? sure[0].name : null;
}

/** The loss that the rule asks for, of those that it asks one for: what is asked above the control. */
function askedOf(checked, key) {
  const control = checked[`${key}_control`];
  return control && typeof checked.asked === "number" ? control[0] + checked.asked : null;
}

/** The losses of a class as bars, and what else the check says of it. */
function checkOf(checked, largest, isSaid, other) {
  const group = (whose, title) => {
    const bars = LOSSES.filter(([key, , , of]) => of === whose && checked[key]);
    return bars.length ? [h("span.head", {}, title), bars.map(([key, label, role]) => barOf(checked[key], label, role, largest, askedOf(checked, key)))] : null;
  };
  const control = typeof checked.share_control === "number" ? `, ${percent(checked.share_control)} with another part` : "";
  return h(
    "div.check",
    { role: "group", "aria-label": `Check of ${checked.name}` },
    checked.sentence && !isSaid ? h("p", {}, checked.sentence) : null,
    h("div.bars", {}, group("own", `loss of images of ${checked.name}`), group("others", "loss of other images")),
    typeof checked.share === "number"
      ? h("p.share", {}, h(checked.sure ? "strong" : "span", {}, percent(checked.share)), ` of other images are called ${checked.name} with the place pasted in${control}`)
      : null,
    other ? h("p", {}, `Of two classes, this one may be told by the absence of what ${other} rests on.`) : null,
    typeof checked.asked === "number" ? h("small", {}, h("i.mark"), ` both must reach the mark, ${loss(checked.asked)} above the other place`) : null,
    h("small", {}, `checked on ${checked.images} images at step ${stepText(checked.step)}${checked.area ? ` · the place: ${percent(checked.area).replace(" ", "\u00a0")} of each image` : ""}`),
  );
}

function barOf([value, error], label, role, largest, asked) {
  const at = (length) => `${Math.min(Math.max((100 * length) / largest, 0), 100)}%`;
  const whisker = { left: at(value - error), width: `calc(${at(value + error)} - ${at(value - error)})` };
  return [
    h("span.label", {}, label),
    h("span.bar", { title: `${loss(value)} ± ${loss(error)}` }, h(`i.${role}`, { style: { width: at(value) } }), error ? h("i.error", { style: whisker }) : null, asked === null ? null : h("i.asked", { style: { left: at(asked) }, title: `the rule asks for ${loss(asked)}` })),
    h("span.value", {}, loss(value)),
  ];
}
