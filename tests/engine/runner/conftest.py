"""Fixtures of this folder: an engine on a device that runs nothing."""

from tests.meta_device import no_likenesses, on_a_device

__all__ = ["no_likenesses", "on_a_device"]
