"""Look at the figures that a module draws."""

from __future__ import annotations


def keep_axes(monkeypatch, module, seen: list | None = None) -> list:
    """The axes of the figures that a module's `save` is given from now on, in order.

    Args:
        seen: where those of another module are kept.
    """
    seen = [] if seen is None else seen
    save = module.save

    def keep(figure, axes, *args, **kwargs):
        seen.append(axes)
        return save(figure, axes, *args, **kwargs)

    monkeypatch.setattr(module, "save", keep)
    return seen
