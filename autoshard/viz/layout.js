// Where everything goes: layered drawing of one box at a time, boxes inside boxes.

const GAP_X = 18, GAP_Y = 26, PAD = 14, HEAD = 30, LINE = 15, WIDEST = 1500;

function measure(item, plan) {
  if (item.children) return measureClosed(item);
  const lines = itemLines(item, plan);
  const width = Math.max(...lines.map((l) => l.width));
  return { w: Math.max(60, width + (item.kind === "comm" ? 38 : 20)), h: lines.length * LINE + 9 };
}

function measureClosed(box) {
  const lines = boxLines(box);
  return { w: Math.max(120, ...lines.map((l) => textWidth(l.text, 11, l.bold) + 44)), h: 12 + lines.length * LINE };
}

function boxLines(box) {
  const times = box.members.length > 1 ? ` ×${box.members.length}` : "";
  const lines = [{ text: shortened(box.title, 60) + times, bold: true }];
  if (box.cls && box.cls !== box.title) lines.push({ text: shortened(box.cls, 60) });
  const sent = box.comms ? `, ${plural(box.comms, "collective")} ${showSeconds(box.commSeconds)}` : "";
  if (box.seconds || box.comms) lines.push({ text: `compute ${showSeconds(box.seconds)}${sent}` });
  return lines;
}

// Lines of a leaf: {text, bold, soft, css, layout, width}
function itemLines(item, plan) {
  const lines = [];
  const add = (text, style = {}) => lines.push({ text, ...style, width: textWidth(text, 11, style.bold) });
  const layout = (text) => lines.push({ layout: text, width: layoutMarks(text).reduce((w, m) => w + textWidth(m.text, 10) + 14, 0) });
  if (item.kind === "comm") {
    for (const i of item.collectives) {
      const c = plan.collectives[i];
      const text = `${c.phase === "forward" ? "▼" : "▲"} ${c.kind}@${c.axes.join(",")} ${showBytes(c.bytes)} ${showSeconds(c.seconds)}`;
      add(text, { css: c.phase, collective: i });
    }
  } else if (item.kind === "tensor") {
    const value = plan.values[item.value];
    add(shortened(item.title, 48), { bold: true });
    add(showShape(value.shape), { soft: true });
    layout(value.layout);
  } else {
    const time = item.seconds ? `  ${showSeconds(item.seconds)}` : "";
    add(shortened(item.title, 48) + time, { bold: !item.view });
    item.outputs.slice(0, 2).forEach((index) => {
      const value = plan.values[index];
      if (!item.view) add(`${showShape(value.shape)}`, { soft: true });
      layout(value.layout);
    });
    if (item.outputs.length > 2) add(`… ${item.outputs.length - 2} more results`, { soft: true });
  }
  return lines;
}

// The geometry of a box: {w, h, children: [{node, x, y, w, h, inner}], paths: [{points, from, to}]}.
function layoutBox(box, plan, view) {
  const children = box.children.map((node, index) => {
    const inner = node.children && view.open.has(node) ? layoutBox(node, plan, view) : null;
    const size = inner ? { w: Math.max(inner.w, measureClosed(node).w), h: inner.h } : measure(node, plan);
    return { node, index, inner, ...size };
  });
  const edges = liftedEdges(box, plan);
  const layers = intoLayers(children, edges);
  const slots = withRoutes(layers, edges, children);
  arrange(slots);
  return place2d(slots, children, edges, box);
}

// Edges between direct children of the box, each once; computed on first use.
function liftedEdges(box, plan) {
  if (box.lifted) return box.lifted;
  const owner = new Map();
  box.children.forEach((child, index) => plan.idsIn(child).forEach((id) => owner.set(id, index)));
  const found = new Map();
  box.fromOutside = new Set();
  box.toOutside = new Set();
  for (const [id, index] of owner) {
    if ((plan.predecessors.get(id) || []).some((source) => !owner.has(source))) box.fromOutside.add(index);
    if ((plan.successors.get(id) || []).some((target) => !owner.has(target))) box.toOutside.add(index);
    for (const target of plan.successors.get(id) || []) {
      const to = owner.get(target);
      if (to !== undefined && to !== index) found.set(`${index},${to}`, { from: index, to });
    }
  }
  box.lifted = [...found.values()];
  return box.lifted;
}

// Children stand in order of execution, so one sweep in that order is a topological one. A layer that has grown wide
// takes no more: twenty embedding tables stand in several rows.
function intoLayers(children, edges) {
  const up = children.map(() => []), down = children.map(() => []);
  for (const e of edges) {
    e.back = e.from > e.to;
    if (!e.back) { down[e.from].push(e.to); up[e.to].push(e.from); }
  }
  const widths = [];
  const room = (level, child) => !widths[level] || widths[level] + child.w + GAP_X <= WIDEST;
  const put = (child, level) => { child.level = level; widths[level] = (widths[level] || 0) + child.w + GAP_X; };
  const floating = [];
  children.forEach((child, i) => {
    let level = Math.max(0, ...up[i].map((j) => children[j].level + 1));
    while (!room(level, child)) level += 1;
    put(child, level);
    floating[i] = !up[i].length || (child.node.kind === "comm" && up[i].every((j) => floating[j]));
  });
  // Parameters, inputs and what is sent of them stand right above their first reader.
  for (let i = children.length - 1; i >= 0; i--) {
    if (!floating[i] || !down[i].length) continue;
    const child = children[i];
    let level = Math.min(...down[i].map((j) => children[j].level)) - 1;
    while (level > child.level && !room(level, child)) level -= 1;
    if (level > child.level) {
      widths[child.level] -= child.w + GAP_X;
      put(child, level);
    }
  }
  const layers = [];
  children.forEach((child) => (layers[child.level] ||= []).push(child));
  return layers.filter(Boolean);
}

