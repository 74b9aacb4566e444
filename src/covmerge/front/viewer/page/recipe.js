// The recipe of a choice, as YAML. No page in here.

/** The text of the recipe. An error says why a choice has none. */
export function recipeText(scene, choice) {
  const parts = [choice, ...choice.groups], weightsOf = name => parts.map(part => part.weights[name] ?? 0);
  const byName = values => {
    const [value, ...others] = values;
    if (others.every(other => other === value)) return value;
    const entries = choice.groups.flatMap((group, number) =>
      group.patterns.map(match => ({ match, value: others[number] })));
    return { by_name: [...entries, { value }] };
  };
  const taken = scene.sources.filter(([name]) => weightsOf(name).some(weight => weight !== 0));
  if (!taken.length) throw new Error("all weights are 0: that is the base; give one expert a weight");
  // The mean of one is itself. In a recipe, the weight of an expert alone is the share of its update.
  const whole = taken.length === 1 && choice.method === "average";
  const experts = taken.map(([name, source]) => {
    const weight = byName(weightsOf(name).map(own => whole ? Number(own !== 0) : own));
    return [name, weight === 1 ? source : { source, weight }];
  });
  const parameters = choice.method === "average" ? {} : { parameters: { scale: byName(parts.map(part => part.scale)) } };
  const { base, ...rest } = scene.recipe;
  return mapping({ base, experts: new Map(experts), method: choice.method, ...parameters, ...rest }).join("\n") + "\n";
}

/** Lines of a mapping. An object would put names such as "2" first, so experts are a Map. */
function mapping(given) {
  const entries = given instanceof Map ? [...given] : Object.entries(given);
  return entries.flatMap(([key, value]) => under(`${scalar(key)}:`, value));
}

/** Lines of a value after its key or its dash. */
function under(before, value) {
  if (value === null || typeof value !== "object") return [`${before} ${scalar(value)}`];
  const inner = Array.isArray(value) ? value.flatMap(entry => item(entry)) : mapping(value);
  return inner.length ? [before, ...inner.map(line => `  ${line}`)] : [`${before} ${Array.isArray(value) ? "[]" : "{}"}`];
}

function item(entry) {
  const isMapping = entry !== null && typeof entry === "object" && !Array.isArray(entry);
  if (!isMapping || !Object.keys(entry).length) return under("-", entry);
  return mapping(entry).map((line, number) => `${number ? " " : "-"} ${line}`);
}

function scalar(value) {
  // YAML has a point in every number with an exponent.
  if (typeof value === "number") return String(value).replace(/^(-?\d+)e/, "$1.0e");
  if (typeof value !== "string") return String(value);
  const plain = /^(\.{0,2}\/)?[a-z][\w.\/-]*$/i.test(value) && !/^(true|false|null|yes|no|on|off|y|n)$/i.test(value);
  return plain ? value : JSON.stringify(value).replace(UNPRINTABLE, escaped);
}

// JSON leaves some characters as they are that end a line of YAML, or may not be in it.
const UNPRINTABLE = /[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\u{10000}-\u{10ffff}]/gu;
const escaped = letter => `\\u${letter.codePointAt(0).toString(16).padStart(4, "0")}`;
