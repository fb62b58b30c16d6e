"use strict";
// Show the values of all curves at the step below the pointer. The pictures themselves need no script.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = data.charts[Number(figure.dataset.chart)];
    const picture = figure.querySelector("svg[role=img]");
    const cursor = picture.querySelector(".cursor");
    const readout = figure.querySelector(".readout");
    const [left, right] = [Number(picture.dataset.left), Number(picture.dataset.right)];
    const curves = chart.curves.filter((curve) => curve.steps.length);

    const show = (event) => {
      const frame = picture.getBoundingClientRect();
      const x = (event.clientX - frame.left) / frame.width * picture.viewBox.baseVal.width;
      const pointed = chart.x[0] + (x - left) / (right - left) * (chart.x[1] - chart.x[0]);
      let best = null;
      for (const curve of curves) {
        const step = curve.steps[nearest(curve.steps, pointed)];
        if (best === null || Math.abs(step - pointed) < Math.abs(best - pointed)) best = step;
      }
      if (best === null) return;
      const at = left + (best - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.style.visibility = "visible";
      const parts = [];
      for (const curve of curves) {
        if (best < curve.steps[0] || best > curve.steps[curve.steps.length - 1]) continue;
        const index = nearest(curve.steps, best);
        const name = (data.runs.length > 1 ? data.runs[curve.run] + " " : "") + curve.label;
        const far = curve.steps[index] === best ? "" : ` (step ${curve.steps[index]})`;
        parts.push(`${name} ${Number(curve.values[index].toPrecision(5))}${far}`);
      }
      readout.textContent = `step ${best}: ${parts.join(", ")}`;
    };
    picture.addEventListener("pointermove", show);
    picture.addEventListener("pointerdown", show);
    picture.addEventListener("pointerleave", () => {
      cursor.style.visibility = "hidden";
      readout.textContent = "";
    });
  }
})();
