// The page as a whole: which bag, model, round and instance is shown; the parts are told when that changes.
import { ask } from "./api.js";
import { drawScale } from "./colours.js";
import { Details } from "./details.js";
import { byId, make, number } from "./dom.js";
import { listen } from "./keys.js";
import { BagList } from "./list.js";
import { Marking } from "./marks.js";
import { drawMark, Overlay } from "./overlay.js";
import { connectPanes, showPane } from "./panes.js";
import { RoundSlider } from "./rounds.js";
import { Slide } from "./slide.js";

const state = { bag: null, model: null, instance: null, opening: 0 };
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SENSES = { 1: "positive", 2: "negative", 3: "none" };
const NAMES = ["negative", "positive"];
const held = new Map(); // scores of the open bag, by model or round
let run, list, slide, overlay, details, rounds, marking;

function fail(error) {
  byId("problem-text").textContent = error.message;
  byId("problem").hidden = false;
}

function address() {
  const known = { bag: state.bag?.n, instance: state.instance, model: state.model, round: rounds.epoch() };
  const parts = Object.entries(known).filter(([, value]) => value !== null && value !== undefined);
  history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
}

/** Scores of the open bag as they are to be shown now: of the round, or of the model. */
async function scores() {
  const round = rounds.epoch();
  const key = round === null ? `model ${state.model}` : `round ${round}`;
  const bag = state.bag.n;
  if (!held.has(key)) {
    const asked = ask(`api/bags/${bag}/scores`, round === null ? { model: state.model } : { round });
    asked.catch(() => held.delete(key));
    held.set(key, asked);
  }
  return held.get(key);
}

async function openBag(number_, instance = null) {
  const opening = (state.opening += 1);
  byId("stage").setAttribute("aria-busy", "true");
  byId("problem").hidden = true;
  list.mark(number_);
  try {
    const bag = await ask(`api/bags/${number_}`);
    if (opening !== state.opening) return;
    held.clear();
    Object.assign(state, { bag, instance: null });
    rounds.allow(bag.rounds.available, bag.rounds.reason);
    const found = await scores();
    if (opening !== state.opening) return;
    overlay.clear();
    await slide.open(bag);
    if (opening !== state.opening) return;
    overlay.setBag(bag);
    overlay.setScores(found);
    marking.open(bag).catch(fail);
    if (bag.truth) annotate(bag).catch(fail);
    showPane("picture");
    byId("welcome").hidden = true;
    byId("ruler").hidden = false;
    byId("legend").classList.remove("waiting");
    heading();
    redraw();
    choose(instance, { near: instance !== null });
  } catch (error) {
    if (opening === state.opening) fail(error);
  } finally {
    if (opening === state.opening) byId("stage").setAttribute("aria-busy", "false");
  }
}

/** Ground truth as the person drew it, where that is known. */
async function annotate(bag) {
  const found = await ask(`api/bags/${bag.n}/annotation`);
  if (bag !== state.bag) return;
  overlay.annotation = found.polygons;
  byId("truth-name").textContent = found.polygons ? "annotation" : "ground truth (tiles)";
  byId("truth-name").title = found.problem;
  redraw();
}

/** A click on the picture: marks the instance while a tool is taken, else chooses it. */
function pick(instance) {
  if (marking.tool) marking.markInstance(instance);
  else choose(instance);
}

function choose(instance, { near = false } = {}) {
  if (!state.bag) return;
  const known = Number.isInteger(instance) && instance >= 0 && instance < state.bag.n_instances;
  state.instance = overlay.chosen = known ? instance : null;
  if (known) {
    details.showInstance(state.bag, instance, state.model).catch(fail);
    if (near) slide.show(instance);
  } else {
    const { bag } = state;
    scores().then((found) => {
      if (bag === state.bag && state.instance === null) details.showBag(bag, found, state.model, shownName());
    }).catch(fail);
  }
  slide.draw();
  address();
}

/** Something about what is shown changed: round or model. */
async function rescore({ again = false } = {}) {
  if (!state.bag) return;
  const { bag, model } = state;
  const epoch = rounds.epoch();
  try {
    const found = await scores();
    if (bag !== state.bag || model !== state.model || epoch !== rounds.epoch()) return;
    overlay.setScores(found);
    heading();
    redraw();
    address();
    if (again || state.instance === null) choose(state.instance);
  } catch (error) {
    fail(error);
  }
}

function heading() {
  const { bag } = state;
  const model = run.models.find((one) => one.key === state.model);
  const probability = bag.probabilities[state.model];
  const called = probability >= model.bag_threshold;
  const right = bag.label === null || called === (bag.label === 1);
  const verdict = probability === null ? "not scored" : `${number(probability)}, called ${called ? "positive" : "negative"}`;
  byId("heading").replaceChildren(
    make("h1", { title: bag.bag_id }, bag.bag_id),
    make("span", { className: "badge" }, bag.split),
    ...(bag.label === null ? [] : [make("span", { className: `badge ${NAMES[bag.label]}` }, `label ${NAMES[bag.label]}`)]),
    make("span", { className: right ? "badge" : "badge wrong" }, `${model.title}: ${verdict}${right ? "" : ", wrong"}`),
  );
}

