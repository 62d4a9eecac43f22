// What is chosen on the page. All of it stands in the address, so that a view can be sent to somebody.

const DEFAULTS = {
  mode: "classes",
  run: "",
  step: "last",
  // Classes
  map: "combined",
  beside: "0",
  patch: "96",
  order: "check",
  // Images
  kind: "",
  opacity: "0.6",
  colors: "inferno",
  scale: "robust",
  typical: "0",
  tile: "0",
  // Compare
  by: "step",
  step2: "first",
  run2: "",
  kind2: "",
  layer: "combined",
};

const BOUNDS = { patch: [48, 192], opacity: [0, 1], tile: [0, 400] };
const PAUSE = 100; // milliseconds without a change, before the address is written: browsers bound how often it may be
const PREFIX = "p.normgrad."; // TensorBoard's, for what a plugin keeps in the address

/** The choices. `onchange` is called after each change. */
export class State {
  /**
   * @param {Window} frame - the window whose address keeps the choices.
   * @param {string} tab - what TensorBoard's address begins with for this tab; empty in a report.
   */
  constructor(frame, tab) {
    this.frame = frame;
    this.tab = tab;
    this.onchange = () => {};
    this.values = { ...DEFAULTS, ...this.read() };
    frame.addEventListener("hashchange", () => {
      this.values = { ...DEFAULTS, ...this.read() };
      this.onchange();
    });
  }

  get(name) {
    return this.values[name];
  }

  number(name) {
    const value = Number(this.values[name]);
    const [least, most] = BOUNDS[name];
    return Number.isFinite(value) ? Math.min(Math.max(value, least), most) : Number(DEFAULTS[name]);
  }

  isOn(name) {
    return this.values[name] === "1";
  }

  set(changes) {
    for (const [name, value] of Object.entries(changes)) this.values[name] = String(value);
    clearTimeout(this.writing);
    this.writing = setTimeout(() => this.write(), PAUSE);
    this.onchange();
  }

  read() {
    const found = {};
    for (const piece of this.frame.location.hash.slice(1).split("&")) {
      const [key, value = ""] = piece.split("=");
      const name = key.startsWith(PREFIX) ? key.slice(PREFIX.length) : key;
      try {
        if (Object.hasOwn(DEFAULTS, name) && value) found[name] = decodeURIComponent(value);
      } catch {
        // not an address of ours
      }
    }
    return found;
  }

  write() {
    const kept = this.frame.location.hash
      .slice(1)
      .split("&")
      .filter((piece) => this.tab && piece && !piece.startsWith(PREFIX));
    const ours = Object.entries(this.values)
      .filter(([name, value]) => value !== DEFAULTS[name])
      .map(([name, value]) => `${this.tab ? PREFIX : ""}${name}=${encodeURIComponent(value)}`);
    try {
      const address = new URL(this.frame.location.href); // in full: the page's base is another address
      address.hash = [...(kept.length || !this.tab ? kept : [this.tab]), ...ours].join("&");
      this.frame.history.replaceState(this.frame.history.state, "", address.href);
    } catch {
      // a page inside a notebook has no address
    }
  }
}
