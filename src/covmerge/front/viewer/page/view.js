// The page. All text from checkpoints is set as text, never as markup.
import { groupOf, literally, overall, predict } from "./prediction.js";
import { recipeText } from "./recipe.js";

const SUM = "task_arithmetic", MEAN = "average";
const MOST = 2;  // of a slider; the number beside it takes more
const byId = id => document.getElementById(id);

const scene = JSON.parse(byId("data").textContent);
let choice, placed = [], every = [], asMerged = null, drawn = false, telling;
const off = new Set();  // experts that are left out
const cells = [];  // of the grids: where, of which expert, and the layers that it is the mean of
const rows = [];  // of the results

function start() {
  every = [...scene.layers, ...scene.others];
  if (scene.merged !== null) {
    asMerged = predict(scene, all(SUM, name => name === scene.merged ? 1 : 0), scene.layers.map(() => -1));
  }
  choice = completed(scene.start);
  sayWhatItIs();
  buildResults();
  buildPresets();
  buildGrids();
  for (const radio of document.getElementsByName("method")) {
    radio.addEventListener("change", () => { choice.method = radio.value; changed(); });
  }
  byId("add").addEventListener("click", addGroup);
  byId("download").addEventListener("click", download);
  byId("show").addEventListener("click", showRecipe);
  rebuild();
  byId("main").hidden = false;
}

// Choices

const all = (method, weight, scale = 1) =>
  ({ method, scale, groups: [], weights: Object.fromEntries(scene.columns.map(name => [name, weight(name)])) });

/** A choice as it came, with a weight of 0 for what it does not name. */
function completed(given) {
  const own = structuredClone(given);
  for (const part of [own, ...own.groups]) {
    for (const name of scene.columns) part.weights[name] ??= 0;
  }
  return own;
}

/** What is chosen, without the experts that are left out. */
function effective() {
  const part = own => ({
    ...own, weights: Object.fromEntries(scene.columns.map(n => [n, off.has(n) ? 0 : own.weights[n]])),
  });
  return { ...part(choice), groups: choice.groups.map(part) };
}

const isExpert = name => name !== scene.merged;

function presets() {
  const found = [
    ["Mean", "every expert the same, average", () => all(MEAN, n => isExpert(n) ? 1 : 0)],
    ["Sum", "task arithmetic, λ = 1", () => all(SUM, n => isExpert(n) ? 1 : 0)],
    ["λ = 0.3", "task arithmetic, as it is mostly used without tuning", () => all(SUM, n => isExpert(n) ? 1 : 0, 0.3)],
  ];
  if (scene.exact) found.push(["Recipe", "the recipe's own weights", () => completed(scene.start)]);
  if (scene.movable) {
    found.push(["As merged", "the merged model as it is", () => all(SUM, n => isExpert(n) ? 0 : 1)]);
  }
  return found;
}

// Building

