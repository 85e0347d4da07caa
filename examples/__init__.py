"""Generated problems and environments, which presets name like a user's."""
