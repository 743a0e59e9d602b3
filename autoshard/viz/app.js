// The page: header, tabs, search, theme.

const plans = JSON.parse(document.getElementById("data").textContent).plans.map(prepare);
const [plan, before] = plans;
const panel = h("aside", { id: "details", "aria-label": "Details", "aria-live": "polite" });
const views = [...(before ? [before] : []), plan].map((p) => new GraphView(p, (...what) => showDetails(panel, ...what), before ? p.name : ""));
const view = views[views.length - 1];
const main = document.getElementById("main");
const tabs = new Map();

function header() {
  document.title = `${plan.title}: autoshard plan`;
  document.getElementById("title").textContent = plan.title;
  document.getElementById("subtitle").textContent = plan.setting;
  const { cost } = plan;
  const number = (name, value, note) => h("div", { class: "number" }, h("b", {}, value, note ? h("small", {}, `  ${note}`) : null), h("span", {}, name));
  const numbers = [
    number("predicted step", showSeconds(cost.total_s)),
    number("memory per rank", showBytes(cost.memory_bytes), plan.capacity < 1e15 ? `of ${showBytes(plan.capacity)}` : ""),
    cost.tokens ? number("tokens/s", Math.round(cost.tokens / cost.total_s).toLocaleString("en")) : null,
    number("MFU", `${(100 * cost.mfu).toFixed(1)}%`),
    number("collectives", String(plan.collectives.length), showBytes(plan.collectives.reduce((sum, c) => sum + c.bytes, 0))),
    ...plan.notes.slice(0, 3).map((note) => h("div", { class: "number warn", title: note }, note.length > 160 ? `${note.slice(0, 160)} …` : note)),
  ];
  document.getElementById("numbers").append(...numbers.filter(Boolean));
  document.getElementById("summary").append(summary(plan));
}

function addTab(name, make, css = "") {
  const section = h("section", { class: `tab ${css}`, role: "tabpanel", id: `tab-${name}`, hidden: true });
  const button = h("button", { type: "button", role: "tab", "data-tab": name, onclick: () => showTab(name) }, name);
  tabs.set(name, { section, button, make });
  main.append(section);
  document.getElementById("tabs").append(button);
}

function showTab(name) {
  for (const [key, tab] of tabs) {
    tab.section.hidden = key !== name;
    tab.button.setAttribute("aria-selected", String(key === name));
  }
  const tab = tabs.get(name);
  if (tab.make) {
    tab.section.append(...[tab.make()].flat().filter(Boolean));
    tab.make = null;
  }
}

function revealCollective(c) {
  const item = plan.items.get(c.item);
  showTab("Graph");
  if (item) view.reveal(item, item.collectives.includes(c.index) ? c.index : -1);
  if (!item || !item.collectives.includes(c.index)) panel.replaceChildren(...oneCollective(c, plan, item, 0), h("p", { class: "hint" }, "Drawn in the layer that stands for all equal ones."));
}

// --- search: names, module paths of every folded layer, operations, source lines ---

function searchEntries() {
  const entries = [];
  const walk = (node, swap) => {
    if (node.children) {
      if (!node.root) for (const name of swap(node.path)) entries.push({ name, kind: node.cls || "module", node });
      const inner = node.members.length > 1 ? (text) => swap(text).flatMap((t) => folded(node, t)) : swap;
      node.children.forEach((child) => walk(child, inner));
    } else if (node.kind === "tensor") {
      for (const name of swap(plan.values[node.value].name)) entries.push({ name, kind: plan.values[node.value].kind, node });
    } else if (node.kind === "op") {
      for (const name of swap(node.fqn)) entries.push({ name: `${place(name)} ${node.short}`, kind: `${node.name}  ${node.source}`, node });
    } else {
      for (const name of swap(node.fqn)) for (const i of node.collectives) entries.push({ name: `${collectiveTitle(plan.collectives[i])} ${place(name)}`, kind: plan.collectives[i].reason, node, collective: i });
    }
  };
  walk(plan.tree, (text) => [text]);
  return entries.map((e) => ({ ...e, text: `${e.name} ${e.kind}`.toLowerCase() }));
}

const folded = (box, text) => (text === box.path || text.startsWith(`${box.path}.`) ? box.members.map((m) => m + text.slice(box.path.length)) : [text]);

function search() {
  const input = document.getElementById("search"), list = document.getElementById("found");
  let entries = null, results = [], at = 0;
  const choose = (entry) => {
    list.hidden = true;
    showTab("Graph");
    view.reveal(entry.node, entry.collective ?? -1);
  };
  const draw = () => {
    entries ||= searchEntries();
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    results = words.length ? entries.filter((e) => words.every((w) => e.text.includes(w))) : [];
    const better = (e) => (e.name.toLowerCase() === words.join(" ") ? 0 : e.name.toLowerCase().startsWith(words[0]) ? 1 : 2);
    results.sort((a, b) => better(a) - better(b) || a.name.length - b.name.length);
    at = 0;
    const rows = results.slice(0, 60).map((e, i) => h("li", { role: "option", "aria-selected": String(i === 0), onmousedown: (event) => { event.preventDefault(); choose(e); } }, e.name, h("small", {}, e.kind)));
    list.replaceChildren(...(rows.length ? rows : [h("li", {}, "nothing found")]));
    list.hidden = !words.length;
  };
  input.addEventListener("input", draw);
  input.addEventListener("blur", () => { list.hidden = true; });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") list.hidden = true;
    if (event.key === "Enter" && results.length) choose(results[at]);
    if ((event.key === "ArrowDown" || event.key === "ArrowUp") && results.length) {
      event.preventDefault();
      at = Math.max(0, Math.min(list.children.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)));
      [...list.children].forEach((li, i) => li.setAttribute("aria-selected", String(i === at)));
      list.children[at].scrollIntoView({ block: "nearest" });
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); input.focus(); }
  });
}

function theme() {
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const choices = ["auto", "light", "dark"];
  let chosen = 0;
  const apply = () => {
    const name = choices[chosen] === "auto" ? (system.matches ? "dark" : "light") : choices[chosen];
    document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${choices[chosen]}`;
  };
  button.addEventListener("click", () => { chosen = (chosen + 1) % choices.length; apply(); });
  setTheme = (name) => { chosen = choices.indexOf(name); apply(); };
  system.addEventListener("change", apply);
  apply();
}

// plan.html#tab=Collectives&theme=dark&open=2&find=blocks.0: for links and screenshots.
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (["light", "dark"].includes(asked.get("theme"))) setTheme(asked.get("theme"));
  for (let i = Number(asked.get("open")) || 0; i > 0; i--) views.forEach((v) => { v.openLevel(); v.center(); });
  const found = asked.get("find") && searchEntries().find((e) => e.name === asked.get("find"));
  if (found) view.reveal(found.node, found.collective ?? -1);
  if (asked.has("fit")) views.forEach((v) => v.fit());
  if (tabs.has(asked.get("tab"))) showTab(asked.get("tab"));
}

let setTheme;
header();
theme();
search();
addTab("Graph", () => [...views.map((v) => v.element), panel], "graph");
addTab("Collectives", () => collectiveTables(plan, revealCollective));
addTab("Parameters", () => parameterTable(plan));
addTab("Memory and cost", () => charts(plan));
addTab("Ranks", () => rankGrid(plan));
if (plan.pipeline) addTab("Stages", () => stageTable(plan));
addTab("Compared", () => comparedTable(plan));
if (before) addTab("Compare", () => compareTables(before, plan));
showDetails(panel, null);
showTab("Graph");
views.forEach((v) => v.center());
fromAddress();
