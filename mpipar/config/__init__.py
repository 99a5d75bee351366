"""What a run is told: dataclasses, flags, TOML, layouts, presets, and sizes with their units."""
