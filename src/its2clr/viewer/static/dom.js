// Small help with the page. Text always goes in as text: a bag may be called anything.

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with properties, attributes (names with a dash) and children (elements or text). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number the way the whole page shows it. */
export function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

/** Call a function once things have been quiet for a while. */
export function afterPause(milliseconds, call) {
  let waiting;
  return (...values) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => call(...values), milliseconds);
  };
}
