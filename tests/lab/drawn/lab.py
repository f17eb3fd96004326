"""Runs drawn trainings, each faulty one beside its healthy twin, before one real server.

What was seen of each is a line of `results.jsonl` in the lab's folder: a lab that was interrupted
goes on where it ended.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.server.demo.processes import RANKSCOPE, Process
from tests.lab.drawn.effect import ENDED, Effect, Seen, effect_of
from tests.lab.drawn.fault import Fault, draw_fault, part_of
from tests.lab.drawn.recipe import Recipe, draw_recipe
from tests.lab.drawn.score import score_of, serious
from tests.lab.faults.ranks import RankFailed, Ranks
from tests.lab.faults.rest import Json, Server

_LISTENS = re.compile(r"listens on (http://\S+)")
_WORK = "tests.lab.drawn.trainer:train"
# A collective that a rank does not come to.
_PATIENCE = 20.0
_JUDGE_SECONDS = 120.0
# Silence of a rank is a fault after 40 s.
_SILENCE_SECONDS = 60.0


class Lab:
    """A server and pools of ranks.

    Args:
        folder: database, logs and results.
        full: every step is sampled; by default the agent decides.
    """

    def __init__(self, folder: Path, *, full: bool = False) -> None:
        self.folder, self.full = folder, full
        self._stack = contextlib.ExitStack()
        self._pools: dict[int, Ranks] = {}
        self._done = {(line["number"], line["faulty"]): line for line in results(folder)}

    def __enter__(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        database = f"sqlite:///{self.folder / 'lab.db'}"
        command = (*RANKSCOPE, "serve", "--port", "0", "--db", database)
        log = self.folder / "server.log"
        # Of a lab that goes on, the servers before have written to it, too.
        before = log.stat().st_size if log.exists() else 0
        self._server = self._stack.enter_context(Process(command, log=log))
        self.server = Server(self._address(before))
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._stack.close()

    def healthy(self, number: int) -> Json | None:
        """Runs the healthy training of a number; None where it has been run already."""
        if (number, False) in self._done:
            return None
        recipe = draw_recipe(number)
        seconds, error = self._train(recipe, None)
        alerts, state = self._judged(self._run(recipe, None), 0.0)
        shutil.rmtree(self._place(recipe, None), ignore_errors=True)
        return self._keep(
            {
                "number": number,
                "faulty": False,
                "part": part_of(recipe.family),
                "family": recipe.family,
                "recipe": asdict(recipe),
                "seconds": round(seconds, 2),
                "alerts": alerts,
                "false_alarms": [alert["kind"] for alert in serious(alerts)],
                "state": state,
                "error": error or ("" if state else "not judged in time"),
            }
        )

    def faulty(self, number: int) -> Json | None:
        """Runs the faulty training of a number, watched only if its fault has an effect.

        The effect is measured beside the healthy twin, both without the agent. None where the
        number has been run already.
        """
        if (number, True) in self._done:
            return None
        recipe = draw_recipe(number)
        fault = draw_fault(number, recipe)
        began = time.monotonic()
        effect, error = self._effect(recipe, fault)
        alerts: list[Json] = []
        state = ""
        if effect is not None and effect.matters:
            _, error = self._train(recipe, fault)
            settle = _SILENCE_SECONDS if fault.site == "process" else 0.0
            alerts, state = self._judged(self._run(recipe, fault), settle)
            if fault.site == "process":
                error = ""  # how its processes ended is what was injected
            elif not state:
                error = error or "not judged in time"
        for one in (fault, None):
            shutil.rmtree(self._place(recipe, one), ignore_errors=True)
        return self._keep(
            {
                "number": number,
                "faulty": True,
                "part": part_of(fault.family),
                "family": fault.family,
                "recipe": asdict(recipe),
                "fault": asdict(fault),
                "effect": None if effect is None else effect.as_json(),
                "score": score_of(fault, recipe, alerts).as_json(),
                "seconds": round(time.monotonic() - began, 2),
                "alerts": alerts,
                "state": state,
                "error": error,
            }
        )

    # ------------------------------------------------------------------------------------- inside

    def _effect(self, recipe: Recipe, fault: Fault) -> tuple[Effect | None, str]:
        """What the fault does, and what went wrong with the lab."""
        if fault.site == "process":
            return ENDED, ""
        for one in (None, fault):
            _, error = self._train(recipe, one, watched=False)
            if error:
                return None, error
        return effect_of(fault, recipe, self._seen(recipe, fault), self._seen(recipe, None)), ""

    def _train(
        self, recipe: Recipe, fault: Fault | None, *, watched: bool = True
    ) -> tuple[float, str]:
        """Trains it on all ranks; seconds, and what went wrong."""
        from tests.lab.drawn.trainer import Order

        place = self._place(recipe, fault)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        order = Order(
            recipe, fault, self._run(recipe, fault), self.server.url, str(place), watched, self.full
        )
        began = time.monotonic()
        if recipe.world not in self._pools:
            folder = self.folder / f"pool{recipe.world}"
            self._pools[recipe.world] = Ranks(recipe.world, folder, patience=_PATIENCE)
        error = ""
        try:
            self._pools[recipe.world].run(_WORK, order, timeout=120.0)
        except RankFailed as failed:
            self._pools.pop(recipe.world).kill()
            error = str(failed)
        return time.monotonic() - began, error

    def _judged(self, run: str, settle: float) -> tuple[list[Json], str]:
        state = self.server.judged(
            run, timeout=_JUDGE_SECONDS if not settle else 5.0, settle=settle
        )
        fields = ("kind", "severity", "title", "ranks", "tensors", "first_step", "last_step")
        fields += ("since", "stage", "state", "parent", "cause")
        alerts = self.server.alerts(run, consequences=True)
        return [{name: alert.get(name) for name in fields} for alert in alerts], state

    def _seen(self, recipe: Recipe, fault: Fault | None) -> Seen:
        files = [self._place(recipe, fault) / f"rank{r}.npz" for r in range(recipe.world)]
        return [dict(np.load(file)) for file in files if file.exists()]

    def _run(self, recipe: Recipe, fault: Fault | None) -> str:
        return f"{recipe.number}-{'healthy' if fault is None else 'faulty'}"

    def _place(self, recipe: Recipe, fault: Fault | None) -> Path:
        return self.folder / "runs" / self._run(recipe, fault)

    def _keep(self, line: Json) -> Json:
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._done[line["number"], line["faulty"]] = line
        return line

    def _address(self, before: int) -> str:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and self._server.exit_code is None:
            written = self._server.log.read_bytes()[before:].decode(errors="replace")
            found = _LISTENS.search(written)
            if found:
                return found.group(1)
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self._server.tail()}")


def results(folder: Path) -> list[dict[str, Any]]:
    """What a lab has kept."""
    file = folder / "results.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
