// Above the tabs: the plan in a sentence, and its step as one bar. A tab: what it is compared with, and what else to ask.

function stepBar(plan) {
  const { cost } = plan;
  const hidden = Math.max(0, cost.comm_s - cost.exposed_s);
  const parts = [["compute", cost.compute_s, "c-compute"], ["exposed communication", cost.exposed_s, "c-comm"], ["pipeline bubble", cost.bubble_s, "c-idle"]].filter(([, seconds]) => seconds > 0);
  const whole = Math.max(cost.total_s, parts.reduce((sum, [, seconds]) => sum + seconds, 0), 1e-30);
  const wide = (seconds) => `width:${((100 * seconds) / whole).toFixed(3)}%`;
  const piece = ([name, seconds, css]) => h("div", { class: `piece ${css}`, style: wide(seconds), title: `${name}: ${showSeconds(seconds)}` });
  const behind = hidden > 0 ? h("div", { class: "piece hidden-comm", style: wide(Math.min(hidden, cost.compute_s)), title: `hidden behind compute: ${showSeconds(hidden)}` }) : null;
  const key = ([name, seconds, css], note) => h("span", { class: "key" }, h("i", { class: css }), ` ${name} ${showSeconds(seconds)}${note}`);
  return h("div", { class: "step" },
    h("div", { class: "stack", role: "img", "aria-label": `a step of ${showSeconds(cost.total_s)}: ${parts.map(([name, seconds]) => `${name} ${showSeconds(seconds)}`).join(", ")}` }, parts.map(piece), behind),
    h("p", { class: "keys" }, parts.map((part) => key(part, ` (${percent(part[1], cost.total_s)})`)),
      hidden > 0 ? key(["communication hidden behind compute", hidden, "hidden-comm"], "") : null));
}

function summary(plan) {
  const lines = plan.summary.filter(([label]) => label !== "plan" && label !== "compared");
  return h("div", { class: "sentence" }, h("p", {}, h("b", {}, plan.strategy), `: ${showSeconds(plan.cost.total_s)} a step, ${showBytes(plan.cost.memory_bytes)} per rank.`),
    stepBar(plan), h("details", {}, h("summary", {}, "Memory, speed, how sure"), h("dl", {}, lines.flatMap(([label, text]) => [h("dt", {}, label), h("dd", {}, text)]))));
}

function comparedTable(plan) {
  const first = plan.compared[0][1];
  const slowest = Number.MAX_VALUE; // plans that do not fit are sorted last
  const columns = [
    { title: "plan", value: ([name]) => name },
    { title: "step", value: ([, seconds]) => seconds ?? slowest, show: ([, seconds]) => (seconds === null ? "–" : showSeconds(seconds)), numeric: true },
    { title: "relative", value: ([, seconds]) => seconds ?? slowest, show: ([, seconds]) => (seconds === null || !first ? "–" : `× ${(seconds / first).toFixed(3)}`), numeric: true },
    { title: "peak per rank", value: ([, , peak]) => peak, show: ([, , peak]) => (peak ? showBytes(peak) : "–"), numeric: true },
    { title: "why not", value: ([, , , why]) => why },
  ];
  const ask = plan.complete ? null : h("p", { class: "hint" }, "Named strategies are planned when plan.compared is read; then draw the page again.");
  const lines = plan.whatIf.map(([question, command]) => h("tr", {}, h("td", { class: "keep" }, question), h("td", {}, h("code", {}, command))));
  return [sortable(columns, plan.compared, { sort: 1, placeholder: "Filter plans", name: "compared" }), ask,
    h("h2", {}, "What if"), h("table", { "data-table": "what-if" }, h("tbody", {}, lines))];
}
