// The timeline: steps, copy lanes, memory and queues over time, on one canvas. Whatever is narrower than a pixel is
// summed into it, so a hundred thousand steps cost no more than one pass over those in view.

const HEIGHTS = { axis: 22, request: 20, steps: 40, lane: 14, tokens: 46, memory: 62, host: 40, queue: 52 };
const GAP = 8;
const LEAST_SPAN_S = 2e-5;

class Timeline {
  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.chosen = null;
    this.cursor = null; // seconds
    this.all();
    this.listen();
  }

  all() {
    this.start = 0;
    this.end = Math.max(run.duration_s, 1e-3);
    this.draw();
  }

  // Shows a stretch of time, kept within the run.
  view(start, end) {
    const whole = Math.max(run.duration_s, 1e-3);
    const span = Math.min(whole, Math.max(LEAST_SPAN_S, end - start));
    this.start = Math.min(Math.max(0, start), whole - span);
    this.end = this.start + span;
    this.draw();
  }

  zoom(factor, around = (this.start + this.end) / 2) {
    this.view(around - (around - this.start) * factor, around + (this.end - around) * factor);
  }

  pan(share) {
    const by = (this.end - this.start) * share;
    this.view(this.start + by, this.end + by);
  }

  choose(request) {
    this.chosen = request;
    this.draw();
  }

  viewChosen() {
    if (!this.chosen) return;
    const spare = Math.max(this.chosen.e2e, LEAST_SPAN_S) * 0.08;
    this.view(this.chosen.arrival - spare, this.chosen.arrival + this.chosen.e2e + spare);
  }

  rows() {
    const rows = [["request", HEIGHTS.request, this.chosen ? "this request" : ""]];
    if (run.steps.start.length) {
      rows.push(["steps", HEIGHTS.steps, "steps"]);
      for (const lane of ["out", "in"]) {
        if (run.copies[lane].start.length) rows.push([lane, HEIGHTS.lane, `lane ${lane}`]);
      }
      rows.push(["tokens", HEIGHTS.tokens, "tokens a step"]);
      rows.push(["memory", HEIGHTS.memory, "KV, device"]);
      if (run.num_host_blocks && hasHost) rows.push(["host", HEIGHTS.host, "KV, host"]);
    }
    rows.push(["queue", HEIGHTS.queue, "requests"]);
    return rows;
  }

  // Drawn at most once a frame, however often it is asked for.
  draw() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.paint();
    });
  }

  paint() {
    const rows = this.rows();
    const width = this.canvas.clientWidth;
    const height = HEIGHTS.axis + rows.reduce((sum, row) => sum + row[1] + GAP, 0);
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.gutter = width < 600 ? 62 : 104;
    this.width = Math.max(1, Math.floor(width - this.gutter));
    const style = getComputedStyle(document.documentElement);
    const known = {}; // by name, for this frame: the scheme may change
    this.color = (name) => (known[name] ??= style.getPropertyValue(`--${name}`).trim());
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = `${width < 600 ? 10 : 11}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    this.pen = pen;
    this.paintAxis(height);
    let top = HEIGHTS.axis;
    for (const [kind, tall, label] of rows) {
      pen.fillStyle = this.color("soft");
      pen.textAlign = "left";
      pen.fillText(label, 0, top + (tall < 30 ? tall / 2 : 8), this.gutter - 8);
      this.paintRow(kind, top, tall);
      top += tall + GAP;
    }
    this.paintCursor(height);
    this.describe(width);
  }

  x(seconds) {
    return this.gutter + ((seconds - this.start) / (this.end - this.start)) * this.width;
  }

  paintAxis(height) {
    const pen = this.pen;
    const span = this.end - this.start;
    const wanted = (span * 80) / this.width;
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= wanted);
    const [factor, unit] = step >= 1 ? [1, "s"] : step >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step * factor * 1.0001))));
    pen.textAlign = "center";
    for (let index = Math.ceil(this.start / step); index * step <= this.end; index += 1) {
      const x = this.x(index * step);
      pen.fillStyle = this.color("line");
      pen.fillRect(Math.round(x), HEIGHTS.axis - 4, 1, height - HEIGHTS.axis);
      pen.fillStyle = this.color("soft");
      const label = `${(index * step * factor).toFixed(digits)} ${unit}`;
      const half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(this.gutter + this.width - half, Math.max(this.gutter + half, x)), 8);
    }
    for (const [at] of run.incidents) {
      if (at < this.start || at > this.end) continue;
      pen.fillStyle = this.color("restart");
      pen.fillRect(Math.round(this.x(at)), HEIGHTS.axis - 6, 2, height);
    }
    if (this.chosen) {
      const from = Math.max(this.gutter, this.x(this.chosen.arrival));
      const to = Math.min(this.gutter + this.width, this.x(this.chosen.arrival + this.chosen.e2e));
      pen.fillStyle = this.color("band");
      if (to > from) pen.fillRect(from, HEIGHTS.axis - 4, to - from, height);
    }
  }

  paintRow(kind, top, tall) {
    const steps = run.steps;
    if (kind === "request") this.paintLegs(top, tall);
    else if (kind === "steps") this.paintSpans(steps, top, tall, ["decode", "mixed", "prefill"], kindOfStep);
    else if (kind === "out" || kind === "in") this.paintSpans(run.copies[kind], top, tall, ["lane", "preempted"], (i) => (run.copies[kind].ok[i] ? 0 : 1));
    else if (kind === "tokens") {
      const layers = [[steps.decodes, "decode", steps.count], [steps.prefill, "prefill", steps.count]];
      this.paintLevels(steps.start, layers, top, tall, { ends: steps.end });
    } else if (kind === "memory") {
      this.paintLevels(steps.planned, [[steps.held, "held"], [steps.cached, "cached"]], top, tall, { most: run.num_device_blocks, unit: " blocks" });
    } else if (kind === "host") this.paintLevels(steps.planned, [[steps.host, "cached"]], top, tall, { most: run.num_host_blocks, unit: " blocks" });
    else this.paintLevels(queues.at, [[queues.running, "decode"], [queues.waiting, "queue"], [queues.preempted, "preempted"]], top, tall, {});
  }

  // Spans that do not overlap: of each pixel, as much is filled as of its time.
  paintSpans(spans, top, tall, colors, kindOf) {
    const pen = this.pen;
    const perPixel = (this.end - this.start) / this.width;
    const filled = colors.map(() => new Float64Array(this.width));
    pen.fillStyle = this.color("faint");
    pen.fillRect(this.gutter, top, this.width, tall);
    for (let i = firstAbove(spans.end, this.start); i < spans.start.length && spans.start[i] < this.end; i += 1) {
      const into = filled[kindOf(i)];
      const from = Math.max(0, (spans.start[i] - this.start) / perPixel);
      const to = Math.min(this.width, (spans.end[i] - this.start) / perPixel);
      for (let pixel = Math.floor(from); pixel < to && pixel < this.width; pixel += 1) {
        into[pixel] += Math.min(to, pixel + 1) - Math.max(from, pixel);
      }
    }
    for (let pixel = 0; pixel < this.width; pixel += 1) {
      let bottom = top + tall;
      colors.forEach((color, index) => {
        const share = filled[index][pixel];
        if (share <= 0) return;
        const height = Math.max(1, Math.min(1, share) * tall);
        pen.fillStyle = this.color(color);
        pen.fillRect(this.gutter + pixel, Math.max(top, bottom - height), 1, Math.min(height, bottom - top));
        bottom -= height;
      });
    }
  }

  // Values that hold until their ends or the next, on top of one another: of each pixel the highest.
  paintLevels(at, layers, top, tall, { most = 0, unit = "", ends = null }) {
    const pen = this.pen;
    const perPixel = (this.end - this.start) / this.width;
    const sums = layers.map(() => new Float64Array(this.width));
    const first = Math.max(0, firstAbove(at, this.start) - 1);
    let pixel = 0;
    for (let i = first; i < at.length && at[i] < this.end; i += 1) {
      const from = Math.max(pixel, Math.floor((at[i] - this.start) / perPixel));
      const next = ends ? ends[i] : i + 1 < at.length ? at[i + 1] : run.duration_s;
      const to = Math.min(this.width, Math.max(from + 1, Math.ceil((next - this.start) / perPixel)));
      let below = 0;
      layers.forEach(([values, , counts], layer) => {
        below += counts ? values[i] / counts[i] : values[i];
        for (let x = from; x < to; x += 1) sums[layer][x] = Math.max(sums[layer][x], below);
      });
      pixel = Math.max(0, from);
    }
    const highest = most || Math.max(1, sums[layers.length - 1].reduce((a, b) => Math.max(a, b), 0));
    pen.fillStyle = this.color("faint");
    pen.fillRect(this.gutter, top, this.width, tall);
    for (let layer = layers.length - 1; layer >= 0; layer -= 1) {
      pen.fillStyle = this.color(layers[layer][1]);
      for (let x = 0; x < this.width; x += 1) {
        const height = (sums[layer][x] / highest) * tall;
        if (height > 0) pen.fillRect(this.gutter + x, top + tall - height, 1, height);
      }
    }
    pen.fillStyle = this.color("soft");
    pen.textAlign = "left";
    if (tall >= 30) pen.fillText(`to ${Math.round(highest).toLocaleString("en")}${unit}`, 0, top + 23, this.gutter - 8);
  }

  paintLegs(top, tall) {
    const pen = this.pen;
    if (!this.chosen) {
      pen.fillStyle = this.color("soft");
      pen.textAlign = "left";
      pen.fillText("choose a request below to see it here", this.gutter, top + tall / 2);
      return;
    }
    for (const [stage, start, end, stalled] of this.chosen.legs) {
      const from = Math.max(this.gutter, this.x(this.chosen.arrival + start));
      const to = Math.min(this.gutter + this.width, this.x(this.chosen.arrival + end));
      if (to < this.gutter || from > this.gutter + this.width) continue;
      pen.fillStyle = this.color(STAGES[stage]);
      pen.fillRect(from, top, Math.max(1, to - from), tall);
      if (stalled > 0 && end > start) {
        pen.fillStyle = this.color("stalled");
        const height = Math.max(2, (tall * stalled) / (end - start));
        pen.fillRect(from, top + tall - height, Math.max(1, to - from), height);
      }
    }
  }

  paintCursor(height) {
    this.tell();
    if (this.cursor === null || this.cursor < this.start || this.cursor > this.end) return;
    this.pen.fillStyle = this.color("ink");
    this.pen.fillRect(Math.round(this.x(this.cursor)), HEIGHTS.axis - 4, 1, height);
  }

  // What was at the cursor, in words.
  tell() {
    if (this.cursor === null) {
      this.readout.textContent = `${duration(this.start)} to ${duration(this.end)}: drag to move, pinch or Ctrl + wheel to zoom; keys: arrows, + - 0 r`;
      return;
    }
    const said = [`at ${this.cursor.toFixed(4)} s`];
    const steps = run.steps;
    const i = firstAbove(steps.end, this.cursor);
    if (i < steps.start.length && steps.start[i] <= this.cursor) {
      const which = steps.count[i] > 1 ? `${steps.count[i]} steps from ${steps.id[i]}` : `step ${steps.id[i]}`;
      const predicted = steps.predicted[i] === null ? "" : ` (predicted ${duration(steps.predicted[i])})`;
      said.push(`${which}: ${duration(steps.busy[i])}${predicted}, ${count(steps.prefill[i], "prefill token")}, ${count(steps.decodes[i], "decode")}`);
    } else if (steps.start.length) said.push("idle");
    for (const lane of ["out", "in"]) {
      const copies = run.copies[lane];
      const k = firstAbove(copies.end, this.cursor);
      if (k < copies.start.length && copies.start[k] <= this.cursor) {
        said.push(`copy ${lane}: ${bytes(copies.bytes[k])} in ${duration(copies.end[k] - copies.start[k])}${copies.ok[k] ? "" : ", failed"}`);
      }
    }
    const k = firstAbove(steps.planned, this.cursor) - 1;
    if (k >= 0 && run.num_device_blocks) {
      said.push(`KV ${percent(steps.held[k] / run.num_device_blocks)} held, ${percent(steps.cached[k] / run.num_device_blocks)} cached`);
    }
    const q = firstAbove(queues.at, this.cursor) - 1;
    if (q >= 0) said.push(`${queues.running[q]} running, ${queues.waiting[q]} waiting, ${queues.preempted[q]} preempted`);
    this.readout.textContent = said.join(" · ");
  }

  describe(width) {
    const label = `Timeline of ${count(run.num_steps, "step")} from ${duration(this.start)} to ${duration(this.end)}. Arrow keys move, plus and minus zoom, 0 shows all, r the chosen request.`;
    if (width && this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  timeAt(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.start + ((x - this.gutter) / this.width) * (this.end - this.start);
  }

  listen() {
    const canvas = this.canvas;
    let grabbed = null;
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.clientX, start: this.start, end: this.end };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (grabbed) {
        const by = ((grabbed.x - event.clientX) / this.width) * (grabbed.end - grabbed.start);
        this.view(grabbed.start + by, grabbed.end + by);
      }
      this.cursor = this.timeAt(event);
      this.draw();
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (grabbed = null));
    canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.draw();
    });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    dark.addEventListener("change", () => this.draw());
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), this.timeAt(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.width);
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), PageUp: () => this.pan(-0.9), PageDown: () => this.pan(0.9),
      Home: () => this.view(0, this.end - this.start), End: () => this.view(run.duration_s, run.duration_s + this.end - this.start),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), 0: () => this.all(), r: () => this.viewChosen(),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
    this.cursor = (this.start + this.end) / 2; // what a mouse would point at
    this.draw();
  }
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const hasHost = run.steps.host.some((used) => used > 0);
const queues = run.steps.start.length
  ? { at: run.steps.planned, running: run.steps.running, waiting: run.steps.waiting, preempted: run.steps.preempted }
  : queuesOfRequests();

// 0: decodes only, 1: both, 2: prefill only.
function kindOfStep(i) {
  if (!run.steps.prefill[i]) return 0;
  return run.steps.decodes[i] ? 1 : 2;
}

// How many requests there were of each kind, from their legs: where no step was recorded.
function queuesOfRequests() {
  const waits = new Set(["tokenise", "queue", "blocks", "paused", "restart"].map((stage) => STAGES.indexOf(stage)));
  const changes = [];
  for (const request of run.requests) {
    for (const [stage, start, end] of request.legs) {
      const which = STAGES[stage] === "preempted" ? "preempted" : waits.has(stage) ? "waiting" : "running";
      changes.push([request.arrival + start, which, 1], [request.arrival + end, which, -1]);
    }
  }
  changes.sort((a, b) => a[0] - b[0]);
  const found = { at: [], running: [], waiting: [], preempted: [] };
  const now = { running: 0, waiting: 0, preempted: 0 };
  for (const [at, which, by] of changes) {
    now[which] += by;
    found.at.push(at);
    for (const name of Object.keys(now)) found[name].push(now[name]);
  }
  return found;
}
