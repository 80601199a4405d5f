// The picture of a bag: OpenSeadragon, with the overlay kept in step with it.
import { ask } from "./api.js";
import { byId } from "./dom.js";

const CRISP_FROM = 1.5;
const NICE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
const LONGEST_BAR = 120;
const GESTURES = [
  "canvas-drag", "canvas-scroll", "canvas-pinch", "canvas-double-click",
  "navigator-click", "navigator-drag", "navigator-scroll",
];

export class Slide {
  /**
   * `pick(instance or null)` is called on a click, `fail(error)` when tiles cannot be read. While `drawing()` says so, a drag
   * draws an outline instead of moving the picture: `drawn(outline, scale)` is called with it.
   */
  constructor(overlay, { pick, drawing, drawn, fail }) {
    this.overlay = overlay;
    this.bag = null;
    this.smooth = true;
    this.fitted = true; // the whole picture is shown, and stays so when its room changes
    this.asked = 0;
    standInForStyle();
    this.osd = window.OpenSeadragon({
      element: byId("picture"),
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: true,
      navigatorAutoFade: false,
      navigatorSizeRatio: 0.16,
      navigatorPosition: "TOP_RIGHT",
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsTouch: { clickToZoom: false, pinchRotate: false },
      animationTime: 0.35,
      minZoomImageRatio: 0.6,
      maxZoomPixelRatio: 40,
      visibilityRatio: 0.3,
      zoomPerScroll: 1.3,
      placeholderFillStyle: null,
    });
    this.osd.navigator.element.hidden = true;
    this.osd.canvas.after(overlay.heat, overlay.marks); // above the picture, below the navigator
    this.osd.addHandler("canvas-key", (event) => {
      event.preventDefaultAction = true; // the page has keys of its own; turning would part heat and picture
    });
    this.osd.addHandler("canvas-click", (event) => {
      if (!event.quick || !this.bag) return;
      const point = this.item()?.viewerElementToImageCoordinates(event.position);
      if (point) pick(this.overlay.at(point.x, point.y));
    });
    this.osd.addHandler("update-viewport", () => this.draw());
    for (const gesture of GESTURES) {
      this.osd.addHandler(gesture, (event) => {
        if (gesture === "canvas-drag" && drawing()) this.addPoint(event);
        else this.fitted = false;
      });
    }
    this.osd.addHandler("canvas-drag-end", (event) => {
      if (drawing()) event.preventDefaultAction = true; // the picture does not glide on
      const outline = this.overlay.drawing;
      this.overlay.drawing = [];
      if (outline.length && drawing()) drawn(outline, this.view().scale);
      this.draw();
    });
    this.osd.addHandler("resize", () => requestAnimationFrame(() => {
      if (this.bag && this.fitted) this.osd.viewport.goHome(true);
      this.draw();
    }));
    this.osd.addHandler("tile-load-failed", (event) => {
      if (event.message !== "Image load aborted") fail(new Error("Part of the picture cannot be read."));
    });
    this.osd.addHandler("open-failed", (event) => fail(new Error(`The picture cannot be opened: ${event.message}`)));
  }

  /** The outline goes on to where the pointer is. */
  addPoint(event) {
    event.preventDefaultAction = true;
    const point = this.item()?.viewerElementToImageCoordinates(event.position);
    if (point) this.overlay.drawing.push([point.x, point.y]);
    this.draw();
  }

  item() {
    return this.osd.world.getItemAt(0);
  }

  async open(bag) {
    const asked = (this.asked += 1);
    const source = await ask(`api/bags/${bag.n}/dzi`);
    if (asked !== this.asked) return; // a later bag was opened meanwhile: its picture must not be replaced
    await new Promise((resolve) => {
      this.osd.addOnceHandler("open", resolve);
      this.osd.addOnceHandler("open-failed", resolve);
      this.osd.open(source);
    });
    if (asked !== this.asked) return;
    this.bag = bag;
    const loading = (full) => byId("stage").classList.toggle("loading", !full);
    const item = this.item();
    item?.addHandler("fully-loaded-change", (event) => {
      if (item === this.item()) loading(event.fullyLoaded);
    });
    loading(!item || item.getFullyLoaded());
    this.osd.navigator.element.hidden = Math.max(bag.width, bag.height) < 1024;
    this.fitted = true;
    this.osd.viewport.goHome(true);
    this.draw();
  }

  close() {
    this.bag = null;
    this.osd.close();
  }

  /** Element pixels per level-0 pixel, and where level 0 begins. */
  view() {
    const item = this.bag && this.item();
    if (!item) return null;
    const Point = window.OpenSeadragon.Point;
    const from = item.imageToViewerElementCoordinates(new Point(0, 0));
    const to = item.imageToViewerElementCoordinates(new Point(this.bag.width, 0));
    return { scale: (to.x - from.x) / this.bag.width, x: from.x, y: from.y };
  }

  draw() {
    const element = byId("picture");
    const view = this.view();
    this.overlay.draw(view, element.clientWidth, element.clientHeight);
    if (!view) return;
    const smooth = view.scale * (window.devicePixelRatio || 1) < CRISP_FROM;
    if (smooth !== this.smooth) {
      this.smooth = smooth;
      this.osd.drawer.setImageSmoothingEnabled(smooth);
    }
    this.drawScaleBar(view.scale);
  }

  drawScaleBar(scale) {
    const { mpp } = this.bag;
    const perUnit = mpp ? scale / mpp : scale; // element pixels per micron, or per level-0 pixel
    const length = NICE.filter((value) => value * perUnit <= LONGEST_BAR).pop() ?? NICE[0];
    const text = !mpp ? `${length} px` : length >= 1000 ? `${length / 1000} mm` : `${length} µm`;
    byId("scale-bar").style.width = `${length * perUnit}px`;
    byId("scale-text").textContent = text;
  }

  zoom(by) {
    this.fitted = false;
    this.osd.viewport.zoomBy(by);
    this.osd.viewport.applyConstraints();
  }

  home() {
    this.fitted = true;
    this.osd.viewport.goHome();
  }

  pan(x, y) {
    this.fitted = false;
    const bounds = this.osd.viewport.getBounds();
    this.osd.viewport.panBy(new window.OpenSeadragon.Point(0.2 * x * bounds.width, 0.2 * y * bounds.height));
    this.osd.viewport.applyConstraints();
  }

  /** Bring an instance into the middle, close enough to be judged. */
  show(instance) {
    const [x, y] = this.bag.coords[instance];
    const side = this.bag.side;
    const wide = 3.5;
    this.fitted = false;
    const rectangle = new window.OpenSeadragon.Rect(
      x - ((wide - 1) / 2) * side, y - ((wide - 1) / 2) * side, wide * side, wide * side,
    );
    this.osd.viewport.fitBounds(this.item().imageToViewportRectangle(rectangle));
  }
}

/** OpenSeadragon would add a style block, which the page's policy refuses, unless one is there; style.css has its rule. */
function standInForStyle() {
  const element = document.createElementNS("urn:its2clr", "style"); // of no known kind, so it styles nothing
  element.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(element);
}
