// Requests to the frontend that serves the page. The admin key exists only in this module's memory: it is never
// stored or put into a URL, and is lost when the page is closed.
const PATIENCE_MS = 20000;
const ROOT = new URL("api/", document.baseURI);

let key = "";

export const holdKey = (text) => {
  key = text;
};
export const hasKey = () => key !== "";

export class Problem extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      ...options,
      headers,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch (error) {
    throw new Problem(error.name === "TimeoutError" ? "the frontend does not respond" : "the frontend cannot be reached", 0, "away");
  }
  let body;
  try {
    body = await answer.json();
  } catch {
    throw new Problem(`the frontend's response (${answer.status}) cannot be read`, answer.status, "unreadable");
  }
  if (!answer.ok) throw new Problem(body?.error?.message ?? `status ${answer.status}`, answer.status, body?.error?.code ?? "");
  return body;
}

const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const about = () => ask("about");
export const state = () => ask("state");
export const pool = () => ask("pool");
export const objectives = () => ask("objectives");
export const request = (id) => ask(`requests/${encodeURIComponent(id)}`);
export const drain = (nodeId) => post("drain", { node_id: nodeId });
export const switchRole = (nodeId, role) => post("switch", { node_id: nodeId, role });
export const changeObjectives = (change) => post("objectives", change);
