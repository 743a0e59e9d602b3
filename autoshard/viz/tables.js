// Sortable, filterable tables.

// columns: [{title, value(row) → string or number for sorting, show(row) → content, numeric}]
function sortable(columns, rows, { sort = 0, descending = false, onrow = null, placeholder = "Filter", name = "" } = {}) {
  const state = { column: sort, descending, filter: "" };
  const body = h("tbody");
  const count = h("span", { class: "count" });
  const texts = rows.map((row) => columns.map((c) => c.value(row)).join(" ").toLowerCase());
  const heads = columns.map((c, i) => h("th", { class: c.numeric ? "n" : "", scope: "col" }, h("button", { type: "button", onclick: () => {
    state.descending = state.column === i ? !state.descending : Boolean(c.numeric);
    state.column = i;
    draw();
  } }, c.title)));
  function draw() {
    heads.forEach((head, i) => head.setAttribute("aria-sort", i === state.column ? (state.descending ? "descending" : "ascending") : "none"));
    const { value } = columns[state.column];
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.map((row, i) => i).filter((i) => words.every((w) => texts[i].includes(w)));
    const order = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    shown.sort((i, j) => (state.descending ? -1 : 1) * order(value(rows[i]), value(rows[j])) || i - j);
    body.replaceChildren(...shown.map((i) => h("tr", { class: onrow ? "row" : "", "data-row": i, onclick: onrow ? () => onrow(rows[i]) : null }, columns.map((c) => h("td", { class: c.numeric ? "n" : c.keep ? "keep" : "" }, c.show ? c.show(rows[i]) : c.value(rows[i]))))));
    count.textContent = `${shown.length} of ${rows.length}`;
  }
  const input = h("input", { type: "search", placeholder, "aria-label": placeholder, oninput: () => { state.filter = input.value; draw(); } });
  draw();
  return h("div", {}, h("div", { class: "filter" }, input, count), h("div", { class: "scroll" }, h("table", { "data-table": name }, h("thead", {}, h("tr", {}, heads)), body)));
}

function collectiveTables(plan, onrow) {
  const every = collectiveTable(plan, onrow), folded = trafficTable(plan, onrow);
  const show = (table) => {
    buttons.forEach(([button, its]) => button.setAttribute("aria-pressed", String(its === table)));
    every.hidden = table !== every;
    folded.hidden = table !== folded;
  };
  const buttons = [["Equal layers folded", folded], ["Every collective", every]].map(([text, table]) => [h("button", { type: "button", onclick: () => show(table) }, text), table]);
  show(folded);
  return [h("div", { class: "switch" }, buttons.map(([button]) => button)), folded, every];
}

function trafficTable(plan, onrow) {
  const columns = [
    { title: "kind", value: (c) => c.kind, keep: true },
    { title: "axis", value: (c) => c.axes.join(","), keep: true },
    { title: "phase", value: (c) => c.phase, show: (c) => (c.phase === "forward" ? "▼ forward" : "▲ backward"), keep: true },
    { title: "module", value: (c) => place(c.where) },
    { title: "count", value: (c) => c.count, numeric: true },
    { title: "why", value: (c) => c.change },
    { title: "bytes", value: (c) => c.bytes, show: (c) => showBytes(c.bytes), numeric: true },
    { title: "time", value: (c) => c.seconds, show: (c) => showSeconds(c.seconds), numeric: true },
    { title: "share", value: (c) => c.seconds, show: (c) => percent(c.seconds, plan.work), numeric: true },
  ];
  return sortable(columns, plan.traffic, { sort: 7, descending: true, onrow: (c) => onrow(plan.collectives[c.index]), placeholder: "Filter collectives", name: "traffic" });
}

function collectiveTable(plan, onrow) {
  const columns = [
    { title: "#", value: (c) => c.index + 1, numeric: true },
    { title: "kind", value: (c) => c.kind, keep: true },
    { title: "axis", value: (c) => c.axes.join(","), keep: true },
    { title: "phase", value: (c) => c.phase, show: (c) => (c.phase === "forward" ? "▼ forward" : "▲ backward"), keep: true },
    { title: "module", value: (c) => place(c.fqn) },
    { title: "why", value: (c) => c.reason },
    { title: "bytes", value: (c) => c.bytes, show: (c) => showBytes(c.bytes), numeric: true },
    { title: "time", value: (c) => c.seconds, show: (c) => showSeconds(c.seconds), numeric: true },
    { title: "share", value: (c) => c.seconds, show: (c) => percent(c.seconds, plan.work), numeric: true },
  ];
  return sortable(columns, plan.collectives, { sort: 7, descending: true, onrow, placeholder: "Filter collectives", name: "collectives" });
}

