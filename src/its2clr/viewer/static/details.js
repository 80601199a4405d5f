// The right side: the open bag, or the chosen instance with its scores, rounds and neighbours.
import { ask } from "./api.js";
import { colour } from "./colours.js";
import { byId, make, number } from "./dom.js";

const TRUTHS = { 1: "positive", 0: "negative", "-1": "unknown" };
const TOP = 8;
const SVG = "http://www.w3.org/2000/svg";

export class Details {
  /** `go(bag number, instance)` is called to see another instance, `fail(error)` when something went wrong. */
  constructor(run, go, fail) {
    this.run = run;
    this.go = go;
    this.fail = fail;
    this.box = byId("details");
    this.asked = 0;
  }

  clear() {
    this.asked += 1;
    this.box.replaceChildren(make("p", { className: "empty" }, "Choose a bag on the left."));
  }

  /** The bag as a whole, with its highest instances. */
  showBag(bag, scores, model, shown) {
    this.asked += 1;
    const order = scores.probability.map((_, n) => n).sort((a, b) => scores.probability[b] - scores.probability[a]);
    const top = order.slice(0, TOP).map((n) => ({
      bag: bag.n,
      instance: n,
      probability: scores.probability[n],
      image: `api/bags/${bag.n}/instances/${n}/image`,
      caption: number(scores.probability[n], 2),
    }));
    const size = `${bag.width.toLocaleString("en")} × ${bag.height.toLocaleString("en")} px`;
    const microns = bag.mpp ? `, ${number(bag.mpp, 2)} µm/px` : "";
    this.box.replaceChildren(
      make("h2", {}, "Bag"),
      facts([
        ["Group", bag.group],
        ["Split", bag.split],
        ["Label", TRUTHS[bag.label ?? -1]],
        ["Instances", bag.n_instances.toLocaleString("en")],
        ["Picture", `${bag.is_slide ? "slide" : "kept tiles"}, ${size}${microns}`],
      ]),
      make("h3", {}, "Bag probability"),
      this.scoreTable(
        this.run.models.map((one) => ({
          title: one.title,
          value: bag.probabilities[one.key],
          note: `≥ ${number(one.bag_threshold, 2)} is positive`,
          own: one.key === model,
        })),
      ),
      make("h3", {}, `Highest instances, ${shown}`),
      make("p", { className: "hint" }, "Click one, or press n to walk through them."),
      this.gallery(top),
    );
  }

  /** One instance; its neighbours follow when they are found. */
  async showInstance(bag, instance, model) {
    const asked = (this.asked += 1);
    this.box.setAttribute("aria-busy", "true");
    const image = `api/bags/${bag.n}/instances/${instance}/image`;
    this.box.replaceChildren(
      ...this.instanceTitle(bag, { instance, image }), make("p", { className: "hint" }, "Reading the scores…"),
    );
    const found = await ask(`api/bags/${bag.n}/instances/${instance}`);
    if (asked !== this.asked) return;
    const neighbours = make("div", {}, make("p", { className: "hint" }, "Searching…"));
    this.box.replaceChildren(...this.instanceParts(bag, found, model), make("h3", {}, "Neighbours"), neighbours);
    this.box.setAttribute("aria-busy", "false");
    this.box.scrollTop = 0;
    const near = await ask(`api/bags/${bag.n}/instances/${instance}/neighbours`, { model });
    if (asked === this.asked) neighbours.replaceChildren(...this.neighbourParts(near));
  }

  instanceTitle(bag, { instance, image }) {
    const back = make("button", { className: "link", type: "button" }, "‹ bag");
    back.addEventListener("click", () => this.go(bag.n, null));
    return [
      make("div", { className: "title" }, make("h2", {}, `Instance ${instance}`), back),
      make("img", { className: "tile", src: image, alt: `tile of instance ${instance}` }),
    ];
  }

  instanceParts(bag, found, model) {
    const titles = new Map(this.run.models.map((one) => [one.key, one.title]));
    const place = `x ${found.x.toLocaleString("en")}, y ${found.y.toLocaleString("en")}`;
    const truth = found.truth === null ? [] : [["Ground truth", TRUTHS[found.truth]]];
    const rounds = found.rounds.length
      ? [make("h3", {}, "Rounds"), chart(found.rounds, this.run.rounds), roundTable(found.rounds)]
      : [];
    return [
      ...this.instanceTitle(bag, found),
      facts([["Name", found.name], ["Place", `${place}, side ${found.side}`], ...truth]),
      make("h3", {}, "Instance probability"),
      this.scoreTable(
        found.models.map((one) => ({
          title: titles.get(one.model),
          value: one.probability,
          note: `rank ${one.rank.toLocaleString("en")} of ${bag.n_instances.toLocaleString("en")}`,
          own: one.model === model,
        })),
      ),
      ...rounds,
    ];
  }

