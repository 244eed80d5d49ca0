// The privacy ledger: what left each node, to whom, which tensors, how many bytes.

const PAGE = 20;

// Everything that crossed once or more: {from, to, content, hops, rounds: [..] or [first, last], times}
function entries(run) {
  const book = run.ledger;
  if (book.sums) {
    return book.sums.map(([from, to, content, times, first, last]) => ({
      from,
      to,
      content,
      hops: null,
      times,
      first,
      last,
    }));
  }
  const found = [];
  for (const [tick, pattern] of book.rounds) {
    for (const [from, to, content, hops] of book.patterns[pattern])
      found.push({ from, to, content, hops, times: 1, first: tick, last: tick });
  }
  return found;
}

function ledger(run) {
  const book = run.ledger;
  if (!book.messages) return empty("Nothing left any node in this run.");
  const all = entries(run),
    want = chosen.ledger;
  const texts = book.contents.map(c =>
    c.tensors
      .map(t => t[0])
      .join(" ")
      .toLowerCase(),
  );
  const body = el("tbody"),
    total = el("span", { class: "total" }),
    more = el("button", { type: "button", class: "more" });
  let matching = [],
    shown = PAGE;

  const matches = () => {
    const words = (want.text ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter(e => {
      const [from, to] = [book.names[e.from], book.names[e.to]];
      return (
        (!want.from || want.from === from) &&
        (!want.to || want.to === to) &&
        (!want.round || (e.first <= want.round && want.round <= e.last)) &&
        words.every(
          word =>
            from.toLowerCase().includes(word) ||
            to.toLowerCase().includes(word) ||
            texts[e.content].includes(word),
        )
      );
    });
  };
  const fillRows = () => {
    body.replaceChildren(...matching.slice(0, shown).map(e => messageRow(book, e)));
    if (!matching.length)
      body.append(el("tr", {}, el("td", { colspan: 6 }, empty("No message is like that."))));
    more.hidden = matching.length <= shown;
    more.textContent = `${(matching.length - shown).toLocaleString("en")} more`;
  };
  const refresh = () => {
    matching = matches();
    shown = PAGE;
    const times = matching.reduce((n, e) => n + e.times, 0);
    const bytes = matching.reduce((n, e) => n + e.times * book.contents[e.content].bytes, 0);
    total.textContent = `${plural(times, "message")}, ${size(bytes)}`;
    fillRows();
  };
  more.addEventListener("click", () => {
    shown += 10 * PAGE;
    fillRows();
  });
  const pick = key => value => {
    want[key] = value;
    refresh();
  };
  const names = key => [
    ["", `${key}: any`],
    ...[...new Set(all.map(e => book.names[e[key]]))].sort().map(name => [name, `${key}: ${name}`]),
  ];
  const search = el("input", {
    type: "search",
    placeholder: "Search nodes and tensors",
    "aria-label": "Search the ledger",
    value: want.text ?? "",
    oninput: event => pick("text")(event.target.value),
  });
  const round = el("input", {
    type: "number",
    min: 0,
    placeholder: "round",
    "aria-label": "Round",
    style: "width:84px",
    value: want.round ?? "",
    oninput: event => pick("round")(event.target.value === "" ? null : +event.target.value),
  });
  const save = el(
    "button",
    {
      type: "button",
      class: "csv",
      onclick: () => download(`ledger-${run.label}-seed-${run.seed}.csv`, csv(book, matching)),
    },
    "CSV",
  );
  refresh();
  return el(
    "div",
    {},
    el(
      "div",
      { class: "head" },
      search,
      select(names("from"), want.from ?? "", pick("from"), "Sender"),
      select(names("to"), want.to ?? "", pick("to"), "Receiver"),
      round,
      el("span", { class: "grow" }),
      total,
      save,
    ),
    scroll(
      el(
        "table",
        { class: "ledger" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["round", "from", "to"].map(t => el("th", { class: "l" }, t)),
            el("th", { class: "l" }, "tensors"),
            el("th", {}, book.sums ? "messages" : "links"),
            el("th", {}, "bytes"),
          ),
        ),
        body,
      ),
    ),
    more,
    book.sums
      ? said(
          "So many messages crossed that this page holds their sums by sender, receiver and content; ledger.jsonl has every one.",
        )
      : null,
  );
}

function messageRow(book, e) {
  const content = book.contents[e.content];
  const rounds = e.first === e.last ? e.first : `${e.first}–${e.last}`;
  return el(
    "tr",
    {},
    el("td", { class: "l" }, rounds),
    el("td", { class: "l" }, book.names[e.from]),
    el("td", { class: "l" }, book.names[e.to]),
    el(
      "td",
      { class: "l tensors", title: tensorsText(content.tensors, 40) },
      tensorsText(content.tensors),
    ),
    el("td", {}, (e.hops ?? e.times).toLocaleString("en")),
    el("td", {}, (e.times * content.bytes).toLocaleString("en")),
  );
}

function tensorsText(tensors, most = 4) {
  const listed = tensors
    .slice(0, most)
    .map(([name, form, dtype]) => `${name} ${form.length ? form.join("×") : "scalar"} ${dtype}`);
  return listed.join(", ") + (tensors.length > most ? ` and ${tensors.length - most} more` : "");
}

// A line a tensor, so that sums of the last column are bytes.
function csv(book, found) {
  const quote = text => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = ["first_round,last_round,messages,from,to,hops,tensor,shape,dtype,bytes\n"];
  for (const e of found) {
    const start = [
      e.first,
      e.last,
      e.times,
      quote(book.names[e.from]),
      quote(book.names[e.to]),
      e.hops ?? "",
    ].join(",");
    for (const [name, form, dtype, bytes] of book.contents[e.content].tensors)
      lines.push(`${start},${quote(name)},${form.join("x")},${dtype},${e.times * bytes}\n`);
  }
  return lines;
}

function download(name, parts) {
  const link = el("a", {
    href: URL.createObjectURL(new Blob(parts, { type: "text/csv" })),
    download: name.replace(/[^\w.=-]+/g, "-"),
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function leftEach(run) {
  const book = run.ledger,
    found = new Map();
  for (const e of entries(run)) {
    const sums = found.get(e.from) ?? { messages: 0, bytes: 0, to: new Set(), tensors: new Map() };
    found.set(e.from, sums);
    sums.messages += e.times;
    sums.bytes += e.times * book.contents[e.content].bytes;
    sums.to.add(book.names[e.to]);
    for (const t of book.contents[e.content].tensors) sums.tensors.set(t[0], t);
  }
  const rows = [...found].sort((a, b) =>
    book.names[a[0]].localeCompare(book.names[b[0]], "en", { numeric: true }),
  );
  return scroll(
    folded(
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "l" }, "what left"),
            el("th", { class: "l" }, "went to"),
            el("th", { class: "l" }, "tensors"),
            el("th", {}, "messages"),
            el("th", {}, "bytes"),
          ),
        ),
        el(
          "tbody",
          {},
          rows.map(([from, sums]) =>
            el(
              "tr",
              {},
              el("td", { class: "l" }, book.names[from]),
              el(
                "td",
                { class: "l" },
                sums.to.size > 3 ? plural(sums.to.size, "place") : [...sums.to].join(", "),
              ),
              el(
                "td",
                { class: "l tensors", title: tensorsText([...sums.tensors.values()], 40) },
                tensorsText([...sums.tensors.values()]),
              ),
              el("td", {}, sums.messages.toLocaleString("en")),
              el("td", {}, size(sums.bytes)),
            ),
          ),
        ),
      ),
    ),
  );
}
