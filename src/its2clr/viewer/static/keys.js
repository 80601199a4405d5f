// The keys of the page, and the table that tells them.
import { byId, make } from "./dom.js";

/** Listen to keys; `actions` is a list of [keys, what they do, function of the event]. */
export function listen(actions) {
  const byKey = new Map(actions.flatMap(([keys, , act]) => keys.map((key) => [key, act])));
  document.addEventListener("keydown", (event) => {
    const composed = event.getModifierState("AltGraph"); // where a bracket needs it
    if ((!composed && (event.ctrlKey || event.altKey)) || event.metaKey || event.defaultPrevented) return;
    const target = event.target;
    const typing = target.matches("input[type=search], input[type=text], select, textarea");
    if (typing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const own = target.matches("input[type=range]") && /^(Arrow|Home|End|Page)/.test(event.key);
    const pressed = target.matches("button, input[type=checkbox]") && [" ", "Enter"].includes(event.key);
    if (own || pressed || (byId("help").open && event.key !== "?")) return;
    const act = byKey.get(event.key);
    if (!act) return;
    event.preventDefault();
    act(event);
  });
  byId("keys").replaceChildren(
    ...actions.map(([keys, text]) =>
      make("tr", {}, make("td", {}, ...keys.map((key) => make("kbd", {}, shown(key)))), make("td", {}, text)),
    ),
  );
}

function shown(key) {
  const names = { " ": "space", ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "esc" };
  return names[key] ?? key;
}
