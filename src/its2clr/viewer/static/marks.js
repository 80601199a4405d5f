// What a person marks: a tool is chosen, a click marks a tile, a drag around something marks an area; saved at once.
import { ask, send } from "./api.js";
import { byId } from "./dom.js";

const TOOLS = { "mark-positive": "positive", "mark-negative": "negative", "mark-none": "none" };
const SMALLEST = 6; // pixels of the page: a drag below this is a shaky click

export class Marking {
  /** `overlay` draws the marks, `redraw()` is called when they change, `fail(error)` when something went wrong. */
  constructor(overlay, redraw, fail) {
    this.overlay = overlay;
    this.redraw = redraw;
    this.fail = fail;
    this.bag = null;
    this.tool = null;
    this.saving = Promise.resolve();
    for (const [id, tool] of Object.entries(TOOLS)) byId(id).addEventListener("click", () => this.take(tool));
    byId("mark-undo").addEventListener("click", () => this.undo());
    this.say();
  }

  /** Show the marks of a bag that was opened. */
  async open(bag) {
    this.bag = bag;
    this.overlay.marked = null;
    const found = await ask(`api/bags/${bag.n}/marks`);
    if (bag === this.bag) this.show(found);
  }

  /** Take a tool, or put it away if it is taken already; null: put it away. */
  take(tool) {
    this.tool = tool === this.tool ? null : tool;
    for (const [id, one] of Object.entries(TOOLS)) byId(id).setAttribute("aria-pressed", one === this.tool);
    byId("stage").classList.toggle("marking", this.tool !== null);
    this.say();
  }

  markInstance(instance) {
    if (instance !== null && this.tool) this.save({ sense: this.tool, instance });
  }

  /** An area was drawn: [x, y] at level 0; `scale` is pixels of the page per level-0 pixel. */
  markOutline(outline, scale) {
    const wide = (axis) => Math.max(...outline.map((p) => p[axis])) - Math.min(...outline.map((p) => p[axis]));
    if (outline.length > 2 && Math.max(wide(0), wide(1)) * scale >= SMALLEST) this.save({ sense: this.tool, outline });
  }

  undo() {
    if (this.overlay.marked?.undo) this.save(null);
  }

  /** Marks are saved one after the other, in the order in which they were made. */
  save(mark) {
    const { bag } = this;
    const address = `api/bags/${bag.n}/marks`;
    const one = () => (mark ? send("POST", address, mark) : send("DELETE", `${address}/last`));
    this.saving = this.saving.then(one).then((found) => {
      if (bag === this.bag) this.show(found);
    }).catch(this.fail);
  }

  show(found) {
    this.overlay.marked = found;
    byId("mark-undo").disabled = !found.undo;
    this.say();
    this.redraw();
  }

  /** How much is marked, what the tool does, and what one should know about marks in this bag. */
  say() {
    const found = this.overlay.marked;
    const of = (label) => found.instances.filter((one) => one === label).length.toLocaleString("en");
    const any = found && (found.positive.length || found.negative.length);
    byId("mark-count").textContent = any ? `Marked tiles: ${of(1)} positive, ${of(0)} negative.` : "";
    byId("mark-count").title = found?.file ?? "";
    const sense = { positive: "as positive", negative: "as negative", none: "as not marked" }[this.tool];
    byId("mark-hint").textContent = this.tool ? `Click a tile, or draw around an area, to mark it ${sense}.` : "";
    byId("mark-note").textContent = this.tool || any ? found?.note ?? "" : "";
  }
}
