"""Compute what a cluster costs per hour, with list prices from the catalog or with the operator's own prices.

The file that DALSEGNO_PRICES names has the form of hardware/cloud_prices.csv. Its lines replace list prices, for
example with those of a savings plan or of another region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.hardware.catalog import CloudPrice, PriceBasis, cloud_prices, find_price, instances, parse_cloud_prices

PRICES = "DALSEGNO_PRICES"
HOURS_PER_MONTH = 730.0
_HEADER = "name,unit,usd,basis,date,source"
_UNITS = ("hour", "gib-month", "mbps-month")


@dataclass(frozen=True)
class CostLine:
    """The price of `count` resources of one kind. `usd_per_hour` is None if no price is known."""

    what: str
    count: float
    usd_per_hour: float | None  # price of all `count` resources together
    date: str = ""
    source: str = ""
    basis: PriceBasis = PriceBasis.LISTED


@dataclass(frozen=True)
class HourlyCost:
    """The price of all resources per hour. Resources without a known price are listed, never counted as free."""

    lines: tuple[CostLine, ...]

    @property
    def usd_per_hour(self) -> float:
        return sum(line.usd_per_hour or 0.0 for line in self.lines)

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(line.what for line in self.lines if line.usd_per_hour is None)

    def sentence(self) -> str:
        """Return a sentence with the total price and the date of the oldest price in it."""
        dates = [line.date for line in self.lines if line.usd_per_hour is not None and line.date]
        if not dates:
            return "costs are unknown: there is no price for any of these resources"
        more = f", without {', '.join(self.unknown)}" if self.unknown else ""
        guessed = any(line.usd_per_hour and line.basis is PriceBasis.ESTIMATE for line in self.lines)
        basis = " and estimates" if guessed else ""
        return f"costs about {self.usd_per_hour:,.2f} USD per hour, at list prices of {min(dates)}{basis}{more}"

    def details(self) -> list[str]:
        return [_detail(line) for line in self.lines]


def _detail(line: CostLine) -> str:
    count = f"{line.count:g} x {line.what}"
    if line.usd_per_hour is None:
        return f"{count}: price unknown"
    return f"{count}: {line.usd_per_hour:,.3f} USD per hour ({line.basis.value}: {line.source}, {line.date})"


class PriceTable:
    """The operator's own prices, and the catalog's prices for everything else."""

    def __init__(self, own: Sequence[CloudPrice] = ()) -> None:
        self._prices: dict[str, CloudPrice] = {**cloud_prices(), **{price.name: price for price in own}}

    def instance(self, name: str, count: float = 1) -> CostLine:
        """Return the price of machines of this type."""
        plain = name.removeprefix("ml.")
        own = self._prices.get(name) or self._prices.get(plain)
        if own is not None:
            return CostLine(name, count, own.usd * count, own.date, own.source, own.basis)
        known, listed = instances().get(plain), find_price(plain, "")
        if known is None or listed is None:
            return CostLine(name, count, None)
        return CostLine(name, count, listed.usd_per_gpu_hour * known.gpus * count, listed.date, listed.source)

    def resource(self, name: str, amount: float = 1, what: str = "") -> CostLine:
        """Return the price of another resource. Monthly prices are spread over the hours of a month."""
        found = self._prices.get(name)
        if found is None:
            return CostLine(what or name, amount, None)
        hourly = found.usd if found.unit == "hour" else found.usd / HOURS_PER_MONTH
        return CostLine(what or name, amount, hourly * amount, found.date, found.source, found.basis)


def read_prices(env: Mapping[str, str]) -> PriceTable:
    """Return the catalog's prices, replaced by those in the file that DALSEGNO_PRICES names."""
    name = env.get(PRICES, "")
    if not name:
        return PriceTable()
    hint = f"its first line is `{_HEADER}`, and a line is `p5.48xlarge,hour,31.46,listed,2026-11-18,our contract`"
    try:
        own = parse_cloud_prices(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"the price file {name} of {PRICES} cannot be read: {error}", hint=hint) from None
    if wrong := next((price for price in own if price.unit not in _UNITS or price.usd < 0), None):
        raise UsageError(f"{name}: `{wrong.name}` has the unit `{wrong.unit}` or a negative price", hint=hint)
    return PriceTable(own)
