"""Generated programs at run time: base classes, saved directories, pipeline stages."""
