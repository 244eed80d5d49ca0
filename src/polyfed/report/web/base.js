// Small tools: elements, figures as people read them, the state of all switches, the tooltip.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter(child => child != null && child !== false));
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const sheetOf = (width, height, label, kind = "drawn") =>
  shape("svg", {
    class: kind,
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
  });

const range = n => Array.from({ length: n }, (_, i) => i);
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const there = values => values.filter(value => value != null);
const colour = i => `var(--s${i % 8})`;
const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

function spread(values) {
  if (values.length < 2) return null;
  const m = mean(values);
  return Math.sqrt(values.reduce((sum, v) => sum + (v - m) ** 2, 0) / (values.length - 1));
}

function quantile(sorted, share) {
  const at = share * (sorted.length - 1),
    low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

function size(bytes) {
  if (!bytes) return "0";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.95)
      return unit === "B" ? `${Math.round(bytes)} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}

const seconds = s => (s >= 600 ? `${(s / 60).toFixed(0)} min` : `${s.toFixed(s < 10 ? 2 : 1)} s`);
const capital = text => text[0].toUpperCase() + text.slice(1).replaceAll("_", " ");

function figure(value) {
  if (value == null) return "–";
  const large = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return large >= 1000
    ? Math.round(value).toLocaleString("en")
    : large >= 100
      ? value.toFixed(1)
      : large >= 0.001
        ? value.toFixed(3)
        : value.toExponential(1);
}

// What a person has chosen; it stays when news arrive.
const chosen = {
  run: null,
  hidden: new Set(),
  view: null,
  x: "round",
  loss: null,
  at: {},
  ledger: {},
};

// What a switch does: remember the choice, draw these sections again.
const put =
  (name, ...ids) =>
  value => {
    chosen[name] = value;
    again(...ids);
  };

const tip = document.getElementById("tip");

function showTip(event, ...content) {
  tip.replaceChildren(...content.flat());
  tip.hidden = false;
  const box = tip.getBoundingClientRect(),
    gap = 14;
  const left =
    event.clientX + gap + box.width > innerWidth
      ? event.clientX - gap - box.width
      : event.clientX + gap;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + gap, innerHeight - box.height - 4))}px`;
}

const hideTip = () => {
  tip.hidden = true;
};
const tells = text => ({ onpointermove: event => showTip(event, text), onpointerleave: hideTip });

// Draw into a host now and whenever its width changes.
const observer = new ResizeObserver(entries => {
  for (const { target } of entries) {
    if (target.drawnAt !== target.clientWidth && target.draw) paint(target);
  }
});

function paint(host) {
  host.drawnAt = host.clientWidth;
  host.replaceChildren(host.draw(Math.max(260, host.clientWidth)));
}

function drawn(draw) {
  const host = el("div");
  host.draw = draw;
  observer.observe(host);
  return host;
}

function choice(options, current, pick) {
  return el(
    "span",
    { class: "choice", role: "group" },
    options.map(([value, name]) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(value === current), onclick: () => pick(value) },
        name,
      ),
    ),
  );
}

function select(options, current, pick, label) {
  return el(
    "select",
    { "aria-label": label, onchange: event => pick(event.target.value) },
    options.map(([value, name]) => el("option", { value, selected: value === current }, name)),
  );
}

function slider(key, values, name, changed) {
  const at = Math.min(chosen.at[key] ?? values.length - 1, values.length - 1);
  const shown = el("span", {}, `${name} ${values[at]}`);
  const move = i => {
    chosen.at[key] = i;
    input.value = i;
    shown.textContent = `${name} ${values[i]}`;
    changed(i);
  };
  const input = el("input", {
    type: "range",
    min: 0,
    max: values.length - 1,
    value: at,
    "aria-label": name,
    oninput: event => move(+event.target.value),
  });
  const node = el("span", { class: "slider" }, input, shown);
  node.move = move;
  return node;
}

// A table that shows its first rows (and its sum), and the others when asked.
const SHOWN = 12;

function folded(table) {
  const rest = [...table.querySelectorAll("tbody tr:not(.sum)")].slice(SHOWN);
  if (!rest.length) return table;
  const more = el(
    "button",
    {
      type: "button",
      class: "more",
      onclick: () => {
        rest.forEach(row => {
          row.hidden = false;
        });
        more.remove();
      },
    },
    `${rest.length} more`,
  );
  rest.forEach(row => {
    row.hidden = true;
  });
  return el("div", {}, table, more);
}

const card = (...children) => el("div", { class: "card" }, ...children);
const scroll = (...children) => el("div", { class: "scroll" }, ...children);
const key = (tone, name) =>
  el("span", {}, el("span", { class: "dot", style: `background:${tone}` }), name);
const empty = text => el("p", { class: "empty" }, text);
const said = text => el("p", { class: "said" }, text);
const head = (title, ...more) =>
  el("div", { class: "head" }, el("h3", {}, title), el("span", { class: "grow" }), ...more);
