"""Look at the figures that a module draws."""

from __future__ import annotations


def keep_axes(monkeypatch, module) -> list:
    """The axes of the figures that a module's `save` is given from now on, in order."""
    seen = []
    save = module.save

    def keep(figure, axes, *args, **kwargs):
        seen.append(axes)
        return save(figure, axes, *args, **kwargs)

    monkeypatch.setattr(module, "save", keep)
    return seen