/** An element with properties, attributes (those with a dash) and children. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value); else made[name] = value;
  }
  made.append(...children);
  return made;
}

function sayWhatItIs() {
  const count = (n, what, many = `${what}s`) => `${n} ${n === 1 ? what : many}`;
  document.title = `${scene.title}: covmerge view`;
  byId("title").textContent = scene.title;
  const measured = `${count(scene.layers.length, "matrix", "matrices")} of ${count(scene.experts.length, "expert")}`;
  const merged = scene.merged === null ? "" :
    `, and of the model that ${scene.method} made of them`;
  byId("about").textContent =
    `${measured}${merged}, measured once. Move a weight, and see what a merge with it is predicted to keep; nothing is merged.`;
  for (const finding of scene.findings) {
    const who = finding.who ? ` (${finding.who})` : "";
    byId("findings").append(element("li", {}, element("b", { textContent: finding.severity }), `${who}: ${finding.text}`));
  }
  const said = [
    "Sums and means (task_arithmetic, average) are exact: what is kept of them is a quadratic form in the weights, "
    + "which is evaluated here and not approximated. It is of the merged weights before they are rounded to the "
    + "dtype that they are stored in.",
  ];
  if (scene.merged !== null) {
    said.push(scene.exact
      ? `The model was merged by ${scene.method}, so that the recipe's own weights give what it keeps, but for rounding.`
      : `${scene.method}, with this recipe's parameters, rules and steps, is none of the sums and means that this page has: `
        + "with the experts' weights you make another merge, not another of its. “As merged” is measured on the model's "
        + "own weights.");
    if (scene.movable) {
      said.push("The merged model is one more update, with a weight of its own: to scale it, everywhere or in some "
        + "layers, and to mix it with experts is exact too. The recipe then has the model as an expert.");
    }
  } else if (!scene.exact && scene.method) {
    said.push(`${scene.method}, with this recipe's parameters, rules and steps, is none of the sums and means that this page `
      + "has: its own merge is not shown. Merge, and look at OUT, to see it beside these.");
  }
  for (const text of [...said, ...scene.caveats, scene.kept]) {
    byId("caveats").append(element("li", { textContent: text }));
  }
  byId("foot").textContent = `covmerge ${scene.version}. The page loads nothing and sends nothing.`;
}

function buildResults() {
  const head = byId("results").tHead.rows[0];
  if (asMerged) head.append(element("th", { scope: "col" }, element("span", { className: "mark" }), "as merged"));
  scene.experts.forEach((name, expert) => {
    const fill = element("div", { className: "fill" }), track = element("div", { className: "track" }, fill);
    const now = element("td"), cellsOf = [element("td", { className: "bar" }, track), now];
    if (asMerged) {
      const value = overall(asMerged[expert]);
      const tick = element("div", { className: "tick", title: "as merged" });
      tick.style.setProperty("--kept", width(value));
      track.append(tick);
      cellsOf.push(element("td", { textContent: percent(value) }));
    }
    const row = element("tr", {}, element("th", { scope: "row", textContent: name }), ...cellsOf);
    byId("results").tBodies[0].append(row);
    rows.push({ row, fill, now });
  });
}

function buildPresets() {
  byId("presets").append("Begin from");
  for (const [label, title, make] of presets()) {
    const button = element("button", { type: "button", textContent: label, title });
    button.addEventListener("click", () => { choice = make(); off.clear(); rebuild(); });
    byId("presets").append(button);
  }
}

function rebuild() {
  for (const radio of document.getElementsByName("method")) radio.checked = radio.value === choice.method;
  const everywhere = byId("everywhere");
  everywhere.replaceChildren(everywhere.firstElementChild, ...sliders(choice, "all layers", true));
  byId("groups").replaceChildren(...choice.groups.map(groupBox));
  place();
  changed();
}

/** The weights of all tensors, or of a group: a name, a slider and a number each. */
function sliders(own, where, choosing) {
  const found = scene.columns.filter(name => isExpert(name) || scene.movable).map(name =>
    slider(name, isExpert(name) ? "" : "of-merged", where, choosing && isExpert(name) ? name : null,
      () => own.weights[name], value => { own.weights[name] = value; }));
  found.push(slider("scale λ", "of-scale", where, null, () => own.scale, value => { own.scale = value; }));
  return found;
}

function slider(label, kind, where, expert, get, set) {
  const text = kind === "of-merged" ? `the merged model (${label})` : label;
  const range = element("input", { type: "range", min: 0, max: MOST, step: 0.01, value: get(), "aria-label": `${text}, ${where}` });
  const number = element("input", { type: "number", min: 0, step: "any", value: get(), "aria-label": `${text}, ${where}, as a number` });
  range.addEventListener("input", () => { number.value = range.value; set(Number(range.value)); changed(); });
  number.addEventListener("input", () => {
    const value = number.valueAsNumber;
    number.setCustomValidity(value >= 0 && value <= 1e6 ? "" : "a number of at least 0");
    if (!number.checkValidity()) return;
    range.value = value;
    set(value);
    changed();
  });
  number.addEventListener("change", () => { if (!number.checkValidity()) { number.value = get(); number.setCustomValidity(""); } });
  const named = element("label");
  if (expert !== null) {
    const box = element("input", { type: "checkbox", checked: !off.has(expert), "aria-label": `merge ${expert}` });
    range.disabled = number.disabled = off.has(expert);
    box.addEventListener("change", () => {
      if (box.checked) off.delete(expert); else off.add(expert);
      range.disabled = number.disabled = !box.checked;
      changed();
    });
    named.append(box);
  }
  named.append(element("span", { textContent: text }));
  return element("div", { className: `weight ${kind}` }, named, range, number);
}

