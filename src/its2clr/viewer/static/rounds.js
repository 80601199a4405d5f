// The slider over refinement rounds: its last place is the final model.
import { byId, number } from "./dom.js";

const STEP_MILLISECONDS = 800;

export class RoundSlider {
  /** `change(epoch or null)` is called with the round to show; null: the final model. */
  constructor(rounds, change) {
    this.rounds = rounds;
    this.change = change;
    this.slider = byId("round");
    this.playing = null;
    this.slider.max = String(rounds.length);
    this.slider.value = this.slider.max;
    this.slider.addEventListener("input", () => {
      this.stop();
      this.tell();
    });
    byId("play").addEventListener("click", () => this.play());
    this.allow(false, rounds.length ? "choose a bag" : "this run has no refinement rounds");
  }

  /** The round shown; null: the final model. */
  epoch() {
    return this.rounds[Number(this.slider.value)]?.epoch ?? null;
  }

  /** Allow the slider or not, and say why not; a bag without rounds shows the final model. */
  allow(available, reason) {
    this.slider.disabled = !available;
    byId("play").disabled = !available;
    if (!available) {
      this.stop();
      this.slider.value = this.slider.max;
    }
    this.reason = available ? "" : reason;
    this.say();
  }

  say() {
    const round = this.rounds[Number(this.slider.value)];
    const auc = round?.validation_auc;
    let text = this.reason;
    if (!text && !round) text = "final model";
    if (!text) text = `after epoch ${round.epoch}${auc ? ` · validation AUC ${number(auc)}` : ""}`;
    byId("round-text").textContent = text;
    byId("round-text").title = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  tell() {
    this.say();
    this.change(this.epoch());
  }

  move(by) {
    this.stop();
    this.step(by);
  }

  step(by) {
    if (this.slider.disabled) return;
    const wanted = Math.max(0, Math.min(this.rounds.length, Number(this.slider.value) + by));
    if (wanted === Number(this.slider.value)) return;
    this.slider.value = String(wanted);
    this.tell();
  }

  set(epoch) {
    const place = this.rounds.findIndex((round) => round.epoch === epoch);
    this.slider.value = String(place < 0 ? this.rounds.length : place);
    this.say();
  }

  /** Play from the first round (or from here) to the final model; again: stop. */
  play() {
    if (this.slider.disabled) return;
    if (this.playing) {
      this.stop();
      return;
    }
    if (this.epoch() === null) {
      this.slider.value = "0";
      this.tell();
    }
    this.playing = setInterval(() => {
      this.step(1);
      if (this.epoch() === null) this.stop();
    }, STEP_MILLISECONDS);
    this.showPlaying();
  }

  stop() {
    clearInterval(this.playing);
    this.playing = null;
    this.showPlaying();
  }

  showPlaying() {
    byId("play").textContent = this.playing ? "❚❚" : "▶";
    byId("play").setAttribute("aria-label", this.playing ? "Stop playing the rounds" : "Play the rounds");
  }
}
