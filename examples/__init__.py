"""Made-up problems and environments, which presets name as they would name a user's own."""
