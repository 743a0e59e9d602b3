// The schedule of a pipeline: a row per rank, forwards and backwards of micro-batches, messages between the rows.

const KINDS = { F: ["forward", "p-forward"], B: ["backward", "p-backward"], I: ["backward of inputs", "p-backward"], W: ["backward of weights", "p-weights"] };

function pipelineChart(pipe) {
  const W = 1180, row = 34, L = 86, R = 70, T = 10;
  const H = T + pipe.ranks.length * row + 26;
  const x = (t) => L + (t / pipe.end) * (W - L - R), y = (rank) => T + rank * row;
  const read = h("p", { class: "soft" }, `${pipe.schedule}, ${pipe.batches} micro-batches along ${pipe.axis}. Point at a piece of work.`);
  const say = (text) => () => { read.textContent = text; };
  const work = (rank) => ([kind, stage, batch, start, end]) => {
    const [name, css] = KINDS[kind];
    const width = x(end) - x(start);
    const mark = s("rect", { class: css, x: x(start), y: y(rank) + 3, width: Math.max(0.4, width), height: row - 10, rx: width > 6 ? 2 : 0,
      onmouseenter: say(`rank ${rank}, stage ${stage}: ${name} of micro-batch ${batch}, ${showSeconds(end - start)} from ${showSeconds(start)}`) });
    const label = width > 16 ? s("text", { class: "p-label", x: x((start + end) / 2), y: y(rank) + row / 2 + 2, "text-anchor": "middle", "font-size": 10 }, String(batch)) : null;
    return s("g", {}, mark, label);
  };
  const rows = pipe.ranks.map((spans, rank) => s("g", {},
    s("text", { x: 4, y: y(rank) + row / 2 + 2, "font-size": 12 }, `${pipe.axis} ${rank}`),
    s("rect", { class: "p-idle", x: L, y: y(rank) + 3, width: W - L - R, height: row - 10 }),
    spans.map(work(rank)),
    s("text", { x: W - R + 6, y: y(rank) + row / 2 + 2, "font-size": 11, class: "soft" }, `waits ${(100 * pipe.idle[rank]).toFixed(0)}%`)));
  const middle = (rank) => y(rank) + row / 2 - 2;
  const messages = pipe.messages.length > 2000 ? [] : pipe.messages.map(([source, target, start, end]) => s("line", { class: "p-message", x1: x(start), y1: middle(source), x2: x(end), y2: middle(target) }));
  const times = [0, 0.25, 0.5, 0.75, 1].map((f) => s("text", { x: x(f * pipe.end), y: H - 6, "text-anchor": f === 0 ? "start" : f === 1 ? "end" : "middle", "font-size": 11, class: "soft" }, showSeconds(f * pipe.end)));
  const legend = h("p", { class: "legend" }, Object.entries({ forward: "p-forward", backward: "p-backward", "backward of weights": "p-weights", waiting: "p-idle" })
    .filter(([name]) => name !== "backward of weights" || pipe.ranks[0].some(([kind]) => kind === "W"))
    .map(([name, css]) => h("span", {}, s("svg", { width: 12, height: 12 }, s("rect", { class: css, width: 12, height: 12, rx: 2 })), ` ${name} `)));
  return h("div", { class: "card wide", id: "pipeline" }, h("h2", {}, "Schedule of the pipeline"),
    s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "work of every rank over time" }, rows, messages, times), legend, read);
}

function stageTable(plan) {
  const columns = [
    { title: "stage", value: (r) => r[0], numeric: true }, { title: "rank", value: (r) => r[1], numeric: true }, { title: "modules", value: (r) => r[2] },
    { title: "forward", value: (r) => r[3], show: (r) => showSeconds(r[3]), numeric: true }, { title: "backward", value: (r) => r[4], show: (r) => showSeconds(r[4]), numeric: true },
    { title: "sends", value: (r) => r[5], show: (r) => showBytes(r[5]), numeric: true }, { title: "in flight", value: (r) => r[6], numeric: true },
    { title: "memory per rank", value: (r) => r[7], show: (r) => showBytes(r[7]), numeric: true },
  ];
  return [pipelineChart(plan.pipeline), sortable(columns, plan.stages, { placeholder: "Filter stages", name: "stages" })];
}