function addGroup() {
  choice.groups.push({ patterns: [], weights: { ...choice.weights }, scale: choice.scale });
  rebuild();
  byId("groups").lastElementChild.querySelector("select").focus();
}

function groupBox(group, number) {
  const name = `group ${number + 1}`;
  const patterns = element("textarea", {
    rows: Math.min(6, Math.max(2, group.patterns.length)), value: group.patterns.join("\n"), spellcheck: false,
    placeholder: "*.mlp.*",
  });
  const found = element("p", { className: "muted found" });
  const taken = () => {
    group.patterns = patterns.value.split("\n").map(line => line.trim()).filter(Boolean);
    place();
    changed();
  };
  patterns.addEventListener("input", taken);
  const remove = element("button", { type: "button", textContent: "Remove", "aria-label": `remove ${name}` });
  remove.addEventListener("click", () => {
    choice.groups.splice(number, 1);
    rebuild();
    byId("add").focus();
  });
  return element("fieldset", { className: "group" }, element("legend", { textContent: `Layers, ${name}` }),
    chooser(name, list => { patterns.value = list.join("\n"); patterns.rows = Math.min(6, Math.max(2, list.length)); taken(); }),
    element("label", { className: "patterns" }, "Tensors: patterns of their names, one a line; the first group decides", patterns),
    found, ...sliders(group, name, false), element("p", {}, remove));
}

/** Kind, role and blocks, as patterns. */
function chooser(name, give) {
  const kinds = new Map(), roles = [...new Set(every.map(own => own.role))];
  for (const own of every) kinds.set(kindOf(own), own.place ? own.place[2].replace(/^\./, "") : own.name);
  const option = (value, textContent) => element("option", { value, textContent });
  const what = element("select", { "aria-label": `what, ${name}` }, option("", "every kind of tensor"),
    element("optgroup", { label: "by role" }, ...roles.map(role => option(`role ${role}`, `every ${role}`))),
    element("optgroup", { label: "by kind" }, ...[...kinds].map(([key, label]) => option(`kind ${key}`, label))));
  const most = Math.max(0, ...every.map(own => own.place ? own.place[1] : 0));
  const bound = (label, value) => element("input", { type: "number", min: 0, max: most, step: 1, value, "aria-label": `${label}, ${name}` });
  const from = bound("first block", 0), to = bound("last block", most);
  const button = element("button", { type: "button", textContent: "Choose" });
  button.addEventListener("click", () => give(chosen(what.value, from.valueAsNumber || 0, to.value === "" ? most : to.valueAsNumber, most)));
  return element("div", { className: "chooser" },
    element("label", {}, "what", what), element("label", {}, "blocks from", from), element("label", {}, "to", to), button);
}

const kindOf = own => own.place ? `${own.place[0]}*${own.place[2]}` : own.tensor;

/** Patterns of what was chosen: one for all blocks of a kind, or one for each block. */
function chosen(what, from, to, most) {
  const whole = from <= 0 && to >= most, found = new Set();
  if (!what && whole) return ["*"];
  for (const own of every) {
    if (what.startsWith("role ") && own.role !== what.slice(5)) continue;
    if (what.startsWith("kind ") && kindOf(own) !== what.slice(5)) continue;
    if (own.place === null) {
      if (what && whole) found.add(literally(own.tensor));
      continue;
    }
    const [stack, index, rest] = own.place;
    if (index < from || index > to) continue;
    const tail = what ? literally(rest) : ".*";
    found.add(`${literally(stack)}${whole ? "*" : index}${tail}`);
  }
  return [...found];
}

