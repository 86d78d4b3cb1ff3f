"""The command line: verbs, those that measure, types of their flags, the main job."""
