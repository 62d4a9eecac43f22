// What the words on the page mean, behind a question mark.

import { h } from "./dom.js";

export const LIFT = "Lift: the mean map of a class divided by the mean map of the other classes";

const TERMS = {
  patches: ["24 patches of 113 images", "the strongest 24, of the images that were read at these steps. If few images came since the last event, those of up to two events before count, too."],
  strength: ["Strength", "how many times the mean of its map the strongest place has, after the typical map was removed."],
  typical: ["Typical map removed", "what is the same in all images of a layer, as the dots of strides and the dark edges of padding, is divided out."],
  check: ["The check", "covers the strongest place of a class's images, and pastes it into images of other classes. A class is named if both raise the loss by as much as the mark asks, and surely so. All bars of the page have one scale."],
  lift: ["Lift", `${LIFT.slice(6)}: 2 × is twice the share of the training signal. A few images count less.`],
  maps: ["Maps", "bright: the weights learn from this place, in this step. Each image has its own scale, unless that is shared."],
  colours: ["True colours", "the normalisation of the images is undone. Stretched: it is not known, so each image is brought to its full range."],
  dots: ["Dots on a lattice", "that are the same in all images come from the strides of the network, not from the images."],
};

/** A question mark that opens what these terms mean. */
export function help(terms) {
  return h("details.help", {}, h("summary", { "aria-label": "What the words mean" }, "?"), h("dl", {}, terms.map((term) => [h("dt", {}, TERMS[term][0]), h("dd", {}, TERMS[term][1])])));
}
