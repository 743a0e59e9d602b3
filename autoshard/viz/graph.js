// The picture of one plan: open and close boxes, select, reveal, zoom.

function prepare(plan) {
  plan.values = plan.values.map(([name, kind, shape, local, layout, dtype, bytes]) => ({ name, kind, shape, local, layout: plan.layouts[layout], dtype, bytes }));
  plan.collectives = plan.collectives.map(([kind, axes, phase, bytes, seconds, fqn, value, reason, item], index) => ({ kind, axes, phase, bytes, seconds, fqn, value, reason, item, index }));
  plan.traffic = plan.traffic.map(([where, reason, count, bytes, seconds, first]) => ({ ...plan.collectives[first], where, change: reason, count, bytes, seconds }));
  plan.items = new Map();
  plan.parents = new Map();
  plan.makers = new Map();
  plan.successors = new Map();
  plan.predecessors = new Map();
  const link = (map, a, b) => (map.has(a) ? map.get(a).push(b) : map.set(a, [b]));
  for (const [a, b] of plan.edges) { link(plan.successors, a, b); link(plan.predecessors, b, a); }
  const ids = new Map();
  plan.idsIn = (node) => {
    if (!node.children) return [node.id];
    if (!ids.has(node)) ids.set(node, node.children.flatMap((child) => plan.idsIn(child)));
    return ids.get(node);
  };
  const walk = (node, parent) => {
    plan.parents.set(node, parent);
    if (node.children) node.children.forEach((child) => walk(child, node));
    else {
      plan.items.set(node.id, node);
      (node.outputs || []).forEach((index) => plan.makers.set(plan.values[index], node));
    }
  };
  plan.tree.root = true;
  walk(plan.tree, null);
  plan.slowest = Math.max(1e-30, ...[...plan.items.values()].map((i) => i.seconds || 0), ...plan.collectives.map((c) => c.seconds));
  return plan;
}

class GraphView {
  constructor(plan, onSelect, label = "") {
    this.label = label;
    this.plan = plan;
    this.open = new Set([plan.tree]);
    this.onSelect = onSelect;
    this.selected = null;
    this.zoom = 1;
    this.drawn = new Map();
    this.canvas = h("div", { class: "canvas", tabindex: "0" });
    this.element = h("div", { class: "pane", "data-plan": plan.name }, this.bar(), this.canvas);
    // A model of one or two modules is no use closed.
    const boxes = plan.tree.children.filter((c) => c.children);
    if (plan.idsIn(plan.tree).length <= 40) boxes.forEach((box) => this.open.add(box));
    this.render();
  }

  bar() {
    const button = (text, title, act) => h("button", { type: "button", title, onclick: act }, text);
    const legend = [["S(0)", "s0"], ["S(1)", "s1"], ["S(2)", "s2"], ["S(3)", "s3"], ["replicate", "r"], ["partial", "p"]];
    return h("div", { class: "bar" }, this.label ? h("strong", {}, this.label) : null,
      button("Open one level", "Open every closed box that is shown", () => this.openLevel()),
      button("Close all", "Close every box", () => { this.open = new Set([this.plan.tree]); this.render(); }),
      button("−", "Smaller", () => this.scale(1 / 1.25)), button("+", "Larger", () => this.scale(1.25)),
      button("Fit", "Fit the width", () => this.fit()),
      h("span", { class: "legend" }, legend.map(([text, css]) => h("span", { class: `chip ${css}` }, text)), "▼ forward  ▲ backward"));
  }

  openLevel() {
    const shown = [];
    const walk = (node) => node.children.forEach((child) => {
      if (!child.children) return;
      if (this.open.has(child)) walk(child);
      else shown.push(child);
    });
    walk(this.plan.tree);
    shown.forEach((box) => this.open.add(box));
    this.render();
  }

  scale(factor) {
    this.zoom = Math.min(3, Math.max(0.15, this.zoom * factor));
    this.resize();
  }

  fit() {
    this.zoom = Math.min(1.5, Math.max(0.15, (this.canvas.clientWidth - 20) / this.size.w));
    this.resize();
  }

