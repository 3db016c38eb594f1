// Formatting of numbers, independent of the page.
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const NONE = "–";
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);

function digits(value) {
  if (value === 0) return "0";
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 3)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 0.001) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1000)} ms`;
  if (size < 120) return `${digits(value)} s`;
  return duration(value);
}

export function duration(value) {
  if (!isNumber(value)) return NONE;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${digits(value)} ${units[unit]}`;
}

export const rate = (value) => (isNumber(value) ? (value >= 100 ? count(value) : digits(value)) : NONE);
export const share = (part, all) => (all > 0 ? `${digits((100 * part) / all)} %` : NONE);
export const clock = (atS) => (isNumber(atS) && atS > 0 ? new Date(atS * 1000).toLocaleTimeString("en-GB") : NONE);
export const day = (atS) =>
  isNumber(atS) && atS > 0 ? new Date(atS * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : NONE;