function parameterTable(plan) {
  const rows = plan.parameters.map((index) => plan.values[index]);
  const columns = [
    { title: "name", value: (v) => v.name },
    { title: "kind", value: (v) => v.kind, keep: true },
    { title: "shape", value: (v) => showShape(v.shape), keep: true },
    { title: "layout", value: (v) => v.layout, show: (v) => chips(v.layout), keep: true },
    { title: "rank 0 holds", value: (v) => showShape(v.local), keep: true },
    { title: "dtype", value: (v) => v.dtype, keep: true },
    { title: "bytes per rank", value: (v) => v.bytes, show: (v) => showBytes(v.bytes), numeric: true },
  ];
  return sortable(columns, rows, { sort: 6, descending: true, placeholder: "Filter parameters", name: "parameters" });
}

// --- before and after ---

function compareTables(before, after) {
  const cost = (name, pick, show) => ({ name, before: pick(before), after: pick(after), show });
  const rows = [
    cost("step time", (p) => p.cost.total_s, showSeconds), cost("compute", (p) => p.cost.compute_s, showSeconds),
    cost("communication", (p) => p.cost.exposed_s, showSeconds),
    cost("hidden behind compute", (p) => p.cost.comm_s - p.cost.exposed_s, showSeconds), cost("memory per rank", (p) => p.cost.memory_bytes, showBytes),
    cost("FLOPs on the busiest rank", (p) => p.cost.flops_per_rank, showFlops),
    cost("bytes sent per rank", (p) => p.collectives.reduce((sum, c) => sum + c.bytes, 0), showBytes),
    cost("collectives", (p) => p.collectives.length, String),
  ];
  return [h("h2", {}, "Cost"), changeTable(rows), h("h2", {}, "Collectives"), changeTable(trafficRows(before, after)),
    h("h2", {}, "Parameters, buffers and inputs whose layout differs"), layoutChanges(before, after)];
}

function changeTable(rows) {
  const body = rows.map((r) => {
    const ratio = r.before > 0 ? r.after / r.before - 1 : 0;
    const css = Math.abs(ratio) < 5e-4 ? "" : ratio < 0 ? "better" : "worse";
    const text = r.before === r.after ? "same" : r.before > 0 ? `${ratio > 0 ? "+" : "−"}${Math.abs(100 * ratio).toFixed(1)}%` : "new";
    return h("tr", {}, h("td", {}, r.name), h("td", { class: "n" }, r.show(r.before)), h("td", { class: "n" }, r.show(r.after)), h("td", { class: `n ${css}` }, text));
  });
  return h("table", { "data-table": "compare" }, h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", { class: "n" }, "before"), h("th", { class: "n" }, "after"), h("th", { class: "n" }, "change"))), h("tbody", {}, body));
}

function trafficRows(before, after) {
  const total = (plan) => {
    const sums = new Map();
    for (const c of plan.collectives) {
      const key = `${collectiveTitle(c)}`;
      sums.set(key, (sums.get(key) || 0) + c.bytes);
    }
    return sums;
  };
  const [a, b] = [total(before), total(after)];
  return [...new Set([...a.keys(), ...b.keys()])].sort().map((name) => ({ name, before: a.get(name) || 0, after: b.get(name) || 0, show: showBytes }));
}

function layoutChanges(before, after) {
  const byName = (plan) => new Map(plan.parameters.map((i) => [plan.values[i].name, plan.values[i]]));
  const [a, b] = [byName(before), byName(after)];
  const differing = [...new Set([...a.keys(), ...b.keys()])].filter((n) => a.get(n)?.layout !== b.get(n)?.layout);
  if (!differing.length) return h("p", {}, "None.");
  const cell = (value) => h("td", { class: "keep" }, value ? chips(value.layout) : "–");
  return h("table", { "data-table": "layouts" }, h("thead", {}, h("tr", {}, ["name", "before", "after"].map((t) => h("th", {}, t)))), h("tbody", {}, differing.map((n) => h("tr", {}, h("td", {}, n), cell(a.get(n)), cell(b.get(n))))));
}
