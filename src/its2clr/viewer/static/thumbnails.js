// Thumbnails of the list: only those that can be seen, two at a time, so that the picture never waits for them.
const AT_ONCE = 2;

export class Thumbnails {
  constructor(box) {
    this.waiting = [];
    this.loading = 0;
    this.watcher = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        this.waiting = this.waiting.filter((one) => one !== target);
        if (isIntersecting) this.waiting.push(target);
      }
      this.next();
    }, { root: box, rootMargin: "120px" });
  }

  /** Begin anew with the images of another page. */
  watch(images) {
    this.watcher.disconnect();
    this.waiting = [];
    for (const image of images) this.watcher.observe(image);
  }

  next() {
    while (this.loading < AT_ONCE && this.waiting.length) {
      const image = this.waiting.shift();
      this.watcher.unobserve(image);
      if (image.src) continue;
      this.loading += 1;
      const done = () => {
        this.loading -= 1;
        this.next();
      };
      image.addEventListener("load", done, { once: true });
      image.addEventListener("error", done, { once: true });
      image.src = image.dataset.src;
    }
  }
}
