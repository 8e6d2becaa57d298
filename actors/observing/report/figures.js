// The run as it was embedded, and how its numbers are written. Words from the run become text nodes only.

const run = JSON.parse(document.getElementById("run").textContent);
const STAGES = run.stages.map(([name]) => name);
const STALLED = STAGES.indexOf("stalled");

function $(id) {
  return document.getElementById(id);
}

// An element with attributes and children; a string child is text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function duration(seconds) {
  if (!seconds) return "0";
  const size = Math.abs(seconds);
  const [value, unit] = size < 0.9995e-3 ? [seconds * 1e6, "us"] : size < 0.9995 ? [seconds * 1e3, "ms"] : size < 600 ? [seconds, "s"] : [seconds / 60, "min"];
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${unit}`;
}

// A time of the run on the calendar, or where that is not known since its beginning.
function moment(seconds) {
  if (run.wall_s === null) return `at ${seconds.toFixed(3)} s`;
  return new Date((run.wall_s + seconds) * 1000).toISOString().replace("T", " ").replace("Z", " UTC");
}

function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)}%`;
}

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  while (number >= 1000 && index < units.length - 1) {
    number /= 1000;
    index += 1;
  }
  return `${number < 10 && index ? number.toFixed(1) : Math.round(number)} ${units[index]}`;
}

// Seconds by stage, in the order of STAGES: stalls are taken off the stages that they are within.
function secondsByStage(request) {
  const found = new Array(STAGES.length).fill(0);
  for (const [stage, start, end, stalled] of request.legs) {
    found[stage] += end - start - stalled;
    found[STALLED] += stalled;
  }
  return found;
}

// A bar of all stages, each as wide as its share.
function stackOf(request) {
  const bar = make("div", { class: "stack", "aria-hidden": "true" });
  secondsByStage(request).forEach((seconds, stage) => {
    if (seconds <= 0 || !request.e2e) return;
    const part = make("i", { class: `is-${STAGES[stage]}`, title: `${STAGES[stage]} ${duration(seconds)}` });
    part.style.width = `${(100 * seconds) / request.e2e}%`;
    bar.append(part);
  });
  return bar;
}

// Index of the first of ascending `values` that is above `limit`.
function firstAbove(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}
