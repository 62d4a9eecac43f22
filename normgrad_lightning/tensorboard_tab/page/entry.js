// Where TensorBoard starts the page, in a frame of its own.

import { start } from "./app.js";
import { ServedData } from "./data.js";

/** Show the tab. */
export function render() {
  const address = new URL("./", import.meta.url).href;
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = `${address}style.css`;
  document.head.append(style);
  document.title = "NormGrad";
  document.documentElement.lang = "en";
  const isFramed = window.parent !== window;
  style.addEventListener("load", () => start(document.body, new ServedData(address), isFramed ? window.parent : window, isFramed ? "normgrad" : ""));
}
