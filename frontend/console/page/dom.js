// All elements are created here. External data is inserted only as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Unchanged text is not set again, which keeps selections and avoids repeated screen reader output.
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

export const byId = (id) => document.getElementById(id);

// Horizontal bar of a share from 0 to 1. The figure is shown beside it.
function bar(share, isLow = false) {
  const width = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0)) * 100;
  return svg(
    "svg",
    { class: isLow ? "bar is-low" : "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { width, height: 8 }),
  );
}

// Bar with its figure.
export const measure = (share, text, isLow = false) => h("span", { class: "measure" }, bar(share, isLow), h("span", null, text));

// Announces a text once to screen readers.
export const say = (text) => setText(byId("told"), text);