  center() {
    this.canvas.scrollLeft = (this.canvas.scrollWidth - this.canvas.clientWidth) / 2;
  }

  resize() {
    this.svg.setAttribute("width", this.size.w * this.zoom);
    this.svg.setAttribute("height", this.size.h * this.zoom);
  }

  toggle(box) {
    const before = this.drawn.get(box)?.getBoundingClientRect();
    if (this.open.has(box)) this.open.delete(box);
    else this.open.add(box);
    this.render();
    const after = this.drawn.get(box)?.getBoundingClientRect();
    if (!before || !after) return;
    this.canvas.scrollBy(0, after.top - before.top);
    const seen = this.canvas.getBoundingClientRect();
    if (after.left < seen.left || after.right > seen.right) this.canvas.scrollBy(after.left - seen.left - Math.max(12, (seen.width - after.width) / 2), 0);
  }

  render() {
    this.drawn.clear();
    this.paths = [];
    this.size = layoutBox(this.plan.tree, this.plan, this);
    const { w, h: tall } = this.size;
    this.svg = s("svg", { viewBox: `0 0 ${w} ${tall}`, role: "img", "aria-label": `graph of ${this.plan.title}` }, this.arrow());
    this.svg.append(this.contents(this.size, 0));
    const { scrollLeft, scrollTop } = this.canvas;
    this.canvas.replaceChildren(this.svg);
    this.resize();
    this.canvas.scrollTo(scrollLeft, scrollTop);
    if (this.selected) this.mark(this.selected);
  }

