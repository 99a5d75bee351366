"""The settings of a run: dataclasses, flags, TOML, layouts, presets, and sizes with units."""
