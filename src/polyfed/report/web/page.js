// The page: sections from the data, and again when a switch is used or news arrive.

let data = JSON.parse(document.getElementById("data").textContent);
const SECTIONS = [
  ["result", "Result", resultSection],
  ["rounds", "By round", roundsSection],
  ["cost", "Cost", costSection],
  ["work", "Who worked when", workSection],
  ["own", "The method's own", ownSection],
  ["maps", "Maps", mapsSection],
  ["holds", "Who holds what", holdsSection],
  ["ledger", "Ledger", ledgerSection],
  ["settings", "Settings", settingsSection],
];
const labels = () => data.title.labels;
const current = () => data.runs[Math.min((chosen.run ??= bestRun()), data.runs.length - 1)];
const colourOf = label => colour(labels().indexOf(label));
const accuracy = v => v.toFixed(3);
const dot = label => el("span", { class: "dot", style: `background:${colourOf(label)}` });

function bestRun() {
  const scored = data.headline.rows.filter(r => r.mean.length);
  const best = scored.length
    ? scored.reduce((a, b) => (mean(b.mean) > mean(a.mean) ? b : a)).label
    : labels()[0];
  return data.runs.findIndex(r => r.label === best);
}

function sectionOf(id, title, about, ...content) {
  const isOfOne = ["work", "own", "maps", "ledger", "settings"].includes(id);
  return el(
    "section",
    { id },
    el("header", {}, el("h2", {}, title), about && el("p", {}, about), isOfOne && pickRun()),
    ...content,
  );
}

function again(...ids) {
  for (const [id, title, make] of SECTIONS) {
    if (ids.length && !ids.includes(id)) continue;
    const old = document.getElementById(id),
      made = make(id, title);
    if (made) old?.replaceWith(made);
    else old?.replaceWith(el("section", { id, hidden: true }));
  }
}

function build() {
  const { title, runs } = data,
    first = runs[0];
  const facts = [
    plural(first.nodes.length, "node"),
    plural(Math.max(...runs.map(r => r.rounds)), "round"),
    [...new Set(runs.map(r => r.topology))].join(", "),
    title.seeds.length > 1 ? plural(title.seeds.length, "seed") : `seed ${title.seeds[0]}`,
    seconds(total(runs.map(spent))),
    stateOf(runs),
  ];
  const made = SECTIONS.map(
    ([id, name, make]) => make(id, name) ?? el("section", { id, hidden: true }),
  );
  document.getElementById("main").replaceChildren(
    el("h1", {}, `${title.what} on ${title.task}`),
    el(
      "p",
      { class: "facts" },
      facts.map(fact => el("span", {}, fact)),
    ),
    ...data.notes.map(note => el("p", { class: "note" }, note)),
    ...made,
  );
  document
    .getElementById("contents")
    .replaceChildren(
      ...made
        .filter(s => !s.hidden)
        .map(s => el("a", { href: `#${s.id}` }, SECTIONS.find(([id]) => id === s.id)[1])),
    );
  document.getElementById("foot").textContent =
    `polyfed ${data.version}. This file needs nothing else: no server, no network.`;
}

function stateOf(runs) {
  const done = runs.filter(r => r.finished).length;
  if (done === runs.length)
    return runs.length > 1 ? `${runs.length} runs, all finished` : "finished";
  return runs.length > 1
    ? `${done} of ${runs.length} runs finished`
    : `round ${runs[0].rounds} of ${runs[0].planned}`;
}

function pickRun() {
  if (data.runs.length < 2) return null;
  return select(
    data.runs.map((r, i) => [String(i), `${r.label}, seed ${r.seed}`]),
    String(chosen.run),
    value => {
      chosen.run = +value;
      chosen.ledger = {};
      again("work", "own", "maps", "ledger", "settings");
    },
    "Run",
  );
}

// ---- light and dark, news ----------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name;
  try {
    localStorage.setItem("polyfed-theme", name);
  } catch {
    /* a file may have no storage */
  }
}

function stored() {
  try {
    return localStorage.getItem("polyfed-theme");
  } catch {
    return null;
  }
}

async function follow() {
  try {
    const answer = await fetch("data.json", { cache: "no-cache" });
    const text = await answer.text();
    if (answer.ok && text !== follow.last) {
      follow.last = text;
      data = JSON.parse(text);
      build();
    }
    document.getElementById("live").textContent = data.runs.every(r => r.finished)
      ? "finished"
      : "live";
  } catch {
    document.getElementById("live").textContent = "server gone";
  }
  setTimeout(follow, 2000);
}

theme(THEMES.includes(stored()) ? stored() : "auto");
document
  .getElementById("theme")
  .addEventListener("click", event =>
    theme(THEMES[(THEMES.indexOf(event.target.textContent) + 1) % 3]),
  );
build();
if (document.documentElement.classList.contains("live")) {
  document.getElementById("live").hidden = false;
  follow();
}