function buildGrids() {
  const blocks = [...new Set(scene.panels.filter(p => p.numbered).flatMap(p => Object.keys(p.cells)))].sort((a, b) => a - b);
  const every = Math.max(1, Math.ceil(blocks.length / 16));  // numbers that have room
  scene.experts.forEach((name, expert) => {
    const body = element("tbody"), table = element("table", { className: "heat" }, body);
    const line = (label, found) => body.append(element("tr", {}, element("th", { scope: "row", textContent: label, title: label }), ...found));
    const cell = layers => {
      const text = element("span", { className: "hidden" }), made = element("td", {}, text);
      cells.push({ made, text, expert, layers });
      return made;
    };
    for (const panel of scene.panels) {
      if (panel.numbered) line(panel.label, blocks.map(b => panel.cells[b] ? cell(panel.cells[b]) : element("td", { className: "unchanged" })));
      else for (const [label, layers] of Object.entries(panel.cells)) line(label, [cell(layers)]);
    }
    if (blocks.length) {
      const numbers = blocks.map((block, place) => element("th", { scope: "col" },
        element("span", { className: place % every ? "hidden" : "", textContent: block })));
      table.prepend(element("thead", {}, element("tr", {}, element("td", { className: "corner" }), ...numbers)));
    }
    const box = element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `what is kept of ${name}, kind by block` }, table);
    byId("grids").append(element("figure", { className: "grid" }, element("h3", { textContent: name }), box));
  });
  for (const swatch of document.querySelectorAll("[data-kept]")) paint(swatch, Number(swatch.dataset.kept));
}

// Showing

/** Find each layer's group: only patterns decide it. */
function place() {
  placed = scene.layers.map(layer => groupOf(layer.tensor, choice.groups));
  const others = scene.others.map(own => groupOf(own.tensor, choice.groups));
  [...byId("groups").children].forEach((box, number) => {
    const count = list => list.filter(own => own === number).length;
    box.querySelector(".found").textContent =
      `${count(placed)} of ${scene.layers.length} matrices, ${count(others)} of ${scene.others.length} other tensors`;
  });
}

function changed() {
  byId("text").hidden = true;
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => { drawn = false; show(); });
}

function show() {
  const now = effective(), found = predict(scene, now, placed), means = found.map(overall);
  document.body.classList.toggle("mean", now.method === MEAN);
  const least = Math.min(...means.filter(value => value !== null));
  rows.forEach(({ row, fill, now: cell }, expert) => {
    fill.style.setProperty("--kept", width(means[expert]));
    cell.textContent = percent(means[expert]);
    row.classList.toggle("least", rows.length > 1 && means[expert] === least);
  });
  const worst = scene.experts.map((_, expert) => worstOf(found[expert]));
  for (const { made, text, expert, layers } of cells) {
    const known = layers.map(layer => found[expert][layer]).filter(value => value !== null);
    const value = known.length ? known.reduce((sum, own) => sum + own, 0) / known.length : null;
    paint(made, value);
    made.classList.toggle("own", layers.some(layer => placed[layer] >= 0));
    text.textContent = percent(value);
    made.title = `${scene.layers[layers[0]].name}${layers.length > 1 ? ` and ${layers.length - 1} more` : ""}: ${percent(value)}`;
  }
  clearTimeout(telling);
  const expert = means.indexOf(least);
  telling = setTimeout(() => {
    byId("told").textContent = expert < 0 ? "" :
      `Least is kept of ${scene.experts[expert]}: ${percent(least)}, and of its layers least in ${worst[expert]}.`;
  }, 400);
}

function worstOf(values) {
  let place = -1;
  values.forEach((value, number) => { if (value !== null && (place < 0 || value < values[place])) place = number; });
  return place < 0 ? "none" : `${scene.layers[place].name} (${percent(values[place])})`;
}

function paint(made, value) {
  made.classList.toggle("unchanged", value === null);
  made.classList.toggle("harmed", value !== null && value < 0);
  made.style.setProperty("--kept", width(value));
}

const width = value => `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;

function percent(value) {
  if (value === null) return "–";
  const text = Math.abs(value) < 10 ? (100 * value).toFixed(1) : (100 * value).toFixed(0);
  return `${text.replace("-", "−")}%`;
}

// The recipe

function recipe() {
  const own = effective();
  own.groups = own.groups.filter(group => group.patterns.length);
  try {
    byId("problem").textContent = "";
    return recipeText(scene, own);
  } catch (error) {
    byId("problem").textContent = error.message;
    return null;
  }
}

function showRecipe() {
  const text = recipe();
  byId("text").hidden = text === null;
  byId("text").textContent = text ?? "";
}

function download() {
  const text = recipe();
  if (text === null) return;
  const url = URL.createObjectURL(new Blob([text], { type: "application/yaml" }));
  const link = element("a", { href: url, download: "recipe.yml" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

start();
