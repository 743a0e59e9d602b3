// The ranks as a grid: which block of a tensor each holds, and with whom it exchanges messages.

function coordinates(rank, mesh) {
  const found = [];
  for (let i = mesh.length - 1, rest = rank; i >= 0; i--) { found[i] = rest % mesh[i][1]; rest = Math.floor(rest / mesh[i][1]); }
  return found;
}

// Ranks that differ from `rank` only along `axes`.
function groupOf(rank, axes, plan, ranks) {
  const own = coordinates(rank, plan.mesh);
  return ranks.filter((other) => coordinates(other, plan.mesh).every((at, i) => at === own[i] || axes.includes(plan.mesh[i][0])));
}

function rankGrid(plan) {
  const rows = plan.holders;
  if (!rows.length) return h("p", {}, "The plan has no parameters, buffers or inputs.");
  const every = plan.mesh.reduce((n, [, size]) => n * size, 1), shown = rows[0][5].length;
  const ranks = [...Array(shown).keys()];
  const kinds = [...new Map(plan.collectives.map((c) => [`${c.kind}@${c.axes.join(",")}`, c.axes]))];
  const choice = (label, texts, act) => h("label", {}, `${label} `, h("select", { "aria-label": label, onchange: (event) => act(event.target.selectedIndex) }, texts.map((text) => h("option", {}, text))));
  const grid = h("div", { class: "ranks", id: "ranks", style: `grid-template-columns:repeat(${Math.min(16, plan.mesh[plan.mesh.length - 1][1])},minmax(84px,1fr))` });
  const read = h("p", { class: "soft", "aria-live": "polite" }, "Point at a rank.");
  let row = rows[0], axes = kinds.length ? kinds[0][1] : [], name = kinds.length ? kinds[0][0] : "";
  const where = (rank) => plan.mesh.map(([axis], i) => `${axis}=${coordinates(rank, plan.mesh)[i]}`).join(", ");
  const point = (rank) => {
    const group = groupOf(rank, axes, plan, ranks);
    [...grid.children].forEach((cell, i) => cell.classList.toggle("together", group.includes(i) && group.length > 1));
    read.textContent = `rank ${rank} (${where(rank)}) holds ${row[4][row[5][rank]]} of ${row[0]}${name ? `; ${name} with ranks ${group.join(", ")}` : ""}`;
  };
  const draw = () => grid.replaceChildren(...ranks.map((rank) => h("div", { class: `rank s${row[5][rank] % 5}`, tabindex: "0", "data-rank": rank, onmouseenter: () => point(rank), onfocus: () => point(rank) }, h("b", {}, String(rank)), h("small", {}, row[4][row[5][rank]]))));
  draw();
  return [h("div", { class: "filter wrap" },
    choice("Tensor", rows.map(([glob, count, shape, layout]) => `${glob}${count > 1 ? ` ×${count}` : ""} ${showShape(shape)} ${plan.layouts[layout].replaceAll("I@", "R@")}`), (i) => { row = rows[i]; draw(); }),
    kinds.length ? choice("Groups of", kinds.map(([text]) => text), (i) => { [name, axes] = kinds[i]; }) : null),
  read, h("div", { class: "scroll" }, grid), shown < every ? h("p", { class: "hint" }, `The first ${shown} of ${every} ranks.`) : null];
}
