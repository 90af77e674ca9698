"""The stylesheet of pages: light, dark and print."""

from __future__ import annotations

CSS = """
:root {
  --ground: #ffffff; --raised: #f5f7f8; --line: #d9dfe3; --ink: #1d2a31; --soft: #5b6a73;
  --alarm: #b3261e; --heat: #0b5f8a; --heat-ink: #ffffff; --bar-ink: #ffffff;
  --prepare: #6b7a85; --ranks: #7a4fa3; --capture: #0e7c66; --processor: #a85b00;
  --storage: #1565b0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12181c; --raised: #1b2429; --line: #33414a; --ink: #e6edf1; --soft: #9fb0ba;
    --alarm: #ff8a80; --heat: #58b7e6; --heat-ink: #0b1418; --bar-ink: #0b1418;
    --prepare: #9aa8b1; --ranks: #bd9be0; --capture: #4dc4a8; --processor: #f0a752;
    --storage: #6db3f2;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 32px 64px; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 4px 0 10px; }
.soft { color: var(--soft); }
.alarm { color: var(--alarm); }
ul { margin: 6px 0; padding-left: 20px; }
dl { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 8px; }
dl > div { background: var(--raised); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 16px; min-width: 120px; }
dt { color: var(--soft); font-size: 12.5px; }
dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.left { text-align: left; }
.right { text-align: right; }
svg { display: block; max-width: 100%; height: auto;
  font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg text { fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg .alarm { fill: var(--alarm); font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .heat { fill: var(--heat); }
svg .on-heat { fill: var(--heat-ink); }
svg .on-bar { fill: var(--bar-ink); font-size: 10px; }
svg .marked { fill: none; stroke: var(--alarm); stroke-width: 2; }
svg .curve { fill: none; stroke: var(--storage); stroke-width: 2; }
svg .dot, svg .storage { fill: var(--storage); }
svg .prepare { fill: var(--prepare); }
svg .ranks { fill: var(--ranks); }
svg .capture { fill: var(--capture); }
svg .processor { fill: var(--processor); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr));
  gap: 8px 24px; }
figure { margin: 0; }
figcaption { color: var(--soft); font-size: 13px; }
details { border: 1px solid var(--line); border-radius: 8px; padding: 8px 16px; margin: 12px 0; }
summary { cursor: pointer; font-weight: 600; }
@media print { details > * { display: block; } }
"""
