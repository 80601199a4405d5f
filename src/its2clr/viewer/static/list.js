// The list of bags: searched, sorted and paged by the server; walked with mouse or keys.
import { ask } from "./api.js";
import { colour } from "./colours.js";
import { afterPause, byId, make, number } from "./dom.js";
import { Thumbnails } from "./thumbnails.js";

const NAMES = { 0: "negative", 1: "positive", null: "no label" };

export class BagList {
  /** `choose(bag number)` is called when a bag is to be opened, `fail(error)` when something went wrong. */
  constructor(choose, fail) {
    this.choose = choose;
    this.fail = fail;
    this.model = null;
    this.page = 0;
    this.total = 0;
    this.rows = [];
    this.active = -1;
    this.opened = null;
    this.asked = 0;
    this.loading = null;
    this.box = byId("bags");
    this.thumbnails = new Thumbnails(this.box);
    const again = () => this.load(0).catch(fail);
    byId("search").addEventListener("input", afterPause(150, again));
    for (const id of ["split", "sort", "errors"]) byId(id).addEventListener("change", again);
    byId("direction").addEventListener("click", () => this.turn());
    byId("previous-page").addEventListener("click", () => this.load(this.page - 1).catch(fail));
    byId("next-page").addEventListener("click", () => this.load(this.page + 1).catch(fail));
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") this.box.focus();
    });
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-place]");
      if (row) this.open(Number(row.dataset.place));
    });
  }

  turn() {
    this.setDescending(byId("direction").getAttribute("aria-pressed") !== "true");
    this.load(0).catch(this.fail);
  }

  setDescending(descending) {
    byId("direction").setAttribute("aria-pressed", descending);
    byId("direction").textContent = descending ? "↓" : "↑";
  }

  load(page) {
    this.loading = this.fetch(page);
    return this.loading;
  }

  async fetch(page) {
    const asked = (this.asked += 1);
    this.box.setAttribute("aria-busy", "true");
    const found = await ask("api/bags", {
      model: this.model,
      split: byId("split").value,
      query: byId("search").value,
      sort: byId("sort").value,
      descending: byId("direction").getAttribute("aria-pressed") === "true",
      errors: byId("errors").checked,
      page,
    });
    if (asked !== this.asked) return;
    this.page = found.page;
    this.total = found.total;
    this.size = found.page_size;
    this.rows = found.rows;
    this.box.setAttribute("aria-busy", "false");
    this.show();
  }

  show() {
    this.box.replaceChildren(...this.rows.map((row, place) => this.row(row, place)));
    if (!this.rows.length) this.box.append(make("p", { className: "empty" }, "No bag matches."));
    this.box.scrollTop = 0;
    this.thumbnails.watch(this.box.querySelectorAll("img"));
    const first = this.page * this.size;
    const range = this.total ? `${first + 1}–${first + this.rows.length} of ${this.total.toLocaleString("en")}` : "0";
    byId("range").textContent = `${range} bags`;
    byId("previous-page").disabled = this.page === 0;
    byId("next-page").disabled = first + this.rows.length >= this.total;
    this.activate(this.rows.findIndex((row) => row.n === this.opened));
  }

  row(row, place) {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${Math.round(100 * (row.probability ?? 0))}%`;
    bar.style.backgroundColor = colour(row.probability ?? 0);
    const wrong = row.error ? make("span", { className: "wrong" }, "wrong") : null;
    const label = make("span", { className: `label ${NAMES[row.label]}` }, NAMES[row.label]);
    const item = make(
      "div",
      {
        className: row.error ? "bag error" : "bag",
        id: `bag-${place}`,
        role: "option",
        "aria-selected": row.n === this.opened,
        "data-place": place,
      },
      make("img", { className: "thumbnail", alt: "", "data-src": `api/bags/${row.n}/thumbnail` }),
      make("span", { className: "name", title: row.bag_id }, row.bag_id),
      make("span", { className: "score" }, number(row.probability)),
      make("span", { className: "track" }, bar),
      make("span", { className: "about" }, `${row.split} · `, label, ` · ${row.n_instances.toLocaleString("en")} tiles`, wrong),
    );
    return item;
  }

  /** Make a row the one that keys act on. */
  activate(place) {
    this.active = place;
    for (const item of this.box.querySelectorAll(".active")) item.classList.remove("active");
    const item = place >= 0 ? byId(`bag-${place}`) : null;
    if (!item) return this.box.removeAttribute("aria-activedescendant");
    item.classList.add("active");
    item.scrollIntoView({ block: "nearest" });
    return this.box.setAttribute("aria-activedescendant", item.id);
  }

  open(place) {
    if (!this.rows[place]) return;
    this.activate(place);
    this.choose(this.rows[place].n);
  }

  /** Show which bag is open; it need not be on this page. */
  mark(bag) {
    this.opened = bag;
    this.rows.forEach((row, place) => byId(`bag-${place}`)?.setAttribute("aria-selected", row.n === bag));
    const place = this.rows.findIndex((row) => row.n === bag);
    if (place >= 0) this.activate(place);
  }

  /** Move by rows of the list as it was last asked for, over the edge of the page; opens the bag if asked to. */
  async move(by, { open = false } = {}) {
    await this.loading?.catch(() => null); // said already
    let place = this.active + by;
    if (this.active < 0) place = by > 0 ? 0 : this.rows.length - 1;
    if (place < 0 && this.page > 0) {
      await this.load(this.page - 1);
      place = this.rows.length - 1;
    } else if (place >= this.rows.length && (this.page + 1) * this.size < this.total) {
      await this.load(this.page + 1);
      place = 0;
    }
    place = Math.max(0, Math.min(this.rows.length - 1, place));
    if (open) this.open(place);
    else this.activate(place);
  }

  onKey(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -this.active, End: this.rows.length };
    if (event.key in moves) this.move(moves[event.key]).catch(this.fail);
    else if (event.key === "Enter" || event.key === " ") this.open(this.active);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
