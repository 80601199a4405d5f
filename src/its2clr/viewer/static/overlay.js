// What is drawn over the picture: heat, ground truth, pseudo labels and the chosen instance, at level-0 places.
import { step, colour } from "./colours.js";

const POSITIVE = "#ff6a00";
const NEGATIVE = "#ffffff";
const DARK = "#10131a";
const TRUTH = "#00f0ff";
const CHOSEN = "#ff2bd6";
const SMALLEST_MARKED = 9;

export class Overlay {
  /** Two canvases of the size of the picture's element: heat, which may be faint, and marks, which may not. */
  constructor(heat, marks) {
    this.heat = heat;
    this.marks = marks;
    this.clear();
    this.threshold = 0;
    this.showHeat = true;
    this.showTruth = true;
    this.showLabels = true;
  }

  clear() {
    this.bag = null;
    this.scores = null;
    this.order = [];
    this.edges = [];
    this.chosen = null;
  }

  setBag(bag) {
    this.clear();
    this.bag = bag;
    this.edges = bag.truth ? outline(bag) : [];
  }

  /** `scores.probability`, and of a round also `pseudo_label` and `selected`; the highest are drawn last, on top. */
  setScores(scores) {
    this.scores = scores;
    const probability = scores.probability;
    this.order = probability.map((_, n) => n).sort((a, b) => probability[a] - probability[b]);
  }

  /** How many instances the heat shows. */
  shown() {
    return this.scores ? this.scores.probability.filter((value) => value >= this.threshold).length : 0;
  }

  /** The instance at a place of the picture, the highest where several overlap; null if there is none. */
  at(x, y) {
    const { coords, side } = this.bag;
    for (let place = this.order.length - 1; place >= 0; place -= 1) {
      const [left, top] = coords[this.order[place]];
      if (x >= left && x < left + side && y >= top && y < top + side) return this.order[place];
    }
    return null;
  }

  /** Draw for a view: pixels of the element per level-0 pixel, and where level 0 begins in it. */
  draw(view, width, height) {
    const ratio = window.devicePixelRatio || 1;
    const contexts = [this.heat, this.marks].map((canvas) => {
      const size = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, ...size);
      return context;
    });
    if (!this.bag || !view) return;
    const scaled = { scale: view.scale * ratio, x: view.x * ratio, y: view.y * ratio };
    const squares = this.squares(scaled, contexts[0].canvas);
    if (this.showHeat) this.drawHeat(contexts[0], squares);
    if (this.showTruth) this.drawTruth(contexts[1], scaled, ratio);
    if (this.showLabels && this.scores?.selected) this.drawLabels(contexts[1], squares, ratio);
    this.drawChosen(contexts[1], scaled, ratio);
  }

  /** Where each instance lies in device pixels, in drawing order; whole pixels, so that neighbours leave no gap. */
  squares(view, canvas) {
    const { coords, side } = this.bag;
    const found = [];
    for (const n of this.order) {
      const left = Math.round(view.x + coords[n][0] * view.scale);
      const top = Math.round(view.y + coords[n][1] * view.scale);
      const right = Math.round(view.x + (coords[n][0] + side) * view.scale);
      const bottom = Math.round(view.y + (coords[n][1] + side) * view.scale);
      if (right < 0 || bottom < 0 || left > canvas.width || top > canvas.height) continue;
      found.push([n, left, top, Math.max(right - left, 1), Math.max(bottom - top, 1)]);
    }
    return found;
  }

  drawHeat(context, squares) {
    const probability = this.scores?.probability;
    if (!probability) return;
    let last = -1;
    for (const [n, left, top, across, down] of squares) {
      if (probability[n] < this.threshold) continue;
      const wanted = step(probability[n]);
      if (wanted !== last) context.fillStyle = colour(probability[n]);
      last = wanted;
      context.fillRect(left, top, across, down);
    }
  }

  drawTruth(context, view, ratio) {
    if (!this.edges.length) return;
    const path = new Path2D();
    for (const [x0, y0, x1, y1] of this.edges) {
      path.moveTo(Math.round(view.x + x0 * view.scale), Math.round(view.y + y0 * view.scale));
      path.lineTo(Math.round(view.x + x1 * view.scale), Math.round(view.y + y1 * view.scale));
    }
    context.lineCap = "square";
    for (const [line, style] of [[4, DARK], [2, TRUTH]]) {
      context.lineWidth = line * ratio;
      context.strokeStyle = style;
      context.stroke(path);
    }
  }

  drawLabels(context, squares, ratio) {
    const { pseudo_label: labels, selected } = this.scores;
    for (const [n, left, top, across, down] of squares) {
      if (!selected[n] && !labels[n]) continue;
      const radius = Math.min(Math.max(0.16 * across, 2 * ratio), 10 * ratio);
      const small = across < SMALLEST_MARKED * ratio;
      drawMark(context, left + across / 2, top + down / 2, small ? across / 4 : radius, selected[n], ratio, small);
    }
  }

  drawChosen(context, view, ratio) {
    if (this.chosen === null) return;
    const [x, y] = this.bag.coords[this.chosen];
    const side = this.bag.side * view.scale;
    for (const [line, style] of [[6, DARK], [3, CHOSEN]]) {
      context.lineWidth = line * ratio;
      context.strokeStyle = style;
      context.strokeRect(view.x + x * view.scale, view.y + y * view.scale, side, side);
    }
  }
}

/** Mark of a pseudo label: a disc with plus or minus if the next epoch uses it, a ring if it only passed. */
export function drawMark(context, x, y, radius, selected, ratio, small = false) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.lineWidth = 1.5 * ratio;
  context.strokeStyle = DARK;
  if (selected) {
    context.fillStyle = selected > 0 ? POSITIVE : NEGATIVE;
    context.fill();
    context.stroke();
  } else {
    context.lineWidth = 4 * ratio;
    context.stroke();
    context.lineWidth = 2 * ratio;
    context.strokeStyle = POSITIVE;
    context.stroke();
  }
  if (!selected || small) return;
  context.lineWidth = Math.max(radius / 3.5, ratio);
  context.lineCap = "butt";
  context.strokeStyle = DARK;
  context.beginPath();
  context.moveTo(x - 0.55 * radius, y);
  context.lineTo(x + 0.55 * radius, y);
  if (selected > 0) {
    context.moveTo(x, y - 0.55 * radius);
    context.lineTo(x, y + 0.55 * radius);
  }
  context.stroke();
}

/** Edges around the instances that are truly positive, without those between two of them. */
function outline({ coords, truth, side }) {
  const positive = new Set(coords.filter((_, n) => truth[n] === 1).map(([x, y]) => `${x},${y}`));
  const edges = [];
  for (const place of positive) {
    const [x, y] = place.split(",").map(Number);
    if (!positive.has(`${x},${y - side}`)) edges.push([x, y, x + side, y]);
    if (!positive.has(`${x},${y + side}`)) edges.push([x, y + side, x + side, y + side]);
    if (!positive.has(`${x - side},${y}`)) edges.push([x, y, x, y + side]);
    if (!positive.has(`${x + side},${y}`)) edges.push([x + side, y, x + side, y + side]);
  }
  return edges;
}
