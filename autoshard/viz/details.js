// The panel beside the picture: everything known about what was clicked.

function field(list, name, ...value) {
  if (value.length === 1 && (value[0] === "" || value[0] === null || value[0] === undefined)) return;
  list.append(h("dt", {}, name), h("dd", {}, ...value));
}

function showDetails(panel, node, plan, collective, view) {
  const parts = node === null ? overview() : node.children ? boxDetails(node, plan) : node.kind === "comm" ? commDetails(node, plan, collective, view) : node.kind === "tensor" ? tensorDetails(node, plan) : opDetails(node, plan, view);
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
}

function overview() {
  return [h("h3", {}, "Details"), h("p", { class: "hint" }, "Click a box to open it, an operation, a tensor or a collective to read what was decided and what it costs."),
    h("h4", {}, "How to read it"),
    h("p", {}, "Rounded: stored or given tensors. Rectangles: operations with the layout of their result; dashed ones are views and cost nothing. Hexagons: collectives. Dashed arrows come from or go to another box. A red line at the foot shows the share of time."),
    h("p", {}, "S(d)@axis: dim d is sharded along the mesh axis. R: replicated on every rank. P: every rank holds a partial sum.")];
}

function boxDetails(box, plan) {
  const list = h("dl");
  field(list, "class", box.cls);
  field(list, "stands for", box.members.length > 1 ? `${box.members.length} equal modules` : "");
  field(list, "compute", showSeconds(box.seconds));
  field(list, "communication", `${showSeconds(box.commSeconds)} in ${plural(box.comms, "collective")}`);
  field(list, "share of all work", percent(box.seconds + box.commSeconds, plan.work));
  const more = box.members.length > 1 ? [h("h4", {}, "Modules"), h("p", { class: "mono" }, box.members.join(", "))] : [];
  return [h("h3", {}, box.path || plan.title), list, ...more];
}

function tensorBlock(value, used, plan, view) {
  const maker = plan?.makers.get(value);
  const list = h("dl");
  field(list, "global", `${showShape(value.shape)} ${value.dtype}`);
  field(list, "rank 0 holds", `${showShape(value.local)}, ${showBytes(value.bytes)}`);
  field(list, "layout", ...chips(value.layout));
  if (used !== undefined && used !== value.layout) field(list, "read as", ...chips(used));
  const name = maker ? h("button", { class: "link mono", type: "button", title: "Go to the operation that makes it", onclick: () => view.reveal(maker) }, value.name) : h("code", {}, value.name);
  return h("div", { class: "tensor-row" }, name, list);
}

function tensorDetails(item, plan) {
  const value = plan.values[item.value];
  return [h("h3", {}, value.name), h("p", { class: "hint" }, value.kind), tensorBlock(value)];
}

function opDetails(item, plan, view) {
  const list = h("dl");
  field(list, "operation", h("code", {}, item.op));
  field(list, "name", h("code", {}, item.name));
  field(list, "module", place(item.fqn));
  field(list, "source", h("code", {}, item.source));
  field(list, "strategy", strategy(item.labels, plan));
  field(list, "time", `${showSeconds(item.seconds)} forward and backward, ${percent(item.seconds, plan.work)} of all work`);
  field(list, "FLOPs", item.flops ? `${showFlops(item.flops)} on all ranks` : "");
  field(list, "drawn once for", item.times > 1 ? `${item.times} equal operations` : "");
  const warning = item.rule ? [] : [h("p", { class: "warn" }, "No sharding rule: runs on full tensors on every rank. Add one with autoshard.register_rule.")];
  const inputs = item.inputs.map(([v, use]) => tensorBlock(plan.values[v], plan.layouts[use], plan, view));
  const outputs = item.outputs.map((v) => tensorBlock(plan.values[v]));
  return [h("h3", {}, item.title), ...warning, list, h("h4", {}, "Reads"), ...inputs, h("h4", {}, "Makes"), ...outputs, ...alternatives(item, plan), ...neighbours(item, plan, view)];
}

const strategy = (labels, plan) => plan.mesh.map(([axis], i) => `${axis}: ${labels[i]}`).join(", ");

function alternatives(item, plan) {
  if (!item.others.length) return [];
  const rows = item.others.map(([labels, extra]) => h("tr", {}, h("td", {}, strategy(labels, plan)), h("td", { class: "n" }, `${extra < 0 ? "−" : "+"}${showSeconds(Math.abs(extra))}`)));
  return [h("h4", {}, "Alternatives"), h("p", { class: "hint" }, "Time per step if only this operation changed."), h("table", { class: "alternatives" }, h("tbody", {}, rows))];
}

function neighbours(item, plan, view) {
  const links = (map) => (map.get(item.id) || []).map((id) => plan.items.get(id)).filter((n) => n && n.kind === "comm");
  const all = [...new Set([...links(plan.predecessors), ...links(plan.successors)])];
  if (!all.length) return [];
  return [h("h4", {}, "Collectives beside it"), ...all.map((n) => h("div", {}, h("button", { class: "link", type: "button", onclick: () => view.reveal(n) }, n.collectives.map((i) => collectiveTitle(plan.collectives[i])).join("; "))))];
}

const collectiveTitle = (c) => `${c.kind}@${c.axes.join(",")} ${c.phase}`;

function commDetails(item, plan, collective, view) {
  const chosen = collective >= 0 ? [collective, ...item.collectives.filter((i) => i !== collective)] : item.collectives;
  const parts = chosen.flatMap((i, n) => oneCollective(plan.collectives[i], plan, item, n));
  const reader = (plan.successors.get(item.id) || []).map((id) => plan.items.get(id)).find((x) => x && x.kind === "op");
  const link = reader ? [h("h4", {}, "Made for"), h("button", { class: "link", type: "button", onclick: () => view.reveal(reader) }, `${reader.name} in ${place(reader.fqn)}`)] : [];
  return [...parts, ...link];
}

function oneCollective(c, plan, item, n) {
  const list = h("dl", { class: "collective", "data-collective": c.index });
  const ranks = c.axes.reduce((product, axis) => product * plan.mesh.find(([name]) => name === axis)[1], 1);
  field(list, "kind", c.kind);
  field(list, "mesh axis", `${c.axes.join(", ")} (${ranks} ranks)`);
  field(list, "phase", c.phase);
  field(list, "bytes sent per rank", showBytes(c.bytes));
  field(list, "predicted time", `${showSeconds(c.seconds)}, ${percent(c.seconds, plan.work)} of all work`);
  field(list, "module", place(c.fqn));
  field(list, "why", c.reason);
  field(list, "drawn once for", item && item.times > 1 ? `${item.times} equal ones` : "");
  return [h(n ? "h4" : "h3", {}, collectiveTitle(c)), list];
}
