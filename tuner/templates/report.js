"use strict";
// The table of variants: filter, sort, pages, open rows. All of it is a function of `state`, which the URL hash holds.
// Text reaches the page through textContent alone.
(() => {
  const PAGE_ROWS = 100;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const FILTERS = ["kernel", "target", "verdict", "reason"];

  const text = (key, label = key) => ({ key, label });
  const number = (key, label = key) => ({ key, label, number: true });
  const COLUMNS = [
    text("id"), text("kernel"), text("target"), text("verdict"), text("reason"),
    ...data.knobs.map((knob) => number(knob)), text("rest", "other knobs"),
    text("instruction"), number("registers"), number("spill_bytes", "spill B"), number("stack_bytes", "stack B"),
    number("shared_bytes", "shared B"), number("tmem_columns", "TMEM columns"), number("blocks_per_sm", "blocks/SM"),
    number("compile_ms", "compile ms"),
  ];
  const TITLES = {
    reason: "The first reason; an opened row has them all", rest: "Knobs that differ from their plain default",
    spill_bytes: "Bytes of spill stores and loads together", shared_bytes: "Bytes of shared memory a block",
  };
  const GROUP_STARTS = new Set(["BLOCK_N", "instruction", "compile_ms"]);
  const columnOf = new Map(COLUMNS.map((column) => [column.key, column]));

  // ---- data ----

  const variants = data.rows.map((row, index) => {
    const v = { index };
    data.fields.forEach((field, i) => { v[field] = row[i]; });
    for (const name of ["shape", "schedule", "rest"]) v[name] = data.shared[v[name]];
    for (const [knob, value] of v.schedule) if (data.knobs.includes(knob)) v[knob] = value;
    v.reason = v.reasons.length ? v.reasons[0][0] : null;
    v.instruction = v.instructions && v.instructions.length ? v.instructions.join(" ") : null;
    v.spill_bytes = v.spill_store_bytes === null ? null : v.spill_store_bytes + v.spill_load_bytes;
    return v;
  });
  const linesOf = (numbers) => numbers.map((i) => data.shared[i]);

  const haystack = (v) => {
    if (v.haystack === undefined) {
      const reasons = v.reasons.flatMap(([code, detail]) => [code, data.shared[detail]]);
      const knobs = [...v.schedule, ...v.shape].map(([name, value]) => `${name}=${value}`);
      v.haystack = ` ${[v.id, v.kernel, v.target, v.verdict, v.stage, v.instruction || "", ...knobs, ...reasons,
        ...linesOf(v.warnings)].join(" ")} `.toLowerCase();
    }
    return v.haystack;
  };

  // ---- state and the hash ----

  const EMPTY = { q: "", kernel: "", target: "", verdict: "", reason: "", sort: "", dir: "", page: 0, open: [] };
  let state = { ...EMPTY };
  let found = [];

  const readHash = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const next = { ...EMPTY, q: given.get("q") || "" };
    for (const name of FILTERS) {
      const value = given.get(name) || "";
      if ([...byId(name).options].some((option) => option.value === value)) next[name] = value;
    }
    if (columnOf.has(given.get("sort"))) {
      next.sort = given.get("sort");
      next.dir = given.get("dir") === "desc" ? "desc" : "asc";
    }
    next.open = (given.get("open") || "").split(",").filter(Boolean);
    const page = Number.parseInt(given.get("page"), 10);
    next.page = page > 0 ? page - 1 : next.open.length ? null : 0;
    return next;
  };

  const hashOf = (s) => {
    const kept = new URLSearchParams();
    for (const name of ["q", ...FILTERS, "sort"]) if (s[name]) kept.set(name, s[name]);
    if (s.dir === "desc") kept.set("dir", "desc");
    if (s.page) kept.set("page", s.page + 1);
    if (s.open.length) kept.set("open", s.open.join(","));
    return kept.toString();
  };

  // ---- filter and sort ----

  const matcher = (s) => {
    const words = s.q.toLowerCase().split(/\s+/).filter(Boolean);
    const terms = words.map((word) => (/\w=\w/.test(word) ? ` ${word} ` : word));
    return (v) => FILTERS.every((name) => !s[name] || v[name] === s[name])
      && terms.every((term) => haystack(v).includes(term));
  };

  const comparer = ({ sort, dir }) => {
    const sign = dir === "desc" ? -1 : 1;
    return (a, b) => {
      const x = a[sort] ?? "", y = b[sort] ?? "";
      if (x === y) return a.index - b.index;
      if (x === "") return 1;
      if (y === "") return -1;
      return x < y ? -sign : sign;
    };
  };

  // ---- elements ----

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const grouped = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const shown = (value) => (value === null || value === undefined ? "–" : String(value));
  const cellClass = ({ key, number }) => key + (number ? " number" : "") + (GROUP_STARTS.has(key) ? " group" : "");

  const makeHead = () => {
    for (const column of COLUMNS) {
      const button = element("button", { type: "button", title: TITLES[column.key] || "" });
      const parts = column.label.length > 8 ? column.label.split(/(?<=[_/])/) : [column.label];
      parts.forEach((part, i) => button.append(...(i ? [element("wbr"), part] : [part])));
      const head = element("th", { scope: "col", className: cellClass(column) }, button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sortBy(column.key));
      byId("head").append(head);
      column.head = head;
    }
  };

  // `TILE 64, chunk 256`, which may break between knobs but not inside one.
  const wholeKnobs = (rest) =>
    rest.split(", ").flatMap((knob, i) => [...(i ? [", "] : []), element("span", {}, knob)]);

  const makeRow = (v) => {
    const button = element("button", { type: "button", tabIndex: -1 }, v.id);
    const row = element("tr", { className: "variant" }, element("th", { scope: "row" }, button));
    row.dataset.id = v.id;
    button.setAttribute("aria-expanded", "false");
    for (const column of COLUMNS.slice(1)) {
      const value = v[column.key];
      const cell = element("td", { className: cellClass(column) });
      if (typeof value === "number") cell.textContent = grouped(value);
      else if (column.key === "rest") cell.append(...wholeKnobs(value));
      else if (value !== null && value !== undefined) cell.textContent = value;
      if (column.key === "verdict") cell.classList.add(`verdict-${v.verdict === "accepted" ? "accepted" : "rejected"}`);
      const more = v.reasons.length - 1;
      if (column.key === "reason" && more > 0) cell.append(element("small", {}, ` +${more}`));
      row.append(cell);
    }
    return row;
  };

  const makeEmpty = () => {
    const said = variants.length ? "No variant matches these filters." : "This report has no variants.";
    return element("tr", {}, element("td", { className: "none", colSpan: COLUMNS.length }, said));
  };

  const block = (title, ...children) => element("section", {}, element("h3", {}, title), ...children);
  const listing = (lines) => element("pre", {}, ...lines.map((line) => element("span", {}, line)));
  const pair = ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, shown(value)));
  const pairs = (entries, className = "") => element("dl", { className }, ...entries.map(pair));

  const makeDetail = (v) => {
    const left = element("div"), right = element("div");
    const told = new Set();
    const reasons = v.reasons.map(([code, detail, numbers]) => {
      const lines = linesOf(numbers);
      lines.forEach((line) => told.add(line));
      const said = element("p", {}, element("span", { className: "code" }, code), ` ${data.shared[detail]}`);
      return element("div", {}, said, ...(lines.length ? [listing(lines)] : []));
    });
    if (reasons.length) left.append(block("Rejected because", ...reasons));
    const lines = linesOf(v.lines).filter((line) => !told.has(line));
    const source = "the TTGIR, the PTX and the ptxas log";
    if (lines.length) left.append(block(`${told.size ? "Also in" : "Lines of"} ${source}`, listing(lines)));
    if (v.warnings.length) left.append(block("Warnings", listing(linesOf(v.warnings))));
    left.append(block("In a terminal (with --out, where the report isn't in build/offline)",
      element("pre", { className: "command" }, `tune-kernels show ${v.id}`)));
    right.append(block("Schedule", pairs(v.schedule)), block("Shape", pairs(v.shape)),
      block("Reached", pairs(["stage", "spill_store_bytes", "spill_load_bytes"].map((name) => [name, v[name]]))),
      block("Digests", pairs(["kernel_digest", "artefact", "cubin_sha256"].map((name) => [name, v[name]]), "wide")));
    const href = `#open=${encodeURIComponent(v.id)}`;
    right.append(element("section", {}, element("a", { className: "jump", href }, "Link to this variant")));
    const cell = element("td", { colSpan: COLUMNS.length }, element("div", { className: "detail-body" }, left, right));
    return element("tr", { className: "detail", id: `detail-${v.id}` }, cell);
  };

  // ---- rendering ----

  const setOpen = (row, open) => {
    const button = row.querySelector("button");
    const id = row.dataset.id;
    button.setAttribute("aria-expanded", String(open));
    row.classList.toggle("opened", open);
    if (open) {
      row.after(makeDetail(found.find((v) => v.id === id)));
      button.setAttribute("aria-controls", `detail-${id}`);
    } else {
      row.nextElementSibling.remove();
      button.removeAttribute("aria-controls");
    }
  };

  const writeHash = () => history.replaceState(null, "", `#${hashOf(state)}`);

  const markLinks = () => {
    const filters = (given) => ["q", ...FILTERS].map((name) => given(name) || "").join("\n");
    const here = filters((name) => state[name]);
    for (const link of document.querySelectorAll(".summary a.jump")) {
      const query = new URLSearchParams(link.hash.slice(1));
      if (here.trim() && here === filters((name) => query.get(name))) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };

  const render = () => {
    const match = matcher(state);
    found = variants.filter(match);
    if (state.sort) found.sort(comparer(state));
    const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
    const firstOpen = Math.max(0, found.findIndex((v) => v.id === state.open[0]));
    if (state.page === null) state.page = Math.floor(firstOpen / PAGE_ROWS);
    state.page = Math.min(state.page, pages - 1);
    const first = state.page * PAGE_ROWS;
    const rows = found.slice(first, first + PAGE_ROWS).map(makeRow);
    byId("body").replaceChildren(...rows);
    if (rows.length) rows[0].querySelector("button").tabIndex = 0;
    else byId("body").append(makeEmpty());
    for (const row of rows) if (state.open.includes(row.dataset.id)) setOpen(row, true);
    for (const column of COLUMNS) {
      const order = state.dir === "desc" ? "descending" : "ascending";
      column.head.setAttribute("aria-sort", column.key === state.sort ? order : "none");
    }
    for (const name of ["q", ...FILTERS]) {
      if (byId(name).value !== state[name]) byId(name).value = state[name];
      byId(name).classList.toggle("set", state[name] !== "");
    }
    byId("clear").disabled = !["q", ...FILTERS].some((name) => state[name]);
    byId("count").replaceChildren(element("b", {}, grouped(found.length)), ` of ${grouped(variants.length)} variants`);
    byId("page").textContent = `page ${grouped(state.page + 1)} of ${grouped(pages)}`;
    byId("previous").disabled = state.page === 0;
    byId("next").disabled = state.page === pages - 1;
    markLinks();
  };

  const change = (changes) => {
    state = { ...state, page: 0, ...changes };
    render();
    writeHash();
    byId("rows").scrollTop = 0;
  };

  const sortBy = (key) => {
    if (state.sort !== key) change({ sort: key, dir: "asc" });
    else if (state.dir === "asc") change({ dir: "desc" });
    else change({ sort: "", dir: "" });
  };

  const toggle = (row) => {
    const id = row.dataset.id;
    const open = !row.classList.contains("opened");
    state.open = open ? [...state.open, id] : state.open.filter((other) => other !== id);
    setOpen(row, open);
    writeHash();
  };

  // ---- events ----

  const focusRow = (row) => {
    byId("body").querySelectorAll(".variant button[tabindex='0']").forEach((button) => { button.tabIndex = -1; });
    const button = row.querySelector("button");
    button.tabIndex = 0;
    button.focus();
  };

  const withModifier = (event) => event.altKey || event.ctrlKey || event.metaKey;

  const moveFocus = (event) => {
    const row = event.target.closest("tr.variant");
    const rows = row ? [...byId("body").querySelectorAll("tr.variant")] : [];
    const at = rows.indexOf(row);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (!rows[to] || withModifier(event)) return;
    event.preventDefault();
    focusRow(rows[to]);
  };

  const followHash = () => {
    state = readHash();
    render();
    const opened = byId("body").querySelector("tr.opened");
    if (opened) opened.scrollIntoView({ block: "center" });
  };

  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("q").addEventListener("input", () => change({ q: byId("q").value }));
  for (const name of FILTERS) byId(name).addEventListener("change", () => change({ [name]: byId(name).value }));
  byId("clear").addEventListener("click", () => {
    change({ q: "", kernel: "", target: "", verdict: "", reason: "" });
    byId("q").focus();
  });
  byId("previous").addEventListener("click", () => change({ page: state.page - 1 }));
  byId("next").addEventListener("click", () => change({ page: state.page + 1 }));
  byId("body").addEventListener("keydown", moveFocus);
  byId("body").addEventListener("click", (event) => {
    const row = event.target.closest("tr.variant");
    if (!row || (event.target.tagName !== "BUTTON" && String(getSelection()))) return;
    toggle(row);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.jump");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (!link.hash.includes("open=")) setTimeout(() => byId("variants").scrollIntoView(), 0);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select") || withModifier(event)) return;
    event.preventDefault();
    byId("q").focus();
  });
  window.addEventListener("hashchange", followHash);

  makeHead();
  byId("variants").hidden = false;
  followHash();
})();
