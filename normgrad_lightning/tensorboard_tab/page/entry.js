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
  if (isFramed) followTheme(window.parent.document.body);
  style.addEventListener("load", () => start(document.body, new ServedData(address), isFramed ? window.parent : window, isFramed ? "normgrad" : ""));
}

/** Be dark when TensorBoard is, whatever the system says. */
function followTheme(body) {
  const follow = () => (document.documentElement.dataset.theme = body.classList.contains("dark-mode") ? "dark" : "light");
  new MutationObserver(follow).observe(body, { attributes: true, attributeFilter: ["class"] });
  follow();
}
