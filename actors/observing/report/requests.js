// The list of requests: sorted by a column, filtered by words, shown a few hundred at a time.

const PAGE = 200;
const COLUMNS = [
  // title, what it is sorted by, class, what its cell holds
  ["request", (request) => request.name, "words", (request) => make("button", { type: "button", class: "pick", title: request.name }, request.name)],
  ["e2e", (request) => request.e2e, null, (request) => duration(request.e2e)],
  ["stages", null, "words", stackOf],
  ["mostly", (request) => STAGES[request.mostly] ?? "", "words", (request) => STAGES[request.mostly] ?? "-"],
  ["ttft", (request) => request.ttft ?? -1, null, (request) => (request.ttft === null ? "-" : duration(request.ttft))],
  ["prompt", (request) => request.prompt, null, (request) => request.prompt.toLocaleString("en")],
  ["cached", (request) => request.cached, null, (request) => request.cached.toLocaleString("en")],
  ["output", (request) => request.output, null, (request) => request.output.toLocaleString("en")],
  ["preempted", (request) => request.preemptions, null, (request) => (request.preemptions ? String(request.preemptions) : "")],
  ["ended", (request) => request.reason, "words", (request) => request.reason],
  ["arrival", (request) => request.arrival, null, (request) => `${request.arrival.toFixed(3)} s`],
];
const BY_E2E = COLUMNS.findIndex(([title]) => title === "e2e");

class RequestList {
  constructor(choose) {
    this.choose = choose;
    this.chosen = null;
    this.column = BY_E2E;
    this.isDescending = true;
    this.words = "";
    this.length = PAGE;
    this.heads = COLUMNS.map(([title, of, kind], index) => this.head(title, of, kind, index));
    $("columns").replaceChildren(...this.heads);
    $("filter").addEventListener("input", () => this.filter($("filter").value));
    $("more").addEventListener("click", () => {
      this.length += PAGE;
      this.show();
    });
    $("rows").addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row && row.request) this.choose(row.request);
    });
    $("rows").addEventListener("keydown", (event) => this.key(event));
    this.show();
  }

  head(title, of, kind, index) {
    const cell = make("th", { scope: "col", class: kind });
    if (!of) {
      cell.append(title);
      return cell;
    }
    const button = make("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      this.isDescending = this.column === index ? !this.isDescending : kind !== "words";
      this.column = index;
      this.show();
    });
    cell.append(button);
    return cell;
  }

  filter(words) {
    this.words = words.trim().toLowerCase();
    this.length = PAGE;
    this.show();
  }

  found() {
    const of = COLUMNS[this.column][1];
    const sign = this.isDescending ? -1 : 1;
    const matches = (request) =>
      !this.words ||
      [request.name, request.id, request.reason, STAGES[request.mostly] ?? ""].some((text) => text.toLowerCase().includes(this.words));
    return run.requests.filter(matches).sort((a, b) => {
      const [left, right] = [of(a), of(b)];
      return left < right ? -sign : left > right ? sign : 0;
    });
  }

  show() {
    const found = this.found();
    this.heads.forEach((cell, index) => {
      if (index === this.column) cell.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    $("rows").replaceChildren(...found.slice(0, this.length).map((request) => this.row(request)));
    if (!found.length) {
      const words = run.requests.length ? "no request has these words" : "there are no requests in this run";
      $("rows").append(make("tr", {}, make("td", { colspan: COLUMNS.length, class: "words hint" }, words)));
    }
    const left = found.length - this.length;
    $("more").hidden = left <= 0;
    $("more").textContent = `show ${Math.min(PAGE, left)} more of ${left.toLocaleString("en")}`;
  }

  row(request) {
    const cells = COLUMNS.map(([, , kind, of]) => make("td", { class: kind }, of(request)));
    const row = make("tr", { "aria-selected": String(request === this.chosen) }, ...cells);
    row.request = request;
    return row;
  }

  mark(request) {
    this.chosen = request;
    for (const row of $("rows").children) row.setAttribute("aria-selected", String(row.request === request));
  }

  // Arrow keys go from row to row.
  key(event) {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const row = event.target.closest("tr");
    const next = event.key === "ArrowDown" ? row?.nextElementSibling : row?.previousElementSibling;
    if (!next || !next.request) return;
    event.preventDefault();
    next.querySelector(".pick").focus();
    this.choose(next.request);
  }
}
