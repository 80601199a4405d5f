// What is drawn over the picture at level-0 places: heat or outline, ground truth, pseudo labels, marks, the chosen instance.
import { step, colour } from "./colours.js";

const POSITIVE = "#ff6a00";
const NEGATIVE = "#ffffff";
const DARK = "#10131a";
const TRUTH = "#00f0ff";
const CHOSEN = "#ff2bd6";
const CALLED = "#ffe600";
const MARKED = { positive: ["#ff7a1a", []], negative: ["#37a0ff", [9, 6]] };
const LINE = 4;
const SMALLEST_MARKED = 9;

export class Overlay {
  /** Two canvases of the size of the picture's element: heat, which may be faint, and marks, which may not. */
  constructor(heat, marks) {
    this.heat = heat;
    this.marks = marks;
    this.clear();
    this.threshold = 0;
    this.showHeat = true;
    this.asOutline = false;
    this.drawing = []; // the outline a person is drawing
    this.layer = document.createElement("canvas");
    this.showTruth = true;
    this.showLabels = true;
  }

  clear() {
    this.bag = null;
    this.scores = null;
    this.order = [];
    this.annotation = null; // polygons that a person drew before tiling; null: only the tiles are known
    this.marked = null;
    this.chosen = null;
  }

  setBag(bag) {
    this.clear();
    this.bag = bag;
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
    if (this.showHeat && this.asOutline) this.drawCalled(contexts[1], squares, ratio);
    else if (this.showHeat) this.drawHeat(contexts[0], squares);
    if (this.showTruth) this.drawTruth(contexts[1], squares, scaled, ratio);
    if (this.showLabels && this.scores?.selected) this.drawLabels(contexts[1], squares, ratio);
    this.drawMarked(contexts[1], scaled, ratio);
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

  /** Outline of the instances at the threshold or above: it lies around them, so that no nucleus is hidden. */
  drawCalled(context, squares, ratio) {
    const probability = this.scores?.probability;
    if (!probability) return;
    const called = squares.filter(([n]) => probability[n] >= this.threshold);
    const beside = this.showTruth && this.bag.truth && !this.annotation; // two outlines of tiles lie side by side
    this.drawAround(context, called, CALLED, ratio, beside ? LINE : 0);
  }

  /** The person's own polygons where they are known, else the outline of the tiles that count as positive. */
  drawTruth(context, squares, view, ratio) {
    const { truth } = this.bag;
    if (this.annotation) strokeTwice(context, polygonPath(this.annotation, view), TRUTH, ratio);
    else if (truth) this.drawAround(context, squares.filter(([n]) => truth[n] === 1), TRUTH, ratio);
  }

  /**
   * The outline of what squares cover together, also where they overlap: all of them, a little larger, less all of them.
   * It lies outside them, at some distance.
   */
  drawAround(context, squares, style, ratio, distance = 0) {
    if (!squares.length) return;
    const { layer } = this;
    [layer.width, layer.height] = [context.canvas.width, context.canvas.height]; // also clears it
    const pen = layer.getContext("2d");
    const fill = (wider) => {
      const by = Math.round((distance + wider) * ratio);
      for (const [, left, top, across, down] of squares) pen.fillRect(left - by, top - by, across + 2 * by, down + 2 * by);
    };
    for (const [wider, colour_] of [[LINE, DARK], [LINE - 1, style], [1, DARK]]) {
      pen.fillStyle = colour_;
      fill(wider);
    }
    pen.globalCompositeOperation = "destination-out";
    fill(0);
    context.drawImage(layer, 0, 0);
  }

  /** What the person marked, and the outline being drawn. */
  drawMarked(context, view, ratio) {
    for (const [sense, [style, dashes]] of Object.entries(MARKED)) {
      const polygons = this.marked?.[sense];
      if (!polygons?.length) continue;
      const path = polygonPath(polygons, view);
      context.fillStyle = `${style}1f`;
      context.fill(path, "evenodd");
      strokeTwice(context, path, style, ratio, dashes, 3);
    }
    if (this.drawing.length > 1) strokeTwice(context, polygonPath([[this.drawing]], view), CHOSEN, ratio);
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

/** A path through polygons: lists of rings of [x, y] at level 0. */
function polygonPath(polygons, view) {
  const path = new Path2D();
  for (const ring of polygons.flat()) {
    ring.forEach(([x, y], n) => path[n ? "lineTo" : "moveTo"](view.x + x * view.scale, view.y + y * view.scale));
    path.closePath();
  }
  return path;
}

/** A bright line on a dark one, seen on any ground. */
function strokeTwice(context, path, style, ratio, dashes = [], width = 2) {
  context.lineJoin = "round";
  for (const [line, colour_] of [[width + 2, DARK], [width, style]]) {
    context.lineWidth = line * ratio;
    context.strokeStyle = colour_;
    context.setLineDash(colour_ === DARK ? [] : dashes.map((length) => length * ratio));
    context.stroke(path);
  }
  context.setLineDash([]);
}
