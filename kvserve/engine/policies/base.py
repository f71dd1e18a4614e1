"""What every policy offers: its fields are its hyper-parameters, its methods are pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.trigger import Trigger


class PolicyError(ValueError):
    """A policy argument that cannot work; ``argument`` names it."""

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept places of E events: the first ``counts [E, L', Hkv]`` of ``indices [E, L', Hkv, K]``.

    int64; these ascend, what stands behind them does not matter. Counts are equal over heads where
    a policy's granularity is LAYER. ``heads``, as ``indices``, says by its bits which query heads
    of the group attend to a place, for policies whose entries are held as codes; ``None``: all.
    """

    indices: Tensor
    counts: Tensor
    heads: Tensor | None = None


class Policy(Protocol):
    """A frozen dataclass. Token counts are ints; a ratio is the fraction *kept*, exact.

    Subclass it: what a policy does not need has a default.
    """

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Other defaults, by the value of a field ``preset``."""
    cost: ClassVar[str] = ""
    """What it takes of memory and time, for ``kvserve policies``."""
    avoid: ClassVar[str] = ""
    """When not to use it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of which one has to be given."""
    granularity: ClassVar[Granularity] = Granularity.MODEL
    keeps_blocks: ClassVar[bool] = False
    """It is uneven and keeps whole blocks (the last one aside): no entry moves."""
    ranks_entries: ClassVar[bool] = False
    """Its scores rank single entries, so another policy may share them out (AdaKV)."""

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        """This policy with what depends on the model filled in; what runs is the result.

        Raises ``PolicyError`` where the model rules it out.
        """
        return self

    @property
    def caution(self) -> str:
        """What the start-up table says of it on this model, if there is something to say."""
        return ""

    @property
    def trigger(self) -> Trigger:
        """When events are due, and what they do to lengths."""
        ...

    @property
    def query_reduction(self) -> str | None:
        """``group_mean`` or ``heads``: how logged queries are reduced; ``None``: none needed."""
        return None

    @property
    def logged_dtype(self) -> str:
        """How queries are logged: model (the model's dtype), fp8, or auto (the engine's choice)."""
        return "auto"

    @property
    def recomputed_reduction(self) -> str | None:
        """As ``query_reduction``, where queries are recomputed at the event instead of logged.

        For triggers that do not log, and whose windows are scored by their own tokens.
        """
        return None

    @property
    def protected(self) -> int:
        """Newest entries that an event always keeps and does not score."""
        return 0

    @property
    def kept_scores(self) -> int:
        """Entries per head whose scores go on to the next event (0: scores are made anew)."""
        return 0

    @property
    def couples_heads(self) -> bool:
        """Whether counts or choices depend on several KV heads.

        Its scores then are those of all tensor-parallel ranks' heads (``Observation.all_heads``),
        and so are its choices, of which each rank takes its own.
        """
        return False

    def query_places(self, num_queries: int) -> range:
        """Which of a window's queries score it."""
        return range(num_queries)

    def leaders(self, num_layers: int) -> list[int]:
        """For each layer, the layer whose scores and choice it uses."""
        return list(range(num_layers))

    def score(self, obs: Observation) -> Tensor:
        """float32 [E, L', Hkv, S'] for the leaders; higher is kept."""
        ...

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """``keep`` of a window's ``length`` places, ascending int64 [E, L', Hkv, keep]."""
        ...


class UnevenPolicy(Policy, Protocol):
    """A policy after whose events lengths differ, by layer or by head (its ``granularity``)."""

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        raise AssertionError("an uneven policy chooses")

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """As ``select``, but counts may differ; ``keep`` is what they are on average.

        A place that is not there (where a lane holds less than ``length``, its row begins later)
        scores -inf, and counts never exceed what is there.
        """
        ...


class PruningPolicy(UnevenPolicy, Protocol):
    """A policy that also prunes a prompt from layer to layer, while it is computed.

    Its trigger is a ``Pruned``.
    """

    def survivors(self, obs: Observation, keep: int) -> Tensor:
        """The ``keep`` places of a layer's tokens that the next layer computes: ascending int64.

        obs: one event of one layer, with the queries of its recent tokens.
        """
        ...


def argument(
    default: Any,
    help: str,
    name: str | None = None,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    note: str = "",
    hashed: bool = True,
) -> Any:
    """A policy field and what ``kvserve policies`` and the JSON Schema say of it.

    ``name`` is what users call it where a method has taken that name (``trigger``). ``choices`` or
    the bounds ``least`` and ``most`` are what the policy checks; ``note`` adds what depends on
    other fields. A value that may be a mapping is not ``hashed``.
    """
    facts = {"help": help, "name": name, "choices": choices, "least": least, "most": most}
    return field(default=default, hash=hashed, metadata={**facts, "note": note})


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``PolicyError`` naming the argument unless ``ok``."""
    if not ok:
        raise PolicyError(f"{name} must be {allowed}, got {value!r}", name)


def exact_ratio(value: float | str | Fraction, name: str) -> Fraction:
    """A kept fraction as written: 0.07 is 7/100, not its binary neighbour; "3/10" works too."""
    try:
        ratio = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise PolicyError(f"{name} must be a number in (0, 1], got {value!r}", name) from None
    require(0 < ratio <= 1, name, value, "in (0, 1]")
    return ratio


def integers(policy: Any, **least: int) -> None:
    """Check that fields are ints (not bools) of at least the given size."""
    for name, minimum in least.items():
        value = getattr(policy, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        require(ok, name, value, f"an integer of at least {minimum}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Check an enumeration; 1 is not True."""
    values = tuple(allowed)
    ok = any(type(value) is type(each) and value == each for each in values)
    require(ok, name, value, " or ".join(map(str, values)))


def odd(name: str, value: object) -> None:
    """Check a pooling kernel."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1 and value % 2 == 1
    require(ok, name, value, "an odd integer of at least 1")


def number(name: str, value: object, least: float, most: float) -> None:
    """Check a float (not a bool, not NaN) in ``[least, most]``."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    require(ok, name, value, f"a number in [{least:g}, {most:g}]")


def field_names(policy: type[Any]) -> dict[str, str]:
    """Fields by the names that users call them."""
    return {f.metadata.get("name") or f.name: f.name for f in fields(policy)}
