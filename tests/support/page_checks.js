// What the browser tests ask of a page.

// Leaves and boxes of one picture that lie over each other, and texts that leave their shape.
function overlaps() {
  const bad = [];
  const drawn = (group) => [...group.children].filter((child) => child.matches(".leaf, .box"));
  for (const group of document.querySelectorAll(".pane g")) {
    const parts = drawn(group).map((part) => [part, part.querySelector(":scope > .shape, :scope > rect").getBoundingClientRect()]);
    for (let i = 0; i < parts.length; i++) {
      for (let j = i + 1; j < parts.length; j++) {
        const [a, b] = [parts[i][1], parts[j][1]];
        const apart = a.left >= b.right - 1 || b.left >= a.right - 1 || a.top >= b.bottom - 1 || b.top >= a.bottom - 1;
        if (!apart) bad.push(`${parts[i][0].textContent} over ${parts[j][0].textContent}`);
      }
    }
  }
  for (const leaf of document.querySelectorAll(".pane .leaf")) {
    const shape = leaf.querySelector(":scope > .shape").getBoundingClientRect();
    for (const text of leaf.querySelectorAll(":scope > text")) {
      const t = text.getBoundingClientRect();
      const inside = t.left >= shape.left && t.right <= shape.right && t.top >= shape.top - 2 && t.bottom <= shape.bottom + 2;
      if (!inside) bad.push(`outside: ${text.textContent}`);
    }
  }
  return bad;
}

function putOneOverAnother() {
  const [a, b] = document.querySelectorAll(".leaf");
  b.setAttribute("transform", a.getAttribute("transform"));
  a.parentElement.append(b);
}

// The least contrast of a text with what it stands on: WCAG's ratio, 4.5 is AA.
function contrast() {
  const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (css) => css.match(/[\d.]+/g).map(Number);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  let least = 99;
  for (const e of document.querySelectorAll(".chip, h1, h3, h4, b, span, button, dt, dd, p, td, th")) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const [high, low] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    least = Math.min(least, (high + 0.05) / (low + 0.05));
  }
  return least;
}

function column(table, n) {
  return [...document.querySelectorAll(`table[data-table="${table}"] tbody tr`)].map((row) => row.cells[n].textContent);
}
