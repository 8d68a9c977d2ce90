"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const line = (name, left, right) => {
    const row = document.createElement("div");
    row.className = name;
    for (const text of [left, right]) {
      const cell = document.createElement("span");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  };
  const number = (y) => (y === null ? "not finite" : Math.abs(y) >= 1000 ? Math.round(y).toLocaleString("en") : String(Number(y.toPrecision(5))));
  const scaled = (chart, x) => (chart.x_is_log ? Math.log(x) : x);
  const show = (plot, chart, x) => {
    const steps = chart.lines.flatMap((one) => one.x[nearest(one.x, x)]);
    const far = (step) => Math.abs(scaled(chart, step) - scaled(chart, x));
    const at = steps.reduce((best, step) => (far(step) < far(best) ? step : best));
    const begin = scaled(chart, chart.x[0]), span = scaled(chart, chart.x[1]) - begin;
    tip.replaceChildren(line("step", chart.x_title, at.toLocaleString("en")));
    for (const one of chart.lines) {
      const place = nearest(one.x, at);
      if (Math.abs(scaled(chart, one.x[place]) - scaled(chart, at)) <= span / 50) tip.append(line("", one.label, number(one.y[place])));
    }
    let rule = plot.querySelector(".rule");
    if (!rule) {
      rule = document.createElement("div");
      rule.className = "rule";
      plot.append(rule);
    }
    const frame = plot.getBoundingClientRect();
    const left = ((scaled(chart, at) - begin) / span) * frame.width;
    rule.style.left = `${left}px`;
    tip.hidden = false;
    const right = frame.left + left + 14;
    const over = right + tip.offsetWidth > document.documentElement.clientWidth - 8;
    tip.style.left = `${Math.max(8, over ? frame.left + left - 14 - tip.offsetWidth : right)}px`;
    tip.style.top = `${Math.max(8, frame.top + 10)}px`;
    return at;
  };
  const hide = (plot) => {
    tip.hidden = true;
    plot.querySelector(".rule")?.remove();
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const chart = charts[Number(plot.dataset.chart)];
    const steps = [...new Set(chart.lines.flatMap((one) => one.x))].sort((a, b) => a - b);
    let at = steps[0];
    plot.addEventListener("pointermove", (event) => {
      const frame = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
      const [low, high] = chart.x.map((x) => scaled(chart, x));
      const x = low + share * (high - low);
      at = show(plot, chart, chart.x_is_log ? Math.exp(x) : x);
    });
    plot.addEventListener("pointerleave", () => hide(plot));
    plot.addEventListener("blur", () => hide(plot));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide(plot);
      if (step === undefined) return;
      event.preventDefault();
      const place = Math.min(steps.length - 1, Math.max(0, nearest(steps, at) + step));
      at = show(plot, chart, steps[place]);
    });
  }
})();
