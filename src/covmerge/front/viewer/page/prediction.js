// What any weighted sum of the updates keeps of each expert. No page in here.

/** Whether a name matches a pattern as in a recipe: `*` any text, `?` one character, `[..]` one of several. */
export function matches(name, pattern) {
  const text = Array.from(name);
  const parts = parsed(pattern);
  let at = 0, part = 0, star = -1, mark = 0;
  while (at < text.length) {
    if (part < parts.length && parts[part] !== "*" && parts[part](text[at])) {
      at++;
      part++;
    } else if (part < parts.length && parts[part] === "*") {
      star = part++;
      mark = at;
    } else if (star >= 0) {
      part = star + 1;
      at = ++mark;
    } else {
      return false;
    }
  }
  return parts.slice(part).every(own => own === "*");
}

function parsed(pattern) {
  const text = Array.from(pattern), parts = [];
  for (let i = 0; i < text.length; i++) {
    const own = text[i];
    if (own === "*") {
      parts.push("*");
    } else if (own === "?") {
      parts.push(() => true);
    } else {
      // A `]` that comes first is one of the characters.
      const first = text[i + 1] === "!" ? i + 2 : i + 1;
      const end = own === "[" ? text.indexOf("]", first + 1) : -1;
      if (end < 0) {
        parts.push(letter => letter === own);
      } else {
        parts.push(oneOf(text.slice(first, end), text[i + 1] === "!"));
        i = end;
      }
    }
  }
  return parts;
}

function oneOf(letters, negated) {
  const ranges = [];
  for (let i = 0; i < letters.length;) {
    const range = letters[i + 1] === "-" && i + 2 < letters.length;
    ranges.push([letters[i].codePointAt(0), letters[range ? i + 2 : i].codePointAt(0)]);
    i += range ? 3 : 1;
  }
  return letter => {
    const code = letter.codePointAt(0);
    return ranges.some(([from, to]) => from <= code && code <= to) !== negated;
  };
}

/** A pattern that this text matches; it has one line, as the page's patterns have a line each. */
export const literally = text => text.replace(/[*?[]/g, "[$&]").replace(/[\r\n]/g, "?");

/** The number of the first group that a tensor is in; -1: none. */
export function groupOf(tensor, groups) {
  return groups.findIndex(group => group.patterns.some(pattern => matches(tensor, pattern)));
}

/** The factor of each column's update in the sum: of a mean they add up to 1. */
export function factors(method, columns, own) {
  const weights = columns.map(name => own.weights[name] ?? 0);
  if (method === "task_arithmetic") return weights.map(weight => own.scale * weight);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map(weight => total ? weight / total : 0);
}

/** 2 (Q_s w)_s − wᵀ Q_s w, of Q_s as its lower half; null where the expert did not change the layer. */
export function kept(form, expert, w) {
  if (form === null) return null;
  let along = 0, square = 0;
  for (let t = 0; t < w.length; t++) {
    along += w[t] * (t > expert ? form[t][expert] : form[expert][t]);
    for (let u = 0; u < t; u++) square += 2 * w[t] * w[u] * form[t][u];
    square += w[t] * w[t] * form[t][t];
  }
  return 2 * along - square;
}

/** Mean over the layers that an expert changed; harm beyond its absence counts as 0. */
export function overall(values) {
  const found = values.filter(value => value !== null);
  if (!found.length) return null;
  return found.reduce((sum, value) => sum + Math.max(0, value), 0) / found.length;
}

/** By expert, what is kept of it in each layer. `placed` is the group of each layer. */
export function predict(scene, choice, placed) {
  const every = factors(choice.method, scene.columns, choice);
  const others = choice.groups.map(group => factors(choice.method, scene.columns, group));
  return scene.experts.map((_, expert) => scene.layers.map((layer, number) =>
    kept(layer.forms[expert], expert, placed[number] < 0 ? every : others[placed[number]])));
}
