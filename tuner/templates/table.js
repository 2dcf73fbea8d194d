"use strict";
// A table of many rows: filter, sort, pages, open rows. All of it is a function of `state`, which is in the URL hash.
// The page's own script follows this one and calls `startTable` with its rows. Text is only set through textContent.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

// ---- elements ----

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const grouped = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 0 });
const shown = (value) => (value === null || value === undefined ? "–" : String(value));
const block = (title, ...children) => element("section", {}, element("h3", {}, title), ...children);
const listing = (lines) => element("pre", {}, ...lines.map((line) => element("span", {}, line)));
const pair = ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, shown(value)));
const pairs = (entries, className = "") => element("dl", { className }, ...entries.map(pair));
// `TILE 64, chunk 256`, with line breaks between knobs but not inside one.
const wholeKnobs = (said) =>
  said.split(", ").flatMap((knob, i) => [...(i ? [", "] : []), element("span", {}, knob)]);
const textColumn = (key, label = key) => ({ key, label });
const numberColumn = (key, label = key) => ({ key, label, number: true });

// items: objects with `id`, `index` and a value per column; filters: ids of the <select>s, each a column's or an item's key;
// haystack: an item's searched text, made on demand; fill: puts a value in its cell and returns true, or leaves it to the
// table; detail: the two columns of an opened row; nouns: singular and plural.
const startTable = ({ items, columns, filters, titles, groupStarts, haystack, fill, detail, nouns, link }) => {
  const PAGE_ROWS = 100;
  const columnOf = new Map(columns.map((column) => [column.key, column]));

  // ---- state and the hash ----

  const EMPTY = { q: "", ...Object.fromEntries(filters.map((name) => [name, ""])), sort: "", dir: "", page: 0, open: [] };
  let state = { ...EMPTY };
  let found = [];

  const readHash = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const next = { ...EMPTY, q: given.get("q") || "" };
    for (const name of filters) {
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
    for (const name of ["q", ...filters, "sort"]) if (s[name]) kept.set(name, s[name]);
    if (s.dir === "desc") kept.set("dir", "desc");
    if (s.page) kept.set("page", s.page + 1);
    if (s.open.length) kept.set("open", s.open.join(","));
    return kept.toString();
  };

  // ---- filter and sort ----

  const searched = (v) => {
    if (v.haystack === undefined) v.haystack = ` ${haystack(v)} `.toLowerCase();
    return v.haystack;
  };

  const matcher = (s) => {
    const words = s.q.toLowerCase().split(/\s+/).filter(Boolean);
    const terms = words.map((word) => (/\w=\w/.test(word) ? ` ${word} ` : word));
    return (v) => filters.every((name) => !s[name] || v[name] === s[name])
      && terms.every((term) => searched(v).includes(term));
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

  // ---- rows ----

  const cellClass = ({ key, number }) => key + (number ? " number" : "") + (groupStarts.has(key) ? " group" : "");

  const makeHead = () => {
    for (const column of columns) {
      const button = element("button", { type: "button", title: titles[column.key] || "" });
      const parts = column.label.length > 8 ? column.label.split(/(?<=[_/])/) : [column.label];
      parts.forEach((part, i) => button.append(...(i ? [element("wbr"), part] : [part])));
      const head = element("th", { scope: "col", className: cellClass(column) }, button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sortBy(column.key));
      byId("head").append(head);
      column.head = head;
    }
  };

  const makeRow = (v) => {
    const button = element("button", { type: "button", tabIndex: -1 }, shown(v[columns[0].key]));
    const row = element("tr", { className: "variant" }, element("th", { scope: "row" }, button));
    row.dataset.id = v.id;
    button.setAttribute("aria-expanded", "false");
    for (const column of columns.slice(1)) {
      const value = v[column.key];
      const cell = element("td", { className: cellClass(column) });
      if (fill(column, v, cell)) { /* the page's own cell */ }
      else if (typeof value === "number") cell.textContent = grouped(value);
      else if (value !== null && value !== undefined) cell.textContent = value;
      row.append(cell);
    }
    return row;
  };

  const makeEmpty = () => {
    const said = items.length ? `No ${nouns[0]} matches these filters.` : `This report has no ${nouns[1]}.`;
    return element("tr", {}, element("td", { className: "none", colSpan: columns.length }, said));
  };

  const makeDetail = (v) => {
    const [left, right] = detail(v);
    const href = `#open=${encodeURIComponent(v.id)}`;
    right.append(element("section", {}, element("a", { className: "jump", href }, link)));
    const cell = element("td", { colSpan: columns.length }, element("div", { className: "detail-body" }, left, right));
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
    const joined = (given) => ["q", ...filters].map((name) => given(name) || "").join("\n");
    const here = joined((name) => state[name]);
    for (const link of document.querySelectorAll(".summary a.jump")) {
      const query = new URLSearchParams(link.hash.slice(1));
      if (here.trim() && here === joined((name) => query.get(name))) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };

  const render = () => {
    const match = matcher(state);
    found = items.filter(match);
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
    for (const column of columns) {
      const order = state.dir === "desc" ? "descending" : "ascending";
      column.head.setAttribute("aria-sort", column.key === state.sort ? order : "none");
    }
    for (const name of ["q", ...filters]) {
      if (byId(name).value !== state[name]) byId(name).value = state[name];
      byId(name).classList.toggle("set", state[name] !== "");
    }
    byId("clear").disabled = !["q", ...filters].some((name) => state[name]);
    byId("count").replaceChildren(element("b", {}, grouped(found.length)), ` of ${grouped(items.length)} ${nouns[1]}`);
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
  for (const name of filters) byId(name).addEventListener("change", () => change({ [name]: byId(name).value }));
  byId("clear").addEventListener("click", () => {
    change({ q: "", ...Object.fromEntries(filters.map((name) => [name, ""])) });
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
};