  neighbourParts(near) {
    if (near.problem) return [make("p", { className: "hint" }, near.problem)];
    const part = (name, { searched, found }) => [
      make("h4", {}, name),
      make("p", { className: "hint" }, `Searched: ${searched}.`),
      this.gallery(found.map((one) => ({ ...one, caption: number(one.similarity, 2) }))),
    ];
    const title = this.run.models.find((one) => one.encoder === near.encoder)?.title.split(" + ")[0] ?? near.encoder;
    return [
      make("p", { className: "hint" }, `By ${near.measure} (${title}). Below each tile: the bar is its probability, the number its similarity.`),
      ...part("In this bag", near.within),
      ...part("In test bags", near.across),
    ];
  }

  gallery(items) {
    const box = make("div", { className: "gallery" });
    for (const item of items) {
      const about = `${item.bag_id ? `${item.bag_id}, ` : ""}instance ${item.instance}`;
      const bar = make("span", { className: "bar" });
      bar.style.width = `${Math.round(100 * item.probability)}%`;
      bar.style.backgroundColor = colour(item.probability);
      const button = make(
        "button",
        {
          type: "button",
          title: `${about}, probability ${number(item.probability)}`,
          "aria-label": `${about}, probability ${number(item.probability)}`,
        },
        make("img", { src: item.image, alt: "", loading: "lazy" }),
        make("span", { className: "track" }, bar),
        make("span", { className: "caption" }, item.caption),
      );
      button.addEventListener("click", () => this.go(item.bag, item.instance));
      box.append(button);
    }
    return box;
  }

  scoreTable(rows) {
    const body = make("tbody");
    for (const { title, value, note, own } of rows) {
      const bar = make("span", { className: "bar" });
      bar.style.width = `${Math.round(100 * (value ?? 0))}%`;
      bar.style.backgroundColor = colour(value ?? 0);
      body.append(
        make(
          "tr",
          { className: own ? "own" : "" },
          make("th", { scope: "row" }, title),
          make("td", { className: "value" }, number(value)),
          make("td", {}, make("span", { className: "track" }, bar), make("span", { className: "note" }, note)),
        ),
      );
    }
    return make("table", { className: "scores" }, body);
  }
}

function facts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) list.append(make("dt", {}, name), make("dd", {}, value));
  return list;
}

function useOf({ selected }) {
  return selected > 0 ? "positive" : selected < 0 ? "negative" : "–";
}

function roundTable(rounds) {
  const head = make("tr", {}, ...["Epoch", "Probability", "Pseudo label", "Used as"].map((text) => make("th", {}, text)));
  const rows = rounds.map((one) =>
    make(
      "tr",
      {},
      make("td", {}, String(one.epoch)),
      make("td", {}, number(one.probability)),
      make("td", {}, one.pseudo_label ? "positive" : "negative"),
      make("td", {}, useOf(one)),
    ),
  );
  return make("table", { className: "rounds" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

/** Probability over the rounds, with the threshold that made pseudo-positives. */
function chart(rounds, known) {
  const [width, height, edge] = [280, 74, 7];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "chart");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Probability of the instance over the rounds; the table below has the numbers");
  const last = Math.max(...rounds.map((one) => one.epoch), 1);
  const x = (epoch) => edge + (epoch / last) * (width - 2 * edge);
  const y = (probability) => height - edge - probability * (height - 2 * edge);
  const add = (tag, attributes) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
  };
  add("rect", { x: 0, y: 0, width, height, class: "ground" });
  const thresholds = known.filter((one) => one.threshold !== null);
  const points = (values) => values.map((pair) => pair.join(",")).join(" ");
  add("polyline", { points: points(thresholds.map((one) => [x(one.epoch), y(one.threshold)])), class: "limit" });
  add("polyline", { points: points(rounds.map((one) => [x(one.epoch), y(one.probability)])), class: "line" });
  for (const one of rounds) {
    const kind = one.selected > 0 ? "positive" : one.selected < 0 ? "negative" : "unused";
    add("circle", { cx: x(one.epoch), cy: y(one.probability), r: 4, class: `point ${kind}` });
  }
  return svg;
}
