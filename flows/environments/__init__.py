"""The environments that committed presets name."""
