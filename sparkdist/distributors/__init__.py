"""Thin front doors: each maps an API people know onto `Launcher`."""