/** Whose instance probabilities are shown. */
function shownName() {
  const round = rounds.epoch();
  return round === null ? run.models.find((one) => one.key === state.model).title : `round after epoch ${round}`;
}

function redraw() {
  overlay.threshold = Number(byId("threshold").value);
  overlay.showHeat = byId("show-heat").checked;
  overlay.asOutline = byId("show-outline").checked;
  byId("opacity").disabled = overlay.asOutline;
  byId("outline-key").hidden = !(overlay.showHeat && overlay.asOutline);
  overlay.showTruth = byId("show-truth").checked;
  overlay.showLabels = byId("show-labels").checked;
  byId("heat").style.opacity = byId("opacity").value;
  byId("opacity-text").textContent = `${Math.round(100 * byId("opacity").value)}%`;
  byId("threshold-text").textContent = number(overlay.threshold, 2);
  drawScale(byId("scale"), overlay.threshold);
  if (!state.bag) return;
  const round = rounds.epoch();
  byId("shown").textContent = shownName();
  const count = `${overlay.shown().toLocaleString("en")} of ${state.bag.n_instances.toLocaleString("en")}`;
  byId("count").textContent = `${count} instances at ≥ ${number(overlay.threshold, 2)}`;
  byId("truth-key").hidden = !(overlay.showTruth && (state.bag.truth?.includes(1) || overlay.annotation?.length));
  const marked = round !== null && state.bag.label === 1;
  byId("label-keys").hidden = !marked || !overlay.showLabels;
  byId("no-labels").hidden = marked || !run.rounds.length;
  byId("no-labels").textContent = round === null
    ? "Pseudo labels are shown in the rounds, for training bags."
    : "Negative bag: all its instances are used as negatives.";
  if (round !== null) countLabels(overlay.scores);
  slide.draw();
}

function countLabels({ pseudo_label: labels, selected }) {
  const of = (test) => selected.filter((value, n) => test(value, labels[n])).length.toLocaleString("en");
  byId("count-positive").textContent = of((value) => value > 0);
  byId("count-waiting").textContent = of((value, label) => value === 0 && label === 1);
  byId("count-negative").textContent = of((value) => value < 0);
}

function drawKeys() {
  for (const canvas of document.querySelectorAll("canvas[data-mark]")) {
    drawMark(canvas.getContext("2d"), 10, 10, 7, Number(canvas.dataset.mark), 1);
  }
}

function toggle(id) {
  byId(id).checked = !byId(id).checked;
  redraw();
}

function slideBy(id, by) {
  byId(id).value = Number(byId(id).value) + by;
  redraw();
}

/** The next instance from the highest score down. */
function walk(by) {
  if (!overlay.scores) return;
  const descending = [...overlay.order].reverse();
  const place = state.instance === null ? (by > 0 ? 0 : descending.length - 1) : descending.indexOf(state.instance) + by;
  choose(descending[Math.max(0, Math.min(descending.length - 1, place))], { near: true });
}

function nextModel() {
  const keys = run.models.map((one) => one.key);
  byId("model").value = keys[(keys.indexOf(state.model) + 1) % keys.length];
  setModel();
}

function setModel() {
  state.model = list.model = byId("model").value;
  setThreshold();
  list.load(list.page).catch(fail);
  rescore({ again: true });
}

/** The model's own threshold for instances; the slider can be moved from there. */
function setThreshold() {
  byId("threshold").value = run.models.find((one) => one.key === state.model).instance_threshold;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("its2clr-theme", theme);
  } catch {
    // without storage the choice lasts as long as the page
  }
}

function turnTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  setTheme(dark ? "light" : "dark");
}

function help() {
  const box = byId("help");
  if (box.open) box.close();
  else box.showModal();
}

