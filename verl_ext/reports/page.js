(() => {
const read = id => JSON.parse(document.getElementById(id).textContent);
const charts = read('charts'), look = read('look'), hidden = new Set(), views = {};
const dark = matchMedia('(prefers-color-scheme: dark)');
const shade = value => !dark.matches ? value
  : JSON.parse(JSON.stringify(value).replace(/#[0-9a-f]{6}/g, colour => look.dark[colour] ?? colour));
async function draw() {
  await Promise.all(charts.map(async chart => {
    const place = document.getElementById(chart.id), config = structuredClone(look.config);
    config.legend.columns = Math.max(1, Math.floor(place.clientWidth / 180));
    config.legend.labelLimit = place.clientWidth - 80;
    const values = chart.spec.data.values.filter(row => !hidden.has(row.recipe ?? row.name));
    const spec = {...chart.spec, width: 'container', height: chart.height, data: {values},
                  autosize: {type: 'fit-x', contains: 'padding'}};
    const found = await vegaEmbed(place, shade(spec), {renderer: 'svg', actions: false, config: shade(config)});
    views[chart.id] = found.view;
  }));
  document.documentElement.dataset.drawn = String(charts.length);
}
function csv(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))];
  const quote = value => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  return [names, ...rows.map(row => names.map(name => row[name] ?? ''))]
    .map(row => row.map(value => quote(String(value))).join(',')).join('\n') + '\n';
}
async function save(id, kind) {
  const rows = charts.find(chart => chart.id === id).spec.data.values;
  const href = kind === 'csv' ? URL.createObjectURL(new Blob([csv(rows)], {type: 'text/csv'}))
    : await views[id].toImageURL(kind, 2);
  Object.assign(document.createElement('a'), {href, download: `${id}.${kind}`}).click();
}
for (const button of document.querySelectorAll('.save button')) {
  button.onclick = () => save(button.dataset.chart, button.dataset.kind);
}
for (const button of document.querySelectorAll('.chips button')) {
  button.onclick = () => {
    const name = button.dataset.recipe;
    hidden.has(name) ? hidden.delete(name) : hidden.add(name);
    button.setAttribute('aria-pressed', String(!hidden.has(name)));
    draw();
  };
}
function sort(head) {
  const table = head.closest('table'), body = table.tBodies[0];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of head.parentNode.children) other.setAttribute('aria-sort', 'none');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const key = row => row.cells[column].dataset.key;
  const rows = [...body.rows], empty = row => key(row) === '' ? 1 : 0;
  rows.sort((a, b) => {
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const x = Number(key(a)), y = Number(key(b));
    const order = isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
    return down ? -order : order;
  });
  rows.forEach(row => body.appendChild(row));
}
for (const head of document.querySelectorAll('table.sortable th')) {
  head.onclick = () => sort(head);
  head.onkeydown = event => { if (event.key === 'Enter') sort(head); };
}
dark.onchange = draw;
draw();
})();
