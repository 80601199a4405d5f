// Asking the server.

/** Get JSON; an error carries the server's own words. */
export async function ask(path, parameters = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") search.set(name, value);
  }
  const text = search.toString();
  return answered(text ? `${path}?${text}` : path);
}

/** Change something, with JSON where there is something to say. */
export async function send(method, path, value) {
  const body = value === undefined ? {} : { body: JSON.stringify(value), headers: { "Content-Type": "application/json" } };
  return answered(path, { method, ...body });
}

async function answered(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The viewer does not answer. Is `its2clr view` still running?");
  }
  if (answer.ok) return answer.json();
  if (answer.status === 401) throw new Error("The token is missing or wrong: open the address that `its2clr view` printed.");
  const detail = await answer.json().then((found) => found.detail, () => answer.statusText);
  throw new Error(detail);
}