  arrow() {
    const tip = s("path", { d: "M0,0 L7,3.5 L0,7 z", style: "fill:var(--edge)" });
    const id = `arrow-${this.plan.name}`;
    return s("defs", {}, s("marker", { id, viewBox: "0 0 7 7", refX: 6.5, refY: 3.5, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" }, tip));
  }

  contents(geometry, depth) {
    const group = s("g", {});
    for (const path of geometry.paths) {
      const line = s("path", { class: "edge", d: path.d, "marker-end": `url(#arrow-${this.plan.name})` });
      this.paths.push({ ...path, line });
      group.append(line);
    }
    for (const d of geometry.stubs) group.append(s("path", { class: "edge stub", d, "marker-end": `url(#arrow-${this.plan.name})` }));
    for (const child of geometry.children) group.append(child.inner ? this.openBox(child, depth) : child.node.children ? this.closedBox(child, depth) : this.leaf(child));
    return group;
  }

  head(box, child, lines, deep) {
    const mark = this.open.has(box) ? "▾" : "▸";
    const texts = lines.map((l, i) => s("text", { x: 26, y: 17 + i * LINE, "font-size": 11, class: l.bold ? "bold" : "soft" }, l.text));
    const size = { width: child.w, height: this.open.has(box) ? HEAD - 4 : child.h, rx: 8 };
    const act = (event) => { event.stopPropagation(); this.toggle(box); this.select(box); };
    return s("g", { class: "head", role: "button", tabindex: "0", "aria-expanded": String(this.open.has(box)), "aria-label": box.path || box.title, onclick: act, onkeydown: (e) => { if (e.key === "Enter") act(e); } },
      s("rect", size), s("text", { x: 9, y: 17, "font-size": 12 }, mark), texts, s("title", {}, `${box.members.join("\n").slice(0, 2000)}\n${box.cls}`));
  }

  boxShape(child, depth, ...inside) {
    const box = child.node;
    const shape = s("g", { class: `box${depth % 2 ? " deep" : ""}`, transform: `translate(${child.x},${child.y})`, "data-path": box.path }, s("rect", { width: child.w, height: child.h, rx: 8 }), inside);
    this.drawn.set(box, shape);
    return shape;
  }

  closedBox(child, depth) {
    const heat = this.heat(child, child.node.seconds + child.node.commSeconds, this.plan.work);
    return this.boxShape(child, depth, this.head(child.node, child, boxLines(child.node), depth), heat);
  }

  openBox(child, depth) {
    const lines = boxLines(child.node).slice(0, 1);
    const inner = this.contents(child.inner, depth + 1);
    inner.setAttribute("transform", `translate(${(child.w - child.inner.w) / 2},0)`);
    return this.boxShape(child, depth, this.head(child.node, child, lines, depth), inner);
  }

  heat(child, seconds, whole) {
    if (!seconds || whole <= 0) return null;
    const width = Math.max(0, Math.min(1, seconds / whole)) * (child.w - 8);
    return width < 1 ? null : s("rect", { class: "heat", x: 4, y: child.h - 4, width, height: 2.5, rx: 1 });
  }

  leaf(child) {
    const item = child.node;
    const kind = item.kind === "op" ? `op${item.view ? " view" : ""}${item.rule ? "" : " norule"}` : item.kind;
    const onlyBack = item.kind === "comm" && item.collectives.every((i) => this.plan.collectives[i].phase !== "forward");
    const act = (event) => { event.stopPropagation(); this.select(item, Number(event.target.dataset?.collective ?? -1)); };
    const shape = s("g", { class: `leaf ${kind}${onlyBack ? " back" : ""}`, transform: `translate(${child.x},${child.y})`, "data-id": item.id, tabindex: "0", role: "button", onclick: act, onkeydown: (e) => { if (e.key === "Enter") act(e); } },
      this.outline(item, child), this.lines(item, child), s("title", {}, this.hint(item)));
    if (item.kind === "op") shape.append(...[this.heat(child, item.seconds, this.plan.slowest)].filter(Boolean));
    this.drawn.set(item, shape);
    return shape;
  }

  hint(item) {
    if (item.kind === "comm") return item.collectives.map((i) => this.plan.collectives[i].reason).join("\n");
    if (item.kind === "tensor") return this.plan.values[item.value].name;
    return `${item.name} = ${item.op}\n${item.fqn}\n${item.source}`;
  }

  outline(item, { w, h: tall }) {
    if (item.kind !== "comm") return s("rect", { class: "shape", width: w, height: tall, rx: item.kind === "tensor" ? tall / 2.4 : 4 });
    const cut = 12;
    return s("polygon", { class: "shape", points: `${cut},0 ${w - cut},0 ${w},${tall / 2} ${w - cut},${tall} ${cut},${tall} 0,${tall / 2}` });
  }

  lines(item, { w }) {
    return itemLines(item, this.plan).flatMap((line, i) => {
      const y = 16 + i * LINE;
      if (line.layout === undefined) {
        const css = [line.bold ? "bold" : "", line.soft ? "soft" : "", line.css || ""].join(" ");
        return [s("text", { x: w / 2, y, "text-anchor": "middle", "font-size": 11, class: css, "data-collective": line.collective }, line.text)];
      }
      let x = (w - line.width) / 2;
      return layoutMarks(line.layout).flatMap((mark) => {
        const width = textWidth(mark.text, 10) + 10;
        const made = [s("rect", { x, y: y - 11, width, height: 14, rx: 3, class: mark.css }), s("text", { x: x + width / 2, y: y - 0.5, "text-anchor": "middle", "font-size": 10, class: `t-${mark.css}` }, mark.text)];
        x += width + 4;
        return made;
      });
    });
  }

  mark(node) {
    this.svg.querySelectorAll(".selected").forEach((e) => e.classList.remove("selected"));
    this.drawn.get(node)?.classList.add("selected");
    for (const path of this.paths) path.line.classList.toggle("lit", path.from === node || path.to === node);
  }

  select(node, collective = -1) {
    this.selected = node;
    this.mark(node);
    this.onSelect(node, this.plan, collective, this);
  }

  // Open everything around a node, select it and bring it into view.
  reveal(node, collective = -1) {
    for (let box = this.plan.parents.get(node); box; box = this.plan.parents.get(box)) this.open.add(box);
    this.render();
    this.select(node, collective);
    this.drawn.get(node)?.scrollIntoView({ block: "center", inline: "center" });
  }
}
