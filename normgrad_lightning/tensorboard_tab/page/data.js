// Where the page gets its data: from TensorBoard, or from the report that it is part of.

import { decodeEvent } from "./decode.js";

const PROBE = "probe_order0"; // the maps to show unless others are chosen
const BACK = 6; // events to load in search of maps that an event does not have
const KEPT_BYTES = 32 * 2 ** 20; // of blobs; decoded they take a few times as much

/** What TensorBoard serves below an address. */
export class ServedData {
  constructor(address) {
    this.address = address;
    this.isLive = true;
  }

  index() {
    return this.ask("index", {}).then((answer) => answer.json());
  }

  curves(run, tag) {
    return this.ask("curves", { run, tag }).then((answer) => answer.json());
  }

  blob(run, tag, step) {
    return this.ask("event", { run, tag, step }).then((answer) => answer.arrayBuffer());
  }

  async ask(route, query) {
    const answer = await fetch(`${this.address}${route}?${new URLSearchParams(query)}`);
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 500) || `TensorBoard answered ${answer.status}.`);
    return answer;
  }
}

/** What a report holds. */
export class EmbeddedData {
  constructor(content) {
    this.content = content;
    this.isLive = false;
  }

  async index() {
    return this.content.index;
  }

  async curves(run, tag) {
    return (this.content.curves[run] || {})[tag] || {};
  }

  async blob(run, tag, step) {
    const text = ((this.content.blobs[run] || {})[tag] || {})[step];
    if (text === undefined) throw new Error("The report has no event of this step.");
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  }
}

/** Decoded events and curves; the events that were used least recently are dropped. */
export class Store {
  constructor(data) {
    this.data = data;
    this.events = new Map();
    this.setsOf = new Map();
    this.knownCurves = new Map();
  }

  /** A promise of an event, decoded, or of an Error that says why there is none. */
  event(source, step) {
    const time = source.times.get(step);
    const key = JSON.stringify([source.run, source.tag, step, time]);
    const known = this.events.get(key);
    if (known) {
      this.events.delete(key);
      this.events.set(key, known);
      return known.promise;
    }
    const entry = { size: 0 };
    entry.promise = this.data
      .blob(source.run, source.tag, step)
      .then((buffer) => {
        const event = decodeEvent(buffer);
        entry.size = buffer.byteLength;
        this.dropOld();
        this.setsAt(source).set(step, (event.header?.sets || []).map(({ name }) => name));
        return event;
      })
      .catch((error) => {
        this.events.delete(key); // the next time may be better
        return error;
      });
    this.events.set(key, entry);
    return entry.promise;
  }

  /**
   * A promise of the event to show maps of: that of a step or, if it does not have them, the last before it that does.
   * A probe may come at fewer events than the maps of the training batch.
   */
  async eventWith(source, step, name) {
    const [event] = await Promise.all([this.event(source, step), this.event(source, source.steps[0])]);
    const known = this.setsAt(source);
    const all = [...known.values()].flat();
    const wanted = all.includes(name) ? name : PROBE;
    if (event instanceof Error || !all.includes(wanted)) return event;
    let left = BACK;
    for (let at = source.steps.indexOf(step); at >= 0 && left > 0; at--) {
      const earlier = source.steps[at];
      if (!known.has(earlier)) left--;
      else if (!known.get(earlier).includes(wanted)) continue;
      const one = await this.event(source, earlier);
      if (known.get(earlier)?.includes(wanted)) return one;
    }
    return event;
  }

  /** The names of the sets of maps of each event that was loaded, by step. */
  setsAt({ id }) {
    if (!this.setsOf.has(id)) this.setsOf.set(id, new Map());
    return this.setsOf.get(id);
  }

  dropOld() {
    let total = 0;
    for (const { size } of this.events.values()) total += size;
    for (const [key, { size }] of this.events) {
      if (total <= KEPT_BYTES || this.events.size <= 4) return;
      this.events.delete(key);
      total -= size;
    }
  }

  /** What maps are of: the bytes of each JPEG, and a promise of its picture. */
  async jpegs(source, event, set) {
    const images = event.header.images[set.images];
    if (!images) return [];
    const owner = images.jpegs ? event : await this.event(source, images.stored);
    if (owner instanceof Error) return [];
    const stored = images.jpegs ? images : owner.header.images.find((one) => one.hash === images.hash && one.jpegs);
    return (stored?.jpegs || []).map((part) => ({ bytes: owner.parts[part], picture: () => owner.picture(part) }));
  }

  /** The pictures that maps are of; null where one cannot be decoded. */
  async pictures(source, event, set) {
    return Promise.all((await this.jpegs(source, event, set)).map(({ picture }) => picture()));
  }

  /** A promise of the curves of a run, by tag. They are asked for again when the run has a new event. */
  curves(source) {
    const key = JSON.stringify([source.run, source.tag]);
    const known = this.knownCurves.get(key);
    if (known && known.version === source.version) return known.promise;
    const promise = this.data.curves(source.run, source.tag).catch(() => ({}));
    this.knownCurves.set(key, { version: source.version, promise });
    return promise;
  }
}

/** The run that is wanted, by its id or name; else the one that was on screen; else the newest. */
export function chosenSource(sources, wanted, shown) {
  const found = (key, value) => sources.find((one) => one[key] === value);
  const newest = () => sources.reduce((best, one) => (one.time > best.time ? one : best), sources[0]);
  return found("id", wanted) || found("run", wanted) || found("id", shown) || newest();
}

/** The runs of an index: each with its events' steps in order. */
export function sourcesOf(index) {
  const count = new Map();
  for (const { run } of index.runs) count.set(run, (count.get(run) || 0) + 1);
  return index.runs.map(({ run, tag, events }) => ({
    id: JSON.stringify([run, tag]),
    run,
    tag,
    group: tag.replace(/\/tab$/, ""),
    name: (run === "." ? "this folder" : run) + (count.get(run) > 1 ? ` · ${tag.replace(/\/tab$/, "")}` : ""),
    steps: events.map(([step]) => step),
    times: new Map(events),
    time: Math.max(...events.map(([, time]) => time)),
    version: JSON.stringify(events[events.length - 1]),
    metrics: index.metrics[run] || {},
  }));
}