function connect() {
  byId("model").addEventListener("change", setModel);
  connectPanes();
  const shown = ["opacity", "threshold", "show-heat", "show-outline", "show-truth", "show-labels"];
  for (const id of shown) byId(id).addEventListener("input", redraw);
  byId("zoom-in").addEventListener("click", () => slide.zoom(1.6));
  byId("zoom-out").addEventListener("click", () => slide.zoom(1 / 1.6));
  byId("fit").addEventListener("click", () => slide.home());
  byId("theme").addEventListener("click", turnTheme);
  byId("help-button").addEventListener("click", help);
  byId("help-close").addEventListener("click", help);
  byId("problem-close").addEventListener("click", () => {
    byId("problem").hidden = true;
  });
  const move = (by) => list.move(by, { open: true }).catch(fail);
  listen([
    [["j", "k"], "next, previous bag", (event) => move(event.key === "j" ? 1 : -1)],
    [["/"], "search bags", () => byId("search").focus()],
    [["l"], "go to the list of bags: ↑ ↓ move, enter opens", () => byId("bags").focus()],
    [["e"], "only wrong bags, or all", () => byId("errors").click()],
    [["m"], "next model", nextModel],
    [["n", "N"], "next, previous instance, from the highest score down", (event) => walk(event.key === "n" ? 1 : -1)],
    [["Escape"], "put the tool away; back to the bag", () => (marking.tool ? marking.take(null) : choose(null))],
    [["[", "]"], "previous, next round", (event) => rounds.move(event.key === "[" ? -1 : 1)],
    [[" "], "play the rounds, or stop", () => rounds.play()],
    [["+", "=", "-"], "zoom in, out", (event) => slide.zoom(event.key === "-" ? 1 / 1.6 : 1.6)],
    [["0"], "fit the whole picture", () => slide.home()],
    [Object.keys(ARROWS), "move the picture", (event) => slide.pan(...ARROWS[event.key])],
    [["h"], "heat on or off", () => toggle("show-heat")],
    [["i"], "heat as an outline or as colours", () => toggle("show-outline")],
    [["g"], "ground truth on or off", () => toggle("show-truth")],
    [["p"], "pseudo labels of the round on or off", () => toggle("show-labels")],
    [["o", "O"], "heat fainter, stronger", (event) => slideBy("opacity", event.key === "o" ? -0.1 : 0.1)],
    [[",", "."], "threshold down, up", (event) => slideBy("threshold", event.key === "," ? -0.05 : 0.05)],
    [["1", "2", "3"], "mark as positive, as negative, erase marks", (event) => marking.take(SENSES[event.key])],
    [["Enter"], "mark the chosen instance", () => marking.markInstance(state.instance)],
    [["u"], "take back the last mark", () => marking.undo()],
    [["t"], "dark or light", turnTheme],
    [["?"], "these keys", help],
  ]);
}

function introduce() {
  byId("errors").disabled = !run.has_labels;
  document.title = `${run.name} · its2clr`;
  byId("run-name").textContent = run.name;
  const splits = Object.entries(run.splits).map(([split, count]) => `${count.toLocaleString("en")} ${split}`);
  byId("run-name").title = `${run.n_bags.toLocaleString("en")} bags (${splits.join(", ")}), its2clr ${run.version}`;
  byId("model").replaceChildren(...run.models.map((one) => make("option", { value: one.key }, one.title)));
  for (const split of Object.keys(run.splits)) byId("split").append(make("option", { value: split }, split));
  byId("show-truth").disabled = !run.has_truth;
  byId("show-truth").checked = run.has_truth;
  byId("show-labels").disabled = !run.rounds.length;
  byId("outdated").hidden = !run.outdated.length;
  byId("outdated").textContent = `Scores are out of date: ${run.outdated.join("; ")}`;
}

async function start() {
  try {
    const theme = localStorage.getItem("its2clr-theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch {
    // then the system's theme stays
  }
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // no token in the history
  run = await ask("api/run");
  introduce();
  overlay = new Overlay(byId("heat"), byId("marks"));
  marking = new Marking(overlay, () => slide.draw(), fail);
  slide = new Slide(overlay, {
    pick, fail, drawing: () => marking.tool !== null, drawn: (outline, scale) => marking.markOutline(outline, scale),
  });
  details = new Details(run, (bag, instance) => {
    if (bag === state.bag?.n) choose(instance, { near: instance !== null });
    else openBag(bag, instance);
  }, fail);
  rounds = new RoundSlider(run.rounds, () => rescore());
  list = new BagList(openBag, fail);
  state.model = run.models.some((one) => one.key === wanted.get("model")) ? wanted.get("model") : run.best;
  list.model = byId("model").value = state.model;
  setThreshold();
  const named = /^\d+$/.test(wanted.get("bag") ?? "");
  byId("sort").value = "score"; // the most suspicious first
  list.setDescending(true);
  if (run.splits.test && !named) byId("split").value = "test";
  connect();
  drawKeys();
  redraw();
  details.clear();
  await list.load(0);
  if (named) {
    const instance = /^\d+$/.test(wanted.get("instance") ?? "") ? Number(wanted.get("instance")) : null;
    await openBag(Number(wanted.get("bag")), instance);
    if (/^\d+$/.test(wanted.get("round") ?? "") && state.bag?.rounds.available) {
      rounds.set(Number(wanted.get("round")));
      await rescore();
    }
  } else if (list.rows.length) {
    await openBag(list.rows[0].n);
  }
  document.body.dataset.ready = "true";
}

start().catch(fail);
