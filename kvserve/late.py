"""What is imported when it is first used: what is not asked for is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Late:
    """A function of the package by its place, ``kernels.store.store_kv:store_kv_cpu``; its file is
    imported by the first call. Tables of alternatives name them so."""

    def __init__(self, place: str) -> None:
        self.place = place

    @cached_property
    def function(self) -> Any:
        return resolve_name(f"{__package__}.{self.place}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)


class LateModule:
    """A module of the package by its place, ``kernels.store.store_kv``: its functions, ``Late``."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Late:
        found = self.__dict__[name] = Late(f"{self._place}:{name}")
        return found


class Made(Generic[T]):
    """An object that is made when it is first called for; ``made`` is it, once it is there."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.made: T | None = None

    def __call__(self) -> T:
        if self.made is None:
            self.made = self._make()
        return self.made
