// One request's way through the engine: a bar a leg, who held it up, and what was decided about it.

function showRequest(request, choose) {
  const way = $("way");
  const first = request.ttft === null ? "" : `, first token after ${duration(request.ttft)}`;
  const ended = { unknown: "its end was not recorded", refused: "refused" }[request.reason] ?? `ended by ${request.reason}`;
  const again = request.preemptions ? `, ${count(request.preemptions, "preemption")}` : "";
  const children = [
    make("p", { class: "headline" }, `${request.name}: ${duration(request.e2e)}${first}, ${ended}`),
    make(
      "p",
      { class: "facts" },
      `id ${request.id}, arrived ${moment(request.arrival)}; ${count(request.prompt, "prompt token")}, ` +
        `${request.cached.toLocaleString("en")} of them cached; ${count(request.output, "output token")}${again}`,
    ),
  ];
  if (!request.legs.length) children.push(make("p", { class: "hint" }, "Nothing is known of its way."));
  else {
    children.push(stackOf(request), why(request), legsOf(request));
  }
  children.push(marksOf(request, choose));
  if (request.derived) {
    children.push(make("p", { class: "hint" }, "Put together from other records: waiting for memory counts as queue, and nobody is blamed."));
  }
  way.replaceChildren(...children);
}

function why(request) {
  const seconds = request.mostly === -1 ? 0 : secondsByStage(request)[request.mostly];
  const share = request.e2e ? percent(seconds / request.e2e) : "-";
  const [name, meaning] = run.stages[request.mostly] ?? ["", ""];
  return make("p", { class: "why", title: meaning }, "Most of it: ", make("strong", {}, `${name}, ${duration(seconds)} (${share})`), `: ${request.because}`);
}

function legsOf(request) {
  const body = make("tbody");
  for (const [stage, start, end, stalled] of request.legs) {
    const bar = make("i", { class: `is-${STAGES[stage]}` });
    place(bar, start, end, request.e2e);
    const track = make("div", {}, bar);
    if (stalled > 0) {
      const part = make("i", { class: "is-stalled" });
      place(part, end - stalled, end, request.e2e);
      track.append(part);
    }
    body.append(row(STAGES[stage], start, end - start, request.e2e, track, ""));
    if (stalled > 0) body.append(row("stalled", null, stalled, request.e2e, null, "of-stalled"));
  }
  const head = make("tr");
  for (const [title, kind] of [["stage", "words"], ["actor", "words actor"], ["at", ""], ["time", ""], ["share", ""], ["", ""]]) {
    head.append(make("th", { scope: "col", class: kind || null }, title));
  }
  return make("table", { class: "way", id: "waterfall" }, make("thead", {}, head), body);
}

function row(name, at, seconds, total, track, kind) {
  const [, meaning, actor] = run.stages.find(([stage]) => stage === name);
  return make(
    "tr",
    { class: kind || null, title: meaning },
    make("td", { class: "words" }, kind ? `\u00a0\u00a0${name}` : name),
    make("td", { class: "words actor" }, kind ? "" : actor),
    make("td", {}, at === null ? "" : duration(at)),
    make("td", {}, duration(seconds)),
    make("td", {}, total ? percent(seconds / total) : "-"),
    make("td", { class: "track" }, ...(track ? [track] : [])),
  );
}

// A bar is 2 pixels wide at least, at the very end too.
function place(bar, start, end, total) {
  bar.style.left = `min(${total ? (100 * start) / total : 0}%, calc(100% - 2px))`;
  bar.style.width = `${total ? (100 * (end - start)) / total : 100}%`;
}

function marksOf(request, choose) {
  const list = make("ul", { class: "marks" });
  const stalled = secondsByStage(request)[STALLED];
  if (stalled > 0) {
    const item = make("li", { class: "stalled-mark" }, `stalled ${duration(stalled)}`);
    request.blamed.forEach(([name, seconds, index], position) => {
      item.append(position ? ", " : ` by the prefill${request.blamed.length > 1 ? "s" : ""} of `);
      if (index >= 0) {
        const who = make("button", { type: "button", class: "who" }, name);
        who.addEventListener("click", () => choose(run.requests[index]));
        item.append(who);
      } else item.append(name);
      item.append(` (${duration(seconds)})`);
    });
    list.append(item);
  }
  for (const [at, what, words] of request.marks) {
    list.append(make("li", { class: what === "preempted" ? "preempted-mark" : null }, `at ${duration(at)}: ${words}`));
  }
  if (request.num_marks > request.marks.length) {
    list.append(make("li", {}, `and ${(request.num_marks - request.marks.length).toLocaleString("en")} more decisions`));
  }
  return list;
}
