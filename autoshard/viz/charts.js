// Memory over time, and where the time and the memory go.

function memoryChart(plan) {
  const W = 720, H = 260, L = 74, R = 14, T = 14, B = 30;
  const points = plan.memory;
  const end = Math.max(points[points.length - 1][0], 1e-12);
  const peak = Math.max(...points.map((p) => p[1]), 1);
  const limit = plan.budget > 0 && plan.budget < 1e15 ? plan.budget : plan.capacity < 1e15 ? plan.capacity : 0;
  const top = Math.max(peak, limit) * 1.08;
  const x = (t) => L + (t / end) * (W - L - R), y = (b) => H - B - (b / top) * (H - T - B);
  let line = `M${x(0)},${y(points[0][1])}`;
  points.slice(1).forEach(([t, b]) => { line += ` H${x(t).toFixed(2)} V${y(b).toFixed(2)}`; });
  const area = `${line} V${y(0)} H${x(0)} z`;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((f) => s("g", {}, s("line", { class: "axis", x1: L, x2: W - R, y1: y(f * peak), y2: y(f * peak) }), s("text", { x: L - 6, y: y(f * peak) + 4, "text-anchor": "end", "font-size": 11, class: "soft" }, showBytes(f * peak))));
  const times = [0, 0.5, 1].map((f) => s("text", { x: x(f * end), y: H - 10, "text-anchor": f === 0 ? "start" : f === 1 ? "end" : "middle", "font-size": 11, class: "soft" }, showSeconds(f * end)));
  const budget = limit ? [s("line", { class: "budget", id: "budget", x1: L, x2: W - R, y1: y(limit), y2: y(limit) }), s("text", { x: W - R, y: y(limit) + 13, "text-anchor": "end", "font-size": 11 }, `budget ${showBytes(limit)}`)] : [];
  const cursor = s("line", { class: "stroke", y1: T, y2: H - B, x1: -9, x2: -9 });
  const read = h("p", { class: "soft" }, `Peak ${showBytes(peak)} of ${plan.capacity < 1e15 ? showBytes(plan.capacity) : "unlimited memory"}.`);
  const chart = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "memory per rank over time", onmousemove: (event) => {
    const box = chart.getBoundingClientRect();
    const t = Math.min(end, Math.max(0, (((event.clientX - box.left) / box.width) * W - L) / (W - L - R)) * end);
    let bytes = points[0][1];
    for (const p of points) { if (p[0] > t) break; [, bytes] = p; }
    cursor.setAttribute("x1", x(t)); cursor.setAttribute("x2", x(t));
    read.textContent = `${showSeconds(t)}: ${showBytes(bytes)}. Peak ${showBytes(peak)}.`;
  } }, ticks, times, s("path", { class: "area", d: area }), s("path", { class: "stroke", d: line }), budget, cursor);
  return h("div", { class: "card" }, h("h2", {}, "Memory per rank over the step"), chart, read);
}

function bars(title, rows, show, css) {
  const W = 720, row = 24, L = 12;
  const most = Math.max(...rows.map((r) => r.value), 1e-30);
  const marks = rows.map((r, i) => {
    const y = i * (row + 12) + 4;
    const amount = `${show(r.value)}${r.note ? `  ${r.note}` : ""}`;
    const label = shortened(r.name, Math.max(20, Math.floor((W - L - textWidth(amount, 12) - 30) / 7.3)));
    return s("g", {}, s("text", { x: L, y: y + 12, "font-size": 12 }, label, s("title", {}, r.name)),
      s("text", { x: W - L, y: y + 12, "font-size": 12, "text-anchor": "end" }, amount),
      s("rect", { x: L, y: y + 17, width: Math.max(1, (r.value / most) * (W - 2 * L)), height: 7, rx: 2, class: r.css || css }));
  });
  return h("div", { class: "card" }, h("h2", {}, title), s("svg", { viewBox: `0 0 ${W} ${rows.length * (row + 12) + 8}`, role: "img", "aria-label": title }, marks));
}

function charts(plan) {
  const axes = new Map();
  for (const c of plan.collectives) {
    const key = `${c.axes.join(",")}, ${c.phase}`;
    axes.set(key, (axes.get(key) || 0) + c.seconds);
  }
  if (!plan.pipeline && plan.cost.local_s > 0) axes.set("local copies for collectives", plan.cost.local_s);
  const sent = [...axes.values()].reduce((sum, seconds) => sum + seconds, 0);
  const hidden = Math.max(0, plan.cost.comm_s - plan.cost.exposed_s);
  const split = [...axes].map(([name, value]) => ({ name, value, note: percent(value, sent), css: "c-comm" }));
  const hot = plan.hot.map(([name, count, value]) => ({ name: count > 1 ? `${name} ×${count}` : name, value, note: percent(value, plan.work), css: name.includes("@") ? "c-comm" : "c-compute" }));
  const memory = plan.memoryParts.map(([name, value]) => ({ name, value, note: percent(value, plan.cost.memory_bytes) }));
  return h("div", { class: "charts" }, memoryChart(plan), bars("Memory per rank by use", memory, showBytes, "c-mem"),
    bars(`Communication: ${showSeconds(plan.cost.exposed_s)} exposed + ${showSeconds(hidden)} hidden`, split, showSeconds, "c-comm"), bars("What dominates (share of all work)", hot, showSeconds, "c-compute"));
}
