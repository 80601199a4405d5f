// In a narrow window, one of three parts is shown at a time: the bags, the picture, the details.
import { byId } from "./dom.js";

const PANES = ["bags", "picture", "details"];

export function showPane(name) {
  document.body.dataset.pane = name;
  for (const pane of PANES) byId(`pane-${pane}`).setAttribute("aria-pressed", pane === name);
}

export function connectPanes() {
  for (const pane of PANES) byId(`pane-${pane}`).addEventListener("click", () => showPane(pane));
  byId("menu").addEventListener("click", () => {
    const open = document.querySelector("header").classList.toggle("open");
    byId("menu").setAttribute("aria-expanded", open);
  });
}
