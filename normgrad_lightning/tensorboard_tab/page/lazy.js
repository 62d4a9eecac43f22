// Painting what is on screen at once, and the rest when it is scrolled to.

const MARGIN = 300; // pixels above and below the screen that are painted a moment later

/** Paints elements of one list; the next list replaces it. */
export class Painter {
  constructor() {
    this.waiting = new Map();
    this.observer = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => this.paintNow(entry.target)), {
      rootMargin: `${MARGIN}px`,
    });
  }

  /** @param {Array<[Element, function()]>} jobs - elements of the page, and what paints each. */
  paint(jobs) {
    this.observer.disconnect();
    this.waiting = new Map(jobs);
    const isOnScreen = ({ top, bottom }) => top < window.innerHeight && bottom > 0;
    const seen = jobs.filter(([element]) => isOnScreen(element.getBoundingClientRect()));
    for (const [element] of seen) this.paintNow(element);
    for (const element of this.waiting.keys()) this.observer.observe(element);
  }

  paintNow(element) {
    const paint = this.waiting.get(element);
    this.waiting.delete(element);
    this.observer.unobserve(element);
    if (paint) paint();
  }
}
