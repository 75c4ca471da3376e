// The texts of a page whose contrast with what is behind them is too low for WCAG's level AA.
(() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const linear = (part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      if (alpha > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  let count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const svg = element instanceof SVGElement;
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const found = ratio(parse(svg ? style.fill : style.color), behind(element));
    count += 1;
    if (found < (large ? 3 : 4.5)) low.push(`${walker.currentNode.textContent.trim().slice(0, 40)}: ${found.toFixed(2)}`);
  }
  const ground = behind(document.body);
  for (const mark of document.querySelectorAll(".scatterlayer .js-line, .barlayer .point path")) {
    const style = getComputedStyle(mark);
    const found = ratio(parse(mark.classList.contains("js-line") ? style.stroke : style.fill), ground);
    count += 1;
    if (found < 3) low.push(`a mark of a chart: ${found.toFixed(2)}`);
  }
  return { low, count };
})();
