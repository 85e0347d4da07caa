"""Ray as far as a run asks for it, in this process: actors are objects, which can be killed or made to hang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class GetTimeoutError(RayError):
    pass


@dataclass
class Reference:
    """The outcome of a call, made when it is asked for: an actor may be replaced until then."""

    make: Callable[[], Any]
    made: list[Any] = field(default_factory=list)

    def get(self) -> Any:
        if not self.made:
            self.made.append(self.make())
        return self.made[0]


@dataclass(eq=False)
class Actor:
    """``dies``: in its next call, which is then asked again of another in its place; ``hangs``: until it is killed."""

    kind: Any
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    dies: bool = False
    hangs: bool = False
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.left = self.options["max_restarts"]
        self.object = self.kind(*self.arguments)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Reference(lambda: self.call(method, *arguments)))

    def call(self, method: str, *arguments: Any) -> Any:
        if self.hangs:
            raise GetTimeoutError
        if self.dies:
            self.replace(may=True)
        if self.object is None:
            raise RayActorError(
                "The actor died.\n  actor_id: 7\nThe actor is dead because its worker process has died."
            )
        self.num_calls += 1
        return getattr(self.object, method)(
            *[each.get() if isinstance(each, Reference) else each for each in arguments]
        )

    def replace(self, *, may: bool) -> None:
        self.dies = self.hangs = False
        if self.object is not None:
            self.object._stack.close()
        may = may and self.left > 0
        self.left -= may
        self.object = self.kind(*self.arguments) if may else None


class FakeRay(ModuleType):
    """``room``: whether a placement group finds its place; ``settings``: what a connection was asked for with."""

    def __init__(self, *, room: bool = True) -> None:
        super().__init__("ray")
        self.room, self.actors, self.settings = room, list[Actor](), dict[str, Any]()
        self.groups: list[Any] = []
        self.exceptions = SimpleNamespace(
            RayError=RayError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError
        )
        self.util = ModuleType("ray.util")
        self.util.scheduling_strategies = ModuleType("ray.util.scheduling_strategies")  # type: ignore[attr-defined]
        self.util.scheduling_strategies.PlacementGroupSchedulingStrategy = (  # type: ignore[attr-defined]
            lambda group, placement_group_bundle_index: placement_group_bundle_index
        )
        self.util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
        self.util.placement_group = self._group  # type: ignore[attr-defined]
        self.util.remove_placement_group = self._remove  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        names = {"ray": self, "ray.util": self.util, "ray.util.scheduling_strategies": self.util.scheduling_strategies}
        for name, module in names.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def is_initialized(self) -> bool:
        return bool(self.settings)

    def init(self, **settings: Any) -> None:
        if "nowhere" in settings["address"]:
            raise ConnectionError("nobody answers")
        self.settings = settings

    def shutdown(self) -> None:
        self.settings = {}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_session_name=lambda: "session_1")

    def remote(self, kind: Any) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self._start(kind, given, arguments))

        return SimpleNamespace(options=options)

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        return reference.get()

    def wait(self, references: list[Reference], num_returns: int, timeout: float) -> tuple[list[Reference], list[Any]]:
        return references[:num_returns], references[num_returns:]

    def kill(self, actor: Actor, no_restart: bool = True) -> None:
        actor.replace(may=not no_restart)

    def _start(self, kind: Any, options: dict[str, Any], arguments: tuple[Any, ...]) -> Actor:
        self.actors.append(Actor(kind, options, arguments))
        return self.actors[-1]

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append(SimpleNamespace(bundle_specs=bundles, strategy=strategy, wait=lambda seconds: self.room))
        return self.groups[-1]

    def _remove(self, group: Any) -> None:
        self.groups.remove(group)
        for actor in self.actors:
            actor.replace(may=False)
