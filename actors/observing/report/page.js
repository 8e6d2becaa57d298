// Puts the parts together: the heading, one chosen request for all of them, and its name in the address.

function heading() {
  $("name").textContent = run.name;
  const facts = [
    ["recorded", run.wall_s === null ? null : moment(0).replace(/\.\d+/, "")],
    ["length", duration(run.duration_s)],
    ["requests", run.num_requests.toLocaleString("en")],
    ["output tokens", run.requests.reduce((sum, request) => sum + request.output, 0).toLocaleString("en")],
    ["preemptions", run.requests.reduce((sum, request) => sum + request.preemptions, 0).toLocaleString("en")],
    ["steps", run.num_steps ? run.num_steps.toLocaleString("en") : null],
    ["device", run.device],
    ["KV", run.num_device_blocks ? `${run.num_device_blocks.toLocaleString("en")} + ${run.num_host_blocks.toLocaleString("en")} blocks of ${run.block_size}` : null],
    ["repertory", run.engine],
  ];
  for (const [name, value] of facts) {
    if (value) $("facts").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  }
  if (run.notes.length) {
    $("notes").hidden = false;
    $("notes").querySelector("summary").textContent = count(run.notes.length, "note") + " on what was read";
    $("notes").querySelector("ul").append(...run.notes.map((note) => make("li", {}, note)));
  }
}

function legend() {
  const entries = run.steps.start.length
    ? [["decode", "decode"], ["mixed", "both"], ["prefill", "prefill"], ["lane", "copy"], ["held", "KV held"], ["cached", "KV cached"], ["running", "running"], ["waiting", "waiting"], ["preempted", "preempted"]]
    : [["running", "running"], ["waiting", "waiting"], ["preempted", "preempted"]];
  $("legend").append(...entries.map(([kind, words]) => make("span", {}, make("i", { class: `is-${kind}` }), words)));
}

heading();
legend();
const timeline = new Timeline($("lanes"), $("readout"));
const list = new RequestList(choose);

function choose(request) {
  list.mark(request);
  showRequest(request, choose);
  timeline.choose(request);
  $("zoom-request").disabled = false;
  history.replaceState(null, "", `#${encodeURIComponent(request.id)}`);
}

$("zoom-in").addEventListener("click", () => timeline.zoom(0.6));
$("zoom-out").addEventListener("click", () => timeline.zoom(1 / 0.6));
$("zoom-all").addEventListener("click", () => timeline.all());
$("zoom-request").addEventListener("click", () => timeline.viewChosen());

function chooseByAddress() {
  let wanted = "";
  try {
    wanted = decodeURIComponent(location.hash.slice(1));
  } catch {
    return; // not an address of ours
  }
  const request = run.requests.find((one) => one.id === wanted);
  if (request) choose(request);
}

window.addEventListener("hashchange", chooseByAddress);
chooseByAddress();
