"""Generated programs as they are run: their base classes, saved directories, stages on torch's schedules."""
