// Dark, light, or what the system says; the button goes from one to the next.

import { $ } from "./dom.js";

const NAME = "kvserve.theme", THEMES = ["system", "light", "dark"];

export function useTheme(onChange) {
  const button = $("theme");
  const apply = (theme) => {
    document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = localStorage.getItem(NAME) ?? "system";
  apply(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(NAME, theme);
    apply(theme);
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}
