// Drives the server's page in Chromium and saves pictures of scenes.
// Arguments: folder of playwright-core, the browser, the server's address, folder of the pictures, scenes.
import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, executablePath, address, out, ...scenes] = process.argv.slice(2);
const { chromium } = createRequire(join(folder, "package.json"))("playwright-core");

const WINDOWS = { wide: { width: 1280, height: 800 }, narrow: { width: 390, height: 780 } };
const SCHEMES = ["light", "dark"];

async function draw(page, name) {
  for (const [size, viewport] of Object.entries(WINDOWS)) {
    await page.setViewportSize(viewport);
    for (const colorScheme of SCHEMES) {
      await page.emulateMedia({ colorScheme, reducedMotion: "no-preference" });
      await page.screenshot({ path: join(out, `${name}-${size}-${colorScheme}.png`), animations: "disabled" });
    }
    const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (overflow > 0) throw new Error(`${name} is ${overflow} pixels too wide in the ${size} window`);
  }
  await page.setViewportSize(WINDOWS.wide);
}

async function ask(page, kind, text) {
  await page.locator(`input[value=${kind}]`).check({ force: true });
  await page.getByLabel("Message").fill(text);
  await page.getByRole("button", { name: "Send" }).click();
}

// Asks once before the picture, so that nothing is left to compile.
async function askAgain(page, kind, text) {
  await ask(page, kind, text);
  await written(page);
  await page.getByRole("button", { name: "New chat" }).click();
  await ask(page, kind, text);
}

const written = (page, count = 1) =>
  page.waitForFunction((least) => document.querySelectorAll(".turn").length === least
    && !document.querySelector(".writing"), count, { timeout: 120_000 });

// Makes answers wait, as soon as so many points have so many characters, until `release` is called.
const hold = (page, points, characters) => page.evaluate(([points, characters]) => {
  window.holds = () => [...document.querySelectorAll(".turn:last-child .point p")]
    .filter((text) => text.textContent.length >= characters).length >= points;
}, [points, characters]);
const held = (page) => page.waitForFunction(() => window.holds(), null, { timeout: 120_000 });
const release = (page) => page.evaluate(() => { window.holds = null; });

function waitWhileHeld() {
  const { read } = ReadableStreamDefaultReader.prototype;
  ReadableStreamDefaultReader.prototype.read = async function () {
    while (window.holds?.()) await new Promise((resolve) => setTimeout(resolve, 20));
    return read.call(this);
  };
}

const open = {
  async start(page) {
    await draw(page, "start");
  },
  async chat(page) {
    for (const isAgain of [false, true]) { // the first time, programs are compiled
      if (isAgain) await page.getByRole("button", { name: "New chat" }).click();
      await ask(page, "chat", "Who keeps the lighthouse?");
      await written(page);
      await ask(page, "chat", "Write a guide with three points: build a drum.");
      await written(page, 2);
    }
    await draw(page, "chat");
    await page.setViewportSize(WINDOWS.narrow);
    await page.locator("#panel > summary").click();
    await page.screenshot({ path: join(out, "panel-narrow-light.png") });
  },
  async plan(page) {
    await ask(page, "plan", "Make a plan: repair a bicycle.");
    await written(page);
    await page.getByRole("button", { name: "New chat" }).click();
    await hold(page, 8, 12);
    await ask(page, "plan", "Make a plan: repair a bicycle.");
    await held(page);
    await draw(page, "plan-writing");
    await release(page);
    await written(page);
    await draw(page, "plan");
  },
  async both(page) {
    await page.setViewportSize({ width: 1280, height: 920 });
    for (const isAgain of [false, true]) {
      if (isAgain) await page.getByRole("button", { name: "New chat" }).click();
      await ask(page, "chat", "Who keeps the lighthouse?");
      await written(page);
      if (isAgain) await hold(page, 7, 40);
      await ask(page, "plan", "Make a plan: repair a bicycle.");
      if (isAgain) {
        await held(page);
        await page.waitForFunction(() => Number(document.querySelector("#rate").textContent) > 0);
        await page.screenshot({ path: join(out, "page.png"), animations: "disabled" });
        await release(page);
      }
      await written(page, 2);
    }
  },
  async json(page) {
    await page.getByLabel("Temperature").fill("0");
    await askAgain(page, "json", "Who keeps the lighthouse?");
    await written(page);
    await draw(page, "json");
  },
  async refused(page) {
    await page.getByLabel("Temperature").fill("-1");
    await ask(page, "chat", "Who keeps the lighthouse?");
    await page.locator(".fault").waitFor();
    await draw(page, "refused");
  },
  async diffusion(page) {
    await askAgain(page, "chat", "Make a plan with four points: bake bread.");
    await page.waitForFunction(() => document.querySelector(".answer")?.innerText.length > 60
      && document.querySelectorAll(".mask").length > 8, null, { timeout: 120_000, polling: 20 });
    await draw(page, "diffusion-writing");
    await written(page);
    await draw(page, "diffusion");
  },
};

const error = (message, code) => JSON.stringify({ error: { message, type: "error", param: null, code } });
const pretends = {
  key: ["**/v1/models", 401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key"],
  loading: ["**/health", 503, "the model is loading", "loading"],
};

const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
try {
  for (const scene of scenes) {
    const page = await (await browser.newContext({ viewport: WINDOWS.wide })).newPage();
    await page.addInitScript(waitWhileHeld);
    const faults = [];
    page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
    page.on("pageerror", (fault) => faults.push(String(fault)));
    if (pretends[scene]) {
      const [path, status, ...said] = pretends[scene];
      await page.route(path, (route) => route.fulfill({ status, contentType: "application/json", body: error(...said) }));
    }
    await page.goto(address);
    if (pretends[scene]) {
      await page.waitForFunction(() => document.querySelector("#status").textContent !== "Connecting");
      await draw(page, scene);
    } else {
      await page.waitForFunction(() => document.querySelector("#status").dataset.state === "ready");
      await open[scene](page);
    }
    const unexpected = faults.filter((fault) => !/status of (4|5)\d\d/.test(fault));
    if (unexpected.length) throw new Error(`${scene}: ${unexpected.join("; ")}`);
    await page.context().close();
  }
} finally {
  await browser.close();
}