// Long edges get a slot of their own in every layer they pass, so that they run between the nodes.
function withRoutes(layers, edges, children) {
  const level = new Map();
  layers.forEach((layer, i) => layer.forEach((child) => level.set(child, i)));
  const slots = layers.map((layer) => layer.map((child) => {
    child.up = []; child.down = [];
    return child;
  }));
  let budget = 4000;
  for (const e of edges) {
    const a = children[e.from], b = children[e.to];
    const span = level.get(b) - level.get(a);
    e.via = [];
    if (e.back || span < 1) continue;
    let last = a;
    if (budget > 0) {
      for (let i = level.get(a) + 1; i < level.get(b); i++, budget--) {
        const slot = { w: 6, h: 0, up: [last], down: [], route: true };
        last.down.push(slot); slots[i].push(slot); e.via.push(slot);
        last = slot;
      }
    }
    last.down.push(b); b.up.push(last);
  }
  return slots;
}

function arrange(slots) {
  const order = (layer) => layer.forEach((slot, i) => { slot.order = i; slot.count = layer.length; });
  slots.forEach(order);
  for (let sweep = 0; sweep < 6; sweep++) {
    const key = sweep % 2 ? "down" : "up";
    const sequence = sweep % 2 ? [...slots].reverse() : slots;
    for (const layer of sequence) {
      for (const slot of layer) {
        const near = slot[key];
        slot.weight = near.length ? near.reduce((sum, n) => sum + (n.order + 0.5) / n.count, 0) / near.length : (slot.order + 0.5) / layer.length;
      }
      layer.sort((a, b) => a.weight - b.weight || a.order - b.order);
      order(layer);
    }
  }
  for (const layer of slots) spread(layer, () => 0);
  for (let sweep = 0; sweep < 8; sweep++) {
    const sequence = sweep % 2 ? [...slots].reverse() : slots;
    for (const layer of sequence) {
      spread(layer, (slot) => {
        const near = sweep < 6 ? (sweep % 2 ? slot.down : slot.up) : [...slot.up, ...slot.down];
        return near.length ? near.reduce((sum, n) => sum + n.cx, 0) / near.length : slot.cx;
      });
    }
  }
}

// Centres as near to the wanted ones as order and widths allow: the mean of pushing from the left and from the right.
function spread(layer, wanted) {
  const goals = layer.map(wanted);
  const room = (i) => (layer[i - 1].w + layer[i].w) / 2 + GAP_X;
  const left = [], right = [];
  for (let i = 0; i < layer.length; i++) left[i] = i ? Math.max(goals[i], left[i - 1] + room(i)) : goals[i];
  for (let i = layer.length - 1; i >= 0; i--) right[i] = i < layer.length - 1 ? Math.min(goals[i], right[i + 1] - room(i + 1)) : goals[i];
  layer.forEach((slot, i) => { slot.cx = (left[i] + right[i]) / 2; });
}

function place2d(slots, children, edges, box) {
  let y = box.path === "" && box.root ? PAD : HEAD + 8, low = Infinity, high = -Infinity;
  for (const layer of slots) {
    const tall = Math.max(...layer.map((slot) => slot.h));
    for (const slot of layer) {
      slot.y = y + (slot.route ? 0 : (tall - slot.h) / 2);
      if (slot.route) slot.h = tall;
      [slot.top, slot.bottom] = [y, y + tall];
      low = Math.min(low, slot.cx - slot.w / 2);
      high = Math.max(high, slot.cx + slot.w / 2);
    }
    y += tall + GAP_Y;
  }
  const back = edges.some((e) => e.back) ? 24 : 0;
  for (const layer of slots) for (const slot of layer) { slot.cx += PAD - low; slot.x = slot.cx - slot.w / 2; }
  const width = high - low + 2 * PAD + back;
  const paths = edges.map((e) => ({ from: children[e.from].node, to: children[e.to].node, d: pathOf(e, children, width) }));
  return { w: width, h: y - GAP_Y + PAD, children, paths, stubs: stubs(box, children) };
}

// Short dashed arrows where a value comes from outside the box or leaves it.
function stubs(box, children) {
  const into = [...box.fromOutside].map((i) => ({ x: children[i].cx - children[i].w / 4, y: children[i].y - 15 }));
  const out = [...box.toOutside].map((i) => ({ x: children[i].cx + children[i].w / 4, y: children[i].y + children[i].h }));
  return [...into, ...out].map(({ x, y }) => `M${x},${y} v15`);
}

function pathOf(e, children, width) {
  const a = children[e.from], b = children[e.to];
  if (e.back) {
    const side = width - 10;
    return `M${a.cx},${a.y + a.h} C${a.cx},${a.y + a.h + 30} ${side},${a.y + a.h + 30} ${side},${a.y} L${side},${b.y} C${side},${b.y - 30} ${b.cx},${b.y - 30} ${b.cx},${b.y}`;
  }
  // Sideways only between the layers, so that no line runs behind a neighbour that is taller.
  let d = `M${a.cx},${a.y + a.h} L${a.cx},${a.bottom}`, x = a.cx, y = a.bottom;
  for (const slot of [...e.via, b]) {
    const middle = (y + slot.top) / 2;
    d += Math.abs(x - slot.cx) < 0.5 ? ` L${slot.cx},${slot.top}` : ` C${x},${middle} ${slot.cx},${middle} ${slot.cx},${slot.top}`;
    const end = slot === b ? b.y : slot.bottom;
    if (end > slot.top) d += ` L${slot.cx},${end}`; // a line of no length would turn the arrow's head
    x = slot.cx;
    y = slot.bottom;
  }
  return d;
}
