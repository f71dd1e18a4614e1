// Dark, light, or what the system says; the button goes from one to the next.

import { $ } from "./dom.js";

const NAME = "kvserve.theme", THEMES = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const { colorScheme } = document.documentElement.style;
  return colorScheme ? colorScheme === "dark" : system.matches;
}

export function useTheme(onChange) {
  const button = $("theme");
  const apply = (theme) => {
    document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
    button.querySelector("span").textContent = theme;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  let theme = localStorage.getItem(NAME) ?? "system";
  apply(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(NAME, theme);
    apply(theme);
    onChange();
  });
  system.addEventListener("change", onChange);
  matchMedia("(forced-colors: active)").addEventListener("change", onChange);
}
